"""A lane hands on everything in order, stays a bounded number of bytes behind, and tells of a step that failed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from reshard.pipeline.limits import LANE_STEPS
from reshard.pipeline.stores.lane import Lane


@pytest.fixture
def lane() -> Iterator[Lane]:
    with closing(Lane(limit=10)) as lane:
        yield lane


def test_steps_see_every_view_in_the_order_in_which_it_was_put(lane: Lane) -> None:
    seen: list[tuple[str, int]] = []
    for number in range(200):
        lane.put(lambda view: seen.append(("a", view[0])), memoryview(bytes([number])))
        lane.put(lambda view: seen.append(("b", view[0])), memoryview(bytes([number])))
    lane.flush()
    assert seen == [(step, number) for number in range(200) for step in "ab"]


def test_no_more_than_its_limit_is_under_way_while_a_step_is_slow(lane: Lane) -> None:
    may_go, entered = threading.Event(), threading.Event()
    most = handed = through = 0
    change = threading.Lock()

    def slow(view: memoryview) -> None:
        nonlocal through
        entered.set()
        may_go.wait()
        with change:
            through += len(view)

    def feed() -> None:
        nonlocal most, handed
        for _ in range(50):
            lane.put(slow, memoryview(b"1234"))
            with change:
                handed += 4
                most = max(most, handed - through)
            if handed == 8:  # the third one has to wait
                may_go.set()

    feeder = threading.Thread(target=feed)
    feeder.start()
    assert entered.wait(30)
    feeder.join(60)
    lane.flush()
    assert not feeder.is_alive() and through == 200
    assert most <= 10 + 4  # one may be through and not yet counted


def test_no_more_than_so_many_steps_are_under_way_however_little_they_get(lane: Lane) -> None:
    may_go, put = threading.Event(), list[int]()

    def feed() -> None:
        for number in range(2 * LANE_STEPS):
            lane.put(lambda view: may_go.wait(), memoryview(b""))
            put.append(number)

    feeder = threading.Thread(target=feed)
    feeder.start()
    feeder.join(1)  # without a limit it is through long before
    assert feeder.is_alive() and len(put) <= LANE_STEPS + 1  # one of which has begun
    may_go.set()
    feeder.join(60)
    lane.flush()
    assert len(put) == 2 * LANE_STEPS


def test_a_view_larger_than_the_limit_passes_alone(lane: Lane) -> None:
    seen: list[int] = []
    for _ in range(3):
        lane.put(lambda view: seen.append(len(view)), memoryview(bytes(100)))
    lane.flush()
    assert seen == [100, 100, 100]


def test_the_error_of_a_step_is_raised_by_whoever_comes_next_and_nothing_follows_it(lane: Lane) -> None:
    seen: list[bytes] = []

    def fail(view: memoryview) -> None:
        raise OSError("the disk is gone")

    lane.put(fail, memoryview(b"x"))
    with pytest.raises(OSError, match="the disk is gone"):
        lane.flush()
    with pytest.raises(OSError, match="the disk is gone"):
        lane.put(lambda view: seen.append(bytes(view)), memoryview(b"y"))
    lane.close()
    assert seen == []


def test_a_flush_may_leave_the_last_steps_under_way(lane: Lane) -> None:
    may_go, seen = threading.Event(), list[int]()
    lane.put(lambda view: seen.append(1), memoryview(b""))
    lane.put(lambda view: may_go.wait(), memoryview(b""))
    lane.flush(1)
    assert seen == [1] and not may_go.is_set()
    may_go.set()


def test_close_drops_what_waits_and_lets_a_running_step_end() -> None:
    lane = Lane(limit=10)
    entered, may_go = threading.Event(), threading.Event()
    seen: list[int] = []

    def slow(view: memoryview) -> None:
        entered.set()
        may_go.wait()
        seen.append(1)

    lane.put(slow, memoryview(b"1"))
    assert entered.wait(30)
    lane.put(lambda view: seen.append(2), memoryview(b"2"))
    closing = threading.Thread(target=lane.close)
    closing.start()
    may_go.set()
    closing.join(30)
    assert not closing.is_alive() and seen == [1]
    with pytest.raises(RuntimeError, match="closed"):
        lane.put(slow, memoryview(b"3"))
