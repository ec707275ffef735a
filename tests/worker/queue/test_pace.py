"""How fast bytes come, and what goes before a job that waits."""

from __future__ import annotations

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline.errors import DiskFull
from reshard.pipeline.planning.model import Plan
from reshard.worker.fleet.heartbeat import announce
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Lease, Leases
from reshard.worker.queue.pace import LEAST, PACE, Lane, Place, lanes, places, rate, remaining
from reshard.worker.queue.scripts import FADES, job_key, ms
from reshard.worker.queue.wakes import QUEUES
from tests.support.procs import Broker
from tests.worker.conftest import ask, claimed, copied, planned, process, receipts

INTERACTIVE, BULK = QUEUES


def later(store: JobStore, seconds: float, *jobs: str) -> None:
    """Let ``seconds`` pass for the rate of all and that of these jobs."""
    for key in (PACE, *map(job_key, jobs)):
        for field in ("paced_at", "paced_from"):
            store.redis.hincrby(key, field, -ms(seconds))


def group_of(store: JobStore, leases: Leases, plan: Plan) -> Lease:
    job = planned(store, leases, plan)
    claimed(leases, job, "check")
    return claimed(leases, job, "group:00000")


def stored(store: JobStore, leases: Leases, plan: Plan) -> Lease:
    """Of a group whose files came in twenty seconds."""
    lease = group_of(store, leases, plan)
    later(store, 20, lease.job)
    assert leases.seal(lease, receipts(plan, 0)) == "ok"
    return lease


def test_what_was_sealed_since_copying_began_is_the_rate_of_the_job_and_of_all(
    store: JobStore, leases: Leases, plan: Plan
) -> None:
    lease = group_of(store, leases, plan)
    assert store.get(lease.job).rate is None, "nothing is known yet"
    later(store, 20, lease.job)
    assert leases.seal(lease, receipts(plan, 0)) == "ok"
    stored = store.get(lease.job).bytes_done
    assert store.get(lease.job).rate == pytest.approx(stored / 20, rel=0.1)
    assert places(store.redis, [])[1] == pytest.approx(stored / 20, rel=0.1)
    assert leases.seal(lease, receipts(plan, 0)) == "ok"
    assert store.get(lease.job).rate == pytest.approx(stored / 20, rel=0.1), "the second answer counts nothing"


def test_a_rate_falls_while_nothing_comes_and_is_none_after_ten_minutes(
    store: JobStore, leases: Leases, plan: Plan
) -> None:
    lease = stored(store, leases, plan)
    before = store.get(lease.job).rate
    later(store, 200, lease.job)
    after = store.get(lease.job).rate
    assert before and after and after < before / 5
    later(store, 401, lease.job)
    assert store.get(lease.job).rate is None


def test_a_pause_of_more_than_ten_minutes_is_no_part_of_the_next_rate(
    store: JobStore, leases: Leases, plan: Plan
) -> None:
    lease = stored(store, leases, plan)
    leases.release(lease, "drain")
    later(store, 3600, lease.job)
    lease = claimed(leases, lease.job, "group:00000")
    later(store, 20, lease.job)
    leases.seal(lease, receipts(plan, 1))
    size = sum(receipt.size for receipt in receipts(plan, 1))
    assert store.get(lease.job).rate == pytest.approx(size / 20, rel=0.1)


def test_a_brokers_clock_that_jumped_back_begins_a_rate_anew(store: JobStore, leases: Leases, plan: Plan) -> None:
    lease = group_of(store, leases, plan)
    later(store, -3600, lease.job)
    assert leases.seal(lease, receipts(plan, 0)) == "ok"
    assert store.get(lease.job).rate is None
    later(store, 20, lease.job)
    assert leases.seal(lease, receipts(plan, 1)) == "ok"
    assert store.get(lease.job).rate


@pytest.mark.parametrize("wrong", ["x", "nan", "1e400", "-1" + "0" * 400, ""])
@pytest.mark.parametrize("field", ["paced", "paced_at", "paced_from", "mean"])
def test_what_a_client_wrote_into_the_rates_strands_no_job_and_is_gone_with_the_next(
    store: JobStore, leases: Leases, plan: Plan, field: str, wrong: str
) -> None:
    job = copied(store, leases, plan)
    waits = store.submit(ask("waits")).id
    leases.due()
    for key in (PACE, job_key(job)):
        store.redis.hincrby(key, "paced_from", -60_000)  # or nothing would be told yet
        store.redis.hset(key, field, wrong)
    assert remaining(store.redis, [job], more=1) is None
    for told in (places(store.redis, [(waits, False)])[1], store.get(job).rate):
        assert (told is None) == (field != "mean")
    publish = claimed(leases, job, "publish")
    leases.begin(publish)
    leases.done(publish, {"commit": "abc", "ref": "main", "found": False})
    assert leases.done(claimed(leases, job, "confirm"), []) == "ok"
    assert store.get(job).state == "done"
    lease = group_of(store, leases, plan)
    later(store, 20, lease.job)
    assert leases.seal(lease, receipts(plan, 0)) == "ok"
    assert store.get(lease.job).rate and places(store.redis, [])[1]


@given(
    gaps=st.lists(st.integers(1, 60_000), min_size=20, max_size=60),
    speed=st.integers(1_000, 10**9),
)
def test_an_even_stream_has_its_own_rate_however_it_is_cut(gaps: list[int], speed: int, broker: Broker) -> None:
    """By the numbers alone that `paced` of common.lua writes: bytes of each gap come at its end."""
    now, kept = 0, 0.0
    for gap in gaps:
        now += gap
        kept = kept * exp(-gap / FADES) + speed * gap / 1000
    seen = rate({"paced": f"{kept:.0f}", "paced_at": str(now), "paced_from": "0"}, now)
    if now < LEAST:
        assert seen is None
    else:
        assert seen == pytest.approx(speed, rel=0.12)


def test_a_job_s_place_counts_those_that_wait_before_it_and_bytes_also_what_has_begun(
    store: JobStore, leases: Leases, plan: Plan
) -> None:
    done = copied(store, leases, plan, ask("done"))
    publish = claimed(leases, done, "publish")
    leases.begin(publish)
    leases.done(publish, {"commit": "abc", "ref": "main", "found": False})
    leases.done(claimed(leases, done, "confirm"), [])
    size = store.get(done).bytes
    begun = planned(store, leases, plan, ask("begun"))
    bulk, quick, second, last = (
        store.submit(ask(name, priority)).id
        for name, priority in zip("abcd", ("bulk", "interactive", "interactive", "bulk"), strict=True)
    )
    assert places(store.redis, [(bulk, True)]) == ({}, None), "none of them is in line yet"
    leases.due()
    found, _ = places(store.redis, [(bulk, True), (quick, False), (second, False), (last, True)])
    assert store.get(begun).bytes == size
    assert found == {
        quick: Place(1, 2, size),
        second: Place(2, 2, 2 * size),
        bulk: Place(3, 4, 3 * size),
        last: Place(4, 4, 4 * size),
    }


def test_before_a_job_has_ended_the_bytes_of_others_that_wait_are_not_known(store: JobStore, leases: Leases) -> None:
    first, second = (store.submit(ask(name)).id for name in "ab")
    leases.due()
    found, _ = places(store.redis, [(first, False), (second, False)])
    assert found == {first: Place(1, 2, 0), second: Place(2, 2, None)}


def test_bytes_on_their_way_count_when_they_are_told_and_not_again_when_they_are_sealed(
    store: JobStore, leases: Leases, plan: Plan
) -> None:
    lease = group_of(store, leases, plan)
    later(store, 20, lease.job)
    (receipt, *_) = receipts(plan, 0)
    assert leases.renew(lease, receipt.size // 2, progress=True) == "ok"
    half = store.get(lease.job).rate
    assert half == pytest.approx(receipt.size / 2 / 20, rel=0.1)
    leases.seal(lease, [receipt])
    assert store.get(lease.job).rate == pytest.approx(receipt.size / 20, rel=0.1)


def test_an_interactive_job_waits_for_no_bulk_copy(store: JobStore, leases: Leases, plan: Plan) -> None:
    planned(store, leases, plan, ask("bulk", "bulk"))
    job = store.submit(ask("quick")).id
    leases.due()
    assert places(store.redis, [(job, False)])[0] == {job: Place(1, 1, 0)}


def test_what_workers_leave_to_another_waits_from_the_first_time_until_that_one_claims_it(store: JobStore) -> None:
    for name in ("worker-a:1", "worker-b:2"):
        announce(store.redis, process(name))
    first, other = (Leases(store, lambda queue, job: None, f"{name}.5") for name in ("worker-a:1", "worker-b:2"))
    job = store.submit(ask()).id
    assert first.hand_over(claimed(first, job, "plan"), DiskFull(path="/", needed=2, free=1).to_dict()) == "ok"
    assert first.claim(job) is None
    store.redis.zincrby(f"{INTERACTIVE}:left", -3_600_000, job)
    for _ in range(2):
        assert first.claim(job) is None
        assert lanes(store.redis)["interactive"].oldest >= 3600
    claimed(other, job, "plan")
    assert lanes(store.redis)["interactive"] == Lane(0, 0.0)
