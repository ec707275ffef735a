"""The list of jobs, and one job with everything that is known of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import urlencode

from reshard.client.facts import page as result_page
from reshard.client.facts import seconds_of
from reshard.client.operations import jobs as operations
from reshard.client.queue import Queue
from reshard.client.text import human_bytes, lasted
from reshard.pipeline.errors import BadBody
from reshard.web.pages.picture import Drawing, drawing, picture
from reshard.web.pages.site import Answer, Call, Page, act, page
from reshard.worker.queue.record import Job
from reshard.worker.queue.states import CANCELLABLE, JobState

LISTED = 100  # jobs of a page
EVENTS_SHOWN = 200  # the newest
DRAWINGS = 16  # plans whose picture is kept: a live page asks for it again and again


class File(NamedTuple):
    """A file of a plan, and the group that copies it."""

    path: str
    size: int
    tensors: int
    digest: str
    group: str


class Drawn(NamedTuple):
    files: list[File]
    drawing: Drawing


@page("GET", "/jobs")
def jobs(call: Call) -> Answer:
    """A page of them, newest first, of some states or all; or the one whose id was typed."""
    if id := call.query.one("id"):
        return f"/jobs/{call.queue.jobs.resolve(id)}"
    asked = [state for state in call.query.get("state", []) if state in JobState.__members__]
    after = call.query.one("after") or None
    try:
        found = call.queue.jobs.listed([JobState(state) for state in asked], LISTED, after)
    except ValueError as error:
        raise BadBody(where="after", why="no page ended so") from error
    more = urlencode([*(("state", state) for state in asked), ("after", found.next)]) if found.next else ""
    counts = call.queue.jobs.counts()
    shown = {"jobs": found.jobs, "unreadable": found.unreadable, "counts": counts, "asked": asked}
    return Page("jobs.html", shown | {"more": more, "after": after})


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
def job(call: Call) -> Answer:
    """One job."""
    queue = call.queue
    job = queue.jobs.get(call.path["job"])
    events = [fields for _, fields in queue.jobs.events(job.id)]
    digest = queue.jobs.plan_digest(job.id)
    drawn = _drawn(queue, job.id, digest) if digest else None
    shown = {
        "job": job,
        "facts": operations.now(queue, job).document(),
        "result": operations.report_of(job).result,
        "took": seconds_of(job),
        "drawing": drawn and drawn.drawing,
        "files": _files(queue, job, drawn.files) if drawn else [],
        "states": _states(events, job),
        "events": [(int(e["at"]) / 1000, e["kind"], _told(e)) for e in events[: -EVENTS_SHOWN - 1 : -1]],
        "older": max(0, len(events) - EVENTS_SHOWN),
        "links": _links(job),
        "may": _may(job),
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


def _files(queue: Queue, job: Job, files: Sequence[File]) -> list[dict[str, Any]]:
    """How far each file is. What a group has copied since its last seal counts for its files in their order."""
    sealed = queue.jobs.sealed(job.id, [file.digest for file in files])
    over = job.state in {JobState.done, JobState.published_unverified}
    left = {claim.unit: claim.bytes for claim in job.claims}
    found = []
    for file, stored in zip(files, sealed, strict=True):
        done = file.size if over or stored else min(file.size, left.get(file.group, 0))
        state = "sealed" if over or stored else "copying" if file.group in left else "waiting"
        if state == "copying":
            left[file.group] -= done
        found.append({"file": file, "state": state, "done": done})
    return found


def _states(events: Sequence[Mapping[str, str]], job: Job) -> list[dict[str, Any]]:
    """Each state that it was in, since when and for how long."""
    seen = [(e["state"], int(e["at"]) / 1000) for e in events if e["kind"] == "state"] or [(job.state, job.since)]
    ends = [at for _, at in seen[1:]]
    found: list[dict[str, Any]] = [
        {"state": state, "at": at, "lasted": end - at} for (state, at), end in zip(seen, ends, strict=False)
    ]
    return [*found, {"state": seen[-1][0], "at": seen[-1][1], "lasted": None}]


def _told(event: Mapping[str, str]) -> str:
    """One event in words."""
    unit, error = event.get("unit", ""), json.loads(event.get("error") or "null")
    match event["kind"]:
        case "state":
            return event["state"].replace("_", " ")
        case "claimed":
            again = f", attempt {event['attempt']}" if event.get("attempt", "1") != "1" else ""
            return f"{event['worker']} took {unit}{again}"
        case "sealed":
            return f"{unit}: a file of {human_bytes(int(event['bytes']))} is in the target's store"
        case "finished":
            return f"{unit}, in {lasted(int(event['took']) / 1000)}" if event.get("took") else unit
        case "lost":
            return f"{event.get('worker') or 'its worker'} lost {unit}"
        case "ended" if not error:
            return event["state"].replace("_", " ")
    told = f"{error['code']}: {error['message']}" if error else ""
    return ": ".join(filter(None, (unit, told)))


def _links(job: Job) -> dict[str, str]:
    """Where the result and its commit are seen; empty where that is no web address."""
    published, target = job.published or {}, job.request.target
    where = result_page(target, published.get("ref", ""))
    if not published or not where.startswith(("https://", "http://")):
        return {"result": "", "commit": ""}
    return {"result": where, "commit": f"{result_page(target)}/commit/{published['commit']}"}


def _may(job: Job) -> set[str]:
    """What makes sense to do with it now."""
    published = job.published is not None and not job.rolled_back
    own = published and (job.confirmed or not (job.published or {})["found"])
    ways = {
        "cancel": job.state in CANCELLABLE,
        "retry": job.state.ended and job.state != JobState.done,
        "rollback": job.state.ended and bool(own),
        "delete": job.state.ended,
    }
    return {way for way, sense in ways.items() if sense}
