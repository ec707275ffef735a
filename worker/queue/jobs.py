"""Jobs as a client sees them: submit, look, cancel, retry. The truth is in Redis, and every change is one Lua file,
which takes a job from one of its states (states.py) to another.

A client needs redis-py and nothing of Celery. ``submit`` writes the job, notes that it is due and rings a bell, in one
step; the control process hears the bell and sends the wake. So a job cannot be written without being due, the client
knows nothing of the message format of the queue, and a bell that nobody heard is made good by what is due.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import compress, repeat
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast
from urllib.parse import parse_qs

import redis
from pydantic import TypeAdapter, ValidationError

from reshard.pipeline.errors import (
    BrokerUnsupported,
    JobNotFound,
    JobUnreadable,
    ReshardError,
    TargetBusy,
    TooManyQueued,
)
from reshard.pipeline.request import Request
from reshard.pipeline.stores.credentials import default_endpoint
from reshard.worker.queue.answers import IN_THE_WAY, cancelled, one, resolved, retried
from reshard.worker.queue.listing import Latest, page
from reshard.worker.queue.record import Job, LogLine, read
from reshard.worker.queue.scripts import (
    NO_DATABASE,
    PREFIX,
    Answers,
    Pipeline,
    Scripts,
    at_once,
    decoded,
    each_or_error,
    for_each,
    job_key,
    known_fields,
    ms,
    server_ms,
    texts,
    told,
)
from reshard.worker.queue.states import ENDED, JobState
from reshard.worker.queue.wakes import QUEUES
from reshard.worker.settings import max_queued

if TYPE_CHECKING:
    from reshard.pipeline.planning.codec import PlannedFile
    from reshard.pipeline.planning.model import Plan

Takes = Callable[[Job], bool] | None  # whether a search takes a job; None where it takes all
_LOG_LINE = TypeAdapter(LogLine)
SOCKET_TIMEOUT = 10.0  # seconds; an answer of Redis takes milliseconds
CONNECT_TIMEOUT = 5.0  # seconds
PAGE_BYTES = 4_000_000  # of the records of one page: each may have 64 kB of request, and checks and errors beside it
SEARCHED = 1000  # records that are read in search of some; that takes half a second
LOADED = 25  # records that are read at once: a page of jobs is some such reads
CONNECTIONS = 4  # of one client; a command takes a millisecond, so many threads share them
HEALTH_CHECK = 25.0  # seconds without a command after which a connection is tried before it is trusted
ID_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"  # without letters that look like others
ID_LENGTH = 10  # letters; 31**10 ids, so that two jobs never share one


@dataclass(frozen=True, slots=True)
class Submitted:
    id: str
    existed: bool  # the same request was queued or running already
    state: str


class Listing(NamedTuple):
    """Some jobs, newest first."""

    jobs: list[Job]
    unreadable: dict[str, str]  # by id: why its record cannot be read
    next: str | None  # where the next page begins; None after the last


@dataclass(frozen=True, slots=True)
class Process:
    """A worker or control process that gave a sign of life."""

    name: str
    kind: str  # worker, control
    version: str
    host: str
    pid: int
    concurrency: int
    started: float
    draining: bool
    memory: int | None = None  # bytes that it and its children have resident; None: not told
    temporary: int | None = None  # bytes of their temporary files
    queues: list[str] = field(default_factory=lambda: ["interactive", "bulk"], hash=False)  # whose jobs a worker takes


@contextmanager
def broker_errors(url: str) -> Iterator[None]:
    """Inside, a Redis that does not answer is BrokerUnavailable, one that takes no more data BrokerFull, one that wants
    another user BrokerRefused, and what is no Redis, or has no such database, BrokerUnsupported."""
    try:
        yield
    except redis.RedisError as error:
        if (ours := told(error, without_password(url))) is None:
            raise
        raise ours from error


class JobStore:
    """What a client may do with jobs. Every method may raise redis-py's errors, as all that asks the broker."""

    def __init__(self, client: redis.Redis, url: str = "redis") -> None:
        self.redis = client
        self.url = url
        self.run = Scripts(client)
        self.most = max_queued()  # jobs that one submitter may have queued

    @classmethod
    @contextmanager
    def at(cls, url: str) -> Iterator[JobStore]:
        """The store behind a Redis URL; inside, errors are as in ``broker_errors``."""
        with broker_errors(url), open_redis(url) as client:
            yield cls(client, url)

    def check_server(self) -> None:
        """Raises BrokerUnsupported for a server that cannot carry the queue, though it may take a job."""
        try:
            said = self.redis.info()
        except redis.ResponseError as error:
            if NO_DATABASE in str(error):
                raise
            return  # we may not ask
        mode = said.get("redis_mode") or said.get("server_mode")  # as Redis and Valkey call it
        if mode == "cluster":
            why = "it is part of a cluster, and the queue needs keys that are on several nodes"
        elif mode == "sentinel":
            why = "it is a Sentinel, which stores no data"
        elif said.get("role") == "slave":
            why = f"it is a replica of {said['master_host']}:{said['master_port']}, and a replica does not keep writes"
        else:
            return
        raise BrokerUnsupported(url=without_password(self.url), why=why)

    # ------------------------------------------------------------------------------------------------------ change
    def submit(self, request: Request) -> Submitted:
        """Queue ``request``, or find the job that already carries it out; raises TargetBusy, TooManyQueued."""
        arguments = submission(request)
        id, existed, active_key, state = texts(self.run("submit", *arguments, self.most))
        if existed == "2":
            raise TooManyQueued(name=request.asked_by or "an unnamed submitter", most=self.most, job=id)
        if active_key != arguments[1]:
            raise TargetBusy(job=id, target=str(request.target))
        return Submitted(id, existed == "1", state)

    def cancel(self, id: str) -> JobState:
        """Stop a job; returns the state it was in. Its copiers see it in seconds. Raises JobNotFound, WrongState."""
        return one(self.cancel_each([self.resolve(id)])[0])

    def cancel_each(self, ids: Sequence[str]) -> list[JobState | ReshardError]:
        """The same with many, of whole ids: for each what ``cancel`` would return or raise."""
        answers = self.run.each("cancel", ((id,) for id in ids))
        return [cancelled(id, *texts(answer)) for id, answer in zip(ids, answers, strict=True)]

    def retry(self, id: str, anew: bool = False, overwrite: bool = False) -> JobState:
        """Go on with a job that ended short of done, from what it had copied; returns the state that it ended in.

        ``anew`` plans once more, from what source and target are now; shards that stay the same are not copied again.
        ``overwrite`` does so too, and replaces whatever others changed in the target since.
        Raises JobNotFound, WrongState, TargetBusy when another job has the target by now, and TooManyQueued.
        """
        return one(self.retry_each([self.resolve(id)], anew, overwrite)[0])

    def retry_each(
        self, ids: Sequence[str], anew: bool = False, overwrite: bool = False
    ) -> list[JobState | ReshardError]:
        """The same with many, of whole ids: for each what ``retry`` would return or raise."""
        from reshard.pipeline.planning.model import SCHEMA  # which `reshard list` need not wait for

        requests = self._overwriting(ids) if overwrite else repeat("")
        given = zip(ids, requests, strict=False)
        calls = ((id, int(anew or overwrite), request, str(SCHEMA), self.most) for id, request in given)
        answers = [texts(answer) for answer in self.run.each("retry", calls)]
        kept = self.each([id for id, (answer, _) in zip(ids, answers, strict=True) if answer in IN_THE_WAY])
        return [
            retried(id, answer, what, next(kept) if answer in IN_THE_WAY else None, self.most)
            for id, (answer, what) in zip(ids, answers, strict=True)
        ]

    def _overwriting(self, ids: Sequence[str]) -> Iterator[str]:
        """The request of each, with what only newer releases know, that replaces what others changed."""
        for stored in for_each(self.redis, ids, lambda pipe, id: pipe.hget(job_key(id), "request")):
            asked = json.loads(stored or "{}")
            asked.pop("recurring", None)  # this time a person says so
            yield json.dumps(asked | {"options": asked.get("options", {}) | {"overwrite": True}})

    def rolled_back(self, id: str, commit: str) -> None:
        """Note with a job that ``commit`` rolled its own back; raises JobNotFound."""
        if not self.run("rolled_back", id, commit):
            raise JobNotFound(job=id)

    def delete(self, ids: Sequence[str]) -> list[str]:
        """Forget those that have ended and were not retried meanwhile; returns which. What they published stays."""
        return [*compress(ids, self.run.each("delete", ((id,) for id in ids)))]

    # -------------------------------------------------------------------------------------------------------- look

    def resolve(self, start: str) -> str:
        """The id of the one job whose id begins so; raises JobNotFound, Ambiguous."""
        return one(resolved(start, texts(self.redis.zrangebylex(*_beginning(start)))))

    def resolve_each(self, starts: Sequence[str]) -> list[str | ReshardError]:
        """For each what ``resolve`` would return or raise."""
        found = for_each(self.redis, starts, lambda pipe, start: pipe.zrangebylex(*_beginning(start)))
        return [resolved(start, texts(answer)) for start, answer in zip(starts, found, strict=True)]

    def get(self, id: str) -> Job:
        """The job, with who works on what now; raises JobNotFound, JobUnreadable."""
        ((_, job, _),) = self._loaded([self.resolve(id)])
        return one(job or JobNotFound(job=id))

    def each(self, starts: Sequence[str]) -> Iterator[Job | ReshardError]:
        """For each what ``get`` would return or raise."""
        ids = self.resolve_each(starts)
        jobs = self._loaded([id for id in ids if isinstance(id, str)])
        for id in ids:
            yield (next(jobs)[1] or JobNotFound(job=id)) if isinstance(id, str) else id

    def recent(self, states: Collection[JobState] = (), limit: int = 50) -> list[Job]:
        """The newest ``limit`` jobs, of these states or of all, that can be read; with who works on what now."""
        return self.load(page(self.redis, states, limit).ids)

    def listed(
        self,
        states: Collection[JobState],
        limit: int,
        after: str | None = None,
        since: float = 0.0,
        takes: Takes = None,
    ) -> Listing:
        """A page as ``listing.page`` has it, of PAGE_BYTES at most or one job; raises ValueError as that does.

        Of those that ``takes`` takes there may be fewer although others follow: SEARCHED are looked at.
        """
        found = page(self.redis, states, SEARCHED if takes else limit, after, since)
        jobs, unreadable, size, taken = list[Job](), dict[str, str](), 0, 0
        for id, job, more in self._loaded(found.ids):
            known = not isinstance(job, Job) or takes is None or takes(job)
            if known and (len(jobs) + len(unreadable) == limit or (jobs and size + more > PAGE_BYTES)):
                break
            taken, size = taken + 1, size + (more if known else 0)
            if isinstance(job, JobUnreadable):
                unreadable[id] = job.facts["why"]
            elif job is not None and known:
                jobs.append(job)
        return Listing(jobs, unreadable, found.after(taken))

    def chosen(
        self, states: Collection[JobState], since: float, age: float, takes: Takes, most: int, latest: bool = False
    ) -> list[str]:
        """The newest ``most`` of those that came into ``states`` after ``since``, and at least ``age`` seconds ago.

        ``latest`` leaves of them what ``listing.Latest`` does.
        """
        last, chosen, after, of = server_ms(self.redis) - ms(age), list[str](), "", Latest(self.redis).of
        while True:
            found = page(self.redis, states, SEARCHED, after, since)
            ids = [id for moment, id in found.rows if moment <= last]
            ids = [job.id for job in self.load(ids) if takes(job)] if takes else ids
            chosen += of(ids) if latest else ids
            after = found.after(len(found.rows)) or ""
            if not after or len(chosen) >= most:
                return chosen[:most]

    def load(self, ids: list[str]) -> list[Job]:
        """These jobs but deleted and damaged ones, in this order; with who works on what now."""
        return [job for _, job, _ in self._loaded(ids) if isinstance(job, Job)]

    def counts(self) -> dict[JobState, int]:
        found = at_once(self.redis, lambda pipe: [pipe.zcard(f"{PREFIX}jobs:{state}") for state in JobState])
        return dict(zip(JobState, found, strict=True))

    def left(self, queues: Collection[str] = QUEUES) -> int:
        """How many jobs of these queues are not ended, but for those that wait for the window of bulk work."""
        found = at_once(self.redis, lambda pipe: [pipe.zcard(f"{PREFIX}jobs:{s}") for s in JobState if not s.ended])
        held = f"{PREFIX}held"
        others = [f"{queue}:{place}" for queue in QUEUES if queue not in queues for place in ("due", "waked")]
        aside = len(self.redis.zunion([held, *others])) if others else self.redis.zcard(held)
        return int(sum(found) - aside)

    def plan(self, id: str) -> Plan | None:
        """The whole plan; None before it is made, some time after the job is done, and if a newer release made it."""
        from reshard.pipeline.planning.codec import decode_head, decode_shard  # which `reshard list` need not wait for
        from reshard.pipeline.planning.model import SCHEMA

        job = self.resolve(id)
        request, schema = cast("list[Any]", self.redis.hmget(job_key(job), ["request", "schema"]))
        fields = cast(dict[bytes, bytes], self.redis.hgetall(job_key(job, "plan")))
        if b"head" not in fields or int(schema or SCHEMA) != SCHEMA or Request.known(request)[1]:
            return None
        shards = [decode_shard(fields[b"%d" % number]) for number in range(len(fields) - 1)]
        return replace(decode_head(fields[b"head"]), shards=tuple(shards))

    def plan_digest(self, id: str) -> str | None:
        """The digest of the plan, once it was made; also when it is gone."""
        digest = cast("bytes | None", self.redis.hget(job_key(id), "digest"))
        return None if digest is None else digest.decode()

    def outline(self, id: str) -> list[PlannedFile]:
        """What the plan said of its first files, as long as the job is kept; nothing before there was a plan."""
        from reshard.pipeline.planning.codec import decode_outline

        kept = cast("bytes | None", self.redis.get(job_key(id, "files")))
        return decode_outline(kept) if kept else []

    def log(self, id: str) -> list[LogLine]:
        """The last lines that workers logged of the job, in the order they came; none some time after it is done."""
        kept = cast("list[bytes]", self.redis.lrange(job_key(id, "log"), 0, -1))
        lines = []
        for line in kept:
            with suppress(ValidationError):  # another client of the broker wrote it
                lines.append(_LOG_LINE.validate_json(line))
        return lines

    def stored(self, id: str, digests: Sequence[str]) -> list[bool]:
        """Which of these shards the target's store has answered for."""
        kept = self.redis.hmget(job_key(id, "receipts"), digests) if digests else []
        return [receipt is not None for receipt in cast("list[Any]", kept)]

    def attested(self, id: str) -> dict[str, str]:
        """What the bytes of each source file were held against; empty some time after the job is done."""
        groups = cast("list[bytes]", self.redis.hvals(job_key(self.resolve(id), "attested")))
        return {path: level for group in groups for path, level in json.loads(group)[0].items()}

    def events(self, id: str, after: str = "0", wait: float = 0.0) -> list[tuple[str, dict[str, str]]]:
        """What happened to the job after event ``after``, oldest first; waits up to ``wait`` seconds for the first."""
        block = int(min(wait, SOCKET_TIMEOUT / 2) * 1000) or None
        answer = self.redis.xread({job_key(self.resolve(id), "events"): after}, block=block) or []
        return [(event.decode(), decoded(fields)) for _, events in cast(Any, answer) for event, fields in events]

    def processes(self) -> list[Process]:
        """The workers and control processes that are alive."""
        names = sorted(cast(set[bytes], self.redis.smembers(f"{PREFIX}processes")))
        found = self.redis.mget([f"{PREFIX}process:".encode() + name for name in names]) if names else []
        gone = [name for name, data in zip(names, found, strict=True) if data is None]
        if gone:
            self.redis.srem(f"{PREFIX}processes", *gone)
        return [known_fields(Process, data) for data in found if data is not None]

    def waiting(self) -> dict[str, int]:
        """The wakes that no worker has taken yet, by queue."""
        return {queue.removeprefix(PREFIX): self.redis.llen(queue) for queue in QUEUES}

    def _loaded(self, ids: Sequence[str]) -> Iterator[tuple[str, Job | JobUnreadable | None, int]]:
        """Each job, None where it was deleted meanwhile, and the bytes of its record; LOADED are read at once.

        The units of one that has ended are not asked for.
        """
        now = server_ms(self.redis) if ids else 0
        for first in range(0, len(ids), LOADED):
            some = ids[first : first + LOADED]
            records = self._hashes([job_key(id) for id in some])
            states = [record.get(b"state", b"") if isinstance(record, dict) else b"" for record in records]
            ended = [state.decode(errors="replace") in ENDED for state in states]
            units = iter(self._hashes([job_key(id, "units") for id, over in zip(some, ended, strict=True) if not over]))
            for id, record, over in zip(some, records, ended, strict=True):
                own = {} if over else next(units)
                try:
                    job: Job | JobUnreadable | None = read(id, record, own, now) if record else None
                except JobUnreadable as error:
                    job = error
                yield id, job, sum(map(len, record.values())) if isinstance(record, dict) else 0

    def _hashes(self, keys: list[str]) -> list[Any]:
        """Each hash; an error where something else is kept by that key."""
        return each_or_error(self.redis, lambda pipe: [pipe.hgetall(key) for key in keys])


ACTIVE = f"{PREFIX}active"  # hash: target -> the job that works on it


def _beginning(start: str) -> tuple[str, str, str, int, int]:
    """Where some ids are that begin so."""
    return f"{PREFIX}ids", f"[{start}", f"[{start}\xff", 0, 5


def open_redis(url: str, timeout: float = SOCKET_TIMEOUT) -> redis.Redis:
    """Connects at the first command; a thread without a connection gets a ConnectionError after ``timeout`` seconds."""
    pool = redis.BlockingConnectionPool.from_url(
        url.replace("redis+socket://", "unix://", 1),
        max_connections=CONNECTIONS,
        timeout=timeout,
        socket_timeout=timeout,
        socket_connect_timeout=min(timeout, CONNECT_TIMEOUT),
        health_check_interval=HEALTH_CHECK,
        parser_class=Answers,
        protocol=2,  # the newer one shapes some answers otherwise, and redis-py changed its default
    )
    return redis.Redis.from_pool(pool)


def without_password(url: str) -> str:
    """Where the broker is, for people: a password may be before the host, or anywhere in the query but its ``db``."""
    address, _, query = url.partition("?")
    scheme, _, rest = address.partition("://")
    numbers = parse_qs(query).get("db", [])
    return f"{scheme}://{rest.rpartition('@')[2]}" + (f"?db={numbers[0]}" if numbers else "")


def new_id() -> str:
    return "".join(secrets.choice(ID_ALPHABET) for _ in range(ID_LENGTH))


def in_the_way(pipe: Pipeline, submitted: Sequence[str], most: int) -> tuple[Literal["", "same", "busy", "full"], str]:
    """What keeps ``submitted`` from being queued, in a transaction that watches ``ACTIVE``: each submit writes to it.

    And the job: the same, that of its target, or the oldest of a submitter who may submit no more until one began.
    """
    why, job = texts(Scripts(pipe)("in_the_way", submitted[2], submitted[1], submitted[5], most))
    return cast('Literal["", "same", "busy", "full"]', why), job


def enqueue(pipe: Pipeline, submitted: Sequence[str]) -> None:
    """Queue a job in a transaction, whose other writes may take for granted that it is there."""
    Scripts(pipe)("submit", *submitted)


def submission(request: Request) -> tuple[str, str, str, str, str, str]:
    """What the step that queues ``request`` is given: a new id, key, slot, priority, request and who asked."""
    slot = request.slot(default_endpoint())
    return new_id(), request.key(), slot, request.priority, request.stored(), request.asked_by
