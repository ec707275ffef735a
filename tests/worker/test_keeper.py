"""Keeping a lease: what stops the work, and what happens to what was stored while the broker was unavailable."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from reshard.pipeline.copying.loop import Moved, Stopped
from reshard.pipeline.planning.model import Plan
from reshard.worker import keeper
from reshard.worker.fleet import drain
from reshard.worker.keeper import LeaseKeeper
from reshard.worker.queue.jobs import JobStore, open_redis
from reshard.worker.queue.leases import Lease, Leases
from reshard.worker.settings import Settings
from tests.support.procs import Broker, wait_for
from tests.worker.conftest import (
    QUICK,
    Wakes,
    age,
    another,
    ask,
    claimed,
    copying,
    planned,
    receipts,
    ticks_until_stopped,
)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "LOOK", 0.01)
    monkeypatch.setattr(keeper, "RENEWALS", 0.05)
    monkeypatch.setattr(keeper, "RETRY_FIRST", 0.05)


@pytest.fixture
def group(store: JobStore, leases: Leases, plan: Plan) -> Lease:
    job = planned(store, leases, plan)
    claimed(leases, job, "check")
    return claimed(leases, job, "group:00000")


def test_a_short_lease_is_renewed_well_before_its_end(
    store: JobStore, leases: Leases, group: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "RENEWALS", 60)

    def end() -> float:
        return store.redis.zscore(f"reshard:job:{group.job}:todo", group.unit) or 0

    first = end()
    with LeaseKeeper(leases, group, QUICK.model_copy(update={"lease": 0.4})):
        wait_for(lambda: end() > first, "a renewal")


def test_progress_reaches_the_store(store: JobStore, leases: Leases, group: Lease) -> None:
    with LeaseKeeper(leases, group, QUICK) as kept:
        kept.tick(1234)
        wait_for(lambda: store.get(group.job).bytes_done == 1234, "the progress")


def test_why_the_work_waits_for_the_hub_is_told_at_once(
    store: JobStore, leases: Leases, group: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "RENEWALS", 600)

    def told() -> list[str]:
        return [claim.waits for claim in store.get(group.job).claims if claim.unit == group.unit]

    with LeaseKeeper(leases, group, QUICK.model_copy(update={"lease": 3600})) as kept:
        kept.waits("rate limited, 40 s")
        wait_for(lambda: told() == ["rate limited, 40 s"], "the reason")
        kept.waits("")
        wait_for(lambda: told() == [""], "the end of the wait")
        kept.waits("rate limited, 40 s")
        wait_for(lambda: told() == ["rate limited, 40 s"], "the reason")
    age(store, group.job, 3600)
    while (taken := another(store).claim(group.job)) and taken.unit != group.unit:
        pass
    assert taken and told() == [""]


def test_a_cancel_stops_the_work(store: JobStore, leases: Leases, group: Lease) -> None:
    with LeaseKeeper(leases, group, QUICK) as kept:
        kept.tick(1)
        store.cancel(group.job)
        assert ticks_until_stopped(kept) == "cancel"


def test_another_owner_stops_the_work(store: JobStore, leases: Leases, group: Lease, plan: Plan) -> None:
    other = another(store)
    for number in range(1, len(plan.groups)):
        other.done(claimed(other, group.job, f"group:{number:05d}"), [[], []])
    age(store, group.job, 31)
    other.done(claimed(other, group.job, "check"), [])
    with LeaseKeeper(leases, group, QUICK) as kept:
        wait_for(lambda: age(store, group.job, 31) or other.claim(group.job), "another claim")
        assert ticks_until_stopped(kept) == "lease"
        with pytest.raises(Stopped, match="lease"):
            kept.finish(lambda: leases.done(group, [[], []]))


def test_a_hung_copy_loses_its_lease_although_its_thread_is_well(store: JobStore, leases: Leases, group: Lease) -> None:
    """Nothing ticks; after the stall time nothing is renewed."""
    impatient = QUICK.model_copy(update={"stall": 0.2})
    with LeaseKeeper(leases, group, impatient):

        def score() -> float:
            return float(store.redis.zscore(f"reshard:job:{group.job}:todo", group.unit) or 0)

        def at_rest() -> bool:
            before = score()
            return not threading.Event().wait(0.3) and score() == before

        wait_for(at_rest, "the end of the renewals")
        assert score() > 0


def test_a_copy_that_waits_because_the_hub_asked_is_not_hung(store: JobStore, leases: Leases, group: Lease) -> None:
    impatient = QUICK.model_copy(update={"stall": 0.2})
    with LeaseKeeper(leases, group, impatient) as kept:
        first = store.redis.zscore(f"reshard:job:{group.job}:todo", group.unit) or 0
        for _ in range(10):
            kept.check()
            threading.Event().wait(0.1)
        assert (store.redis.zscore(f"reshard:job:{group.job}:todo", group.unit) or 0) - first > 500


def test_interactive_work_stops_a_bulk_copy_at_a_batch_and_not_before(
    store: JobStore, leases: Leases, plan: Plan
) -> None:
    _, lease = copying(store, leases, plan, ask(priority="bulk"))
    with LeaseKeeper(leases, lease, QUICK) as kept:
        kept.tick(1)
        store.submit(ask("quick"))
        leases.due()
        store.redis.lpush("reshard:interactive", "a wake that no worker has taken yet")
        wait_for(kept.should_yield, "the word to yield")
        kept.tick(1)
        kept.stored(receipts(plan, 0)[:1], Moved())
        assert ticks_until_stopped(kept) == "yield"


def test_what_is_read_is_counted_as_it_comes_and_to_the_last_byte(store: JobStore, leases: Leases, plan: Plan) -> None:
    _, lease = copying(store, leases, plan, ask(priority="bulk"))
    with LeaseKeeper(leases, lease, QUICK) as kept:
        kept.tick(1000)
        wait_for(lambda: leases.fleet.seen().read == 1000, "the first bytes")
        kept.tick(234)
    assert leases.fleet.seen().read == 1234


def test_a_copy_that_waits_for_its_share_of_the_line_is_not_hung(store: JobStore, leases: Leases, group: Lease) -> None:
    leases.fleet.limit({"bandwidth": "1MB/s"})
    with LeaseKeeper(leases, group, QUICK.model_copy(update={"stall": 0.6})) as kept:
        kept.tick(1_500_000)  # the line was free: it may go on at once
        first = store.redis.zscore(f"reshard:job:{group.job}:todo", group.unit) or 0
        kept.tick(100_000)
        wait_for(
            lambda: (store.redis.zscore(f"reshard:job:{group.job}:todo", group.unit) or 0) - first > 1000, "renewals"
        )


def test_a_cancel_is_heard_while_a_copy_waits_for_its_share(store: JobStore, leases: Leases, group: Lease) -> None:
    leases.fleet.limit({"bandwidth": "1MB/s"})
    cancel = threading.Timer(0.3, lambda: store.cancel(group.job))
    with LeaseKeeper(leases, group, QUICK) as kept:
        kept.tick(100_000_000)
        cancel.start()
        assert ticks_until_stopped(kept) == "cancel"  # its share would come in a hundred seconds
    cancel.join()


@pytest.mark.parametrize(
    "unit, gives_way", [("plan", True), ("check", True), ("group:00000", True), ("publish", False), ("confirm", False)]
)
def test_bulk_work_that_waits_for_calls_makes_room_for_interactive_work_unless_it_publishes(
    store: JobStore, leases: Leases, unit: str, gives_way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = store.submit(ask(priority="bulk")).id
    lease = claimed(leases, job, "plan")
    monkeypatch.setattr(leases, "renew", lambda *_: "yield")
    with LeaseKeeper(leases, replace(lease, unit=unit), QUICK) as kept:
        wait_for(kept.should_yield, "the renewal")
        if gives_way:
            with pytest.raises(Stopped, match="yield"):
                kept.check()
        else:
            kept.check()


@pytest.fixture
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("own")) as running:
        yield running


def test_what_was_sealed_while_the_broker_was_away_is_kept_until_it_is_back(own_broker: Broker, plan: Plan) -> None:
    with JobStore.at(own_broker.url) as store:
        leases = Leases(store, Wakes(), "worker-a")
        job = planned(store, leases, plan)
        claimed(leases, job, "check")
        lease = claimed(leases, job, "group:00000")
        with LeaseKeeper(leases, lease, QUICK) as kept:
            own_broker.kill()
            kept.stored(receipts(plan, 0), Moved(read=10, uploaded=3, deduplicated=7))
            kept.tick(1)
            restart = threading.Timer(0.5, own_broker.start)
            restart.start()
            kept.finish(lambda: leases.done(lease, [[], []]))
            restart.join()
        seen = store.get(job)
        assert seen.shards_done == len(plan.groups[0].shards)
        assert (seen.read, seen.uploaded, seen.deduplicated) == (10, 3, 7)
        assert lease.unit not in [held.unit for held in store.get(job).claims]


def test_a_reason_to_wait_is_not_told_sooner_than_with_the_next_renewal_while_the_broker_is_away(
    own_broker: Broker, plan: Plan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = list[float]()  # of the thread: it asks this at each
    monkeypatch.setattr(drain, "overdue", lambda limit: bool(looks.append(limit)))
    monkeypatch.setattr(keeper, "RENEWALS", 600)

    with JobStore.at(own_broker.url) as store:
        leases = Leases(store, Wakes(), "worker-a")
        tries, seal = list[object](), leases.seal
        monkeypatch.setattr(leases, "seal", lambda *given: tries.append(given) or seal(*given))
        lease = claimed(leases, planned(store, leases, plan), "check")
        with LeaseKeeper(leases, lease, QUICK.model_copy(update={"lease": 3600})) as kept:
            own_broker.kill()
            kept.stored(receipts(plan, 0), Moved())
            kept.waits("rate limited, 40 s")
            wait_for(lambda: "cannot renew" in caplog.text, "the first renewal")
            seen = len(looks)
            wait_for(lambda: len(looks) > seen + 5, "more looks")
            assert len(tries) == 2, "one as it was stored, and that of the renewal"


def test_patience_with_a_broker_has_an_end(own_broker: Broker, plan: Plan) -> None:
    with JobStore.at(own_broker.url) as store:
        leases = Leases(store, Wakes(), "worker-a")
        job = planned(store, leases, plan)
        lease = claimed(leases, job, "check")
        own_broker.kill()
        with (
            LeaseKeeper(leases, lease, QUICK.model_copy(update={"broker_patience": 0.2})) as kept,
            pytest.raises(redis.ConnectionError),
        ):
            kept.finish(lambda: leases.done(lease, []))


def test_a_read_that_waits_for_ever_is_interrupted_by_a_cancel(store: JobStore, leases: Leases, group: Lease) -> None:
    """No tick ever comes: the socket has no timeout and nobody writes to it."""
    ours, theirs = socket.socketpair()
    with ours, theirs, LeaseKeeper(leases, group, QUICK) as kept:
        store.cancel(group.job)
        with pytest.raises(Stopped, match="cancel"), kept.interruptible():
            ours.recv(1)


def test_what_the_store_must_hear_is_not_interrupted(leases: Leases, group: Lease) -> None:
    with LeaseKeeper(leases, group, Settings()) as kept, kept.interruptible():
        kept.finish(lambda: str(signal.raise_signal(keeper.INTERRUPT)))


def test_outside_of_it_nothing_is_interrupted(store: JobStore, leases: Leases, group: Lease) -> None:
    with LeaseKeeper(leases, group, QUICK) as kept:
        with kept.interruptible():
            pass
        store.cancel(group.job)
        assert ticks_until_stopped(kept) == "cancel"
        with kept.interruptible():
            with pytest.raises(Stopped):
                kept.tick(1)
            threading.Event().wait(0.3)  # a clean-up after the tick has told; several renewals long


CHILD = """
import sys, time
from reshard.worker.fleet import drain
from reshard.worker.queue.jobs import JobStore, open_redis
from reshard.worker.keeper import LeaseKeeper
from reshard.worker.queue.leases import Leases
from reshard.worker.settings import Settings
url, job = sys.argv[1:]
leases = Leases(JobStore(open_redis(url), url), lambda queue, job: None, "child")
lease = leases.claim(job)
with drain.heeded(), LeaseKeeper(leases, lease, Settings(drain=0.5)):
    print("ready", flush=True)
    time.sleep(600)
"""


def test_work_that_does_not_heed_is_handed_back_when_the_drain_is_over(
    store: JobStore, broker: Broker, tmp_path: Path
) -> None:
    job = store.submit(ask()).id
    child = subprocess.Popen([sys.executable, "-c", CHILD, broker.url, job], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    assert len(store.get(job).claims) == 1
    os.kill(child.pid, signal.SIGTERM)
    assert child.wait(20) == drain.HANDED_OVER
    child.stdout.close()
    assert store.get(job).claims == ()
    assert ("released", "drain") in [(e["kind"], e.get("why")) for _, e in store.events(job)]
    assert claimed(Leases(JobStore(open_redis(broker.url)), Wakes(), "next"), job, "plan").attempts == 1
