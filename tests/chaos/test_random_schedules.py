"""The long form of the chaos suite: random schedules of kills, each named by a seed that brings it back.

    CHAOS_SEED=<seed at the head of the run> pytest tests/chaos/test_random_schedules.py -k 'test_it_survives[<number>]'

A schedule says what happens after how many requests to the Hub, so it waits for work done and not for time.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from reshard.pipeline.errors import WrongState
from tests.chaos.service import TRANSPORTS, Service, Transport, Work, servers
from tests.support.hub.process import HubProcess
from tests.support.procs import Proc

SCHEDULES = 50
REQUESTS = 160  # about as many as one undisturbed job makes
THROTTLE = 3_000_000  # bytes a second for all reads of weights, so that events fall into copies


@dataclass(frozen=True)
class Event:
    after: int  # requests to the Hub since the submission
    what: str
    mended: bool  # at once, and not when the next event has happened too


@dataclass(frozen=True)
class Schedule:
    server: str
    transport: Transport
    commit: str | None  # what befalls the first commit that is sent
    events: tuple[Event, ...]


def drawn(seed: str, number: int) -> Schedule:
    """The schedule that ``seed`` and ``number`` always give; servers and transports take turns."""
    draw = random.Random(f"{seed}-{number}")
    there = [(name, transport) for name, path in servers().items() if path for transport in TRANSPORTS]
    server, transport = there[number % len(there)]
    moments = sorted(draw.randrange(REQUESTS) for _ in range(draw.randint(1, 4)))
    events = tuple(Event(after, draw.choice(list(EVENTS)), draw.random() < 0.5) for after in moments)
    commit = draw.choice([None, None, "lost_response", "reset"])
    return Schedule(server, transport, commit, events)


# ---------------------------------------------------------------------------------------------------------- events


def a_worker(service: Service, work: Work) -> None:
    service.kill_worker(busiest(service, work))


def a_child(service: Service, work: Work) -> None:
    held = service.store.get(work.job).claims
    pids = {pid for worker in service.workers if worker.alive() for pid in worker.children()}
    for pid in [int(h.worker.rpartition(".")[2]) for h in held][:1]:
        if pid in pids:
            service.kill_child(pid)


def control(service: Service, work: Work) -> None:
    service.kill_control()


def the_broker(service: Service, work: Work) -> None:
    service.broker.kill()


def everything(service: Service, work: Work) -> None:
    service.kill_all()


def a_worker_hangs(service: Service, work: Work) -> None:
    """For longer than its leases, while the other one goes on; then it comes back."""
    worker = busiest(service, work)
    worker.signal_all(signal.SIGSTOP)
    service.kills += 1
    ahead = service.requests() + 10
    try:
        service.reached(work, ahead)
    finally:
        worker.signal_all(signal.SIGCONT)


def second_thoughts(service: Service, work: Work) -> None:
    """Cancelled and taken up again at once, where it is not too late."""
    try:
        service.store.cancel(work.job)
    except WrongState:
        return
    service.kills += len(service.workers)  # every copy under way was for nothing
    service.store.retry(work.job)


EVENTS: dict[str, Callable[[Service, Work], None]] = {
    event.__name__: event
    for event in (a_worker, a_child, control, the_broker, everything, a_worker_hangs, second_thoughts)
}
NEEDS_BROKER = {"a_worker", "a_child", "a_worker_hangs", "second_thoughts"}


def busiest(service: Service, work: Work) -> Proc:
    """A living worker, one that has a part of the job if there is one."""
    alive = [worker for worker in service.workers if worker.alive()]
    if not alive:
        service.mend()
        alive = service.workers
    return next((worker for worker in alive if service.busy(work, worker)), alive[0])


# ------------------------------------------------------------------------------------------------------------ tests


@pytest.fixture(scope="module")
def seed() -> str:
    return os.environ["CHAOS_SEED"]  # tests/conftest.py draws one where none is given


@pytest.fixture(scope="module")
def services(hub: HubProcess, folder: Path) -> Iterator[dict[str, Service]]:
    """One for each server, whose workers are used on and on; what they leave is looked for in the last test."""
    running: dict[str, Service] = {}
    try:
        for name, path in servers().items():
            if path:
                running[name] = Service(folder / f"random-{name}", hub, path).__enter__()
        yield running
    finally:
        for service in running.values():
            service.__exit__()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(SCHEDULES))
def test_it_survives(services: dict[str, Service], seed: str, number: int) -> None:
    schedule = drawn(seed, number)
    name = f"CHAOS_SEED={seed} number {number}: {schedule}"
    print(name)
    try:
        carry_out(services[schedule.server], schedule)
    except AssertionError as error:
        raise AssertionError(f"{name}\n{error}") from error


def carry_out(service: Service, schedule: Schedule) -> None:
    service.mend()
    work = service.prepare(schedule.transport)
    service.admin.fault(rf"^GET (/_cdn/models/{work.source}/.*model-|/_cas/xorbs/)", "throttle", rate=THROTTLE)
    if schedule.commit:
        service.admin.fault(work.commit, schedule.commit, times=1)
    work = service.submit(work)
    for event in schedule.events:
        if event.what in NEEDS_BROKER and not service.broker.alive():
            service.mend()
        service.reached(work, event.after)
        EVENTS[event.what](service, work)
        if event.mended:
            service.mend()
    service.admin.clear_faults()
    service.mend()
    try:
        service.check(work)
    finally:
        service.forget(work)


@pytest.mark.slow
def test_nothing_is_left_of_all_the_dead(services: dict[str, Service]) -> None:
    for service in services.values():
        service.mend()
        service.admin.clear_faults()
        service.stop()
        assert service.leftovers() == []


def test_a_seed_gives_the_same_schedule_again_and_others_another() -> None:
    assert drawn("7", 3) == drawn("7", 3)
    kinds = {event.what for number in range(SCHEDULES) for event in drawn("7", number).events}
    assert kinds == EVENTS.keys()
    assert len({drawn("7", number) for number in range(SCHEDULES)}) == SCHEDULES
