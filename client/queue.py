"""The queue of a broker: what is on it, who works on it, and why nothing is begun now."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime, tzinfo
from functools import cache, cached_property
from hashlib import sha256
from secrets import token_urlsafe
from typing import TYPE_CHECKING, NamedTuple
from zoneinfo import ZoneInfo

from reshard.pipeline.errors import BadSchedule

if TYPE_CHECKING:
    from reshard.client.models import records
    from reshard.worker.fleet.fleet import Closed, Fleet, Pause
    from reshard.worker.fleet.heartbeat import Silent
    from reshard.worker.followers.catalogs import Catalogs
    from reshard.worker.followers.pushes import Pushes
    from reshard.worker.followers.schedules import Schedules
    from reshard.worker.queue.jobs import JobStore, Process
    from reshard.worker.queue.pace import Lane
    from reshard.worker.queue.record import Job


LINK_LASTS = 600.0  # seconds


def _link_key(secret: str) -> str:
    return f"reshard:entry:{sha256(secret.encode()).hexdigest()}"


class Day(NamedTuple):
    """What control and workers counted, hour by hour, the oldest first."""

    hours: list[tuple[float, dict[str, int]]]  # when each began, in seconds since the epoch, with its counters
    least: dict[tuple[str, str], list[int | None]]  # percent of a window's calls left, by endpoint and kind
    left: dict[tuple[str, str], tuple[int, int]]  # the calls left now, and those of a whole window


class Queue:
    """Jobs, catalogs, schedules and the fleet of one broker; each is imported when it is used."""

    def __init__(self, jobs: JobStore) -> None:
        self.jobs = jobs

    @cached_property
    def fleet(self) -> Fleet:
        from reshard.worker.fleet.fleet import Fleet

        return Fleet(self.jobs)

    @cached_property
    def catalogs(self) -> Catalogs:
        from reshard.worker.followers.catalogs import Catalogs

        return Catalogs(self.jobs)

    @cached_property
    def schedules(self) -> Schedules:
        from reshard.worker.followers.schedules import Schedules

        return Schedules(self.jobs)

    @cached_property
    def pushes(self) -> Pushes:
        from reshard.worker.followers.pushes import Pushes

        return Pushes(self.jobs)

    def answering(self) -> AbstractContextManager[None]:
        """Inside, a broker that does not answer is BrokerUnavailable, whatever is asked of it."""
        from reshard.worker.queue.jobs import broker_errors

        return broker_errors(self.jobs.url)

    def new_link(self) -> str:
        """What whoever runs the service signs in by, once and within LINK_LASTS."""
        secret = token_urlsafe(32)
        self.jobs.redis.set(_link_key(secret), "", px=round(LINK_LASTS * 1000))
        return secret

    def use_link(self, secret: str) -> bool:
        """Whether it is such a one, which it is no more."""
        return self.jobs.redis.getdel(_link_key(secret)) is not None

    def lanes(self) -> dict[str, Lane]:
        from reshard.worker.queue.pace import lanes

        return lanes(self.jobs.redis)

    def day(self) -> Day:
        from reshard.worker.fleet.rate_limit import budgets, least_left
        from reshard.worker.followers.counters import by_hour
        from reshard.worker.queue.scripts import server_ms

        redis = self.jobs.redis
        hours = by_hour(redis, server_ms(redis))
        least = least_left(redis, [int(began) // 3600 for began, _ in hours])
        return Day(hours, least, budgets(redis))

    def waits(self, bulk: bool) -> str | None:
        """Why nothing, or no bulk work, is begun now; None when it is."""
        if (paused := self.fleet.paused()) is not None:
            return f"{pause_text(paused)}; resume it with `reshard fleet resume`"
        alive, queue = self.jobs.processes(), "bulk" if bulk else "interactive"
        processes = [process for process in alive if process.kind != "worker" or queue in process.queues]
        workers = [process.name for process in processes if process.kind == "worker"]
        if not workers and len(processes) < len(alive):
            return f"no worker accepts {queue} jobs: {START.format('worker')}"
        drained, resting = self.fleet.all_drained(), self.fleet.resting()
        if workers and drained.issuperset(workers):
            return f"all workers are drained; to undo that, run `reshard fleet undrain {workers[0]}`"
        if workers and (drained | resting.keys()).issuperset(workers):
            fault = next(fault for worker, fault in resting.items() if worker in workers)
            return f"all workers have paused after errors and are waiting to recover: {fault.message} ({fault.hint})"
        return (self._bulk_waits() if bulk else None) or self._full(processes) or _lacking(processes, self.silent)

    def _full(self, processes: Sequence[Process]) -> str | None:
        """That the broker takes no signs of life, if that is why one is lacking."""
        from reshard.worker.queue.scripts import full

        why = full(self.jobs.redis) if missing({process.kind for process in processes}) else ""
        return f"the broker refuses writes: {why}" if why else None

    def silent(self) -> list[Silent]:
        """The workers and controls that give no sign of life and did not end in order."""
        from reshard.worker.fleet.heartbeat import silent

        return silent(self.jobs.redis)

    def _bulk_waits(self) -> str | None:
        try:
            seen = self.fleet.seen()
        except BadSchedule as error:
            return f"cannot determine whether bulk jobs are allowed now: {error}"
        return f"bulk jobs are {bulk_text(seen.closed, seen.limits.tz)}" if seen.closed is not None else None


class Outlook(NamedTuple):
    """Why nothing of a job moves, its place in line before it begins, and seconds until it does or has copied all."""

    waits: str | None = None  # its ``note`` may say why a part of it does not move
    place: int | None = None
    waiting: int | None = None  # jobs in that line
    left: float | None = None  # None where no rate is known, or nothing moves


def outlooks(queue: Queue, jobs: Sequence[Job]) -> Iterator[Outlook]:
    """What those can expect who wait for these jobs, in this order."""
    from reshard.worker.queue.pace import places, until

    bulk = {job.id: job.request.priority == "bulk" for job in jobs if not job.state.ended}
    reason = cache(queue.waits)
    works = cache(lambda: any(process.kind == "worker" for process in queue.jobs.processes()))
    found, rate = places(queue.jobs.redis, [(job.id, bulk[job.id]) for job in jobs if job.state == "queued"])
    for job in jobs:
        if job.id not in bulk:
            yield Outlook()
            continue
        why, place = waits(reason, job, works), found.get(job.id)
        ahead = place.ahead if place else float(max(0, job.bytes - job.bytes_done)) or None
        pace = rate if place else job.rate
        left = until(ahead, pace) if pace and ahead is not None and not why else None
        yield Outlook(why, place and place.number, place and place.of, left)


def catalog_left(queue: Queue, state: str | None, jobs: Collection[str], todo: int, waits: str | None) -> float | None:
    """Seconds until a catalog has copied all; None where no rate is known, or nothing of it is begun."""
    from reshard.worker.queue.pace import remaining

    return remaining(queue.jobs.redis, jobs, todo) if state == "running" and not waits else None


def waits(reason: Callable[[bool], str | None], job: Job, works: Callable[[], bool]) -> str | None:
    """Why nothing of this job moves now; ``reason`` as ``Queue.waits``, and ``works``: whether any worker is alive."""
    if job.claims and works():  # a worker that died has what it claimed until its lease ends
        held_up = [f"{claim.unit}: {claim.waits}" for claim in job.claims if claim.waits]
        return held_up[0] if len(held_up) == len(job.claims) else None
    return reason(job.request.priority == "bulk")


@contextmanager
def open_queue() -> Iterator[Queue]:
    """The queue of the broker that is configured or running here.

    Raises NoBroker, BrokerUnsupported, and BrokerUnavailable, also inside for a broker that stops answering.
    """
    from reshard.worker.broker import broker_url
    from reshard.worker.queue.jobs import JobStore
    from reshard.worker.settings import settings

    with JobStore.at(broker_url(settings())) as store:
        store.check_server()
        yield Queue(store)


# ---------------------------------------------------------------------------------------------------- in words

START = "start one with `reshard {0}`, or everything with `reshard up`"
NAMES = {"worker": "worker", "control": "control process"}  # of the kinds of process, for people


def missing(kinds: Collection[str]) -> list[str]:
    """The kinds of process that no job moves without, and that are not among the ``kinds`` that run."""
    return [kind for kind in NAMES if kind not in kinds]


def _lacking(processes: Sequence[Process], silent: Callable[[], list[Silent]]) -> str | None:
    lacking = missing({process.kind for process in processes})
    for one in silent() if lacking else []:
        if one.process.kind in lacking:
            return f"no {NAMES[one.process.kind]} is working: {one}"
    if len(lacking) > 1:
        return "no worker or control process is running: start both with `reshard up`"
    return f"no {NAMES[lacking[0]]} is running: {START.format(lacking[0])}" if lacking else None


def worker_state(process: Process | records.Process, drained: bool, resting: bool) -> str:
    """What a worker does, in a word; ``draining`` it says itself, as it is asked to or ends."""
    takes = f"{process.queues[0]} jobs" if len(process.queues) == 1 else "work"
    return "drained" if drained else "resting" if resting else "finishing" if process.draining else f"takes {takes}"


def state_text(state: str) -> str:
    """A worker's state for people; documents keep its name."""
    if state.startswith("takes ") and state != "takes work":
        return f"ready ({state.removeprefix('takes ')} only)"
    return {"takes work": "ready", "resting": "paused itself"}.get(state, state)


def pause_text(paused: Pause | records.Pause) -> str:
    reason = f": {paused.reason}" if paused.reason else ""
    return f"the service has been paused since {moment(paused.since, 'UTC')} by {paused.by}{reason}"


def bulk_text(closed: Closed | records.Closed | None, tz: str) -> str:
    """Of bulk jobs: until when they wait and why, or that they do not."""
    if closed is None:
        return "allowed now"
    why = {"window": "outside allowed hours", "night": "daily read limit reached"}[closed.why]
    return f"on hold until {moment(closed.until, tz)}: {why}"


def moment(seconds: float, tz: str, form: str = "%Y-%m-%d %H:%M %Z") -> str:
    """``2026-06-01 22:00 CEST``; in UTC where only another machine knows the zone."""
    zone: tzinfo = UTC
    with suppress(LookupError, ValueError, OSError):
        zone = ZoneInfo(tz)
    return datetime.fromtimestamp(seconds, zone).strftime(form)
