"""A plan as data: what --json and the HTTP API say of it, and what all text about it is made of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from typing import Any, NamedTuple

from reshard.client.facts import into, undoable
from reshard.client.models import plans
from reshard.client.models.plans import Planned
from reshard.client.models.records import Named, Needs, Sized
from reshard.pipeline.checkpoint.names import SETTINGS_SUFFIX
from reshard.pipeline.drafting import drafted
from reshard.pipeline.limits import CONFIG_MAX
from reshard.pipeline.places import NOWHERE
from reshard.pipeline.planning.build import Known
from reshard.pipeline.planning.estimate import Room, forecast, needs, warnings
from reshard.pipeline.planning.front_matter import licence
from reshard.pipeline.planning.model import CARD, MANIFEST, Plan, Shard
from reshard.pipeline.planning.readers import Readers, Reads, patterns, reads, suffixes
from reshard.pipeline.protocols import Source, Target
from reshard.pipeline.request import Request
from reshard.pipeline.reshard import source_of
from reshard.pipeline.stores.connect import Context, open_target


class Looked(NamedTuple):
    """A plan that nobody has asked to carry out, with what it was made from."""

    document: Planned
    plan: Plan
    source: Source
    target: Target
    known: Known


def look(request: Request, context: Context) -> Looked:
    """What a job would do, and what it needs; changes nothing. Raises what planning does.

    With NOWHERE as its target it is only how the source would be cut.
    """
    source = source_of(request, context)
    target = open_target(request.target, request.options, context)
    plan, known = drafted(request, source, target)
    found, has_target = dict(document_of(request, plan)), request.target != NOWHERE
    if not has_target:
        sent = plans.Transports(source=plan.transports.source, target="")
        found |= {"target": None, "into": None, "undo": None, "transports": sent}
    if not plan.published:
        found |= _needs(plan, source, target if has_target else None, context)
    return Looked(Planned(**found), plan, source, target, known)


def document_of(request: Request, plan: Plan) -> plans.Plan:
    """Everything that will be written, carried, deleted and kept; sizes in bytes."""
    options = plan.options
    return plans.Plan.of(
        plan,
        source=str(plan.pin),
        target=str(request.target),
        into=into(request),
        undo=undoable(request),
        commit=plan.pin.commit,
        size=options.size,
        tensors=sum(len(s.entries) for s in plan.shards),
        bytes_read=sum(f.size for f in plan.read),
        bytes_written=sum(s.size for s in plan.shards),
        forecast=forecast(plan).to_dict(),
        reads=plan.read,
        files=[
            plans.Shard.of(s, tensors=len(s.entries), oversize=s.entries[0].name if alone else None)
            for s in plan.shards
            for alone in [s.size > options.size and len(s.entries) == 1]
        ],
        largest=_largest(plan.shards),
        ties=_ties(plan),
        indexes=[o.index.path for o in plan.outputs if o.index],
        manifest=MANIFEST if options.manifest and plan.shards else None,
        groups=[
            plans.Group(files=len(g.shards), bytes=sum(plan.shards[i].size for i in g.shards)) for g in plan.groups
        ],
        ranks=_ranks(plan),
        card=None if plan.published else CARD,
        edited=[edit.path for edit in plan.edits if not edit.path.endswith(SETTINGS_SUFFIX)],
        replaced=[plans.Replaced(path=f.path, size=f.size, deleted=f.path in plan.deletes) for f in plan.replaced],
        overwrite=options.overwrite,
        may_replace=options.overwrite or options.pr or plan.in_place,
    )


def _ranks(plan: Plan) -> list[plans.RankReads] | None:
    if not plan.options.ranks:
        return None
    readers = [who for output in plan.outputs for who in output.readers]  # of each shard, in their order
    files = {
        shard.path: (shard.size, [(who, shard.size - len(shard.header))])
        for shard, who in zip(plan.shards, readers, strict=True)
    }
    small = [CARD, MANIFEST, *(output.index.path for output in plan.outputs if output.index)]
    small += [file.path for file in plan.carried] + [edit.path for edit in plan.edits]
    return rank_reads(reads(files, Readers.of(plan.options.ranks).ranks), files.keys(), small)


def rank_reads(found: Iterable[Reads], weights: Set[str], small: Collection[str]) -> list[plans.RankReads]:
    """What each rank reads, with its patterns: for no other file of ``weights``, and for all that are ``small``."""
    return [
        plans.RankReads.of(
            one,
            files=len(one.files),
            patterns=[*patterns(one.files, others := weights - {*one.files}), *suffixes(small, others)],
        )
        for one in found
    ]


def _needs(plan: Plan, source: Source, target: Target | None, context: Context) -> dict[str, Any]:
    """What the job needs, of ``target`` where there is one, and what to think of before it runs."""
    before = target.at(plan.base).files() if target and plan.base else {}
    need = needs(plan, before)
    need = need if target else need._replace(target=0)
    need = need if target is None or target.place.keeps else need._replace(history=0)
    card = source.files().get(CARD)
    text = b"".join(source.read(card, 0, min(card.size, CONFIG_MAX))) if card and plan.pin.named else b""
    scratch, free = Room(str(context.disk.path), context.disk.room()), target.room() if target else None
    room = Room(str(target.place), free) if target and free is not None else None
    warned = warnings(plan, need, source.visibility, text, scratch, room)
    return {"needs": Needs.of(need), "licence": licence(text), "warnings": warned}


def _largest(shards: Sequence[Shard]) -> plans.Largest | None:
    if not shards:
        return None
    file = max(shards, key=lambda shard: shard.size)
    tensor = max((entry for shard in shards for entry in shard.entries), key=lambda entry: entry.size, default=None)
    return plans.Largest(file=Sized.of(file), tensor=Named.of(tensor) if tensor else None)


def _ties(plan: Plan) -> list[plans.Tie]:
    """Names whose bytes the source stores once, and which of them are written."""
    written = {entry.name for shard in plan.shards for entry in shard.entries}
    ties = [tie for output in plan.outputs for tie in output.ties]
    return [plans.Tie(names=list(tie), written=[name for name in tie if name in written]) for tie in ties]
