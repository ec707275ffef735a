"""How many jobs one submitter may have queued, and that whatever comes beyond it is told or waits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from reshard.pipeline.errors import TooManyQueued
from reshard.pipeline.planning.model import Plan
from reshard.pipeline.request import Request
from reshard.worker.followers.cursor import Cursor
from reshard.worker.followers.pushes import WAITING, Pushes, Watch
from reshard.worker.followers.schedules import Schedule, Schedules
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.scripts import job_key, texts
from reshard.worker.settings import MAX_QUEUED, max_queued
from tests.worker.conftest import ask, claimed, followed, planned
from tests.worker.followers.builders import begin, counts, definition, fail, finish, jobs

MOST = 2


@pytest.fixture
def store(store: JobStore) -> JobStore:
    store.most = MOST
    return store


def by(name: str, number: int) -> Request:
    return ask(f"{name}{number}").model_copy(update={"asked_by": name})


def queued(store: JobStore, name: str, count: int = MOST) -> list[str]:
    """So many jobs of one submitter, the oldest first: the queue has them by id where they come in one millisecond."""
    for number in range(count):
        store.submit(by(name, number))
    return texts(store.redis.zrange(f"reshard:queued:{name}", 0, -1))


def test_more_than_so_many_are_refused_until_one_has_begun(store: JobStore, leases: Leases) -> None:
    first, second = queued(store, "me")
    with pytest.raises(TooManyQueued, match="me already has 2 queued jobs") as refused:
        store.submit(by("me", 2))
    assert refused.value.facts["job"] == first
    assert store.submit(store.get(second).request).existed  # nothing new
    assert not store.submit(by("other", 0)).existed
    claimed(leases, first, "plan")
    third = store.submit(by("me", 2)).id
    with pytest.raises(TooManyQueued):
        store.submit(by("me", 3))
    store.cancel(third)
    store.submit(by("me", 3))
    store.cancel(second)
    assert len(store.recent()) == MOST + 3


def test_the_setting_says_how_many(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert JobStore(store.redis).most == MAX_QUEUED == 20_000
    monkeypatch.setenv("RESHARD_MAX_QUEUED", "1")
    monkeypatch.setattr("reshard.worker.queue.jobs.max_queued", max_queued.__wrapped__)  # a process reads it once
    few = JobStore(store.redis)
    queued(few, "me", 1)
    with pytest.raises(TooManyQueued, match="me already has 1 queued job"):
        few.submit(by("me", 1))


def test_a_job_whose_record_a_client_removed_takes_nobody_s_place(store: JobStore) -> None:
    gone, stays = queued(store, "me")
    store.redis.delete(job_key(gone))
    assert not store.submit(by("me", 2)).existed
    with pytest.raises(TooManyQueued) as refused:
        store.submit(by("me", 3))
    assert refused.value.facts["job"] == stays


def test_those_who_submit_at_once_are_counted_together(store: JobStore) -> None:
    def submit(number: int) -> bool:
        try:
            return not store.submit(by("me", number)).existed
        except TooManyQueued:
            return False

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(submit, range(64))) == MOST
    assert len(store.recent(limit=100)) == MOST


def test_a_catalog_waits_and_loses_no_entry(store: JobStore, leases: Leases) -> None:
    catalogs = Cursor(store)
    begin(catalogs, definition(5, at_once=5))
    jobs(catalogs)
    assert catalogs.get("mirror").note == "waiting: it already has 2 queued jobs, the limit per submitter"
    seen = list[str]()
    for _ in range(5):
        at_work = jobs(catalogs)
        assert 0 < len(at_work) <= MOST
        seen.append(at_work[0])
        finish(leases, at_work[0])
    followed(store)
    assert (catalogs.get("mirror").state, catalogs.get("mirror").note) == ("done", None)
    assert len(set(seen)) == 5 and counts(catalogs.get("mirror")) == {"same": 5}


@pytest.mark.parametrize("what", ["schedule", "catalog"])
def test_a_push_follows_one_of_those_in_its_way(store: JobStore, what: str) -> None:
    oldest, _ = queued(store, {"schedule": "schedule nightly", "catalog": "webhook"}[what])
    Schedules(store).add(Schedule(name="nightly", cron="@daily", request=ask("pushed")))
    watch = Watch.model_validate({what: "nightly", "request": ask("pushed")})
    assert Pushes(store).push(watch, "1" * 40) == ("waits", oldest)
    assert texts(store.redis.hkeys(WAITING)) == [f"{oldest} {watch.what}"]


def test_a_schedule_is_left_out_and_says_why(store: JobStore) -> None:
    for number in range(MOST):
        store.submit(by("schedule nightly", number))
    schedules = Schedules(store)
    schedules.add(Schedule(name="nightly", cron="@daily", request=ask("scheduled")))
    assert schedules.run("nightly").outcome == "full"
    assert len(store.recent()) == MOST


def test_a_push_finds_a_target_free_whose_job_is_gone(store: JobStore) -> None:
    request = ask("pushed").submitted_for("webhook")
    job = store.submit(request).id
    store.redis.delete(job_key(job))  # and still the target's
    store.redis.hset(job_key(job), "key", request.key())
    carried = Pushes(store).push(Watch(catalog="mirror", request=ask("pushed")), "1" * 40)
    assert carried.outcome == "submitted" and carried.job != job


def test_a_deleted_job_leaves_nothing_behind(store: JobStore) -> None:
    job = store.submit(by("me", 0)).id
    store.cancel(job)
    store.delete([job])
    assert not store.redis.exists("reshard:queued:me")


def test_a_retry_counts_as_a_submit_does(store: JobStore) -> None:
    again = store.submit(by("me", MOST)).id
    store.cancel(again)
    oldest, newest = queued(store, "me")
    with pytest.raises(TooManyQueued, match="me already has 2 queued jobs") as refused:
        store.retry(again)
    assert refused.value.facts["job"] == oldest and store.get(again).state == "cancelled"
    store.cancel(newest)
    store.retry(again)
    assert store.get(again).state == "queued"


def test_a_retry_counts_only_where_it_is_queued_again(store: JobStore, leases: Leases, plan: Plan) -> None:
    again = planned(store, leases, plan, by("me", MOST))
    store.cancel(again)
    queued(store, "me")
    store.retry(again)
    assert store.get(again).state == "copying"
    store.cancel(again)
    with pytest.raises(TooManyQueued):
        store.retry(again, anew=True)


def test_a_catalogs_retry_waits_and_loses_no_entry(store: JobStore, leases: Leases) -> None:
    catalogs = Cursor(store)
    begin(catalogs, definition(1))
    (failed,) = jobs(catalogs)
    fail(leases, failed)
    followed(store)
    others = [store.submit(by("catalog mirror", number)).id for number in range(MOST)]
    catalogs.retry("mirror")
    followed(store)
    assert catalogs.get("mirror").todo == 1 and "waiting: " in (catalogs.get("mirror").note or "")
    store.cancel(others[0])
    catalogs.reconcile()
    assert jobs(catalogs) == [failed]
