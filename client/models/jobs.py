"""What is said of jobs, and of one repository or installation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    model_serializer,
)

from reshard.client.models.plans import Plan
from reshard.client.models.records import (
    Bytes,
    Check,
    Claim,
    Commit,
    Document,
    Known,
    Moment,
    Problem,
    Process,
    Seconds,
    SilentProcess,
    Symptom,
)
from reshard.worker.queue.states import CANCELLABLE, JobState

OVER = [state for state in JobState if state.ended]
BEGUN = [state for state in JobState if state not in {JobState.queued, *OVER}]  # a worker may be at them


def _state(name: object) -> JobState:
    if not isinstance(name, str):
        raise ValueError("must be a string")
    return JobState.known(name)


# One that only a newer release knows is shown.
State = Annotated[
    JobState, PlainValidator(_state), PlainSerializer(str, return_type=str), WithJsonSchema({"type": "string"})
]


class Moved(Document):
    read: Bytes
    uploaded: Bytes
    deduplicated: Bytes
    expected: Bytes


class Finished(Document):
    """The result of a run."""

    state: Literal["done"]
    target: str
    published: Commit
    checks: list[Check]
    source_bytes: dict[str, list[str]]
    moved: Moved
    seconds: Seconds


class Published(Commit):
    """The published result of a job, its source commit, and the checks before it was published."""

    source: str | None = None
    attested: dict[str, int] = Field(
        default_factory=dict, description="number of source files by how they were checked"
    )
    checks: list[Check] = Field(default_factory=list)


class Job(Document):
    id: str
    state: State
    request: Known
    created: Moment
    since: Moment
    started: Moment
    bytes: Bytes
    bytes_done: Bytes
    shards: int
    shards_done: int
    read: int
    expected: int
    uploaded: int
    deduplicated: int
    rate: float | None = Field(default=None, description="bytes copied per second over the last ten minutes")
    claims: list[Claim]
    error: Problem | None
    last_error: Problem | None
    note: str | None
    logged: int = Field(default=0, description="number of lines that its workers logged; `log` has the last ones")
    notes: list[str]
    checked: list[Check]
    published: Published | None
    confirmed: list[Check]
    rolled_back: str | None

    @property
    def all_checks(self) -> list[Check]:
        """Every check that was made, in order; one that failed is kept with the error that the job ended with."""
        copied = self.published.checks if self.published else []
        failed = self.error.checks() if self.error else []
        return [*self.checked, *copied, *self.confirmed, *failed]

    @property
    def own(self) -> Published | None:
        """What it has published itself.

        A found commit is its own if it had work to do: then its author did not live to record it.
        """
        return self.published if self.published and (self.confirmed or not self.published.found) else None

    def may(self) -> set[str]:
        """What makes sense to do with it now."""
        undoable = self.own is not None and not self.rolled_back and self.request.target.keeps
        ways = {
            "cancel": self.state in CANCELLABLE,
            "retry": self.state.ended and self.state != JobState.done,
            "rollback": self.state.ended and undoable,
            "delete": self.state.ended,
        }
        return {way for way, sense in ways.items() if sense}


class JobNow(Job):
    """A job, why it is waiting, and how long it will take."""

    waits: str | None = Field(description="why the job is waiting")
    place: int | None = Field(default=None, description="place in the queue before it starts; 1 is next")
    waiting: int | None = Field(default=None, description="number of jobs in that queue")
    left: Seconds | None = Field(
        default=None,
        description="seconds until it starts, or until everything is copied; null if unknown or waiting",
    )


class JobDone(Job):
    """A job that has ended, with the result of a run."""

    published: Published
    target: str
    checks: list[Check]
    source_bytes: dict[str, list[str]]
    moved: Moved
    seconds: Seconds


class ProcessNow(Process):
    drained: bool
    resting: bool


class Service(Document):
    """The queue and its processes."""

    broker: str
    jobs: dict[str, int] = Field(description="number of jobs by state")
    waiting: dict[str, int]
    waits: str | None
    processes: list[ProcessNow]
    silent: list[SilentProcess] = Field(default_factory=list)


class JobReport(Document):
    id: str
    state: str
    result: Literal["passed", "failed", "unfinished"]
    checks: list[Check]
    attested: dict[str, int]
    error: Problem | None


class JobFile(Document):
    """A file that a job writes, and its progress."""

    path: str
    size: Bytes
    tensors: int
    unit: str = Field(description="the task that copies the file; empty once the plan is deleted")
    state: Literal["waiting", "copying", "sealed"] = "waiting"
    done: Bytes = 0
    rate: float | None = Field(default=None, description="bytes per second while it is being copied; null if unknown")
    left: Seconds | None = Field(default=None, description="seconds until it is copied; null if unknown")


class JobFiles(Document):
    """The files in a job's plan; once the plan is deleted, only the first ones."""

    files: list[JobFile]
    more: int = Field(description="files that are not listed")


class LogLine(Document):
    """A line that a worker logged during a task; its text is printable and contains no secrets."""

    at: Moment
    level: str
    unit: str
    worker: str
    text: str


class JobLog(Document):
    id: str
    state: State
    logged: int = Field(description="number of lines logged in total")
    lines: list[LogLine] = Field(description="the last lines, newest last")


class Submitted(Document):
    id: str
    existed: bool
    waits: str | None
    state: str = "queued"


class Cancelled(Document):
    id: str
    was: str
    state: Literal["cancelled"]


class Retried(Document):
    id: str
    was: str
    state: str
    waits: str | None


class Refused(Document):
    id: str
    error: Problem


class Acted(Document):
    """The result of an action on several jobs."""

    dry_run: bool
    ids: list[str] = Field(description="jobs that were changed or, with `dry_run`, would be changed")
    refused: list[Refused]


class RolledBack(Document):
    id: str | None = Field(description="the job, if one was given")
    undone: str
    commit: str
    already: bool = Field(default=False, description="whether it had been rolled back before; nothing was done then")


class Deleted(Document):
    deleted: int
    dry_run: bool
    ids: list[str]
    kept: list[str]


class Verified(Document):
    place: str
    commit: str | None
    against: str | None
    deep: bool
    result: str
    checks: list[Check]


class Provenance(Document):
    place: str
    commit: str | None
    format: Literal["slsa", "cyclonedx", "json"]
    provenance: dict[str, Any] = Field(description="the provenance in that format")


class Probe(Document):
    state: Literal["ok", "warning", "trouble"]
    name: str
    says: str
    warning: str
    error: Problem | None
    facts: dict[str, Any]


class Installation(Document):
    """The checks of this installation and its queue."""

    state: Literal["ok", "warning", "trouble"]
    probes: list[Probe]


class Refusals(Document):
    always: Problem | None
    on_hub: Problem | None
    require_model: Problem | None


class Repository(Document):
    """The state and problems of a repository, and what `reshard run` would refuse."""

    place: str
    commit: str | None
    visibility: str | None
    state: Literal["ok", "warning", "trouble"]
    tensors: int
    bytes: Bytes
    symptoms: list[Symptom]
    refused: Refusals


# ---------------------------------------------------------------------------------------------------- on the way


class AttestedFiles(Document):
    attested: dict[str, str] = Field(description="how each source file was checked")


class PlanMade(Document):
    plan: Plan


class Waits(Document):
    """Why the job is now waiting; null when it continues."""

    waits: str | None


# A newer release's, without what is not known of it.
Lenient = Annotated[
    Problem,
    BeforeValidator(lambda data: Problem.model_validate(data, extra="ignore") if isinstance(data, dict) else data),
]


class Happened(BaseModel):
    """An event. Its kind determines which of these fields it has; all other fields are text."""

    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, Any]
    kind: str
    at: Moment
    attempt: int | None = Field(default=None, description="`claimed`: the number of this attempt at the task")
    waited: float | None = Field(default=None, description="first `claimed`: seconds since the job was submitted")
    took: float | None = Field(default=None, description="`finished`: seconds since the task was claimed")
    bytes: int | None = Field(default=None, description="`sealed`: size of the stored file")
    error: Lenient | None = Field(default=None, description="`trouble`, `voided`, `failed`: the error")

    @property
    def fields(self) -> dict[str, Any]:
        """Those that only its kind has."""
        return self.__pydantic_extra__

    @model_serializer(mode="wrap")
    def _of_its_kind(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if name in self.model_fields_set}


# Read by itself: who passes over unknown fields of a document would pass over an event's own.
Told = Annotated[
    Happened, BeforeValidator(lambda data: data if isinstance(data, Happened) else Happened.model_validate(data))
]


class Event(Document):
    """An event of a job."""

    event: Told


class Failed(Document):
    """The last document of a failed command."""

    error: Problem


class FailedModel(Document):
    repo: str
    job: str | None
    error: Problem


class ModelFailed(Document):
    """A model in a catalog failed."""

    failed: FailedModel


class JobsPage(Document):
    """A page of jobs, newest first."""

    jobs: list[JobNow]
    next: str | None = Field(description="`after` for the next page; null on the last page")
    unreadable: dict[str, str] = Field(description="why a job's record cannot be read, by job ID")
    counts: dict[str, int] = Field(description="number of all jobs, by state")
    waits: str | None = Field(description="why no jobs are starting now")


class Progress(Document):
    """The progress of a job."""

    id: str
    state: State
    bytes: Bytes
    bytes_done: Bytes
    shards: int
    shards_done: int
    note: str | None
    rate: float | None
    claims: list[Claim]
    logged: int


class Changes(Document):
    """What has happened to a job since an earlier response, and its current state."""

    events: list[Told]
    next: str = Field(description="`after` for the next request")
    job: JobNow
