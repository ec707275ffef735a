"""Many jobs that ended: how long `list` and `status` take, what they cost the broker, how fast old ones go.

One of them goes through every step of the store, from its submission to its end; the others are what that one left,
under ids of their own. For an hour a job keeps its plan, receipts, events and log, so both states are measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from reshard.pipeline.check import Check
from reshard.pipeline.limits import KB
from reshard.pipeline.places import Hub
from reshard.pipeline.publishing.commit import Published
from reshard.pipeline.request import Request
from reshard.worker import broker
from reshard.worker.control import JANITOR_BATCH, Control
from reshard.worker.queue.jobs import JobStore, new_id
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.scripts import PREFIX, job_key, texts
from reshard.worker.queue.states import JobState
from reshard.worker.settings import KEEP_DAYS, Settings
from tests.benchmarks.figures import Figure, fastest, fastest_command
from tests.benchmarks.scale import Scale
from tests.support.models import arrays, numbered, save_sharded
from tests.support.procs import wait_for
from tests.worker.conftest import claimed, copied, draft_plan

AT_ONCE = 1000  # jobs written in one go
SCREEN = 20  # jobs that `reshard list` shows


def finished(folder: Path, scale: Scale) -> Iterator[Figure]:
    """What a person waits for who looks at a queue with a long past."""
    settings = Settings(broker_url=None, data_dir=folder / "service")
    url = broker.start(settings)
    try:
        with JobStore.at(url) as store:
            yield from _measured(store, url, settings, folder, scale.ended)
    finally:
        broker.stop(settings)


def _measured(store: JobStore, url: str, settings: Settings, folder: Path, count: int) -> Iterator[Figure]:
    durable = store.redis.config_get("appendfsync")["appendfsync"]
    store.redis.config_set("appendfsync", "no")  # while they are written, which is not what is measured
    empty = _memory(store)
    one = _finish_one(store, folder)
    details = [key.removeprefix(job_key(one)) for key in texts(store.redis.keys(f"{job_key(one)}:*"))]
    ids = _copy(store, one, details, count)
    yield Figure("a job in the hour after its end, memory", (_memory(store) - empty) / count / KB, "kB", 20, "aim")
    gone = [part for part in details if store.redis.ttl(job_key(one) + part) > 0]
    for id in ids:
        store.redis.delete(*(job_key(id) + part for part in gone))
    yield Figure("a job that ended, memory", (_memory(store) - empty) / count / KB, "kB", 2.5, "aim")
    store.redis.config_set("appendfsync", durable)
    wait_for(lambda: not store.redis.info("persistence")["aof_rewrite_in_progress"], "the broker's rest", 300)

    env = {"RESHARD_BROKER_URL": url}
    some = ids[count // 2]
    yield Figure(f"list of {count:,} jobs, time", fastest_command("list", env=env), "s", 0.3, "must")
    yield Figure("status of one of them, time", fastest_command("status", some, env=env), "s", 0.3, "must")
    yield Figure("list, the store alone", fastest(lambda: store.recent(limit=SCREEN)), "s", 0.02, "must")
    yield Figure("status, the store alone", fastest(lambda: store.get(some)), "s", 0.02, "must")

    for id in ids[:JANITOR_BATCH]:
        store.redis.zincrby(f"{PREFIX}jobs:done", -(KEEP_DAYS + 1) * 86_400_000, id)
    control = Control(store, Leases(store, lambda queue, job: None, "bench"), settings)
    start = time.perf_counter()
    assert control.clean() == JANITOR_BATCH
    yield Figure("1,000 old jobs expire, time", time.perf_counter() - start, "s", 2, "aim")
    assert store.counts()[JobState.done] == count - JANITOR_BATCH


def _memory(store: JobStore) -> int:
    return int(store.redis.info("memory")["used_memory"])


def _finish_one(store: JobStore, folder: Path) -> str:
    """A job of four source files that was published and confirmed."""
    save_sharded(folder / "model", numbered(arrays(24, 4000), 4))
    plan = draft_plan(folder / "model", folder / "out")
    leases = Leases(store, lambda queue, job: None, "machine:123.456")
    asked = Request(source=Hub(repo="them/model"), target=Hub(repo="us/model-200MB"), asked_by="somebody@machine")
    job = copied(store, leases, plan, asked)
    lease = claimed(leases, job, "publish")
    leases.begin(lease)
    leases.done(lease, asdict(Published("0" * 40, "main", False)))
    check = Check("published bytes", "model", "passed", figures={"files": 6, "bytes": plan.shards[0].size})
    leases.done(claimed(leases, job, "confirm"), [check.to_dict()])
    assert store.get(job).state == JobState.done
    return job


def _copy(store: JobStore, one: str, details: Sequence[str], count: int) -> list[str]:
    """As many jobs as are wanted, that one among them; in every sorted set where it is, they are too."""
    ids = [one, *(new_id() for _ in range(count - 1))]
    scores = {key: store.redis.zscore(key, one) for key in _sorted_sets(store)}
    for first in range(1, count, AT_ONCE):
        pipeline = store.redis.pipeline(transaction=False)
        some = ids[first : first + AT_ONCE]
        for id in some:
            for part in ("", *details):
                pipeline.copy(job_key(one) + part, job_key(id) + part)
            pipeline.hset(job_key(id), "id", id)
        for key, score in scores.items():
            if score is not None:
                pipeline.zadd(key, dict.fromkeys(some, score))
        pipeline.execute()
    return ids


def _sorted_sets(store: JobStore) -> list[str]:
    return [key for key in texts(store.redis.keys(f"{PREFIX}*")) if store.redis.type(key) == b"zset"]
