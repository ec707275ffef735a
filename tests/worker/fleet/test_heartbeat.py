"""What gives no sign of life is told apart: stopped, hanging, another machine's, or dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest
import redis

from reshard.worker.fleet import heartbeat as module
from reshard.worker.fleet.heartbeat import GAP, HEARD, REMEMBERED, SEEN, announce, silent, withdraw
from reshard.worker.queue.jobs import JobStore, Process
from reshard.worker.settings import PRESUMED_DEAD
from tests.support.procs import wait_for
from tests.worker.conftest import process

IDLE = "import sys; print('there', flush=True); sys.stdin.read()  # as reshard, by its command line"


@pytest.fixture
def idle(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    """A worker as the broker knows it, which lives and will say nothing more."""
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    command = [sys.executable, "-c", IDLE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as lives:
        assert lives.stdout is not None and lives.stdout.readline() == b"there\n"
        found = process(f"here:{lives.pid}")
        announce(store.redis, found)
        yield found
        lives.kill()


def late(store: JobStore, name: str) -> None:
    """As after PRESUMED_DEAD."""
    store.redis.delete(f"reshard:process:{name}")


def others(store: JobStore, seconds: float) -> None:
    """Somebody was heard for so long without a gap."""
    store.redis.set(HEARD, time.time() - seconds)


def test_one_that_lives_is_not_silent_and_one_that_ended_in_order_is_forgotten(store: JobStore, idle: Process) -> None:
    assert silent(store.redis) == []
    withdraw(store.redis, idle)
    assert silent(store.redis) == [] and not store.redis.exists(SEEN)


def test_a_stopped_one_is_told_from_one_that_hangs_and_from_one_that_died(store: JobStore, idle: Process) -> None:
    late(store, idle.name)
    others(store, PRESUMED_DEAD + 1)
    (hangs,) = silent(store.redis)
    assert (hangs.process, hangs.why) == (idle, "hangs")
    assert f"{idle.name} hangs" in str(hangs) and f"kill -KILL {idle.pid}" in str(hangs)
    os.kill(idle.pid, signal.SIGSTOP)
    wait_for(lambda: silent(store.redis)[0].why == "stopped", "its being stopped")
    assert f"kill -CONT {idle.pid}" in str(silent(store.redis)[0])
    os.kill(idle.pid, signal.SIGKILL)
    wait_for(lambda: silent(store.redis) == [], "its end")
    assert not store.redis.exists(SEEN)


def test_one_that_lives_does_not_hang_where_the_broker_heard_nobody(store: JobStore, idle: Process) -> None:
    late(store, idle.name)
    store.redis.delete(HEARD)  # as after GAP
    (one,) = silent(store.redis)
    assert one.why == "unknown" and "reconnects" in str(one) and "kill" not in str(one)
    announce(store.redis, process("here:1"))  # who is the first to be back
    assert [found.why for found in silent(store.redis) if found.process == idle] == ["unknown"]
    others(store, PRESUMED_DEAD - 1)
    assert [found.why for found in silent(store.redis) if found.process == idle] == ["unknown"]
    announce(store.redis, process("here:1"))
    since, lasts = float(cast(bytes, store.redis.get(HEARD))), store.redis.pttl(HEARD)
    assert since < time.time() - PRESUMED_DEAD + 2 and 0 < lasts <= GAP * 1000, "each sign prolongs it"


def test_a_broker_that_refuses_signs_of_life_hears_nobody(store: JobStore, idle: Process) -> None:
    lasts = store.redis.pexpire(HEARD, 5000) and store.redis.pttl(HEARD)
    store.redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(redis.OutOfMemoryError):
            announce(store.redis, idle)
        assert store.redis.pttl(HEARD) <= lasts
    finally:
        store.redis.config_set("maxmemory", 0)


def test_a_pid_that_is_another_programs_by_now_is_no_worker(
    store: JobStore, idle: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        announce(store.redis, replace(idle, name=f"here:{other.pid}", pid=other.pid))
        late(store, f"here:{other.pid}")
        assert silent(store.redis) == []
        other.kill()


def test_one_of_another_machine_is_named_for_an_hour(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    away = process("there:7")
    announce(store.redis, away)
    late(store, away.name)
    now = time.time()
    monkeypatch.setattr(module.time, "time", lambda: now + 40)
    (one,) = silent(store.redis)
    assert one.why == "unknown" and str(one) == "there:7 has not been heard from for 40 s: check the machine it runs on"
    monkeypatch.setattr(module.time, "time", lambda: now + REMEMBERED + 1)
    assert silent(store.redis) == [] and not store.redis.exists(SEEN)
