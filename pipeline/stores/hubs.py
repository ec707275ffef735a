"""Repositories as stores: over which transport, and with which token. Loaded where a job names a Hub."""

from __future__ import annotations

from typing import TypeVar

from reshard.pipeline.errors import MemoryLimit, UsageError
from reshard.pipeline.limits import MEMORY_FLOOR_XET
from reshard.pipeline.places import DEFAULT_BRANCH, Hub, is_pull_request
from reshard.pipeline.protocols import Source, Target
from reshard.pipeline.request import Options, Transport
from reshard.pipeline.stores.connect import Context
from reshard.pipeline.stores.http import HubSource
from reshard.pipeline.stores.hub_target import HubTarget, ObjectStore
from reshard.pipeline.stores.lfs import LfsSink
from reshard.pipeline.stores.refusal import meaning
from reshard.pipeline.stores.xet import XetSink, XetSource, installed, write_token_route

T = TypeVar("T")


def open_source(place: Hub, context: Context, transport: Transport, chosen: str) -> Source:
    api, memory = context.api(place, "read"), context.memory_limit
    source = HubSource.open(api, place)
    if "http" in (transport, chosen) or not _xet_here(memory, transport):
        return source
    xet = XetSource(api, place, source.pin.commit, source.visibility, memory)
    if chosen == "xet":
        return xet
    stored_so = any(file.xet for file in source.files().values())
    with meaning(lambda refusal: refusal.as_source(place.repo, place.revision)):
        offered = stored_so and api.kept_xet_token(xet.token_route) is not None
    if offered:
        return xet
    if transport == "xet" and not stored_so:
        return source  # nothing in it is stored that way, so there is nothing to insist on
    return _insist(source, transport, f"no Xet token from {api.endpoint} for {place}")


def open_target(place: Hub, options: Options, context: Context) -> Target:
    if options.branch and place.revision and options.branch != place.revision:
        raise UsageError(what=f"--branch {options.branch} and {place} name different branches")
    ref = options.branch or place.branch
    if options.pr and ref != DEFAULT_BRANCH:
        raise UsageError(what=f"a pull request always targets {DEFAULT_BRANCH}, not {ref}")
    proposes = options.pr or is_pull_request(ref)
    api, memory = context.api(place, "write"), context.memory_limit
    here = options.transport != "http" and _xet_here(memory, options.transport)

    def choose() -> ObjectStore:
        lfs = LfsSink(api, place.repo, context.disk, proposes)
        if not here:
            return lfs
        route = write_token_route(place.repo, ref, options.pr)
        with meaning(lambda refusal: refusal.as_target(place.repo, proposes)):
            if api.kept_xet_token(route) is not None:
                return XetSink(api, place.repo, route, memory, proposes)
        return _insist(lfs, options.transport, f"no Xet token from {api.endpoint} for {place}")

    return HubTarget(api, place, ref, choose, pull_request=options.pr)


def _xet_here(memory: int, transport: Transport) -> bool:
    """Whether this installation may speak Xet; raises MemoryLimit or UsageError when it must and cannot."""
    if memory < MEMORY_FLOOR_XET:
        if transport == "xet":
            raise MemoryLimit(what="--transport xet", needed=MEMORY_FLOOR_XET, limit=memory)
        return False
    return installed() or _insist(False, transport, "hf_xet is not installed or is disabled")


def _insist(fallback: T, transport: Transport, why_not: str) -> T:
    """``fallback``, unless Xet was asked for by name; raises UsageError then."""
    if transport == "xet":
        raise UsageError(what=f"--transport xet: {why_not}")
    return fallback
