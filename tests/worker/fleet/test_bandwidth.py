"""One copy's share of the bandwidth: how long it waits, and what ends the wait."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import redis

from reshard.pipeline.copying.loop import Stopped
from reshard.worker.fleet import bandwidth
from reshard.worker.fleet.bandwidth import SHARE, BandwidthLimiter, Share
from reshard.worker.fleet.fleet import FLEET, Fleet
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.scripts import server_ms

MB = 1_000_000


def nothing() -> None:
    return None


def of(fleet: Fleet) -> BandwidthLimiter:
    return BandwidthLimiter(fleet.bandwidth, fleet.take, nothing)


def test_without_a_limit_nobody_is_asked() -> None:
    def take(count: int) -> Share:
        raise AssertionError("asked")

    BandwidthLimiter(lambda: None, take, nothing).spend(10**12)


def test_copies_together_are_as_fast_as_the_limit_and_not_faster(store: JobStore) -> None:
    fleet = Fleet(store)
    fleet.limit({"bandwidth": "20MB/s"})
    began = server_ms(store.redis)

    def copy() -> None:
        throttle = of(fleet)
        for _ in range(50):
            throttle.spend(100_000)

    threads = [threading.Thread(target=copy) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    free = float(store.redis.get(f"{FLEET}:free") or 0)  # when the next share may be read, by the server's clock
    assert free - began >= 3 * 50 * 100_000 / (20 * MB) * 1000
    assert server_ms(store.redis) >= free - 2 * SHARE * 1000, "they waited for what they read"


def test_when_the_brokers_clock_jumps_back_the_next_share_is_not_waited_for(store: JobStore) -> None:
    fleet = Fleet(store)
    fleet.limit({"bandwidth": "10MB/s"})
    fleet.take(1)
    for key in ("free", "free:set"):  # as they lie then
        store.redis.set(f"{FLEET}:{key}", float(store.redis.get(f"{FLEET}:{key}") or 0) + 3_600_000)
    assert fleet.take(1).wait == 0
    assert fleet.take(1).wait > 0


def test_shares_follow_each_other_without_a_gap(store: JobStore) -> None:
    fleet = Fleet(store)
    fleet.limit({"bandwidth": "10MB/s"})
    assert fleet.take(10**9).wait == 0  # the line was free; now it is not for a hundred seconds
    ends = [float(store.redis.get(f"{FLEET}:free") or 0)]
    for size in (1, 1, 1, 5 * MB, 1):
        share = fleet.take(size)
        assert share.bytes == max(size, 10 * MB * SHARE)
        assert share.wait > 0
        ends.append(float(store.redis.get(f"{FLEET}:free") or 0))
    gaps = [after - before for before, after in pairwise(ends)]
    assert gaps == pytest.approx([SHARE * 1000] * 3 + [500] + [SHARE * 1000])


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

    with pytest.raises(Stopped, match="cancel"):
        BandwidthLimiter(lambda: 1, lambda count: Share(count, 1e9), cancelled).spend(60)


def test_a_limit_that_is_taken_off_or_raised_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "CHECK", 0.01)
    limit = iter([1, 1, 1, None, None])
    seen: list[None] = []
    one = BandwidthLimiter(lambda: next(limit), lambda count: Share(count, 1e9), lambda: seen.append(None))
    one.spend(60)
    assert len(seen) == 2


def test_while_the_broker_is_away_a_copy_is_as_slow_as_it_was() -> None:
    def take(count: int) -> Share:
        if asked:
            raise redis.ConnectionError("away")
        asked.append(count)
        return Share(count, 0.3)

    asked: list[int] = []
    looks: list[None] = []
    one = BandwidthLimiter(lambda: 100, take, lambda: looks.append(None))
    for waits in (1, 2):
        one.spend(30)
        assert len(looks) >= waits, "it looks around whenever it waits"
    assert asked == [30]
