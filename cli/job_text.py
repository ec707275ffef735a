"""A job for people: how far it is and how it ended, whether it ran here or on the queue."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reshard.cli.output import count, dated, human_bytes, lasted, lines, some
from reshard.client.facts import into, page, seconds_of, undoable
from reshard.pipeline.errors import ReshardError
from reshard.pipeline.places import AnyTarget
from reshard.pipeline.request import Request

if TYPE_CHECKING:
    from reshard.client.models.jobs import JobReport
    from reshard.worker.queue.record import Job

# What the bytes of a source file were held against.
HELD = {"checked": "checked by sha256", "crc": "checked by CRC", "as delivered": "as delivered"}
FOUND = "the target had this already: nothing was done"
SHORT_ROWS = 6  # below the summary; --verbose has all

Checks = Sequence[Mapping[str, Any]]


def summary(
    target: AnyTarget, published: Mapping[str, Any], files: int, size: int, seconds: float, checks: Checks
) -> str:
    """The end of a job in one line: where the result is, and what it took; ``size`` in bytes.

    >>> from reshard.pipeline.places import Folder
    >>> summary(Folder(path="/out"), {"ref": "", "found": False}, 12, 2_070_000_000, 34, [{"result": "passed"}] * 5)
    'wrote /out: 12 files, 2.1 GB, 34 s, 5 checks passed'
    """
    where = page(target, published["ref"])
    if published["found"] and not checks:
        commit = f", commit {published['commit'][:12]}" if target.branch else ""
        return f"nothing to do: {where} has this already{commit}, {lasted(seconds)}"
    results = Counter(check["result"] for check in checks)
    passed = count(results.pop("passed", 0), "check")
    done = "wrote" if target.local else "published"
    figures = [count(files, "file"), human_bytes(size), lasted(seconds), f"{passed} passed"]
    return f"{done} {where}: {', '.join([*figures, *(f'{number} {result}' for result, number in results.items())])}"


def brings_back(undo: str, only_last: bool) -> str:
    """What undoes a publication; a repository's history keeps the state before, a folder only the last one."""
    return f"`reshard rollback {undo}` brings it back{' until the next run' if only_last else ''}"


def undo_rows(request: Request, changes_source: bool) -> list[tuple[str, str]]:
    """How a job is undone that changed what others had put into its own source, as rows of label and text."""
    undo = undoable(request) if changes_source else None
    return [("undo", f"the source itself was changed; {brings_back(undo, not request.target.branch)}")] if undo else []


def in_short(
    target: AnyTarget,
    published: Mapping[str, Any],
    moved: tuple[int, int, int],
    bytes_: Mapping[str, Sequence[str]],
    checks: Checks,
    undo: Sequence[tuple[str, str]] = (),
) -> list[tuple[str, str]]:
    """What else is worth a line at the end of a job, as rows of label and text.

    ``moved`` are the bytes of weights that were read, sent, and found in the target's store.
    """
    if published["found"] and not checks:  # nothing was done
        return []
    rows = [*undo]
    if target.branch:
        read, sent, there = map(human_bytes, moved)
        rows.append(("commit", f"{published['commit'][:12]} on {published['ref']}"))
        rows.append(("moved", f"read {read}, sent {sent}" + (f", {there} were there" if moved[2] else "")))
    if bytes_:
        rows.append(
            ("source", ", ".join(f"{count(len(files), 'file')} {HELD.get(how, how)}" for how, files in bytes_.items()))
        )
    # What passed tells nothing but what casts made infinite, and that comes first.
    left = [check for check in checks if check["name"] == "read back" and check["reason"]]
    left += [check for check in checks if check["result"] != "passed" and check not in left]
    return [*rows, *((check["name"], f"{check['result']}: {check['reason']}") for check in left)][:SHORT_ROWS]


def ended(head: str, rows: Sequence[tuple[str, str]]) -> str:
    """The summary of a job's end, and below it the rows."""
    return "\n".join([head, *([lines(rows, indent="  ")] if rows else [])])


def outcome(
    checks: Iterable[Mapping[str, Any]], bytes_: Mapping[str, Sequence[str]], published: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """The end of a job with all figures, as rows of label and text; as much of it as there is."""
    rows = [check_row(check) for check in checks]
    rows += [("source bytes", f"{how}: {some(files)}") for how, files in bytes_.items()]
    if published:
        label, ref = ("commit", f" on {published['ref']}") if published["ref"] else ("digest", "")
        rows.append((label, f"{published['commit']}{ref}"))
    return rows


def undone(target: AnyTarget, commit: str, by: str) -> str:
    """That ``commit`` of the target was undone; of a folder, which has none, what it is now."""
    if not target.branch:
        return f"{target} is as it was before what reshard last wrote to it"
    return f"commit {commit} of {target} is undone by {by}"


def sent(target: AnyTarget) -> str:
    """What became of bytes that the target's store took."""
    return "wrote" if target.local else "uploaded"


def moved(
    read: int, uploaded: int, deduplicated: int, expected: int | None = None, verb: str = "uploaded"
) -> tuple[str, str]:
    """What moved, in bytes, beside what a plan had expected."""
    about = "" if expected is None else f" of about {expected:,} expected"
    there = f", {deduplicated:,} were there already" if deduplicated else ""
    return "moved", f"read {read:,} bytes of weights, {verb} {uploaded:,}{about}{there}"


def check_row(check: Mapping[str, Any]) -> tuple[str, str]:
    """One check for people: its name, and how it ended, why and over how much."""
    figures = ", ".join(f"{name.replace('_', ' ')} {_figure(value)}" for name, value in check["figures"].items())
    return check["name"], "; ".join(filter(None, (f"{check['result']} ({check['level']})", check["reason"], figures)))


def checks_text(checks: Iterable[Mapping[str, Any]]) -> str:
    """Each check in a line, and each of its findings in one below it."""
    return "\n".join(": ".join(check_row(c)) + "".join(f"\n    {finding}" for finding in c["findings"]) for c in checks)


def describe(job: Job, waits: str | None = None) -> list[tuple[str, str]]:
    """A job for people, as rows of label and text."""
    request = job.request
    error = ReshardError.from_dict(job.error) if job.error else None
    return [
        ("job", job.id),
        ("state", f"{progress_text(job)}, since {dated(job.since)}"),
        ("took", f"{took(job)}{'' if job.state.ended else ' so far'}"),
        ("source", str(request.source)),
        ("target", into(request)),
        ("size", f"{request.options.size:,} bytes a file"),
        ("asked by", f"{request.asked_by}, {dated(job.created)}"),
        *([("files", f"{job.shards_done:,} of {job.shards:,} sealed")] if job.shards else []),
        *([moved(job.read, job.uploaded, job.deduplicated, job.expected, sent(request.target))] if job.read else []),
        *(("worker", f"{claim.worker} has {claim.unit} since {dated(claim.since)}") for claim in job.claims),
        *(("waits", why) for why in (waits, job.note) if why),
        *(
            ("trouble", f"{trouble['message']} ({_next_try(job, trouble)})")
            for trouble in (job.last_error,)
            if trouble and not error
        ),
        *([("error", f"{error.code}: {error}"), ("next", error.next_step)] if error else []),
        *(("note", note) for note in job.notes),
        *(("source bytes", text) for text in _attested(job.published)),
        *outcome(job.checks, {}, job.published or {}),
        # A commit that was found after checks is the job's own, whose answer was lost.
        *([("note", FOUND)] if job.published and job.published["found"] and not job.checks else []),
        ("where", page(request.target, (job.published or {}).get("ref", ""))),
        *([("undone by", job.rolled_back)] if job.rolled_back else []),
    ]


def _next_try(job: Job, trouble: Mapping[str, Any]) -> str:
    """When what failed last is done again."""
    left = trouble["facts"].get("retry_at", 0.0) - time.time()
    if job.claims or left <= 0:
        return "tried again"
    return f"tried again in {lasted(left)}; at once after `reshard cancel {job.id}` and `reshard retry {job.id}`"


def _attested(published: Mapping[str, Any] | None) -> list[str]:
    """How many files of the source were attested by what: ``checked: 4 files``."""
    return [f"{how}: {count(number, 'file')}" for how, number in (published or {}).get("attested", {}).items()]


def report_text(report: JobReport) -> str:
    """Every check with its findings below it."""
    text = [checks_text(check.document() for check in report.checks)] if report.checks else []
    text += [f"source bytes: {attested}" for attested in _attested({"attested": report.attested})]
    text += [f"{report.error.code}: {report.error.error()}"] if report.error else []
    return "\n".join([*text, f"job {report.id}, {report.state}: {report.result}"])


def took(job: Job) -> str:
    """How long it has been at work."""
    return lasted(seconds_of(job))


def progress_text(job: Job) -> str:
    if job.state == "copying" and job.bytes:
        return f"copying {job.bytes_done * 100 // job.bytes} % of {human_bytes(job.bytes)}"
    return job.state.replace("_", " ")


def _figure(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:.1f}" if isinstance(value, float) else str(value)
