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
        assert within(20.1, 20, [0.5, 1.1]) and not within(20.1, 20, [0.5, 1.0])


def test_the_pace_is_taken_while_the_work_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = threading.Event()
    monkeypatch.setattr(measured, "_PACED_EVERY", 0.001)
    monkeypatch.setattr(measured, "_slower", lambda: taken.set() or 3.0)
    with pacing() as paces:
        assert taken.wait(60)
    assert {*paces} == {3.0} and within(29, 10, paces) and not within(31, 10, paces)
