"""One job as its record tells it, and as it was at one moment."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import redis
from pydantic import ValidationError

from reshard.pipeline.errors import JobUnreadable, ReshardError, shortened
from reshard.pipeline.request import Request
from reshard.pipeline.validation import first_problem
from reshard.worker.queue.pace import rate
from reshard.worker.queue.scripts import Pipeline, decoded, each_or_error, job_key
from reshard.worker.queue.states import JobState


@dataclass(frozen=True, slots=True)
class Claim:
    """A unit of work that a worker holds now."""

    unit: str  # plan, check, group:00000, publish, confirm
    worker: str
    since: float  # seconds since the epoch
    bytes: int  # copied since its last seal
    attempt: int
    waits: str = ""  # why it waits for the Hub, if it does
    rate: float | None = None  # bytes a second, of the last ten minutes at most


@dataclass(frozen=True, slots=True)
class LogLine:
    """What a worker logged while it had a unit; without secrets and printable, as in its own log."""

    at: float  # seconds since the epoch, by the worker's clock
    level: str
    unit: str
    worker: str
    text: str  # who says it, and what


@dataclass(frozen=True, slots=True)
class Job:
    """One job as it was at one moment; sizes in bytes, times in seconds since the epoch by the server's clock."""

    id: str
    state: JobState
    request: Request
    created: float
    since: float  # when it came into this state
    started: float = 0.0  # when a worker took it up after the submit or the last retry; before that, as ``since``
    bytes: int = 0  # to copy; 0 before there is a plan
    bytes_done: int = 0
    shards: int = 0
    shards_done: int = 0
    read: int = 0  # bytes of the source
    expected: int = 0  # bytes that the plan said would be sent
    uploaded: int = 0  # bytes sent to the target's store
    deduplicated: int = 0  # bytes that it had already
    rate: float | None = None  # bytes a second, of the last ten minutes
    claims: tuple[Claim, ...] = ()
    error: dict[str, Any] | None = None  # why it ended, as ReshardError.to_dict
    last_error: dict[str, Any] | None = None  # what went wrong last, and is tried again
    note: str | None = None  # why it waits
    logged: int = 0  # lines that workers logged of it, of which the last are kept
    notes: tuple[str, ...] = ()  # the plan's
    checked: list[dict[str, Any]] = field(default_factory=list)  # the checks of the reload
    published: dict[str, Any] | None = None  # commit, ref, found, source, attested, and the checks of the copy
    confirmed: list[dict[str, Any]] = field(default_factory=list)  # the checks of what was published
    rolled_back: str | None = None  # the commit that rolled the published one back


def read(id: str, record: Any, units: Any, now: int) -> Job:
    """The job of these hashes, as the broker answers them ``now`` (ms by its clock).

    Raises JobUnreadable for what no release of ours writes.
    """
    try:
        return _job(decoded(record), decoded(units), now)
    except ValidationError as error:
        first = first_problem(error)
        raise JobUnreadable(job=id, why=f"{first.where or 'its request'}: {first.why}") from error
    except (ReshardError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise JobUnreadable(job=id, why=shortened(f"{type(error).__name__}: {error}")) from error


def states(client: redis.Redis, jobs: Iterable[str]) -> list[JobState | None]:
    """Of each job; None where its record is gone, or a client overwrote it, so that nobody waits for its end."""
    found = each_or_error(client, lambda pipe: [pipe.hget(job_key(job), "state") for job in jobs])
    return [_state(state) for state in found]


def state_of(pipe: Pipeline, job: str) -> JobState | None:
    """The same of one job, also in a transaction that still reads."""
    try:
        return _state(pipe.hget(job_key(job), "state"))
    except redis.ResponseError as error:
        if "WRONGTYPE" not in str(error):
            raise
        return None


def _state(found: Any) -> JobState | None:
    """No release has one that is not ASCII."""
    return JobState.known(found.decode()) if isinstance(found, bytes) and found.isascii() else None


def _job(fields: dict[str, str], units: dict[str, str], now: int) -> Job:
    def parsed(name: str, default: Any = None) -> Any:
        return json.loads(fields[name]) if fields.get(name) else default

    names = ("bytes", "shards", "read", "expected", "uploaded", "deduplicated", "logged")
    numbers: dict[str, Any] = {name: int(fields.get(name, 0)) for name in names}
    request, unknown = Request.known(fields["request"])
    claims = tuple(_claim(name.removesuffix(".token"), units, now) for name in sorted(units) if name.endswith(".token"))
    return Job(
        id=fields["id"],
        state=JobState.known(fields["state"]),
        request=request,
        created=int(fields["created"]) / 1000,
        since=int(fields["since"]) / 1000,
        started=int(fields.get("started", fields["since"])) / 1000,
        bytes_done=int(fields.get("bytes_sealed", 0)) + sum(h.bytes for h in claims),
        shards_done=int(fields.get("shards_sealed", 0)),
        rate=rate(fields, now),
        claims=claims,
        error=parsed("error"),
        last_error=parsed("last_error"),
        note=fields.get("note"),
        notes=(*parsed("notes", ()), *(f"{name} is from a newer release and not supported" for name in unknown)),
        checked=parsed("checked", []),
        published=parsed("published"),
        confirmed=parsed("confirmed", []),
        rolled_back=fields.get("undone"),
        **numbers,
    )


def _claim(unit: str, units: dict[str, str], now: int) -> Claim:
    return Claim(
        unit=unit,
        worker=units.get(f"{unit}.worker", ""),
        since=int(units.get(f"{unit}.since", 0)) / 1000,
        bytes=int(units.get(f"{unit}.bytes", 0)),
        attempt=int(units.get(f"{unit}.attempts", 0)),
        waits=units.get(f"{unit}.waits", ""),
        rate=rate(units, now, f"{unit}."),
    )
