"""Catalogs that were cancelled or given another turn: what goes on, what stays as it is, and what is counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from reshard.client.operations.catalogs import told
from reshard.pipeline.errors import BadPlace, CatalogState, ReshardError, SourceNotFound, TargetsCollide
from reshard.worker.followers.catalogs import asked_by
from reshard.worker.followers.cursor import Cursor
from reshard.worker.followers.expander import Expander
from reshard.worker.followers.records import Definition, Entry
from reshard.worker.queue.events import EVENTS, Reader
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.scripts import PREFIX, job_key
from reshard.worker.queue.states import JobState
from tests.support.procs import wait_for
from tests.worker.conftest import ask
from tests.worker.followers.builders import Rows, begin, counts, definition, fail, finish, jobs, rows


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
    assert (seen.state, seen.todo, counts(seen)) == ("cancelled", 0, {"failed": 1, "cancelled": 1})
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
    cancel_each = store.cancel_each

    def dies_behind_one(ids: Sequence[str]) -> None:
        cancel_each(ids[:1])
        raise ConnectionError("the client died")

    with monkeypatch.context() as patched, pytest.raises(ConnectionError):
        patched.setattr(catalogs.store, "cancel_each", dies_behind_one)
        catalogs.cancel("mirror")
    assert store.get(first).state == JobState.cancelled
    assert jobs(catalogs) == [second]
    assert catalogs.cancel("mirror") == 1
    assert store.get(second).state == JobState.cancelled
    assert jobs(catalogs) == []
    with pytest.raises(CatalogState, match="it has already ended"):
        catalogs.cancel("mirror")


def test_a_job_that_cannot_be_read_keeps_none_of_the_others_from_their_cancel(
    catalogs: Cursor, store: JobStore
) -> None:
    begin(catalogs, definition(3, at_once=3))
    broken, *others = jobs(catalogs)
    store.redis.hset(job_key(broken), "request", "{")
    assert catalogs.cancel("mirror") == 2
    assert [store.get(job).state for job in others] == [JobState.cancelled] * 2


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
    assert list(told(catalogs.get("mirror")).failures()) == [TargetsCollide.code, BadPlace.code]
    (job,) = jobs(catalogs)
    finish(leases, job)
    assert jobs(catalogs) == []
    assert catalogs.get("mirror").state == "failed"


def test_a_job_that_is_retried_by_itself_counts_in_the_run_that_goes_on(
    catalogs: Cursor, leases: Leases, store: JobStore
) -> None:
    begin(catalogs, definition(3, at_once=2))
    first, second = jobs(catalogs)
    store.cancel(first)
    _, third = jobs(catalogs)
    assert counts(catalogs.get("mirror")) == {"cancelled": 1}
    store.retry(first)
    assert set(jobs(catalogs)) == {first, second, third}
    for job in (second, third):
        finish(leases, job)
    assert jobs(catalogs) == [first]
    seen = catalogs.get("mirror")
    assert (seen.state, counts(seen)) == ("running", {"same": 2})
    finish(leases, first, found=False)
    assert jobs(catalogs) == []
    seen = catalogs.get("mirror")
    assert (seen.state, counts(seen)) == ("done", {"same": 2, "published": 1})
    assert catalogs.now("mirror").counts == {"same": 2, "published": 1, "cancelled": 0}


@pytest.mark.parametrize("again, state", [(fail, "failed"), (finish, "done")])
def test_a_job_that_is_retried_by_itself_has_its_ended_run_go_on(
    catalogs: Cursor, leases: Leases, store: JobStore, again: Callable[[Leases, str], None], state: str
) -> None:
    begin(catalogs, definition(1))
    (job,) = jobs(catalogs)
    store.redis.hset(f"{PREFIX}job:{job}", "read", 400)
    fail(leases, job)
    assert jobs(catalogs) == [] and catalogs.get("mirror").state == "failed"
    store.retry(job)
    assert jobs(catalogs) == [job]
    assert (catalogs.get("mirror").state, catalogs.now("mirror").counts["failed"]) == ("running", 0)
    with pytest.raises(CatalogState, match="is running: its current run uses another version of the file"):
        catalogs.submit(definition(2))
    again(leases, job)
    assert jobs(catalogs) == []
    now = catalogs.now("mirror")
    assert (now.shown, now.failures, now.bytes, now.entries) == (state, state == "failed", 400, 1)


def test_a_job_of_a_cancelled_run_that_is_retried_by_itself_counts_and_begins_nothing_else(
    catalogs: Cursor, leases: Leases, store: JobStore
) -> None:
    begin(catalogs, definition(3, at_once=1))
    (job,) = jobs(catalogs)
    catalogs.cancel("mirror")
    assert jobs(catalogs) == []
    store.retry(job)
    assert jobs(catalogs) == [job]
    finish(leases, job)
    assert jobs(catalogs) == []
    seen = catalogs.get("mirror")
    assert (seen.state, counts(seen)) == ("cancelled", {"same": 1})
    assert catalogs.names() == ["mirror"] and catalogs.awaited() == set()


def test_a_model_whose_target_another_job_had_is_no_model_of_that_job(
    catalogs: Cursor, leases: Leases, store: JobStore
) -> None:
    other = store.submit(ask("m0", size=12345).model_copy(update={"asked_by": asked_by("mirror")})).id
    begin(catalogs, definition(1))
    assert jobs(catalogs) == []
    assert list(told(catalogs.get("mirror")).failures()) == ["job.target_busy"]
    store.cancel(other)
    store.retry(other)
    assert jobs(catalogs) == []


def test_an_end_that_came_before_its_retry_is_heard_of_replaces_the_older_one_once(
    catalogs: Cursor, leases: Leases, store: JobStore
) -> None:
    begin(catalogs, definition(1))
    (job,) = jobs(catalogs)
    fail(leases, job)
    assert jobs(catalogs) == []
    store.retry(job)
    finish(leases, job)
    reader = Reader(store.redis, catalogs.group)
    events = reader.take()
    catalogs.handle(events, reader)
    ends = store.redis.xlen(EVENTS)
    catalogs.handle(events, reader)  # as one who took over from a control that died
    assert (catalogs.get("mirror").state, counts(catalogs.get("mirror"))) == ("done", {"same": 1})
    assert store.redis.xlen(EVENTS) == ends, "its run ended once more"
    store.delete([job])
    catalogs.handle(events, reader)
    assert catalogs.get("mirror").state == "done"
