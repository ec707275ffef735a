"""Who may do what, when: leases, tokens, attempts, and the schedules of events that break naive versions."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import ANY

import pytest

from reshard.pipeline.copying.loop import Moved
from reshard.pipeline.errors import ObjectLost, SourceNotFound, WrongState
from reshard.pipeline.limits import COPIES
from reshard.pipeline.planning.model import SCHEMA, Plan
from reshard.worker.fleet.heartbeat import announce, withdraw
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Lease, Leases
from reshard.worker.queue.scripts import job_key, texts
from reshard.worker.queue.states import JobState
from reshard.worker.queue.wakes import DUE_AT_ONCE
from reshard.worker.settings import HAND_BACK, LEASE, RESEND, YIELD_PAUSE
from tests.support.procs import Broker, wait_for
from tests.worker.conftest import Wakes, age, another, ask, claimed, copied, copying, planned, process, receipts

TROUBLE = SourceNotFound(repo="them/model", endpoint="https://hub").to_dict()
LOST = ObjectLost(repo="us/model", what="model.safetensors").to_dict()


# ------------------------------------------------------------------------------------------------- claims and tokens


def test_a_doubled_wake_finds_nothing(store: JobStore, leases: Leases) -> None:
    job = store.submit(ask()).id
    claimed(leases, job, "plan")
    assert leases.claim(job) is None
    assert another(store).claim(job) is None


def test_a_log_line_of_a_unit_names_its_job_attempt_and_worker(store: JobStore, leases: Leases) -> None:
    job = store.submit(ask()).id
    expected = {"job": job, "unit": "plan", "attempt": 1, "worker": "worker-a"}
    assert claimed(leases, job, "plan").fields == expected


def test_a_wake_for_a_job_that_is_not_there_finds_nothing(leases: Leases, wakes: Wakes) -> None:
    assert leases.claim("nosuchjob") is None
    assert wakes.take() == []


def test_a_job_whose_size_is_none_holds_up_no_other(store: JobStore, leases: Leases) -> None:
    odd, other = (store.submit(ask(name)).id for name in ("odd", "other"))
    asked = json.loads(store.redis.hget(job_key(odd), "request") or b"")
    store.redis.hset(job_key(odd), "request", json.dumps(asked | {"options": {"size": "12 furlongs"}}))
    assert leases.due() == 2
    lease = leases.claim_first("reshard:interactive", odd)
    assert lease is not None and lease.job == other
    assert "it asks for --size 12 furlongs" in (store.redis.hget(job_key(odd), "note") or b"").decode()


def test_an_expired_lease_goes_to_the_next_who_learns_of_the_dead(store: JobStore, leases: Leases) -> None:
    job = store.submit(ask()).id
    first = claimed(leases, job, "plan")
    age(store, job, LEASE + 1)
    second = claimed(another(store), job, "plan")
    assert second.token != first.token
    assert (second.attempts, second.dead) == (2, first.token)
    assert any(e["kind"] == "lost" and e["worker"] == "worker-a" for _, e in store.events(job))


def test_an_expired_token_is_good_until_somebody_else_claims(store: JobStore, leases: Leases, plan: Plan) -> None:
    """A broker that was away for minutes must not make every copy be done twice."""
    job = planned(store, leases, plan)
    check, group = claimed(leases, job, "check"), claimed(leases, job, "group:00000")
    age(store, job, 10 * LEASE)
    assert leases.renew(check, 0, progress=True) == "ok"
    assert leases.seal(group, receipts(plan, 0), Moved()) == "ok"
    assert leases.done(group, [[], []]) == "ok"
    age(store, job, LEASE / 2)
    assert claimed(another(store), job, "group:00001")  # and not `check`, whose lease was renewed


STEPS: dict[str, Callable[[Leases, Lease, Plan], str]] = {
    "renew": lambda leases, lease, plan: leases.renew(lease, 1, progress=True),
    "seal": lambda leases, lease, plan: leases.seal(lease, receipts(plan, 0), Moved()),
    "done": lambda leases, lease, plan: leases.done(lease, [[], []]),
    "again": lambda leases, lease, plan: leases.again(lease, TROUBLE, 0),
    "fail": lambda leases, lease, plan: leases.fail(lease, TROUBLE),
    "release": lambda leases, lease, plan: leases.release(lease, "drain"),
    "void": lambda leases, lease, plan: leases.invalidate(lease, LOST, plan.shards),
}


def snapshot(store: JobStore, job: str) -> list[object]:
    keys = [job_key(job), *(job_key(job, part) for part in ("units", "plan", "receipts", "attested"))]
    return [store.redis.hgetall(key) for key in keys] + [
        store.redis.zrange(job_key(job, "todo"), 0, -1, withscores=True),
        store.redis.xlen(job_key(job, "events")),
    ]


@pytest.mark.parametrize("step", STEPS)
def test_a_zombie_changes_nothing(store: JobStore, leases: Leases, plan: Plan, step: str) -> None:
    job, old = copying(store, leases, plan)
    age(store, job, LEASE + 1)
    new_owner = another(store)
    while (new := new_owner.claim(job)) is not None and new.unit != old.unit:
        pass
    assert new is not None
    before = snapshot(store, job)
    assert STEPS[step](leases, old, plan) == "lost"
    assert snapshot(store, job) == before
    assert new_owner.renew(new, 0, progress=True) == "ok"


@pytest.mark.parametrize("step", STEPS)
def test_after_a_cancel_no_step_changes_anything(store: JobStore, leases: Leases, plan: Plan, step: str) -> None:
    job, lease = copying(store, leases, plan)
    store.cancel(job)
    before = snapshot(store, job)
    assert STEPS[step](leases, lease, plan) == "cancelled"
    assert snapshot(store, job) == before


@pytest.mark.parametrize("step", STEPS)
def test_a_quick_retry_does_not_revive_the_old_copier(store: JobStore, leases: Leases, plan: Plan, step: str) -> None:
    """It sees `copying` again; only its token tells that it was meant."""
    job, old = copying(store, leases, plan)
    store.cancel(job)
    store.retry(job)
    assert store.get(job).state == JobState.copying
    before = snapshot(store, job)
    assert STEPS[step](leases, old, plan) == "lost"
    assert snapshot(store, job) == before


def test_of_two_planners_one_writes_the_plan(store: JobStore, leases: Leases, plan: Plan) -> None:
    job = store.submit(ask()).id
    first = claimed(leases, job, "plan")
    age(store, job, LEASE + 1)
    other = another(store)
    second = claimed(other, job, "plan")
    assert leases.planned(first, plan) == "lost"
    assert store.plan(job) is None
    assert other.planned(second, plan) == "ok"
    before = snapshot(store, job)
    assert leases.planned(first, plan) == "lost"
    assert snapshot(store, job) == before


def test_an_answer_that_was_lost_may_be_asked_for_again(store: JobStore, leases: Leases, plan: Plan) -> None:
    job = store.submit(ask()).id
    lease = claimed(leases, job, "plan")
    assert leases.planned(lease, plan) == leases.planned(lease, plan) == "ok"
    check = claimed(leases, job, "check")
    assert leases.done(check, []) == leases.done(check, []) == "ok"
    group = claimed(leases, job, "group:00000")
    for _ in range(2):
        assert leases.seal(group, receipts(plan, 0), Moved()) == "ok"
    assert store.get(job).shards_done == len(plan.groups[0].shards)
    assert store.get(job).bytes_done == sum(receipt.size for receipt in receipts(plan, 0))


def test_bytes_whose_answer_was_lost_count_once_though_more_come_with_them_again(
    store: JobStore, leases: Leases, plan: Plan
) -> None:
    job = planned(store, leases, plan)
    claimed(leases, job, "check")
    lease, all_of_it = claimed(leases, job, "group:00000"), receipts(plan, 0)
    assert leases.seal(lease, all_of_it[:1], Moved(100, 50, 1)) == "ok"  # its answer is lost
    assert leases.seal(lease, all_of_it, Moved(200, 100, 3)) == "ok"
    assert store.redis.hmget(job_key(job), "read", "uploaded", "deduplicated") == [b"200", b"100", b"3"]
    assert leases.release(lease, "drain") == "ok"
    assert leases.seal(claimed(leases, job, "group:00000"), all_of_it, Moved(30, 5, 0)) == "ok"
    assert store.redis.hmget(job_key(job), "read", "uploaded", "deduplicated") == [b"230", b"105", b"3"]


# ------------------------------------------------------------------------------------------------ progress, attempts


def test_a_copy_without_progress_loses_its_lease_although_it_is_renewed(
    store: JobStore, leases: Leases, plan: Plan
) -> None:
    job, hung = copying(store, leases, plan)
    age(store, job, LEASE - 1)
    assert leases.renew(hung, 0, progress=False) == "ok"
    age(store, job, 2)
    other = another(store)
    units = set()
    while (lease := other.claim(job)) is not None:
        units.add(lease.unit)
    assert hung.unit in units
    assert leases.renew(hung, 0, progress=True) == "lost"


def test_attempts_count_at_the_claim_and_are_forgiven_by_a_seal(store: JobStore, leases: Leases, plan: Plan) -> None:
    job = planned(store, leases, plan)
    assert leases.done(claimed(leases, job, "check"), []) == "ok"
    only_one_group_left(store, job)
    for attempt in (1, 2, 3):
        lease = claimed(leases, job, "group:00000")
        assert lease.attempts == attempt
        leases.renew(lease, 4_000_000, progress=True)  # bytes that were never sealed are no lasting progress
        age(store, job, LEASE + 1)
    lease = claimed(leases, job, "group:00000")
    assert lease.attempts == 4
    leases.seal(lease, receipts(plan, 0)[:1], Moved())
    assert lease.attempts == 0
    age(store, job, LEASE + 1)
    assert claimed(leases, job, "group:00000").attempts == 1


def test_rolling_restarts_burn_no_attempts(store: JobStore, leases: Leases, plan: Plan) -> None:
    job = planned(store, leases, plan)
    for _ in range(50):
        lease = claimed(leases, job, "check")
        assert lease.attempts == 1
        assert leases.release(lease, "drain") == "ok"


def test_a_failed_unit_waits_and_keeps_its_error(store: JobStore, leases: Leases, wakes: Wakes) -> None:
    job = store.submit(ask()).id
    leases.again(claimed(leases, job, "plan"), TROUBLE, 60)
    wakes.take()
    trouble = TROUBLE | {"facts": TROUBLE["facts"] | {"retry_at": ANY}}
    assert (seen := store.get(job).last_error) == trouble
    assert seen is not None and 0 < seen["facts"]["retry_at"] - time.time() <= 60
    age(store, job, 59)
    assert leases.claim(job) is None
    assert leases.due() == 0
    age(store, job, 1.1)
    assert leases.due() == 1
    again = claimed(leases, job, "plan")
    assert (again.attempts, again.last_error, again.dead) == (2, trouble, None)


def test_a_final_error_ends_the_job(store: JobStore, leases: Leases) -> None:
    job = store.submit(ask()).id
    assert leases.fail(claimed(leases, job, "plan"), TROUBLE) == "ok"
    failed = store.get(job)
    assert (failed.state, failed.error, failed.claims) == (JobState.failed, TROUBLE, ())
    assert leases.claim(job) is None
    assert store.submit(ask()).existed is False


@pytest.mark.parametrize(
    ("begun", "unsure", "ends"),
    [
        (False, False, "failed"),
        (False, True, "failed"),
        (True, False, "failed"),  # the target was read, and no commit of ours is there
        (True, True, "published_unverified"),  # nobody could read it
    ],
)
def test_a_commit_that_may_stand_is_never_called_failed(
    store: JobStore, leases: Leases, plan: Plan, begun: bool, unsure: bool, ends: str
) -> None:
    job = copied(store, leases, plan)
    lease = claimed(leases, job, "publish")
    if begun:
        assert leases.begin(lease) == "ok"
    leases.fail(lease, TROUBLE, unsure=unsure)
    assert store.get(job).state == ends


def test_what_cannot_be_confirmed_is_published_unverified(store: JobStore, leases: Leases, plan: Plan) -> None:
    job = copied(store, leases, plan)
    publish = claimed(leases, job, "publish")
    leases.begin(publish)
    leases.done(publish, {"commit": "abc", "ref": "main", "found": False})
    leases.fail(claimed(leases, job, "confirm"), TROUBLE)
    seen = store.get(job)
    assert seen.state == JobState.published_unverified
    assert seen.published == {"commit": "abc", "ref": "main", "found": False}


# ------------------------------------------------------------------------------------------------------- publishing


def test_publishing_waits_for_every_group_and_the_check(store: JobStore, leases: Leases, plan: Plan) -> None:
    job = planned(store, leases, plan)
    check = claimed(leases, job, "check")
    groups = [claimed(leases, job, f"group:{number:05d}") for number in range(len(plan.groups))]
    for lease in groups:
        assert leases.done(lease, [[], []]) == "ok"
        assert another(store).claim(job) is None
    assert leases.done(check, []) == "ok"
    claimed(another(store), job, "publish")


def test_of_two_finishers_only_the_latest_may_begin(store: JobStore, leases: Leases, plan: Plan) -> None:
    job = copied(store, leases, plan)
    first = claimed(leases, job, "publish")
    age(store, job, LEASE + 1)
    other = another(store)
    second = claimed(other, job, "publish")
    assert leases.begin(first) == "lost"
    assert store.get(job).state == JobState.publishing
    assert other.begin(second) == "ok"
    assert store.get(job).state == JobState.committing


def test_after_a_cancel_nothing_begins(store: JobStore, leases: Leases, plan: Plan) -> None:
    job = copied(store, leases, plan)
    lease = claimed(leases, job, "publish")
    store.cancel(job)
    assert leases.begin(lease) == "cancelled"
    store.retry(job)
    assert leases.begin(lease) == "lost"
    assert store.get(job).state == JobState.copying


def test_a_finisher_that_died_after_it_began_is_followed_by_another(
    store: JobStore, leases: Leases, plan: Plan
) -> None:
    job = copied(store, leases, plan)
    leases.begin(claimed(leases, job, "publish"))
    age(store, job, LEASE + 1)
    other = another(store)
    second = claimed(other, job, "publish")
    assert second.state == JobState.committing
    assert other.begin(second) == "ok"


def test_cancel_and_begin_at_once_have_one_winner(broker: Broker, store: JobStore, leases: Leases, plan: Plan) -> None:
    for number in range(20):
        job = copied(store, leases, plan, ask(name=f"m{number}"))
        lease = claimed(leases, job, "publish")
        gate = threading.Barrier(2)
        answers: dict[str, str] = {}

        def begin(lease: Lease = lease, gate: threading.Barrier = gate, answers: dict[str, str] = answers) -> None:
            gate.wait()
            answers["begin"] = leases.begin(lease)

        thread = threading.Thread(target=begin)
        thread.start()
        with JobStore.at(broker.url) as other:
            other.redis.ping()
            gate.wait()
            try:
                other.cancel(job)
                cancelled = True
            except WrongState:
                cancelled = False
        thread.join()
        assert answers["begin"] == ("cancelled" if cancelled else "ok")
        assert store.get(job).state == ("cancelled" if cancelled else "committing")


def test_an_object_that_the_store_lost_is_copied_again_by_its_group_alone(
    store: JobStore, leases: Leases, plan: Plan
) -> None:
    job = copied(store, leases, plan)
    publish = claimed(leases, job, "publish")
    lost = plan.shards[plan.groups[2].shards[0]]
    assert leases.invalidate(publish, LOST, [lost], [2]) == "ok"
    seen = store.get(job)
    assert (seen.state, seen.shards_done, seen.last_error) == (JobState.copying, len(plan.shards) - 1, LOST)
    assert leases.begin(publish) == "lost"
    again = claimed(leases, job, "group:00002")
    assert again.attempts == 1
    kept = leases.receipts(job, [plan.shards[i].digest for i in plan.groups[2].shards])
    assert lost.digest not in kept
    assert len(leases.attested(job)) == len(plan.groups) - 1
    assert leases.claim(job) is None
    leases.seal(again, receipts(plan, 2), Moved())
    assert store.get(job).bytes_done == store.get(job).bytes
    leases.done(again, [[], []])
    claimed(leases, job, "publish")


def test_receipts_are_voided_only_so_often(store: JobStore, leases: Leases, plan: Plan) -> None:
    job = copied(store, leases, plan)
    for _ in range(COPIES - 1):
        assert leases.invalidate(claimed(leases, job, "publish"), LOST, [plan.shards[0]], [0]) == "ok"
        group = claimed(leases, job, "group:00000")
        leases.seal(group, receipts(plan, 0), Moved())
        leases.done(group, [[], []])
    publish = claimed(leases, job, "publish")
    before = leases.receipts(job, [plan.shards[0].digest])
    assert leases.invalidate(publish, LOST, [plan.shards[0]], [0]) == "often"
    assert leases.receipts(job, [plan.shards[0].digest]) == before
    assert leases.begin(publish) == "ok"


def test_a_retry_forgives_what_was_voided_also_of_a_unit_that_waits_for_others(
    store: JobStore, leases: Leases, plan: Plan
) -> None:
    job, void = copied(store, leases, plan), [plan.shards[0]]
    for again in (False, True):
        if again:
            leases.fail(claimed(leases, job, "group:00000"), TROUBLE)
            store.retry(job)
            copy_again(leases, job, plan)
        for _ in range(COPIES - 2):
            assert leases.invalidate(claimed(leases, job, "publish"), LOST, void, [0]) == "ok"
            copy_again(leases, job, plan)
        assert leases.invalidate(claimed(leases, job, "publish"), LOST, void, [0]) == "ok"


def copy_again(leases: Leases, job: str, plan: Plan) -> None:
    group = claimed(leases, job, "group:00000")
    leases.seal(group, receipts(plan, 0), Moved())
    leases.done(group, [[], []])


def test_a_group_that_read_bad_bytes_forgets_what_it_sealed_and_stays_its_owners(
    store: JobStore, leases: Leases, plan: Plan
) -> None:
    job, lease = copying(store, leases, plan)
    leases.seal(lease, receipts(plan, 0), Moved())
    shards = [plan.shards[i] for i in plan.groups[0].shards]
    assert leases.invalidate(lease, TROUBLE, shards) == "ok"
    assert (store.get(job).shards_done, store.get(job).bytes_done) == (0, 0)
    assert leases.renew(lease, 0, progress=True) == "ok"


# ------------------------------------------------------------------------------------------------------------- wakes


def test_there_is_one_wake_for_each_thing_to_do_and_none_for_nothing(
    store: JobStore, leases: Leases, plan: Plan, wakes: Wakes
) -> None:
    job = store.submit(ask()).id
    assert wakes.take() == []  # a client sends none; control does
    assert leases.due() == 1
    assert wakes.take() == ["interactive"]
    assert leases.due() == 0  # it is on its way
    lease = claimed(leases, job, "plan")
    assert wakes.take() == []  # there is nothing else to do
    leases.planned(lease, plan)
    assert wakes.take() == ["interactive"]
    units = 1 + len(plan.groups)
    for left in reversed(range(units)):
        leases.claim(job)
        assert wakes.take() == (["interactive"] if left else [])
    assert leases.claim(job) is None
    assert wakes.take() == []


def test_a_wake_that_is_on_its_way_is_not_doubled(store: JobStore, leases: Leases, plan: Plan, wakes: Wakes) -> None:
    job = planned(store, leases, plan)
    check = claimed(leases, job, "check")
    wakes.take()
    assert leases.done(check, []) == "ok"  # there is more to do, and the claim above has sent for it
    assert wakes.take() == []


def test_a_lost_wake_is_sent_again_as_soon_as_the_queue_is_empty(store: JobStore, leases: Leases, wakes: Wakes) -> None:
    job = store.submit(ask()).id
    assert leases.due() == 1
    age(store, job, RESEND - 1)
    assert leases.due() == 0
    age(store, job, 2)
    assert leases.due() == 1
    assert wakes.take() == ["interactive"] * 2


def test_a_lost_wake_is_not_waited_for_longer_than_a_lease(store: JobStore, wakes: Wakes) -> None:
    quick = Leases(store, wakes, "worker-a", lease=2)
    job = store.submit(ask()).id
    assert quick.due() == 1
    age(store, job, 1)
    assert quick.due() == 0
    age(store, job, 1.1)
    assert quick.due() == 1


def in_line(store: JobStore) -> Leases:
    """Control, whose wakes stand in line as no worker takes them."""
    return Leases(store, lambda queue, job: store.redis.lpush(queue, job), "control")


def test_while_no_worker_takes_wakes_there_is_one_for_each_job(store: JobStore) -> None:
    control = in_line(store)
    jobs = [store.submit(ask(name, "bulk")).id for name in "abc"]
    assert control.due() == 3
    for _ in range(5):
        for job in jobs:
            age(store, job, 3600)
        assert control.due() == 0
    assert store.waiting()["bulk"] == 3


def test_what_is_missing_from_the_line_is_sent_again_and_no_more(store: JobStore) -> None:
    control = in_line(store)
    jobs = []
    for name in "abc":
        jobs.append(store.submit(ask(name, "bulk")).id)
        assert control.due() == 1
    age(store, jobs[0], 1)
    assert texts([store.redis.rpop("reshard:bulk")]) == jobs[:1]
    assert control.due() == 0
    for job in jobs:
        age(store, job, RESEND)
    assert control.due() == 1
    assert texts(store.redis.lrange("reshard:bulk", 0, -1)) == [jobs[0], jobs[2], jobs[1]]
    assert control.due() == 0


def test_many_that_are_due_are_waited_for_by_no_interactive_job_and_by_the_share_of_a_dead_worker_for_a_few_looks(
    store: JobStore, leases: Leases, wakes: Wakes
) -> None:
    dead = store.submit(ask("dead", "bulk")).id
    leases.claim(dead)
    bulk = [store.submit(ask(f"bulk{number}", "bulk")).id for number in range(DUE_AT_ONCE + 2)]
    age(store, bulk[0], 3600)
    age(store, dead, LEASE + 1)
    quick = store.submit(ask("quick")).id
    assert leases.due() == DUE_AT_ONCE
    assert wakes.sent[:2] == [("interactive", quick), ("bulk", bulk[0])]
    assert leases.due() == 4
    assert leases.first("reshard:bulk") == dead


def test_many_that_stand_in_line_are_waited_for_by_nobody(store: JobStore) -> None:
    control = in_line(store)
    bulk = [store.submit(ask(f"bulk{number}", "bulk")).id for number in range(DUE_AT_ONCE)]
    assert control.due() == DUE_AT_ONCE
    for job in bulk:
        age(store, job, 3600)
    last = store.submit(ask("last", "bulk")).id
    assert control.due() == 1
    assert store.redis.lindex("reshard:bulk", 0) == last.encode()


def test_one_look_sends_no_more_than_so_many_whatever_is_lost(store: JobStore, leases: Leases) -> None:
    lost = [store.submit(ask(f"lost{number}")).id for number in range(2 * DUE_AT_ONCE)]
    assert leases.due() + leases.due() == 2 * DUE_AT_ONCE
    for number, job in enumerate(lost):
        age(store, job, RESEND + 1 if number % 2 else -HOUR)
    for number in range(DUE_AT_ONCE // 2):
        store.submit(ask(f"bulk{number}", "bulk"))
    assert [leases.due() for _ in range(3)] == [DUE_AT_ONCE, DUE_AT_ONCE, DUE_AT_ONCE // 2]


def test_jobs_that_wait_for_another_try_cost_a_look_little(store: JobStore, leases: Leases) -> None:
    for number in range(DUE_AT_ONCE):
        lease = claimed(leases, store.submit(ask(str(number))).id, "plan")
        assert leases.again(lease, TROUBLE, 600) == "ok"
    store.redis.config_resetstat()
    assert leases.due() == 0
    calls = sum(command["calls"] for command in store.redis.info("commandstats").values())
    assert calls < 4 * DUE_AT_ONCE


def test_a_dead_workers_share_is_due_when_its_lease_ends(
    store: JobStore, leases: Leases, wakes: Wakes, plan: Plan
) -> None:
    job = store.submit(ask()).id
    leases.claim(job)
    age(store, job, LEASE - 1)
    assert leases.due() == 0
    age(store, job, 1.1)
    assert leases.due() == 1


HOUR = 3600  # seconds


def test_when_the_brokers_clock_jumps_back_a_dead_workers_lease_is_over(
    store: JobStore, leases: Leases, wakes: Wakes, plan: Plan
) -> None:
    """The clock cannot be set here, so every time that is kept lies as far ahead as the jump would leave it."""
    job = store.submit(ask()).id
    dead = claimed(leases, job, "plan")
    age(store, job, -HOUR)
    assert leases.due() == 1
    assert claimed(another(store), job, "plan").dead == dead.token


def test_when_the_brokers_clock_jumps_back_a_living_workers_lease_goes_on(
    store: JobStore, leases: Leases, wakes: Wakes
) -> None:
    job = store.submit(ask()).id
    lease = claimed(leases, job, "plan")
    age(store, job, -HOUR)
    assert leases.renew(lease, 0, progress=True) == "ok"
    assert leases.due() == 0
    assert another(store).claim(job) is None
    age(store, job, LEASE + 1)
    assert leases.due() == 1


def test_when_the_brokers_clock_jumps_back_a_backoff_does_not_grow(
    store: JobStore, leases: Leases, wakes: Wakes
) -> None:
    job = store.submit(ask()).id
    assert leases.again(claimed(leases, job, "plan"), TROUBLE, 600) == "ok"
    assert leases.due() == 0
    assert leases.claim(job) is None
    age(store, job, -HOUR)
    assert leases.due() == 1
    assert claimed(leases, job, "plan").attempts == 2


def test_when_the_brokers_clock_jumps_back_a_lost_wake_is_sent_again(
    store: JobStore, leases: Leases, wakes: Wakes
) -> None:
    job = store.submit(ask()).id
    assert leases.due() == 1
    age(store, job, -HOUR)
    assert leases.due() == 1


def test_when_the_brokers_clock_jumps_back_what_was_to_be_looked_at_is(
    store: JobStore, leases: Leases, wakes: Wakes
) -> None:
    """A job that a pause, or an older worker, left due a little later."""
    job = store.submit(ask()).id
    age(store, job, -HOUR)
    assert leases.due() == 1


def test_a_clock_that_is_corrected_by_less_than_a_second_ends_no_lease(store: JobStore, leases: Leases) -> None:
    job = store.submit(ask()).id
    claimed(leases, job, "plan")
    age(store, job, -0.9)
    assert leases.due() == 0
    assert another(store).claim(job) is None


def test_two_controls_send_each_wake_once(store: JobStore, wakes: Wakes, broker: Broker) -> None:
    jobs = [store.submit(ask(name=f"m{i}")).id for i in range(50)]
    gate = threading.Barrier(2)

    def look() -> None:
        with JobStore.at(broker.url) as own:
            control = Leases(own, wakes, "control")
            own.redis.ping()
            gate.wait()
            control.due()

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(job for _, job in wakes.sent) == sorted(jobs)


def test_one_bulk_copy_at_a_time_gives_way_to_an_interactive_job(store: JobStore, leases: Leases, plan: Plan) -> None:
    bulk = planned(store, leases, plan, ask(priority="bulk"))
    quick = planned(store, leases, plan, ask(name="other"))
    claimed(leases, bulk, "check")
    copies = [claimed(leases, bulk, f"group:{number:05d}") for number in range(3)]
    mine = claimed(leases, quick, "check")
    answers = [leases.renew(lease, 0, progress=True) for lease in copies]
    assert answers == ["ok"] * 3
    store.redis.lpush("reshard:interactive", "a wake that no worker has taken yet")
    assert leases.renew(mine, 0, progress=True) == "ok"
    answers = [leases.renew(lease, 0, progress=True) for lease in copies]
    assert answers == ["yield", "ok", "ok"]
    wait_for(lambda: not store.redis.exists("reshard:yielding"), "the pause's end", YIELD_PAUSE + 1)
    announce(store.redis, replace(process("x:1"), name="worker-a", queues=["bulk"]))
    assert leases.renew(copies[1], 0, progress=True) == "ok", "its worker could not take the job that waits"
    withdraw(store.redis, replace(process("x:1"), name="worker-a"))
    assert leases.renew(copies[1], 0, progress=True) == "yield"


def test_a_bulk_copy_gives_way_to_no_job_that_its_worker_could_not_do(
    store: JobStore, leases: Leases, plan: Plan
) -> None:
    _, copy = copying(store, leases, plan, ask(priority="bulk"))
    announce(store.redis, replace(process("x:1"), name="worker-a"))
    newer = store.submit(ask("newer")).id
    store.redis.hset(job_key(newer), "state", "a state of later")
    assert leases.claim(newer) is None, "it is left to another worker"
    leases.due()
    store.redis.lpush("reshard:interactive", newer)
    assert leases.renew(copy, 0, progress=True) == "ok"
    store.submit(ask("known"))
    leases.due()
    assert leases.renew(copy, 0, progress=True) == "yield"


# ---------------------------------------------------------------------------------------------------- mixed versions


def test_a_plan_of_another_schema_is_handed_back_with_a_word_why(store: JobStore, leases: Leases, plan: Plan) -> None:
    job = planned(store, leases, plan)
    older = another(store, "old-worker", schema=SCHEMA - 1)
    before = store.get(job)
    assert older.claim(job) is None
    seen = store.get(job)
    assert (seen.state, seen.claims) == (before.state, ())
    assert seen.note is not None and "old-worker" in seen.note
    assert leases.due() == 0
    age(store, job, HAND_BACK + 1)
    assert leases.due() == 1
    claimed(leases, job, "check")
    assert store.get(job).note is None


def only_one_group_left(store: JobStore, job: str) -> None:
    for unit in store.redis.zrange(job_key(job, "todo"), 0, -1):
        if unit not in (b"group:00000",):
            store.redis.zrem(job_key(job, "todo"), unit)
