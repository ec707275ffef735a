"""Cursor that were cancelled or given another turn: what goes on, what stays as it is, and what is counted."""

from __future__ import annotations

import threading

import pytest

from reshard.pipeline.errors import BadPlace, CatalogState, ReshardError, SourceNotFound, TargetsCollide
from reshard.worker.followers.cursor import Cursor
from reshard.worker.followers.expander import Expander
from reshard.worker.followers.records import Definition, Entry
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.scripts import PREFIX
from reshard.worker.queue.states import JobState
from tests.support.procs import wait_for
from tests.worker.followers.builders import Rows, begin, definition, fail, finish, jobs, rows


@pytest.fixture
def catalogs(store: JobStore) -> Cursor:
    return Cursor(store)


def test_another_turn_of_a_cancelled_one_is_for_what_failed_alone(catalogs: Cursor, leases: Leases) -> None:
    begin(catalogs, definition(4, at_once=1))
    (failed,) = jobs(catalogs)
    fail(leases, failed)
    assert len(jobs(catalogs)) == 1
    catalogs.cancel("mirror")
    assert jobs(catalogs) == []
    seen = catalogs.get("mirror")
    assert (seen.state, seen.todo, seen.counts()) == ("cancelled", 0, {"failed": 1, "cancelled": 1})
    assert catalogs.retry("mirror") == 1
    assert jobs(catalogs) == [failed]
    assert catalogs.get("mirror").todo == 0
    fail(leases, failed)
    assert jobs(catalogs) == []
    assert catalogs.get("mirror").state == "failed"


def test_a_second_cancel_goes_on_where_the_first_client_died(
    catalogs: Cursor, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(catalogs, definition(3, at_once=2))
    first, second = jobs(catalogs)
    cancel = store.cancel

    def dies_over(job: str) -> None:
        cancel(job)
        raise ConnectionError("the client died")

    with monkeypatch.context() as patched, pytest.raises(ConnectionError):
        patched.setattr(catalogs.store, "cancel", dies_over)
        catalogs.cancel("mirror")
    assert store.get(first).state == JobState.cancelled
    assert jobs(catalogs) == [second]
    assert catalogs.cancel("mirror") == 1
    assert store.get(second).state == JobState.cancelled
    assert jobs(catalogs) == []
    with pytest.raises(CatalogState, match="it has already ended"):
        catalogs.cancel("mirror")


def test_jobs_that_another_turn_is_to_go_on_with_are_awaited_also_while_it_is_stopped(
    catalogs: Cursor, leases: Leases
) -> None:
    begin(catalogs, definition(3, at_once=1, max_failures=0))
    (first,) = jobs(catalogs)
    fail(leases, first)
    assert jobs(catalogs) == []
    catalogs.resume("mirror")
    (second,) = jobs(catalogs)
    fail(leases, second)
    assert jobs(catalogs) == []
    assert catalogs.awaited() == set()
    assert catalogs.retry("mirror") == 2
    assert jobs(catalogs) == [first]
    assert catalogs.awaited() == {first, second}
    fail(leases, first)
    assert jobs(catalogs) == []
    assert (catalogs.get("mirror").state, catalogs.awaited()) == ("stopped", {second})
    catalogs.resume("mirror")
    assert jobs(catalogs) == [second]


@pytest.mark.parametrize("forgotten, counted", [(False, 700), (True, 1100)])
def test_bytes_of_a_job_that_goes_on_count_once(
    catalogs: Cursor, leases: Leases, store: JobStore, forgotten: bool, counted: int
) -> None:
    """A job tells what it read in all its turns; one that is made because the first is forgotten, only its own."""

    def read(job: str, count: int) -> None:
        store.redis.hincrby(f"{PREFIX}job:{job}", "read", count)
        fail(leases, job)
        assert jobs(catalogs) == []

    begin(catalogs, definition(1))
    (job,) = jobs(catalogs)
    read(job, 400)
    if forgotten:
        store.delete([job])
    assert catalogs.retry("mirror") == 1
    (again,) = jobs(catalogs)
    assert (again == job) != forgotten
    read(again, 700 if forgotten else 300)
    assert int(store.redis.hget(f"{PREFIX}catalog:mirror", "bytes") or 0) == counted


def test_what_ended_one_run_does_not_end_the_next(catalogs: Cursor) -> None:
    begun_anew = threading.Event()

    def gone(wanted: Definition) -> list[tuple[Entry, ReshardError | None]]:
        assert begun_anew.wait(30)
        raise SourceNotFound(repo="them/gone", endpoint="https://hub")

    expander = Expander(catalogs, gone)
    catalogs.submit(definition(1))
    expander.look(catalogs.expanding())
    catalogs.cancel("mirror")
    assert catalogs.submit(definition(2))
    begun_anew.set()
    wait_for(lambda: not expander.busy, "the end of the first run")
    seen = catalogs.get("mirror")
    assert (seen.state, seen.note) == ("expanding", None)


def test_what_ended_one_control_does_not_end_who_took_over(catalogs: Cursor, store: JobStore) -> None:
    catalogs.submit(definition(1))
    run = catalogs.claim("mirror", "slow")
    store.redis.hset(f"{PREFIX}catalog:mirror", "expander_until", 0)
    assert catalogs.claim("mirror", "next") == run
    with pytest.raises(CatalogState, match="mirror is expanding: another control process is expanding it"):
        catalogs.refuse("mirror", run, "slow", SourceNotFound(repo="them/gone", endpoint="https://hub"))
    assert catalogs.get("mirror").state == "expanding"
    catalogs.refuse("mirror", run, "next", SourceNotFound(repo="them/gone", endpoint="https://hub"))
    assert catalogs.get("mirror").state == "failed"


def test_what_only_the_file_can_mend_gets_no_other_turn(catalogs: Cursor, leases: Leases) -> None:
    """Of two that would go to one target, the last would replace the first; what has no target cannot begin."""
    (left, _), (right, _), (absent, _), (nowhere, _) = rows(definition(4))
    collide = TargetsCollide(target="us/m0", source="them/m0", others="them/m1")
    none = BadPlace(value="us/", why="no name")
    gone = SourceNotFound(repo="them/m2", endpoint="https://hub")
    found: Rows = [(left, collide), (right, collide), (absent, gone)]
    begin(catalogs, definition(4), [*found, (nowhere.model_copy(update={"request": None}), none)])
    assert catalogs.retry("mirror", only=TargetsCollide.code) == 0
    assert catalogs.retry("mirror") == 1
    assert list(catalogs.get("mirror").failures()) == [TargetsCollide.code, BadPlace.code]
    (job,) = jobs(catalogs)
    finish(leases, job)
    assert jobs(catalogs) == []
    assert catalogs.get("mirror").state == "failed"
