"""One budget of calls for all workers: who is told to wait tells the others."""

from __future__ import annotations

import time

import pytest
import redis

from reshard.pipeline.copy import Stopped
from reshard.worker.jobs import JobStore
from reshard.worker.pace import SharedPace, paces

BUDGET = "http://hub someone"


def nothing() -> None:
    return None


def waited(pace: SharedPace) -> float:
    started = time.monotonic()
    pace.before("api")
    return time.monotonic() - started


def test_a_wait_that_one_worker_was_asked_for_holds_for_all(store: JobStore) -> None:
    told, other = (paces(store.redis, nothing, nothing)(BUDGET) for _ in range(2))
    told.slow_down(0.5)
    assert 0.3 < waited(other) < 5
    assert waited(other) < 0.3


def test_another_budget_goes_on(store: JobStore) -> None:
    of = paces(store.redis, nothing, nothing)
    of(BUDGET).slow_down(5)
    assert waited(of("http://hub someone-else")) < 0.3


def test_a_shorter_wait_does_not_cut_a_longer_one_short(store: JobStore) -> None:
    one, two = (paces(store.redis, nothing, nothing)(BUDGET) for _ in range(2))
    one.slow_down(0.6)
    two.slow_down(0.1)
    assert waited(paces(store.redis, nothing, nothing)(BUDGET)) > 0.3


def test_a_cancel_ends_a_wait(store: JobStore) -> None:
    def cancelled() -> None:
        raise Stopped("cancel")

    paces(store.redis, nothing, nothing)(BUDGET).slow_down(60)
    with pytest.raises(Stopped):
        paces(store.redis, cancelled, nothing)(BUDGET).before("api")


def test_without_a_broker_a_worker_waits_on_its_own() -> None:
    away = redis.Redis(port=1, socket_connect_timeout=0.1)
    pace = SharedPace(BUDGET, away, nothing, nothing)
    pace.slow_down(0.4)
    assert waited(pace) > 0.2
