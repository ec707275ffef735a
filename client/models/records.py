"""Fields and records that documents share, each record as the code keeps it, field by field."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from reshard.pipeline import check
from reshard.pipeline.doctor.health import Symptom as SymptomRecord
from reshard.pipeline.planning import estimate
from reshard.pipeline.publishing import commit
from reshard.worker.fleet import fleet
from reshard.worker.followers import schedules
from reshard.worker.queue import jobs, record

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
    known: dict[str, Any] = {field: hints[field] for field in names if field not in without}
    given: dict[str, Any] = {field: (type_, ...) for field, type_ in (known | changed).items()}
    return create_model(name, __base__=Answer, **given)


# ------------------------------------------------------------------------------------------------------ records

Check = of("Check", check.Check, findings=list[str])
Commit = of("Commit", commit.Published)
Claim = of("Claim", record.Claim, since=Moment, bytes=Bytes)
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
