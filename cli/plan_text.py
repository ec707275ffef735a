"""A plan for people: the text says nothing that its document (client/plan.py) does not hold."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from shlex import quote
from typing import NamedTuple, TextIO

from reshard.cli.job_text import undo_with
from reshard.cli.output import Output, count, first, human_bytes, lines, some
from reshard.cli.progress import Bar
from reshard.client.models.jobs import PlanMade
from reshard.client.models.plans import Plan, Planned, RankReads, Shard
from reshard.client.models.records import Needs
from reshard.pipeline.sizes import SINGLE
from reshard.pipeline.text import printable


class Shown(NamedTuple):
    """How many lines of each kind are shown; a person reads the first and the last files of a long plan."""

    files: int = 40
    ties: int = 8
    notes: int = 10
    left_out: int = 20
    drift: int = 20
    names: int = 8  # on one line
    ranks: int = 32


ALL = "use `reshard plan --all` to show them"
SHORT, WHOLE = Shown(), Shown(*[sys.maxsize] * len(Shown._fields))
SUMMARY = 8  # lines of a summary at most
SURPRISES = 3  # warnings and notes of a summary; where there are more, the last line counts the others
# How people call requests of a source's transport; a file of this machine takes none.
REQUESTS = {"xet": "Xet request", "http": "HTTP request", "file": ""}
AMPLIFIED = 1.05  # bytes read per byte written, from which on a plan says so
REFUSES = "a run will fail (exit code 7) unless you use --overwrite"


def show_plan(plan: Plan, output: Output, bar: Bar, verbose: bool) -> None:
    """The plan of a job on its way, before its end is known: its summary, or all of it."""
    if output.json:
        output.document(PlanMade(plan=plan))
    if not plan.published:  # or else the end says all
        bar.say(plan_text(plan, stream=sys.stderr) if verbose else summary_text(plan, sys.stderr))


def summary_text(plan: Plan, stream: TextIO | None = None) -> str:
    """A plan in eight lines at most: what goes where, how many files, what moves, and what may surprise."""
    deletes = sum(file.deleted for file in plan.replaced)
    target = [("overwrites", len(plan.replaced) - deletes), ("deletes", deletes)]
    copied = [f"{len(plan.carried):,} copied unchanged"] if plan.carried else []
    skipped = [f"{len(plan.left_out):,} skipped"] if plan.left_out else []
    surprises = [*occupied(plan, SHORT.names), *_drift(plan, 0), *(("note", note) for note in plan.notes)]
    rows = [
        ("weights", _weights(plan, human_bytes)),
        *([("other files", ", ".join([*copied, *skipped]))] if copied or skipped else []),
        *([("target", ", ".join(f"{verb} {count(n, 'file')}" for verb, n in target if n))] if plan.replaced else []),
        *([("ranks", _all_ranks(plan.ranks))] if plan.ranks else []),
        ("moves", _moves(plan)),
    ]
    if len(surprises) > (most := min(SURPRISES, SUMMARY - 1 - len(rows))):
        surprises[most - 1 :] = [("more", f"{count(len(surprises) - most + 1, 'note')}; use -v to show them")]
    return "\n".join([_head(plan), lines([*rows, *surprises], stream=stream)])


def plan_text(plan: Plan, most: Shown = SHORT, stream: TextIO | None = None) -> str:
    """The plan for people: figures first, then the files, then what becomes of the rest; laid out for ``stream``."""
    if plan.published:
        told = [f"{_head(plan)}\nNothing to do: the target is up to date"]
        notes = [("note", note) for note in _first(plan.notes, most.notes)]
        return "\n".join([*told, lines(notes, stream=stream)] if notes else told)
    files = plan.files
    groups = f", copied in {count(len(plan.groups), 'group')}" if len(plan.groups) > 1 else ""
    tensors = f"{count(plan.tensors, 'tensor')} in " if files else "weights "
    weights = f"{tensors}{_weights(plan, lambda size: count(size, 'byte'))}{groups}"
    skipped = [f"{left.path}: {left.why}" for left in plan.left_out]
    rest = [
        ("moves", _moves(plan)),
        *_extremes(plan, most.ties),
        *rank_rows(plan.ranks or [], most.ranks),
        *(("index", path) for path in plan.indexes),
        *([("manifest", plan.manifest)] if plan.manifest else []),
        ("card", f"{plan.card}, with a section that says where the weights came from"),
        *_names("copied", [carried.path for carried in plan.carried], most.names),
        *(("edited", f"{path}, to match --dtype") for path in plan.edited),
        *(("skipped", one) for one in _first(skipped, most.left_out)),
        *_replaced(plan, most),
        *_names("target", plan.kept, most.names, " left in place"),
        *occupied(plan, most.names),
        *_drift(plan, most.drift),
        *(_needs(plan, plan.needs) if isinstance(plan, Planned) and plan.needs else []),
        *(("note", note) for note in _first(plan.notes, most.notes)),
    ]
    shown = [_files(files, most.files, stream)] if files else []
    return "\n".join([_head(plan), weights, *shown, lines(rest, stream=stream)])


def _head(plan: Plan) -> str:
    return printable(f"{plan.source} -> {plan.into}" if plan.target else plan.source)


def _weights(plan: Plan, size: Callable[[int], str]) -> str:
    """The weight files before and after, and how large they may be."""
    if not plan.files:
        return "unchanged, already in the target"
    most = "" if plan.size == SINGLE else f", up to {plan.size:,} bytes each"
    return (
        f"{count(len(plan.reads), 'file')} ({size(plan.bytes_read)}) ->"
        f" {count(len(plan.files), 'file')} ({size(plan.bytes_written)}){most}"
    )


def _files(files: Sequence[Shard], most: int, stream: TextIO | None) -> str:
    # Which tensor makes a file too large is a note.
    rows = [
        (f.path, f"{f.size:,} bytes", count(f.tensors, "tensor"), "over --size" if f.oversize else "") for f in files
    ]
    if len(rows) > most:
        rows[most - 2 : -1] = [(f"... {len(rows) - most + 1:,} more; {ALL}", "", "", "")]
    return lines(rows, right={1, 2}, indent="  ", stream=stream)


def _moves(plan: Plan) -> str:
    """How many bytes of weights are expected to be read and sent, and by which transport."""
    source, target = plan.transports.source, plan.transports.target
    expected = plan.forecast
    noun = REQUESTS.get(source, f"{source} request")
    how = [count(expected.reads, noun)] if noun else []
    how += [f"{expected.amplification:.1f}x the output"] if expected.amplification >= AMPLIFIED else []
    by = f" ({', '.join(how)})" if how else ""
    reads = f"reads {human_bytes(expected.read)}{by}"
    if plan.target is None:
        return reads
    uploaded = human_bytes(expected.uploaded)
    if target == "file":
        return f"{reads}, writes {uploaded}"
    if expected.at_most:
        return f"{reads}, uploads up to {uploaded} (less if the Hub already has the data)"
    return f"{reads}, uploads about {uploaded}"


def _all_ranks(ranks: Sequence[RankReads]) -> str:
    sizes = sorted(rank.bytes for rank in ranks)
    each = " to ".join(dict.fromkeys(map(human_bytes, (sizes[0], sizes[-1]))))
    return f"{len(ranks)}, each reading {each}; use -v to show the files"


def rank_rows(ranks: Sequence[RankReads], most: int) -> list[tuple[str, str]]:
    """What each rank reads and needs, and the options of `hf download` for it."""
    rows = []
    for rank in ranks[:most]:
        includes = " ".join(f"--include {quote(pattern)}" for pattern in rank.patterns)
        reads = f"reads {count(rank.files, 'file')}, {human_bytes(rank.bytes)}, and needs {human_bytes(rank.needed)}"
        rows.append((f"rank {rank.rank}", f"{reads}: {includes}"))
    more = len(ranks) - most
    return [*rows, ("ranks", f"{more:,} more; {ALL}")] if more > 0 else rows


def _extremes(plan: Plan, most: int) -> list[tuple[str, str]]:
    rows = []
    if largest := plan.largest:
        text = f"{largest.file.path}, {largest.file.size:,} bytes"
        if tensor := largest.tensor:
            text += f"; largest tensor: {tensor.name}, {tensor.size:,} bytes"
        rows.append(("largest", text))
    ties = []
    for tie in plan.ties:
        goes = "each is written" if tie.written == tie.names else f"only {', '.join(tie.written)} is written"
        ties.append(f"{', '.join(tie.names)} share one copy in the source; {goes}")
    return [*rows, *(("tied", tie) for tie in _first(ties, most))]


def _replaced(plan: Plan, most: Shown) -> list[tuple[str, str]]:
    rows = []
    for label, deleted in (("overwrites", False), ("deletes", True)):
        files = [f"{f.path}, {f.size:,} bytes" for f in plan.replaced if f.deleted is deleted]
        rows += [(label, text) for text in _first(files, most.files)]
    return rows


def occupied(plan: Plan, most: int) -> list[tuple[str, str]]:
    """What of the target, or of a source in place, is not ours to replace, and what becomes of it."""
    goes = "nothing is replaced until the pull request is merged"
    if plan.undo is None and plan.into == plan.target:
        goes = "replaced files cannot be restored"
    elif plan.undo is not None:
        goes = undo_with(plan.undo, plan.transports.target == "file")
    if plan.in_place:
        changed = some([file.path for file in plan.replaced], most)
        return [("warning", f"this changes the source itself ({changed}); {goes}")] if plan.changes_source else []
    if not plan.occupied:
        what = f"{count(len(plan.pruned), 'file')} that reshard did not publish ({some(plan.pruned, most)})"
        return [("warning", f"this deletes {what}; {goes}")] if plan.pruned else []
    if not plan.may_replace:
        goes = f"{REFUSES} to replace them"
    what = f"{count(len(plan.occupied), 'file')} in the target that reshard did not publish from this source"
    return [("warning", f"{what}: {some(plan.occupied, most)}; {goes}")]


def _drift(plan: Plan, most: int) -> list[tuple[str, str]]:
    """What others changed in the target, and what becomes of it; ``most`` of the files."""
    if not plan.drift:
        return []
    goes = "they will be replaced" if plan.overwrite else f"{REFUSES} to replace them"
    warning = f"others changed {count(len(plan.drift), 'file')} in the target since reshard last published; {goes}"
    return [("warning", warning), *(("drift", path) for path in (_first(plan.drift, most) if most else ()))]


def _needs(plan: Planned, need: Needs) -> list[tuple[str, str]]:
    disk = f" and {human_bytes(need.disk)} of disk" if need.disk else ""
    text = f"{human_bytes(need.memory)} of memory{disk} per copy"
    if need.target:
        text += f", {human_bytes(need.target)} of disk for the target"
    if need.api_calls:
        text += f", about {count(need.api_calls, 'Hub API call')} and {count(need.resolver_calls, 'file request')}"
    rows = [("needs", text)]
    if need.history:
        kept = f"{human_bytes(need.history)} of old weights stay in the target's history until it is squashed"
        rows.append(("history", kept))
    rows += [("license", plan.licence)] if plan.licence else []
    return [*rows, *(("warning", warning) for warning in plan.warnings)]


def _first(rows: Sequence[str], most: int) -> list[str]:
    return first(rows, most, where=ALL)


def _names(label: str, names: Sequence[str], most: int, how: str = "") -> list[tuple[str, str]]:
    return [(label, f"{count(len(names), 'file')}{how}: {some(names, most)}")] if names else []
