"""A plan for people: the text says nothing that its facts (client/plan.py) do not hold."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, TextIO

from reshard.cli.job_text import brings_back
from reshard.cli.output import Output, count, first, human_bytes, lines, some
from reshard.cli.progress import Bar
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


def show_plan(facts: dict[str, Any], output: Output, bar: Bar) -> None:
    """The plan of a job on its way, before its end is known."""
    if output.json:
        output.document({"plan": facts})
    if not facts["published"]:  # or else the end says all
        bar.say(plan_text(facts, stream=sys.stderr))


def plan_text(facts: dict[str, Any], most: Shown = SHORT, stream: TextIO | None = None) -> str:
    """The plan for people: figures first, then the files, then what becomes of the rest; laid out for ``stream``."""
    size = "one file" if facts["size"] == SINGLE else f"files of at most {facts['size']:,} bytes"
    goes = f" -> {facts['into']}" if facts["target"] else ""
    head = [f"{facts['source']}{goes}, {size}"]
    if facts["published"]:
        return f"{head[0]}\nthe target has this already: nothing to do"
    files = facts["files"]
    came, goes = count(len(facts["reads"]), "file"), count(len(files), "file")
    groups = f", copied in {count(len(facts['groups']), 'group')}" if len(facts["groups"]) > 1 else ""
    head.append(
        f"{count(facts['tensors'], 'tensor')}, {facts['bytes_read']:,} bytes in {came}"
        f" -> {facts['bytes_written']:,} bytes in {goes}{groups}"
    )
    left_out = [f"{left['path']}: {left['why']}" for left in facts["left_out"]]
    rest = [
        ("moves", _moves(facts)),
        *_extremes(facts, most.ties),
        *(("index", path) for path in facts["indexes"]),
        *([("manifest", facts["manifest"])] if facts["manifest"] else []),
        ("card", f"{facts['card']}, with a block that says where the weights are from"),
        *_names("carried", [carried["path"] for carried in facts["carried"]], most.names),
        *(("edited", f"{path}: it follows --dtype") for path in facts["edited"]),
        *(("left out", left) for left in _first(left_out, most.left_out)),
        *_replaced(facts, most),
        *_names("keeps", facts["kept"], most.names),
        *_occupied(facts, most.names),
        *_drift(facts, most.drift),
        *(_needs(facts) if "needs" in facts else []),
        *(("note", note) for note in _first(facts["notes"], most.notes)),
    ]
    return "\n".join([*head, *([_files(files, most.files, stream)] if files else []), lines(rest, stream=stream)])


def _files(files: Sequence[dict[str, Any]], most: int, stream: TextIO | None) -> str:
    rows = [_row(file) for file in files]
    if len(rows) > most:
        rows[most - 2 : -1] = [(f"... {len(rows) - most + 1:,} more, by `plan --all`", "", "", "")]
    return lines(rows, right={1, 2}, indent="  ", stream=stream)


def _row(file: dict[str, Any]) -> tuple[str, str, str, str]:
    above = "above --size" if "oversize" in file else ""  # a note names the tensor
    return file["path"], f"{file['size']:,} bytes", count(file["tensors"], "tensor"), above


def _moves(facts: dict[str, Any]) -> str:
    """How many bytes of weights are expected to be read and sent, and by which transport."""
    source, target = facts["transports"]["source"], facts["transports"]["target"]
    expected = facts["forecast"]
    times = f", {expected['amplification']:.2f} times what is written" if expected["written"] else ""
    reads = f"reads {expected['read']:,} bytes in {count(expected['reads'], 'request')} ({source}){times}"
    if facts["target"] is None:
        return reads
    if target == "file":
        return f"{reads}, writes {expected['uploaded']:,} bytes"
    if expected["at_most"]:
        return f"{reads}, uploads up to {expected['uploaded']:,} bytes ({target or 'depends on deduplication'})"
    return f"{reads}, uploads about {expected['uploaded']:,} bytes (xet) for {count(expected['seams'], 'seam')}"


def _extremes(facts: dict[str, Any], most: int) -> list[tuple[str, str]]:
    """The largest file and tensor, and what is tied."""
    rows = []
    if largest := facts["largest"]:
        text = f"{largest['file']['path']}, {largest['file']['size']:,} bytes"
        if tensor := largest["tensor"]:
            text += f"; largest tensor: {tensor['name']}, {tensor['size']:,} bytes"
        rows.append(("largest", text))
    ties = []
    for tie in facts["ties"]:
        goes = "each is written" if tie["written"] == tie["names"] else f"{', '.join(tie['written'])} is written"
        ties.append(f"{', '.join(tie['names'])} are stored once; {goes}")
    return [*rows, *(("tied", tie) for tie in _first(ties, most))]


def _replaced(facts: dict[str, Any], most: Shown) -> list[tuple[str, str]]:
    """The target's files that are overwritten or deleted."""
    rows = []
    for label, deleted in (("overwrites", False), ("deletes", True)):
        files = [f"{f['path']}, {f['size']:,} bytes" for f in facts["replaced"] if f["deleted"] is deleted]
        rows += [(label, text) for text in _first(files, most.files)]
    return rows


def _occupied(facts: dict[str, Any], most: int) -> list[tuple[str, str]]:
    """What of the target others put there, and what becomes of it."""
    if not facts["occupied"]:
        return []
    goes = "a pull request replaces it only when it is merged"
    if facts["undo"] is not None:
        goes = brings_back(facts["undo"], facts["transports"]["target"] == "file")
    if facts["in_place"]:
        changed = some([file["path"] for file in facts["replaced"]], most)
        return [("warning", f"this changes the source itself ({changed}); {goes}")]
    if not facts["may_replace"]:
        goes = "a run refuses (exit code 7) unless --overwrite is given"
    what = f"{count(len(facts['occupied']), 'file')} in the target that reshard did not publish for this source"
    return [("warning", f"{what}: {some(facts['occupied'], most)}; {goes}")]


def _drift(facts: dict[str, Any], most: int) -> list[tuple[str, str]]:
    """What others changed in the target, and what becomes of it."""
    if not facts["drift"]:
        return []
    changed = count(len(facts["drift"]), "file")
    goes = "which is replaced" if facts["overwrite"] else "and a run refuses (exit code 7) unless --overwrite is given"
    warning = f"others changed {changed} of our last publication in the target, {goes}"
    return [("warning", warning), *(("drift", path) for path in _first(facts["drift"], most))]


def _needs(facts: dict[str, Any]) -> list[tuple[str, str]]:
    need = facts["needs"]
    text = f"{human_bytes(need['memory'])} of memory, {human_bytes(need['disk'])} of disk for each copy"
    if need["target"]:
        text += f", {human_bytes(need['target'])} beside the target"
    if need["api_calls"]:
        text += f", about {count(need['api_calls'], 'call')} of the Hub and {need['resolver_calls']:,} of its resolver"
    rows = [("needs", text)]
    if need["history"]:
        kept = f"{human_bytes(need['history'])} of old weights stay in the target's history until it is squashed"
        rows.append(("history", kept))
    rows += [("licence", facts["licence"])] if facts["licence"] else []
    return [*rows, *(("warning", warning) for warning in facts["warnings"])]


def _first(rows: Sequence[str], most: int) -> list[str]:
    return first(rows, most, where=ALL)


def _names(label: str, names: Sequence[str], most: int) -> list[tuple[str, str]]:
    return [(label, f"{count(len(names), 'file')}: {some(names, most)}")] if names else []
