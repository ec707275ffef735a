"""The Lua steps make the transitions that ``TRANSITIONS`` lists, all of them and no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from reshard.pipeline.errors import NoWeights, WrongState
from reshard.pipeline.planning.model import SCHEMA, Plan
from reshard.worker.queue import scripts
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Lease, Leases
from reshard.worker.queue.scripts import job_key
from reshard.worker.queue.states import TRANSITIONS, JobState
from reshard.worker.queue.wakes import strays
from tests.worker.conftest import age, another, ask, claimed, copied, planned

ERROR = NoWeights(place="them/m", found="").to_dict()
COMMIT = {"commit": "abc", "ref": "main", "found": False}

Situation = tuple[str, Lease | None]  # a job, and the unit of it that a worker has


class Driver:
    """Brings jobs into every state in which a step can find them."""

    def __init__(self, store: JobStore, leases: Leases, plan: Plan) -> None:
        self.store, self.leases, self.plan = store, leases, plan

    def queued(self) -> Situation:
        return self.store.submit(ask()).id, None

    def planning(self) -> Situation:
        job = self.store.submit(ask()).id
        return job, claimed(self.leases, job, "plan")

    def copying(self) -> Situation:
        job = planned(self.store, self.leases, self.plan)
        return job, claimed(self.leases, job, "check")

    def copied(self) -> Situation:
        return copied(self.store, self.leases, self.plan), None

    def publishing(self) -> Situation:
        job = copied(self.store, self.leases, self.plan)
        return job, claimed(self.leases, job, "publish")

    def committing(self) -> Situation:
        job, lease = self.publishing()
        assert lease and self.leases.begin(lease) == "ok"
        return job, lease

    def confirming(self) -> Situation:
        job, lease = self.committing()
        assert lease and self.leases.done(lease, COMMIT) == "ok"
        return job, claimed(self.leases, job, "confirm")

    def done(self) -> Situation:
        job, lease = self.confirming()
        assert lease and self.leases.done(lease, []) == "ok"
        return job, lease

    def failed(self) -> Situation:
        job, lease = self.copying()
        assert lease and self.leases.fail(lease, ERROR) == "ok"
        return job, lease

    def failed_before_its_plan(self) -> Situation:
        job, lease = self.planning()
        assert lease and self.leases.fail(lease, ERROR) == "ok"
        return job, lease

    def cancelled(self) -> Situation:
        job, lease = self.copying()
        self.store.cancel(job)
        return job, lease

    def cancelled_before_its_plan(self) -> Situation:
        job, _ = self.queued()
        self.store.cancel(job)
        return job, None

    def unsure(self) -> Situation:
        job, lease = self.committing()
        assert lease and self.leases.fail(lease, ERROR, unsure=True) == "ok"
        return job, lease

    def unconfirmed(self) -> Situation:
        job, lease = self.confirming()
        assert lease and self.leases.fail(lease, ERROR) == "ok"
        return job, lease

    def rolled_back(self) -> Situation:
        job, lease = self.unconfirmed()
        self.store.rolled_back(job, "c0ffee")
        return job, lease


SITUATIONS = [name for name in vars(Driver) if not name.startswith("_")]
Walked = dict[str, set[tuple[JobState, JobState, str]]]  # by situation: from which state to which, and by which step


@pytest.fixture(scope="module")
def walked() -> Walked:
    """What the tests of this file saw."""
    return {}


def carried_out(driver: Driver) -> dict[str, list[Callable[[str, Lease | None], object]]]:
    """Each step as clients and workers take it, with what decides where it leads."""
    store, leases, plan = driver.store, driver.leases, driver.plan

    def held(step: Callable[[Lease], object]) -> Callable[[str, Lease | None], object]:
        return lambda job, lease: lease and step(lease)

    def claim_of_a_dead_one(job: str, lease: Lease | None) -> None:
        age(store, job, 3600)
        leases.claim(job)

    def claim_by_a_newer_release(job: str, lease: Lease | None) -> None:
        age(store, job, 3600)
        another(store, schema=SCHEMA + 1).claim(job)

    return {
        "submit": [lambda job, lease: store.submit(ask())],
        "claim": [lambda job, lease: leases.claim(job), claim_of_a_dead_one, claim_by_a_newer_release],
        "renew": [held(lambda lease: leases.renew(lease, 1, True))],
        "seal": [held(lambda lease: leases.seal(lease, []))],
        "log": [held(lambda lease: leases.log(lease, ["{}"]))],
        "planned": [held(lambda lease: leases.planned(lease, plan))],
        "done": [held(lambda lease: leases.done(lease, COMMIT))],
        "begin": [held(leases.begin)],
        "invalidate": [
            held(lambda lease: leases.invalidate(lease, ERROR, [])),
            held(lambda lease: lease.kind == "publish" and leases.invalidate(lease, ERROR, plan.shards, [0])),
        ],
        "fail": [
            held(lambda lease: leases.fail(lease, ERROR)),
            held(lambda lease: leases.fail(lease, ERROR, unsure=True)),
            held(lambda lease: leases.again(lease, ERROR, 0)),
        ],
        "release": [held(lambda lease: leases.release(lease, "drain"))],
        "hand_over": [held(lambda lease: leases.hand_over(lease, ERROR))],
        "cancel": [lambda job, lease: store.cancel(job)],
        "retry": [lambda job, lease: store.retry(job), lambda job, lease: store.retry(job, anew=True)],
        "due": [lambda job, lease: leases.due()],
        "stray": [lambda job, lease: leases.ring_strays()],
        "pass_over": [lambda job, lease: leases.pass_over(job)],
        "rolled_back": [lambda job, lease: store.rolled_back(job, "c0ffee")],
        "delete": [lambda job, lease: store.delete([job])],
    }


def states(store: JobStore, job: str) -> list[JobState]:
    """Every state that the job has been in, in order."""
    events = store.redis.xrange(job_key(job, "events"))
    return [JobState(fields[b"state"].decode()) for _, fields in events if fields[b"kind"] == b"state"]


@pytest.mark.parametrize("situation", SITUATIONS)
def test_each_step_leads_only_where_the_table_says(
    store: JobStore, leases: Leases, plan: Plan, situation: str, walked: Walked
) -> None:
    driver = Driver(store, leases, plan)
    steps = carried_out(driver)
    listed = {(t.source, t.target, t.step) for t in TRANSITIONS}
    found = set[tuple[JobState, JobState, str]]()
    for name, ways in steps.items():
        for way in ways:
            store.redis.flushall()
            job, lease = getattr(driver, situation)()
            before = states(store, job)
            try:
                way(job, lease)
            except WrongState:
                assert states(store, job) == before
            after = states(store, job)[len(before) :]
            went = {(source, target, name) for source, target in zip([before[-1], *after], after, strict=False)}
            assert went <= listed, f"{name} of a job that is {situation}"
            assert strays(store.redis) == [], f"nobody would look again after {name} of a job that is {situation}"
            found |= went
    walked[situation] = found


# Of lua/: what others begin with, and steps that take no job.
SHARED = {"common", "wakes", "owned"}
OF_NO_JOB = {
    "append", "fleet_closed", "fleet_note", "fleet_take", "forget_jump", "in_the_way", "rate_limit_take",
    "rate_limit_update", "relay",
}  # fmt: skip


def test_every_step_that_takes_a_job_is_carried_out_here(store: JobStore, leases: Leases, plan: Plan) -> None:
    files = {path.stem for path in Path(scripts.__file__).with_name("lua").iterdir()}
    assert carried_out(Driver(store, leases, plan)).keys() == files - SHARED - OF_NO_JOB


def test_every_transition_of_the_table_was_made(store: JobStore, leases: Leases, plan: Plan, walked: Walked) -> None:
    for situation in SITUATIONS:
        if situation not in walked:  # this test was asked for alone
            test_each_step_leads_only_where_the_table_says(store, leases, plan, situation, walked)
    assert {(t.source, t.target, t.step) for t in TRANSITIONS if t.source} == set().union(*walked.values())
