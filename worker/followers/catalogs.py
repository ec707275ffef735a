"""Catalogs on the queue: a cursor that admits a few of many jobs at a time, and what became of each entry.

    expanding -> running -> done
       ^ |       ^   | ^ |
     paused   paused   stopped          stopped: too many failed, or too many bytes were read
    failed: could not be expanded;  cancelled     done with failures is shown as failed

    reshard:catalog:<name>   hash: state, since, run, definition, limits, failures, ...; every change writes to it
      :entries  hash: entry -> repo, request, and what source and target were when it was expanded
      :todo     sorted set: entry -> its turn
      :again    hash: entry -> the job that is to go on instead of a new one
      :active   hash: entry -> job
      :ended    hash: entry -> how it ended
      :counts   hash: outcome -> how many entries ended so; failed:<error code> -> how many of those that failed
      :moved    hash: read, uploaded -> bytes, of all that ended
      :record   hash: request -> what source and target were after it was last carried out; outlives the run, until one
                no longer asks for it
      :nights   list: when each of its last runs began, in ms, the newest first
      :night:<ms>  hash: model -> how it ended in that run, and the code of its error or nothing
    reshard:catalogs             set: all of them
    reshard:catalogs:submitted   hash: name -> the digest that a person submitted last, and when
    reshard:catalogs:looked_at   set: those that are under way, or whose jobs have not all ended

A client writes the catalog and is done; control expands it (expander.py) and admits its jobs (cursor.py). Each change
is one transaction that watches the hash, so two controls may make it, and one that died is followed by another.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import NamedTuple, TypeVar, cast
from uuid import uuid4

from reshard.pipeline.catalogs.definition import parse
from reshard.pipeline.errors import CatalogNotFound, CatalogState, ReshardError
from reshard.worker.followers import records
from reshard.worker.followers.records import TURNS, UNDER_WAY, CatalogStatus, Definition, Ended, Entry, Standing, State
from reshard.worker.queue.events import append
from reshard.worker.queue.jobs import PAGE_BYTES, JobStore
from reshard.worker.queue.record import Job
from reshard.worker.queue.scripts import (
    PREFIX,
    Pipeline,
    at_once,
    decoded,
    job_key,
    known_fields,
    server_ms,
    texts,
    transact,
)

log = logging.getLogger(__name__)

RUN_PARTS = ("entries", "todo", "again", "jobs", "ended", "counts", "moved")  # that begin anew with each run
NIGHTS = 14  # runs of a catalog of which every model's outcome is remembered
NIGHT_WHOLE = 1000  # models; of larger catalogs only those are remembered that were not unchanged, or memory would fill
KEEP_NIGHT = 90 * 86_400  # seconds after its last change
READ_AT_ONCE = 200  # entries; each may have 64 kB of request

ALL, LOOKED_AT = f"{PREFIX}catalogs", f"{PREFIX}catalogs:looked_at"
SUCCESS, TROUBLE = f"{PREFIX}catalogs:success", f"{PREFIX}catalogs:trouble"
SUBMITTED = f"{PREFIX}catalogs:submitted"
_OF_CATALOGS = "catalog "  # before its name: who asked for its jobs

T = TypeVar("T")


class Snapshot(NamedTuple):
    """What a run is changed by, as it is in the transaction that changes it."""

    name: str
    at: int  # ms, by the server's clock
    state: State | None  # None: there is no such catalog
    run: str
    started: int  # ms
    since: int  # ms
    expander: str  # the token of the control that expands it
    expander_until: int  # ms
    failures: int
    bytes: int
    schedule: str  # the one that fired it
    paused_from: str  # expanding or running, while it is paused
    note: str | None
    empty: str  # JSON: the numbers of the file's entries that find no model
    entries: int
    todo: int
    active: int
    counts: Counter[str]

    @classmethod
    def read(cls, pipe: Pipeline, name: str) -> Snapshot:
        """From a pipeline that watches the catalog and has not begun to write."""
        fields = ("state", "run", "expander", "fired_by", "paused_from", "note", "empty")
        values = pipe.hmget(key(name), (*fields, "started", "since", "expander_until", "failures", "bytes"))
        known, numbers = values[: len(fields)], values[len(fields) :]
        state, run, expander, schedule, paused_from, note, empty = (value and value.decode() for value in known)
        started, since, until, failures, read = (int(number or 0) for number in numbers)
        return cls(
            name, server_ms(pipe), state, run or "", started, since, expander or "", until,
            failures, read, schedule or "", paused_from or "", note, empty or "[]",
            pipe.hlen(key(name, "entries")), pipe.zcard(key(name, "todo")), pipe.hlen(key(name, "active")),
            Counter({what: int(number) for what, number in decoded(pipe.hgetall(key(name, "counts"))).items()}),
        )  # fmt: skip

    @property
    def shown(self) -> State | None:
        return self.state and records.shown(self.state, self.counts["failed"], self.entries)[0]

    @property
    def busy(self) -> bool:
        return self.state in UNDER_WAY or self.active > 0

    def enter(self, pipe: Pipeline, state: State, note: str = "") -> None:
        """Write the state of the run, and tell followers of it where it is news."""
        pipe.hset(key(self.name), mapping={"state": state, "since": self.at})
        looked_at = state in UNDER_WAY or self.active > 0
        (pipe.sadd if looked_at else pipe.srem)(LOOKED_AT, self.name)
        if state == "running" or state != self.state:
            self.tell(pipe, state, note)

    def tell(self, pipe: Pipeline, state: State, note: str = "") -> None:
        append(
            pipe, "catalog", self.at, name=self.name, state=state, schedule=self.schedule, note=note,
            entries=str(self.entries), counts=json.dumps(self.counts),
        )  # fmt: skip

    def note_end(self, pipe: Pipeline, number: str, repo: str, ended: Ended) -> None:
        """Note how an entry ended, here as well; once more beside what the next run takes the place of."""
        pipe.hset(key(self.name, "ended"), number, json.dumps(asdict(ended)))
        self.tally(pipe, ended, 1)
        self.counts.update(records.tally(ended))
        if ended.outcome != "unchanged" or self.entries <= NIGHT_WHOLE:
            night = key(self.name, f"night:{self.started}")
            pipe.hset(night, repo, " ".join([ended.outcome, *([ended.error["code"]] if ended.error else [])]))
            pipe.expire(night, KEEP_NIGHT)

    def tally(self, pipe: Pipeline, ended: Ended, by: int) -> None:
        """``by`` is 1 for an entry that ended, -1 for one that gets another turn."""
        for part in records.tally(ended):
            pipe.hincrby(key(self.name, "counts"), part, by)
        for what, moved in (("read", ended.read), ("uploaded", ended.uploaded)):
            pipe.hincrby(key(self.name, "moved"), what, by * moved)


class Catalogs:
    """Every method may raise redis-py's ConnectionError and TimeoutError."""

    def __init__(self, store: JobStore) -> None:
        self.store = store
        self._redis = store.redis

    # -------------------------------------------------------------------------------------------------- for clients

    def submit(self, definition: Definition) -> bool:
        """Begin a run; False when this very catalog is under way already, which then goes on by these limits.

        Raises BadCatalog, CatalogState.
        """
        parse(definition.text, definition.name)

        def step(pipe: Pipeline, now: Snapshot) -> bool:
            if not now.busy:
                start = starting(pipe, definition, now)
                pipe.multi()
                start(pipe)
                return True
            running = Definition.known(cast(bytes, pipe.hget(key(definition.name), "definition")))[0]
            if running.digest != definition.digest or now.state not in UNDER_WAY:
                why = "its current run uses another version of the file", "some of its jobs have not ended"
                raise records.not_ended(definition.name, now.shown, *why)
            limited = definition.model_copy(update={"asked_by": running.asked_by})
            pipe.multi()
            if limited != running:
                pipe.hset(key(definition.name), mapping=limited.stored())
                if now.state == "running":  # there may be room for more
                    now.tell(pipe, "running")
            return False

        started = self._change(definition.name, step)
        last = {"digest": definition.digest, "at": server_ms(self._redis)}
        self._redis.hset(SUBMITTED, definition.name, json.dumps(last))
        return started

    def names(self) -> list[str]:
        return sorted(texts(self._redis.smembers(ALL)))

    def awaited(self) -> set[str]:
        """The jobs whose end a run has not noted yet, ended or not, and those that one is to go on with."""
        lists = [key(name, part) for name in self.names() for part in ("again", "active")]  # as one moves to the other
        return {job for jobs in lists for job in texts(self._redis.hvals(jobs))}

    def at_work(self, name: str) -> list[str]:
        """Its jobs whose end its run has not noted yet."""
        return texts(self._redis.hvals(key(name, "active")))

    def get(self, name: str, after: int = -1) -> CatalogStatus:
        """With those that ended of the entries after this one, a page of PAGE_BYTES at most; raises CatalogNotFound."""
        with self._redis.pipeline(transaction=True) as pipeline:
            for part in (None, "active", "counts", "moved"):
                pipeline.hgetall(key(name, part))
            pipeline.hlen(key(name, "entries"))
            pipeline.zcard(key(name, "todo"))
            pipeline.hget(SUCCESS, name)
            pipeline.hkeys(key(name, "ended"))
            fields, active, counts, moved, entries, todo, success, numbers = pipeline.execute()
        if not fields:
            raise CatalogNotFound(name=name)
        fields, outcomes = decoded(fields), {what: int(number) for what, number in decoded(counts).items()}
        at_work = sorted(active.items(), key=lambda item: int(item[0]))
        rows, more = self._ended(name, sorted(number for one in numbers if (number := int(one)) > after))
        state, why = records.shown(cast(State, fields["state"]), outcomes.get("failed", 0), entries)
        return CatalogStatus(
            definition=Definition.known(fields["definition"])[0],
            state=state,
            run=fields["run"],
            started=int(fields["started"]) / 1000,
            since=int(fields["since"]) / 1000,
            note=why or fields.get("note"),
            entries=entries,
            todo=todo,
            active={
                json.loads(entry)["repo"]: job.decode()
                for (_, job), entry in zip(at_work, self._values(name, "entries", [n for n, _ in at_work]), strict=True)
                if entry is not None
            },
            running=len(at_work),
            outcomes=outcomes,
            read=int(moved.get(b"read", 0)),
            uploaded=int(moved.get(b"uploaded", 0)),
            ended=tuple((repo, one) for repo, _, one in rows),
            targets=tuple(target for _, target, _ in rows),
            next=more,
            success=None if success is None else int(success) / 1000,
            empty=tuple(json.loads(fields.get("empty", "[]"))),
        )

    def _ended(self, name: str, numbers: Sequence[int]) -> tuple[list[tuple[str, str | None, Ended]], int | None]:
        """Repository, target and end of the first of these entries, and the last one's number, where others follow."""
        rows, size = list[tuple[str, str | None, Ended]](), 0
        for first in range(0, len(numbers), READ_AT_ONCE):
            some = numbers[first : first + READ_AT_ONCE]
            entries, ends = self._values(name, "entries", some), self._values(name, "ended", some)
            for at, (entry, end) in enumerate(zip(entries, ends, strict=True), first):
                if entry is None or end is None:  # begun anew or given another turn since
                    continue
                asked, ended = json.loads(entry), known_fields(Ended, end)
                size += len(end) + len(asked["repo"])
                if rows and size > PAGE_BYTES:
                    return rows, numbers[at - 1]
                rows.append((asked["repo"], records.target_text(asked["request"]), ended))
        return rows, None

    def _values(self, name: str, part: str, numbers: Sequence[int | bytes]) -> Sequence[bytes | None]:
        return cast("list[bytes | None]", self._redis.hmget(key(name, part), numbers)) if numbers else []

    def definition(self, name: str) -> Definition:
        """What was submitted last, by a person or a schedule, and begun; raises CatalogNotFound."""
        if (stored := cast("bytes | None", self._redis.hget(key(name), "definition"))) is None:
            raise CatalogNotFound(name=name)
        return Definition.known(stored)[0]

    def successes(self) -> dict[str, float]:
        """When a run of each last ended with nothing failed, in seconds since the epoch."""
        return self._moments(SUCCESS)

    def failing(self) -> dict[str, float]:
        """Those whose last run did not end so, with when it ended."""
        return self._moments(TROUBLE)

    def _moments(self, key: str) -> dict[str, float]:
        return {name: int(ms) / 1000 for name, ms in sorted(decoded(self._redis.hgetall(key)).items())}

    def nights(self, name: str) -> list[tuple[float, dict[str, tuple[str, str]]]]:
        """Its last runs, the newest first: when each began, and how each model ended, with the code of its error."""
        began = texts(self._redis.lrange(key(name, "nights"), 0, -1))
        kept = at_once(self._redis, lambda pipe: [pipe.hgetall(key(name, f"night:{ms}")) for ms in began])
        return [
            (int(ms) / 1000, {repo: (how.partition(" ")[0], how.partition(" ")[2]) for repo, how in night.items()})
            for ms, night in zip(began, map(decoded, kept), strict=True)
        ]

    def now(self, name: str) -> Snapshot:
        """How far its run is, without its models; raises CatalogNotFound."""
        return self._change(name, lambda pipe, now: now, must_exist=True)

    def pause(self, name: str) -> bool:
        """Expand and admit nothing more; jobs at work go on. False if it was paused. Raises as ``resume``."""
        return self._turn(name, "paused", "only a running catalog can be paused")

    def resume(self, name: str) -> bool:
        """Go on, or be done when nothing is left. False if it was under way. Raises CatalogNotFound, CatalogState."""
        return self._turn(name, "running", "only a paused or stopped catalog can be resumed")

    def cancel(self, name: str) -> int:
        """Drop what was not begun and cancel what is at work; returns how many jobs. Raises as ``pause``.

        Jobs that it found at work, as somebody else had asked for them, are not its own and go on.
        A second time it goes on where a client died over the first.
        """
        self._turn(name, "cancelled", "it has already ended")
        found = [*self.store.each(self.at_work(name))]
        ours = [job.id for job in found if isinstance(job, Job) and job.request.asked_by == asked_by(name)]
        answers = self.store.cancel_each(ours)
        for error in (*found, *answers):
            if isinstance(error, ReshardError):
                log.info("a job of catalog %s keeps running: %s", name, error)
        return sum(not isinstance(answer, ReshardError) for answer in answers)

    def retry(self, name: str, only: str | None = None) -> int:
        """Give what failed, or failed with this code, another turn; returns how many. Raises as ``resume``.

        What only the file can correct stays as it is.
        """

        def step(pipe: Pipeline, now: Snapshot) -> int:
            if now.state is not None and "expanding" in {now.state, now.paused_from}:
                raise CatalogState(name=name, state=now.state, why="it has not been expanded yet")
            again: dict[str, Ended] = {}
            for number, kept in decoded(pipe.hgetall(key(name, "ended"))).items():
                ended = known_fields(Ended, kept)
                if ended.error is not None and not ended.in_file and only in {None, ended.error["code"]}:
                    again[number] = ended
            # A job that goes on reports at its end all that it ever read, if it is still there.
            there = at_once(self._redis, lambda pipe: [pipe.exists(job_key(one.job or "")) for one in again.values()])
            counted = sum(ended.read for ended, kept in zip(again.values(), there, strict=True) if kept)
            pipe.multi()
            for entry, ended in again.items():
                pipe.hdel(key(name, "ended"), entry)
                pipe.zadd(key(name, "todo"), {entry: int(entry)})
                if ended.job:
                    pipe.hset(key(name, "again"), entry, ended.job)
                now.tally(pipe, ended, -1)
            if again:
                read = 0 if now.state == "stopped" else now.bytes  # as `resume` forgives it
                pipe.hset(key(name), mapping={"failures": 0, "bytes": read - counted})
                pipe.hdel(key(name), "note")
                if now.state != "paused":
                    now.enter(pipe, "running")
            return len(again)

        return self._change(name, step, must_exist=True)

    def remove(self, name: str) -> None:
        """Forget it and what it knows of its targets, which stay. Raises CatalogNotFound, CatalogState."""

        def step(pipe: Pipeline, now: Snapshot) -> None:
            if now.busy:
                why = "only a catalog that has ended can be removed", "remove it when all of its jobs have ended"
                raise records.not_ended(name, now.shown, *why)
            nights = [f"night:{ms}" for ms in texts(pipe.lrange(key(name, "nights"), 0, -1))]
            pipe.multi()
            pipe.delete(key(name), *(key(name, part) for part in (*RUN_PARTS, "record", "nights", *nights)))
            pipe.srem(ALL, name)
            for kept in (SUCCESS, TROUBLE, SUBMITTED):
                pipe.hdel(kept, name)

        self._change(name, step, must_exist=True)

    def standings(self, name: str, entries: Iterable[Entry]) -> list[Standing]:
        """How each entry stands against the last job that carried it out."""
        record = self._record(name)
        return [records.standing(entry, record) for entry in entries]

    def remember(self, name: str, entry: Entry) -> None:
        """Its target holds just what it asks for, at the commits that it names."""
        assert entry.request is not None, "what has no target has nothing to hold"
        self._redis.hset(key(name, "record"), entry.request.key(), json.dumps([entry.source, entry.target]))

    def _record(self, name: str) -> dict[str, list[str]]:
        return {
            request: json.loads(data) for request, data in decoded(self._redis.hgetall(key(name, "record"))).items()
        }

    def _turn(self, name: str, state: State, why: str, note: str = "", *expander: str) -> bool:
        """``expander`` is the run and the token of who expands it, perhaps one that was begun anew meanwhile."""

        def step(pipe: Pipeline, now: Snapshot) -> bool:
            if now.state in records.ALREADY.get(state, ()):
                return False
            cut_short = state == now.state == "cancelled" and now.active > 0
            if not (now.state in TURNS[state] or cut_short) or (expander and expander != (now.run, now.expander)):
                raise CatalogState(name=name, state=now.shown, why=why)
            pipe.multi()
            pipe.hset(key(name), "note", note) if note else pipe.hdel(key(name), "note")
            pipe.hset(key(name), "paused_from", now.state) if state == "paused" else pipe.hdel(key(name), "paused_from")
            if state == "running" and now.paused_from == "expanding":
                now.enter(pipe, "expanding")
                return True
            if now.state == "stopped":  # what stopped it is forgiven
                pipe.hset(key(name), mapping={"failures": 0, "bytes": 0})
            if state == "cancelled":
                pipe.delete(key(name, "todo"), key(name, "again"))
            # Its last job may have ended in the pause.
            over = state == "running" and now.todo + now.active == 0
            now.enter(pipe, "done" if over else state, note=note)
            return True

        return self._change(name, step, must_exist=True)

    def _change(self, name: str, step: Callable[[Pipeline, Snapshot], T], *watched: str, must_exist: bool = False) -> T:
        """Carry out ``step``, again when the catalog or what else is watched changed while it read.

        Raises CatalogNotFound when the catalog ``must_exist`` and does not.
        """

        def carry_out(pipe: Pipeline) -> T:
            now = Snapshot.read(pipe, name)
            if must_exist and now.state is None:
                raise CatalogNotFound(name=name)
            return step(pipe, now)

        return transact(self._redis, carry_out, key(name), *watched)


def starting(pipe: Pipeline, definition: Definition, now: Snapshot, schedule: str = "") -> Callable[[Pipeline], None]:
    """What begins a run of a catalog that is not busy; ``pipe`` reads, and has read ``now`` of it."""
    name = definition.name
    old = [f"night:{ms}" for ms in texts(pipe.lrange(key(name, "nights"), NIGHTS - 1, -1))]

    def start(pipe: Pipeline) -> None:
        pipe.delete(key(name), *(key(name, part) for part in (*RUN_PARTS, *old)))
        begun = {"run": uuid4().hex, "started": now.at, "fired_by": schedule, "failures": 0, "bytes": 0}
        pipe.hset(key(name), mapping=begun | definition.stored())
        pipe.sadd(ALL, name)
        pipe.lpush(key(name, "nights"), now.at)
        pipe.ltrim(key(name, "nights"), 0, NIGHTS - 1)
        now.enter(pipe, "expanding")

    return start


def asked_by(name: str) -> str:
    """What its jobs say of who asked for them."""
    return f"{_OF_CATALOGS}{name}"


def catalog_of(by: str) -> str:
    """The catalog whose jobs say that of who asked for them, or nothing."""
    return by.removeprefix(_OF_CATALOGS) if by.startswith(_OF_CATALOGS) else ""


def key(name: str, part: str | None = None) -> str:
    return f"{PREFIX}catalog:{name}:{part}" if part else f"{PREFIX}catalog:{name}"
