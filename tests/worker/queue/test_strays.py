"""A job that is in no place of the queue is found again, and a key that a client wrote over stops no wakes."""

from __future__ import annotations

import pytest
import redis

from reshard.pipeline.doctor.probes import Probe
from reshard.pipeline.request import Request
from reshard.worker.control import Control
from reshard.worker.fleet.fleet import DRAINED, FLEET, RESTING
from reshard.worker.probes import queue
from reshard.worker.queue.events import TOTALS
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.scripts import job_key
from reshard.worker.queue.wakes import BELL, PLACES, QUEUES, SHARES, strays
from reshard.worker.settings import Settings
from tests.worker.conftest import Wakes, ask, claimed, restricted


@pytest.fixture
def control(store: JobStore, leases: Leases) -> Control:
    return Control(store, leases, Settings())


def said(store: JobStore) -> list[Probe]:
    """What doctor says of the queue."""
    return [probe for probe in queue(Settings(broker_url=store.url)) if probe.name == "queue"]


def test_a_job_whose_submit_was_cut_off_is_rung_again(
    store: JobStore, leases: Leases, control: Control, wakes: Wakes
) -> None:
    """It may tell nothing of what it does, as a client of an earlier release that may not write to the stream."""
    refused = pytest.raises(redis.ResponseError, match="(?i)noperm|permission|can't access")
    with restricted(store, "reshard:[^et]*") as client, refused:
        client.submit(ask())
    (job,) = strays(store.redis)
    assert store.submit(ask()).id == job, "it has the target"
    assert [probe.says for probe in said(store)] == [f"1 job in no queue, such as {job}"]
    assert control.look(listen=0.01) == 1 and wakes.take() == ["interactive"]
    claimed(leases, job, "plan")
    assert strays(store.redis) == [] and said(store) == []


@pytest.mark.parametrize("key", (*PLACES, *QUEUES, BELL, FLEET, DRAINED, RESTING, TOTALS))
def test_a_key_of_the_queue_that_a_client_wrote_over_is_removed(
    store: JobStore, control: Control, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    control.look(listen=0.01)  # and so it looks for strays no sooner than in a minute, but for what is removed
    jobs = {store.submit(ask(priority, priority)).id for priority in ("interactive", "bulk")}
    store.redis.set(key, "x")
    assert control.look(listen=0.01) == len(jobs)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        f"removed {key}, which a client had overwritten"
    ]
    later = store.submit(ask("later")).id
    assert control.look(listen=0.01) == 1
    assert {job.id for job in store.recent()} == jobs | {later} and strays(store.redis) == []


OF_SUBMITS = (
    *(f"reshard:{key}" for key in ("active", "last_turn", "jobs:queued", "jobs", "interactive:serves")),
    *(f"reshard:{key}:ada" for key in ("queued", "interactive:waiting")),
)


@pytest.mark.parametrize("key", OF_SUBMITS)
def test_whatever_a_client_wrote_over_jobs_are_submitted_begun_and_cancelled(
    store: JobStore, leases: Leases, control: Control, key: str
) -> None:
    first = store.submit(of_ada("first")).id
    store.redis.set(key, "x")
    control.look(listen=0.01)
    jobs = [store.submit(of_ada(name)).id for name in "ab"]
    assert [store.get(job).state for job in jobs] == ["queued"] * 2
    claimed(leases, jobs[0], "plan")
    for job in (first, *jobs):
        store.cancel(job)
    assert [store.get(job).state for job in (first, *jobs)] == ["cancelled"] * 3
    assert store.submit(of_ada("a")).id not in jobs, "the target is free"


@pytest.mark.parametrize("gone", [True, False])
def test_a_record_that_a_client_took_away_keeps_nobody_from_its_target(
    store: JobStore, leases: Leases, gone: bool
) -> None:
    broken = store.submit(of_ada("m")).id
    store.redis.delete(job_key(broken))
    if not gone:
        store.redis.set(job_key(broken), "x")
    other, again = (store.submit(of_ada(name)).id for name in ("other", "m"))
    assert again != broken and store.get(again).state == store.get(other).state == "queued"
    claimed(leases, again, "plan")
    store.delete([broken])
    assert broken not in strays(store.redis) and store.left() == 2


def of_ada(name: str) -> Request:
    return ask(name).model_copy(update={"asked_by": "ada"})


def test_doctor_says_that_a_client_wrote_over_a_key_of_the_queue(store: JobStore) -> None:
    store.redis.set(PLACES[0], "x")
    assert [probe.warning for probe in said(store)] == ["jobs are waiting: `reshard control` removes that key"]


@pytest.mark.parametrize("part", (None, "units", "todo"))
@pytest.mark.parametrize("due", (0, 10**15))
def test_a_job_whose_key_a_client_wrote_over_holds_up_no_other(
    store: JobStore,
    control: Control,
    part: str | None,
    due: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken, fine = (store.submit(ask(name)).id for name in ("broken", "fine"))
    store.redis.set(job_key(broken, part), "x")
    store.redis.zadd("reshard:interactive:due", {broken: due})
    assert control.look(listen=0.01) == 1
    assert strays(store.redis) == [broken] and said(store)[0].state == "warning"
    store.redis.zrem("reshard:interactive:waked", fine)
    monkeypatch.setattr("reshard.worker.control.RECONCILE", 0.0)  # as a minute later
    assert control.look(listen=0.01) == 1
    assert f"job {broken} cannot run" in caplog.text


@pytest.mark.parametrize("turn", ["x", "nan", "1e400"])
def test_a_job_whose_turn_a_client_wrote_over_comes_first_and_holds_up_no_other(
    store: JobStore, leases: Leases, control: Control, wakes: Wakes, turn: str
) -> None:
    fine, broken = (store.submit(ask(name)).id for name in ("fine", "broken"))
    with restricted(store) as client:
        client.redis.hset(job_key(broken), "turn", turn)
    assert control.look(listen=0.01) == 2 and {job for _, job in wakes.sent} == {broken, fine}
    assert leases.first(QUEUES[0]) == broken
    claimed(leases, broken, "plan")
    assert control.look(listen=0.01) == 0 and strays(store.redis) == []


@pytest.mark.parametrize("share", ["x", "0", "-1", "nan"])
def test_a_share_that_a_client_wrote_over_counts_as_none(store: JobStore, control: Control, share: str) -> None:
    with restricted(store) as client:
        client.redis.hset(SHARES, "ada", share)
        jobs = [client.submit(of_ada(f"a{number}")).id for number in range(2)]
    turns = [float(store.redis.hget(job_key(job), "turn") or 0) for job in jobs]
    assert 0 < turns[0] < turns[1] < 2**53
    assert control.look(listen=0.01) == 2


def test_a_job_is_found_again_in_any_state(store: JobStore, leases: Leases, control: Control, wakes: Wakes) -> None:
    job = store.submit(ask()).id
    claimed(leases, job, "plan")
    store.redis.delete(*PLACES)
    wakes.take()
    assert control.look(listen=0.01) == 0, "its lease has not ended"
    assert strays(store.redis) == [] and store.redis.zscore("reshard:interactive:due", job)
