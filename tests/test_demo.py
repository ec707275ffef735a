"""`make demo` does what it shows, and leaves nothing behind, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-u", "-m", "demo"]


def left_in(folder: Path) -> list[str]:
    """What of the demo is still there: its files, and processes that know its folder."""
    processes = [p.name() for p in psutil.process_iter() if str(folder) in environment_of(p)]
    return processes + [p.name for p in folder.iterdir()]


def environment_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.environ().values())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


@pytest.mark.slow
def test_the_demo_ends_well(tmp_path: Path) -> None:
    env = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(COMMAND, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "demo: ok"
    assert "is the same, bit for bit" in done.stdout
    assert left_in(tmp_path) == []


@pytest.mark.slow
def test_a_demo_that_is_stopped_stops_what_it_started(tmp_path: Path) -> None:
    env = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(COMMAND, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "`reshard control`" in line:
                break
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(120) != 0
    assert left_in(tmp_path) == []
