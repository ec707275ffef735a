"""A plan as data: what --json and the HTTP API say of it, and what all text about it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from reshard.client.facts import into, undoable
from reshard.pipeline.checkpoint.names import SETTINGS_SUFFIX
from reshard.pipeline.limits import CONFIG_MAX
from reshard.pipeline.places import NOWHERE
from reshard.pipeline.planning.estimate import Room, forecast, licence, needs, warnings
from reshard.pipeline.planning.model import CARD, MANIFEST, Plan, Shard
from reshard.pipeline.protocols import Source, Target
from reshard.pipeline.request import Request
from reshard.pipeline.reshard import draft, source_of
from reshard.pipeline.stores.connect import Context, open_target


class Looked(NamedTuple):
    """A plan that nobody has asked to carry out, with what it was made from."""

    facts: dict[str, Any]
    plan: Plan
    source: Source
    target: Target


def look(request: Request, context: Context) -> Looked:
    """What a job would do, and what it needs; changes nothing. Raises what planning does.

    With NOWHERE as its target it is only how the source would be cut.
    """
    source = source_of(request, context)
    target = open_target(request.target, request.options, context)
    plan = draft(request, source, target)
    facts, has_target = plan_facts(request, plan), request.target != NOWHERE
    if not has_target:
        facts |= {"target": None, "into": None, "undo": None, "transports": facts["transports"] | {"target": ""}}
    if not plan.published:
        facts |= needs_facts(plan, source, target if has_target else None, context)
    return Looked(facts, plan, source, target)


def plan_facts(request: Request, plan: Plan) -> dict[str, Any]:
    """Everything that will be written, carried, deleted and kept; sizes in bytes."""
    return {
        "source": str(plan.pin),
        "target": str(request.target),
        "into": into(request),
        "undo": undoable(request),
        "commit": plan.pin.commit,
        "base": plan.base,
        "digest": plan.digest,
        "published": plan.published,
        "size": plan.options.size,
        "tensors": sum(len(s.entries) for s in plan.shards),
        "bytes_read": sum(f.size for f in plan.files),
        "bytes_written": sum(s.size for s in plan.shards),
        "transports": plan.transports._asdict(),
        "forecast": forecast(plan).to_dict(),
        "reads": [{"path": f.path, "size": f.size} for f in plan.files],
        "files": [_file(s, plan.options.size) for s in plan.shards],
        "largest": _largest(plan.shards),
        "ties": _ties(plan),
        "indexes": [o.index.path for o in plan.outputs if o.index],
        "manifest": MANIFEST if plan.options.manifest and plan.shards else None,
        "groups": [{"files": len(g.shards), "bytes": sum(plan.shards[i].size for i in g.shards)} for g in plan.groups],
        "card": None if plan.published else CARD,
        "carried": [{"path": f.path, "size": f.size} for f in plan.carried],
        "edited": [edit.path for edit in plan.edits if not edit.path.endswith(SETTINGS_SUFFIX)],
        "left_out": [{"path": path, "why": why} for path, why in plan.left_out],
        "replaced": [{"path": f.path, "size": f.size, "deleted": f.path in plan.deletes} for f in plan.replaced],
        "overwrite": plan.options.overwrite,
        "in_place": plan.in_place,
        "may_replace": plan.options.overwrite or plan.options.pr or plan.in_place,
        **{name: list(getattr(plan, name)) for name in ("deletes", "kept", "drift", "occupied", "notes")},
    }


def needs_facts(plan: Plan, source: Source, target: Target | None, context: Context) -> dict[str, Any]:
    """What the job needs, of ``target`` where there is one, and what to think of before it runs."""
    before = target.at(plan.base).files() if target and plan.base else {}
    need = needs(plan, before)
    need = need if target else need._replace(target=0)
    card = source.files().get(CARD)
    text = None
    if card and plan.pin.named:
        head = b"".join(source.read(card, 0, min(card.size, CONFIG_MAX)))
        text = head.decode("utf-8-sig", "replace").replace("\r\n", "\n")
    scratch, free = Room(str(context.disk.path), context.disk.room()), target.room() if target else None
    room = Room(str(target.place), free) if target and free is not None else None
    warned = warnings(plan, need, source.visibility, text, scratch, room)
    return {"needs": need._asdict(), "licence": licence(text), "warnings": warned}


def _largest(shards: Sequence[Shard]) -> dict[str, Any] | None:
    if not shards:
        return None
    file = max(shards, key=lambda shard: shard.size)
    tensor = max((entry for shard in shards for entry in shard.entries), key=lambda entry: entry.size, default=None)
    sized = {"name": tensor.name, "size": tensor.size} if tensor else None
    return {"file": {"path": file.path, "size": file.size}, "tensor": sized}


def _ties(plan: Plan) -> list[dict[str, list[str]]]:
    """Names whose bytes the source stores once, and which of them are written."""
    written = {entry.name for shard in plan.shards for entry in shard.entries}
    ties = [tie for output in plan.outputs for tie in output.ties]
    return [{"names": list(tie), "written": [name for name in tie if name in written]} for tie in ties]


def _file(shard: Shard, limit: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"path": shard.path, "size": shard.size, "tensors": len(shard.entries)}
    if shard.size > limit:
        facts["oversize"] = shard.entries[0].name
    return facts
