"""A real broker for the whole session, emptied before each test, and a real plan to put into jobs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import e
from pathlib import Path

import pytest

from reshard.pipeline.copying.loop import Moved, Stopped
from reshard.pipeline.places import Hub, parse_place
from reshard.pipeline.planning.model import SCHEMA, Plan, Receipt
from reshard.pipeline.request import Options, Request
from reshard.pipeline.reshard import draft
from reshard.pipeline.stores.connect import Context, open_source, open_target
from reshard.worker.followers.counters import Counters
from reshard.worker.followers.cursor import Cursor
from reshard.worker.followers.outcomes import Outcomes
from reshard.worker.followers.pushes import Pushes
from reshard.worker.followers.spending import Spending
from reshard.worker.keeper import LeaseKeeper
from reshard.worker.queue.events import Reader, follow
from reshard.worker.queue.jobs import JobStore, Process, open_redis
from reshard.worker.queue.leases import Lease, Leases
from reshard.worker.queue.pace import PACE
from reshard.worker.queue.scripts import FADES, job_key, server_ms
from reshard.worker.queue.wakes import QUEUES
from reshard.worker.settings import Settings
from tests.support.models import add_friends, arrays, numbered, save_sharded
from tests.support.procs import Broker, wait_for

QUICK = Settings(lease=30, stall=120, broker_patience=20)

SIZE = 20_000  # bytes; four tensors of 4 kB a file


@pytest.fixture(autouse=True)
def _temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit that is worked on in this process makes its folder that of Python's tempfile; not for the next test."""
    monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("broker")) as running:
        yield running


@pytest.fixture
def store(broker: Broker) -> Iterator[JobStore]:
    client = open_redis(broker.url)
    client.flushall()
    yield JobStore(client, broker.url)
    client.close()


@contextmanager
def restricted(store: JobStore, keys: str = "reshard:[^e]*") -> Iterator[JobStore]:
    """The queue as a user sees it that may write to these keys alone; left out, as docs/security.md has it."""
    store.redis.acl_setuser("restricted", enabled=True, passwords=["+x"], keys=[keys], categories=["+@all"])
    try:
        with open_redis(store.url) as client:
            client.connection_pool.connection_kwargs.update(username="restricted", password="x")
            yield JobStore(client)
    finally:
        store.redis.acl_deluser("restricted")


def at(text: str) -> float:
    """Seconds since the epoch of a moment in UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


class Clock:
    """Seconds since the epoch, as the test says."""

    def __init__(self, text: str) -> None:
        self.now = at(text)

    def __call__(self) -> float:
        return self.now

    def set(self, text: str) -> None:
        self.now = at(text)


def ask(name: str = "model", priority: str = "interactive", **options: object) -> Request:
    """A request for a job whose work is never really done."""
    request = Request(source=Hub(repo="them/model"), target=Hub(repo=f"us/{name}"), options=Options(**options))
    return request.model_copy(update={"priority": priority})


@dataclass
class Wakes:
    """What was sent, in order."""

    sent: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, queue: str, job: str) -> None:
        self.sent.append((queue.removeprefix("reshard:"), job))

    def take(self) -> list[str]:
        """The queues that wakes went to since the last call."""
        queues = [queue for queue, _ in self.sent]
        self.sent.clear()
        return queues


@pytest.fixture
def wakes() -> Wakes:
    return Wakes()


@pytest.fixture
def leases(store: JobStore, wakes: Wakes) -> Leases:
    return Leases(store, wakes, "worker-a")


def another(store: JobStore, name: str = "worker-b", schema: int = SCHEMA) -> Leases:
    """A second worker on the same store, whose wakes nobody looks at."""
    return Leases(store, Wakes(), name, schema=schema)


def followed(store: JobStore) -> None:
    """Have the followers handle all that happened, as control would."""
    followers = (Cursor(store), Pushes(store), Outcomes(), Counters(store), Spending(store.redis))
    while sum(follow(follower, Reader(store.redis, follower.group)) for follower in followers):
        pass


def age(store: JobStore, job: str, seconds: float) -> None:
    """Let ``seconds`` pass for this job: every time that is kept of it lies that much further back."""
    past = -round(seconds * 1000)
    for unit in store.redis.zrange(job_key(job, "todo"), 0, -1):
        store.redis.zincrby(job_key(job, "todo"), past, unit)
    for line in waiting_lines(store, job):
        store.redis.zincrby(line, past, job)


def copying_at(store: JobStore, speed: int, mean: int) -> None:
    """As if so many bytes a second had been copied for five minutes, of jobs of ``mean`` bytes."""
    now = server_ms(store.redis)
    kept = {"paced": round(speed * FADES / 1000 * (1 - 1 / e)), "paced_at": now, "paced_from": now - FADES}
    store.redis.hset(PACE, mapping={**kept, "mean": mean})


def waiting_lines(store: JobStore, job: str) -> list[str]:
    """Where it is noted that this job is to be looked at, or that a wake of it is on its way."""
    lines = [f"{queue}:{what}" for queue in QUEUES for what in ("due", "waked")]
    return [line for line in lines if store.redis.zscore(line, job) is not None]


@pytest.fixture(scope="session")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Four source files, four groups, six shards."""
    folder = tmp_path_factory.mktemp("plan")
    save_sharded(folder / "model", numbered(arrays(24, 4000), 4))
    add_friends(folder / "model")
    return draft_plan(folder / "model", folder / "out")


def draft_plan(source: Path | str, target: Path | str, size: int = SIZE) -> Plan:
    request = Request(source=parse_place(str(source)), target=parse_place(str(target)), options=Options(size=size))
    context = Context.from_env()
    target_store = open_target(request.target, request.options, context)
    return draft(request, open_source(request.source, context), target_store)


def receipts(plan: Plan, group: int) -> list[Receipt]:
    """The receipts that copying this group would bring."""
    shards = [plan.shards[i] for i in plan.groups[group].shards]
    return [Receipt(s.digest, s.size, f"sha-{s.digest}", None, {e.name: "x" for e in s.entries}) for s in shards]


def planned(store: JobStore, leases: Leases, plan: Plan, request: Request | None = None) -> str:
    """A job that has its plan."""
    job = store.submit(request or ask()).id
    lease = claimed(leases, job, "plan")
    assert leases.planned(lease, plan) == "ok"
    return job


def copying(store: JobStore, leases: Leases, plan: Plan, request: Request | None = None) -> tuple[str, Lease]:
    """A job whose check is under way, and the lease of its first group."""
    job = planned(store, leases, plan, request)
    claimed(leases, job, "check")
    return job, claimed(leases, job, "group:00000")


def copied(store: JobStore, leases: Leases, plan: Plan, request: Request | None = None) -> str:
    """A job with everything copied and checked, which waits to be published."""
    job = planned(store, leases, plan, request)
    assert leases.done(claimed(leases, job, "check"), []) == "ok"
    for number in range(len(plan.groups)):
        lease = claimed(leases, job, f"group:{number:05d}")
        assert leases.seal(lease, receipts(plan, number), Moved()) == "ok"
        assert leases.done(lease, [[], []]) == "ok"
    return job


def claimed(leases: Leases, job: str, unit: str) -> Lease:
    """The lease of what there is to do next, which must be ``unit``."""
    lease = leases.claim(job)
    assert lease is not None, f"nothing to claim where {unit} was expected"
    assert lease.unit == unit
    return lease


def ticks_until_stopped(kept: LeaseKeeper) -> str:
    """Ticks until the work is told to stop; why it was."""

    def stopped() -> str | None:
        try:
            kept.tick(1)
        except Stopped as stopped:
            return stopped.reason
        return None

    reason = wait_for(stopped, "a reason to stop")
    assert reason is not None
    return reason


def process(name: str, kind: str = "worker") -> Process:
    host, _, pid = name.partition(":")
    return Process(name, kind, "1", host, int(pid), 2, 0.0, False)
