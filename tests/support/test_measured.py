"""A bound of processor time follows the machine, and is still one."""

from __future__ import annotations

import pytest

from tests.support import measured
from tests.support.measured import within


def test_a_slower_machine_may_take_longer_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    assert within(0, 0) and within(20, 20)
    monkeypatch.setattr(measured, "REFERENCE_LOOP", 1e-9)
    assert within(20.1, 20)
    monkeypatch.setattr(measured, "REFERENCE_LOOP", 1e9)
    assert not within(20.1, 20)
