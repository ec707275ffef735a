"""A broker that answers and takes nothing: it is full, became a replica, or a script holds it up. Nobody dies of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import redis

from reshard.client.queue import Queue
from reshard.pipeline.errors import BrokerFull, BrokerUnavailable
from reshard.pipeline.planning.model import Plan
from reshard.worker import control as control_module
from reshard.worker import keeper, probes
from reshard.worker.broker import answers
from reshard.worker.control import Control
from reshard.worker.followers.cursor import Cursor
from reshard.worker.keeper import LeaseKeeper
from reshard.worker.queue.jobs import JobStore, submission
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.scripts import BROKER_UNAVAILABLE, full, job_key
from reshard.worker.settings import Settings
from tests.support.procs import Broker, busy, wait_for
from tests.worker.conftest import QUICK, Wakes, ask, claimed, planned, receipts, ticks_until_stopped
from tests.worker.followers.builders import begin, definition, finish, jobs


def memory_full(client: redis.Redis, folder: Path) -> Iterator[None]:
    client.config_set("maxmemory", 1)
    yield
    client.config_set("maxmemory", 0)


def disk_full(client: redis.Redis, folder: Path) -> Iterator[None]:
    """As far as the server can tell: its snapshot cannot be written, because a folder has its name."""

    def snapshot(status: str) -> None:
        client.bgsave()
        wait_for(lambda: not client.info("persistence")["rdb_bgsave_in_progress"], "the snapshot's end")
        assert client.info("persistence")["rdb_last_bgsave_status"] == status

    (folder / "dump.rdb").unlink(missing_ok=True)
    (folder / "dump.rdb").mkdir()
    client.config_set("save", "3600 1")
    snapshot("err")
    yield
    (folder / "dump.rdb").rmdir()
    snapshot("ok")


def few_replicas(client: redis.Redis, folder: Path) -> Iterator[None]:
    client.config_set("min-replicas-to-write", 1)
    yield
    client.config_set("min-replicas-to-write", 0)


def replica(client: redis.Redis, folder: Path) -> Iterator[None]:
    client.replicaof("127.0.0.1", 1)
    yield
    client.replicaof("NO", "ONE")


def stale_replica(client: redis.Redis, folder: Path) -> Iterator[None]:
    """It answers no reads either: MASTERDOWN."""
    client.config_set("replica-serve-stale-data", "no")
    yield from replica(client, folder)


def held_up(client: redis.Redis, folder: Path) -> Iterator[None]:
    with busy(client):
        yield


class Refusing(NamedTuple):
    store: JobStore
    refusal: Callable[[], AbstractContextManager[None]]  # inside, the store's broker takes nothing


@pytest.fixture(params=[memory_full, disk_full, few_replicas, replica, stale_replica, held_up])
def broken(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Refusing]:
    with Broker(tmp_path) as broker, JobStore.at(broker.url) as store:
        yield Refusing(store, lambda: contextmanager(request.param)(store.redis, tmp_path / "broker"))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "LOOK", 0.01)
    monkeypatch.setattr(keeper, "RENEWALS", 0.02)
    monkeypatch.setattr(control_module, "PAUSE", 0.02)
    monkeypatch.setattr(control_module, "LISTEN", 0.02)


@contextmanager
def running(store: JobStore) -> Iterator[Wakes]:
    """A control's loop beside the test, and the wakes that it sends; what it dies of is raised here."""
    wakes = Wakes()
    control = Control(store, Leases(store, wakes, "control"), Settings())
    with ThreadPoolExecutor(1) as beside:
        loop = beside.submit(control.run)
        try:
            yield wakes
            assert not loop.done()
        finally:
            control.stop()
        loop.result(30)


def test_control_waits_until_it_takes_something_again(
    broken: Refusing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And says so once, however often it tries."""
    caplog.set_level("INFO")
    looks, look = list[float](), Control.look
    monkeypatch.setattr(Control, "look", lambda control, listen: looks.append(listen) or look(control, listen))
    store, refusal = broken
    with ExitStack() as refused:
        refused.enter_context(refusal())
        with running(store) as wakes:
            wait_for(lambda: len(looks) > 5, "its noticing, some times")
            assert caplog.text.count("the broker is unavailable or denied access: ") == 1
            refused.close()
            job = store.submit(ask()).id
            wait_for(lambda: wakes.sent == [("interactive", job)], "the wake")
            wait_for(lambda: caplog.text.count("the broker is available again") == 1, "that it is said")
    with refusal(), running(store):  # and it ends in order meanwhile
        pass


def test_a_step_for_many_jobs_and_a_transaction_are_refused_as_a_step_for_one(broken: Refusing) -> None:
    store, refusal = broken
    with refusal():
        with pytest.raises(BROKER_UNAVAILABLE):
            store.run.each("submit", [(*submission(ask(name)), store.most) for name in "ab"])
        with pytest.raises(BROKER_UNAVAILABLE), store.redis.pipeline() as pipe:
            pipe.set("reshard:any", 1).execute()


def test_a_transaction_that_is_refused_at_its_end_says_why(broken: Refusing) -> None:
    """Its commands were taken, so only the answer to EXEC tells."""
    store, refusal = broken
    line = store.redis.connection_pool.get_connection()
    for command in (["MULTI"], ["SET", "reshard:any", "1"]):
        line.send_command(*command)
        line.read_response()
    with refusal():
        line.send_command("EXEC")
        with pytest.raises(BROKER_UNAVAILABLE):
            line.read_response()


def test_control_goes_on_when_it_goes_away_under_the_hands_of_a_catalog(
    store: JobStore, leases: Leases, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    catalogs = Cursor(store)
    begin(catalogs, definition(1))
    (job,) = jobs(catalogs)
    finish(leases, job)
    resolve = store.redis.zrangebylex

    def away(*arguments: Any) -> Any:
        monkeypatch.setattr(store.redis, "zrangebylex", resolve)
        raise redis.ConnectionError("gone just now")

    monkeypatch.setattr(store.redis, "zrangebylex", away)
    with running(store):
        wait_for(lambda: catalogs.get("mirror").state == "done", "its end")
    assert "denied access: gone just now" in caplog.text
    assert "gone just now" in caplog.text


@pytest.mark.parametrize(
    ("broken", "said"),
    [(memory_full, "memory"), (disk_full, "MISCONF"), (few_replicas, "NOREPLICAS")],
    indirect=["broken"],
)
def test_it_is_named_by_errors_doctor_and_whoever_waits(broken: Refusing, said: str) -> None:
    store, refusal = broken
    with refusal():
        for write in (lambda at: at.submit(ask()), lambda at: at.redis.set("reshard:any", 1)):
            with pytest.raises(BrokerFull, match=f"refuses writes: .*{said}") as caught, JobStore.at(store.url) as at:
                write(at)
            assert caught.value.retryable and "start" not in caught.value.next_step
            assert "script" not in str(caught.value)
        (probe,) = probes.queue(Settings(broker_url=store.url))
        assert isinstance(probe.error, BrokerFull)
        assert re.match(f"the broker refuses writes: .*{said}", str(Queue(store).waits(bulk=False)))
    assert {found.error for found in probes.queue(Settings(broker_url=store.url))} == {None}
    assert "running" in str(Queue(store).waits(bulk=False))
    wait_for(lambda: not store.redis.exists("reshard:probe"), "the end of what was tried")


@pytest.mark.parametrize("broken", [replica], indirect=True)
def test_a_broker_that_became_a_replica_refuses_writes(broken: Refusing) -> None:
    store, refusal = broken
    with refusal():
        assert "read only replica" in full(store.redis)
    assert full(store.redis) == ""


@pytest.mark.parametrize("broken", [held_up], indirect=True)
def test_a_broker_that_a_script_holds_up_does_not_respond(broken: Refusing) -> None:
    """Whatever it is asked, it says what can be done."""
    store, refusal = broken
    words = (
        r"is not responding: BUSY \w+ is busy running a script\. You can only call SCRIPT KILL or SHUTDOWN NOSAVE\.$"
    )
    with refusal():
        for ask_it in (JobStore.counts, JobStore.recent, lambda at: at.submit(ask()), lambda at: full(at.redis)):
            with pytest.raises(BrokerUnavailable, match=words) as caught, JobStore.at(store.url) as at:
                ask_it(at)
            assert type(caught.value) is BrokerUnavailable
        (probe,) = probes.queue(Settings(broker_url=store.url))
        assert re.search(words, str(probe.error))
        assert not answers(store.url)
    assert answers(store.url)


def test_work_goes_on_and_hears_a_cancel_afterwards(
    broken: Refusing, plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    store, refusal = broken
    leases = Leases(store, Wakes(), "worker-a")
    job = planned(store, leases, plan)
    claimed(leases, job, "check")
    lease = claimed(leases, job, "group:00000")
    leases.fleet.limit({"bandwidth": "1GB/s"})
    leases.fleet.look()
    with LeaseKeeper(leases, lease, QUICK) as kept:
        with refusal():
            with pytest.raises(BROKER_UNAVAILABLE):
                store.submit(ask("other"))
            kept.tick(200_000_000)  # more than its share, and nobody to ask for more
            kept.stored(receipts(plan, 0))
            wait_for(
                lambda: f"cannot renew group:00000 of {job}; the broker is unavailable" in caplog.text, "its noticing"
            )
        wait_for(lambda: store.get(job).shards_done == len(plan.groups[0].shards), "what was stored meanwhile")
        store.cancel(job)
        assert ticks_until_stopped(kept) == "cancel"


def test_work_hears_a_cancel_whatever_a_renewal_met(
    store: JobStore, leases: Leases, caplog: pytest.LogCaptureFixture
) -> None:
    job = store.submit(ask()).id
    lease = claimed(leases, job, "plan")
    units = job_key(job, "units")
    with LeaseKeeper(leases, lease, QUICK) as kept:
        store.redis.rename(units, "elsewhere")
        store.redis.set(units, "what no release writes")
        wait_for(lambda: f"cannot renew plan of {job} for an unknown reason" in caplog.text, "its noticing")
        store.redis.rename("elsewhere", units)
        store.cancel(job)
        assert ticks_until_stopped(kept) == "cancel"


def test_a_worker_gives_signs_of_life_as_soon_as_they_are_taken(
    broken: Refusing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, refusal = broken
    monkeypatch.setenv("RESHARD_BROKER_URL", store.url)  # the module cannot do without
    from reshard.worker import app

    monkeypatch.setattr(app, "broker_url", lambda settings: store.url)
    signs: list[Callable[[], None]] = []
    timer = SimpleNamespace(call_repeatedly=lambda seconds, look: signs.append(look))
    with refusal():
        app.Heartbeat(None).start(SimpleNamespace(concurrency=1, timer=timer))
        (again,) = signs
        again()
        assert caplog.text.count("cannot send a heartbeat") == 1
    again()
    assert [process.kind for process in store.processes()] == ["worker"]
