"""What is done to many jobs takes few exchanges with the broker, each of which may wait for its disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from reshard.client.operations import jobs as operations
from reshard.client.operations.table import InProcess
from reshard.client.queue import Queue
from reshard.worker.queue import jobs as queued
from reshard.worker.queue.jobs import JobStore, broker_errors, open_redis
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.states import JobState
from tests.support.procs import Broker
from tests.worker.conftest import Wakes, ask
from tests.worker.followers.builders import finish

JOBS = 250  # more than one exchange takes
EXCHANGES = JOBS // 5


class Counted(redis.Connection):
    exchanges = 0

    def send_packed_command(self, *arguments: Any, **more: Any) -> None:
        Counted.exchanges += 1
        super().send_packed_command(*arguments, **more)


@pytest.fixture
def counted(broker: Broker, store: JobStore) -> Iterator[InProcess]:
    """A session on the store's broker whose exchanges with it are counted."""
    client = open_redis(broker.url)
    client.connection_pool.connection_class = Counted
    with broker_errors(broker.url):
        yield InProcess(Queue(JobStore(client, broker.url)), "me")
    client.close()


@pytest.fixture
def many(store: JobStore) -> list[str]:
    by = {"asked_by": "zed"}
    return [store.submit(ask(f"m{number}").model_copy(update=by)).id for number in range(JOBS)]


def cancel_all(store: JobStore, ids: list[str]) -> None:
    assert store.cancel_each(ids) == [JobState.queued] * len(ids)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("act", ["cancel", "retry", "overwrite", "delete"])
def test_what_is_done_to_many_jobs_takes_few_exchanges(
    store: JobStore, counted: InProcess, many: list[str], act: str, dry_run: bool, named: bool
) -> None:
    if act != "cancel":
        cancel_all(store, many)
    chosen = {"dry_run": dry_run} | ({"jobs": many} if named else {"by": "zed"})
    Counted.exchanges = 0
    if act == "delete":
        ids = operations.delete_jobs(counted, operations.Chosen(**chosen)).ids
    elif act == "cancel":
        ids = operations.cancel_jobs(counted, operations.Chosen(**chosen)).ids
    else:
        again = operations.ChosenAgain(**chosen, overwrite=act == "overwrite")
        ids = operations.retry_jobs(counted, again).ids
    assert Counted.exchanges <= EXCHANGES
    assert sorted(ids) == sorted(many)
    if not dry_run:
        ends = {"cancel": {JobState.cancelled: JOBS}, "delete": {}}.get(act, {JobState.queued: JOBS})
        assert {state: number for state, number in store.counts().items() if number} == ends


def test_many_refusals_take_few_exchanges_and_say_what_is_in_the_way(
    store: JobStore, counted: InProcess, many: list[str]
) -> None:
    cancel_all(store, many)
    others = [store.submit(ask(f"m{number}", size=2000)).id for number in range(JOBS)]
    Counted.exchanges = 0
    done = operations.retry_jobs(counted, operations.ChosenAgain(jobs=[*many, "nowhere", many[0]]))
    assert Counted.exchanges <= EXCHANGES
    assert not done.ids and [one.id for one in done.refused] == [*many, "nowhere"]
    said = [one.error.error() for one in done.refused]
    assert [(one.code, one.facts["job"]) for one in said[:-1]] == [("job.target_busy", other) for other in others]
    assert [one.facts["target"] for one in said[:-1]] == [str(store.get(id).request.target) for id in many]
    assert said[-1].code == "job.not_found"


def test_a_job_that_two_names_begin_is_acted_on_once(store: JobStore, counted: InProcess, many: list[str]) -> None:
    cancel_all(store, many)
    done = operations.retry_jobs(counted, operations.ChosenAgain(jobs=[many[0], many[0][:8]]))
    assert (done.ids, done.refused) == ([many[0]], [])


def test_a_retry_by_filter_reaches_the_jobs_behind_many_runs_of_one_request(
    store: JobStore, counted: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "CHOSEN_MAX", 3)
    monkeypatch.setattr(queued, "SEARCHED", 2)  # so that the runs are on several pages

    def cancelled(name: str) -> str:
        id = store.submit(ask(name)).id
        store.cancel(id)
        time.sleep(0.005)  # or two end in one millisecond
        return id

    others = [cancelled(name) for name in ("m1", "m2", "m3")]
    runs = [cancelled("nightly") for _ in range(5)]
    last = [runs[-1], *reversed(others)]
    wanted = operations.ChosenAgain(state=[JobState.cancelled])
    assert operations.retry_jobs(counted, wanted).ids == last[:3]
    assert operations.retry_jobs(counted, wanted).ids == last[3:]
    assert operations.retry_jobs(counted, wanted).ids == []


def test_of_jobs_with_the_same_request_a_filter_takes_the_last_to_end_of_those_that_match(
    store: JobStore, counted: InProcess
) -> None:
    leases, old = Leases(store, Wakes(), "worker-a"), store.submit(ask()).id
    store.cancel(old)
    new = store.submit(ask()).id
    finish(leases, new)
    assert operations.retry_jobs(counted, operations.ChosenAgain(all=True, dry_run=True)).ids == [old]
