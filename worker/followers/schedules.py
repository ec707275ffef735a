"""Schedules: a request or a catalog that is submitted again and again, when its cron expression is due.

    reshard:schedules            hash: name -> what was asked for
    reshard:schedules:due        sorted set: name -> when it fires next; a paused one is not in it
    reshard:schedules:job        hash: name -> the job that it fired last
    reshard:schedules:kept       hash: name -> when it was given its catalog's text
    reshard:schedules:success    hash: name -> when what it fired ended well; :trouble, :unmet: see outcomes.py
    reshard:schedule:<name>:runs list: what became of each time, the newest first

Control fires what is due. Firing moves the due time on and queues the job in one transaction, so that two controls
never fire twice, and none of a time is lost between the two.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Literal, cast

from pydantic import Field, ValidationError

from reshard.pipeline.catalogs.definition import NAME
from reshard.pipeline.errors import (
    BadSchedule,
    ReshardError,
    ScheduleExists,
    ScheduleNotFound,
    ScheduleUnreadable,
    UsageError,
    shortened,
)
from reshard.pipeline.request import Request
from reshard.pipeline.validation import Strict, first_problem
from reshard.worker.cron import next_after
from reshard.worker.followers import catalogs
from reshard.worker.followers.contained import Contained
from reshard.worker.followers.records import NAME_MAX, Definition
from reshard.worker.queue.events import append
from reshard.worker.queue.jobs import ACTIVE, JobStore, enqueue, in_the_way, submission
from reshard.worker.queue.record import state_of
from reshard.worker.queue.scripts import PREFIX, Pipeline, ms, server_ms, texts, transact

log = logging.getLogger(__name__)

PRIORITY = "bulk"  # of what a schedule submits, whatever was asked for: no person waits for it
RUNS_MAX = 100  # of one schedule; after that the oldest go
LATE = 60.0  # seconds after which a time counts as missed; a control that runs fires within two
CRON_MAX, ZONE_MAX = 250, 100  # characters; the longest zone has 32

ALL = f"{PREFIX}schedules"
DUE, LAST_JOB, AWAITED, KEPT = (f"{ALL}:{part}" for part in ("due", "job", "awaited", "kept"))
SUCCESS, TROUBLE, UNMET = (f"{ALL}:{part}" for part in ("success", "trouble", "unmet"))

# fired; missed: control was away and it says skip; overlap: what it fired last is still at work; busy: another job has
# the target, with another request; full: it has as many jobs queued as one submitter may
Outcome = Literal["fired", "missed", "overlap", "busy", "full"]


class Schedule(Strict):
    """What is submitted, and when. Raises BadSchedule from ``check``."""

    name: str = Field(max_length=NAME_MAX)
    cron: str = Field(max_length=CRON_MAX)
    tz: str = Field(default="UTC", max_length=ZONE_MAX)
    missed: Literal["once", "skip"] = "once"  # what becomes of times that passed while no control ran
    request: Request | None = None
    catalog: Definition | None = None  # as it was when the schedule was added or set

    def check(self) -> None:
        """Raises BadSchedule when the name, the expression or the zone is none."""
        if (self.request is None) == (self.catalog is None):
            raise BadSchedule(what="a schedule submits either one request or a catalog", cure="give one of the two")
        if not re.fullmatch(NAME.pattern, self.name):
            raise BadSchedule(what=f"{self.name!r} is not a valid name", cure=NAME.cure)
        if self.request is not None:
            self.request.stored()  # raises RequestTooLarge
        self.next_after(0.0)

    def next_after(self, moment: float) -> float:
        """When it is due after ``moment``, in seconds since the epoch."""
        return next_after(self.cron, self.tz, moment)


@dataclass(frozen=True, slots=True)
class Run:
    """What became of one time; times in seconds since the epoch."""

    at: float  # when control handled it
    due: float
    outcome: Outcome
    job: str | None  # the one that was fired, or that stood in the way; None for a catalog

    @classmethod
    def read(cls, text: str) -> Run:
        """What ``to_json`` wrote."""
        data = json.loads(text)
        return cls(data["at"] / 1000, data["due"] / 1000, data["outcome"], data["job"] or None)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "at": ms(self.at), "due": ms(self.due), "job": self.job or ""})


@dataclass(frozen=True, slots=True)
class ScheduleStatus:
    schedule: Schedule
    next: float | None  # None while it is paused
    runs: tuple[Run, ...]  # the newest first
    success: float | None  # when what it fired last ended well
    trouble: float | None  # when that did not, or a time of it was missed, unless it ended well since
    outdated: bool = False  # its catalog was submitted with another text since


class Schedules:
    """Every method may raise redis-py's ConnectionError and TimeoutError."""

    def __init__(self, store: JobStore, clock: Callable[[], float] | None = None) -> None:
        """``clock`` gives seconds since the epoch; left out, it is the Redis server's, which all controls share."""
        self._store = store
        self._redis = store.redis
        self._clock = clock or (lambda: server_ms(self._redis) / 1000)
        self._contained = Contained("schedule")
        self._looked = inf  # by the clock, when `fire_due` looked last

    def add(self, schedule: Schedule) -> float:
        """Keep a new one; returns when it fires first. Raises BadSchedule, ScheduleExists."""
        schedule.check()
        first = schedule.next_after(self._clock())

        def step(pipe: Pipeline) -> float:
            if pipe.hexists(ALL, schedule.name):
                raise ScheduleExists(name=schedule.name)
            _keep(pipe, schedule)
            pipe.zadd(DUE, {schedule.name: ms(first)})
            return first

        return transact(self._redis, step, ALL)

    def set_catalog(self, name: str, definition: Definition) -> None:
        """Have it submit this from now on; raises as ``run``, and UsageError where it submits something else."""

        def step(pipe: Pipeline) -> None:
            kept = self._whole(name)
            if kept.catalog is None or kept.catalog.name != definition.name:
                does = f"catalog {kept.catalog.name}" if kept.catalog else "a request"
                raise UsageError(what=f"schedule {name} submits {does}, but the file is catalog {definition.name}")
            _keep(pipe, kept.model_copy(update={"catalog": definition}))

        transact(self._redis, step, ALL)

    def edit(self, schedule: Schedule) -> float | None:
        """Keep it in place of the one of its name, whose past runs stay; returns when it is due, None while paused.

        Raises BadSchedule, ScheduleNotFound, and ScheduleUnreadable for what a newer release wrote.
        """
        schedule.check()
        first = schedule.next_after(self._clock())

        def step(pipe: Pipeline) -> float | None:
            former, due = self._whole(schedule.name), pipe.zscore(DUE, schedule.name)
            same = (former.cron, former.tz) == (schedule.cron, schedule.tz)
            _keep(pipe, schedule)
            if due is None or same:
                return due and float(due) / 1000
            pipe.zadd(DUE, {schedule.name: ms(first)})
            return first

        return transact(self._redis, step, ALL, DUE)

    def remove(self, name: str) -> None:
        """Forget it; a job that it fired goes on. Raises ScheduleNotFound."""
        with self._redis.pipeline(transaction=True) as pipeline:
            for kept in (ALL, LAST_JOB, AWAITED, KEPT, SUCCESS, TROUBLE, UNMET):
                pipeline.hdel(kept, name)
            pipeline.zrem(DUE, name)
            pipeline.delete(runs_key(name))
            removed, *_ = pipeline.execute()
        if not removed:
            raise ScheduleNotFound(name=name)

    def pause(self, name: str) -> None:
        """Let no time fire it until ``resume``. Raises ScheduleNotFound."""
        self._schedule(name)
        with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.zrem(DUE, name)
            pipeline.hdel(UNMET, name)
            pipeline.execute()

    def resume(self, name: str) -> float:
        """Go on with the next time from now; what passed during the pause is not run. Raises ScheduleNotFound."""

        def step(pipe: Pipeline) -> float:
            first, due = self._schedule(name).next_after(self._clock()), pipe.zscore(DUE, name)
            pipe.multi()
            pipe.zadd(DUE, {name: ms(first)}, nx=True)
            return first if due is None else float(due) / 1000

        return transact(self._redis, step, ALL, DUE)  # or what was removed meanwhile would be due for ever

    def run(self, name: str, pushed: bool = False) -> Run:
        """Fire it now, unless its last job is still at work; a push that waits then is no run that was skipped.

        Raises ScheduleNotFound, ScheduleUnreadable.
        """
        run = self._fire(self._whole(name), None, self._clock(), pushed)
        if run is None:
            raise ScheduleNotFound(name=name)
        return run

    def get(self, name: str) -> ScheduleStatus:
        """Raises ScheduleNotFound."""
        schedule = self._schedule(name)
        found = self._redis.zscore(DUE, name), *(self._redis.hget(key, name) for key in (SUCCESS, TROUBLE))
        due, success, trouble = (None if moment is None else float(moment) / 1000 for moment in found)
        runs = tuple(Run.read(text) for text in texts(self._redis.lrange(runs_key(name), 0, -1)))
        return ScheduleStatus(schedule, due, runs, success, trouble, self._outdated(schedule))

    def _outdated(self, schedule: Schedule) -> bool:
        if schedule.catalog is None:
            return False
        submitted = cast("bytes | None", self._redis.hget(catalogs.SUBMITTED, schedule.catalog.name))
        last = json.loads(submitted or '{"at": -1}')
        kept = cast("bytes | None", self._redis.hget(KEPT, schedule.name))  # None: removed since
        return bool(kept and last["at"] > int(kept) and last["digest"] != schedule.catalog.digest)

    def names(self, after: str = "", failing: bool = False) -> list[str]:
        """In their order, those behind ``after``, or of them those in trouble."""
        return sorted(name for name in texts(self._redis.hkeys(TROUBLE if failing else ALL)) if name > after)

    def all(self) -> list[ScheduleStatus]:
        """By name, those that can be read."""
        found = list[ScheduleStatus]()
        for name in self.names():
            try:
                found.append(self.get(name))
            except ScheduleNotFound:  # removed since
                continue
            except ScheduleUnreadable as error:
                log.warning("%s", error)
        return found

    def fire_due(self) -> list[tuple[str, Run]]:
        """Fire what is due, as often as it was missed or not once, as each says; returns what became of which."""
        now = self._clock()
        if now < self._looked:
            self._bring_forward(now)
        self._looked = now
        due = cast("list[tuple[bytes, float]]", self._redis.zrangebyscore(DUE, "-inf", ms(now), withscores=True))
        ran = []
        for raw, score in due:
            with self._contained(name := raw.decode(errors="replace")):
                if (run := self._fire(self._whole(name), score, now)) is not None:
                    log.info("schedule %s: %s, job %s", name, run.outcome, run.job)
                    ran.append((name, run))
        return ran

    def _bring_forward(self, now: float) -> None:
        """Have none wait longer than for its next time: the clock may have been ahead when that was set."""
        later = cast(
            "list[tuple[bytes, float]]", self._redis.zrangebyscore(DUE, f"({ms(now)}", "+inf", withscores=True)
        )
        for raw, score in later:
            with self._contained(name := raw.decode(errors="replace")):
                due = ms(self._whole(name).next_after(now))

                def step(pipe: Pipeline, name: str = name, score: float = score, due: int = due) -> None:
                    same = pipe.zscore(DUE, name) == score
                    pipe.multi()
                    if same and due < score:
                        pipe.zadd(DUE, {name: due})

                transact(self._redis, step, DUE, ALL)

    def preview(self, name: str, edited: Schedule | None = None) -> tuple[Outcome, str | None]:
        """What would become of it now, or of ``edited``, and the job in its way, if there is one. Raises as ``run``."""

        def step(pipe: Pipeline) -> tuple[Outcome, str | None]:
            outcome, job, fire = self._decide(pipe, schedule, _submitted(schedule), skip=False)
            return outcome, job if fire is None and job else None

        schedule = edited or self._whole(name)
        return transact(self._redis, step, ALL)

    def _fire(self, schedule: Schedule, due: float | None, now: float, pushed: bool = False) -> Run | None:
        """``due`` in milliseconds, None by hand; None when another control was first, or it was removed."""
        name, late = schedule.name, due is not None and now - due / 1000 > LATE
        submitted = _submitted(schedule)
        watched = catalogs.key(schedule.catalog.name) if schedule.catalog else ACTIVE

        def step(pipe: Pipeline) -> Run | None:
            if not pipe.hexists(ALL, name) or (due is not None and pipe.zscore(DUE, name) != due):
                return None
            outcome, job, fire = self._decide(pipe, schedule, submitted, skip=late and schedule.missed == "skip")
            at = server_ms(pipe)
            pipe.multi()
            if fire:
                fire(pipe)
            if outcome == "fired" and job:
                pipe.hset(LAST_JOB, name, job)
                append(pipe, "fired", at, name=name, job=job)
            if due is not None:
                pipe.zadd(DUE, {name: ms(schedule.next_after(now))})
                pipe.hsetnx(UNMET, name, round(due))
                if late or outcome != "fired":
                    append(pipe, "missed", at, name=name, job=job, due=str(round(due)), outcome=outcome)
            run = Run(now, now if due is None else due / 1000, outcome, job or None)
            if outcome == "fired" or not pushed:
                pipe.lpush(runs_key(name), run.to_json())
                pipe.ltrim(runs_key(name), 0, RUNS_MAX - 1)
            return run

        return transact(self._redis, step, ALL, DUE, LAST_JOB, watched)

    def _decide(
        self, pipe: Pipeline, schedule: Schedule, submitted: Sequence[str], skip: bool
    ) -> tuple[Outcome, str, Callable[[Pipeline], None] | None]:
        """What becomes of a time, the job that was fired or stands in the way, and what fires it, if anything."""
        if skip:
            return "missed", "", None
        if (catalog := schedule.catalog) is not None:
            run = catalogs.Snapshot.read(pipe, catalog.name)
            if run.busy:
                return "overlap", "", None
            return "fired", "", catalogs.starting(pipe, catalog, run, schedule.name)
        last = pipe.hget(LAST_JOB, schedule.name)
        state = state_of(pipe, last.decode()) if last else None
        if last and state and not state.ended:
            return "overlap", last.decode(), None
        why, there = in_the_way(pipe, submitted, self._store.most)
        if why:
            return "fired" if why == "same" else why, there, None
        return "fired", submitted[0], lambda pipe: enqueue(pipe, submitted)

    def _schedule(self, name: str) -> Schedule:
        """To be shown; raises ScheduleUnreadable for what no release wrote."""
        return self._read(name, lambda stored: Schedule.known(stored)[0])

    def _whole(self, name: str) -> Schedule:
        """To be fired; raises ScheduleUnreadable also for what a newer release wrote."""
        return self._read(name, Schedule.model_validate_json)

    def _read(self, name: str, parsed: Callable[[bytes], Schedule]) -> Schedule:
        if (stored := cast("bytes | None", self._redis.hget(ALL, name))) is None:
            raise ScheduleNotFound(name=name)
        try:
            return parsed(stored)
        except ValidationError as error:
            problem = first_problem(error)
            raise ScheduleUnreadable(name=name, where=problem.where or "its record", why=problem.why) from error
        except (ReshardError, ValueError) as error:
            raise ScheduleUnreadable(name=name, where="its record", why=shortened(str(error))) from error


def _keep(pipe: Pipeline, schedule: Schedule) -> None:
    """In a transaction that has read what it needs."""
    at = server_ms(pipe)
    pipe.multi()
    pipe.hset(ALL, schedule.name, schedule.model_dump_json(exclude_defaults=True))
    pipe.hset(KEPT, schedule.name, at)


def _submitted(schedule: Schedule) -> Sequence[str]:
    """The job that it fires, as it is queued; nothing of a catalog."""
    if schedule.request is None:
        return ()
    asked = schedule.request.submitted_for(f"schedule {schedule.name}")
    return submission(asked.model_copy(update={"priority": PRIORITY}))


def runs_key(name: str) -> str:
    return f"{PREFIX}schedule:{name}:runs"
