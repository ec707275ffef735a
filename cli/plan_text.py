"""A plan for people: the text says nothing that its document (client/plan.py) does not hold."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple, TextIO

from reshard.cli.job_text import brings_back
from reshard.cli.output import Output, count, first, human_bytes, lines, some
from reshard.cli.progress import Bar
from reshard.client.models.jobs import PlanMade
from reshard.client.models.plans import Plan, Planned, Shard
from reshard.client.models.records import Needs
from reshard.pipeline.request import SINGLE


class Shown(NamedTuple):
    """How many lines of each kind are shown; a person reads the first and the last files of a long plan."""

    files: int = 40
    ties: int = 8
    notes: int = 10
    left_out: int = 20
    drift: int = 20
    names: int = 8  # on one line


ALL = "`reshard plan --all` shows them"
SHORT, WHOLE = Shown(), Shown(*[sys.maxsize] * len(Shown._fields))


def show_plan(plan: Plan, output: Output, bar: Bar) -> None:
    """The plan of a job on its way, before its end is known."""
    if output.json:
        output.document(PlanMade(plan=plan))
    if not plan.published:  # or else the end says all
        bar.say(plan_text(plan, stream=sys.stderr))


def plan_text(plan: Plan, most: Shown = SHORT, stream: TextIO | None = None) -> str:
    """The plan for people: figures first, then the files, then what becomes of the rest; laid out for ``stream``."""
    size = "one file" if plan.size == SINGLE else f"files of at most {plan.size:,} bytes"
    goes = f" -> {plan.into}" if plan.target else ""
    head = [f"{plan.source}{goes}, {size}"]
    if plan.published:
        return f"{head[0]}\nthe target has this already: nothing to do"
    files = plan.files
    came, goes = count(len(plan.reads), "file"), count(len(files), "file")
    groups = f", copied in {count(len(plan.groups), 'group')}" if len(plan.groups) > 1 else ""
    head.append(
        f"{count(plan.tensors, 'tensor')}, {plan.bytes_read:,} bytes in {came}"
        f" -> {plan.bytes_written:,} bytes in {goes}{groups}"
    )
    left_out = [f"{left.path}: {left.why}" for left in plan.left_out]
    rest = [
        ("moves", _moves(plan)),
        *_extremes(plan, most.ties),
        *(("index", path) for path in plan.indexes),
        *([("manifest", plan.manifest)] if plan.manifest else []),
        ("card", f"{plan.card}, with a block that says where the weights are from"),
        *_names("carried", [carried.path for carried in plan.carried], most.names),
        *(("edited", f"{path}: it follows --dtype") for path in plan.edited),
        *(("left out", left) for left in _first(left_out, most.left_out)),
        *_replaced(plan, most),
        *_names("keeps", plan.kept, most.names),
        *occupied(plan, most.names),
        *_drift(plan, most.drift),
        *(_needs(plan, plan.needs) if isinstance(plan, Planned) and plan.needs else []),
        *(("note", note) for note in _first(plan.notes, most.notes)),
    ]
    return "\n".join([*head, *([_files(files, most.files, stream)] if files else []), lines(rest, stream=stream)])


def _files(files: Sequence[Shard], most: int, stream: TextIO | None) -> str:
    rows = [_row(file) for file in files]
    if len(rows) > most:
        rows[most - 2 : -1] = [(f"... {len(rows) - most + 1:,} more, by `plan --all`", "", "", "")]
    return lines(rows, right={1, 2}, indent="  ", stream=stream)


def _row(file: Shard) -> tuple[str, str, str, str]:
    above = "above --size" if file.oversize else ""  # a note names the tensor
    return file.path, f"{file.size:,} bytes", count(file.tensors, "tensor"), above


def _moves(plan: Plan) -> str:
    """How many bytes of weights are expected to be read and sent, and by which transport."""
    source, target = plan.transports.source, plan.transports.target
    expected = plan.forecast
    times = f", {expected.amplification:.2f} times what is written" if expected.written else ""
    reads = f"reads {expected.read:,} bytes in {count(expected.reads, 'request')} ({source}){times}"
    if plan.target is None:
        return reads
    if target == "file":
        return f"{reads}, writes {expected.uploaded:,} bytes"
    if expected.at_most:
        return f"{reads}, uploads up to {expected.uploaded:,} bytes ({target or 'depends on deduplication'})"
    return f"{reads}, uploads about {expected.uploaded:,} bytes (xet) for {count(expected.seams, 'seam')}"


def _extremes(plan: Plan, most: int) -> list[tuple[str, str]]:
    """The largest file and tensor, and what is tied."""
    rows = []
    if largest := plan.largest:
        text = f"{largest.file.path}, {largest.file.size:,} bytes"
        if tensor := largest.tensor:
            text += f"; largest tensor: {tensor.name}, {tensor.size:,} bytes"
        rows.append(("largest", text))
    ties = []
    for tie in plan.ties:
        goes = "each is written" if tie.written == tie.names else f"{', '.join(tie.written)} is written"
        ties.append(f"{', '.join(tie.names)} are stored once; {goes}")
    return [*rows, *(("tied", tie) for tie in _first(ties, most))]


def _replaced(plan: Plan, most: Shown) -> list[tuple[str, str]]:
    """The target's files that are overwritten or deleted."""
    rows = []
    for label, deleted in (("overwrites", False), ("deletes", True)):
        files = [f"{f.path}, {f.size:,} bytes" for f in plan.replaced if f.deleted is deleted]
        rows += [(label, text) for text in _first(files, most.files)]
    return rows


def occupied(plan: Plan, most: int) -> list[tuple[str, str]]:
    """What of the target others put there, and what becomes of it."""
    if not plan.occupied:
        return []
    goes = "a pull request replaces it only when it is merged"
    if plan.undo is not None:
        goes = brings_back(plan.undo, plan.transports.target == "file")
    if plan.in_place:
        changed = some([file.path for file in plan.replaced], most)
        return [("warning", f"this changes the source itself ({changed}); {goes}")]
    if not plan.may_replace:
        goes = "a run refuses (exit code 7) unless --overwrite is given"
    what = f"{count(len(plan.occupied), 'file')} in the target that reshard did not publish for this source"
    return [("warning", f"{what}: {some(plan.occupied, most)}; {goes}")]


def _drift(plan: Plan, most: int) -> list[tuple[str, str]]:
    """What others changed in the target, and what becomes of it."""
    if not plan.drift:
        return []
    changed = count(len(plan.drift), "file")
    goes = "which is replaced" if plan.overwrite else "and a run refuses (exit code 7) unless --overwrite is given"
    warning = f"others changed {changed} of our last publication in the target, {goes}"
    return [("warning", warning), *(("drift", path) for path in _first(plan.drift, most))]


def _needs(plan: Planned, need: Needs) -> list[tuple[str, str]]:
    text = f"{human_bytes(need.memory)} of memory, {human_bytes(need.disk)} of disk for each copy"
    if need.target:
        text += f", {human_bytes(need.target)} beside the target"
    if need.api_calls:
        text += f", about {count(need.api_calls, 'call')} of the Hub and {need.resolver_calls:,} of its resolver"
    rows = [("needs", text)]
    if need.history:
        kept = f"{human_bytes(need.history)} of old weights stay in the target's history until it is squashed"
        rows.append(("history", kept))
    rows += [("licence", plan.licence)] if plan.licence else []
    return [*rows, *(("warning", warning) for warning in plan.warnings)]


def _first(rows: Sequence[str], most: int) -> list[str]:
    return first(rows, most, where=ALL)


def _names(label: str, names: Sequence[str], most: int) -> list[tuple[str, str]]:
    return [(label, f"{count(len(names), 'file')}: {some(names, most)}")] if names else []
