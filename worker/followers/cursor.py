"""The cursor of a catalog: control expands it to entries, admits a few jobs at a time, and notes how each ended.

It follows the stream: a job that ended makes room for the next entry, and a run that begins or goes on has room. What
it does is decided by what is stored and not by the event, so an event that comes twice does nothing twice, and
``reconcile`` does the same without one.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import cast

from reshard.pipeline.errors import (
    BadPlace,
    CatalogNotFound,
    JobNotFound,
    JobUnreadable,
    ReshardError,
    TargetBusy,
    TooManyQueued,
    WrongState,
)
from reshard.worker.followers import records
from reshard.worker.followers.catalogs import LOOKED_AT, Catalogs, Snapshot, asked_by, catalog_of, key
from reshard.worker.followers.contained import Contained
from reshard.worker.followers.records import UNDER_WAY, Definition, Ended, Entry, Limits, State
from reshard.worker.queue.events import Event, Reader
from reshard.worker.queue.jobs import ACTIVE, JobStore, enqueue, in_the_way, submission
from reshard.worker.queue.record import states
from reshard.worker.queue.scripts import Pipeline, at_once, decoded, job_key, known_fields, ms, texts

log = logging.getLogger(__name__)

EXPAND_LEASE = 30.0  # seconds after which another control expands what a dead one began
CLOCK_SLACK = 1.0  # seconds that the broker's clock may be put back by, to correct it
WAITS = "waiting: it already has {most} queued jobs, the limit per submitter"  # the note of a run
FILL = 500  # entries written in one step, so that none keeps Redis busy for long


class Cursor(Catalogs):
    """Catalogs as control sees them. Every method may raise redis-py's ConnectionError and TimeoutError."""

    group = "catalogs"

    def __init__(self, store: JobStore) -> None:
        super().__init__(store)
        self._contained = Contained("catalog")

    def handle(self, events: Sequence[Event], reader: Reader) -> None:
        """Note how jobs ended or were retried, and admit what there is room for, also where a run began or resumed."""
        for event in events:
            if event.kind == "ended":
                self._each(partial(self._advance, job=event.fields["job"]))
            elif event.kind == "catalog" and event.fields["state"] == "running":
                self._each(self._advance, [event.fields["name"]])
            elif event.kind == "retried":
                job = event.fields["job"]
                by = cast("bytes | None", self._redis.hget(job_key(job), "asked_by"))
                if by and (name := catalog_of(by.decode())):
                    self._each(partial(self._await_again, job=job), [name])
            reader.acknowledge(event)

    def reconcile(self) -> None:
        """Look at all jobs of all runs, for what the stream no longer has, and for jobs that were deleted."""
        self._each(self._advance)

    def expanding(self) -> list[str]:
        """The catalogs that wait to be expanded."""
        names = texts(self._redis.smembers(LOOKED_AT))
        states = at_once(self._redis, lambda pipe: [pipe.hget(key(name), "state") for name in names])
        return [name for name, state in zip(names, states, strict=True) if state == b"expanding"]

    def claim(self, name: str, token: str, left: str = "") -> str:
        """The run that this control is to expand now, or an empty string; claimed again, it stays this control's.

        ``left`` is a run that it leaves to another.
        """

        def step(pipe: Pipeline, now: Snapshot) -> str:
            pipe.multi()
            ends = now.expander_until  # beyond its length: from before the broker's clock jumped back
            held = now.expander not in {"", token} and now.at < ends <= now.at + ms(EXPAND_LEASE + CLOCK_SLACK)
            if now.state != "expanding" or held or now.run == left:
                return ""
            pipe.hset(key(name), mapping={"expander": token, "expander_until": now.at + ms(EXPAND_LEASE)})
            return now.run

        return self._change(name, step)

    def definition(self, name: str) -> Definition:
        """As stored, to be carried out: nothing in it is unknown here."""
        if (stored := cast("bytes | None", self._redis.hget(key(name), "definition"))) is None:
            raise CatalogNotFound(name=name)
        return Definition.model_validate_json(stored)

    def delay(self, name: str, run: str, token: str, why: str) -> None:
        """This run cannot be expanded yet; nothing when it is not this control's to expand any more."""

        def step(pipe: Pipeline, now: Snapshot) -> None:
            pipe.multi()
            if (now.state, now.run, now.expander) == ("expanding", run, token):
                pipe.hset(key(name), "note", why)

        self._change(name, step)

    def refuse(self, name: str, run: str, token: str, error: ReshardError) -> None:
        """This run cannot be expanded. Raises CatalogState when it is not this control's to expand any more."""
        why = "another control process is expanding it"
        self._turn(name, "failed", why, f"{error} ({error.next_step})", run, token)

    def fill(
        self,
        name: str,
        run: str,
        token: str,
        rows: Sequence[tuple[Entry, ReshardError | None]],
        empty: Sequence[int] = (),
    ) -> bool:
        """Keep what a catalog was expanded to; False when another control does it by now.

        ``empty`` are the numbers of the file's entries that find no model. An entry whose source and target are what
        they were after its last job has ended before it began.
        """
        record = self._record(name)
        found = [(entry, records.settled(entry, error, record)) for entry, error in rows]

        def step(first: int, pipe: Pipeline, now: Snapshot) -> bool:
            pipe.multi()
            if now.state != "expanding" or (now.run, now.expander) != (run, token):
                return False
            if first == 0:  # an earlier expander may have died before its end
                pipe.delete(*(key(name, part) for part in ("entries", "todo", "ended", "counts", "moved")))
                now = now._replace(counts=Counter(), todo=0, failures=0)
            now, todo, failures = now._replace(entries=len(found)), now.todo, now.failures
            for number, (entry, ended) in enumerate(found[first : first + FILL], first):
                pipe.hset(key(name, "entries"), str(number), entry.model_dump_json(exclude_defaults=True))
                if ended is None:
                    pipe.zadd(key(name, "todo"), {str(number): number})
                    todo += 1
                else:
                    now.note_end(pipe, str(number), entry.repo, ended)
                    failures += ended.error is not None
            pipe.hset(key(name), mapping={"failures": failures, "empty": json.dumps(empty)})
            if first + FILL >= len(found):
                if gone := record.keys() - {entry.request.key() for entry, _ in found if entry.request}:
                    pipe.hdel(key(name, "record"), *gone)
                pipe.hdel(key(name), "expander", "expander_until", "note")
                now.enter(pipe, "running" if todo else "done")
            return True

        return all(self._change(name, partial(step, first)) for first in range(0, max(1, len(found)), FILL))

    def _each(self, visit: Callable[[str], object], names: Iterable[str] | None = None) -> None:
        """``visit`` each catalog; what breaks one is no reason to leave the others."""
        for name in texts(self._redis.smembers(LOOKED_AT)) if names is None else names:
            with self._contained(name):
                visit(name)

    def _advance(self, name: str, job: str | None = None) -> None:
        """Note how its jobs ended, all or this one, and admit what there is room for.

        Also where this one's end is noted: by a control that was killed before it admitted the next.
        """
        limits, state, run = self._run(name)
        if state == "expanding":
            return
        active = decoded(self._redis.hgetall(key(name, "active")))
        mine = {number: id for number, id in active.items() if job in {None, id}}
        ended = self._collect(limits, run, mine)
        if state == "running":
            self._admit(limits, run, limits.at_once - len(active) + ended)

    def _await_again(self, name: str, job: str) -> None:
        """Where its run noted how this job ended, have it await the next end instead, or note it if it came."""

        def step(pipe: Pipeline, now: Snapshot) -> bool:
            number = (cast("bytes | None", pipe.hget(key(name, "jobs"), job)) or b"").decode()
            kept = cast("bytes | None", pipe.hget(key(name, "ended"), number))
            ended = known_fields(Ended, kept.decode()) if kept else None
            seen = self.store.get(job) if ended and ended.job == job else None
            pipe.multi()
            if now.state is None or ended is None or seen is None:
                return now.state is not None
            # An event that comes twice finds the end that came since.
            if not (seen.state.ended and records.how(self._entry(name, number), seen) == ended):
                pipe.hdel(key(name, "ended"), number)
                pipe.hset(key(name, "active"), number, job)
                now.tally(pipe, ended, -1)
                failures = max(0, now.failures - (ended.error is not None))
                pipe.hset(key(name), mapping={"failures": failures, "bytes": now.bytes - ended.read})
                if now.state not in UNDER_WAY:
                    state = "running" if now.state == "done" else now.state
                    now._replace(active=now.active + 1).enter(pipe, state)
            return True

        with suppress(JobNotFound):  # deleted since
            if self._change(name, step):
                self._advance(name, job)

    def _collect(self, limits: Limits, run: str, active: Mapping[str, str]) -> int:
        """Note how these jobs ended; returns how many have."""
        pairs = zip(active.items(), states(self._redis, active.values()), strict=True)
        ended = [one for one, state in pairs if state is None or state.ended]
        for number, id in ended:
            entry = self._entry(limits.name, number)
            try:
                seen = self.store.get(id)
                self._end(limits, run, number, entry.repo, records.how(entry, seen), records.kept(entry, seen))
            except (JobNotFound, JobUnreadable) as error:
                self._end(limits, run, number, entry.repo, Ended("failed", id, error=error.to_dict()))
        return len(ended)

    def _admit(self, limits: Limits, run: str, room: int) -> None:
        """Admit so many of those that wait; others that end at once, as their targets are busy, take no room."""
        if room <= 0 or not self._within(limits, run):
            return
        todo, after = key(limits.name, "todo"), "-inf"
        while room > 0 and (found := texts(self._redis.zrangebyscore(todo, after, "+inf", start=0, num=room))):
            for number in found:
                if (answer := self._admit_or_end(limits, run, number)) == "stop":
                    return
                room -= answer == "ok"
            after = f"({found[-1]}"  # its turn is its number

    def _within(self, limits: Limits, run: str) -> bool:
        """Whether it may admit more; it stops where a limit was reached in a pause, or was lowered since."""

        def step(pipe: Pipeline, now: Snapshot) -> bool:
            pipe.multi()
            if now.run != run or now.state != "running":
                return False
            state, note = records.after(limits, now.state, now.todo, now.active, now.failures, now.bytes)
            if state == "stopped":
                pipe.hset(key(limits.name), "note", note)
                now.enter(pipe, state, note=note)
            return state == "running"

        return self._change(limits.name, step)

    def _admit_or_end(self, limits: Limits, run: str, number: str) -> str:
        """As ``_admit_one``; an entry that it refuses has ended."""
        name = limits.name
        entry = self._entry(name, number)
        if entry.request is None:
            error: ReshardError = BadPlace(value=entry.repo, why="it has no target in the file")
            self._end(limits, run, number, entry.repo, Ended("failed", error=error.to_dict()))
            return "gone"
        again = cast("bytes | None", self._redis.hget(key(name, "again"), number))
        job = self._go_on(again.decode()) if again else ""
        request = entry.request.submitted_for(asked_by(name))
        answer = self._admit_one(limits, run, number, job, submission(request))
        if answer not in {"ok", "gone", "stop"}:
            error = TargetBusy(job=answer, target=str(request.target))
            self._end(limits, run, number, entry.repo, Ended("failed", error=error.to_dict()))
        return answer

    def _admit_one(self, limits: Limits, run: str, number: str, job: str, submitted: tuple[str, ...]) -> str:
        """Have ``job``, or a new one, carry out an entry -> ok, stop, gone, or another request's job on its target."""
        name = limits.name

        def step(pipe: Pipeline, now: Snapshot) -> str:
            waits = pipe.zscore(key(name, "todo"), number) is not None
            why, there = ("same", job) if job else in_the_way(pipe, submitted, self.store.most)
            pipe.multi()
            if now.state != "running" or now.run != run or now.active >= limits.at_once:
                return "stop"
            if not waits:
                return "gone"
            if why == "busy":
                return there
            if why == "full":  # when one of its jobs has begun there is room
                pipe.hset(key(name), "note", WAITS.format(most=self.store.most))
                return "stop"
            if not why:
                enqueue(pipe, submitted)
            pipe.zrem(key(name, "todo"), number)
            pipe.hdel(key(name, "again"), number)
            pipe.hdel(key(name), "note")
            pipe.hset(key(name, "active"), number, there or submitted[0])
            pipe.hset(key(name, "jobs"), there or submitted[0], number)
            pipe.hincrby(key(name), "admitted", 1)
            return "ok"

        return self._change(name, step, ACTIVE)

    def _go_on(self, job: str) -> str:
        """The job, when it goes on; empty when a new one must be made, if its submitter may have one more."""
        try:
            self.store.retry(job)
        except WrongState:  # retried already, by a control that died then
            pass
        except (JobNotFound, TargetBusy, TooManyQueued):
            return ""
        return job

    def _end(
        self, limits: Limits, run: str, number: str, repo: str, ended: Ended, kept: tuple[str, str] = ("", "")
    ) -> None:
        """Note how an entry ended, once."""
        name = limits.name

        def step(pipe: Pipeline, now: Snapshot) -> None:
            was_active = pipe.hexists(key(name, "active"), number)
            waited = pipe.zscore(key(name, "todo"), number) is not None
            pipe.multi()
            if now.run != run or now.state is None or not (was_active or waited):
                return
            now = now._replace(active=now.active - was_active, todo=now.todo - waited)
            failures, read = now.failures + (ended.error is not None), now.bytes + ended.read
            state, note = records.after(limits, cast(State, now.state), now.todo, now.active, failures, read)
            pipe.hdel(key(name, "active"), number)
            pipe.zrem(key(name, "todo"), number)
            now.note_end(pipe, number, repo, ended)
            pipe.hset(key(name), mapping={"failures": failures, "bytes": read} | ({"note": note} if note else {}))
            if kept[0]:
                pipe.hset(key(name, "record"), *kept)
            if state != now.state or state not in UNDER_WAY:  # with its last job nothing more can change
                now.enter(pipe, state, note=note)

        self._change(name, step)

    def _entry(self, name: str, number: str) -> Entry:
        data = cast("bytes | None", self._redis.hget(key(name, "entries"), number))
        if data is None:
            raise CatalogNotFound(name=name)
        return Entry.model_validate_json(data)

    def _run(self, name: str) -> tuple[Limits, State, str]:
        limits, state, run = cast("list[bytes]", self._redis.hmget(key(name), "limits", "state", "run"))
        if state is None:
            raise CatalogNotFound(name=name)
        return Limits.model_validate_json(limits), cast(State, state.decode()), run.decode()
