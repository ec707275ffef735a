"""When the jobs of a long queue end: in the order of the store, and in two others.

Every unit is claimed from a real broker and handed in there. Nothing is worked on: how long a unit takes is counted, so
these figures are those of any machine.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import NamedTuple

from reshard.pipeline.limits import GB
from reshard.pipeline.planning.model import Plan
from reshard.worker import broker
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Lease, Leases
from reshard.worker.queue.scripts import PREFIX
from reshard.worker.queue.states import JobState
from reshard.worker.queue.wakes import QUEUES
from reshard.worker.settings import Settings
from tests.benchmarks.figures import Figure
from tests.benchmarks.scale import Scale
from tests.support.models import arrays, numbered, save_sharded
from tests.worker.conftest import ask, draft_plan

STEPS = {"plan": 4, "check": 2, "publish": 3, "confirm": 2}  # seconds
RATE = 0.1 * GB  # bytes a second that one slot copies
FILE = 5 * GB  # of a source; a unit each
TWO_SLOTS, MANY_SLOTS = 2, 16
MIXED = 2.5  # times as many jobs as in the queue of equal ones
MEDIAN, SPREAD, LARGEST = 3 * GB, 1.3, 150 * GB  # bytes of a model; half are between 1.2 and 7.2 GB

Claim = Callable[[Leases, str, str], Lease | None]


class Model(NamedTuple):
    """Seconds that a job of it takes."""

    groups: Sequence[float]

    @property
    def whole(self) -> float:
        """Of one slot that does all of it."""
        return sum(STEPS.values()) + sum(self.groups)

    def takes(self, lease: Lease) -> float:
        return self.groups[lease.group] if lease.kind == "group" else STEPS[lease.kind]


class End(NamedTuple):
    """Of each job, in the order of their submission: seconds after it."""

    times: Sequence[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.times)

    @property
    def late(self) -> float:
        """When 95 of 100 have ended."""
        return sorted(self.times)[math.ceil(0.95 * len(self.times)) - 1]


def ordering(folder: Path, scale: Scale) -> Iterator[Figure]:
    """What those see who wait for one of many jobs that were submitted at once."""
    settings = Settings(broker_url=None, data_dir=folder / "service")
    save_sharded(folder / "model", numbered(arrays(2, 4000), 1))
    plan = draft_plan(folder / "model", folder / "out")
    url = broker.start(settings)
    try:
        with JobStore.at(url) as store:
            store.redis.config_set("appendfsync", "no")
            yield from _equal(store, plan, scale.waiting)
            yield from _mixed(store, plan, int(scale.waiting * MIXED))
    finally:
        broker.stop(settings)


def _equal(store: JobStore, plan: Plan, number: int) -> Iterator[Figure]:
    models = [Model([2 * GB / RATE])] * number
    ours, by_wakes = (_simulated(store, plan, models, TWO_SLOTS, claim) for claim in (in_order, as_sent))
    name = f"{number:,} equal jobs on two slots"
    yield Figure(f"{name}, mean time to done, to wakes as sent", ours.mean / by_wakes.mean, "x", 0.55, "must")
    yield Figure(f"{name}, the first is done, in times of a job", min(ours.times) / models[0].whole, "x", 2, "must")


def _mixed(store: JobStore, plan: Plan, number: int) -> Iterator[Figure]:
    random = Random(number)
    sizes = (min(random.lognormvariate(math.log(MEDIAN), SPREAD), LARGEST) for _ in range(number))
    models = [Model([min(FILE, size - first) / RATE for first in range(0, int(size), FILE)]) for size in sizes]
    ended = {
        "in order": _simulated(store, plan, models, MANY_SLOTS, in_order),
        "wakes as sent": _simulated(store, plan, models, MANY_SLOTS, as_sent),
        "whole jobs": whole_jobs(models, MANY_SLOTS),
    }
    for name, end in ended.items():
        what = f"{number:,} mixed jobs on {MANY_SLOTS} slots, {name}"
        yield Figure(f"{what}, mean time to done", end.mean / 3600, "h", end.mean / 3600, "report")
        yield Figure(f"{what}, 95 % are done", end.late / 3600, "h", end.late / 3600, "report")


def in_order(leases: Leases, queue: str, job: str) -> Lease | None:
    """As a worker does."""
    return leases.claim_first(queue, job)


def as_sent(leases: Leases, queue: str, job: str) -> Lease | None:
    """First in, first out: each wake for the job that it was sent for."""
    return leases.claim(job)


def whole_jobs(models: Sequence[Model], slots: int) -> End:
    """Each slot does one job from its beginning to its end."""
    free, ended = [0.0] * slots, list[float]()
    for model in models:
        ended.append(free[0] + model.whole)
        heapq.heapreplace(free, ended[-1])
    return End(ended)


def _simulated(store: JobStore, plan: Plan, models: Sequence[Model], slots: int, claim: Claim) -> End:
    """When jobs for these models end that were submitted at once."""
    store.redis.flushdb()
    sent = {queue: deque[str]() for queue in QUEUES}
    leases = Leases(store, lambda queue, job: sent[queue].append(job), "machine:1.2", lease=86_400)
    jobs = {store.submit(ask(f"m{number}")).id: number for number in range(len(models))}
    while leases.due():
        pass
    queue, free, now = f"{PREFIX}interactive", slots, 0.0
    busy, ended, claims = list[tuple[float, int, Lease]](), [0.0] * len(models), count()
    while True:
        while free and sent[queue]:
            if (lease := claim(leases, queue, sent[queue].popleft())) is not None:
                free -= 1
                model = models[jobs[lease.job]]
                heapq.heappush(busy, (now + model.takes(lease), next(claims), lease))
        if not busy:
            break
        now, _, lease = heapq.heappop(busy)
        free += 1
        _hand_in(leases, lease, plan, models[jobs[lease.job]])
        if lease.kind == "confirm":
            ended[jobs[lease.job]] = now
    assert store.counts()[JobState.done] == len(models)
    return End(ended)


def _hand_in(leases: Leases, lease: Lease, plan: Plan, model: Model) -> None:
    if lease.kind == "plan":
        answer = leases.planned(lease, replace(plan, groups=plan.groups[:1] * len(model.groups)))
    else:
        if lease.kind == "publish":
            leases.begin(lease)
        answer = leases.done(lease, [])
    assert answer == "ok"
