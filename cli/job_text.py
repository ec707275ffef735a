"""A job for people: how far it is and how it ended, whether it ran here or on the queue."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from shlex import join, quote

from reshard.cli.output import count, dated, human_bytes, lasted, lines, some
from reshard.client.facts import HELD, chosen, into, page, seconds_of, undoable
from reshard.client.models.jobs import Finished, Job, JobDone, JobNow, JobReport
from reshard.client.models.plans import Plan
from reshard.client.models.records import Check, Commit, Problem
from reshard.client.text import expected, figure
from reshard.pipeline.arguments import typed_options
from reshard.pipeline.errors import shortened
from reshard.pipeline.places import AnyPlace
from reshard.pipeline.request import Request
from reshard.pipeline.text import printable

FOUND = "the target was already up to date; nothing was published"
SHORT_ROWS = 6  # below the summary; --verbose has all

Rows = list[tuple[str, str]]


def ended(done: Finished | JobDone, request: Request, files: int, size: int, undo: Rows, verbose: bool = False) -> str:
    """The end of a job: its summary, and below it what else is worth a line; ``verbose``: all figures.

    ``size`` is in bytes; ``undo`` as ``undo_rows`` says it of the job's plan.
    """
    if verbose:
        rows = [*undo, moved(**dict(done.moved), verb=sent(request.target), exact=True), *map(check_row, done.checks)]
        rows += [("source", f"{HELD.get(how, how)}: {some(names)}") for how, names in done.source_bytes.items()]
        rows += _commit(done.published)
    else:
        rows = in_short(done, request.target, undo)
    return "\n".join([summary(done, request.target, files, size), *([lines(rows, indent="  ")] if rows else [])])


def summary(done: Finished | JobDone, target: AnyPlace, files: int, size: int) -> str:
    """In one line: where the result is, and what it took; ``size`` in bytes."""
    published = done.published
    where = printable(page(target, published.ref))
    if published.found and not (done.checks and size):
        commit = f", commit {published.commit[:12]}" if target.branch else ""
        return f"Nothing to do: {where} is up to date{commit} ({lasted(done.seconds)})"
    results = Counter(check.result for check in done.checks)
    passed = count(results.pop("passed", 0), "check")
    verb = "Wrote" if target.local else "Published"
    weights = [count(files, "file"), human_bytes(size)] if size else [f"{count(files, 'file')} unchanged"]
    figures = [*weights, f"{passed} passed"]
    figures += [f"{number} {result}" for result, number in results.items()]
    return f"{verb} {where}: {', '.join(figures)} ({lasted(done.seconds)})"


def undo_with(undo: str, only_last: bool) -> str:
    """What undoes a publication; a repository's history keeps the state before, a folder only the last one."""
    return f"undo with `reshard rollback {quote(undo)}`{' before the next run' if only_last else ''}"


def undo_rows(request: Request, plan: Plan) -> Rows:
    """How a job is undone that changed its own source, or deleted files of others."""
    undo = undoable(request)
    if undo is None or not (plan.changes_source or plan.pruned):
        return []
    deleted = f"{count(len(plan.pruned), 'file')} that reshard did not publish"
    what = ("changed", "the source itself") if plan.changes_source else ("deleted", deleted)
    return [(what[0], f"{what[1]}; {undo_with(undo, not request.target.branch)}")]


def in_short(done: Finished | JobDone, target: AnyPlace, undo: Rows) -> Rows:
    """What else is worth a line at the end of a job."""
    published, bytes_ = done.published, done.moved
    if published.found and not done.checks:  # nothing was done
        return []
    rows = [*undo]
    if target.branch:
        rows.append(("commit", f"{published.commit[:12]} on {published.ref}"))
        rows.append(moved(bytes_.read, bytes_.uploaded, bytes_.deduplicated))
    if done.source_bytes:
        rows.append(("source", _held({how: len(names) for how, names in done.source_bytes.items()})))
    # What passed tells nothing but what casts made infinite, and that comes first.
    left = [check for check in done.checks if check.name == "read back" and check.reason]
    left += [check for check in done.checks if check.result != "passed" and check not in left]
    return [*rows, *((check.name, f"{check.result}: {check.reason}") for check in left)][:SHORT_ROWS]


def _commit(published: Commit) -> Rows:
    label, ref = ("commit", f" on {published.ref}") if published.ref else ("digest", "")
    return [(label, f"{published.commit}{ref}")]


def undone(target: AnyPlace, commit: str, by: str, already: bool) -> str:
    """That ``commit`` of the target was undone; of a folder, which has none, that its last write was."""
    if already:
        what, how = (f"commit {commit} of ", f" with commit {by}") if target.branch else ("", "")
        return f"Nothing to do: {what}{printable(str(target))} was already rolled back{how}"
    if not target.branch:
        return f"Rolled back {printable(str(target))} to its state before reshard last wrote to it"
    return f"Rolled back commit {commit} of {target} with commit {by}"


def sent(target: AnyPlace) -> str:
    """What became of bytes that the target's store took."""
    return "wrote" if target.local else "uploaded"


def moved(
    read: int,
    uploaded: int,
    deduplicated: int,
    expected: int | None = None,
    verb: str = "uploaded",
    exact: bool = False,
) -> tuple[str, str]:
    """What moved, beside what a plan had expected; to the byte where it is ``exact``."""

    def size(number: int) -> str:
        return count(number, "byte") if exact else human_bytes(number)

    beside = [] if expected is None else [f"expected about {size(expected)}"]
    beside += [f"{size(deduplicated)} deduplicated"] if deduplicated else []
    more = f" ({', '.join(beside)})" if beside else ""
    return "moved", f"read {size(read)}, {verb} {size(uploaded)}{more}"


def check_row(check: Check, verbose: bool = True) -> tuple[str, str]:
    """One check for people: its name, and how it ended, at which level and why; ``verbose``: over how much, too."""
    figures = ", ".join(f"{name.replace('_', ' ')}: {figure(value)}" for name, value in check.figures.items())
    found = (f"{check.result} ({check.level})", check.reason, figures if verbose else "")
    return check.name, "; ".join(filter(None, found))


def checks_text(checks: Iterable[Check]) -> str:
    """Each check in a line, and each of its findings in one below it."""
    return "\n".join(": ".join(check_row(c)) + "".join(f"\n    {finding}" for finding in c.findings) for c in checks)


def options_text(request: Request) -> str:
    """The options that were given, as they are typed: ``--dtype bfloat16``."""
    return " ".join(shortened(join(typed_options([pair]))) for pair in chosen(request).items())


def describe(job: JobNow) -> Rows:
    request, published, checks = job.request, job.published, job.all_checks
    error = job.error.error() if job.error else None
    last = None if job.state.ended else job.last_error  # the record of one that ended keeps it, and its note
    return [
        ("job", job.id),
        ("state", now_text(job)),
        ("since", dated(job.since)),
        ("took", f"{took(job)}{'' if job.state.ended else ' so far'}"),
        ("source", str(request.source)),
        ("target", into(request)),
        ("size", f"at most {request.options.size:,} bytes per file"),
        *([("options", options)] if (options := options_text(request)) else []),
        ("submitted", f"{dated(job.created)} by {request.asked_by}"),
        *([("files", f"{job.shards_done:,} of {job.shards:,} stored")] if job.shards else []),
        *([moved(job.read, job.uploaded, job.deduplicated, job.expected, sent(request.target))] if job.read else []),
        *(("worker", f"{claim.worker}: {claim.unit} since {dated(claim.since)}") for claim in job.claims),
        *(("waiting", why) for why in (job.waits, job.note) if why and not job.state.ended),
        *([("last error", f"{last.message} ({_next_try(job, last)})")] if last else []),
        *([("error", f"{error.code}: {error}"), ("hint", error.next_step)] if error else []),
        *(("note", note) for note in job.notes),
        *([("source files", _held(published.attested))] if published and published.attested else []),
        *(check_row(check, verbose=False) for check in checks),
        *(_commit(published) if published else []),
        # A commit that was found after checks is the job's own, whose answer was lost.
        *([("note", FOUND)] if published and published.found and not checks else []),
        ("location", page(request.target, published.ref if published else "")),
        *([("rolled back", f"by commit {job.rolled_back}")] if job.rolled_back else []),
    ]


def _next_try(job: Job, trouble: Problem) -> str:
    """When what failed last is done again."""
    left = trouble.facts.get("retry_at", 0.0) - time.time()
    if job.claims or left <= 0:
        return "retrying"
    return f"retrying in {lasted(left)}; to retry now, run `reshard cancel {job.id}` and `reshard retry {job.id}`"


def _held(files: Mapping[str, int]) -> str:
    """How many files of the source were checked how: ``4 files, sha256 verified; 1 file, no upstream hash``."""
    return "; ".join(f"{count(number, 'file')}, {HELD.get(how, how)}" for how, number in files.items())


def report_text(report: JobReport) -> str:
    text = [checks_text(report.checks)] if report.checks else []
    text += [f"source files: {_held(report.attested)}"] if report.attested else []
    text += [f"{report.error.code}: {report.error.error()}"] if report.error else []
    return "\n".join([*text, f"Job {report.id} ({report.state}): {report.result}"])


def took(job: Job) -> str:
    """How long it has been at work."""
    return lasted(seconds_of(job))


def now_text(job: JobNow) -> str:
    """Its state, and when it begins or has copied all."""
    return ", ".join(filter(None, (progress_text(job), expected(job))))


def progress_text(job: Job) -> str:
    if job.state == "copying" and job.bytes:
        return f"copying {job.bytes_done * 100 // job.bytes}% of {human_bytes(job.bytes)}"
    return job.state.replace("_", " ")
