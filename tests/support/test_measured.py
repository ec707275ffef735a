"""A bound of processor time follows the machine, and is still one."""

from __future__ import annotations

import threading

import pytest

from tests.support import measured
from tests.support.measured import pacing, within


def test_a_slower_machine_may_take_longer_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    assert within(0, 0) and within(20, 20)
    for work in ("_loop", "_spread"):
        monkeypatch.setattr(measured, work, lambda: sum(range(1000)))
    for one, other in (("REFERENCE_LOOP", "REFERENCE_SPREAD"), ("REFERENCE_SPREAD", "REFERENCE_LOOP")):
        monkeypatch.setattr(measured, other, 1e9)
        monkeypatch.setattr(measured, one, 1e-9)
        assert within(20.1, 20)
        monkeypatch.setattr(measured, one, 1e9)
        assert not within(20.1, 20)


def test_the_pace_is_taken_three_times_and_while_the_work_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, working = iter([1.5, 3.0, 1.0, 9.0]), threading.Semaphore(0)

    def slower() -> float:
        working.release()
        return next(looks)

    monkeypatch.setattr(measured, "_PACED_EVERY", 0.001)
    monkeypatch.setattr(measured, "_slower", slower)
    with pacing() as paces:
        assert all(working.acquire(timeout=60) for _ in range(3))
    assert paces == [1.5, 3.0, 1.0]
    assert within(30, 10, paces) and not within(31, 10, paces), "no fourth look makes room"
    assert within(40, 10, paces[:2]), "what is missing is taken here and now"
