"""What both ledgers keep to: the journal of a run, and what the store knows for the unit of a lease."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from redis import ConnectionError

from reshard.pipeline.copying.loop import Attested, Moved
from reshard.pipeline.driving import Exhausted, Ledger, groups_of
from reshard.pipeline.errors import ObjectLost, SourceCorrupt
from reshard.pipeline.journal import Journal
from reshard.pipeline.limits import COPIES
from reshard.pipeline.planning.model import Plan
from reshard.worker.keeper import LeaseKeeper
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Lease, Leases
from reshard.worker.settings import Settings
from tests.worker.bench import raising
from tests.worker.conftest import claimed, copying, planned, receipts

BAD = SourceCorrupt(file="model.safetensors", place="them/model", expected="a", actual="b")
LOST = ObjectLost(["0" * 64], repo="us/model", what="model.safetensors")


class Work(Protocol):
    """Units of the plan, carried out one after the other; None is the commit."""

    def begin(self, unit: int | None) -> Ledger: ...

    def seal(self, group: int) -> None: ...

    def finish(self, group: int) -> None: ...

    def anew(self) -> Ledger:
        """As another process reads it."""


class InJournal:
    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder, self._plan = folder, plan
        self.journal = Journal.open(folder, "key")

    def begin(self, unit: int | None) -> Ledger:
        return self.journal

    def seal(self, group: int) -> None:
        self.journal.seal(receipts(self._plan, group))

    def finish(self, group: int) -> None:
        self.journal.finish(group, Attested({f"{group}.bin": "as delivered"}, ()))

    def anew(self) -> Ledger:
        self.journal.close(done=False)
        self.journal = Journal.open(self._folder, "key")
        return self.journal


class OnQueue:
    def __init__(self, store: JobStore, leases: Leases, plan: Plan) -> None:
        self._leases, self._plan = leases, plan
        self._job = planned(store, leases, plan)
        leases.done(claimed(leases, self._job, "check"), [])
        self._lease: Lease | None = None

    def begin(self, unit: int | None) -> Ledger:
        self._lease = claimed(self._leases, self._job, "publish" if unit is None else f"group:{unit:05d}")
        return self.anew()

    def seal(self, group: int) -> None:
        assert self._lease is not None
        assert self._leases.seal(self._lease, receipts(self._plan, group), Moved()) == "ok"

    def finish(self, group: int) -> None:
        assert self._lease is not None
        assert self._leases.done(self._lease, Attested({f"{group}.bin": "as delivered"}, ())) == "ok"

    def anew(self) -> Ledger:
        assert self._lease is not None
        return LeaseKeeper(self._leases, self._lease, Settings())


@pytest.fixture(params=["journal", "queue"])
def work(request: pytest.FixtureRequest, plan: Plan, tmp_path: Path) -> Iterator[Work]:
    if request.param == "queue":
        yield OnQueue(request.getfixturevalue("store"), request.getfixturevalue("leases"), plan)
        return
    noted = InJournal(tmp_path, plan)
    yield noted
    noted.journal.close(done=True)


def copy_all(work: Work, plan: Plan) -> None:
    for group in plan.groups:
        copy(work, group.number)


def copy(work: Work, group: int) -> None:
    work.begin(group)
    work.seal(group)
    work.finish(group)


def test_it_holds_what_was_copied_for_any_process(work: Work, plan: Plan) -> None:
    copy(work, 0)
    ledger = work.begin(1)
    own = {receipt.shard: receipt for receipt in receipts(plan, 0)}
    for _ in range(2):
        assert ledger.held(plan.shards) == own
        assert ledger.held(plan.shards[-1:]) == {}
        assert [attested.files for attested in ledger.groups()] == [{"0.bin": "as delivered"}]
        ledger = work.anew()


def test_what_a_commit_finds_lost_is_forgotten_and_its_groups_are_open_again(work: Work, plan: Plan) -> None:
    copy_all(work, plan)
    ledger, lost = work.begin(None), plan.shards[0]
    groups = groups_of(plan, {lost.digest})
    ledger.spoil(None, LOST, [lost], groups)
    for _ in range(2):
        assert lost.digest not in ledger.held(plan.shards)
        assert len(ledger.held(plan.shards)) == len(plan.shards) - 1
        assert len(ledger.groups()) == len(plan.groups) - len(groups)
        ledger = work.anew()
    for group in groups:
        copy(work, group)
    assert len(work.begin(None).held(plan.shards)) == len(plan.shards)


def test_what_a_group_copied_of_bad_bytes_is_forgotten_and_the_group_goes_on(work: Work, plan: Plan) -> None:
    ledger, own = work.begin(0), [plan.shards[number] for number in plan.groups[0].shards]
    for _ in range(COPIES - 1):
        work.seal(0)
        ledger.spoil(0, BAD, own, ())
        assert ledger.held(plan.shards) == {}
    work.seal(0)
    work.finish(0)
    assert len(ledger.held(plan.shards)) == len(own)


@pytest.mark.parametrize("unit", [0, None])
def test_one_unit_may_spoil_only_so_often(work: Work, plan: Plan, unit: int | None) -> None:
    error, groups = (LOST, [0]) if unit is None else (BAD, [])
    own = [plan.shards[number] for number in plan.groups[0].shards]
    if unit is None:
        copy_all(work, plan)
    ledger = work.begin(unit)
    for _ in range(COPIES - 1):
        ledger.spoil(unit, error, own, groups)
        if unit is None:
            copy(work, 0)
            ledger = work.begin(None)
    with pytest.raises(Exhausted) as often:
        ledger.spoil(unit, error, own, groups)
    assert often.value.error is error


def test_what_the_store_was_not_told_yet_is_spoiled_as_well(
    store: JobStore, leases: Leases, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, own = copying(store, leases, plan)[1], [plan.shards[number] for number in plan.groups[0].shards]
    keeper = LeaseKeeper(leases, lease, Settings())
    with monkeypatch.context() as patch:
        patch.setattr(leases, "seal", raising(ConnectionError()))
        keeper.stored(receipts(plan, 0))
    keeper.spoil(0, BAD, own, ())
    keeper.finish(lambda: leases.renew(lease, 0, progress=True))
    assert keeper.held(own) == {}
