"""From a place that a person typed to a store: with which token, over which transport, within which limits."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from reshard.pipeline.errors import BadSetting, BadSize, EndpointNotAllowed, MemoryLimit, UsageError
from reshard.pipeline.limits import MEMORY_FLOOR, MEMORY_FLOOR_XET
from reshard.pipeline.places import AnyPlace, Bucket, Folder, Hub, state_dir
from reshard.pipeline.protocols import Source, Target
from reshard.pipeline.request import DEFAULT_BRANCH, Options, Transport, branch_of, parse_size
from reshard.pipeline.stores.bucket import BucketSource
from reshard.pipeline.stores.credentials import Credentials, Use
from reshard.pipeline.stores.folder.source import FolderSource
from reshard.pipeline.stores.folder.target import FolderTarget
from reshard.pipeline.stores.http import HubSource
from reshard.pipeline.stores.hub_api import HubApi
from reshard.pipeline.stores.hub_target import HubTarget, ObjectStore
from reshard.pipeline.stores.lfs import LfsSink
from reshard.pipeline.stores.observed import Observe
from reshard.pipeline.stores.refusal import Refusal
from reshard.pipeline.stores.retry import LocalRateLimiter, RateLimiter, Waits
from reshard.pipeline.stores.scratch import ScratchSpace
from reshard.pipeline.stores.xet import XetSink, XetSource, installed, read_token_route, write_token_route

RateLimiterOf = Callable[[str], RateLimiter]
T = TypeVar("T")


class ConnectSettings(BaseSettings):
    """What RESHARD_TMPDIR, RESHARD_MEMORY_LIMIT and RESHARD_DISK_LIMIT say; sizes as ``512MB``."""

    model_config = SettingsConfigDict(env_prefix="RESHARD_", extra="ignore")

    tmpdir: Path = Field(default_factory=lambda: Path(tempfile.gettempdir()))
    memory_limit: int = MEMORY_FLOOR_XET
    disk_limit: int | None = None

    @field_validator("memory_limit", "disk_limit", mode="before")
    @classmethod
    def _size(cls, value: object, info: ValidationInfo) -> object:
        try:
            return parse_size(value) if isinstance(value, str) else value
        except BadSize as error:
            name = f"RESHARD_{(info.field_name or '').upper()}"
            raise BadSetting(name=name, value=value, why=error.facts["why"]) from error

    @field_validator("memory_limit")
    @classmethod
    def _enough(cls, value: int) -> int:
        if value < MEMORY_FLOOR:
            why = f"a copy needs at least {MEMORY_FLOOR:,} bytes"
            raise BadSetting(name="RESHARD_MEMORY_LIMIT", value=value, why=why)
        return value


def own_limiters(tell: Callable[[str], None] = lambda why: None) -> RateLimiterOf:
    """One limiter for each endpoint and credential, for the life of a context.

    ``tell`` hears why a call waits, and "" when that is over.
    """
    limiters: dict[str, LocalRateLimiter] = {}
    waits = Waits(tell)
    lock = threading.Lock()

    def limiter_of(budget: str) -> RateLimiter:
        with lock:
            return limiters.setdefault(budget, LocalRateLimiter(waits))

    return limiter_of


@dataclass(frozen=True)
class Context:
    """What a process brings to every job: tokens, limits, and rate limits.

    ``limiters`` gives the RateLimiter for one budget, which is named by an endpoint and a digest of the credential.
    ``endpoints`` are the Hubs that may be called, beside whatever their answers lead to (network.py); None: any.
    ``state_dir`` is where a run notes what it has copied. ``observe`` is told of each call to a Hub.
    """

    credentials: Credentials
    tmpdir: Path
    memory_limit: int  # bytes
    disk_limit: int | None = None  # bytes; None: what the disk has
    limiters: RateLimiterOf = field(default_factory=own_limiters)
    endpoints: frozenset[str] | None = None
    state_dir: Path = field(default_factory=state_dir)
    observe: Observe | None = None
    _apis: dict[tuple[str, str], HubApi] = field(default_factory=dict, repr=False)

    @classmethod
    def from_env(cls, limiters: RateLimiterOf | None = None) -> Context:
        """Read from the environment, now; raises BadSetting, BadCredentials."""
        settings = ConnectSettings()
        return cls(
            Credentials.from_env(),
            settings.tmpdir,
            settings.memory_limit,
            settings.disk_limit,
            limiters or own_limiters(),
        )

    @cached_property
    def disk(self) -> ScratchSpace:
        return ScratchSpace(self.tmpdir, self.disk_limit)

    def endpoint(self, place: Hub) -> str:
        return (place.endpoint or self.credentials.default_endpoint).rstrip("/")

    def api(self, place: Hub, use: Use) -> HubApi:
        """The Hub of ``place``, with the credential that it names, or the one for its namespace.

        Connections are shared. Raises EndpointNotAllowed, BadCredentials, CredentialUnknown, CredentialScope.
        """
        endpoint = self.endpoint(place)
        if self.endpoints is not None and endpoint not in self.endpoints:
            raise EndpointNotAllowed(endpoint=endpoint, allowed=", ".join(sorted(self.endpoints)) or "none")
        credential = self.credentials.find(endpoint, place.namespace, use, place.credential)
        identity = credential.id if credential else "anonymous"
        api = self._apis.get((endpoint, identity))
        if api is None:
            api = HubApi(endpoint, credential, self.limiters(f"{endpoint} {identity}"), self.observe)
            api = self._apis.setdefault((endpoint, identity), api)
        return api

    def reuse(self, former: Context) -> None:
        """Go on with the connections of a context that is no longer used."""
        for (endpoint, identity), api in former._apis.items():
            api.limiter, api.notes = self.limiters(f"{endpoint} {identity}"), []
            self._apis[endpoint, identity] = api

    def close(self) -> None:
        """End its connections; they are made again where it is used after all."""
        for api in self._apis.values():
            api.close()


def open_source(
    place: AnyPlace,
    context: Context,
    revision_override: str | None = None,
    transport: Transport = "auto",
    chosen: str = "",
) -> Source:
    """The source at ``place``, pinned to what it is now; raises the SourceError and AccessError families.

    ``revision_override`` is read instead of the place's own revision. ``chosen`` is the transport by which it was read
    when it was planned, which need not be found out again.
    """
    if isinstance(place, Folder):
        return FolderSource.open(place)
    if isinstance(place, Bucket):
        return BucketSource.open(place, context.limiters(place.url))
    if revision_override is not None:
        place = place.model_copy(update={"revision": revision_override})
    api = context.api(place, "read")
    source = HubSource.open(api, place)
    if "http" in (transport, chosen) or not _xet_here(context, transport):
        return source
    xet = XetSource(api, place, source.pin.commit, source.visibility, context.memory_limit)
    if chosen == "xet":
        return xet
    route = read_token_route(place.repo, source.pin.commit)
    stored_so = any(file.xet for file in source.files().values())
    try:
        offered = stored_so and api.xet_token(route) is not None
    except Refusal as refusal:
        raise refusal.as_source(place.repo, place.revision) from refusal
    if offered:
        return xet
    if transport == "xet" and not stored_so:
        return source  # nothing in it is stored that way, so there is nothing to insist on
    return _insist(source, transport, f"{api.endpoint} gives no Xet token for {place}")


def open_target(place: Hub | Folder, options: Options, context: Context) -> Target:
    """The target at ``place``; nothing is asked of it yet. Raises UsageError for what a folder has not."""
    if isinstance(place, Folder):
        if options.pr or options.branch:
            raise UsageError(what=f"{place} is a folder, which has neither branches nor pull requests")
        return FolderTarget(place)
    if options.branch and place.revision and options.branch != place.revision:
        raise UsageError(what=f"--branch {options.branch} and {place} name two branches")
    ref = branch_of(place, options)
    if options.pr and ref != DEFAULT_BRANCH:
        raise UsageError(what=f"a pull request goes to {DEFAULT_BRANCH}, not to {ref}")
    api = context.api(place, "write")
    here = options.transport != "http" and _xet_here(context, options.transport)

    def choose() -> ObjectStore:
        lfs = LfsSink(api, place.repo, context.disk)
        if not here:
            return lfs
        route = write_token_route(place.repo, ref, options.pr)
        try:
            if api.xet_token(route) is not None:
                return XetSink(api, place.repo, route, context.memory_limit)
        except Refusal as refusal:
            raise refusal.as_target(place.repo, options.pr) from refusal
        return _insist(lfs, options.transport, f"{api.endpoint} gives no Xet token for {place}")

    return HubTarget(api, place, ref, choose, pull_request=options.pr)


def _xet_here(context: Context, transport: Transport) -> bool:
    """Whether this installation may speak Xet; raises MemoryLimit or UsageError when it must and cannot."""
    if context.memory_limit < MEMORY_FLOOR_XET:
        if transport == "xet":
            raise MemoryLimit(what="--transport xet", needed=MEMORY_FLOOR_XET, limit=context.memory_limit)
        return False
    return installed() or _insist(False, transport, "hf_xet is not installed, or switched off")


def _insist(fallback: T, transport: Transport, why_not: str) -> T:
    """``fallback``, unless Xet was asked for by name; raises UsageError then."""
    if transport == "xet":
        raise UsageError(what=f"--transport xet: {why_not}")
    return fallback
