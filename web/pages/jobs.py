"""The list of jobs, and one job with everything that is known of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal
from urllib.parse import parse_qs, urlencode

from pydantic import Field

from reshard.client.facts import page as result_page
from reshard.client.facts import seconds_of
from reshard.client.models.jobs import Happened, JobNow, Refused
from reshard.client.models.records import Problem
from reshard.client.operations import jobs as operations
from reshard.client.operations.table import Body, Operation, read
from reshard.client.queue import Queue
from reshard.client.text import count, human_bytes, lasted
from reshard.pipeline.errors import BadBody, JobUnderWay, WrongState
from reshard.pipeline.limits import OUTLINE_FILES
from reshard.web.pages.picture import Drawing, drawing, picture
from reshard.web.pages.site import Call, Fields, Page, Reply, act, page

LISTED = 100  # jobs of a page
WITHIN = {"3600": "hour", "86400": "day", "604800": "week", "2592000": "30 days"}  # seconds
EVENTS_SHOWN = 200  # the newest
FILES_SHOWN = OUTLINE_FILES  # as many as are known once the plan is gone
DRAWINGS = 16  # plans whose picture is kept: a live page asks for it again and again
# What is done to many jobs.
VERBS: dict[str, Operation[..., Any]] = {
    "cancel": operations.cancel_jobs,
    "retry": operations.retry_jobs,
    "delete": operations.delete_jobs,
}
DONE = {"cancel": "cancelled", "retry": "queued again", "delete": "deleted"}


class Verb(Body):
    act: Literal["cancel", "retry", "delete"]


class Acted(Verb):
    """What was done to how many jobs, and how many were kept from it."""

    number: int = Field(ge=0, le=operations.CHOSEN_MAX)
    kept: int = Field(default=0, ge=0, le=operations.CHOSEN_MAX)

    def __str__(self) -> str:
        kept = f"; {count(self.kept, 'job')} kept until {operations.AWAITED}" if self.kept else ""
        return f"{count(self.number, 'job')} {DONE[self.act]}{kept}."


@page("GET", "/jobs")
def jobs(call: Call) -> Reply:
    """A page of them, newest first, all or those that a filter takes; or the one whose id was typed."""
    if id := call.query.one("id"):
        return f"/jobs/{operations.show(call.session, id).id}"
    after, filter_ = call.query.one("after") or None, _filter(call.query)
    acted = call.query.given("act", "number", "kept")
    query = _limits(filter_) | {"limit": LISTED, "after": after}
    found = operations.list_jobs(call.session, read(operations.JobsQuery, query, "the address"))
    shown = {
        "found": found,
        "filter": filter_,
        "acted": read(Acted, acted, "the address") if acted else None,
        "such": [job for job in found.jobs if filter_.get("code")][:1],  # it has the error that is asked for
        "states": [(state, urlencode(filter_ | {"state": state}, doseq=True)) for state in found.counts],
        "counted": not filter_.keys() - {"state"},  # the figures are of all jobs; to count others, each is to be read
        "any_state": urlencode({name: value for name, value in filter_.items() if name != "state"}),
        "newest": urlencode(filter_, doseq=True),
        "more": urlencode(filter_ | {"after": found.next}, doseq=True) if found.next else "",
        "after": after,
        "within": WITHIN,
        "verbs": VERBS,
    }
    return Page("jobs.html", shown)


def _filter(fields: Fields) -> dict[str, Any]:
    """What an address or a form says of which jobs."""
    states = {"state": fields["state"]} if fields.get("state") else {}
    return states | fields.given("source", "target", "by", "catalog", "code", "within")


def _limits(filter_: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``Filter`` for it; raises BadBody."""
    limits = dict(filter_)
    if within := limits.pop("within", ""):
        if within not in WITHIN:
            raise BadBody(where="within", why=f"use one of {', '.join(WITHIN)}")
        limits["since"] = time.time() - int(within)
    return limits


@page("POST", "/jobs/choose")
def choose(call: Call) -> Reply:
    """Ask once for what is to be done to the jobs that were marked, or to all that the filter takes."""
    do = VERBS[read(Verb, call.body.given("act"), "the form").act]
    filter_ = _filter(call.body)
    ids = call.body.get("job", [])
    if "every" in call.body:
        chosen = _limits(filter_) or {"all": True}
        # By its own body: of the same request, a retry takes one job.
        ids = do(call.session, read(do.body or operations.Chosen, chosen | {"dry_run": True}, "the form")).ids
    back, most = urlencode(filter_, doseq=True), operations.CHOSEN_MAX
    return Page("chosen.html", {"act": call.body.one("act"), "ids": ids, "back": back, "cut": len(ids) >= most})


@page("POST", "/jobs/chosen")
def carry_out(call: Call) -> Reply:
    """Do it to each of them, and say to how many, or which were refused; the list keeps its filter."""
    do = VERBS[read(Verb, call.body.given("act"), "the form").act]
    jobs = {"jobs": call.body.get("job", [])}
    act, filter_ = call.body.one("act"), _filter(Fields(parse_qs(call.body.one("back"))))
    back = urlencode(filter_, doseq=True)
    try:
        done = do(call.session, read(operations.ChosenAgain, jobs, "the form"))  # a retry's body is each one's
    except (JobUnderWay, WrongState) as error:  # of one of those to delete, of which then none is
        one = Refused(id=error.facts["job"], error=Problem.model_validate(error))
        return Page("refused.html", {"act": act, "ids": [], "refused": [one], "back": back})
    if refused := getattr(done, "refused", []):
        return Page("refused.html", {"act": act, "ids": done.ids, "refused": refused, "back": back})
    acted = {"act": act, "number": len(done.ids), "kept": len(getattr(done, "kept", []))}
    return f"/jobs?{urlencode(filter_ | acted, doseq=True)}"


act(operations.cancel, "/jobs/{job}")
act(operations.retry, "/jobs/{job}")
act(operations.roll_back, "/jobs/{job}")
act(operations.delete, "/jobs", path="/jobs/{job}/delete")


@page("GET", "/jobs/{job}")
def job(call: Call) -> Reply:
    queue, seen = call.queue, operations.changes(call.session, call.path["job"], operations.Since())
    job, events = seen.job, seen.events
    files, digest = operations.files(call.session, job.id), queue.jobs.plan_digest(job.id)
    shown = {
        "job": job,
        "result": operations.report_of(job).result,
        "took": seconds_of(job),
        "planned": digest is not None,
        "drawing": _drawn(queue, job.id, digest) if digest and not files.more else None,
        "states_of_files": [file.state for file in files.files],
        "files": files.files[:FILES_SHOWN],
        "more": job.shards - min(len(files.files), FILES_SHOWN),
        "log": operations.log(call.session, job.id),
        "states": _states(events, job),
        "events": [(event.at, event.kind, _told(event)) for event in events[: -EVENTS_SHOWN - 1 : -1]],
        "older": max(0, len(events) - EVENTS_SHOWN),
        "links": _links(job),
        "may": job.may(),
    }
    return Page("job.html", shown)


@lru_cache(maxsize=DRAWINGS)
def _drawn(queue: Queue, id: str, digest: str) -> Drawing | None:
    """The plan of that ``digest``; None once it is gone."""
    plan = queue.jobs.plan(id)
    return None if plan is None else drawing(picture(plan))


def _states(events: Sequence[Happened], job: JobNow) -> list[dict[str, Any]]:
    """Each state that it was in, since when and for how long."""
    seen = [(e.fields.get("state", ""), e.at) for e in events if e.kind == "state"] or [(job.state, job.since)]
    ends = [*(at for _, at in seen[1:]), None]
    return [{"state": state, "at": at, "lasted": end and end - at} for (state, at), end in zip(seen, ends, strict=True)]


def _told(event: Happened) -> str:
    unit, fields, error = event.fields.get("unit", ""), event.fields, event.error
    match event.kind:
        case "state":
            return str(fields.get("state", "")).replace("_", " ")
        case "claimed":
            again = f", attempt {event.attempt}" if (event.attempt or 1) > 1 else ""
            return f"{fields.get('worker')} started {unit}{again}"
        case "sealed":
            return f"{unit}: stored a {human_bytes(event.bytes or 0)} file"
        case "finished":
            return f"{unit}, in {lasted(event.took)}" if event.took is not None else unit
        case "lost":
            return f"{fields.get('worker') or 'its worker'} lost {unit}"
        case "ended" if error is None:
            return str(fields.get("state", "")).replace("_", " ")
    told = f"{error.code}: {error.message}" if error else ""
    return ": ".join(filter(None, (unit, told)))


def _links(job: JobNow) -> dict[str, str]:
    """Where the result and its commit are seen; empty where that is no web address."""
    published, target = job.published, job.request.target
    where = result_page(target, published.ref) if published else ""
    if published is None or not where.startswith(("https://", "http://")):
        return {"result": "", "commit": ""}
    return {"result": where, "commit": f"{result_page(target)}/commit/{published.commit}"}
