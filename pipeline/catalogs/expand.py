"""What a catalog comes to today: every model that its entries name or find, asked for in bulk.

A Hub lists up to a thousand models in one call, with the commit that each is at. So sources and targets are asked for
by owner, and one by one only where a list would cost more than that. What a target was made from is in no list: its
last commit says it, which is one call for each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from operator import methodcaller
from typing import Any
from urllib.parse import quote

from reshard.pipeline.catalogs.definition import Catalog, CatalogEntry, Cut, Query, merged, named, request_for
from reshard.pipeline.errors import AccessError, BadCatalog, BadPlace, RequestTooLarge, ReshardError, TargetsCollide
from reshard.pipeline.limits import CATALOG_REQUESTS_MAX
from reshard.pipeline.places import AnyPlace, Hub, check_repo, repository
from reshard.pipeline.planning.build import request_key
from reshard.pipeline.protocols import Visibility, more_visible
from reshard.pipeline.publishing import history as publication
from reshard.pipeline.request import Request
from reshard.pipeline.sizes import parse_size
from reshard.pipeline.stores.answers import Collection, CollectionItem, ListedModel, ModelInfo
from reshard.pipeline.stores.connect import Context, open_target
from reshard.pipeline.stores.credentials import Use
from reshard.pipeline.stores.hub_api import HubApi
from reshard.pipeline.stores.refusal import Refusal, meaning
from reshard.pipeline.tensors import Pin

PAGE = 1000  # models; the most that the Hub lists in one call
NAMED = 3  # others that the error about a target names
LIST_FIELDS = ["sha", "private", "gated", "downloads", "tags", "library_name", "usedStorage"]


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model as a Hub lists it."""

    repo: str
    sha: str
    visibility: Visibility
    gated: bool
    bytes: int  # of all that it stores, its past included; 0 where the Hub does not say


@dataclass(frozen=True, slots=True)
class Wanted:
    """One model that the catalog wants, as things are now."""

    repo: str
    request: Request | None  # None when its template gives no target
    source: HubModel | None  # None when it is not there for us
    target: HubModel | None  # None when it is not there yet
    error: ReshardError | None = None  # why there can be no job


@dataclass(frozen=True, slots=True)
class Expansion:
    """What a catalog comes to."""

    models: list[Wanted]
    empty: list[int]  # numbers of the entries whose query finds nothing at all, from 0


def expand(catalog: Catalog, context: Context, use: Use = "write") -> Expansion:
    """Every model of the catalog once, in its order; raises the HubError and AccessError families.

    Its targets are looked up with the credentials for ``use``.

    What is wrong with one model is its own ``error``: not found, no target by its template, a target that two want, a
    credential that is not there or serves something else.
    """
    refused: list[Wanted] = []
    asked: dict[Request, str] = {}
    empty: list[int] = []
    held = 0
    for entry, repo in _models(catalog, context, empty):
        try:
            if entry.query is not None:
                check_repo(repo)  # a Hub's answer; what the file has may also name a Hub and a revision
            request = request_for(catalog, entry, repo)
            if request not in asked:
                held += len(request.stored())
            asked.setdefault(request, repo)
            if held > CATALOG_REQUESTS_MAX:
                why = f"the requests for its models exceed {CATALOG_REQUESTS_MAX:,} bytes"
                raise BadCatalog(file=catalog.name, line=1, key="entries", why=why, fix="split it into two catalogs")
        except (BadPlace, RequestTooLarge) as error:
            refused.append(Wanted(repo, None, None, None, error))
    sources = look_up([repository(request.source) for request in asked], context, "read")
    targets = look_up([repository(request.target) for request in asked], context, use)
    rivals: dict[str, list[Request]] = defaultdict(list)
    default = context.credentials.default_endpoint
    for request in asked:
        rivals[request.slot(default)].append(request)
    wanted = []
    for request, repo in asked.items():
        source, target = sources[request.source], targets[request.target]
        others = [str(rival.source) for rival in rivals[request.slot(default)][: NAMED + 1] if rival != request][:NAMED]
        found, there = (answer if isinstance(answer, HubModel) else None for answer in (source, target))
        errors = (
            source if isinstance(source, ReshardError) else None,
            target if isinstance(target, AccessError) else None,
            TargetsCollide(target=str(request.target), source=repo, others=", ".join(others)) if others else None,
            more_visible(request.target, there.visibility, request.source, found.visibility)
            if found and there and request.options.visibility != "public"
            else None,
        )
        wanted.append(Wanted(repo, request, found, there, next(filter(None, errors), None)))
    return Expansion(wanted + refused, empty)


def models_of(owner: str, context: Context) -> list[HubModel]:
    """Every model of a user or an organization that has a commit; raises the HubError and AccessError families."""
    api = context.api(Hub(repo=f"{owner}/any"), "read")
    with meaning(methodcaller("as_source", owner)):
        return [_listed(item) for item in _pages(api, {"author": owner}) if item.sha]


def stands(wanted: Wanted, context: Context) -> bool:
    """Whether the target's head is our commit of this very request: one call, where a job would need several.

    What no list shows (branches, pull requests, another repository's config) is not asked for. False also for a head
    that is not ours: a job finds out what was changed. Raises what is worth another try later: HubError's family.
    """
    request, source, head = wanted.request, wanted.source, wanted.target
    if wanted.error or request is None or source is None or head is None or head.repo != str(request.target.at(None)):
        return False
    options = request.options
    if options.force or options.pr or options.branch or options.config_from:
        return False
    try:
        target = open_target(request.target, options, context)
        commit = next(target.history(head.sha, None), None)
    except ReshardError as error:
        if error.retryable:
            raise
        return False  # a job will say what is wrong with this one, or find nothing wrong where it is carried out
    ours = publication.read(commit) if commit is not None and commit.id == head.sha else None
    pin = Pin(request.source.on(context.credentials.default_endpoint), str(request.source.at(None)), source.sha)
    return ours is not None and ours.request == request_key(request, pin, None, publication.address(target))


def interleaved(wanted: Iterable[Wanted]) -> list[Wanted]:
    """One of each target namespace in turn, so that a large one does not keep the others waiting."""
    queues: dict[str, list[Wanted]] = defaultdict(list)
    for one in wanted:
        queues[repository(one.request.target).namespace if one.request else ""].append(one)
    ranked = [(turn, one) for queue in queues.values() for turn, one in enumerate(queue)]
    return [one for _, one in sorted(ranked, key=lambda pair: pair[0])]


def _models(catalog: Catalog, context: Context, empty: list[int]) -> Iterator[tuple[CatalogEntry, str]]:
    """Each model with its entry; the numbers of entries that find none are added to ``empty``."""
    by_id = {repo for repo, _ in named(catalog)}
    for number, entry in enumerate(catalog.entries):
        if entry.repo is not None:
            yield entry, entry.repo
        elif entry.query is not None:
            cut = merged(catalog.defaults, entry)
            asked = entry.query.collection or entry.query.author or "a query"
            with meaning(methodcaller("as_source", asked)):
                found = list(islice(_found(entry.query, cut, context), entry.query.limit))
            empty += [] if found else [number]
            yield from ((entry, repo) for repo in found if repo not in by_id)


def _found(query: Query, cut: Cut, context: Context) -> Iterator[str]:
    """The models of a query, those with the most downloads first; of a collection, in its order. Raises Refusal."""
    owner = query.author or (query.collection or "").partition("/")[0]
    # A credential is for somebody's models, and a query for everybody's is not among them.
    place = Hub(repo=f"{owner or 'any'}/any", endpoint=cut.endpoint, credential=cut.credential if owner else None)
    api = context.api(place, "read")
    if query.collection is not None:
        for entry in api.data(Collection, "GET", f"/api/collections/{quote(query.collection)}").items:
            if entry.type == "model" and _fits(query, entry):
                yield entry.id
        return
    tags = [*query.tags, *filter(None, [query.library])]
    asked = {"author": query.author, "search": query.search, "filter": tags, "sort": "downloads", "direction": "-1"}
    for item in _pages(api, {name: value for name, value in asked.items() if value}):
        if query.min_downloads is not None and (item.downloads or 0) < query.min_downloads:
            return  # the rest has fewer
        if _fits(query, item):
            yield item.id


def _pages(api: HubApi, params: dict[str, Any]) -> Iterator[ListedModel]:
    return api.pages(list[ListedModel], "/api/models", params | {"expand": LIST_FIELDS, "limit": str(PAGE)})


def _fits(query: Query, item: ListedModel | CollectionItem) -> bool:
    stored = item.usedStorage or 0
    return (
        (query.name is None or fnmatchcase(item.id.partition("/")[2], query.name))
        and (query.min_size is None or stored >= parse_size(query.min_size))
        and (query.max_size is None or stored <= parse_size(query.max_size))
    )


def look_up(places: Iterable[Hub], context: Context, use: Use) -> dict[AnyPlace, HubModel | ReshardError | None]:
    """Each place as it is now; an error says why it is not there, and None that an owner's whole list has it not."""
    groups: dict[tuple[HubApi, str], dict[str, list[Hub]]] = defaultdict(lambda: defaultdict(list))
    found: dict[AnyPlace, HubModel | ReshardError | None] = {}
    for place in dict.fromkeys(places):
        try:
            groups[context.api(place, use), place.namespace][place.repo].append(place)
        except AccessError as error:
            found[place] = error
    for (api, owner), wanted in groups.items():
        listed, whole = _list_owner(api, owner, set(wanted)) if len(wanted) > 1 else ({}, False)
        for repo, same in wanted.items():
            for place in same:
                known = listed.get(repo) if place.revision is None else None
                # A source may have been renamed, which only asking for it shows; a target is made where there is none.
                absent = use == "write" and whole and repo not in listed
                found[place] = None if absent else known or _ask(api, place)
    return found


def _list_owner(api: HubApi, owner: str, wanted: set[str]) -> tuple[dict[str, HubModel], bool]:
    """Those of ``wanted`` that a list shows, and whether it was read to its end.

    It takes no more calls than asking for each would. Where no list is given, asking for each says why.
    """
    found: dict[str, HubModel] = {}
    most = PAGE * len(wanted)
    try:
        for count, item in enumerate(islice(_pages(api, {"author": owner}), most), 1):
            if item.id in wanted and item.sha is None:
                return found, False  # asking for it says what it is without a commit
            if item.id in wanted:
                found[item.id] = _listed(item)
            if count == most or len(found) == len(wanted):
                return found, False
    except Refusal:
        return found, False
    return found, True


def _ask(api: HubApi, place: Hub) -> HubModel | ReshardError:
    path = f"/api/models/{place.repo}/revision/{quote(place.branch, safe='')}"
    try:
        return _listed(api.data(ModelInfo, "GET", path, params={"expand": LIST_FIELDS}))
    except Refusal as refusal:
        return refusal.as_source(place.repo, place.revision)


def _listed(item: ListedModel | ModelInfo) -> HubModel:
    return HubModel(item.id, item.sha or "", item.visibility, bool(item.gated), item.usedStorage or 0)
