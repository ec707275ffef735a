"""Schedules on a real broker: when they fire, by a clock of the test, and once with real processes."""

from __future__ import annotations

import threading
from datetime import UTC, datetime

import pytest

from reshard.client.operations.schedules import show_schedule
from reshard.client.operations.table import InProcess
from reshard.client.queue import Queue
from reshard.pipeline.errors import BadSchedule, ScheduleExists, ScheduleNotFound, ScheduleUnreadable
from reshard.worker.control import Control
from reshard.worker.followers.catalogs import Catalogs
from reshard.worker.followers.pushes import Pushes
from reshard.worker.followers.records import Definition
from reshard.worker.followers.schedules import ALL, DUE, KEPT, LATE, Schedule, Schedules
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.states import JobState
from reshard.worker.settings import Settings
from tests.support.models import add_friends, arrays, numbered, save_sharded
from tests.support.procs import Broker, Machine, wait_for
from tests.worker.conftest import Clock, ask, followed
from tests.worker.followers.builders import DAY, nightly


@pytest.fixture
def clock() -> Clock:
    return Clock("2026-06-01T12:00")


@pytest.fixture
def schedules(store: JobStore, clock: Clock) -> Schedules:
    return Schedules(store, clock)


def outcomes(schedules: Schedules) -> list[str]:
    """What fires now comes to."""
    return [run.outcome for _, run in schedules.fire_due()]


def finish(store: JobStore, schedules: Schedules, name: str = "nightly") -> None:
    """End the job that the schedule fired last."""
    job = schedules.get(name).runs[0].job
    assert job is not None
    store.cancel(job)


def test_it_fires_when_it_is_due_and_not_before(store: JobStore, schedules: Schedules, clock: Clock) -> None:
    due = schedules.add(nightly())
    clock.now = due - 0.01
    assert outcomes(schedules) == []
    clock.now = due
    assert outcomes(schedules) == ["fired"]
    assert outcomes(schedules) == []
    [job] = store.recent()
    assert job.request.priority == "bulk"
    assert job.request.asked_by == "schedule nightly"
    assert schedules.get("nightly").next == due + DAY


@pytest.mark.parametrize(
    "tz, cron, start, fires",
    [
        ("Europe/Berlin", "30 2 * * *", "2026-03-27T12:00", ["28 01:30", "29 01:00", "30 00:30"]),
        ("Europe/Berlin", "30 2 * * *", "2026-10-23T12:00", ["24 00:30", "25 00:30", "26 01:30"]),
        ("America/New_York", "30 2 * * *", "2026-03-06T12:00", ["07 07:30", "08 07:00", "09 06:30"]),
        ("America/New_York", "30 1 * * *", "2026-10-30T12:00", ["31 05:30", "01 05:30", "02 06:30"]),
    ],
)
def test_over_a_change_of_the_clock_each_night_fires_once(
    store: JobStore, tz: str, cron: str, start: str, fires: list[str]
) -> None:
    clock = Clock(start)
    schedules = Schedules(store, clock)
    schedules.add(nightly(cron=cron, tz=tz))
    fired = []
    for _ in range(int(3 * DAY / 600)):
        clock.now += 600
        for _, run in schedules.fire_due():
            assert run.outcome == "fired"
            fired.append(datetime.fromtimestamp(run.due, UTC).strftime("%d %H:%M"))
            finish(store, schedules)
    assert fired == fires


def test_nights_that_no_control_saw_are_run_once(store: JobStore, schedules: Schedules, clock: Clock) -> None:
    due = schedules.add(nightly())
    clock.now = due + 5 * DAY + 3600
    assert outcomes(schedules) == ["fired"]
    finish(store, schedules)
    assert outcomes(schedules) == []
    assert schedules.get("nightly").next == due + 6 * DAY


def test_nights_that_no_control_saw_are_skipped_where_it_says_so(
    store: JobStore, schedules: Schedules, clock: Clock
) -> None:
    due = schedules.add(nightly(missed="skip"))
    clock.now = due + LATE + 1
    assert outcomes(schedules) == ["missed"]
    assert store.recent() == []
    clock.now = due + DAY + LATE
    assert outcomes(schedules) == ["fired"]
    assert [run.outcome for run in schedules.get("nightly").runs] == ["fired", "missed"]


def test_a_time_at_which_the_last_job_is_still_at_work_starts_none(
    store: JobStore, schedules: Schedules, clock: Clock
) -> None:
    clock.now = schedules.add(nightly())
    assert outcomes(schedules) == ["fired"]
    [job] = store.recent()
    clock.now += DAY
    [(_, run)] = schedules.fire_due()
    assert (run.outcome, run.job) == ("overlap", job.id)
    assert len(store.recent()) == 1
    store.cancel(job.id)
    clock.now += DAY
    assert outcomes(schedules) == ["fired"]


def test_it_fires_on_although_its_last_job_was_deleted(store: JobStore, schedules: Schedules, clock: Clock) -> None:
    clock.now = schedules.add(nightly())
    assert outcomes(schedules) == ["fired"]
    [job] = store.recent()
    store.cancel(job.id)
    store.delete([job.id])
    followed(store)
    clock.now += DAY
    assert outcomes(schedules) == ["fired"]
    assert [new.id != job.id for new in store.recent()] == [True]


def test_a_target_that_another_request_has_is_left_alone(store: JobStore, schedules: Schedules, clock: Clock) -> None:
    other = store.submit(ask(size=12345)).id
    clock.now = schedules.add(nightly())
    [(_, run)] = schedules.fire_due()
    assert (run.outcome, run.job) == ("busy", other)
    store.cancel(other)
    clock.now += DAY
    assert outcomes(schedules) == ["fired"]


def test_in_a_pause_nothing_fires_and_nothing_is_made_up_for(
    store: JobStore, schedules: Schedules, clock: Clock
) -> None:
    due = schedules.add(nightly())
    schedules.pause("nightly")
    assert schedules.get("nightly").next is None
    clock.now = due + 2 * DAY + 1
    assert outcomes(schedules) == []
    assert schedules.resume("nightly") == due + 3 * DAY
    assert outcomes(schedules) == []
    clock.now = due + 3 * DAY
    assert schedules.resume("nightly") == due + 3 * DAY  # of one that is not paused changes nothing
    assert outcomes(schedules) == ["fired"]


def test_two_controls_fire_each_time_once(broker: Broker, store: JobStore, clock: Clock) -> None:
    names = [f"n{number:02}" for number in range(20)]
    clock.now = max(Schedules(store, clock).add(nightly(name, ask(name))) for name in names)
    fired: list[str] = []
    together = threading.Barrier(4)

    def control() -> None:
        with JobStore.at(broker.url) as own:
            mine = Schedules(own, clock)
            together.wait()
            fired.extend(name for name, _ in mine.fire_due())

    threads = [threading.Thread(target=control) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(fired) == names
    assert len(store.recent()) == len(names)


def test_a_control_that_looked_before_another_one_fired_does_not_fire_again(
    store: JobStore, schedules: Schedules, clock: Clock
) -> None:
    clock.now = schedules.add(nightly())
    seen = store.redis.zrangebyscore(DUE, "-inf", "+inf", withscores=True)
    assert outcomes(schedules) == ["fired"]
    finish(store, schedules)  # so that no overlap stands in its way
    with JobStore.at(store.url) as own, pytest.MonkeyPatch.context() as patch:
        patch.setattr(own.redis, "zrangebyscore", lambda *_, **__: seen)
        assert Schedules(own, clock).fire_due() == []
    assert len(store.recent()) == 1


def test_a_catalog_is_submitted_as_it_was_when_it_was_added(
    store: JobStore, schedules: Schedules, clock: Clock
) -> None:
    mirror = Definition(name="mirror", text="name: mirror\nentries:\n- {repo: a/b, to: c/d}")
    due = schedules.add(Schedule(name="nightly", cron="0 3 * * *", catalog=mirror))
    assert show_schedule(InProcess(Queue(store), "me"), "nightly").digest == mirror.digest
    clock.now = due
    assert outcomes(schedules) == ["fired"]
    catalogs = Catalogs(store)
    assert catalogs.get("mirror").definition == mirror
    clock.now += DAY
    assert outcomes(schedules) == ["overlap"]
    catalogs.cancel("mirror")
    clock.now += DAY
    assert outcomes(schedules) == ["fired"]
    assert catalogs.get("mirror").state == "expanding"
    with pytest.raises(BadSchedule):
        schedules.add(Schedule(name="nothing", cron="0 3 * * *"))


def test_a_text_is_older_only_than_a_submission_since_it_was_added_as_far_as_both_are_known(
    store: JobStore, schedules: Schedules
) -> None:
    catalogs = Catalogs(store)
    text = "name: mirror\nentries:\n- {repo: a/b, to: c/d}\n"
    added = Schedule(name="nightly", cron="0 3 * * *", catalog=Definition(name="mirror", text=text))
    schedules.add(added)
    store.redis.hincrby(KEPT, "nightly", -1000)

    def outdated_by_another_text() -> bool:
        assert catalogs.submit(Definition(name="mirror", text=f"{text}- {{repo: a/e, to: c/f}}\n"))
        catalogs.cancel("mirror")
        return schedules.get("nightly").outdated

    assert outdated_by_another_text()
    catalogs.remove("mirror")
    assert not schedules.get("nightly").outdated, "nobody knows any more what was submitted"
    assert outdated_by_another_text()


def test_by_hand_it_fires_beside_its_times(store: JobStore, schedules: Schedules) -> None:
    due = schedules.add(nightly())
    assert schedules.run("nightly").outcome == "fired"
    assert schedules.run("nightly").outcome == "overlap"
    assert schedules.run("nightly", pushed=True).outcome == "overlap"
    assert [run.outcome for run in schedules.get("nightly").runs] == ["overlap", "fired"], "and none for a push"
    assert schedules.get("nightly").next == due
    with pytest.raises(ScheduleNotFound):
        schedules.run("nobody")


def test_a_name_is_taken_once_and_free_again_when_removed(schedules: Schedules, clock: Clock) -> None:
    schedules.add(nightly())
    schedules.pause("nightly")
    with pytest.raises(ScheduleExists):
        schedules.add(nightly(cron="0 4 * * *"))
    assert schedules.get("nightly").next is None  # and still paused
    schedules.run("nightly")
    schedules.remove("nightly")
    assert schedules.all() == []
    for gone in (schedules.remove, schedules.pause, schedules.resume, schedules.get):
        with pytest.raises(ScheduleNotFound):
            gone("nightly")
    schedules.add(nightly())
    assert schedules.get("nightly").runs == ()


def test_one_that_is_removed_while_it_is_resumed_is_not_due_for_ever(store: JobStore, schedules: Schedules) -> None:
    schedules.add(nightly())
    schedules.pause("nightly")

    def removing() -> float:
        schedules.remove("nightly")
        return 0.0

    with pytest.raises(ScheduleNotFound):
        Schedules(store, removing).resume("nightly")
    assert store.redis.zcard(DUE) == 0


@pytest.mark.parametrize("fields", [{"name": "A b"}, {"name": ""}, {"cron": "daily"}, {"tz": "Nowhere"}])
def test_what_makes_no_sense_is_not_kept(schedules: Schedules, fields: dict[str, str]) -> None:
    with pytest.raises(BadSchedule):
        schedules.add(nightly(**fields))
    assert schedules.all() == []


def test_an_edit_takes_effect_and_leaves_the_past_and_a_pause_as_they_are(
    store: JobStore, schedules: Schedules, clock: Clock
) -> None:
    due = schedules.add(nightly())
    clock.now = due
    assert outcomes(schedules) == ["fired"]
    edited = nightly(cron="0 5 * * *", tz="Asia/Tokyo", request=ask("other"))
    assert schedules.edit(edited) == schedules.get("nightly").next == due + DAY - 7 * 3600
    assert schedules.get("nightly").schedule == edited and len(schedules.get("nightly").runs) == 1
    schedules.pause("nightly")
    assert schedules.edit(nightly(cron="0 6 * * *")) is None and schedules.get("nightly").next is None
    with pytest.raises(ScheduleNotFound):
        schedules.edit(nightly("other"))
    with pytest.raises(BadSchedule):
        schedules.edit(nightly(cron="daily"))
    store.redis.hset(ALL, "nightly", '{"name": "nightly", "cron": "@daily", "unheard": 1}')
    with pytest.raises(ScheduleUnreadable):
        schedules.edit(nightly())


def test_a_time_that_is_due_is_not_lost_by_an_edit_of_what_it_submits(schedules: Schedules, clock: Clock) -> None:
    clock.now = schedules.add(nightly()) + 1
    assert schedules.edit(nightly(request=ask("other"))) == clock.now - 1
    assert outcomes(schedules) == ["fired"]


@pytest.mark.parametrize("restarted", [False, True])
def test_one_that_was_set_by_a_clock_ahead_fires_at_its_next_time_once_the_clock_is_right(
    store: JobStore, schedules: Schedules, clock: Clock, restarted: bool
) -> None:
    due = schedules.add(nightly("right", ask("right")))
    schedules.add(nightly("paused", ask("paused")))
    schedules.pause("paused")
    clock.now += 365 * DAY
    schedules.add(nightly("ahead", ask("ahead")))
    assert outcomes(schedules) == ["fired"]
    clock.now -= 365 * DAY
    control = Schedules(store, clock) if restarted else schedules
    assert outcomes(control) == []
    assert {seen.schedule.name: seen.next for seen in schedules.all()} == {"ahead": due, "paused": None, "right": due}
    clock.now = due
    assert {name for name, _ in control.fire_due()} == {"ahead", "right"}


@pytest.mark.parametrize("record", ["no JSON", "[]", '{"name": "broken"}', b"\xff"])
def test_one_that_cannot_be_read_stops_no_list_of_the_others(
    store: JobStore, schedules: Schedules, caplog: pytest.LogCaptureFixture, record: str | bytes
) -> None:
    for name in ("a", "broken", "c"):
        schedules.add(nightly(name, ask(name)))
    store.redis.hset(ALL, "broken", record)
    assert [seen.schedule.name for seen in schedules.all()] == ["a", "c"]
    assert "cannot read schedule broken" in caplog.text
    assert len(Pushes(store).watches("them/model", {"main", None})) == 2
    with pytest.raises(ScheduleUnreadable, match="cannot read schedule broken"):
        schedules.get("broken")
    schedules.remove("broken")


def test_one_that_is_not_kept_yet_is_previewed(store: JobStore, schedules: Schedules) -> None:
    assert schedules.preview("new", nightly("new")) == ("fired", None)
    job = store.submit(ask().model_copy(update={"asked_by": "ada"})).id
    assert schedules.preview("new", nightly("new")) == ("fired", job)
    assert schedules.all() == []


def test_one_that_a_newer_release_wrote_does_not_stop_the_others(
    store: JobStore, schedules: Schedules, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    schedules.add(nightly("a-new"))
    clock.now = schedules.add(nightly("b-old"))
    store.redis.hset(ALL, "a-new", '{"name": "a-new", "cron": "@daily", "unheard": 1}')
    assert [name for name, _ in schedules.fire_due()] == ["b-old"]
    assert schedules.fire_due() == []
    assert caplog.text.count("cannot read schedule a-new here") == 1
    for act in (schedules.run, schedules.preview):
        with pytest.raises(ScheduleUnreadable, match="cannot read schedule a-new: unheard: unknown name"):
            act("a-new")


def test_control_fires_by_the_servers_clock(store: JobStore, leases: Leases) -> None:
    Schedules(store, Clock("2026-06-01T12:00")).add(nightly())
    seconds, _ = store.redis.time()
    Control(store, leases, Settings()).look(listen=0.1)
    [job] = store.recent()
    after = Schedules(store).get("nightly").next
    assert job.state == JobState.queued
    assert after is not None and seconds < after <= seconds + DAY + 5


@pytest.mark.slow
def test_real_processes_fire_a_missed_night_once_and_carry_it_out(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("night")
    save_sharded(folder / "model", numbered(arrays(4, 4000), 2))
    add_friends(folder / "model")
    with Broker(folder) as broker, Machine(folder, broker.url, RESHARD_ALLOWED_FOLDERS=str(folder)) as machine:
        added = machine.run(
            "schedule", "add", "nightly", str(folder / "model"), "--to", str(folder / "out"), "--cron", "0 3 * * *"
        )
        assert added.returncode == 0, added.stderr
        assert "the control process is not running" in added.stderr
        broker.kill()
        broker.start()  # what is kept outlives its broker
        with JobStore.at(broker.url) as store:
            store.redis.zincrby("reshard:schedules:due", -2 * DAY * 1000, "nightly")
            machine.worker()
            machine.control()
            machine.control()
            [job] = wait_for(store.recent, "the firing")
            wait_for(lambda: store.get(job.id).state.ended, "the job's end")
            assert store.get(job.id).state == JobState.done
            assert [found.id for found in store.recent()] == [job.id]
        assert (folder / "out" / "model.safetensors").exists()
        assert f"job {job.id}, done" in machine.run("schedule", "list").stdout
