"""Operations of jobs, plans and the queue as a whole. Sizes are bytes, times seconds since the epoch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, ValidationError

from reshard.client import PAGE_MAX
from reshard.client.facts import readable
from reshard.client.files import files_of
from reshard.client.models import jobs
from reshard.client.models.plans import Plan, Planned
from reshard.client.models.records import Problem
from reshard.client.operations.fleet import silent
from reshard.client.operations.table import BODY_MAX, LISTED, Body, InProcess, operation
from reshard.client.queue import Queue, outlooks
from reshard.pipeline.errors import (
    BadBody,
    CheckpointError,
    JobNotFound,
    JobUnderWay,
    JobUnreadable,
    ProofError,
    ReshardError,
    UsageError,
    WrongState,
)
from reshard.pipeline.places import NOWHERE, Place
from reshard.pipeline.request import Options, Priority, Request
from reshard.pipeline.validation import first_problem
from reshard.worker.queue.states import CANCELLABLE, ENDED, JobState

if TYPE_CHECKING:
    from reshard.client.plan import Looked
    from reshard.worker.queue.record import Job

STATES_MAX = 20  # states that one list is asked for; there are ten
AFTER_MAX = 50  # characters of a page's end: a time, and an id
CHOSEN_MAX = 10_000  # jobs that something is done to at once, which takes seconds: they share exchanges and disk writes
FIELD_MAX = 500  # characters that a filter names something by
ID_MAX = 100  # characters of an id that is typed; one has ten
AGE_MAX = 1e11  # seconds; 3,000 years
RETRIABLE = ENDED - {JobState.done}
Glob = Annotated[str, Field(min_length=1, max_length=FIELD_MAX)]  # an empty one chooses nobody
AWAITED = "the control process has recorded the result in the catalog"


# What a document cannot say by types: no schema of one part knows of the other.
_GIVEN: dict[str, Any] = {"not": {"const": None}}
_WITH_REVISION: dict[str, Any] = {
    "type": "object",
    "required": ["target"],
    "properties": {
        "target": {
            "anyOf": [
                {"type": "string", "pattern": "^[^./~].*@"},
                {"type": "object", "required": ["revision"], "properties": {"revision": _GIVEN}},
            ]
        }
    },
}
_TWO_REFS: dict[str, Any] = {
    "type": "object",
    "required": ["options"],
    "properties": {"options": {"required": ["branch", "pr"], "properties": {"branch": _GIVEN, "pr": {"const": True}}}},
}


class JobRequest(Body):
    """A model to reshard, and its target. A place is a string, as in commands, or an object."""

    model_config = ConfigDict(json_schema_extra={"not": {"anyOf": [_WITH_REVISION, _TWO_REFS]}})
    source: Place
    target: Place
    options: Options = Options()
    priority: Priority = "interactive"

    def request(self, asked_by: str) -> Request:
        """Raises BadBody for what no job can do."""
        named = {name: getattr(self, name) for name in type(self).model_fields}
        return Request(**named, asked_by=asked_by).with_one_ref()

    @classmethod
    def of(cls, request: Request) -> JobRequest:
        return cls(**{name: getattr(request, name) for name in cls.model_fields})


class Drafted(JobRequest):
    """A model to plan; without a target, only the split is planned."""

    target: Place = NOWHERE


class Filter(Body):
    """Selects jobs; without any field, selects all jobs."""

    state: list[JobState] = Field(default_factory=list, max_length=STATES_MAX)
    source: Glob = Field(default="", description="a pattern with `*`, such as `them/*`")
    target: Glob = Field(default="", description="a pattern with `*`")
    by: Glob = Field(default="", description="the submitter")
    catalog: Glob = Field(default="", description="the catalog that submitted the jobs")
    code: Glob = Field(default="", description="the code of the error that jobs ended with or are being retried after")
    since: float = Field(default=0.0, ge=0, le=1e11, description="only jobs since this time")

    def takes(self, since: float = 0.0) -> Callable[[Job], bool] | None:
        """Whether it takes a job, submitted ``since`` then, by its record; None where all of its states are taken."""
        from reshard.worker.followers.catalogs import asked_by

        by = {asked_by(self.catalog)} if self.catalog else set[str]()
        by |= {self.by} if self.by else set()
        if not (by or self.source or self.target or self.code or since):
            return None

        def takes(job: Job) -> bool:
            # The last error stays in the record of a job that got over it.
            error, request = job.error or (None if job.state.ended else job.last_error) or {}, job.request
            return (
                job.created >= since
                and fnmatchcase(str(request.source), self.source or "*")
                and fnmatchcase(str(request.target), self.target or "*")
                and (not by or by == {request.asked_by})
                and (not self.code or error.get("code") == self.code)
            )

        return takes


class JobsQuery(Filter):
    limit: int = Field(default=LISTED, ge=1, le=PAGE_MAX)
    after: str | None = Field(
        default=None,
        max_length=AFTER_MAX,
        pattern=r"^[0-9]{1,15}(-[a-z0-9]*)?$",
        description="`next` from the previous page",
    )


class Since(Body):
    after: str = Field(
        default="0",
        pattern=r"^[0-9]{1,19}(-[0-9]{1,19})?$",
        description="`next` from the previous response; without it, everything",
    )


class Again(Body):
    anew: bool = Field(default=False, description="plan again from the current source and target")
    overwrite: bool = Field(
        default=False, description="plan again, and replace target files that others have added or changed"
    )


class Chosen(Filter):
    """Selects jobs by ID or by filter, or every job with `all`. Without any field, selects no jobs."""

    most: ClassVar[int] = BODY_MAX
    latest: ClassVar[bool] = False  # whether a filter chooses one job of each request
    model_config = ConfigDict(
        json_schema_extra={
            "not": {
                "required": ["jobs"],
                "anyOf": [{"required": [name]} for name in (*Filter.model_fields, "age", "all")],
            }
        }
    )
    jobs: list[Annotated[str, Field(max_length=ID_MAX)]] = Field(default_factory=list, max_length=CHOSEN_MAX)
    all: bool = Field(default=False, description="select every job if no filter is set")
    age: float | None = Field(
        default=None,
        gt=0,
        le=AGE_MAX,
        description="only jobs that have been in their state for at least this many seconds",
    )
    dry_run: bool = Field(default=False, description="only return which jobs match")

    def ids(self, queue: Queue, states: Collection[JobState]) -> list[str]:
        """Those that are named, or the jobs of the filter, of those ``states`` for which the act makes sense.

        Raises UsageError for both: who names jobs and a state may mean those of them that are in it.
        """
        fields = self.model_dump(include=set(Filter.model_fields), exclude_defaults=True)
        if "jobs" in self.model_fields_set:
            if self.all or self.age or fields:
                raise UsageError(what="jobs: IDs cannot be combined with a filter, age or all")
            return self.jobs
        chosen = sorted({*self.state} & {*states}) if self.state else sorted(states)
        if not chosen or not (self.all or self.age or fields):
            return []
        # As a list has it: of all states by their submits.
        since, submitted = (self.since, 0.0) if self.state else (0.0, self.since)
        return queue.jobs.chosen(chosen, since, self.age or 0.0, self.takes(submitted), CHOSEN_MAX, self.latest)


class ChosenAgain(Chosen, Again):
    """Jobs to retry, and how. Of matching jobs with the same request, a filter selects only the last to end."""

    latest: ClassVar[bool] = True


def shown(job: Job) -> jobs.Job:
    """Raises JobUnreadable for a record that holds what no release of ours writes."""
    try:
        return jobs.Job.of(job)
    except ValidationError as error:
        first = first_problem(error)
        raise JobUnreadable(job=job.id, why=f"{first.where}: {first.why}") from error


def now(queue: Queue, job: Job) -> jobs.JobNow:
    """A job, and what those can expect who wait for it; raises as ``shown``."""
    (outlook,) = outlooks(queue, [job])
    return jobs.JobNow(**dict(shown(job)), **outlook._asdict())


@operation("GET", "/jobs")
def list_jobs(session: InProcess, query: JobsQuery) -> jobs.JobsPage:
    """List jobs, newest first; if jobs are large, a page can have fewer than `limit`."""
    store = session.queue.jobs
    try:
        found = store.listed(query.state, query.limit, query.after, query.since, query.takes())
    except ValueError as error:
        raise BadBody(where="after", why="not a valid page marker") from error
    page, unreadable = list[jobs.JobNow](), found.unreadable
    for job, outlook in zip(found.jobs, outlooks(session.queue, found.jobs), strict=True):
        try:
            page.append(jobs.JobNow(**dict(shown(job)), **outlook._asdict()))
        except JobUnreadable as damaged:
            unreadable[job.id] = damaged.facts["why"]
    counts = {str(state): number for state, number in store.counts().items() if number}
    return jobs.JobsPage(
        jobs=page, next=found.next, unreadable=unreadable, counts=counts, waits=session.queue.waits(bulk=False)
    )


@operation("POST", "/jobs")
def submit(session: InProcess, body: JobRequest) -> jobs.Submitted:
    """Queue a job, or return the existing job for the same request."""
    request = body.request(session.caller)
    session.allow(request)
    return jobs.Submitted.of(session.queue.jobs.submit(request), waits=session.queue.waits(request.priority == "bulk"))


@operation("POST", "/jobs/cancel")
def cancel_jobs(session: InProcess, body: Chosen) -> jobs.Acted:
    """Cancel jobs before they publish, by ID or by filter."""
    return _each(session, body, CANCELLABLE, session.queue.jobs.cancel_each)


@operation("POST", "/jobs/retry")
def retry_jobs(session: InProcess, body: ChosenAgain) -> jobs.Acted:
    """Retry failed or cancelled jobs, by ID or by filter."""
    store = session.queue.jobs
    return _each(session, body, RETRIABLE, lambda ids: store.retry_each(ids, body.anew, body.overwrite))


def _each(
    session: InProcess, body: Chosen, states: Collection[JobState], act: Callable[[list[str]], Iterable[object]]
) -> jobs.Acted:
    """``act`` on all jobs, which answers for each; the error that one is refused with keeps none of the others."""
    store, given = session.queue.jobs, [*dict.fromkeys(body.ids(session.queue, states))]
    found = dict(zip(given, store.resolve_each(given), strict=True))
    ids = [*dict.fromkeys(id for id in found.values() if isinstance(id, str))]
    tried = (_tried(job, states) for job in store.each(ids)) if body.jobs else ids
    answers = dict(zip(ids, tried if body.dry_run else act(ids), strict=True))
    refused = list[jobs.Refused]()
    for name, id in found.items():
        if isinstance(error := answers[id] if isinstance(id, str) else id, ReshardError):
            refused.append(jobs.Refused(id=name, error=Problem.model_validate(error)))
    done = [id for id, answer in answers.items() if not isinstance(answer, ReshardError)]
    return jobs.Acted(dry_run=body.dry_run, ids=done, refused=refused)


def _tried(job: Job | ReshardError, states: Collection[JobState]) -> object:
    if isinstance(job, ReshardError) or job.state in states:
        return job
    return WrongState(job=job.id, state=job.state, why=f"only {', '.join(sorted(states))} jobs are eligible")


@operation("POST", "/jobs/delete")
def delete_jobs(session: InProcess, body: Chosen) -> jobs.Deleted:
    """Delete jobs that have ended, by ID or by filter."""
    queue = session.queue
    kept = queue.catalogs.awaited()
    chosen, named = body.ids(queue, ENDED), list[str]()
    for job in queue.jobs.each(body.jobs):
        if isinstance(job, JobNotFound) and len(body.jobs) > 1 and not body.dry_run:
            continue  # gone since they were chosen, as it is to be
        if isinstance(job, JobUnreadable):  # the step that deletes it sees whether it has ended
            named.append(job.facts["job"])
            continue
        if isinstance(job, ReshardError):
            raise job
        if not job.state.ended:
            raise JobUnderWay(job=job.id, state=job.state)
        if job.id in kept:
            raise WrongState(job=job.id, state=job.state, why=f"it cannot be deleted until {AWAITED}")
        named.append(job.id)
    found = named if body.jobs else chosen
    kept &= {*found}
    found = [id for id in dict.fromkeys(found) if id not in kept]
    found = found if body.dry_run else queue.jobs.delete(found)
    deleted = 0 if body.dry_run else len(found)
    return jobs.Deleted(deleted=deleted, dry_run=body.dry_run, ids=found, kept=sorted(kept))


@operation("GET", "/jobs/{job}")
def show(session: InProcess, job: str) -> jobs.JobNow:
    """Show a job, and why it is waiting."""
    return now(session.queue, session.queue.jobs.get(job))


@operation("GET", "/jobs/{job}/report")
def report(session: InProcess, job: str) -> jobs.JobReport:
    """Show the checks of a job."""
    return report_of(shown(session.queue.jobs.get(job)))


def report_of(job: jobs.Job) -> jobs.JobReport:
    """The checks of a job, and the error where one of them ended it."""
    error, checks = job.error and job.error.error(), job.all_checks
    failed = isinstance(error, ProofError | CheckpointError) or any(check.result == "failed" for check in checks)
    failed = failed or job.state == "failed"
    result = "failed" if failed else "passed" if job.confirmed or job.state == "done" else "unfinished"
    attested = job.published.attested if job.published else {}
    return jobs.JobReport.of(job, result=result, checks=checks, attested=attested)


@operation("GET", "/jobs/{job}/plan")
def show_plan(session: InProcess, job: str) -> Plan:
    """Show a job's plan; available until an hour after the job is done."""
    from reshard.client.plan import document_of  # which a client that only submits need not wait for

    found, plan = session.queue.jobs.get(job), session.queue.jobs.plan(job)
    if plan is None:
        why = "it ended before it had a plan" if found.state.ended else "it has no plan yet"
        why = "its plan is no longer stored" if session.queue.jobs.plan_digest(found.id) else why
        raise WrongState(job=found.id, state=found.state, why=why)
    return document_of(found.request, plan)


@operation("GET", "/jobs/{job}/files")
def files(session: InProcess, job: str) -> jobs.JobFiles:
    """Show the files that a job writes, and the progress of each."""
    found = session.queue.jobs.get(job)
    known = files_of(session.queue, found)
    return jobs.JobFiles(files=known, more=max(0, found.shards - len(known)))


@operation("GET", "/jobs/{job}/log")
def log(session: InProcess, job: str) -> jobs.JobLog:
    """Show the last log lines from a job's workers; once the job is done, they are kept for an hour."""
    found = session.queue.jobs.get(job)
    return jobs.JobLog.of(found, lines=session.queue.jobs.log(found.id))


@operation("GET", "/jobs/{job}/attested")
def attested(session: InProcess, job: str) -> jobs.AttestedFiles:
    """Show how each source file of a job was checked; available until an hour after the job is done."""
    return jobs.AttestedFiles(attested=session.queue.jobs.attested(job))


@operation("GET", "/jobs/{job}/changes")
def changes(session: InProcess, job: str, query: Since) -> jobs.Changes:
    """Show what has happened to a job since an earlier response, and its current state."""
    store = session.queue.jobs
    events = store.events(job, query.after)
    last = events[-1][0] if events else query.after
    return jobs.Changes(
        events=readable(fields for _, fields in events), next=last, job=now(session.queue, store.get(job))
    )


@operation("POST", "/jobs/{job}/cancel")
def cancel(session: InProcess, job: str) -> jobs.Cancelled:
    """Cancel a job before it publishes."""
    id = session.queue.jobs.resolve(job)
    return jobs.Cancelled(id=id, was=session.queue.jobs.cancel(id), state="cancelled")


@operation("POST", "/jobs/{job}/retry")
def retry(session: InProcess, job: str, body: Again) -> jobs.Retried:
    """Retry a failed or cancelled job, reusing copied files."""
    store = session.queue.jobs
    id = store.resolve(job)
    was = store.retry(id, anew=body.anew, overwrite=body.overwrite)
    found = store.get(id)
    waits = session.queue.waits(found.request.priority == "bulk")
    return jobs.Retried(id=id, was=was, state=found.state, waits=waits)


@operation("POST", "/jobs/{job}/rollback")
def roll_back(session: InProcess, job: str) -> jobs.RolledBack:
    """Undo the commit of a job, using the service's token."""
    from reshard.client.acts import roll_back

    found = shown(session.queue.jobs.get(job))
    if found.own is None:  # before a token is needed
        raise WrongState(job=found.id, state=found.state, why="it published nothing, so there is nothing to undo")
    with session.hub() as context:
        session.allow(found.request, context)
        return roll_back(session.queue, found, found.own, context, session.served)


@operation("DELETE", "/jobs/{job}")
def delete(session: InProcess, job: str) -> jobs.Deleted:
    """Delete a job that has ended; published results stay."""
    return delete_jobs(session, Chosen(jobs=[session.queue.jobs.resolve(job)]))


@operation("POST", "/plan")
def plan(session: InProcess, body: Drafted) -> Planned:
    """Show what a job would do, without doing it; uses the service's token."""
    return looked(session, body).document


def looked(session: InProcess, body: Drafted) -> Looked:
    """The same with what it was made from."""
    from reshard.client.plan import look

    request = body.request(session.caller)
    session.allow(request, has_target=request.target != NOWHERE)
    with session.hub() as context:
        return look(request, context)


@operation("GET", "/service")
def service(session: InProcess) -> jobs.Service:
    """Show the queue and its processes."""
    from reshard.worker.queue.jobs import without_password

    queue = session.queue
    drained, resting = queue.fleet.all_drained(), queue.fleet.resting()
    return jobs.Service(
        broker=without_password(queue.jobs.url),
        jobs={str(state): number for state, number in queue.jobs.counts().items() if number},
        waiting=queue.jobs.waiting(),
        waits=queue.waits(bulk=True),
        processes=[
            jobs.ProcessNow.of(process, drained=process.name in drained, resting=process.name in resting)
            for process in queue.jobs.processes()
        ],
        silent=silent(queue),
    )
