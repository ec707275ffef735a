"""A job for people: how far it is and how it ended, whether it ran here or on the queue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reshard.cli.output import ago, count, human_bytes, some
from reshard.pipeline.errors import CheckpointError, ProofError, ReshardError

if TYPE_CHECKING:
    from reshard.worker.queue.jobs import Job


def source_bytes(read: Iterable[str], attested: Mapping[str, str]) -> dict[str, list[str]]:
    """The source files by what their bytes were held against; without ``attested``, nothing but the transport."""
    levels: dict[str, list[str]] = {}
    for path in sorted({*read, *attested}):
        levels.setdefault(attested.get(path, "as delivered"), []).append(path)
    return levels


def outcome(
    target: str, checks: Iterable[Mapping[str, Any]], bytes_: Mapping[str, Sequence[str]], published: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """The end of a job for people, as rows of label and text; as much of it as there is."""
    rows = [check_row(check) for check in checks]
    idle = not rows  # a commit that was found after checks is the job's own, whose answer was lost
    rows += [("source bytes", f"{how}: {some(files)}") for how, files in bytes_.items()]
    if published:
        ref = f", {published['ref']}" if published["ref"] else ""
        found = " was there already: nothing was done" if published["found"] and idle else ""
        rows.append(("commit", f"{published['commit']}{ref}{found}"))
    return [*rows, ("where", target)]


def moved(read: int, uploaded: int, deduplicated: int, expected: int | None = None) -> tuple[str, str]:
    """What moved, in bytes, beside what a plan had expected."""
    about = "" if expected is None else f" of about {expected:,} expected"
    there = f", {deduplicated:,} were there already" if deduplicated else ""
    return "moved", f"read {read:,} bytes of weights, uploaded {uploaded:,}{about}{there}"


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
        ("state", f"{progress_text(job)}, {ago(job.since)}"),
        ("source", str(request.source)),
        ("size", f"{request.options.size:,} bytes a file"),
        ("asked by", f"{request.asked_by}, {ago(job.created)}"),
        *([("files", f"{job.shards_done:,} of {job.shards:,} sealed")] if job.shards else []),
        *([moved(job.read, job.uploaded, job.deduplicated, job.expected)] if job.read else []),
        *(("worker", f"{claim.worker} has {claim.unit}, {ago(claim.since)}") for claim in job.claims),
        *(("waits", why) for why in (waits, job.note) if why),
        *([("trouble", f"{job.last_error['message']} (tried again)")] if job.last_error and not error else []),
        *([("error", f"{error.code}: {error}"), ("next", error.next_step)] if error else []),
        *(("note", note) for note in job.notes),
        *(("source bytes", text) for text in _attested(job.published)),
        *outcome(str(request.target), job.checks, {}, job.published or {}),
        *([("undone by", job.rolled_back)] if job.rolled_back else []),
    ]


def report_of(job: Job) -> dict[str, Any]:
    """The checks of a job, JSON-able, and the error where one of them ended it."""
    error = ReshardError.from_dict(job.error) if job.error else None
    failed = isinstance(error, ProofError | CheckpointError) or any(c["result"] == "failed" for c in job.checks)
    result = "failed" if failed else "passed" if job.confirmed else "unfinished"
    attested = (job.published or {}).get("attested", {})
    facts = {"job": job.id, "state": job.state, "result": result, "checks": job.checks, "attested": attested}
    return facts | {"error": job.error}


def _attested(published: Mapping[str, Any] | None) -> list[str]:
    """How many files of the source were attested by what: ``checked: 4 files``."""
    return [f"{how}: {count(number, 'file')}" for how, number in (published or {}).get("attested", {}).items()]


def report_text(facts: Mapping[str, Any]) -> str:
    """Every check with its findings below it."""
    text = [checks_text(facts["checks"])] if facts["checks"] else []
    text += [f"source bytes: {attested}" for attested in _attested(facts)]
    if facts["error"]:
        error = ReshardError.from_dict(facts["error"])
        text.append(f"{error.code}: {error}")
    return "\n".join([*text, f"job {facts['job']}, {facts['state']}: {facts['result']}"])


def progress_text(job: Job) -> str:
    if job.state == "copying" and job.bytes:
        return f"copying {job.bytes_done * 100 // job.bytes} % of {human_bytes(job.bytes)}"
    return job.state.replace("_", " ")


def _figure(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:.1f}" if isinstance(value, float) else str(value)
