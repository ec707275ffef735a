"""Operations of the fleet: all workers at once, or one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from reshard.client.models import fleet
from reshard.client.models.records import Limits, Pause, SilentProcess
from reshard.client.operations.table import Body, InProcess, operation
from reshard.client.queue import Queue, worker_state
from reshard.client.text import clock

if TYPE_CHECKING:
    from reshard.worker.fleet.fleet import FleetStatus

REASON_MAX = 500  # characters of why a service is paused
USAGE_DAYS, USAGE_DAYS_MAX = 30, 400  # days that are shown, and that are kept
Limit = Annotated[str | None, Field(max_length=200)]  # as it is typed; the longest zone has 32 characters


class Why(Body):
    reason: str | None = Field(default=None, max_length=REASON_MAX)


class UsageQuery(Body):
    by: Literal["submitter", "catalog", "day"] = "submitter"
    days: int = Field(default=USAGE_DAYS, ge=1, le=USAGE_DAYS_MAX, description="number of days, ending today (UTC)")


class Limiting(Body):
    """Limits for all workers. `none` removes a limit; limits that are not set are unchanged."""

    bandwidth: Limit = Field(default=None, description="total bandwidth limit for all copies, such as 200MB/s")
    night_bytes: Limit = Field(
        default=None,
        description="limit on data read by bulk jobs per day, such as 2TB; a day begins with `window`, or at midnight",
    )
    window: Limit = Field(default=None, description="hours when bulk jobs can run, such as 22:00-06:00")
    closed: Limit = Field(default=None, description="hours when bulk jobs cannot run; replaces `window`")
    tz: Limit = Field(
        default=None, description="time zone for the hours and days", json_schema_extra={"format": "timezone"}
    )


@operation("GET", "/fleet")
def show_fleet(session: InProcess) -> fleet.Fleet:
    """Show the current limits and the state of each worker."""
    seen = session.queue.fleet.seen()
    claims = session.queue.fleet.claims_by_worker()
    at_work = workers(session.queue, seen, claims)
    return fleet.Fleet(**dict(limits_of(seen)), workers=at_work, silent=silent(session.queue))


def silent(queue: Queue) -> list[SilentProcess]:
    return [SilentProcess.of(one.process, told=one.told, why=one.why, says=str(one)) for one in queue.silent()]


def workers(queue: Queue, seen: FleetStatus, claims: dict[str, list[str]]) -> list[fleet.WorkerNow]:
    """Each worker, with the units of jobs that it is at by ``claims``."""
    return [
        fleet.WorkerNow.of(
            process,
            state=worker_state(process, process.name in seen.drained, process.name in seen.resting),
            at=claims.get(process.name, []),
        )
        for process in queue.jobs.processes()
        if process.kind == "worker"
    ]


def limits_of(seen: FleetStatus) -> fleet.FleetLimits:
    return fleet.FleetLimits.of(
        seen,
        limits=Limits.of(seen.limits, window=str(seen.limits.window) if seen.limits.window else None),
        bulk_rests=seen.closed,
        read_in_the_night=seen.read,
        bytes_a_second=round(seen.rate),
        held=seen.deferred,
        drained=sorted(seen.drained),
        resting=dict(sorted(seen.resting.items())),
    )


@operation("GET", "/usage")
def usage(session: InProcess, query: UsageQuery) -> fleet.Usage:
    """Show resource usage by submitter, catalog or day."""
    from reshard.worker.followers.spending import COUNTED, DAY, spent
    from reshard.worker.queue.scripts import server_ms

    client = session.queue.jobs.redis
    today = server_ms(client) // 1000 // DAY
    days = range(today - query.days + 1, today + 1)
    total, rows = dict.fromkeys(COUNTED, 0), dict[str, dict[str, int]]()
    for one in spent(client, days):
        names = {"submitter": one.submitter, "catalog": one.catalog, "day": clock(one.day * DAY, "%Y-%m-%d")}
        row = rows.setdefault(names[query.by], dict.fromkeys(COUNTED, 0))
        for what, count in one.counts.items():
            row[what] += count
            total[what] += count
    found = [fleet.UsedBy(name=name, **_used(**counts)) for name, counts in rows.items()]
    found.sort(key=lambda row: (row.name, 0) if query.by == "day" else ("", row.read), reverse=True)
    return fleet.Usage(by=query.by, since=days.start * DAY, rows=found, total=fleet.Used(**_used(**total)))


def _used(took: int, **counts: int) -> dict[str, Any]:
    return {**counts, "worker_seconds": took / 1000}


@operation("POST", "/fleet/limits")
def limit_fleet(session: InProcess, body: Limiting) -> fleet.FleetLimits:
    """Set limits shared by all workers."""
    session.queue.fleet.limit(body.model_dump(exclude_none=True))
    return limits_of(session.queue.fleet.seen())


@operation("POST", "/fleet/pause")
def pause_fleet(session: InProcess, body: Why) -> fleet.FleetPaused:
    """Pause all workers until they are resumed."""
    was = session.queue.fleet.paused() is not None
    paused = session.queue.fleet.pause(session.caller, body.reason)
    return fleet.FleetPaused(paused=Pause.of(paused), was_paused=was)


@operation("POST", "/fleet/resume")
def resume_fleet(session: InProcess) -> fleet.FleetResumed:
    """Resume a paused service."""
    return fleet.FleetResumed(paused=None, was_paused=session.queue.fleet.resume())


@operation("POST", "/fleet/workers/{worker}/drain")
def drain(session: InProcess, worker: str) -> fleet.Drained:
    """Drain a worker: it requeues its tasks and accepts no more."""
    return fleet.Drained(name=session.queue.fleet.drain(worker), drained=True)


@operation("POST", "/fleet/workers/{worker}/undrain")
def undrain(session: InProcess, worker: str) -> fleet.Undrained:
    """Let a drained worker accept tasks again."""
    name, was = session.queue.fleet.undrain(worker)
    return fleet.Undrained(name=name, drained=False, was_drained=was)
