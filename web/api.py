"""The API's endpoints of jobs, plans and the service as a whole. Sizes are bytes, times seconds since the epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from threading import BoundedSemaphore
from typing import Any

from pydantic import Field

from reshard.client import PAGE_MAX, acts
from reshard.client.broker import BrokerJobs
from reshard.client.facts import fleet_facts, job_facts, report_of, service_facts
from reshard.client.models import fleet, jobs, plans
from reshard.client.plan import look
from reshard.pipeline.errors import BadBody, TooManyPlans, WrongState
from reshard.pipeline.places import NOWHERE, Place, TargetPlace
from reshard.pipeline.request import Options, Priority, Request
from reshard.pipeline.stores.connect import Context, RateLimiterOf
from reshard.web.endpoint import Body, Call, endpoint
from reshard.worker.fleet import policy
from reshard.worker.queue.states import JobState
from reshard.worker.settings import Settings

LISTED = 50  # jobs or schedules of a page, unless told otherwise
STATES_MAX = 20  # states that one list is asked for; there are ten
AFTER_MAX = 50  # characters of a page's end: a time, and an id
REASON_MAX = 500  # characters of why a service is paused
HUB_CALLS = 16  # plans and rollbacks at once; there are 40 threads
_places = BoundedSemaphore(HUB_CALLS)


class Asked(Body):
    """What is to be resharded; places as they are typed, or as objects."""

    source: Place
    target: TargetPlace
    options: Options = Options()
    priority: Priority = "interactive"

    def request(self, asked_by: str) -> Request:
        return Request(**{name: getattr(self, name) for name in type(self).model_fields}, asked_by=asked_by)


class Drafted(Asked):
    """The same; without a target only the cut is planned."""

    target: TargetPlace = NOWHERE


class Listed(Body):
    state: list[JobState] = Field(default_factory=list, max_length=STATES_MAX)
    limit: int = Field(default=LISTED, ge=1, le=PAGE_MAX)
    after: str | None = Field(
        default=None,
        max_length=AFTER_MAX,
        pattern=r"^[0-9]{1,15}(-[a-z0-9]*)?$",
        description="`next` of the page before",
    )
    since: float = Field(default=0.0, ge=0, le=1e11, description="none from before this time")


class Since(Body):
    after: str = Field(
        default="0", pattern=r"^\d{1,19}(-\d{1,19})?$", description="`next` of the look before; without it, everything"
    )


class Again(Body):
    anew: bool = Field(default=False, description="plan again from the current source and target")
    overwrite: bool = Field(
        default=False, description="plan again, and replace what others changed in the target since"
    )


class Why(Body):
    reason: str | None = Field(default=None, max_length=REASON_MAX)


@endpoint("GET", "/jobs", jobs.JobsPage, query=Listed)
def list_jobs(call: Call) -> Mapping[str, Any]:
    """List jobs, newest first; fewer than `limit` where they are long."""
    asked: Listed = call.query
    try:
        found = call.queue.jobs.listed(asked.state, asked.limit, asked.after, asked.since)
    except ValueError as error:
        raise BadBody(where="after", why="no page ended so") from error
    counts = {str(state): number for state, number in call.queue.jobs.counts().items() if number}
    facts = {"counts": counts, "waits": call.queue.waits(bulk=False)}
    return found._asdict() | {"jobs": [job.to_dict() for job in found.jobs]} | facts


@endpoint("POST", "/jobs", jobs.Submitted, body=Asked)
def submit(call: Call) -> Mapping[str, Any]:
    """Queue a job, or find the one that already carries the request out."""
    request = call.body.request(call.caller.name)
    allow(request, call.settings)
    return BrokerJobs(call.queue).submit(request)


@endpoint("GET", "/jobs/{job}", jobs.JobNow)
def show(call: Call) -> Mapping[str, Any]:
    """Show one job, and why nothing of it moves."""
    return job_facts(call.queue, call.queue.jobs.get(call.path["job"]))


@endpoint("GET", "/jobs/{job}/report", jobs.JobReport)
def report(call: Call) -> Mapping[str, Any]:
    """Show the checks of a job."""
    return report_of(call.queue.jobs.get(call.path["job"]))


@endpoint("GET", "/jobs/{job}/plan", plans.Plan)
def show_plan(call: Call) -> Mapping[str, Any]:
    """Show a job's plan, which is kept for an hour after its end."""
    facts = BrokerJobs(call.queue).plan(call.path["job"])
    if facts is None:
        job = call.queue.jobs.get(call.path["job"])
        why = "its plan is gone" if job.state.ended else "it has no plan yet"
        raise WrongState(job=job.id, state=job.state, why=why)
    return facts


@endpoint("GET", "/jobs/{job}/attested", jobs.Attested)
def attested(call: Call) -> Mapping[str, Any]:
    """Show what the bytes of a job's source were held against, for an hour after its end."""
    return {"attested": call.queue.jobs.attested(call.path["job"])}


@endpoint("GET", "/jobs/{job}/changes", jobs.Changes, query=Since)
def changes(call: Call) -> Mapping[str, Any]:
    """Show what happened to a job since an earlier look, and how it stands now."""
    seen = BrokerJobs(call.queue).look(call.path["job"], call.query.after, wait=0.0)
    return {"events": seen.events, "next": seen.last, "job": seen.job.to_dict() | {"waits": seen.waits}}


@endpoint("POST", "/jobs/{job}/cancel", jobs.Cancelled)
def cancel(call: Call) -> Mapping[str, Any]:
    """Stop a job before its commit."""
    return BrokerJobs(call.queue).cancel(call.path["job"])


@endpoint("POST", "/jobs/{job}/retry", jobs.Retried, body=Again)
def retry(call: Call) -> Mapping[str, Any]:
    """Continue a failed or cancelled job with what it had copied."""
    return BrokerJobs(call.queue).retry(call.path["job"], call.body.anew, call.body.overwrite)


@endpoint("POST", "/jobs/{job}/rollback", jobs.RolledBack)
def roll_back(call: Call) -> Mapping[str, Any]:
    """Undo the commit of a job, with the token of this service."""
    job = call.queue.jobs.get(call.path["job"])
    acts.published_by(job)  # before a token is needed, as of a client that asks the broker
    with one_of_few(call.settings) as context:
        policy.check(job.request, call.settings, lambda target: policy.namespaces(target, context))
        return acts.roll_back(call.queue, job.id, context)


@endpoint("DELETE", "/jobs/{job}", jobs.Deleted)
def delete(call: Call) -> Mapping[str, Any]:
    """Delete a job that has ended; what it published stays."""
    return acts.forget(call.queue, [call.path["job"]], [])


@endpoint("POST", "/plan", plans.Planned, body=Drafted)
def plan(call: Call) -> Mapping[str, Any]:
    """Show what a job would do, with the token of this service; change nothing."""
    request = call.body.request(call.caller.name)
    allow(request, call.settings, has_target=request.target != NOWHERE)
    with one_of_few(call.settings) as context:
        return look(request, context).facts


@endpoint("GET", "/service", jobs.Service)
def service(call: Call) -> Mapping[str, Any]:
    """Show the queue and its processes."""
    return service_facts(call.queue)


@endpoint("GET", "/fleet", fleet.Fleet)
def show_fleet(call: Call) -> Mapping[str, Any]:
    """Show the limits in force and the state of each worker."""
    queue = call.queue
    return fleet_facts(queue.fleet.seen(), queue.jobs.processes(), queue.fleet.claims_by_worker())


@endpoint("POST", "/fleet/pause", fleet.FleetPaused, body=Why)
def pause(call: Call) -> Mapping[str, Any]:
    """Stop all workers from starting anything, until resume."""
    was = call.queue.fleet.paused() is not None
    return {"paused": asdict(call.queue.fleet.pause(call.caller.name, call.body.reason)), "was_paused": was}


@endpoint("POST", "/fleet/resume", fleet.FleetResumed)
def resume(call: Call) -> Mapping[str, Any]:
    """Let a paused service continue."""
    return {"paused": None, "was_paused": call.queue.fleet.resume()}


@endpoint("POST", "/fleet/workers/{worker}/drain", fleet.Drained)
def drain(call: Call) -> Mapping[str, Any]:
    """Make one worker hand back its work and take no more."""
    return {"name": call.queue.fleet.drain(call.path["worker"]), "drained": True}


@endpoint("POST", "/fleet/workers/{worker}/undrain", fleet.Undrained)
def undrain(call: Call) -> Mapping[str, Any]:
    """Let a drained worker take work again."""
    name, was = call.queue.fleet.undrain(call.path["worker"])
    return {"name": name, "drained": False, "was_drained": was}


def allow(request: Request, settings: Settings, has_target: bool = True) -> None:
    """Raises what a worker would that has this process's RESHARD_ALLOWED_*; what its token may do, it knows itself."""
    place = request if has_target else request.model_copy(update={"target": request.source})
    rules = settings if has_target else settings.model_copy(update={"allowed_targets": None})
    policy.check(place, rules, lambda target: [target.namespace])


@contextmanager
def asking(settings: Settings, limiters: RateLimiterOf | None = None) -> Iterator[Context]:
    """This process's tokens and budgets, for the Hubs that it may call."""
    context = Context.from_env(limiters)
    with closing(replace(context, endpoints=policy.endpoints(settings, context.credentials))) as own:
        yield own


@contextmanager
def one_of_few(settings: Settings) -> Iterator[Context]:
    """The same, for a call that may wait for a Hub for minutes: raises TooManyPlans where HUB_CALLS do.

    Each holds one of the threads in which everybody's requests are carried out.
    """
    if not _places.acquire(blocking=False):
        raise TooManyPlans(most=HUB_CALLS)
    try:
        with asking(settings) as context:
            yield context
    finally:
        _places.release()
