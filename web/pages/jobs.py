"""The list of jobs, and one job with everything that is known of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import urlencode

from reshard.client.facts import page as result_page
from reshard.client.facts import seconds_of
from reshard.client.models.jobs import Happened, JobNow
from reshard.client.operations import jobs as operations
from reshard.client.operations.table import read
from reshard.client.queue import Queue
from reshard.client.text import human_bytes, lasted
from reshard.web.pages.picture import Drawing, drawing, picture
from reshard.web.pages.site import Call, Page, Reply, act, page

LISTED = 100  # jobs of a page
EVENTS_SHOWN = 200  # the newest
DRAWINGS = 16  # plans whose picture is kept: a live page asks for it again and again


class File(NamedTuple):
    """A file of a plan, the group that copies it, and how far it is."""

    path: str
    size: int
    tensors: int
    digest: str
    group: str
    state: str = "waiting"
    done: int = 0


class Drawn(NamedTuple):
    files: list[File]
    drawing: Drawing


@page("GET", "/jobs")
def jobs(call: Call) -> Reply:
    """A page of them, newest first, of some states or all; or the one whose id was typed."""
    if id := call.query.one("id"):
        return f"/jobs/{operations.show(call.session, id).id}"
    after, asked = call.query.one("after") or None, call.query.get("state", [])
    query = {"state": asked, "limit": LISTED, "after": after}
    found = operations.list_jobs(call.session, read(operations.JobsQuery, query, "the address"))
    more = urlencode([*(("state", state) for state in asked), ("after", found.next)]) if found.next else ""
    return Page("jobs.html", {"found": found, "asked": asked, "more": more, "after": after})


act("/jobs/{job}/cancel", operations.cancel, "/jobs/{job}")
act(
    "/jobs/{job}/retry",
    operations.retry,
    "/jobs/{job}",
    lambda f: operations.Again(anew="anew" in f, overwrite="overwrite" in f),
)
act("/jobs/{job}/rollback", operations.roll_back, "/jobs/{job}")
act("/jobs/{job}/delete", operations.delete, "/jobs")


@page("GET", "/jobs/{job}")
def job(call: Call) -> Reply:
    """One job."""
    queue, seen = call.queue, operations.changes(call.session, call.path["job"], operations.Since())
    job, events = seen.job, seen.events
    digest = queue.jobs.plan_digest(job.id)
    drawn = _drawn(queue, job.id, digest) if digest else None
    shown = {
        "job": job,
        "result": operations.report_of(job).result,
        "took": seconds_of(job),
        "drawing": drawn and drawn.drawing,
        "files": _files(queue, job, drawn.files) if drawn else [],
        "states": _states(events, job),
        "events": [(event.at, event.kind, _told(event)) for event in events[: -EVENTS_SHOWN - 1 : -1]],
        "older": max(0, len(events) - EVENTS_SHOWN),
        "links": _links(job),
        "may": job.may(),
    }
    return Page("job.html", shown)


@lru_cache(maxsize=DRAWINGS)
def _drawn(queue: Queue, id: str, digest: str) -> Drawn | None:
    """The plan of that ``digest``; None once it is gone."""
    if (plan := queue.jobs.plan(id)) is None:
        return None
    groups = {number: f"group:{group.number:05d}" for group in plan.groups for number in group.shards}
    files = [
        File(shard.path, shard.size, len(shard.entries), shard.digest, groups.get(number, ""))
        for number, shard in enumerate(plan.shards)
    ]
    return Drawn(files, drawing(picture(plan)))


def _files(queue: Queue, job: JobNow, files: Sequence[File]) -> list[File]:
    """How far each file is. What a group has copied since its last seal counts for its files in their order."""
    sealed = queue.jobs.sealed(job.id, [file.digest for file in files])
    over = job.state in {"done", "published_unverified"}
    left = {claim.unit: claim.bytes for claim in job.claims}
    found = []
    for file, stored in zip(files, sealed, strict=True):
        if over or stored:
            file = file._replace(state="sealed", done=file.size)
        elif file.group in left:
            file = file._replace(state="copying", done=min(file.size, left[file.group]))
            left[file.group] -= file.done
        found.append(file)
    return found


def _states(events: Sequence[Happened], job: JobNow) -> list[dict[str, Any]]:
    """Each state that it was in, since when and for how long."""
    seen = [(e.fields["state"], e.at) for e in events if e.kind == "state"] or [(job.state, job.since)]
    ends = [*(at for _, at in seen[1:]), None]
    return [{"state": state, "at": at, "lasted": end and end - at} for (state, at), end in zip(seen, ends, strict=True)]


def _told(event: Happened) -> str:
    """One event in words."""
    unit, fields, error = event.fields.get("unit", ""), event.fields, event.error
    match event.kind:
        case "state":
            return str(fields["state"]).replace("_", " ")
        case "claimed":
            again = f", attempt {event.attempt}" if (event.attempt or 1) > 1 else ""
            return f"{fields['worker']} took {unit}{again}"
        case "sealed":
            return f"{unit}: a file of {human_bytes(event.bytes or 0)} is in the target's store"
        case "finished":
            return f"{unit}, in {lasted(event.took)}" if event.took is not None else unit
        case "lost":
            return f"{fields.get('worker') or 'its worker'} lost {unit}"
        case "ended" if error is None:
            return str(fields["state"]).replace("_", " ")
    told = f"{error.code}: {error.message}" if error else ""
    return ": ".join(filter(None, (unit, told)))


def _links(job: JobNow) -> dict[str, str]:
    """Where the result and its commit are seen; empty where that is no web address."""
    published, target = job.published, job.request.target
    where = result_page(target, published.ref) if published else ""
    if published is None or not where.startswith(("https://", "http://")):
        return {"result": "", "commit": ""}
    return {"result": where, "commit": f"{result_page(target)}/commit/{published.commit}"}
