"""What a catalog or a schedule would submit now; nothing is queued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.client.models.catalogs import CatalogChecked, CatalogEntry, CatalogWrong, WouldSubmit
from reshard.pipeline.catalogs.definition import Catalog
from reshard.pipeline.catalogs.expand import Wanted, expand, stands
from reshard.pipeline.doctor.probes import unwritable
from reshard.pipeline.errors import ReshardError
from reshard.pipeline.places import repository
from reshard.pipeline.planning.model import weight_files
from reshard.pipeline.request import Request
from reshard.pipeline.reshard import draft, source_of
from reshard.pipeline.stores.connect import Context, open_target
from reshard.pipeline.stores.observed import Call

if TYPE_CHECKING:
    from reshard.worker.followers.records import Standing

# How each model of a catalog stands against the last job that carried it out; None where nobody knows.
Standings = Callable[[str, Sequence[Wanted]], "Sequence[Standing] | None"]


def of_request(request: Request, context: Context) -> WouldSubmit:
    """What a job would write, unless the target has it; raises what planning does."""
    plan = draft(request, source_of(request, context), open_target(request.target, request.options, context))
    return WouldSubmit(
        source=str(request.source),
        target=str(request.target),
        published=plan.published,
        files=weight_files(plan),
        bytes=sum(shard.size for shard in plan.shards),
    )


def of_catalog(
    parsed: Catalog,
    context: Context,
    standings: Standings,
    closely: int = 0,
    allow: Callable[[Request], None] = lambda request: None,
) -> CatalogChecked:
    """What a catalog comes to now; raises the HubError and AccessError families.

    Of up to ``closely`` models, each target of which the broker knows nothing is also asked whether it stands, as by
    control. What ``allow`` refuses is wrong.
    """
    calls: list[Call] = []
    context = replace(context, observe=calls.append)
    found = expand(parsed, context)
    wanted = [_allowed(one, allow) for one in found.models]
    ready = [one for one in wanted if one.error is None]
    # A pull request may be anybody's.
    written = [one.request.target for one in ready if one.request and not one.request.options.pr]
    known = standings(parsed.name, wanted)
    every = list(zip(wanted, known or ["unknown"] * len(wanted), strict=True))
    if len(wanted) <= closely:
        every = [(one, "unchanged" if how == "unknown" and stands(one, context) else how) for one, how in every]
    # Of the sources that may be written: a target that is there already may be rewritten as a whole.
    growth = [one.source.bytes for one, stand in every if one.source and not one.error and stand != "unchanged"]
    return CatalogChecked(
        name=parsed.name,
        models=len(wanted),
        empty=list(found.empty),
        unwritable=list(unwritable(map(repository, written), context)),
        ready=len(ready),
        new=sum(one.target is None for one in ready),
        gated=[one.repo for one in wanted if one.source and one.source.gated],
        bytes=sum(one.source.bytes for one in ready if one.source),
        growth=sum(growth),
        calls=len(calls),
        unchanged=None if known is None else sum(stand == "unchanged" for _, stand in every),
        drift=None if known is None else [one.repo for one, stand in every if stand == "target"],
        wrong=[CatalogWrong(repo=one.repo, **one.error.to_dict()) for one in wanted if one.error],
        entries=[_entry(one, stand) for one, stand in every],
    )


def _allowed(one: Wanted, allow: Callable[[Request], None]) -> Wanted:
    """It, or of what is refused no more than that."""
    try:
        if one.request is not None:
            allow(one.request)
    except ReshardError as error:
        return replace(one, source=None, target=None, error=error)
    return one


def _entry(one: Wanted, standing: str) -> CatalogEntry:
    return CatalogEntry(
        repo=one.repo,
        target=str(one.request.target) if one.request else None,
        commit=one.source.sha if one.source else None,
        bytes=one.source.bytes if one.source else None,
        exists=one.target is not None,
        standing=standing,
        error=one.error.code if one.error else None,
    )
