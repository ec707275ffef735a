"""What operators set for all workers at once: a pause, drained workers, limits of bandwidth and bytes, and hours.

    reshard:fleet            hash: paused, reason, paused_by, bandwidth, night_bytes, window, tz
    reshard:fleet:drained    hash: worker -> since
    reshard:fleet:resting    hash: worker -> since when it rests by itself, and why (self_check.py)
    reshard:fleet:free       when the line is free again, under a limit of bandwidth; `:set` when that was noted
    reshard:fleet:night:<t>  bytes of weights that bulk jobs read since the night began at t
    reshard:fleet:read:<n>   bytes of weights that all jobs read in the n-th STRETCH
    reshard:held             sorted set: bulk job -> since when it waits until bulk work may be done

The steps that hand out work (claim, due) and take it back (renew) read these themselves, so nothing is begun once a
pause stands. What needs a clock that knows time zones is worked out here and passed to them: when the night began, and
whether the window is shut.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from reshard.pipeline.errors import BadLimit, BadSchedule, BadSize, WorkerNotFound
from reshard.pipeline.sizes import parse_size
from reshard.worker.cron import next_after
from reshard.worker.fleet.bandwidth import SHARE, Share
from reshard.worker.fleet.window import MIDNIGHT, Window, check_zone, last_due
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.scripts import PREFIX, at_once, decoded, known_fields, ms, texts
from reshard.worker.queue.states import JobState
from reshard.worker.queue.wakes import ring

log = logging.getLogger(__name__)

FLEET = f"{PREFIX}fleet"
DRAINED = f"{FLEET}:drained"
DRAINED_KEPT = 86_400.0  # seconds that it is remembered of a worker that is gone
RESTING = f"{FLEET}:resting"
STRETCH = 10.0  # seconds over which the rate is taken
OFF = "none"  # takes a limit off


# --------------------------------------------------------------------------------------------------------- decisions


@dataclass(frozen=True, slots=True)
class Closed:
    """Why bulk work is not done now, and when it goes on, in seconds since the epoch."""

    why: Literal["window", "night"]  # the window is shut; as much was read as may be in a night
    until: float


@dataclass(frozen=True, slots=True)
class Limits:
    bandwidth: int | None = None  # bytes a second that all copies together read
    night_bytes: int | None = None  # bytes of weights that bulk jobs read in a night
    window: Window | None = None  # in which bulk work is done
    tz: str = "UTC"  # by whose clock

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> Limits:
        """From what is stored."""
        bandwidth, night_bytes = (
            int(fields[name]) if name in fields else None for name in ("bandwidth", "night_bytes")
        )
        window = Window.parse(fields["window"]) if "window" in fields else None
        return cls(bandwidth, night_bytes, window, fields.get("tz", "UTC"))

    def shut(self, moment: float) -> bool:
        """Whether the window is, at ``moment`` in seconds since the epoch. Raises BadSchedule for an unknown zone."""
        return self.window is not None and not self.window.has(self.tz, moment)

    def night(self, moment: float) -> float:
        """When the night began that ``moment`` is in: with the window, or at midnight. Raises BadSchedule."""
        return last_due(self._begins, self.tz, moment)

    def closed(self, moment: float, read: int) -> Closed | None:
        """Whether no bulk work is done now, when ``read`` bytes were read since the night began. Raises BadSchedule."""
        shut = self.shut(moment)
        if not shut and (self.night_bytes is None or read < self.night_bytes):
            return None
        return Closed("window" if shut else "night", next_after(self._begins, self.tz, moment))

    @property
    def _begins(self) -> str:
        return self.window.begins if self.window else MIDNIGHT


def parse_limits(given: Mapping[str, str]) -> dict[str, str | None]:
    """What to store of options as they were typed, None to take one off; raises BadLimit.

    ``closed`` is the window that is left when these hours are taken from the day.
    """
    if not given:
        raise BadLimit(what="set at least one limit")
    if {"window", "closed"} <= given.keys():
        raise BadLimit(what="--window and --closed cannot be used together: each implies the other")
    return {
        "window" if name == "closed" else name: None if text.strip().lower() == OFF else _parse(name, text)
        for name, text in given.items()
    }


def _parse(name: str, text: str) -> str:
    match name:
        case "window":
            return str(Window.parse(text))
        case "closed":
            return str(Window.parse(text).others())
        case "tz":
            check_zone(text)
            return text
    option, size = f"--{name.replace('_', '-')} {text}", text
    if name == "bandwidth":
        size, slash, second = text.strip().rpartition("/")
        if not slash or second != "s" or size.lower().endswith(("bit", "bits")):
            raise BadLimit(what=f"{option}: use bytes per second, such as 200MB/s")
    try:
        return str(parse_size(size))
    except BadSize as error:
        raise BadLimit(what=f"{option}: {error.facts['why']}") from None


# --------------------------------------------------------------------------------------------------------- the state


@dataclass(frozen=True, slots=True)
class Pause:
    since: float  # seconds since the epoch
    by: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a worker rests by itself: what it would fail with, as an error of a job."""

    since: float  # seconds since the epoch
    code: str
    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """The fleet as it was at one moment; times in seconds since the epoch."""

    paused: Pause | None
    limits: Limits
    closed: Closed | None  # to bulk work
    night: float  # when it began
    read: int  # bytes of weights that bulk jobs read since then
    rate: float  # bytes a second that all copies read lately
    deferred: int  # bulk jobs that wait until bulk work may be done
    drained: frozenset[str]  # workers
    resting: Mapping[str, Fault]  # by worker


class Fleet:
    """Every method may raise redis-py's ConnectionError and TimeoutError."""

    def __init__(self, store: JobStore, clock: Callable[[], float] | None = None) -> None:
        """``clock`` gives seconds since the epoch; left out, it is the Redis server's, which all workers share."""
        self._store = store
        self._redis = store.redis
        self._clock = clock
        self._limits = Limits()  # as they were read last
        self._night = 0
        self._complained = ""

    # ------------------------------------------------------------------------------------------------ for operators

    def pause(self, by: str, reason: str | None = None) -> Pause:
        """Let nothing more be begun; copies are handed back at their next shard, other steps end.

        Paused again, it keeps its author and reason, unless there is a new reason.
        """
        with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hsetnx(FLEET, "paused", ms(self._now()))
            keep = pipeline.hset if reason else pipeline.hsetnx
            keep(FLEET, "reason", reason or "")
            keep(FLEET, "paused_by", by)
            pipeline.execute()
        return self.paused() or Pause(self._now(), by, reason)

    def paused(self) -> Pause | None:
        """Since when, by whom and why, if it is."""
        return _pause(self._read()[0])

    def resume(self) -> bool:
        """Go on; False when it was not paused."""
        with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hdel(FLEET, "paused")
            pipeline.hdel(FLEET, "reason", "paused_by")
            ring(pipeline)
            was, *_ = pipeline.execute()
        return bool(was)

    def limit(self, given: Mapping[str, str]) -> Limits:
        """Set those limits that are given, as ``parse_limits`` reads them; returns all of them. Raises BadLimit."""
        changes = parse_limits(given)
        with self._redis.pipeline(transaction=True) as pipeline:
            for name, value in changes.items():
                if value is None:
                    pipeline.hdel(FLEET, name)
                else:
                    pipeline.hset(FLEET, name, value)
            pipeline.delete(f"{FLEET}:free")
            ring(pipeline)
            pipeline.execute()
        self._read()
        return self._limits

    def drain(self, name: str) -> str:
        """Have one worker hand back what it holds and take nothing more; returns its name. Raises WorkerNotFound."""
        alive = self._workers()
        worker = _one(name, alive)
        now, drained = ms(self._now()), decoded(self._redis.hgetall(DRAINED))
        # Not at once: one that is silent for a moment stays drained.
        gone = [name for name, since in drained.items() if name not in alive and now - int(since) > ms(DRAINED_KEPT)]
        with self._redis.pipeline(transaction=True) as pipeline:
            if gone:
                pipeline.hdel(DRAINED, *gone)
            pipeline.hsetnx(DRAINED, worker, now)
            pipeline.execute()
        return worker

    def undrain(self, name: str) -> tuple[str, bool]:
        """Have it take work again; its name, and whether it was drained. Raises WorkerNotFound."""
        worker = _one(name, self._workers())
        return worker, self.begin(worker)

    def seen(self) -> FleetStatus:
        """All of it. Raises BadSchedule when this machine does not know the time zone."""
        fields, moment = self._read()
        night = self._limits.night(moment)
        stretch = int(moment // STRETCH)
        with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.get(f"{FLEET}:night:{ms(night)}")
            pipeline.mget(f"{FLEET}:read:{stretch}", f"{FLEET}:read:{stretch - 1}")
            pipeline.zcard(f"{PREFIX}held")
            pipeline.hkeys(DRAINED)
            pipeline.hgetall(RESTING)
            read, (now, before), deferred, drained, resting = pipeline.execute()
        passed = moment % STRETCH / STRETCH
        return FleetStatus(
            _pause(fields),
            self._limits,
            self._limits.closed(moment, int(read or 0)),
            night,
            int(read or 0),
            (int(now or 0) + int(before or 0) * (1 - passed)) / STRETCH,
            deferred,
            frozenset(texts(drained)),
            _faults(resting),
        )

    def claims_by_worker(self) -> dict[str, list[str]]:
        """What each worker is at: ``<job> <unit>``, by its name."""
        found = defaultdict[str, list[str]](list)
        at_work = [state for state in JobState if not state.ended and state != JobState.queued]
        ids = [id for state in at_work for id in texts(self._redis.zrange(f"{PREFIX}jobs:{state}", 0, -1))]
        for job in self._store.load(ids):
            for claim in job.claims:
                found[claim.worker.rpartition(".")[0]].append(f"{job.id} {claim.unit}")
        return found

    def _workers(self) -> list[str]:
        return [process.name for process in self._store.processes() if process.kind == "worker"]

    # --------------------------------------------------------------------------------------------------- for workers

    def look(self) -> tuple[int, int]:
        """What the steps that hand out work need: when the night began, in ms, and 1 if bulk work's window is shut.

        Where the time zone is not known, which only another machine can have set, bulk work waits for one that does.
        """
        try:
            _, moment = self._read()
            self._night, shut = ms(self._limits.night(moment)), self._limits.shut(moment)
        except (BadSchedule, BadLimit, ValueError) as error:
            if self._complained != self._limits.tz:
                self._complained = self._limits.tz
                log.error("leaving bulk work to other workers: %s", error)
            return self._night, 1
        return self._night, int(shut)

    def closed(self) -> bool:
        """Whether no bulk work is to be begun now."""
        return bool(self._store.run("fleet_closed", *self.look()))

    def bandwidth(self) -> int | None:
        """The limit as it was read last, in bytes a second; without asking."""
        return self._limits.bandwidth

    def take(self, count: int) -> Share:
        """A share of the bandwidth of at least ``count`` bytes, behind those that others took."""
        taken, wait = self._store.run("fleet_take", count, ms(SHARE))
        return Share(int(taken), int(wait) / 1000)

    def note(self, count: int, bulk: bool) -> None:
        """``count`` bytes of weights were read."""
        self._store.run("fleet_note", count, int(bulk), self._night, ms(STRETCH))

    def all_drained(self) -> frozenset[str]:
        """The workers that are, by name; some of them may have ended since."""
        return frozenset(texts(self._redis.hkeys(DRAINED)))

    def resting(self) -> dict[str, Fault]:
        """The workers that rest by themselves, and why; some of them may have ended since."""
        return _faults(self._redis.hgetall(RESTING))

    def rest(self, worker: str, cause: Mapping[str, Any]) -> None:
        """It rests by itself, because of an error as ``to_dict`` describes it; since when it did first is kept."""
        before = self.resting()
        fault = {"since": before[worker].since if worker in before else self._now()}
        fault |= {name: cause[name] for name in ("code", "message", "hint")}
        with self._redis.pipeline(transaction=True) as pipeline:
            if gone := before.keys() - {*self._workers(), worker}:
                pipeline.hdel(RESTING, *gone)
            pipeline.hset(RESTING, worker, json.dumps(fault))
            pipeline.execute()

    def awake(self, worker: str) -> None:
        self._redis.hdel(RESTING, worker)

    def drained(self, worker: str) -> bool:
        return bool(self._redis.hexists(DRAINED, worker))

    def begin(self, worker: str) -> bool:
        """It takes work; whether it was drained."""
        return bool(self._redis.hdel(DRAINED, worker))

    # -------------------------------------------------------------------------------------------------------- shared

    def _read(self) -> tuple[dict[str, str], float]:
        """What is stored, and what time it is."""
        stored, (seconds, micros) = at_once(self._redis, lambda pipe: [pipe.hgetall(FLEET), pipe.time()])
        fields = decoded(stored)
        self._limits = Limits.of(fields)
        return fields, self._clock() if self._clock else seconds + micros / 1e6

    def _now(self) -> float:
        return self._read()[1]


def _pause(fields: Mapping[str, str]) -> Pause | None:
    if "paused" not in fields:
        return None
    return Pause(int(fields["paused"]) / 1000, fields["paused_by"], fields["reason"] or None)


def _faults(stored: Any) -> dict[str, Fault]:
    return {worker.decode(): known_fields(Fault, fault) for worker, fault in stored.items()}


def _one(name: str, workers: list[str]) -> str:
    """The worker that is called so, or the only one whose name begins so; raises WorkerNotFound."""
    if name in workers:
        return name
    found = [worker for worker in workers if name and worker.startswith(name)]
    if len(found) != 1:
        which = "no worker" if not found else "more than one worker"
        raise WorkerNotFound(which=which, name=name or "''", workers=", ".join(found or workers) or "none")
    return found[0]
