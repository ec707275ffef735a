"""The long form of the chaos suite: random schedules of kills, each named by a seed that brings it back.

    CHAOS_SEED=<seed at the head of the run> pytest tests/chaos/test_random_schedules.py -k 'test_it_survives[<number>]'

A schedule says what happens after how many requests to the Hub, so it waits for work done and not for time.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from celery import Celery

from reshard.pipeline.errors import WrongState
from reshard.worker.fleet.fleet import Fleet
from reshard.worker.queue.scripts import job_key
from reshard.worker.queue.wakes import QUEUES
from reshard.worker.settings import REST_MAX
from tests.chaos.growing_worker import growing_worker_command
from tests.chaos.service import RELOADED, SIZE, TRANSPORTS, Service, Transport, Work, credentials, servers, token
from tests.hub.process import HubProcess
from tests.support.procs import Machine, Proc, wait_for

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
    source: str  # a repository; empty for the usual one
    events: tuple[Event, ...]


def drawn(seed: str, number: int) -> Schedule:
    """The schedule that ``seed`` and ``number`` always give; servers and transports take turns."""
    draw = random.Random(f"{seed}-{number}")
    there = [(name, transport) for name, path in servers().items() if path for transport in TRANSPORTS]
    server, transport = there[number % len(there)]
    moments = sorted(draw.randrange(REQUESTS) for _ in range(draw.randint(1, 4)))
    events = tuple(Event(after, draw.choice(list(EVENTS)), draw.random() < 0.5) for after in moments)
    commit = draw.choice([None, None, "lost_response", "reset"])
    needs_class = any(event.what == the_reload_child.__name__ for event in events) or draw.random() < 0.25
    reloaded = transport == "http" and needs_class
    return Schedule(server, transport, commit, RELOADED if reloaded else "", events)


# ---------------------------------------------------------------------------------------------------------- events


def a_worker(service: Service, work: Work) -> None:
    service.kill_worker(busiest(service, work))


def a_child(service: Service, work: Work) -> None:
    for pid in service.at_work(work)[:1]:
        service.kill_child(pid)


def the_reload_child(service: Service, work: Work) -> None:
    """All that are there, warm, busy or just starting."""
    for pid in service.reload_children():
        with suppress(ProcessLookupError):  # its worker was killed just before
            os.kill(pid, signal.SIGKILL)


def a_child_grows(service: Service, work: Work) -> None:
    """By more than it may have; it is replaced after its unit."""
    for pid in service.at_work(work)[:1]:
        service.grow_child(work, pid)


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


def a_machine(lay: Callable[[Machine, Proc], AbstractContextManager[None]]) -> Callable[[Service, Work], None]:
    """A machine is at fault for a while, the same one each time in the life of a job, and gets well.

    The other one is there meanwhile: a job whose units failed on every machine that is alive fails.
    """

    def event(service: Service, work: Work) -> None:
        service.mend_and_wait()
        machine, worker = service.machines[0], service.workers[0]
        service.kills += 1  # what it copies is for nothing
        with lay(machine, worker):
            service.reached(work, service.requests() + 20)

    event.__name__ = getattr(lay, "__name__", "")
    return event


def take_away(folder: Path) -> None:
    """As a cleaner does; it may be away still, if nobody needed it since the last time."""
    with suppress(FileNotFoundError):
        shutil.rmtree(folder.rename(folder.with_name("taken")))


@a_machine
@contextmanager
def temp_dir_full(machine: Machine, worker: Proc) -> Iterator[None]:
    """No file may grow to the size of a shard: the kernel's own way to say that there is no room."""

    def limit(size: int) -> None:
        for pid in (worker.pid, *worker.children()):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    limit(SIZE // 2)
    yield
    limit(resource.RLIM_INFINITY)


@a_machine
@contextmanager
def temp_dir_unwritable(machine: Machine, worker: Proc) -> Iterator[None]:
    """Tests may run as root, whom no permission stops: a file is where the folder should be."""
    take_away(machine.tmpdir)
    machine.tmpdir.write_text("")
    yield
    machine.tmpdir.unlink()


@a_machine
@contextmanager
def temp_dir_removed(machine: Machine, worker: Proc) -> Iterator[None]:
    take_away(machine.tmpdir)
    yield


@contextmanager
def replaced(file: Path, by: str) -> Iterator[None]:
    before = file.read_text()
    file.write_text(by)
    yield
    file.write_text(before)


@a_machine
def no_token(machine: Machine, worker: Proc) -> AbstractContextManager[None]:
    return replaced(token(machine.folder), "")


@a_machine
def token_revoked(machine: Machine, worker: Proc) -> AbstractContextManager[None]:
    return replaced(token(machine.folder), "hf_revoked")


@a_machine
def bad_credentials(machine: Machine, worker: Proc) -> AbstractContextManager[None]:
    return replaced(credentials(machine.folder), "[[credential]\n")


def garbage(service: Service, work: Work) -> None:
    """Messages that are not JSON, and such as are no wake."""
    for message in ("not json", b"\xff\xfe", "[]", '{"properties": {}}'):
        for queue in QUEUES:
            service.store.redis.lpush(queue, message)


def remote_shutdown(service: Service, work: Work) -> None:
    """`celery control shutdown`, by anybody who reaches the broker."""
    with Celery(broker=service.broker.url, set_as_current=False) as app:
        app.control.shutdown()


def the_broker_is_full(service: Service, work: Work) -> None:
    """All have to come back to a broker that takes nothing for a while."""
    client = service.store.redis

    def refused() -> int:
        return int(client.info("errorstats").get("errorstat_OOM", {"count": 0})["count"])

    before = refused()
    client.config_set("maxmemory", 1)
    client.client_kill_filter(skipme=True, _type="normal")
    wait_for(lambda: refused() >= before + 5, "its refusing")
    client.config_set("maxmemory", 0)
    service.kills += len(service.workers)  # leases ended meanwhile


AGES = """
for _, key in ipairs(KEYS) do
  for _, member in ipairs(redis.call('ZRANGE', key, 0, -1)) do redis.call('ZINCRBY', key, ARGV[1], member) end
end
"""


def clock_jumps_back(service: Service, work: Work) -> None:
    """By an hour, just after a worker died. No broker's clock can be set here, but all times are left as it would."""
    service.kill_worker(busiest(service, work))
    service.kills += len(service.workers)  # a living worker's lease is over too, until it renews it
    keys = [job_key(work.job, "todo"), *(f"{queue}:{line}" for queue in QUEUES for line in ("due", "waked"))]
    service.store.redis.eval(AGES, len(keys), *keys, 3600 * 1000)


KILLS = (a_worker, a_child, control, the_broker, everything, a_worker_hangs, second_thoughts)
OF_CHILDREN = (the_reload_child, a_child_grows)
AT_FAULT = (temp_dir_full, temp_dir_unwritable, temp_dir_removed, no_token, token_revoked, bad_credentials)
OF_THE_BROKER = (garbage, remote_shutdown, the_broker_is_full, clock_jumps_back)
EVENTS: dict[str, Callable[[Service, Work], None]] = {
    event.__name__: event for event in (*KILLS, *OF_CHILDREN, *AT_FAULT, *OF_THE_BROKER)
}
NEEDS_BROKER = EVENTS.keys() - {"control", "the_broker", "everything"}


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
                running[name] = Service(folder / f"random-{name}", hub, path, growing_worker_command).__enter__()
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
    work = service.prepare(schedule.transport, schedule.source)
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
        wait_for(service.replaced, "the replacement of children that grew")
        wait_for(lambda: not resting(service), "the return of workers that rested", REST_MAX / 2)
    finally:
        service.forget(work)


def resting(service: Service) -> set[int]:
    """The pids of living workers that rest; what is noted of the dead stays until the next one rests."""
    noted = {int(name.rpartition(":")[2]) for name in Fleet(service.store).resting()}
    return noted & {worker.pid for worker in service.workers if worker.alive()}


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
