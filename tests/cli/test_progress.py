"""Progress is a bar on a terminal and a few plain lines elsewhere."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from reshard.cli import progress
from reshard.cli.output import Output, ago, human_bytes
from reshard.cli.progress import bar
from reshard.cli.run import View
from reshard.pipeline import reshard as pipeline
from reshard.pipeline.planning.model import Plan
from reshard.pipeline.request import Request
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from tests.cli.conftest import read
from tests.hub.fixtures import Namespace
from tests.support.procs import Broker
from tests.worker.conftest import ask, broker, claimed, leases, plan, receipts, store, wakes

__all__ = ["broker", "leases", "plan", "store", "wakes"]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Alarm:
    """A timer that rings when it is told to."""

    def __init__(self, seconds: float, ring: Callable[[], None]) -> None:
        self.seconds, self.ring = seconds, ring
        self.daemon, self.cancelled = False, False
        ALARMS.append(self)

    def start(self) -> None:
        assert self.daemon, "an interrupt would wait for it"

    def cancel(self) -> None:
        self.cancelled = True


ALARMS: list[Alarm] = []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    ALARMS.clear()
    monkeypatch.setattr(progress, "time", made)
    monkeypatch.setattr(progress, "Timer", Alarm)
    return made


def test_there_is_at_most_one_line_every_ten_seconds(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with bar(Output()) as shown:
        shown.show("planning")
        for second in range(25):
            shown.show("copying", int(clock.now * 2_000_000), 100_000_000, (second // 10, 12))
            clock.now += 1
        shown.waits("http://hub unreachable, try 2 of 6")
        shown.waits("")
        clock.now += 5
        shown.waits("rate limited, 30 s")
        clock.now += 10
        shown.show("publishing")
        shown.waits("")
        clock.now += 10
        shown.show("reading back")
    assert capsys.readouterr().err.splitlines() == [
        "planning",
        "copying: 1 of 12 files, 20.0 MB of 100 MB, 2.0 MB/s, 40 s left",
        "copying: 2 of 12 files, 40.0 MB of 100 MB, 2.0 MB/s, 30 s left",
        "copying: 2 of 12 files, 48.0 MB of 100 MB, 2.0 MB/s, 26 s left; waiting: rate limited, 30 s",
        "publishing; waiting: rate limited, 30 s",
        "reading back",
    ]


def test_what_nobody_comes_back_to_tell_is_told_when_a_line_is_due(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with bar(Output()) as shown:
        shown.waits("rate limited, 1 s")
        shown.waits("")
        for phase in ("planning", "copying"):
            clock.now += 1
            shown.show(phase)
        shown.waits("http://hub unreachable, try 2 of 6")
        clock.now = 10.0
        ALARMS[-1].ring()
        shown.waits("http://hub unreachable, try 3 of 6")
        shown.waits("")
        clock.now = 20.0
        ALARMS[-1].ring()
        shown.show("publishing")
    assert [alarm.seconds for alarm in ALARMS] == [9.0, 10.0, 10.0]
    assert ALARMS[-1].cancelled
    assert capsys.readouterr().err.splitlines() == [
        "waiting: rate limited, 1 s",
        "copying; waiting: http://hub unreachable, try 2 of 6",
        "copying; waited: http://hub unreachable, try 3 of 6",
    ]


def test_no_more_is_shown_than_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with bar(Output()) as shown:  # what was damaged is read again, and counted again
        shown.show("copying", 130_000_000, 100_000_000, (3, 12))
    assert capsys.readouterr().err == "copying: 3 of 12 files, 100 MB of 100 MB\n"


@pytest.mark.parametrize("terminal", ["dumb", "xterm"])
def test_every_phase_has_a_line_of_its_own_on_a_terminal_that_can_show_it(
    terminal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    with os.fdopen(theirs, "w") as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        with bar(Output()) as shown:
            shown.waits("")
            shown.show("planning")
            shown.waits("http://hub unreachable, try 3 of 6")
            shown.show("copying")
            shown.waits("")
            shown.show("copying", 50, 100, (1, 2))
            shown.waits("rate limited, 40 s" if terminal == "xterm" else "")
    seen = b"".join(iter(lambda: read(ours), b"")).decode()
    os.close(ours)
    if terminal == "dumb":
        assert seen.splitlines() == ["planning"]
    else:
        assert re.search(r"planning\W", seen) and "waiting" not in seen.partition("planning")[0]
        before, _, last = seen.rpartition("planning")
        assert "waiting: hub unreachable, try 3 of 6" in before
        shown_last = " ".join(re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", last).split())
        assert re.search(r"copying \S+ 1 of 2 files, 50 bytes of 100 bytes.*; waiting: rate limited, 40 s", shown_last)


@pytest.mark.parametrize(
    ("why", "line"),
    [
        ("", "12 of 131 files, 12.4 GB of 26.2 GB, 1 min 7 s left"),
        ("rate limited, 40 s", "12.4 GB of 26.2 GB; waiting: rate limited, 40 s"),
        ("https://huggingface.co unreachable, try 3 of 6", "waiting: huggingface.co unreachable, try 3 of 6"),
    ],
)
def test_a_phase_has_one_line_of_eighty_columns(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, why: str, line: str
) -> None:
    """It leaves out the rate, and beside a wait more than that, before the line breaks."""
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with os.fdopen(theirs, "w") as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        with bar(Output()) as shown:
            shown.show("copying", 0, 26_200_000_000, (0, 131))
            clock.now += 60
            shown.show("copying", 12_400_000_000, 26_200_000_000, (12, 131))
            shown.waits(why)
    seen = b"".join(iter(lambda: read(ours), b"")).decode()
    os.close(ours)
    last = [row.rstrip() for row in re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", seen).splitlines()]
    assert last[-1] == "" and re.fullmatch(rf"copying +\S+ {re.escape(line)}", last[-2]), last


def test_no_row_fills_the_terminal_where_ctrl_c_would_break_it_in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with os.fdopen(theirs, "w") as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        with bar(Output()) as shown:
            shown.show("queued")
            shown.waits("the service is paused since 2026-11-23 02:40 UTC, by somebody@a-machine: a long reason; go on")
    seen = b"".join(iter(lambda: read(ours), b"")).decode()
    os.close(ours)
    rows = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", seen).replace("\r", "\n").split("\n")
    assert any("paused" in row for row in rows) and max(map(len, rows)) < 80


def test_a_run_that_goes_on_begins_at_the_bytes_that_were_copied(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    shards, tensors = len(plan.shards), sum(entry.size for shard in plan.shards for entry in shard.entries)
    with bar(Output()) as shown:
        view = View(Request.of("us/model", "/out"), Output(), shown, pipeline.PHASES)
        view.planned(plan)
        capsys.readouterr()
        view.resumed(2, 40_000)
        view.step("copy")
    assert capsys.readouterr().err.splitlines() == [
        f"Resuming: 2 of {shards} files copied by an earlier run",
        f"copying: 2 of {shards} files, 40.0 kB of {human_bytes(tensors)}",
    ]


@pytest.mark.parametrize("output", [Output(json=True), Output(quiet=True)])
def test_nothing_is_shown_to_a_script(output: Output, capsys: pytest.CaptureFixture[str]) -> None:
    with bar(output) as shown:
        shown.show("copying", 1, 2)
        shown.say("something")
    assert capsys.readouterr() == ("", "")


PHASES = ["planning", "copying", "checking the model", "publishing", "reading back"]


def test_a_terminal_gets_a_plan_that_fits_it_and_a_bar_for_each_phase_in_its_order(model: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [Path(sys.executable).parent / "reshard", "run", model, "--to", tmp_path / "out", "--size", "600B"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=os.environ | {"COLUMNS": "60"}) as run:
        os.close(theirs)
        seen = b"".join(iter(lambda: read(ours), b"")).decode()
    os.close(ours)
    assert run.returncode == 0
    assert [*dict.fromkeys(re.findall("|".join(PHASES), seen))] == PHASES
    assert re.search(r"note +layer\.0\.weight [^\r]+\r\n {13}\S", seen), (
        seen
    )  # the plan fits the terminal that it goes to
    assert "\x1b[" in seen


def test_who_follows_a_job_sees_the_same_phases(broker: Broker, store: JobStore, leases: Leases, plan: Plan) -> None:
    ours, theirs = pty.openpty()
    job, seen = store.submit(ask()).id, b""
    command = [Path(sys.executable).parent / "reshard", "watch", job]
    env = os.environ | {"COLUMNS": "120", "TERM": "xterm", "RESHARD_BROKER_URL": broker.url}

    def until(phase: str) -> None:
        nonlocal seen
        while phase.encode() not in seen and (chunk := read(ours)):
            seen += chunk

    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=env) as watch:
        os.close(theirs)
        first = claimed(leases, job, "plan")
        until("planning")
        leases.planned(first, plan)
        until("copying")
        check = claimed(leases, job, "check")
        for number in range(len(plan.groups)):
            group = claimed(leases, job, f"group:{number:05d}")
            leases.seal(group, receipts(plan, number))
            leases.done(group, [{}, []])
        until("checking the model")
        leases.done(check, [])
        publish = claimed(leases, job, "publish")
        until("publishing")
        leases.begin(publish)
        leases.done(publish, {"commit": "abc", "ref": "main", "found": False})
        until("reading back")
        leases.done(claimed(leases, job, "confirm"), [])
        while chunk := read(ours):
            seen += chunk
    os.close(ours)
    assert watch.returncode == 0, seen.decode()
    assert [*dict.fromkeys(re.findall("|".join(PHASES), seen.decode()))] == PHASES


def test_bytes_are_decimal_as_sizes_are_typed() -> None:
    assert [human_bytes(n) for n in (0, 999, 1000, 46_881_936, 5 * 10**9)] == [
        "0 bytes",
        "999 bytes",
        "1.0 kB",
        "46.9 MB",
        "5.0 GB",
    ]


def test_times_are_said_in_the_largest_unit_of_which_there_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1_000_000.0)
    assert [ago(1_000_000 - s) for s in (-5, 90, 150, 7200, 200_000)] == [
        "0 s ago",
        "90 s ago",
        "2 min ago",
        "2 h ago",
        "2 d ago",
    ]


@pytest.mark.parametrize("output", [Output(), Output(quiet=True), Output(json=True)])
@pytest.mark.parametrize(
    ("typed", "terminal", "agreed"), [("n\n", True, False), ("y\n", True, True), ("", False, True)]
)
def test_who_sits_at_a_terminal_is_asked_wherever_the_rest_goes(
    output: Output, typed: str, terminal: bool, agreed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = io.StringIO(typed)
    monkeypatch.setattr(stdin, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stdin", stdin)
    assert bar(output).agrees("Publish it?") is agreed


def test_on_a_terminal_it_asks_before_what_not_everyone_sees_is_made_public(
    model: Path, tmp_path: Path, namespace: Namespace, clean: dict[str, str]
) -> None:
    source, target = namespace.repo("secret"), namespace.repo("shown")
    namespace.admin.create_repo(source, visibility="private")
    namespace.admin.put_files(source, {"model.safetensors": (model / "model.safetensors").read_bytes()})
    command = [Path(sys.executable).parent / "reshard", "run", source, "--to", target, "--size", "3300B", "--public"]
    env = clean | {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token}
    for answer, code in ((b"n\n", 130), (b"y\n", 0)):
        ours, theirs = pty.openpty()
        with subprocess.Popen(command, stdin=theirs, stdout=subprocess.DEVNULL, stderr=theirs, env=env) as run:
            os.close(theirs)
            seen = b""
            while chunk := read(ours):
                seen += chunk
                if b"everyone can see it?" in seen and answer:
                    assert not any(line["path"] == "/api/repos/create" for line in namespace.admin.log())
                    os.write(ours, answer)
                    answer = b""
        os.close(ours)
        assert (run.returncode, answer) == (code, b""), seen.decode()
    assert namespace.admin.state(target)["visibility"] == "public"
