"""Contenders that do the same, run by turns: each run is a process of its own with an empty home."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TIMED = Path(__file__).with_name("timed.py")


class Cost(NamedTuple):
    """Of one process with all that it started: seconds by the clock and of processor time, the peak in bytes of the
    largest of them, and bytes that they wrote to disks, sent to the Hub and received from it."""

    wall: float
    cpu: float
    peak: int
    disk: int = 0
    sent: int = 0
    received: int = 0


def medians(costs: Sequence[Cost]) -> Cost:
    """Of each figure by itself."""
    return Cost(*(median(values) for values in zip(*costs, strict=True)))


@dataclass(frozen=True)
class Contender:
    """``command`` is given an empty folder of its own, which is removed after the run with all that is in it."""

    name: str
    command: Callable[[Path], Sequence[str | os.PathLike[str]]]
    env: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[Path], None] = lambda folder: None  # that the run did what it was for; raises
    traffic: Callable[[], tuple[int, int]] = lambda: (0, 0)  # bytes sent and received until now


def race(contenders: Sequence[Contender], runs: int, folder: Path) -> dict[str, Cost]:
    """The medians of ``runs`` runs of each, by name; they take turns, so that what the machine does hits all alike.

    Who begins changes from round to round: what one leaves in memory costs the next.
    """
    costs: dict[str, list[Cost]] = {contender.name: [] for contender in contenders}
    for number in range(runs):
        first = number * max(1, len(contenders) // runs) % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            costs[contender.name].append(once(contender, folder))
    return {name: medians(taken) for name, taken in costs.items()}


def once(contender: Contender, folder: Path) -> Cost:
    """One run. Raises CalledProcessError, and what ``check`` does."""
    here = folder / "run"
    here.mkdir()
    homes = {"HF_HOME": "hf", "XDG_STATE_HOME": "state", "XDG_CACHE_HOME": "cache", "TMPDIR": "tmp"}
    for home in homes.values():
        (here / home).mkdir()
    env = os.environ | {name: str(here / home) for name, home in homes.items()} | dict(contender.env)
    command = contender.command(here)
    os.sync()  # what the one before wrote is not for this one to wait for
    try:
        before = contender.traffic()
        cost = measured(command, env)
        sent, received = (now - then for now, then in zip(contender.traffic(), before, strict=True))
        contender.check(here)
    finally:
        shutil.rmtree(here)
    return cost._replace(sent=sent, received=received)


def measured(command: Sequence[str | os.PathLike[str]], env: Mapping[str, str]) -> Cost:
    """What one command took; raises CalledProcessError."""
    program = shutil.which(command[0])
    assert program is not None, f"{command[0]} is not on PATH"
    timed = [sys.executable, "-I", "-S", TIMED, program, *command[1:]]
    done = subprocess.run(timed, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    taken = json.loads(done.stdout)
    if code := taken.pop("code"):
        raise subprocess.CalledProcessError(code, list(command), stderr=done.stderr)
    return Cost(**taken)


def python(function: str, *arguments: str | os.PathLike[str]) -> list[str | os.PathLike[str]]:
    """The command that calls a function of contenders.py."""
    return [sys.executable, "-m", "tests.benchmarks.contenders", function, *arguments]
