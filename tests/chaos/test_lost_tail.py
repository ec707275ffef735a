"""A broker that comes back without the last of what it answered, as one without `appendfsync always` may."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from reshard.pipeline.copying.loop import Moved
from reshard.pipeline.planning.model import Plan
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.states import JobState
from tests.support.models import arrays, numbered, save_sharded
from tests.support.procs import Broker
from tests.worker.conftest import Wakes, age, another, claimed, copied, draft_plan, planned, receipts


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    save_sharded(tmp_path / "model", numbered(arrays(24, 4000), 4))
    return draft_plan(tmp_path / "model", tmp_path / "out")


class Forgetful:
    """A broker that can be put back to what it had on disk at an earlier moment."""

    def __init__(self, folder: Path) -> None:
        self.broker = Broker(folder)
        self._now, self._then = folder / "broker", folder / "then"

    def remember(self) -> None:
        shutil.copytree(self._now, self._then)

    def go_back(self) -> None:
        self.broker.kill()
        shutil.rmtree(self._now)
        shutil.copytree(self._then, self._now)
        self.broker.start()


def test_a_claim_that_was_forgotten_is_not_mixed_up_with_the_next(tmp_path: Path, plan: Plan) -> None:
    """Tokens are random: a counter would give the next owner the number that the forgotten one still holds."""
    forgetful = Forgetful(tmp_path)
    with forgetful.broker as broker, JobStore.at(broker.url) as store:
        leases = Leases(store, Wakes(), "worker-a")
        job = planned(store, leases, plan)
        claimed(leases, job, "check")
        forgetful.remember()
        forgotten = claimed(leases, job, "group:00000")
        forgetful.go_back()
        owner = claimed(another(store), job, "group:00000")
        assert owner.token != forgotten.token
        assert leases.renew(forgotten, 0, progress=True) == "lost"
        assert leases.seal(forgotten, receipts(plan, 0), Moved()) == "lost"
        assert leases.done(forgotten, [[], []]) == "lost"
        assert another(store).seal(owner, receipts(plan, 0), Moved()) == "ok"


def test_a_commit_whose_beginning_was_forgotten_is_made_again_only_by_who_owns_it(tmp_path: Path, plan: Plan) -> None:
    """Of two who both believe to have begun, the Hub lets one commit; the store lets only the latest say so."""
    forgetful = Forgetful(tmp_path)
    with forgetful.broker as broker, JobStore.at(broker.url) as store:
        leases = Leases(store, Wakes(), "worker-a")
        job = copied(store, leases, plan)
        forgetful.remember()
        forgotten = claimed(leases, job, "publish")
        assert leases.begin(forgotten) == "ok"
        forgetful.go_back()
        assert store.get(job).state == JobState.copying
        age(store, job, 1)
        second = another(store)
        owner = claimed(second, job, "publish")
        assert second.begin(owner) == "ok"
        assert leases.done(forgotten, {"commit": "c", "ref": "main", "found": False}) == "lost"
        assert second.done(owner, {"commit": "c", "ref": "main", "found": True}) == "ok"
        assert store.get(job).state == JobState.confirming
