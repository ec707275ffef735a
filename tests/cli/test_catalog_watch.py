"""`reshard catalog watch` and `submit --watch`: progress and failures as they come, and an exit code for CI."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from reshard.cli import progress, watch
from reshard.cli.output import Output
from reshard.cli.progress import Bar, bar
from reshard.client.operations.table import Answered, InProcess, Operation, P
from reshard.client.queue import Queue as Opened
from reshard.worker.fleet.heartbeat import announce
from reshard.worker.followers.cursor import Cursor
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from tests.cli.conftest import Done, Run
from tests.support.stuck import STUCK
from tests.support.warm import COMMAND
from tests.worker.conftest import broker, copying_at, leases, process, store, wakes
from tests.worker.followers.builders import begin, definition, fail, finish, jobs

__all__ = ["broker", "leases", "store", "wakes"]


@pytest.fixture
def catalogs(store: JobStore) -> Cursor:
    return Cursor(store)


@pytest.fixture
def watched(reshard: Run, store: JobStore) -> Callable[..., Done]:
    return lambda *arguments: reshard("catalog", *arguments, env={"RESHARD_BROKER_URL": store.url})


def test_when_every_model_is_done_the_exit_code_is_0(
    watched: Callable[..., Done], catalogs: Cursor, leases: Leases
) -> None:
    begin(catalogs, definition(2))
    for job in jobs(catalogs):
        finish(leases, job)
    assert jobs(catalogs) == []
    done = watched("watch", "mirror")
    assert done.code == 0, done.err
    assert done.out.startswith("Catalog mirror: done, 2 models (2 same) in ")
    begin(catalogs, definition(2))  # and nothing changed
    assert watched("watch", "mirror", "--quiet").out == "done\n"


def test_when_a_model_failed_the_exit_code_is_11(
    watched: Callable[..., Done], catalogs: Cursor, leases: Leases
) -> None:
    begin(catalogs, definition(3))
    first, second, third = jobs(catalogs)
    finish(leases, first)
    fail(leases, second)
    fail(leases, third)
    assert jobs(catalogs) == []
    done = watched("watch", "mirror")
    assert done.code == 11
    assert done.out.startswith("Catalog mirror: failed, 3 models (1 same, 2 failed) in ")
    *_, told, error, hint = done.err.splitlines()
    assert told.startswith("them/m2: source.no_weights: ")
    assert error == "error[job.catalog]: catalog mirror failed: 2 of 3 models failed: source.no_weights 2"
    assert "`reshard catalog failures mirror`" in hint
    *failed, seen, ended = watched("watch", "mirror", "--json").documents
    assert [one["failed"]["repo"] for one in failed] == ["them/m1", "them/m2"]
    assert (seen["state"], ended["error"]["code"]) == ("failed", "job.catalog")


@pytest.mark.parametrize("end", ["pause", "cancel", "stop"])
def test_when_it_was_ended_before_its_models_the_exit_code_is_10(
    watched: Callable[..., Done], catalogs: Cursor, leases: Leases, end: str
) -> None:
    begin(catalogs, definition(3, at_once=1, max_failures=0))
    (job,) = jobs(catalogs)
    if end == "stop":
        fail(leases, job)
    elif end == "pause":
        catalogs.pause("mirror")
        finish(leases, job)
    else:
        catalogs.cancel("mirror")
    assert jobs(catalogs) == []
    state, left = {"pause": ("paused", 2), "cancel": ("cancelled", 3), "stop": ("stopped", 3)}[end]
    done = watched("watch", "mirror")
    assert done.code == 10
    why = f"{'more than 0 models failed; ' if end == 'stop' else ''}{left} of 3 models are not done"
    assert f"error[queue.catalog_state]: catalog mirror is {state}: {why}" in done.err.splitlines()


@pytest.mark.parametrize("well", [True, False])
def test_resumed_when_all_has_ended_in_the_pause_it_is_said_how(
    watched: Callable[..., Done], catalogs: Cursor, leases: Leases, well: bool
) -> None:
    begin(catalogs, definition(2))
    first, second = jobs(catalogs)
    catalogs.pause("mirror")
    finish(leases, first)
    (finish if well else fail)(leases, second)
    assert jobs(catalogs) == []
    done = watched("resume", "mirror")
    ended, *then = done.out.splitlines()
    told = "done, 2 models (2 same)" if well else "failed, 2 models (1 same, 1 failed)"
    assert (done.code, ended) == (0, f"Catalog mirror has already ended: {told}")
    assert then == ([] if well else ["Retry failed models with `reshard catalog retry mirror`"])


@pytest.mark.parametrize(("end", "state"), [("pause", "paused"), ("cancel", "cancelled")])
def test_ended_while_it_was_expanded_it_is_said_without_a_count_of_models(
    watched: Callable[..., Done], catalogs: Cursor, end: str, state: str
) -> None:
    catalogs.submit(definition(3))
    getattr(catalogs, end)("mirror")
    done = watched("watch", "mirror")
    assert done.code == 10
    said = f"catalog mirror is {state}: it was {state} while its models were being listed"
    assert f"error[queue.catalog_state]: {said}" in done.err.splitlines()
    assert ("continue it with `reshard catalog resume mirror`" in done.err) == (state == "paused")


def test_a_job_of_it_that_was_cancelled_leaves_a_model_that_is_not_done(
    watched: Callable[..., Done], catalogs: Cursor, store: JobStore
) -> None:
    begin(catalogs, definition(1))
    (job,) = jobs(catalogs)
    store.cancel(job)
    assert jobs(catalogs) == []
    done = watched("watch", "mirror")
    assert done.code == 10
    assert "1 of 1 models are not done" in done.err


def test_what_cannot_be_followed_is_said(watched: Callable[..., Done]) -> None:
    done = watched("watch", "none")
    assert (done.code, done.err.startswith("error[queue.no_catalog]: ")) == (10, True)


class Shown(Bar):
    """What a person on a terminal would see."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def show(
        self, phase: str, done: int = 0, total: int = 0, files: tuple[int, int] = (0, 0), figures: str = ""
    ) -> None:
        self.lines.append(f"{phase} {done}/{total}: {figures}")

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A second passes with each look."""
    made = SimpleNamespace(now=0.0)
    made.monotonic = lambda: made.now
    made.sleep = lambda seconds: setattr(made, "now", made.now + seconds)
    for module in (watch, progress):
        monkeypatch.setattr(module, "time", made)
    return made


def test_progress_is_shown_at_each_look_on_a_terminal_and_every_ten_seconds_in_a_pipe(
    catalogs: Cursor,
    leases: Leases,
    store: JobStore,
    clock: SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal = Shown()
    with bar(Output()) as lines:
        session = InProcess(Opened(store), "me")
        piped, seen = (watch.CatalogFollower(session, "mirror", Output(), shown) for shown in (lines, terminal))
        begin(catalogs, definition(3))
        first, second, third = jobs(catalogs)
        for number in range(25):
            if number == 3:
                finish(leases, first)
            if number == 6:
                fail(leases, second)
            jobs(catalogs)
            assert piped.look() is None
        assert seen.look() is seen.look() is None
        finish(leases, third)
        assert jobs(catalogs) == []
        ended = piped.look()
    assert ended is not None and ended.state == "failed"
    failure, last = "them/m1: source.no_weights: ", "1 of 3 models done, 1 running, 1 failed"
    said = [line.partition("; waiting: ")[0] for line in capsys.readouterr().err.splitlines()]
    assert [line.startswith(failure) for line in said] == [False, True, False, False]
    assert [said[0], *said[2:]] == ["running: 0 of 3 models done, 3 running, 0 failed", *[f"running: {last}"] * 2]
    assert terminal.lines[0].startswith(failure) and terminal.lines[1:] == [f"running 1/3: {last}"] * 2


class Asked(InProcess):
    """A session that keeps what it was asked."""

    def __init__(self, store: JobStore) -> None:
        super().__init__(Opened(store), "me")
        self.paths: list[str] = []

    def perform(self, operation: Operation[P, Answered], /, *args: P.args, **kwargs: P.kwargs) -> Answered:
        self.paths.append(operation.path)
        return super().perform(operation, *args, **kwargs)


def test_failures_that_trickle_in_are_read_the_less_often_the_more_has_ended(
    catalogs: Cursor, leases: Leases, store: JobStore, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "READ_AT_EACH", 1)
    session, terminal = Asked(store), Shown()
    follower = watch.CatalogFollower(session, "mirror", Output(), terminal)
    begin(catalogs, definition(10, at_once=10))
    started = jobs(catalogs)
    for job in started[:-1]:
        fail(leases, job)
        jobs(catalogs)
        assert follower.look() is None
    assert session.paths.count("/catalogs/{name}/failures") == 4, "when 1, 2, 4 and 8 had ended"
    assert "/catalogs/{name}" not in session.paths
    for _ in started:
        assert follower.look() is None
    assert session.paths.count("/catalogs/{name}/failures") == 5
    catalogs.retry("mirror")
    assert len(jobs(catalogs)) == 10 and follower.look() is None
    for job in started:
        fail(leases, job)
    assert jobs(catalogs) == []
    assert follower.look() is not None
    assert session.paths.count("/catalogs/{name}/failures") == 7 and session.paths.count("/catalogs/{name}") == 1
    told = sorted(line.partition(":")[0] for line in terminal.lines if line.startswith("them/"))
    models = [f"them/m{number}" for number in range(10)]
    assert told == sorted(models + models[:-1]), "each once, and again after its retry"


def test_status_and_watch_say_how_long_the_rest_will_take(
    watched: Callable[..., Done], catalogs: Cursor, leases: Leases, store: JobStore, clock: SimpleNamespace
) -> None:
    begin(catalogs, definition(5, at_once=2))
    finish(leases, jobs(catalogs)[0])
    jobs(catalogs)
    for kind in ("worker", "control"):
        announce(store.redis, process(f"here:{len(kind)}", kind))
    terminal, figures = Shown(), "1 of 5 models done, 2 running, 0 failed"
    follower = watch.CatalogFollower(InProcess(Opened(store), "me"), "mirror", Output(), terminal)
    follower.look()
    assert "5: 1 same, 2 running, 2 to do\n" in watched("status", "mirror").out, "no rate is known"
    copying_at(store, 1_000_000, mean=600_000_000)
    follower.look()
    assert re.search("5: 1 same, 2 running, 2 to do, about 4[01] min left\n", watched("status", "mirror").out)
    (said,) = watched("status", "mirror", "--json").documents
    assert 2390 < said["left"] < 2500
    catalogs.pause("mirror")
    follower.look()
    first, second, paused = terminal.lines
    assert first == f"running 1/5: {figures}" and paused == f"paused 1/5: {figures}"
    assert re.fullmatch(f"running 1/5: {figures}, about (40|41) min left", second), second


def test_ctrl_c_leaves_the_catalog_at_work_and_says_how_to_follow_it_again(
    clean: dict[str, str], catalogs: Cursor, store: JobStore, tmp_path: Path
) -> None:
    file = tmp_path / "mirror.yaml"
    file.write_text(definition(1).text)
    watching = subprocess.Popen(
        [COMMAND, "catalog", "submit", file, "--watch"],
        env=clean | {"RESHARD_BROKER_URL": store.url, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert watching.stderr is not None
    said = next(line for line in watching.stderr if line == "expanding\n")
    watching.send_signal(signal.SIGINT)
    out, err = watching.communicate(timeout=STUCK)
    assert said and watching.returncode == 130
    assert out == "Submitted catalog mirror\n"
    assert "Catalog mirror is still running; to follow its progress, run `reshard catalog watch mirror`" in err
    assert catalogs.get("mirror").state == "expanding"
