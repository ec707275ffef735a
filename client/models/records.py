"""What documents are made of: their base, and the records that several of them have."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from reshard.pipeline.errors import ReshardError
from reshard.pipeline.request import Request

Bytes = Annotated[int, Field(description="bytes")]
Moment = Annotated[float, Field(description="seconds since the epoch")]
Seconds = Annotated[float, Field(description="seconds")]
Resident = Annotated[int | None, Field(description="memory of the process and its children in bytes; null if unknown")]
OnDisk = Annotated[int | None, Field(description="size of these processes' temporary files in bytes; null if unknown")]


def _newer(value: Any, known: ValidatorFunctionWrapHandler) -> Any:
    """What only a newer release of the same queue says; it is shown as it stands."""
    try:
        return known(value)
    except ValidationError:
        if isinstance(value, str) and value.isidentifier():
            return value
        raise


Newer = WrapValidator(_newer)
Checked = Annotated[Literal["passed", "failed", "skipped", "inconclusive"], Newer]
Fired = Annotated[Literal["fired", "missed", "overlap", "busy", "full"], Newer]
Outcome = Annotated[Literal["published", "same", "unchanged", "failed", "cancelled"], Newer]


# A request of a newer release as far as this one knows it, to be shown.
Known = Annotated[
    Request, BeforeValidator(lambda data: Request.known(json.dumps(data))[0] if isinstance(data, dict) else data)
]


def absent(value: object) -> bool:
    """For fields that a document has only where there is something to say."""
    return value is None


class Document(BaseModel):
    """No field but these."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def of(cls, record: object, **more: object) -> Self:
        """What the code keeps, with ``more`` fields that its record has not; raises ValidationError."""
        known = {name: getattr(record, name) for name in cls.model_fields if name not in more}
        return cls.model_validate(known | more, strict=False, extra="ignore", from_attributes=True)

    def document(self) -> dict[str, Any]:
        """JSON-able, without its version."""
        return self.model_dump(mode="json", by_alias=True)


class Check(Document):
    name: str
    result: Checked
    level: str
    reason: str
    figures: dict[str, Any]
    findings: list[str]


class Commit(Document):
    commit: str
    ref: str
    found: bool


class Claim(Document):
    unit: str
    worker: str
    since: Moment
    bytes: Bytes
    attempt: int
    waits: str
    rate: float | None = Field(default=None, description="bytes copied per second over the last ten minutes")


class Process(Document):
    name: str
    kind: str
    version: str
    host: str
    pid: int
    concurrency: int
    started: Moment
    draining: bool
    memory: Resident
    temporary: OnDisk
    queues: list[str] = Field(default=["interactive", "bulk"], description="the job priorities that a worker accepts")


class SilentProcess(Process):
    """A worker or control process that stopped responding without shutting down."""

    told: Moment = Field(description="when it last responded")
    why: Literal["stopped", "hangs", "unknown"] = Field(
        description="`unknown` if the process is on another machine, or the broker may have been unavailable"
    )
    says: str = Field(description="what happened and what to do, as text")


class Pause(Document):
    since: Moment
    by: str
    reason: str | None


class Closed(Document):
    why: Literal["window", "night"]
    until: Moment


class Fault(Document):
    since: Moment
    code: str
    message: str
    hint: str


class Limits(Document):
    bandwidth: int | None
    night_bytes: int | None
    window: str | None
    tz: str


class Forecast(Document):
    reads: int
    read: int
    written: int
    seams: int
    uploaded: int
    at_most: bool
    amplification: float


class Needs(Document):
    memory: int
    disk: int
    least_disk: int
    target: int
    api_calls: int
    resolver_calls: int
    history: int


class Symptom(Document):
    kind: str
    text: str
    cure: str


class Run(Document):
    at: Moment
    due: Moment
    outcome: Fired
    job: str | None


class Problem(Document):
    """An error: its code, its message, a hint and its facts."""

    code: str
    message: str
    hint: str
    facts: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _of_error(cls, data: Any) -> Any:
        return data.to_dict() if isinstance(data, ReshardError) else data

    def checks(self) -> list[Check]:
        """The failed ones that it tells of."""
        return [Check.model_validate(check, extra="ignore") for check in self.facts.get("checks", ())]

    def error(self) -> ReshardError:
        """The error itself, to be raised again."""
        return ReshardError.from_dict(self.document())


class Sized(Document):
    path: str
    size: Bytes


class Named(Document):
    name: str
    size: Bytes
