"""A job for people: how far it is and how it ended, whether it ran here or on the queue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

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
    """The end of a job for people, one ``what, figure`` after the other; as much of it as there is."""
    told = [told_check(check) for check in checks]
    idle = not told  # a commit that was found after checks is the job's own, whose answer was lost
    told += [("source bytes", f"{how}: {some(files)}") for how, files in bytes_.items()]
    if published:
        ref = f", {published['ref']}" if published["ref"] else ""
        found = " was there already: nothing was done" if published["found"] and idle else ""
        told.append(("commit", f"{published['commit']}{ref}{found}"))
    return [*told, ("where", target)]


def moved(read: int, uploaded: int, deduplicated: int, expected: int | None = None) -> tuple[str, str]:
    """What moved, in bytes, beside what a plan had said."""
    said = "" if expected is None else f" of about {expected:,} expected"
    there = f", {deduplicated:,} were there already" if deduplicated else ""
    return "moved", f"read {read:,} bytes of weights, uploaded {uploaded:,}{said}{there}"


def told_check(check: Mapping[str, Any]) -> tuple[str, str]:
    """One check for people: its name, and how it ended, why and over how much."""
    figures = ", ".join(f"{name.replace('_', ' ')} {_figure(value)}" for name, value in check["figures"].items())
    said = [f"{check['result']} ({check['level']})", check["reason"], figures]
    return check["name"], "; ".join(part for part in said if part)


def checks_text(checks: Iterable[Mapping[str, Any]]) -> list[str]:
    """Each check in a line, and each of its findings in one below it."""
    told = []
    for check in checks:
        told.append(": ".join(told_check(check)))
        told += [f"    {finding}" for finding in check["findings"]]
    return told


def describe(job: Job, waits: str | None = None) -> list[tuple[str, str]]:
    """A job for people, one ``what, figure`` after the other."""
    request = job.request
    told = [
        ("job", job.id),
        ("state", f"{progress_text(job)}, {ago(job.since)}"),
        ("source", str(request.source)),
        ("size", f"{request.options.size:,} bytes a file"),
        ("asked by", f"{request.asked_by}, {ago(job.created)}"),
    ]
    if job.shards:
        told.append(("files", f"{job.shards_done:,} of {job.shards:,} sealed"))
    if job.read:
        told.append(moved(job.read, job.uploaded, job.deduplicated, job.expected))
    told += [("worker", f"{held.worker} has {held.unit}, {ago(held.since)}") for held in job.claims]
    told += [("waits", why) for why in (waits, job.note) if why]
    if job.last_error and not job.error:
        told.append(("trouble", f"{job.last_error['message']} (tried again)"))
    if job.error:
        error = ReshardError.from_dict(job.error)
        told += [("error", f"{error.code}: {error}"), ("next", error.next_step)]
    told += [("note", note) for note in job.notes]
    told += [("source bytes", said) for said in _attested(job.published)]
    told += outcome(str(request.target), job.checks, {}, job.published or {})
    return [*told, *([("undone by", job.rolled_back)] if job.rolled_back else [])]


def report_of(job: Job) -> dict[str, Any]:
    """The checks of a job, JSON-able, and the error where one of them ended it."""
    checks = job.checks
    error = ReshardError.from_dict(job.error) if job.error else None
    failed = isinstance(error, ProofError | CheckpointError) or any(check["result"] == "failed" for check in checks)
    result = "failed" if failed else "passed" if job.confirmed else "unfinished"
    attested = (job.published or {}).get("attested", {})
    facts = {"job": job.id, "state": job.state, "result": result, "checks": checks, "attested": attested}
    return facts | {"error": job.error}


def _attested(published: Mapping[str, Any] | None) -> list[str]:
    """How many files of the source were attested by what: ``checked: 4 files``."""
    return [f"{how}: {count(number, 'file')}" for how, number in (published or {}).get("attested", {}).items()]


def report_text(facts: Mapping[str, Any]) -> Text:
    """Every check with its findings below it."""
    told = checks_text(facts["checks"])
    told += [f"source bytes: {said}" for said in _attested(facts)]
    if facts["error"]:
        error = ReshardError.from_dict(facts["error"])
        told.append(f"{error.code}: {error}")
    return Text("\n".join([*told, f"job {facts['job']}, {facts['state']}: {facts['result']}"]))


def progress_text(job: Job) -> str:
    if job.state == "copying" and job.bytes:
        return f"copying {job.bytes_done * 100 // job.bytes} % of {human_bytes(job.bytes)}"
    return job.state.replace("_", " ")


def _figure(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:.1f}" if isinstance(value, float) else str(value)
