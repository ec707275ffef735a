"""When a worker rests, for how long, and that nothing which goes wrong with its tries ends it."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import redis

from reshard.pipeline.errors import (
    CredentialUnknown,
    PackageMissing,
    ReshardError,
    ResourceError,
    SourceNotFound,
    TempDirUnusable,
    TokenMissing,
)
from reshard.worker.fleet import self_check
from reshard.worker.fleet.fleet import RESTING, Fleet
from reshard.worker.fleet.heartbeat import announce
from reshard.worker.fleet.self_check import SelfCheck
from reshard.worker.queue.jobs import JobStore
from reshard.worker.settings import REST_AFTER, REST_MAX, settings
from tests.support.procs import wait_for
from tests.worker.bench import DISK, EXPIRED, raising
from tests.worker.conftest import age, another, ask, claimed, process

ME = "here:1"
PACKAGE = PackageMissing(what="no module named x")
FOLDER = TempDirUnusable(path="/tmp", why="it is full")


class Machine:
    """A worker's main process; its tries are real processes, which read this process's environment."""

    def __init__(self, store: JobStore) -> None:
        self.fleet = Fleet(store)
        self.later = 0.0  # seconds that its clock was put forward
        self.check = SelfCheck(self.fleet, ME, lambda: time.monotonic() + self.later)

    def fails(self, error: ReshardError, times: int = REST_AFTER) -> bool:
        """Whether it rests after this error in a row of units."""
        for _ in range(times):
            self_check.failed("plan", error)
        return self.tried()

    def tried(self) -> bool:
        """Whether it rests once its next try, if one is to come, has ended."""
        self.later += REST_MAX
        others = {*psutil.Process().children()}  # of other tests, and some may end meanwhile
        self.check.rests()
        wait_for(lambda: (self.check.rests(), {*psutil.Process().children()} <= others)[1], "the try")
        return ME in self.fleet.resting()


@pytest.fixture
def machine(store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(self_check, "shared", bytearray(len(self_check.shared)))
    monkeypatch.setenv("RESHARD_BROKER_URL", store.url)
    monkeypatch.setenv("RESHARD_TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    settings.cache_clear()  # of a process that had another broker
    made = Machine(store)
    yield made
    made.check.stop()
    settings.cache_clear()


def pauses(caplog: pytest.LogCaptureFixture) -> list[str]:
    """How long it was to wait for the next try, each time that it was put to rest."""
    return [
        record.getMessage().split("; next self-check in ")[1].split(" s:")[0]
        for record in caplog.records
        if "; next self-check in " in record.getMessage()
    ]


def test_requests_that_fail_on_a_fit_machine_put_it_never_to_rest(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials.toml"
    file.write_text('[[credential]]\nendpoint = "https://hub.example"\nnamespace = "us"\nenv = "HF_TOKEN"\n')
    monkeypatch.setenv("RESHARD_CREDENTIALS", str(file))
    nobody = SourceNotFound(repo="them/typo", endpoint="https://hub.example", revision="main")
    nobody.blames_worker = True
    for error in (
        CredentialUnknown(name="typo", known="none"),
        nobody,
        TokenMissing(endpoint="https://other.example", need="x", who="worker"),
    ):
        assert not machine.fails(error)
    assert machine.fleet.resting() == {}


def test_a_fault_that_a_try_sees_lets_it_rest_until_the_fault_is_gone(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "tmp").write_text("a file where the folder should be")
    assert not machine.fails(FOLDER, REST_AFTER - 1)
    assert machine.fails(FOLDER, 1)
    assert machine.fleet.resting()[ME].code == FOLDER.code
    assert machine.tried()
    (tmp_path / "tmp").unlink()
    assert not machine.tried()
    assert machine.fleet.resting() == {}


@pytest.mark.slow
def test_a_fault_that_no_try_sees_lets_it_rest_the_second_time_and_longer_each_time(
    machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not machine.fails(PACKAGE)
    for _ in range(2):
        assert machine.fails(PACKAGE)
        assert machine.fleet.resting()[ME].code == PACKAGE.code
        assert not machine.tried()
    assert pauses(caplog) == ["5", "10"]
    self_check.succeeded("group")
    assert machine.fails(PACKAGE), "another kind of unit proves nothing"
    assert not machine.tried()
    self_check.succeeded("plan")
    assert not machine.fails(PACKAGE)
    assert machine.fails(PACKAGE)
    assert pauses(caplog) == ["5", "10", "20", "5"], "the pause starts anew"


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOSPC])
def test_what_runs_out_is_the_machine_s_fault_and_other_errors_are_not(number: int, tmp_path: Path) -> None:
    named = self_check.named(OSError(number, os.strerror(number)), tmp_path)
    assert isinstance(named, ResourceError) and named.blames_worker and os.strerror(number) in str(named)
    assert not self_check.named(OSError(errno.EBADF, "a bug"), tmp_path).blames_worker


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOMEM, "no memory"),
        *(pytest.param(e, marks=pytest.mark.slow) for e in (OSError(errno.EAGAIN, "no pid"), MemoryError())),
    ],
)
def test_a_machine_that_cannot_start_a_try_rests_and_tries_later(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(self_check.subprocess, "Popen", raising(error))
        assert machine.fails(FOLDER)
        assert machine.tried()
    assert pauses(caplog) == ["5", "10"]
    assert not machine.tried()


def test_a_try_that_says_something_else_is_a_fault(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho no JSON")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert machine.fails(FOLDER)
    assert machine.fleet.resting()[ME].code == FOLDER.code


def test_a_broker_that_goes_away_while_a_worker_says_that_it_rests_does_not_end_the_worker(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from reshard.worker import app  # which needs a broker's URL to be imported at all

    looks: list[Callable[[], None]] = []
    timer = SimpleNamespace(call_repeatedly=lambda seconds, look, given: looks.append(partial(look, *given)))
    monkeypatch.setattr(app, "SelfCheck", lambda *_: machine.check)
    app.Drained(None).start(SimpleNamespace(timer=timer))
    monkeypatch.setattr(self_check.subprocess, "Popen", raising(OSError(errno.ENOMEM, "no memory")))
    monkeypatch.setattr(Fleet, "rest", raising(redis.ConnectionError("gone")))
    for _ in range(REST_AFTER):
        self_check.failed("plan", FOLDER)
    for look in looks:
        look()
    assert "the broker is unavailable" in caplog.text
    assert machine.check.rests(), "it rests, though it could not say so"


def test_a_resting_worker_is_waited_for_unless_it_rests_for_the_same_cause_or_for_long(store: JobStore) -> None:
    for name in ("a:1", "b:2"):
        announce(store.redis, process(name))
    fleet, bad = Fleet(store), another(store, "a:1.10")
    fleet.rest("b:2", DISK.to_dict())
    job, other = (store.submit(ask(name)).id for name in ("one", "two"))
    assert bad.hand_over(claimed(bad, job, "plan"), DISK.to_dict()) == "alone"
    assert bad.hand_over(claimed(bad, other, "plan"), EXPIRED.to_dict()) == "ok"
    assert bad.claim(other) is None
    fault = json.loads(store.redis.hget(RESTING, "b:2"))
    store.redis.hset(RESTING, "b:2", json.dumps(fault | {"since": fault["since"] - 601}))
    age(store, other, 10)
    assert bad.hand_over(claimed(bad, other, "plan"), EXPIRED.to_dict()) == "alone"


def test_why_a_worker_of_a_newer_release_rests_is_read_as_far_as_it_is_known(store: JobStore) -> None:
    fault = {"since": 1.0, "code": "resource.gpu", "message": "it is hot", "hint": "cool it", "degrees": 105}
    store.redis.hset(RESTING, ME, json.dumps(fault))
    assert Fleet(store).resting()[ME].message == "it is hot"
