"""Any order of events: workers that claim, die, come back late, fail, seal; people who cancel and retry.

Hypothesis chooses the events; after each of them the store must still make sense, and at the end every job must be
able to go on.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from reshard.pipeline.copying.loop import Moved
from reshard.pipeline.errors import SourceNotFound, TargetBusy, WrongState
from reshard.pipeline.planning.model import Plan
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Lease, Leases
from reshard.worker.queue.scripts import job_key
from reshard.worker.queue.states import JobState
from tests.support.examples import examples
from tests.worker.conftest import Wakes, age, ask, receipts, waiting_lines

TROUBLE = SourceNotFound(repo="them/model", endpoint="https://hub").to_dict()
BEHIND = {JobState.committing, JobState.confirming}  # the point of no return


class Life(RuleBasedStateMachine):
    store: JobStore
    plan: Plan

    def __init__(self) -> None:
        super().__init__()
        self.store.redis.flushall()
        self.leases = Leases(self.store, Wakes(), "worker")
        self.job = self.store.submit(ask()).id
        self.held: list[Lease] = []  # every lease that anybody ever had and has not given up
        self.latest: dict[str, str] = {}  # unit -> the token that may work on it
        self.commits: set[str] = set()  # tokens that passed the point of no return and reported a commit

    # ----------------------------------------------------------------------------------------------------- events

    @rule()
    def wake(self) -> None:
        lease = self.leases.claim(self.job)
        if lease is not None:
            self.held.append(lease)
            self.latest[lease.unit] = lease.token

    @rule(seconds=st.sampled_from([1, 31, 1000]))
    def time_passes(self, seconds: int) -> None:
        age(self.store, self.job, seconds)

    @rule()
    def control_looks(self) -> None:
        self.leases.due()

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(), last=st.booleans(), how=st.sampled_from(["done", "again", "fail", "release", "renew", "void"])
    )
    def worker_acts(self, data: st.DataObject, last: bool, how: str) -> None:
        """A worker, perhaps one that was thought dead long ago, does what it believes to be its turn."""
        lease = self.held[-1] if last else data.draw(st.sampled_from(self.held))
        mine = self.latest.get(lease.unit) == lease.token
        answer = getattr(self, f"_{how}")(lease)
        assert (answer == "ok") == mine or answer == "often", (lease, how, answer, mine)
        if mine and how != "renew" and answer == "ok":
            self.latest.pop(lease.unit, None)
            self.held.remove(lease)
        if self.store.get(self.job).state.ended:
            self.latest.clear()

    def _done(self, lease: Lease) -> str:
        if lease.kind == "plan":
            return self.leases.planned(lease, self.plan)
        if lease.kind == "group":
            sealed = self.leases.seal(lease, receipts(self.plan, lease.group), Moved())
            assert sealed == self.leases.done(lease, [[], []])
            return sealed
        if lease.kind == "publish":
            begun = self.leases.begin(lease)
            if begun == "ok":
                self.commits.add(lease.token)
            done = self.leases.done(lease, {"commit": lease.token, "ref": "main", "found": False})
            assert begun == done
            return done
        return self.leases.done(lease, [])

    def _again(self, lease: Lease) -> str:
        return self.leases.again(lease, TROUBLE, 5)

    def _fail(self, lease: Lease) -> str:
        return self.leases.fail(lease, TROUBLE, unsure=True)

    def _release(self, lease: Lease) -> str:
        return self.leases.release(lease, "drain")

    def _renew(self, lease: Lease) -> str:
        return self.leases.renew(lease, 1, progress=True)

    def _void(self, lease: Lease) -> str:
        if lease.kind != "publish":
            return self._release(lease)
        return self.leases.invalidate(lease, TROUBLE, [self.plan.shards[0]], [0])

    @rule()
    def somebody_cancels(self) -> None:
        before = self.store.get(self.job).state
        try:
            self.store.cancel(self.job)
        except WrongState:
            assert before in BEHIND or before.ended
        else:
            assert before not in BEHIND
            self.latest.clear()

    @rule(anew=st.booleans())
    def somebody_retries(self, anew: bool) -> None:
        before = self.store.get(self.job).state
        try:
            self.store.retry(self.job, anew=anew)
        except WrongState:
            assert before == JobState.done or not before.ended
        else:
            assert before.ended
            assert self.latest == {}

    @rule()
    def somebody_submits_it_again(self) -> None:
        before = self.store.get(self.job)
        if not before.state.ended:
            assert self.store.submit(ask()).id == self.job
            with pytest.raises(TargetBusy):
                self.store.submit(ask(size=12345))

    # ------------------------------------------------------------------------------------------------- invariants

    @invariant()
    def it_makes_sense(self) -> None:
        seen = self.store.get(self.job)
        redis: Any = self.store.redis
        todo = {unit.decode() for unit in redis.zrange(job_key(self.job, "todo"), 0, -1)}
        active = redis.hget("reshard:active", redis.hget(job_key(self.job), "target"))
        if seen.state.ended:
            assert seen.claims == ()
            assert active is None
            assert waiting_lines(self.store, self.job) == []
        else:
            assert todo, "nothing is left to do, and the job has not ended"
            assert active == self.job.encode()
            assert waiting_lines(self.store, self.job), "nobody will ever look at it again"
        assert {held.unit for held in seen.claims} == set(self.latest)
        assert 0 <= seen.shards_done <= len(self.plan.shards)
        if seen.shards:
            assert sum(s.size for s in self.plan.shards) == seen.bytes
        if "publish" in todo:
            assert todo == {"publish"}
            known = self.leases.receipts(self.job, [shard.digest for shard in self.plan.shards])
            assert len(known) == len(self.plan.shards), "to be published, and not everything is copied"
        if seen.state in BEHIND:
            assert todo <= {"publish", "confirm"}
        assert sum(redis.zscore(f"reshard:jobs:{state}", self.job) is not None for state in JobState) == 1

    def teardown(self) -> None:
        """Whatever happened, one good worker brings the job to its end."""
        if self.store.get(self.job).state in {JobState.failed, JobState.cancelled, JobState.published_unverified}:
            self.store.retry(self.job)
        for _ in range(3 * len(self.plan.groups) + 20):
            if self.store.get(self.job).state == JobState.done:
                return
            age(self.store, self.job, 1000)
            lease = self.leases.claim(self.job)
            assert lease is not None
            assert self._done(lease) == "ok"
        raise AssertionError(f"it is still {self.store.get(self.job).state}")


def test_no_order_of_events_breaks_a_job(store: JobStore, plan: Plan) -> None:
    Life.store, Life.plan = store, plan
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Life,
        settings=settings(
            max_examples=examples(40), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
