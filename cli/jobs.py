"""`reshard status, list, watch, cancel, retry`: jobs on the queue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text
from typer import Argument, Option

from reshard.cli.arguments import Job, read_output, takes
from reshard.cli.outcome import checks_text, moved, outcome
from reshard.cli.output import Output, ago, count, human_bytes, lines
from reshard.cli.waits import waits
from reshard.pipeline.errors import CheckpointError, JobCancelled, ProofError, ReshardError, UsageError, WrongState
from reshard.worker.queue.states import JobState

if TYPE_CHECKING:
    from reshard.worker.queue.jobs import Job as JobRecord
    from reshard.worker.queue.jobs import JobStore, Process

LISTED = 20  # jobs; a screenful


@contextmanager
def open_store() -> Iterator[JobStore]:
    """The jobs behind the broker that is configured or running here; raises NoBroker, BrokerUnavailable.

    Whatever else is asked of that broker inside raises BrokerUnavailable, too.
    """
    from reshard.worker.broker import broker_url
    from reshard.worker.queue.jobs import JobStore, broker_errors
    from reshard.worker.settings import settings

    with JobStore.at(broker_url(settings())) as store, broker_errors(store.url):
        yield store


@takes(output=read_output)
def status(
    *,
    job: Annotated[
        str | None, Argument(metavar="JOB", help="A job's id, or the start of one.", show_default=False)
    ] = None,
    report: Annotated[
        bool, Option("--report", help="Show the job's checks, each with its level, its figures and what it found.")
    ] = False,
    output: Output,
) -> None:
    """Show one job, or without JOB the queue and who works on it."""
    if report and job is None:
        raise UsageError(what="--report is of one job: name it")
    with open_store() as store:
        if job is None:
            _show_service(store, output)
        elif report:
            facts = report_of(store.get(job))
            output.result(facts, report_text(facts), facts["result"])
        else:
            record = store.get(job)
            why = None if record.state.ended else waits(store, record.request.priority == "bulk")
            output.result(record.to_dict() | {"waits": why}, lines(describe(record, why)), record.state)


@takes(output=read_output)
def list_(
    *,
    state: Annotated[
        list[JobState] | None,
        Option(metavar="STATE", help="Only jobs in this state. May be given again.", show_default=False),
    ] = None,
    limit: Annotated[int, Option(min=1, help="The most jobs to show, the newest first.")] = LISTED,
    all_: Annotated[bool, Option("--all", help="Show every job that is known.")] = False,
    output: Output,
) -> None:
    """List jobs, the newest first."""
    with open_store() as store:
        records = store.recent(state or [], limit=sum(store.counts().values()) if all_ else limit)
        why = waits(store, bulk=False)
    if why:
        output.say(Text(why))
    if output.json:
        for record in records:
            output.document(record.to_dict())
    else:
        output.text(
            lines([_row(record) for record in records]) if records else Text("no jobs"),
            "\n".join(record.id for record in records),
        )


@takes(output=read_output)
def watch(job: Job, output: Output) -> None:
    """Follow a job to its end; the exit code is the job's."""
    from reshard.cli.watch import follow

    with open_store() as store:
        follow(store, store.resolve(job), output)


@takes(output=read_output)
def cancel(job: Job, output: Output) -> None:
    """Stop a job before its commit. What it has copied is kept for a retry."""
    with open_store() as store:
        id = store.resolve(job)
        was = store.cancel(id)
    said = "was cancelled already" if was == "cancelled" else f"is cancelled; it was {was}"
    output.result({"job": id, "was": was, "state": "cancelled"}, Text(f"job {id} {said}"), id)


@takes(output=read_output)
def retry(
    *,
    job: Job,
    anew: Annotated[bool, Option("--anew", help="Plan again, from what source and target are now.")] = False,
    onto_head: Annotated[
        bool, Option("--onto-head", help="Plan again, and replace what others changed in the target since.")
    ] = False,
    follow_it: Annotated[
        bool, Option("--watch", help="Follow the job to its end and take over its exit code.")
    ] = False,
    output: Output,
) -> None:
    """Go on with a failed or cancelled job, from what it had copied."""
    from reshard.cli.watch import follow

    with open_store() as store:
        id = store.resolve(job)
        was = store.retry(id, anew=anew, onto_head=onto_head)
        if why := waits(store, store.get(id).request.priority == "bulk"):
            output.say(Text(why))
        facts = {"job": id, "was": was, "state": "queued", "waits": why}
        output.result(facts, Text(f"job {id} goes on; it was {was}"), id)
        if follow_it:
            follow(store, id, output)


@takes(output=read_output)
def rollback(job: Job, output: Output) -> None:
    """Undo a job's commit by another one, with your own token, unless others changed one of its files since."""
    from reshard.pipeline.publishing.rollback import rollback as undo
    from reshard.pipeline.stores.connect import Context, open_target

    with open_store() as store:
        record = store.get(job)
        published = record.published
        # One that it found is its own where there was something to do: then whoever made it did not live to say so.
        if published is None or (published["found"] and not record.confirmed):
            raise WrongState(job=record.id, state=record.state, why="it made no commit that could be undone")
        ref, request = published["ref"], record.request
        place = request.target.model_copy(update={"revision": ref, "credential": None}) if ref else request.target
        options = request.options.model_copy(update={"pr": False, "branch": None})
        commit = undo(open_target(place, options, Context.from_env()), published["commit"])
        store.rolled_back(record.id, commit)
    said = Text(f"commit {published['commit']} of {request.target} is undone by {commit}")
    output.result({"job": record.id, "undone": published["commit"], "commit": commit}, said, commit)


def _row(job: JobRecord) -> tuple[str, ...]:
    undone = f", undone by {job.rolled_back[:12]}" if job.rolled_back else ""
    return job.id, _progress(job) + undone, ago(job.since), f"{job.request.source} -> {job.request.target}"


def describe(job: JobRecord, waits: str | None = None) -> list[tuple[str, str]]:
    """A job for people, one ``what, figure`` after the other."""
    request = job.request
    told = [
        ("job", job.id),
        ("state", f"{_progress(job)}, {ago(job.since)}"),
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


def report_of(job: JobRecord) -> dict[str, Any]:
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


def end(job: JobRecord) -> ReshardError | None:
    """Why an ended job is not done; None if it is."""
    if job.error:
        return ReshardError.from_dict(job.error)
    return JobCancelled(job=job.id) if job.state == "cancelled" else None


def _progress(job: JobRecord) -> str:
    if job.state == "copying" and job.bytes:
        return f"copying {job.bytes_done * 100 // job.bytes} % of {human_bytes(job.bytes)}"
    return job.state.replace("_", " ")


def _show_service(store: JobStore, output: Output) -> None:
    from reshard.worker.fleet.fleet import Fleet
    from reshard.worker.queue.jobs import without_password

    counts = {str(state): number for state, number in store.counts().items() if number}
    waiting, processes, why = store.waiting(), store.processes(), waits(store, bulk=True)
    drained = Fleet(store).all_drained()
    broker = without_password(store.url)
    told = [("broker", broker)]
    if why:
        told.append(("waits", why))
    told += [(process.kind, process_text(process, process.name in drained)) for process in processes]
    for kind in missing(processes):
        told.append((kind, f"none is running: start one with `reshard {kind}`, or all of it with `reshard up`"))
    told.append(("jobs", ", ".join(f"{number:,} {state}" for state, number in counts.items()) or "none"))
    output.result(
        {
            "broker": broker,
            "jobs": counts,
            "waiting": waiting,
            "waits": why,
            "processes": [asdict(process) | {"drained": process.name in drained} for process in processes],
        },
        lines(told),
    )


def missing(processes: Sequence[Process]) -> list[str]:
    """What no job moves without, and does not run."""
    return [kind for kind in ("worker", "control") if not any(process.kind == kind for process in processes)]


def process_text(process: Process, drained: bool) -> str:
    """A process by its name, with what a worker is about, and since when it runs."""
    told = [process.version, f"started {ago(process.started)}"]
    if process.kind == "worker":
        told = [worker_state(process, drained), *told, f"{count(process.concurrency, 'copy')} at once"]
    return f"{process.name}: {', '.join(told)}"


def worker_state(process: Process, drained: bool) -> str:
    return "drained" if drained else "finishing" if process.draining else "takes work"
