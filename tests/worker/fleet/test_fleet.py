"""What operators say to all workers: what may be claimed, what is handed back, and when the rest goes on."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.client.operations.fleet import limits_of
from reshard.pipeline.copying.loop import Moved
from reshard.pipeline.errors import BadLimit, WorkerNotFound
from reshard.pipeline.planning.model import Plan
from reshard.worker.control import Control
from reshard.worker.fleet import drain
from reshard.worker.fleet.fleet import DRAINED, DRAINED_KEPT, FLEET, Closed, Fleet, Limits, parse_limits
from reshard.worker.fleet.heartbeat import announce
from reshard.worker.fleet.window import Window
from reshard.worker.followers.catalogs import Catalogs
from reshard.worker.followers.records import Definition
from reshard.worker.queue.jobs import JobStore, Process
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.scripts import PREFIX, ms
from reshard.worker.queue.states import JobState
from reshard.worker.queue.wakes import DUE_AT_ONCE
from reshard.worker.settings import HAND_BACK, LEASE, Settings
from tests.support.procs import Broker, wait_for
from tests.worker.conftest import Clock, Wakes, age, another, ask, at, claimed, copied, planned, receipts

NIGHT = Window("22:00", "06:00")


@pytest.fixture
def clock() -> Clock:
    """Noon in Berlin, on a day in summer."""
    return Clock("2026-06-01T10:00")


@pytest.fixture
def fleet(store: JobStore, clock: Clock) -> Fleet:
    return Fleet(store, clock)


@pytest.fixture
def leases(store: JobStore, wakes: Wakes, fleet: Fleet) -> Leases:
    """A worker that goes by the test's clock."""
    return Leases(store, wakes, "worker-a", fleet=fleet)


# --------------------------------------------------------------------------------------------------------- decisions


@pytest.mark.parametrize(
    "limits, moment, read, expected",
    [
        (Limits(), "2026-06-01T12:00", 10**15, None),
        (Limits(window=NIGHT), "2026-06-01T12:00", 0, Closed("window", at("2026-06-01T22:00"))),
        (Limits(window=NIGHT), "2026-06-01T22:00", 10**15, None),
        (Limits(window=NIGHT, tz="Europe/Berlin"), "2026-06-01T20:00", 0, None),
        (Limits(night_bytes=100), "2026-06-01T12:00", 99, None),
        (Limits(night_bytes=100), "2026-06-01T12:00", 100, Closed("night", at("2026-06-02T00:00"))),
        (Limits(night_bytes=100, tz="Europe/Berlin"), "2026-06-01T12:00", 100, Closed("night", at("2026-06-01T22:00"))),
        (Limits(night_bytes=100, window=NIGHT), "2026-06-02T03:00", 100, Closed("night", at("2026-06-02T22:00"))),
        (Limits(night_bytes=100, window=NIGHT), "2026-06-02T12:00", 100, Closed("window", at("2026-06-02T22:00"))),
        # over both changes of Berlin's clocks the window opens at ten by the wall
        (
            Limits(window=NIGHT, tz="Europe/Berlin"),
            "2026-03-29T12:00",
            0,
            Closed("window", at("2026-03-29T20:00")),
        ),
        (
            Limits(window=NIGHT, tz="Europe/Berlin"),
            "2026-10-25T12:00",
            0,
            Closed("window", at("2026-10-25T21:00")),
        ),
    ],
)
def test_bulk_work_rests_outside_of_its_window_and_when_the_night_has_had_its_bytes(
    limits: Limits, moment: str, read: int, expected: Closed | None
) -> None:
    assert limits.closed(at(moment), read) == expected


hours = st.sampled_from([None, NIGHT, Window("09:00", "17:00"), Window("02:30", "03:30")])
zones = st.sampled_from(["UTC", "Europe/Berlin", "America/New_York"])


@given(hours, zones, st.integers(int(at("2026-01-01")), int(at("2027-12-31"))), st.integers(0, 200))
def test_a_rest_ends_when_it_says_if_nothing_more_is_read(
    window: Window | None, tz: str, moment: int, read: int
) -> None:
    limits = Limits(night_bytes=100, window=window, tz=tz)
    closed = limits.closed(moment, read)
    if closed is None:
        assert read < 100
    else:
        assert closed.until > moment
        assert limits.night(closed.until) == closed.until, "a new night, of which nothing was read"
        assert limits.closed(closed.until, 0) is None


def test_limits_are_kept_as_they_were_meant() -> None:
    given_ = {"bandwidth": "200MB/s", "night_bytes": "2TB", "window": "22:00-06:00", "tz": "Europe/Berlin"}
    assert parse_limits(given_) == {
        "bandwidth": "200000000",
        "night_bytes": "2000000000000",
        "window": "22:00-06:00",
        "tz": "Europe/Berlin",
    }
    assert parse_limits({"closed": "08:00-18:00"}) == {"window": "18:00-08:00"}
    assert parse_limits({"closed": "none", "bandwidth": "None"}) == {"window": None, "bandwidth": None}


@pytest.mark.parametrize(
    "given_, said",
    [
        ({}, "set at least one limit"),
        ({"bandwidth": "200MB"}, "bytes per second"),
        ({"bandwidth": "200Mb/s"}, "--bandwidth 200Mb/s: Mb means bits"),
        ({"bandwidth": "0MB/s"}, "greater than zero"),
        ({"bandwidth": "fast"}, "bytes per second"),
        ({"night_bytes": "-2TB"}, "--night-bytes -2TB: the size must be greater than zero"),
        ({"night_bytes": "2TB/s"}, "not a rate"),
        ({"window": "22-6"}, "is not a time window"),
        ({"window": "22:00-06:00", "closed": "08:00-18:00"}, "cannot be used together"),
        ({"tz": "Mars/Base"}, "'Mars/Base' is not a time zone"),
    ],
)
def test_what_makes_no_sense_is_refused_and_said(given_: dict[str, str], said: str) -> None:
    with pytest.raises(BadLimit, match=said):
        parse_limits(given_)


def test_a_limit_that_is_refused_changes_none(store: JobStore, fleet: Fleet) -> None:
    fleet.limit({"bandwidth": "1MB/s"})
    with pytest.raises(BadLimit):
        fleet.limit({"bandwidth": "none", "tz": "Mars/Base"})
    assert fleet.seen().limits == Limits(bandwidth=1_000_000)


def test_limits_that_are_not_named_stay_as_they_are(fleet: Fleet) -> None:
    fleet.limit({"bandwidth": "1MB/s", "window": "22:00-06:00", "tz": "Europe/Berlin"})
    assert fleet.limit({"night_bytes": "2TB"}) == Limits(1_000_000, 2 * 10**12, NIGHT, "Europe/Berlin")
    assert fleet.limit({"window": "none", "tz": "none"}) == Limits(1_000_000, 2 * 10**12)


# ------------------------------------------------------------------------------------------------------------ pause


def test_while_it_is_paused_nothing_is_claimed_and_no_wake_is_sent(
    store: JobStore, leases: Leases, wakes: Wakes, fleet: Fleet
) -> None:
    jobs = [store.submit(ask(name, priority)).id for name, priority in (("a", "interactive"), ("b", "bulk"))]
    fleet.pause("me", "the line is down")
    assert leases.due() == 0
    assert [leases.claim(job) for job in jobs] == [None, None]
    assert wakes.take() == []
    assert leases.due() == 0
    assert fleet.resume()
    assert leases.due() == 2
    assert sorted(wakes.take()) == ["bulk", "interactive"]
    assert [claimed(leases, job, "plan").attempts for job in jobs] == [1, 1]


def test_a_pause_is_known_by_its_first_hour_and_its_last_reason(fleet: Fleet, clock: Clock) -> None:
    fleet.pause("me")
    clock.now += 60
    paused = fleet.pause("you", "the line is down")
    assert (paused.since, paused.by, paused.reason) == (clock.now - 60, "you", "the line is down")
    assert fleet.pause("a third") == paused
    assert fleet.resume()
    assert not fleet.resume()
    assert fleet.paused() is None


def test_a_copy_is_told_of_a_pause_to_give_way_and_costs_no_attempt(
    store: JobStore, leases: Leases, plan: Plan, fleet: Fleet
) -> None:
    job = planned(store, leases, plan)
    claimed(leases, job, "check")
    copy = claimed(leases, job, "group:00000")
    assert leases.renew(copy, 0, progress=True) == "ok"
    fleet.pause("me")
    assert leases.renew(copy, 0, progress=True) == "yield"
    assert leases.seal(copy, receipts(plan, 0)[:1], Moved()) == "ok"
    assert leases.release(copy, "yield") == "ok"
    assert leases.claim(job) is None
    fleet.resume()
    again = claimed(leases, job, "group:00000")
    assert again.attempts == 1
    assert leases.receipts(job, [shard.digest for shard in plan.shards]), "what was sealed stays"


def test_a_worker_that_died_in_a_pause_is_missed_after_it(
    store: JobStore, leases: Leases, wakes: Wakes, fleet: Fleet
) -> None:
    job = store.submit(ask()).id
    claimed(leases, job, "plan")
    fleet.pause("me")
    age(store, job, LEASE + 1)
    assert leases.due() == 0
    fleet.resume()
    assert leases.due() == 1
    assert claimed(another(store), job, "plan").attempts == 2


def test_control_hears_at_once_that_it_goes_on(store: JobStore, leases: Leases, fleet: Fleet) -> None:
    control = Control(store, leases, Settings())
    store.submit(ask())
    fleet.pause("me")
    assert control.look(listen=1) == 0
    fleet.resume()
    assert control.look(listen=0) == 1  # which returns at the bell, and without one never


# ------------------------------------------------------------------------------------------------- window and night


def test_outside_of_the_window_bulk_work_waits_and_interactive_work_does_not(
    store: JobStore, leases: Leases, wakes: Wakes, fleet: Fleet, clock: Clock
) -> None:
    bulk = store.submit(ask("bulk", "bulk")).id
    quick = store.submit(ask("quick")).id
    fleet.limit({"window": "22:00-06:00", "tz": "Europe/Berlin"})
    assert leases.due() == 1
    assert wakes.take() == ["interactive"]
    claimed(leases, quick, "plan")
    assert leases.claim(bulk) is None
    assert fleet.seen().deferred == 1
    assert fleet.seen().closed == Closed("window", at("2026-06-01T20:00"))

    clock.set("2026-06-01T20:00")
    assert leases.due() == 1
    assert wakes.take() == ["bulk"]
    claimed(leases, bulk, "plan")
    assert fleet.seen().deferred == 0


def test_a_copy_outside_of_the_window_gives_way_and_goes_on_the_next_night(
    store: JobStore, leases: Leases, wakes: Wakes, plan: Plan, fleet: Fleet, clock: Clock
) -> None:
    job = planned(store, leases, plan, ask("bulk", "bulk"))
    quick = planned(store, leases, plan, ask("quick"))
    claimed(leases, job, "check")
    copy = claimed(leases, job, "group:00000")
    claimed(leases, quick, "check")
    other = claimed(leases, quick, "group:00000")
    fleet.limit({"window": "22:00-06:00", "tz": "Europe/Berlin"})
    assert leases.renew(copy, 0, progress=True) == "yield"
    assert leases.renew(other, 0, progress=True) == "ok"
    leases.release(copy, "yield")
    assert leases.claim(job) is None
    clock.set("2026-06-01T21:00")
    wakes.take()
    assert leases.due() >= 1
    assert claimed(leases, job, "group:00000").attempts == 1


def test_a_job_whose_commit_was_begun_is_carried_to_its_end(
    store: JobStore, leases: Leases, plan: Plan, fleet: Fleet
) -> None:
    job = copied(store, leases, plan, ask("bulk", "bulk"))
    publish = claimed(leases, job, "publish")
    leases.begin(publish)
    fleet.limit({"window": "22:00-06:00"})
    age(store, job, LEASE + 1)
    publish = claimed(leases, job, "publish")
    assert leases.done(publish, {}) == "ok"
    claimed(leases, job, "confirm")


def test_a_commit_that_was_begun_after_the_window_shut_is_missed_when_its_worker_dies(
    store: JobStore, leases: Leases, wakes: Wakes, plan: Plan, fleet: Fleet
) -> None:
    job = copied(store, leases, plan, ask("bulk", "bulk"))
    publish = claimed(leases, job, "publish")
    fleet.limit({"window": "22:00-06:00"})
    age(store, job, LEASE + 1)
    wakes.take()
    assert leases.due() == 0
    assert fleet.seen().deferred == 1
    assert leases.renew(publish, 0, progress=True) == "yield"
    assert leases.begin(publish) == "ok"
    assert fleet.seen().deferred == 0
    age(store, job, LEASE - 1)
    assert leases.due() == 0
    age(store, job, 2)
    assert leases.due() == 1
    assert wakes.take() == ["bulk"]
    assert claimed(another(store), job, "publish").state == JobState.committing


def test_a_limit_that_is_taken_off_lets_bulk_work_go_on_at_once(
    store: JobStore, leases: Leases, fleet: Fleet, wakes: Wakes
) -> None:
    job = store.submit(ask("bulk", "bulk")).id
    fleet.limit({"window": "22:00-06:00"})
    control = Control(store, leases, Settings())
    store.redis.delete(f"{PREFIX}bell")
    assert control.look(listen=1) == 0
    fleet.limit({"window": "none"})
    assert control.look(listen=0) == 1  # which returns at the bell, and without one never
    claimed(leases, job, "plan")


def test_of_many_that_waited_the_oldest_go_first_and_interactive_jobs_before_them(
    store: JobStore, leases: Leases, fleet: Fleet, wakes: Wakes
) -> None:
    fleet.limit({"window": "22:00-06:00"})
    bulk = []
    for number in range(DUE_AT_ONCE + 20):
        bulk.append(store.submit(ask(f"bulk{number}", "bulk")).id)
        assert leases.due() == 0
    fleet.limit({"window": "none"})
    quick = store.submit(ask("quick")).id
    assert leases.due() == DUE_AT_ONCE
    sent = [job for _, job in wakes.sent]
    assert set(sent) == {quick, *bulk[: DUE_AT_ONCE - 1]}
    wakes.take()
    assert leases.due() == 21
    assert {job for _, job in wakes.sent} == set(bulk[DUE_AT_ONCE - 1 :])


def test_a_job_that_is_cancelled_while_it_waits_is_not_woken(store: JobStore, leases: Leases, fleet: Fleet) -> None:
    job = store.submit(ask("bulk", "bulk")).id
    fleet.limit({"window": "22:00-06:00"})
    assert leases.due() == 0
    assert fleet.seen().deferred == 1
    store.cancel(job)
    assert fleet.seen().deferred == 0
    store.delete([job])
    fleet.limit({"window": "none"})
    assert leases.due() == 0


def test_when_the_night_has_had_its_bytes_copies_end_their_file_and_no_other_is_begun(
    store: JobStore, leases: Leases, plan: Plan, fleet: Fleet, clock: Clock
) -> None:
    job = planned(store, leases, plan, ask("bulk", "bulk"))
    claimed(leases, job, "check")
    copy = claimed(leases, job, "group:00000")
    fleet.limit({"night_bytes": "1MB", "tz": "Europe/Berlin"})
    fleet.look()
    fleet.note(999_999, bulk=True)
    fleet.note(10**9, bulk=False)
    assert not fleet.closed()
    fleet.note(1, bulk=True)
    assert fleet.closed()
    assert leases.renew(copy, 0, progress=True) == "ok"
    assert leases.claim(job) is None
    seen = fleet.seen()
    assert (seen.read, seen.closed) == (1_000_000, Closed("night", at("2026-06-01T22:00")))
    leases.seal(copy, receipts(plan, 0), Moved())
    assert leases.done(copy, [[], []]) == "ok"
    assert leases.claim(job) is None

    clock.set("2026-06-01T22:00")
    assert fleet.seen().read == 0
    assert leases.due() == 1
    assert claimed(leases, job, "group:00001").attempts == 1


def test_a_pause_and_the_windows_end_take_copies_back_also_when_the_night_has_had_its_bytes(
    store: JobStore, leases: Leases, plan: Plan, fleet: Fleet, clock: Clock
) -> None:
    job = planned(store, leases, plan, ask("bulk", "bulk"))
    claimed(leases, job, "check")
    copy = claimed(leases, job, "group:00000")
    clock.set("2026-06-01T23:00")
    fleet.limit({"night_bytes": "1MB", "window": "22:00-06:00"})
    fleet.look()
    fleet.note(1_000_000, bulk=True)
    assert leases.renew(copy, 0, progress=True) == "ok"
    fleet.pause("me")
    assert leases.renew(copy, 0, progress=True) == "yield"
    fleet.resume()
    assert leases.renew(copy, 0, progress=True) == "ok"
    clock.set("2026-06-02T06:00")
    assert leases.renew(copy, 0, progress=True) == "yield"


def test_a_higher_limit_lets_the_same_night_go_on(store: JobStore, leases: Leases, fleet: Fleet) -> None:
    job = store.submit(ask("bulk", "bulk")).id
    fleet.look()
    fleet.note(10**9, bulk=True)
    fleet.limit({"night_bytes": "1GB"})
    assert leases.claim(job) is None
    fleet.limit({"night_bytes": "2GB"})
    assert leases.claim(job) is not None


def test_where_the_zone_is_not_known_bulk_work_is_left_to_others(
    store: JobStore, leases: Leases, fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    bulk, quick = store.submit(ask("bulk", "bulk")).id, store.submit(ask("quick")).id
    store.redis.hset(FLEET, "tz", "Mars/Base")
    assert leases.claim(bulk) is leases.claim(bulk) is None
    assert leases.claim(quick) is not None
    assert caplog.text.count("'Mars/Base' is not a time zone") == 1


def test_catalogs_are_not_expanded_while_bulk_work_rests(store: JobStore, leases: Leases, fleet: Fleet) -> None:
    text = "name: mirror\ndefaults: {to: 'us/{name}', size: 1MB}\nentries: [{repo: them/model}]\n"
    Catalogs(store).submit(Definition(name="mirror", text=text))
    fleet.limit({"window": "22:00-06:00"})
    Control(store, leases, Settings()).look(listen=1)
    assert store.redis.hget(f"{PREFIX}catalog:mirror", "expander") is None
    fleet.limit({"window": "none"})
    assert not fleet.closed()
    fleet.limit({"window": "22:00-06:00"})
    assert fleet.closed()
    fleet.limit({"window": "none"})
    fleet.pause("me")
    assert fleet.closed()


def test_how_fast_copies_are_is_known(store: JobStore) -> None:
    fleet = Fleet(store)  # what is read is counted by the server's clock
    fleet.look()
    fleet.note(50_000_000, bulk=False)
    fleet.note(50_000_000, bulk=True)
    assert 5_000_000 < fleet.seen().rate <= 10_000_000


# ------------------------------------------------------------------------------------------------------------ drain


def lives(store: JobStore, name: str, kind: str = "worker") -> None:
    announce(store.redis, Process(name, kind, "1", name.partition(":")[0], 1, 2, 0.0, False))


def test_a_drained_worker_claims_nothing_and_leaves_it_to_others(store: JobStore, wakes: Wakes, fleet: Fleet) -> None:
    lives(store, "here:7")
    job = store.submit(ask()).id
    child = Leases(store, wakes, "here:7.8", fleet=fleet)
    assert fleet.drain("here") == "here:7"
    assert child.claim(job) is None
    assert wakes.take() == [], "a wake for itself would come back at once"
    age(store, job, HAND_BACK)
    assert child.due() == 1
    assert another(store, "here:77.8").claim(job) is not None


def test_a_drained_worker_takes_work_again_when_told_so(store: JobStore, wakes: Wakes, fleet: Fleet) -> None:
    lives(store, "here:7")
    job = store.submit(ask()).id
    fleet.drain("here:7")
    assert fleet.seen().drained == {"here:7"}
    assert fleet.undrain("here:7") == ("here:7", True)
    assert fleet.undrain("here:7") == ("here:7", False)
    claimed(Leases(store, wakes, "here:7.8", fleet=fleet), job, "plan")


@pytest.mark.parametrize(
    "name, said",
    [
        ("there", "no worker matches there (workers: here:7, here:8, other:1)"),
        ("here", "more than one worker matches here (workers: here:7, here:8)"),
        ("", "no worker matches ''"),
        ("control@here:1", "no worker matches control@here:1"),
    ],
)
def test_a_worker_that_is_not_one_is_refused_with_those_there_are(
    store: JobStore, fleet: Fleet, name: str, said: str
) -> None:
    for worker in ("here:7", "here:8", "other:1"):
        lives(store, worker)
    lives(store, "control@here:1", "control")
    with pytest.raises(WorkerNotFound, match=re.escape(said)):
        fleet.drain(name)
    assert fleet.seen().drained == set()


def test_without_workers_it_says_so(fleet: Fleet) -> None:
    with pytest.raises(WorkerNotFound, match="workers: none"):
        fleet.drain("here")


def test_who_was_drained_and_is_gone_is_forgotten_after_a_day(store: JobStore, fleet: Fleet) -> None:
    lives(store, "here:7")
    fleet.drain("here:7")
    store.redis.delete(f"{PREFIX}process:here:7")
    lives(store, "here:8")
    fleet.drain("here:8")
    assert set(store.redis.hkeys(DRAINED)) == {b"here:7", b"here:8"}, "it may only be silent for a moment"
    for worker in ("here:7", "here:8"):
        store.redis.hincrby(DRAINED, worker, -ms(DRAINED_KEPT) - 1)
    fleet.drain("here:8")
    assert store.redis.hkeys(DRAINED) == [b"here:8"]


def test_a_new_process_with_the_pid_of_a_drained_one_takes_work(
    store: JobStore, fleet: Fleet, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESHARD_BROKER_URL", broker.url)  # the module cannot do without
    from reshard.worker import app

    name = f"{socket.gethostname()}:{os.getpid()}"
    store.redis.hset(DRAINED, name, 1)
    monkeypatch.setattr(app, "broker_url", lambda settings: broker.url)
    timer = SimpleNamespace(call_repeatedly=lambda *arguments: None)
    app.Drained(None).start(SimpleNamespace(timer=timer, consumer=None))
    assert not fleet.drained(name)


def test_the_time_to_drain_counts_anew_each_time() -> None:
    drain.from_afar(True)
    wait_for(lambda: drain.overdue(0.2), "the end of the first time")
    drain.from_afar(False)
    assert not drain.wanted()
    assert not drain.overdue(0.2)
    drain.from_afar(True)
    assert drain.wanted()
    assert not drain.overdue(0.2)
    drain.from_afar(False)


def test_what_each_worker_is_at_is_known(store: JobStore, wakes: Wakes, plan: Plan, fleet: Fleet) -> None:
    child = Leases(store, wakes, "here:7.8", fleet=fleet)
    job = planned(store, child, plan)
    claimed(child, job, "check")
    claimed(another(store, "here:9.10"), job, "group:00000")
    assert fleet.claims_by_worker() == {"here:7": [f"{job} check"], "here:9": [f"{job} group:00000"]}


def test_all_of_it_is_one_document(store: JobStore, fleet: Fleet, clock: Clock) -> None:
    lives(store, "here:7")
    fleet.pause("me", "why")
    fleet.drain("here:7")
    fleet.limit({"bandwidth": "1MB/s", "night_bytes": "5MB", "window": "22:00-06:00", "tz": "Europe/Berlin"})
    assert limits_of(replace(fleet.seen(), rate=0.0)).model_dump(mode="json") == {
        "paused": {"since": clock.now, "by": "me", "reason": "why"},
        "limits": {"bandwidth": 1_000_000, "night_bytes": 5_000_000, "window": "22:00-06:00", "tz": "Europe/Berlin"},
        "bulk_rests": {"why": "window", "until": at("2026-06-01T20:00")},
        "night": at("2026-05-31T20:00"),
        "read_in_the_night": 0,
        "bytes_a_second": 0,
        "held": 0,
        "drained": ["here:7"],
        "resting": {},
    }
