"""Followers of the stream are killed at every event of a night, and it ends as a night without kills does."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any
from uuid import uuid4

import pytest

from reshard.worker.followers.catalogs import LOOKED_AT, SUCCESS, TROUBLE
from reshard.worker.followers.counters import Counters
from reshard.worker.followers.cursor import Cursor
from reshard.worker.followers.notices import NOTICES, Notifier, Url
from reshard.worker.followers.outcomes import Outcomes
from reshard.worker.followers.schedules import Schedule, Schedules
from reshard.worker.followers.spending import DAY, Spending, Spent, spent
from reshard.worker.queue import events
from reshard.worker.queue.events import EVENTS, TOTALS, Event, Follower, Reader, follow
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.scripts import server_ms
from reshard.worker.queue.states import JobState
from tests.support.procs import Broker, in_a_process, kill_this_process, kill_this_process_at
from tests.worker.conftest import Wakes, ask
from tests.worker.followers.builders import counts, definition, fail, finish, rows

FAILING = {"us/m1", "us/m3", "us/alone"}
# Kinds of events that some follower acts on.
CONSEQUENTIAL = {"ended", "catalog", "fired", "failed", "retried", "moved", "spent"}
GROUPS = {"catalogs", "outcomes", "counters", "spending"}

Die = Callable[[], None]


class Dying:
    """A follower that dies over its first event of consequence: before it handles it, or when its effect is written."""

    def __init__(self, follower: Follower, before: bool) -> None:
        self.group = follower.group
        self._follower, self._before = follower, before

    def handle(self, events: Sequence[Event], reader: Reader) -> None:
        for event in events:
            if event.kind in CONSEQUENTIAL:
                self._die_over(event, reader)
            self._follower.handle([event], reader)

    def _die_over(self, event: Event, reader: Reader) -> None:
        if self._before:
            kill_this_process()
        reader.acknowledge = lambda *_: kill_this_process()  # type: ignore[method-assign]
        self._follower.handle([event], reader)
        kill_this_process()  # it was acknowledged in one transaction with its effect


def all_of(store: JobStore) -> tuple[Follower, ...]:
    return Cursor(store), Outcomes(), Counters(store), Spending(store.redis)


def left(store: JobStore) -> bool:
    """Whether a follower has something to do."""
    groups = {group["name"].decode(): group for group in store.redis.xinfo_groups(EVENTS)}
    return groups.keys() != GROUPS or any(group["pending"] or group["lag"] for group in groups.values())


# ---------------------------------------------------------------------------------------- how a night is followed


def undisturbed(url: str) -> None:
    def work(store: JobStore) -> None:
        for follower in all_of(store):
            follow(follower, Reader(store.redis, follower.group, take_over=0))

    assert in_a_process(url, work) == 0


def killed_at_each_event(url: str) -> None:
    """Of three processes that take an event, one dies before and one after it is written what it does."""
    for number, before in ((number, before) for number in range(len(GROUPS)) for before in (True, False, None)):

        def work(store: JobStore, number: int = number, before: bool | None = before) -> None:
            follower = all_of(store)[number]
            reader = Reader(store.redis, follower.group, take_over=0)
            if before is not None:
                follow(Dying(follower, before), reader)
            elif taken := reader.take():
                follower.handle(taken[:1], reader)

        assert in_a_process(url, work) in {0, signal.SIGKILL}


def killed_at_each_command(url: str, numbers: Iterator[int] = count()) -> None:  # noqa: B008
    """Each process dies at another of the commands that it sends to Redis: the first, the second, and so on."""

    def work(store: JobStore) -> None:
        kill_this_process_at(next(numbers) % 60)
        for follower in all_of(store):
            follow(follower, Reader(store.redis, follower.group, take_over=0))

    assert in_a_process(url, work) in {0, signal.SIGKILL}
    next(numbers)


# ------------------------------------------------------------------------------------------------------- the night


def night(broker: Broker, store: JobStore, followed: Callable[[str], None]) -> dict[str, Any]:
    """A schedule fires a catalog, of which two models fail, and another a job that fails; what is left of it all.

    One of the two is brought back by itself.
    """
    store.redis.flushall()
    leases, catalogs, schedules = Leases(store, Wakes(), "worker"), Cursor(store), Schedules(store)
    Notifier(store, [Url("http://127.0.0.1:1/")]).listen()
    schedules.add(Schedule(name="nightly", cron="0 3 * * *", catalog=definition(4, at_once=2)))
    schedules.add(Schedule(name="alone", cron="0 3 * * *", request=ask("alone")))
    for good in (False, True):
        for name in ("nightly", "alone"):
            assert schedules.run(name).outcome == "fired"
        token = uuid4().hex
        found = rows(definition(4), source=f"source {good}")
        assert catalogs.fill("mirror", catalogs.claim("mirror", token), token, found)
        carry_out(broker, store, leases, set() if good else FAILING, followed)
        for job in store.recent([JobState.failed]):
            if job.request.target.repo == "us/m1" and not good:
                store.retry(job.id)
        carry_out(broker, store, leases, FAILING - {"us/m1"}, followed)
    return end_state(store)


def carry_out(
    broker: Broker, store: JobStore, leases: Leases, failing: set[str], followed: Callable[[str], None]
) -> None:
    """All jobs that there are and that followers ask for."""
    while left(store):
        followed(broker.url)
        for job in sorted(store.recent([JobState.queued]), key=lambda job: job.request.target.repo):
            (fail if job.request.target.repo in failing else finish)(leases, job.id)


def counted(store: JobStore) -> Counter[str]:
    """All totals; of the times how many there are, whatever they took."""
    found: Counter[str] = Counter()
    for name, number in store.redis.hgetall(TOTALS).items():
        what, _, last = name.decode().rpartition(":")
        if last != "sum":
            found[what if what.startswith("times:") else name.decode()] += int(number)
    return found


def spent_lately(store: JobStore) -> list[Spent]:
    day = server_ms(store.redis) // 1000 // DAY
    return sorted(spent(store.redis, [day - 1, day]), key=lambda one: (one.submitter, one.catalog, one.day))


def end_state(store: JobStore) -> dict[str, Any]:
    """All that followers write, without the times and the ids, which differ from night to night."""
    repos = {job.id: job.request.target.repo for job in store.recent(limit=100)}
    seen = Cursor(store).get("mirror")
    told = [{k.decode(): v.decode() for k, v in fields.items()} for _, fields in store.redis.xrange(NOTICES)]
    return {
        "run": (seen.state, seen.todo, seen.active, counts(seen), [(repo, e.outcome) for repo, e in seen.ended]),
        "jobs": sorted((repos[job.id], job.state) for job in store.recent(limit=100)),
        "totals": counted(store),
        "spent": [(one.submitter, one.catalog, one.counts["jobs"]) for one in spent_lately(store)],
        "fares": [sorted(store.redis.hkeys(key)) for key in (SUCCESS, TROUBLE, LOOKED_AT.replace("looked_at", "x"))],
        "schedules": [sorted(store.redis.hkeys(f"reshard:schedules:{part}")) for part in ("success", "trouble")],
        "notices": [
            (notice["kind"], notice["what"], notice["name"], notice.get("counts"), repos.get(notice.get("job", "")))
            for notice in told
        ],
    }


@pytest.fixture(scope="module")
def expected(broker: Broker) -> dict[str, Any]:
    with JobStore.at(broker.url) as store:
        return night(broker, store, undisturbed)


def test_a_night_without_kills(expected: dict[str, Any]) -> None:
    assert expected["run"][3] == {"same": 4}
    assert expected["totals"]["ended:failed"] == expected["totals"]["times:job:failed"] == 3
    assert expected["totals"]["ended:done"] == expected["totals"]["times:job:done"] == 8
    assert expected["totals"]["times:queued"] == 11
    by = Counter[str]()
    for submitter, catalog, jobs in expected["spent"]:
        by[catalog or submitter] += jobs
    assert by == {"mirror": 9, "schedule alone": 2}
    assert sorted(notice[:3] for notice in expected["notices"]) == [
        ("failed", "catalog", "mirror"),
        ("failed", "catalog", "mirror"),
        ("failed", "schedule", "alone"),
        ("recovered", "catalog", "mirror"),
        ("recovered", "schedule", "alone"),
    ]


@pytest.mark.parametrize(
    "followed", [pytest.param(killed_at_each_event, marks=pytest.mark.slow), killed_at_each_command]
)
def test_a_follower_that_is_killed_at_any_event_leaves_the_same_end_state(
    broker: Broker, store: JobStore, expected: dict[str, Any], followed: Callable[[str], None]
) -> None:
    found = night(broker, store, followed)
    assert {**found, "notices": sorted(found["notices"], key=str)} == {
        **expected,
        "notices": sorted(expected["notices"], key=str),
    }


def test_an_event_goes_to_one_process_until_that_is_dead_and_nobody_overtakes_it(store: JobStore) -> None:
    first, second = Reader(store.redis, "group"), Reader(store.redis, "group")
    store.submit(ask("one"))
    taken = first.take()
    assert [event.kind for event in taken] == ["state"]
    store.submit(ask("two"))
    assert second.take() == [], "the second event waits for the first"
    (entry,) = store.redis.xpending_range(EVENTS, "group", "-", "+", 10)
    idle = round(events.TAKE_OVER * 1000)
    store.redis.xclaim(EVENTS, "group", entry["consumer"], 0, [entry["message_id"]], idle=idle, justid=True)
    assert second.take() == taken
    second.acknowledge(*taken)
    assert [event.kind for event in first.take()] == ["state"]


def test_an_effect_of_who_lost_its_events_is_not_written(store: JobStore) -> None:
    slow, quick = Reader(store.redis, "counters", take_over=0), Reader(store.redis, "counters", take_over=0)
    store.cancel(store.submit(ask()).id)
    taken = slow.take()
    Counters(store).handle(quick.take(), quick)
    Counters(store).handle(taken, slow)
    assert store.redis.hgetall(TOTALS) == {b"ended:cancelled": b"1"}


def test_what_the_stream_lost_is_found_by_looking(store: JobStore, leases: Leases) -> None:
    catalogs = Cursor(store)
    assert catalogs.submit(definition(2, at_once=1))
    assert catalogs.fill("mirror", catalogs.claim("mirror", "me"), "me", rows(definition(2)))
    store.redis.delete(EVENTS)
    for _ in range(2):
        catalogs.reconcile()
        (job,) = catalogs.get("mirror").active.values()
        finish(leases, job)
        store.redis.delete(EVENTS)
    catalogs.reconcile()
    assert catalogs.get("mirror").state == "done"
