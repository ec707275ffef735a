"""What a worker's operator allows: which Hubs, targets, sources and folders a job may name.

A pattern is a namespace (`acme`), a repository (`acme/model`) or a glob over both (`acme/*-30MB`). Of buckets and
object stores it is a folder with all below it (`s3://acme/runs`), or a glob over URLs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from reshard.pipeline.errors import (
    BadPlace,
    EndpointNotAllowed,
    FolderNotAllowed,
    PublicNotAllowed,
    ReshardError,
    SourceNotAllowed,
    TargetNotAllowed,
    TokenMissing,
)
from reshard.pipeline.errors.base import GO_ON
from reshard.pipeline.paths import resolved
from reshard.pipeline.places import AnyPlace, Hub, check_repo, repository
from reshard.pipeline.protocols import Source
from reshard.pipeline.request import Request
from reshard.pipeline.stores.connect import Context
from reshard.pipeline.stores.credentials import Credentials
from reshard.pipeline.stores.refusal import Refusal
from reshard.worker.settings import Settings

ACCOUNT_AGE = 60.0  # seconds until an organisation is looked for that the token's owner may have joined meanwhile
_accounts: dict[tuple[str, str], tuple[float, list[str]]] = {}  # by endpoint and credential: when asked, and the answer


def check(request: Request, settings: Settings, own: Callable[[Hub], Iterable[str]]) -> None:
    """Raises what says that a place of ``request`` is not allowed: its Hub, its repository or its folder.

    ``own(target)`` names the namespaces of the token that would write there; it is asked only where no list is set.
    Raises BadPlace for what is not a repository: a client may not read requests as `reshard` does, and
    `us/../them/model` would be taken for ours. Raises SignKeyNotAllowed for a key that is named by its path.
    """
    check_sources(request, settings)
    _check_where(request.target, settings)
    if request.target.local:
        return
    if not request.target.branch:
        _check_url(str(request.target), settings.allowed_targets or (), TargetNotAllowed)
        return
    target = repository(request.target)
    allowed = settings.allowed_targets if settings.allowed_targets is not None else tuple(own(target))
    if not _matches(target.repo, allowed):
        # Or what it is set to would take away what nobody had to name before.
        whole = ",".join([*allowed, target.namespace])
        unset = f" (it is not set; set it to {whole})" if settings.allowed_targets is None else ""
        raise TargetNotAllowed(repo=target.repo, namespace=target.namespace, allowed=_said(allowed), unset=unset)


def check_sources(request: Request, settings: Settings) -> None:
    """The same of what ``request`` reads, whatever its target, which a plan need not have."""
    request.options.require_named_key()
    sources = [place for place in (request.source, request.options.config_from) if place is not None]
    for place in sources:
        _check_where(place, settings)
    for place in sources:
        name, allowed = str(place.at(None)), settings.allowed_sources
        if place.local is None and not place.branch:
            _check_url(name, allowed or (), SourceNotAllowed)
        elif place.branch and allowed is not None and not _matches(name, allowed):
            raise SourceNotAllowed(repo=name, allowed=_said(allowed))


def check_exposed(exposed: Source | None, settings: Settings) -> None:
    """Raises PublicNotAllowed where a request would show ``exposed`` to everyone, unless the operator allows that."""
    if exposed is not None and not settings.allow_public:
        raise PublicNotAllowed(source=str(exposed.place), visibility=exposed.visibility)


def endpoints(settings: Settings, credentials: Credentials) -> frozenset[str]:
    """The Hubs that a queue's jobs and catalogs may call: a name is one's own only on the Hub that gave it.

    >>> sorted(endpoints(Settings(), Credentials("https://hub.example")))
    ['https://hub.example']
    """
    if settings.allowed_endpoints is not None:
        return frozenset(endpoint.rstrip("/") for endpoint in settings.allowed_endpoints)
    return credentials.endpoints


def check_endpoint(endpoint: str | None, settings: Settings) -> None:
    """Raises EndpointNotAllowed by the list alone: without one, the worker's own environment decides.

    Who submits need not share that.
    """
    allowed = settings.allowed_endpoints
    if endpoint and allowed is not None and endpoint not in {one.rstrip("/") for one in allowed}:
        raise EndpointNotAllowed(endpoint=endpoint, allowed=_said(allowed))


def _check_where(place: AnyPlace, settings: Settings) -> None:
    """The folder or the Hub of ``place``."""
    if place.local:
        _check_folder(str(place), settings.allowed_folders)
    elif place.branch:
        check_repo(str(place.at(None)))
        check_endpoint(place.on(""), settings)


def _check_folder(path: str, allowed: Sequence[Path]) -> None:
    """Links are followed first, so that one inside an allowed folder leads nowhere else."""
    try:
        real: Path | None = resolved(path)
    except BadPlace:  # no folder that is allowed has such a name
        real = None
    if real is None or not any(real.is_relative_to(folder.resolve()) for folder in allowed):
        raise FolderNotAllowed(path=path, allowed=_said([str(folder) for folder in allowed]))


def _check_url(url: str, allowed: Sequence[str], error: type[ReshardError]) -> None:
    """The credentials are the worker's own, so it uses of object stores only what a pattern with `://` names."""
    patterns = [pattern.rstrip("/") for pattern in allowed if "://" in pattern]
    if not any(fnmatchcase(url, glob) for pattern in patterns for glob in (pattern, f"{pattern}/*")):
        raise error(repo=url, namespace=url, allowed=_said(patterns))


def _matches(repo: str, patterns: Iterable[str]) -> bool:
    """In any case, as on the Hub."""
    repo = repo.casefold()
    namespace = repo.partition("/")[0]
    return any(fnmatchcase(repo if "/" in pattern else namespace, pattern.casefold()) for pattern in patterns)


def _said(allowed: Sequence[str]) -> str:
    return ", ".join(allowed) if allowed else "none"


def namespaces(target: Hub, context: Context) -> list[str]:
    """The namespaces of the token that would write to ``target``: its owner's and its organisations'."""
    api = context.api(target, "write")
    if api.credential is None:
        raise TokenMissing(endpoint=api.endpoint, need=f"writing to {target}", sign_in=GO_ON["sign_in"][1])
    asked, names = _accounts.get((api.endpoint, api.credential.id), (float("-inf"), []))
    if not _matches(target.repo, names) and time.monotonic() - asked >= ACCOUNT_AGE:
        try:
            account = api.whoami()
        except Refusal as refusal:
            raise refusal.as_target(target.repo) from refusal
        names = [account.name, *(org.name for org in account.orgs)]
        _accounts[api.endpoint, api.credential.id] = time.monotonic(), names
    return names
