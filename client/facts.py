"""Jobs and the fleet as data: what --json and the HTTP API say of them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from reshard.client.queue import Queue, waits, worker_state
from reshard.pipeline.errors import CatalogNotFound, CheckpointError, JobNotFound, ProofError, ReshardError
from reshard.pipeline.places import AnyTarget
from reshard.pipeline.request import Request
from reshard.pipeline.stores.credentials import DEFAULT_ENDPOINT

if TYPE_CHECKING:
    from reshard.worker.fleet.fleet import FleetStatus
    from reshard.worker.followers.catalogs import Now
    from reshard.worker.followers.records import CatalogStatus
    from reshard.worker.followers.schedules import Run, ScheduleStatus
    from reshard.worker.queue.jobs import Process
    from reshard.worker.queue.record import Job

# How the fields of an event are read; others are text.
READERS: dict[str, Callable[[str], Any]] = {
    "error": json.loads,
    **dict.fromkeys(("at", "took", "waited"), lambda ms: int(ms) / 1000),
    **dict.fromkeys(("attempt", "bytes"), int),
}


def job_facts(queue: Queue, job: Job) -> dict[str, Any]:
    """A job, and why nothing of it moves now."""
    return job.to_dict() | {"waits": None if job.state.ended else waits(queue, job)}


def happened(fields: Mapping[str, str]) -> dict[str, Any]:
    """An event of the queue; a figure or an error that it has left empty is null."""
    return {
        name: text if (read := READERS.get(name)) is None else read(text) if text else None
        for name, text in fields.items()
    }


def service_facts(queue: Queue) -> dict[str, Any]:
    """The queue and its processes."""
    from reshard.worker.queue.jobs import without_password

    drained, resting = queue.fleet.all_drained(), queue.fleet.resting()
    return {
        "broker": without_password(queue.jobs.url),
        "jobs": {str(state): number for state, number in queue.jobs.counts().items() if number},
        "waiting": queue.jobs.waiting(),
        "waits": queue.waits(bulk=True),
        "processes": [
            asdict(process) | {"drained": process.name in drained, "resting": process.name in resting}
            for process in queue.jobs.processes()
        ],
    }


def fleet_facts(seen: FleetStatus, processes: Iterable[Process], claims: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The limits in force, and each worker with the units of jobs that it is at."""
    workers = [
        {
            "name": process.name,
            "state": worker_state(process.draining, process.name in seen.drained, process.name in seen.resting),
            "concurrency": process.concurrency,
            "at": list(claims.get(process.name, ())),
        }
        for process in processes
        if process.kind == "worker"
    ]
    return seen.to_dict() | {"workers": workers}


def into(request: Request) -> str:
    """The target, with the branch or the pull request that was asked for."""
    place = str(request.target.at(request.options.branch) if request.options.branch else request.target)
    return f"{place}, as a pull request" if request.options.pr else place


def undoable(request: Request) -> str | None:
    """The target as `reshard rollback` takes it; None for a pull request, which changes nothing by itself."""
    target, options = request.target, request.options
    return None if options.pr else str(target.at(options.branch or target.branch))


def failure_facts(seen: CatalogStatus) -> dict[str, list[dict[str, Any]]]:
    """The models of a catalog that failed, by error code."""
    return {
        code: [{"repo": repo, "job": ended.job, **(ended.error or {})} for repo, ended in failed]
        for code, failed in seen.failures().items()
    }


def catalog_facts(name: str, now: Now) -> dict[str, Any]:
    """A catalog without its models."""
    counts = {what: number for what, number in now.counts.items() if number}
    facts = {"name": name, "state": now.shown, "note": now.note, "counts": counts}
    return facts | {"entries": now.entries, "todo": now.todo, "active": now.active}


def schedule_facts(queue: Queue, seen: ScheduleStatus) -> dict[str, Any]:
    """A schedule, and how its last run fares."""
    return seen.to_dict() | {"last": last_run(queue, seen)}


def schedule_row(queue: Queue, seen: ScheduleStatus) -> dict[str, Any]:
    """The same for a list: of its catalog's text the size alone."""
    facts = schedule_facts(queue, seen)
    if catalog := facts["catalog"]:
        catalog["bytes"] = len(catalog.pop("text").encode())
    return facts


def source_bytes(read: Iterable[str], attested: Mapping[str, str]) -> dict[str, list[str]]:
    """The source files by what their bytes were held against; without ``attested``, nothing but the transport."""
    levels: dict[str, list[str]] = {}
    for path in sorted({*read, *attested}):
        levels.setdefault(attested.get(path, "as delivered"), []).append(path)
    return levels


def page(target: AnyTarget, ref: str = "") -> str:
    """Where people find a result: the folder, or the page of the branch or pull request ``ref`` on its Hub."""
    return target.page(os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT, ref)


def report_of(job: Job) -> dict[str, Any]:
    """The checks of a job, JSON-able, and the error where one of them ended it."""
    error = ReshardError.from_dict(job.error) if job.error else None
    failed = isinstance(error, ProofError | CheckpointError) or any(c["result"] == "failed" for c in job.checks)
    result = "failed" if failed else "passed" if job.confirmed else "unfinished"
    attested = (job.published or {}).get("attested", {})
    facts = {"id": job.id, "state": job.state, "result": result, "checks": job.checks, "attested": attested}
    return facts | {"error": job.error}


def seconds_of(job: Job) -> float:
    """How long it has been at work, since the submit or the last retry where that is known."""
    end = job.since if job.state.ended else time.time()
    began = job.started if job.created < job.started < end else job.created
    return max(0.0, end - began)


def last_run(queue: Queue, seen: ScheduleStatus) -> str:
    """The last run, and the state of the job that it fired."""
    if not seen.runs:
        return "never fired"
    run, catalog = seen.runs[0], seen.schedule.catalog
    try:
        if run.outcome == "fired" and catalog is not None:
            return f"catalog {catalog.name}, {queue.catalogs.now(catalog.name).shown}"
        if run.outcome == "fired" and run.job is not None:
            return f"job {run.job}, {queue.jobs.get(run.job).state}"
    except CatalogNotFound as error:
        return f"catalog {error.facts['name']}, removed since"
    except JobNotFound:
        return f"job {run.job}, deleted since"
    return outcome_text(run)


def outcome_text(run: Run) -> str:
    """What became of one time of a schedule."""
    return {
        "fired": f"job {run.job}" if run.job else "its catalog was submitted",
        "missed": "missed: no control was running",
        "overlap": f"left out: {f'its last job {run.job}' if run.job else 'its catalog'} was still at work",
        "full": "left out: it has as many jobs queued as one submitter may",
        "busy": f"left out: job {run.job} had the target, with another request",
    }.get(run.outcome, run.outcome)  # a newer release's
