"""From a place that a person typed to a store: with which token, over which transport, within which limits."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from reshard.pipeline.errors import BadSetting, BadSize, EndpointNotAllowed
from reshard.pipeline.limits import MEMORY_FLOOR, MEMORY_FLOOR_XET
from reshard.pipeline.paths import state_dir
from reshard.pipeline.places import AnyPlace, Hub, require_branches
from reshard.pipeline.protocols import Source, Target
from reshard.pipeline.request import Options, Transport
from reshard.pipeline.sizes import parse_size
from reshard.pipeline.stores.credentials import Credentials, Use
from reshard.pipeline.stores.pace import RateLimiter, Waits
from reshard.pipeline.stores.scratch import ScratchSpace

if TYPE_CHECKING:
    from reshard.pipeline.stores.hub_api import HubApi
    from reshard.pipeline.stores.observed import Observe
    from reshard.pipeline.stores.overlay import Meter

UNNAMED_BUILDER = "urn:reshard:builder:unnamed"  # where nobody said who builds
RateLimiterOf = Callable[[str], RateLimiter]


class ConnectSettings(BaseSettings):
    """What RESHARD_TMPDIR, RESHARD_MEMORY_LIMIT and others say of a Context; sizes as ``512MB``."""

    model_config = SettingsConfigDict(env_prefix="RESHARD_", extra="ignore")

    tmpdir: Path = Field(default_factory=lambda: Path(tempfile.gettempdir()))
    memory_limit: int = MEMORY_FLOOR_XET
    disk_limit: int | None = None
    sign_keys: Path | None = None
    builder_id: str = UNNAMED_BUILDER

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
    limiters: dict[str, RateLimiter] = {}
    waits = Waits(tell)
    return lambda budget: limiters.setdefault(budget, RateLimiter(waits))


@dataclass(frozen=True)
class Context:
    """What a process brings to every job: tokens, limits, and rate limits.

    ``limiters`` gives the RateLimiter for one budget, which is named by an endpoint and a digest of the credential.
    ``endpoints`` are the Hubs that may be called, beside whatever their answers lead to (network.py); None: any.
    ``state_dir`` is where a run notes what it has copied. ``observe`` is told of each call to a Hub, ``meter`` of
    what is read of sources.
    """

    credentials: Credentials
    tmpdir: Path
    memory_limit: int  # bytes
    disk_limit: int | None = None  # bytes; None: what the disk has
    sign_keys: Path | None = None  # the folder of keys that requests name
    builder_id: str = UNNAMED_BUILDER  # what signed statements call whoever made the result: a URI
    limiters: RateLimiterOf = field(default_factory=own_limiters)
    endpoints: frozenset[str] | None = None
    state_dir: Path = field(default_factory=state_dir)
    observe: Observe | None = None
    meter: Meter | None = None
    _apis: dict[tuple[str, str], HubApi] = field(default_factory=dict, repr=False)

    @classmethod
    def from_env(cls, limiters: RateLimiterOf | None = None) -> Context:
        """Read from the environment, now; raises BadSetting, BadCredentials."""
        settings = ConnectSettings().model_dump()
        return cls(Credentials.from_env(), limiters=limiters or own_limiters(), **settings)

    @cached_property
    def disk(self) -> ScratchSpace:
        return ScratchSpace(self.tmpdir, self.disk_limit)

    def api(self, place: Hub, use: Use) -> HubApi:
        """The Hub of ``place``, with the credential that it names, or the one for its namespace.

        Connections are shared. Raises EndpointNotAllowed, BadCredentials, CredentialUnknown, CredentialScope.
        """
        endpoint = place.on(self.credentials.default_endpoint)
        if self.endpoints is not None and endpoint not in self.endpoints:
            raise EndpointNotAllowed(endpoint=endpoint, allowed=", ".join(sorted(self.endpoints)) or "none")
        credential = self.credentials.find(endpoint, place.namespace, use, place.credential)
        identity = credential.id if credential else "anonymous"
        api = self._apis.get((endpoint, identity))
        if api is None:
            from reshard.pipeline.stores.hub_api import HubApi  # with an HTTP client, which folders do without

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
    place = place if revision_override is None else place.at(revision_override)
    source = cast("Source", import_module(place.store).open_source(place, context, transport, chosen))
    return source if context.meter is None else context.meter.source(source)


def open_target(place: AnyPlace, options: Options, context: Context) -> Target:
    """The target at ``place``; nothing is asked of it yet. Raises UsageError for what it has not."""
    if options.pr or options.branch:
        require_branches(place)
    return cast("Target", import_module(place.store).open_target(place, options, context))
