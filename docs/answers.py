"""What every command writes with --json: the models behind docs/reference/json.md, which tests hold each document to.

Records that the code keeps as dataclasses are taken from there, field by field.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from reshard.cli.output import SCHEMA
from reshard.pipeline import check
from reshard.pipeline.doctor.health import Symptom as SymptomRecord
from reshard.pipeline.planning import estimate
from reshard.pipeline.publishing import commit
from reshard.pipeline.request import Request
from reshard.worker.fleet import fleet
from reshard.worker.followers import records, schedules
from reshard.worker.queue import jobs

Bytes = Annotated[int, Field(description="bytes")]
Moment = Annotated[float, Field(description="seconds since the epoch")]
Seconds = Annotated[float, Field(description="seconds")]


class Answer(BaseModel):
    """No field but these."""

    model_config = ConfigDict(extra="forbid", strict=True)


def of(name: str, record: Any, without: tuple[str, ...] = (), **changed: Any) -> Any:
    """The model of a dataclass or NamedTuple; ``changed`` fields are other types in JSON, or only there."""
    hints = get_type_hints(record, include_extras=True)
    names = record._fields if issubclass(record, tuple) else [field.name for field in fields(record)]
    known = {field: hints[field] for field in names if field not in without}
    return create_model(name, __base__=Answer, **{field: (type_, ...) for field, type_ in (known | changed).items()})


# ------------------------------------------------------------------------------------------------------- records

Check = of("Check", check.Check, findings=list[str])
Commit = of("Commit", commit.Published)
Claim = of("Claim", jobs.Claim, since=Moment, bytes=Bytes)
Resident = Annotated[
    int | None, Field(description="bytes of its memory and its children's; null: its system does not tell")
]
OnDisk = Annotated[int | None, Field(description="bytes of their temporary files; null: its system does not tell")]
Process = of("Process", jobs.Process, started=Moment, memory=Resident, temporary=OnDisk)
Pause = of("Pause", fleet.Pause, since=Moment)
Closed = of("Closed", fleet.Closed, until=Moment)
Fault = of("Fault", fleet.Fault, since=Moment)
Limits = of("Limits", fleet.Limits, window=str | None)
Forecast = of("Forecast", estimate.Forecast, amplification=float)
Needs = of("Needs", estimate.Needs)
Symptom = of("Symptom", SymptomRecord)
Run = of("Run", schedules.Run, at=Moment, due=Moment)


class Problem(Answer):
    """What went wrong: an error's code, what it says, the next step, and the facts in it."""

    code: str
    message: str
    hint: str
    facts: dict[str, Any]


class Sized(Answer):
    path: str
    size: Bytes


class Named(Answer):
    name: str
    size: Bytes


class Shard(Sized):
    tensors: int
    oversize: str | None = Field(None, description="the tensor that is larger than the size")


class Largest(Answer):
    file: Sized
    tensor: Named | None


class Tie(Answer):
    names: list[str]
    written: list[str]


class Group(Answer):
    files: int
    bytes: Bytes


class LeftOut(Answer):
    path: str
    why: str


class Replaced(Sized):
    deleted: bool = Field(description="or else overwritten")


class Transports(Answer):
    source: str
    target: str


class Device(Answer):
    device: str
    limit: Bytes | None
    bytes: Bytes
    files: list[str]


class Block(Answer):
    name: str
    device: str
    bytes: Bytes
    files: list[str]


class DeviceMap(Answer):
    checkpoint: str
    result: str
    reason: str
    class_: str | None = Field(None, alias="class")
    kept_whole: list[str] | None = None
    devices: list[Device] | None = None
    blocks: list[Block] | None = None
    notes: list[str] | None = None


class Plan(Answer):
    """What will be written, carried, deleted and kept."""

    source: str
    target: str | None = Field(description="null where only the cut is planned")
    into: str | None = Field(description="the target in words, with its branch or pull request")
    undo: str | None = Field(description="the target as `reshard rollback` takes it")
    commit: str | None = Field(description="of the source")
    base: str | None = Field(description="the target's commit that the plan was made for")
    digest: str
    published: str | None = Field(description="the commit that has all this already")
    size: Bytes
    tensors: int
    bytes_read: Bytes
    bytes_written: Bytes
    transports: Transports
    forecast: Forecast
    reads: list[Sized]
    files: list[Shard]
    largest: Largest | None
    ties: list[Tie]
    indexes: list[str]
    manifest: str | None
    groups: list[Group]
    card: str | None
    carried: list[Sized]
    edited: list[str]
    left_out: list[LeftOut]
    replaced: list[Replaced]
    overwrite: bool
    in_place: bool
    may_replace: bool
    deletes: list[str]
    kept: list[str]
    drift: list[str]
    occupied: list[str]
    notes: list[str]


class Planned(Plan):
    """`reshard plan` also tells what the job needs, unless it is published already."""

    needs: Needs | None = None
    licence: str | None = None
    warnings: list[str] = []
    device_maps: list[DeviceMap] = []


class Moved(Answer):
    read: Bytes
    uploaded: Bytes
    deduplicated: Bytes
    expected: Bytes


class Finished(Answer):
    """The end of a run."""

    state: Literal["done"]
    target: str
    published: Commit
    checks: list[Check]
    source_bytes: dict[str, list[str]]
    moved: Moved
    seconds: Seconds


Job = of(
    "Job",
    jobs.Job,
    state=str,
    request=Request,
    created=Moment,
    since=Moment,
    started=Moment,
    bytes=Bytes,
    bytes_done=Bytes,
    claims=list[Claim],
    error=Problem | None,
    last_error=Problem | None,
    notes=list[str],
    checked=list[Check],
    confirmed=list[Check],
)


class JobNow(Job):
    """A job, and why nothing of it moves."""

    waits: str | None


class JobDone(Job):
    """A job that was followed to its end, with what a run ends with."""

    target: str
    checks: list[Check]
    source_bytes: dict[str, list[str]]
    moved: Moved
    seconds: Seconds


class ProcessNow(Process):
    drained: bool
    resting: bool


class Service(Answer):
    """The queue and its processes."""

    broker: str
    jobs: dict[str, int] = Field(description="by state")
    waiting: dict[str, int]
    waits: str | None
    processes: list[ProcessNow]


class JobReport(Answer):
    id: str
    state: str
    result: Literal["passed", "failed", "unfinished"]
    checks: list[Check]
    attested: dict[str, int]
    error: Problem | None


class Submitted(Answer):
    id: str
    existed: bool
    waits: str | None


class Cancelled(Answer):
    id: str
    was: str
    state: Literal["cancelled"]


class Retried(Answer):
    id: str
    was: str
    state: Literal["queued"]
    waits: str | None


class RolledBack(Answer):
    id: str | None = Field(description="the job's, where one was named")
    undone: str
    commit: str


class Deleted(Answer):
    deleted: int
    dry_run: bool
    ids: list[str]
    kept: list[str]


class Verified(Answer):
    place: str
    commit: str | None
    against: str | None
    deep: bool
    result: str
    checks: list[Check]


class Probe(Answer):
    state: Literal["ok", "warning", "trouble"]
    name: str
    says: str
    warning: str
    error: Problem | None
    facts: dict[str, Any]


class Installation(Answer):
    """Without a repository: this installation and its queue."""

    state: Literal["ok", "warning", "trouble"]
    probes: list[Probe]


class Refusals(Answer):
    always: Problem | None
    on_hub: Problem | None
    require_model: Problem | None


class Repository(Answer):
    """With a repository: its state, its symptoms, and what `reshard run` would refuse."""

    place: str
    commit: str | None
    visibility: str | None
    state: Literal["ok", "warning", "trouble"]
    tensors: int
    bytes: Bytes
    symptoms: list[Symptom]
    refused: Refusals


class CatalogWrong(Problem):
    repo: str


class CatalogEntry(Answer):
    repo: str
    target: str | None
    commit: str | None
    bytes: Bytes | None
    exists: bool
    standing: str
    error: str | None


class CatalogChecked(Answer):
    name: str
    models: int
    empty: list[int] = Field(description="numbers of entries that find no model")
    unwritable: list[str]
    ready: int
    new: int
    gated: list[str]
    bytes: Bytes
    growth: Bytes
    calls: int
    unchanged: int | None
    drift: list[str] | None
    wrong: list[CatalogWrong]
    entries: list[CatalogEntry]


class CatalogSubmitted(Answer):
    name: str
    digest: str
    existed: bool
    waits: str | None
    outdated_schedules: list[str]


Ended = of("Ended", records.Ended, repo=str, target=str | None, read=Bytes, uploaded=Bytes, error=Problem | None)


class Catalog(Answer):
    name: str
    digest: str
    state: str
    note: str | None
    started: Moment
    since: Moment
    success: Moment | None
    entries: int
    todo: int
    active: dict[str, str] = Field(description="job by repository")
    empty: list[int]
    counts: dict[str, int]
    read: Bytes
    uploaded: Bytes
    ended: list[Ended]


class CatalogFailure(Answer):
    repo: str
    job: str | None
    code: str
    message: str
    hint: str
    facts: dict[str, Any]


class CatalogFailures(Answer):
    name: str
    failures: dict[str, list[CatalogFailure]] = Field(description="by error code")


class CatalogRetried(Answer):
    name: str
    again: int
    left: dict[str, int] = Field(description="by error code")


class CatalogState(Answer):
    name: str
    state: str


class CatalogCancelled(CatalogState):
    jobs: int


class CatalogRemoved(Answer):
    name: str
    removed: Literal[True]
    schedules: list[str]


class Schedule(Answer):
    name: str
    cron: str
    tz: str
    missed: Literal["once", "skip"]
    request: Request | None
    catalog: records.Definition | None
    digest: str | None
    next: Moment | None = Field(description="null while it is paused")
    success: Moment | None
    outdated: bool
    runs: list[Run]
    last: str


class ScheduleNext(Answer):
    name: str
    next: Moment | None


class WouldSubmit(Answer):
    source: str
    target: str
    published: str | None
    files: int
    bytes: Bytes


class Would(Answer):
    outcome: str
    job: str | None
    request: WouldSubmit | None = None
    catalog: CatalogChecked | None = None


class ScheduleTimes(Answer):
    name: str
    next: list[Moment]
    would: Would | None = Field(None, description="with --dry-run")


class ScheduleFired(Answer):
    name: str
    outcome: str
    job: str | None
    waits: str | None


class ScheduleSet(Answer):
    name: str
    digest: str


class ScheduleRemoved(Answer):
    name: str
    removed: Literal[True]


class FleetLimits(Answer):
    paused: Pause | None
    limits: Limits
    bulk_rests: Closed | None
    night: Moment
    read_in_the_night: Bytes
    bytes_a_second: int
    held: int = Field(description="bulk jobs that wait")
    drained: list[str]
    resting: dict[str, Fault]


class WorkerNow(Answer):
    name: str
    state: str
    concurrency: int
    at: list[str] = Field(description="units of jobs")


class Fleet(FleetLimits):
    workers: list[WorkerNow]


class FleetPaused(Answer):
    paused: Pause
    was_paused: bool


class FleetResumed(Answer):
    paused: None
    was_paused: bool


class Drained(Answer):
    name: str
    drained: Literal[True]


class Undrained(Answer):
    name: str
    drained: Literal[False]
    was_drained: bool


class Up(Answer):
    broker: str
    started: list[str]
    found: list[str]
    data_dir: str
    log_dir: str
    notes: list[str]


class Down(Answer):
    stopped: list[str]


# ---------------------------------------------------------------------------------------------------- on the way


class PlanMade(Answer):
    plan: Plan


class Waits(Answer):
    """Why nothing moves from now on; null: no more."""

    waits: str | None


class Happened(BaseModel):
    """The kind says which of these there are; other fields are text."""

    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, str]
    kind: str
    at: Moment
    attempt: int | None = Field(None, description="claimed: how often that unit was")
    waited: float | None = Field(None, description="claimed first: seconds since the job was asked for")
    took: float | None = Field(None, description="finished: seconds since the unit was claimed")
    bytes: int | None = Field(None, description="sealed: of the shard")
    error: Problem | None = Field(None, description="trouble, voided, failed: why")


class Event(Answer):
    """What happened to a job."""

    event: Happened


class Failed(Answer):
    """The last document of a command that failed."""

    error: Problem


class FailedModel(Answer):
    repo: str
    job: str | None
    error: Problem


class ModelFailed(Answer):
    """A model of a catalog failed."""

    failed: FailedModel


# What each command writes: one of these, or first any number of those on the way.
_FOLLOWED = (PlanMade, Event, Waits, JobDone)
_CATALOG_FOLLOWED = (Waits, ModelFailed, Catalog)
ANSWERS: dict[str, tuple[Any, ...]] = {
    "plan": (Planned,),
    "run": (PlanMade, Waits, Finished),
    "verify": (Verified,),
    "doctor": (Installation, Repository),
    "submit": (Submitted, *_FOLLOWED),
    "status": (JobNow, Service, JobReport),
    "list": (Job,),
    "watch": _FOLLOWED,
    "cancel": (Cancelled,),
    "retry": (Retried, *_FOLLOWED),
    "rollback": (RolledBack,),
    "delete": (Deleted,),
    "up": (Up,),
    "down": (Down,),
    "catalog check": (CatalogChecked,),
    "catalog submit": (CatalogSubmitted, *_CATALOG_FOLLOWED),
    "catalog watch": _CATALOG_FOLLOWED,
    "catalog status": (Catalog,),
    "catalog failures": (CatalogFailures,),
    "catalog retry": (CatalogRetried,),
    "catalog pause": (CatalogState,),
    "catalog resume": (CatalogState,),
    "catalog cancel": (CatalogCancelled,),
    "catalog remove": (CatalogRemoved,),
    "schedule add": (ScheduleNext,),
    "schedule set": (ScheduleSet,),
    "schedule list": (Schedule,),
    "schedule show": (Schedule,),
    "schedule next": (ScheduleTimes,),
    "schedule run": (ScheduleFired,),
    "schedule pause": (ScheduleNext,),
    "schedule resume": (ScheduleNext,),
    "schedule remove": (ScheduleRemoved,),
    "fleet status": (Fleet,),
    "fleet pause": (FleetPaused,),
    "fleet resume": (FleetResumed,),
    "fleet drain": (Drained,),
    "fleet undrain": (Undrained,),
    "fleet limit": (FleetLimits,),
}


def check_document(command: str, line: str) -> dict[str, Any]:
    """The document without its version; raises ValueError unless the command may write it."""
    document: dict[str, Any] = json.loads(line)
    if document.pop("schema", None) != SCHEMA:
        raise ValueError(f"{command}: no schema {SCHEMA} in {line}")
    answer = json.dumps(document)
    problems = []
    for model in (*ANSWERS[command], Failed):
        try:
            model.model_validate_json(answer)
        except ValidationError as error:
            problems.append(error)
        else:
            return document
    closest = min(problems, key=lambda error: error.error_count())
    raise ValueError(f"`{command}` wrote what docs/answers.py does not have: {closest}\n{line}")
