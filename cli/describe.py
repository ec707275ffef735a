"""A plan as facts and as text. The facts are what --json writes, and the text says nothing that they do not hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from reshard.cli.output import count
from reshard.pipeline.plan import Plan, Shard
from reshard.pipeline.request import Request

# Lines; a person reads the first and the last files of a long plan, and a script reads --json.
FILES_SHOWN = 40
NAMES_SHOWN = 8


def plan_facts(request: Request, plan: Plan) -> dict[str, Any]:
    """Everything that will be written, carried, deleted and kept; sizes in bytes."""
    return {
        "source": str(plan.pin),
        "target": str(request.target),
        "commit": plan.pin.commit,
        "base": plan.base,
        "digest": plan.digest,
        "size": plan.options.size,
        "tensors": sum(len(s.entries) for s in plan.shards),
        "bytes_read": sum(f.size for f in plan.files),
        "bytes_written": sum(s.size for s in plan.shards),
        "reads": [{"path": f.path, "size": f.size} for f in plan.files],
        "files": [_file(s, plan.options.size) for s in plan.shards],
        "indexes": [o.index.path for o in plan.outputs if o.index],
        "groups": [{"files": len(g.shards), "bytes": sum(plan.shards[i].size for i in g.shards)} for g in plan.groups],
        "carried": [{"path": f.path, "size": f.size} for f in plan.carried],
        "left_out": [{"path": path, "why": why} for path, why in plan.left_out],
        "deletes": list(plan.deletes),
        "kept": list(plan.kept),
        "notes": list(plan.notes),
    }


def _file(shard: Shard, limit: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"path": shard.path, "size": shard.size, "tensors": len(shard.entries)}
    if shard.size > limit:
        facts["oversize"] = shard.entries[0].name
    return facts


def plan_text(facts: dict[str, Any]) -> RenderableType:
    files = facts["files"]
    head = Text(f"{facts['source']} -> {facts['target']}, files of at most {facts['size']:,} bytes\n")
    head.append(
        f"{count(facts['tensors'], 'tensor')}, {facts['bytes_read']:,} bytes in {count(len(facts['reads']), 'file')}"
        f" -> {facts['bytes_written']:,} bytes in {count(len(files), 'file')}"
    )
    if len(facts["groups"]) > 1:
        head.append(f", copied in {count(len(facts['groups']), 'group')}")
    rest = [
        *(f"index    {path}" for path in facts["indexes"]),
        *_names("carried", [c["path"] for c in facts["carried"]]),
        *(f"left out {left['path']}: {left['why']}" for left in facts["left_out"]),
        *_names("deletes", facts["deletes"]),
        *_names("keeps", facts["kept"]),
        *(f"note     {note}" for note in facts["notes"]),
    ]
    return Group(head, _files(files), Text("\n".join(rest)))


def _files(files: Sequence[dict[str, Any]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    hidden = len(files) - FILES_SHOWN
    for number, file in enumerate(files):
        if hidden > 0 and number == FILES_SHOWN - 1:
            table.add_row("  ...", "", "", f"{hidden:,} more; --json lists them all")
        if hidden > 0 and FILES_SHOWN - 1 <= number < len(files) - 1:
            continue
        alone = f"{file['oversize']} alone exceeds the size: a file of its own" if "oversize" in file else ""
        table.add_row(f"  {file['path']}", f"{file['size']:,} bytes", count(file["tensors"], "tensor"), alone)
    return table


def _names(what: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    shown = ", ".join(names[:NAMES_SHOWN])
    more = len(names) - NAMES_SHOWN
    return [f"{what:8} {count(len(names), 'file')}: {shown}" + (f" and {more:,} more" if more > 0 else "")]
