"""Operations of the fleet: all workers at once, or one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from reshard.client.models import fleet
from reshard.client.models.records import Limits, Pause
from reshard.client.operations.table import Body, InProcess, operation
from reshard.client.queue import Queue, worker_state

if TYPE_CHECKING:
    from reshard.worker.fleet.fleet import FleetStatus

REASON_MAX = 500  # characters of why a service is paused
LIMIT_MAX = 200  # characters of a limit as it is typed; the longest zone has 32


class Why(Body):
    reason: str | None = Field(default=None, max_length=REASON_MAX)


class Limiting(Body):
    """Limits as they are typed; `none` removes one, and those that are not given stay."""

    bandwidth: str | None = Field(default=None, max_length=LIMIT_MAX, description="of all copies together, as 200MB/s")
    night_bytes: str | None = Field(
        default=None, max_length=LIMIT_MAX, description="that bulk jobs read in a night, as 2TB"
    )
    window: str | None = Field(default=None, max_length=LIMIT_MAX, description="hours of bulk work, as 22:00-06:00")
    closed: str | None = Field(default=None, max_length=LIMIT_MAX, description="hours without it, in place of `window`")
    tz: str | None = Field(
        default=None,
        max_length=LIMIT_MAX,
        description="time zone of hours and nights",
        json_schema_extra={"format": "timezone"},
    )


@operation("GET", "/fleet")
def show_fleet(session: InProcess) -> fleet.Fleet:
    """Show the limits in force and the state of each worker."""
    seen = session.queue.fleet.seen()
    claims = session.queue.fleet.claims_by_worker()
    return fleet.Fleet(**dict(limits_of(seen)), workers=workers(session.queue, seen, claims))


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


@operation("POST", "/fleet/limits")
def limit_fleet(session: InProcess, body: Limiting) -> fleet.FleetLimits:
    """Set limits for all workers together."""
    session.queue.fleet.limit(body.model_dump(exclude_none=True))
    return limits_of(session.queue.fleet.seen())


@operation("POST", "/fleet/pause")
def pause_fleet(session: InProcess, body: Why) -> fleet.FleetPaused:
    """Stop all workers from starting anything, until resume."""
    was = session.queue.fleet.paused() is not None
    paused = session.queue.fleet.pause(session.caller, body.reason)
    return fleet.FleetPaused(paused=Pause.of(paused), was_paused=was)


@operation("POST", "/fleet/resume")
def resume_fleet(session: InProcess) -> fleet.FleetResumed:
    """Let a paused service continue."""
    return fleet.FleetResumed(paused=None, was_paused=session.queue.fleet.resume())


@operation("POST", "/fleet/workers/{worker}/drain")
def drain(session: InProcess, worker: str) -> fleet.Drained:
    """Make one worker hand back its work and take no more."""
    return fleet.Drained(name=session.queue.fleet.drain(worker), drained=True)


@operation("POST", "/fleet/workers/{worker}/undrain")
def undrain(session: InProcess, worker: str) -> fleet.Undrained:
    """Let a drained worker take work again."""
    name, was = session.queue.fleet.undrain(worker)
    return fleet.Undrained(name=name, drained=False, was_drained=was)
