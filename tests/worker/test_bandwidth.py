"""One copy's share of the bandwidth: how long it waits, and what ends the wait."""

from __future__ import annotations

import threading
import time

import pytest
import redis

from reshard.pipeline.copy import Stopped
from reshard.worker.fleet import bandwidth
from reshard.worker.fleet.bandwidth import SHARE, Share, Throttle
from reshard.worker.fleet.fleet import FLEET, Fleet
from reshard.worker.queue.jobs import JobStore

MB = 1_000_000


def nothing() -> None:
    return None


def of(fleet: Fleet) -> Throttle:
    return Throttle(fleet.bandwidth, fleet.take, nothing)


def test_without_a_limit_nobody_is_asked() -> None:
    def take(count: int) -> Share:
        raise AssertionError("asked")

    Throttle(lambda: None, take, nothing).spend(10**12)


def test_copies_together_are_as_fast_as_the_limit_and_not_faster(store: JobStore) -> None:
    fleet = Fleet(store)
    fleet.limit({"bandwidth": "20MB/s"})
    read = [0, 0, 0]
    began = time.monotonic()

    def copy(number: int) -> None:
        throttle = of(fleet)
        while time.monotonic() - began < 1.5:
            throttle.spend(100_000)
            read[number] += 100_000

    threads = [threading.Thread(target=copy, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.monotonic() - began
    assert sum(read) <= 20 * MB * (took + 2 * SHARE)
    assert min(read) > 0.25 * max(read), "they take turns"
    assert sum(read) > 0.25 * 20 * MB * took


def test_shares_follow_each_other_without_a_gap(store: JobStore) -> None:
    fleet = Fleet(store)
    fleet.limit({"bandwidth": "10MB/s"})
    began = time.monotonic()
    for number in range(5):
        share = fleet.take(1)
        assert share.bytes == 10 * MB * SHARE
        assert share.wait <= number * SHARE + 0.01
        assert share.wait + time.monotonic() - began >= number * SHARE - 0.01
    assert fleet.take(5 * MB).bytes == 5 * MB
    share = fleet.take(1)
    assert share.wait <= 5 * SHARE + 0.51
    assert share.wait + time.monotonic() - began >= 5 * SHARE + 0.49


def test_with_a_new_limit_nobody_waits_behind_what_was_taken_under_the_old_one(store: JobStore) -> None:
    fleet = Fleet(store)
    fleet.limit({"bandwidth": "1kB/s"})
    fleet.take(10**9)
    fleet.limit({"bandwidth": "100MB/s"})
    assert fleet.take(1).wait == 0


def test_what_nobody_took_is_not_saved_up(store: JobStore) -> None:
    fleet = Fleet(store)
    fleet.limit({"bandwidth": "10MB/s"})
    fleet.take(1)
    store.redis.set(f"{FLEET}:free", 1)  # long ago
    assert fleet.take(1).wait == 0
    assert fleet.take(1).wait > 0


def test_a_cancel_ends_the_wait() -> None:
    def cancelled() -> None:
        raise Stopped("cancel")

    began = time.monotonic()
    with pytest.raises(Stopped, match="cancel"):
        Throttle(lambda: 1, lambda count: Share(count, 60.0), cancelled).spend(60)
    assert time.monotonic() - began < 10


def test_a_limit_that_is_taken_off_or_raised_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "LOOK", 0.01)
    limit = iter([1, 1, 1, None, None])
    seen: list[None] = []
    one = Throttle(lambda: next(limit), lambda count: Share(count, 60.0), lambda: seen.append(None))
    began = time.monotonic()
    one.spend(60)
    assert time.monotonic() - began < 10
    assert len(seen) == 2


def test_while_the_broker_is_away_a_copy_is_as_slow_as_it_was() -> None:
    def take(count: int) -> Share:
        if asked:
            raise redis.ConnectionError("away")
        asked.append(count)
        return Share(count, 0.3)

    asked: list[int] = []
    one = Throttle(lambda: 100, take, nothing)
    for _ in range(2):
        began = time.monotonic()
        one.spend(30)
        assert time.monotonic() - began >= 0.3
    assert asked == [30]
