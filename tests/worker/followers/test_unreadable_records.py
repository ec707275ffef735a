"""A catalog or a schedule that control cannot make sense of: it is said once, and everything else goes on."""

from __future__ import annotations

import json

import pytest

from reshard.client.operations.catalogs import told
from reshard.pipeline.errors import BadPlace, JobUnreadable
from reshard.worker import control as module
from reshard.worker.control import Control
from reshard.worker.fleet.fleet import FLEET
from reshard.worker.followers.catalogs import key
from reshard.worker.followers.cursor import Cursor
from reshard.worker.followers.pushes import WAITING, Pushes, Watch
from reshard.worker.followers.schedules import ALL, DUE, Schedule, Schedules
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.scripts import PREFIX, job_key
from reshard.worker.settings import Settings
from tests.support.procs import wait_for
from tests.worker.conftest import Wakes, ask, claimed, restricted
from tests.worker.followers.builders import begin, counts, definition, finish, jobs, nightly, rows


@pytest.fixture
def control(store: JobStore, leases: Leases) -> Control:
    return Control(store, leases, Settings())


def test_a_catalog_that_breaks_stops_neither_the_others_nor_the_wakes(
    store: JobStore, leases: Leases, control: Control, wakes: Wakes, caplog: pytest.LogCaptureFixture
) -> None:
    catalogs = Cursor(store)
    begin(catalogs, definition(1))
    (job,) = jobs(catalogs)
    finish(leases, job)
    store.redis.hset(key("mirror"), "failures", "what is no number")
    names = [f"other{number}" for number in range(4)]  # they are looked at in no order
    for number, name in enumerate(names):
        text = definition(1).text.replace("mirror", name).replace("us/", f"us{number}/")
        wanted = definition(1).model_copy(update={"name": name, "text": text})
        begin(catalogs, wanted, rows(wanted))
    store.submit(ask("by-hand"))
    wakes.take()
    for _ in range(3):
        control.look(listen=0.01)
    assert [len(catalogs.get(name).active) for name in names] == [1, 1, 1, 1]
    assert "interactive" in wakes.take()
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "catalog mirror failed for an unknown reason and waits"
    ]

    store.redis.hset(key("mirror"), "failures", 0)
    catalogs.reconcile()
    assert catalogs.get("mirror").state == "done"


@pytest.mark.parametrize(
    ("field", "stored"),
    [
        ("newer", True),
        ("text", "name: mirror\ndefaults: {to: 'us/{name}', newer: true}\nentries: [{repo: them/m0}]\n"),
    ],
)
def test_a_catalog_of_a_newer_release_is_left_to_another_control(
    field: str, stored: object, store: JobStore, control: Control, caplog: pytest.LogCaptureFixture
) -> None:
    catalogs, wanted = Cursor(store), definition(1)
    catalogs.submit(wanted)
    newer = json.dumps(wanted.model_dump(mode="json", exclude_defaults=True) | {field: stored})
    store.redis.hset(key("mirror"), "definition", newer)

    def look() -> str | None:
        control.look(listen=0.01)
        return catalogs.get("mirror").note

    wait_for(look, "its note")
    assert "newer control process" in (catalogs.get("mirror").note or "")
    store.redis.hset(key("mirror"), "expander_until", 0)
    for _ in range(3):
        control.look(listen=0.01)
    assert catalogs.get("mirror").state == "expanding"
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    run = catalogs.claim("mirror", "another")
    assert run and catalogs.fill("mirror", run, "another", rows(wanted))
    assert (seen := catalogs.get("mirror")).state == "running" and seen.note is None


def test_a_job_in_a_state_of_a_newer_release_is_waited_for_and_stops_nothing_else(
    store: JobStore, leases: Leases, control: Control, caplog: pytest.LogCaptureFixture
) -> None:
    catalogs, schedules = Cursor(store), Schedules(store)
    begin(catalogs, definition(2, at_once=2))
    odd, other = jobs(catalogs)
    schedules.add(Schedule(name="a", cron="0 3 * * *", request=ask("a")))
    fired = schedules.run("a").job or ""
    for job in (odd, fired):
        store.redis.hset(job_key(job), "state", "auditing")
    finish(leases, other)
    control.look(listen=0.01)
    catalogs.reconcile()
    assert jobs(catalogs) == [odd]
    assert schedules.run("a").outcome == "overlap"
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


def overwrite(store: JobStore, job: str, state: bytes | None = None) -> None:
    """As a client does that may write to all keys of the queue: the whole record, or what it says of its state."""
    with restricted(store) as client:
        client.redis.hset(job_key(job), "state", state) if state else client.redis.set(job_key(job), "x")


def test_a_schedule_fires_again_whose_last_job_a_client_wrote_over(store: JobStore, control: Control) -> None:
    schedules = Schedules(store)
    schedules.add(nightly())
    job = schedules.run("nightly").job or ""
    overwrite(store, job)
    store.redis.zadd(DUE, {"nightly": 1})
    control.look(listen=0.01)
    again, _ = schedules.get("nightly").runs
    assert again.outcome == "fired" and again.job != job


def test_a_push_goes_on_that_waits_for_a_job_that_a_client_wrote_over(store: JobStore, leases: Leases) -> None:
    Schedules(store).add(nightly())
    job = Schedules(store).run("nightly").job or ""
    claimed(leases, job, "plan")
    pushes, watch = Pushes(store), Watch(schedule="nightly", request=ask())
    assert pushes.push(watch, "1" * 40) == ("waits", job)
    overwrite(store, job)
    pushes.reconcile()
    assert store.redis.hlen(WAITING) == 0 and Schedules(store).get("nightly").runs[0].job != job


@pytest.mark.parametrize("state", [None, b"\xff"])
def test_a_catalog_comes_to_its_end_past_a_job_that_a_client_wrote_over(
    store: JobStore, leases: Leases, control: Control, state: bytes | None
) -> None:
    catalogs = Cursor(store)
    begin(catalogs, definition(3, at_once=2))
    broken, fine = jobs(catalogs)
    overwrite(store, broken, state)
    finish(leases, fine)
    catalogs.reconcile()
    (last,) = jobs(catalogs)
    finish(leases, last)
    assert jobs(catalogs) == []
    assert counts(catalogs.get("mirror")) == {"same": 2, "failed": 1}
    assert list(told(catalogs.get("mirror")).failures()) == [JobUnreadable.code]


def test_a_catalog_comes_to_its_end_past_a_job_that_has_ended_and_cannot_be_read(store: JobStore) -> None:
    catalogs = Cursor(store)
    begin(catalogs, definition(1))
    (job,) = jobs(catalogs)
    store.redis.hset(job_key(job), "notes", "x")
    store.cancel(job)
    assert jobs(catalogs) == [] and counts(catalogs.get("mirror")) == {"failed": 1}


def test_a_schedule_that_breaks_stops_neither_the_others_nor_the_wakes(
    store: JobStore, control: Control, wakes: Wakes, caplog: pytest.LogCaptureFixture
) -> None:
    schedules = Schedules(store)
    for name in ("a", "b", "c"):
        schedules.add(Schedule(name=name, cron="0 3 * * *", request=ask(name)))
        store.redis.zadd(DUE, {name: 1})
    stored = json.loads(store.redis.hget(ALL, "b") or b"")
    store.redis.hset(ALL, "b", json.dumps(stored | {"request": None}))  # it says nothing that could be submitted
    store.submit(ask("by-hand"))
    for _ in range(3):
        control.look(listen=0.01)
    assert [len(schedules.get(name).runs) for name in ("a", "b", "c")] == [1, 0, 1]
    assert "interactive" in wakes.take()
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "schedule b failed for an unknown reason and waits"
    ]


def test_what_is_logged_of_a_schedule_that_breaks_repeats_no_token(
    store: JobStore, control: Control, caplog: pytest.LogCaptureFixture
) -> None:
    Schedules(store).add(Schedule(name="a", cron="0 3 * * *", request=ask("a")))
    stored = json.loads(store.redis.hget(ALL, "a") or b"")
    stored["request"]["target"]["credential"] = "hf_secret"
    store.redis.hset(ALL, "a", json.dumps(stored))
    store.redis.zadd(DUE, {"a": 1})
    control.look(listen=0.01)
    assert "never a token" in caplog.text
    assert "hf_secret" not in caplog.text


def test_what_is_logged_of_a_catalog_that_breaks_repeats_no_token(
    store: JobStore, control: Control, caplog: pytest.LogCaptureFixture
) -> None:
    begin(Cursor(store), definition(1))
    entries = f"{PREFIX}catalog:mirror:entries"
    (number,) = store.redis.hkeys(entries)
    stored = json.loads(store.redis.hget(entries, number) or b"")
    stored["request"]["source"]["credential"] = "hf_secret"
    store.redis.hset(entries, number, json.dumps(stored))
    control.look(listen=0.01)
    assert "never a token" in caplog.text
    assert "hf_secret" not in caplog.text


def test_what_has_no_target_and_yet_a_turn_ends_as_a_failure(store: JobStore, leases: Leases) -> None:
    """As a release left it that gave such entries another turn."""
    catalogs = Cursor(store)
    (nowhere, _), (good, _) = rows(definition(2))
    lost = nowhere.model_copy(update={"request": None})
    begin(catalogs, definition(2), [(lost, BadPlace(value="us/", why="no name")), (good, None)])
    key = f"{PREFIX}catalog:mirror"
    store.redis.hdel(f"{key}:ended", 0)
    store.redis.delete(f"{key}:counts")
    store.redis.zadd(f"{key}:todo", {"0": 0})
    (job,) = jobs(catalogs)
    finish(leases, job)
    assert jobs(catalogs) == []
    seen = catalogs.get("mirror")
    assert (seen.state, counts(seen)) == ("failed", {"failed": 1, "same": 1})
    assert list(told(seen).failures()) == [BadPlace.code]


@pytest.mark.parametrize(("setting", "stored"), [("window", "at night"), ("night_bytes", "much"), ("bandwidth", "all")])
def test_a_limit_that_cannot_be_read_holds_bulk_work_alone_and_is_said_once(
    store: JobStore, control: Control, wakes: Wakes, caplog: pytest.LogCaptureFixture, setting: str, stored: str
) -> None:
    store.redis.hset(FLEET, setting, stored)
    store.submit(ask("by-hand"))
    store.submit(ask("by-schedule", priority="bulk"))
    for _ in range(3):
        control.look(listen=0.01)
    assert wakes.take() == ["interactive"]
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    store.redis.hdel(FLEET, setting)
    control.look(listen=0.01)
    assert wakes.take() == ["bulk"]


def test_a_turn_that_fails_for_an_unknown_reason_does_not_end_control(
    store: JobStore, control: Control, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    turns: list[float] = []

    def look(listen: float) -> int:
        turns.append(listen)
        if len(turns) == 2:
            control.stop()
        raise KeyError("what nobody thought of")

    monkeypatch.setattr(module, "PAUSE", 0.0)
    monkeypatch.setattr(control, "look", look)
    control.run()
    assert len(turns) == 2 and "a turn failed for an unknown reason" in caplog.text
