"""What is measured: figures against what was promised, and races of several that do the same."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tests.benchmarks.race import Cost, measured

COMMAND = Path(sys.executable).parent / "reshard"
REPEATS = 5  # of what takes a fraction of a second; the fastest counts, because the machine only ever adds to it

# What a busy machine does not change, and tests may hold.
STEADY = frozenset({"MB"})


class Stage(NamedTuple):
    """Seconds that a thread, or a process, spent in one place: by the clock, on a core, and waiting for a core."""

    thread: str
    place: str
    seconds: float
    on_core: float
    waiting: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Where the time of a run went; ``processor`` is of all its processes, ``machine`` of all that ran meanwhile."""

    wall: float
    cores: int
    processor: float
    machine: float
    stages: tuple[Stage, ...]

    @staticmethod
    def from_dict(facts: Mapping[str, Any]) -> Profile:
        return Profile(**{**facts, "stages": tuple(Stage(*stage) for stage in facts["stages"])})


@dataclass(frozen=True, slots=True)
class Figure:
    """Smaller is better. A ``must`` that is not met fails the benchmark; an ``aim`` and a ``report`` are only told."""

    name: str
    value: float
    unit: str
    target: float
    kind: Literal["must", "aim", "report"]
    profile: Profile | None = None

    @property
    def met(self) -> bool:
        return self.value <= self.target

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


def aim(name: str, value: float, unit: str, target: float, profile: Callable[[], Profile]) -> Figure:
    """One that is missed has the profile of what missed it."""
    figure = Figure(name, value, unit, target, "aim")
    return figure if figure.met else replace(figure, profile=profile())


@dataclass(frozen=True, slots=True)
class Race:
    """What each contender took, by its name."""

    name: str
    costs: Mapping[str, Cost]

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "costs": {name: cost._asdict() for name, cost in self.costs.items()}}


def fastest(call: Callable[[], object]) -> float:
    """Seconds that ``call`` takes, at best."""
    took = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return min(took)


def fastest_command(*arguments: str, env: dict[str, str] | None = None) -> float:
    """Seconds that `reshard ARGUMENTS` takes, at best, with the start of its process."""

    def run() -> None:
        subprocess.run([COMMAND, *arguments], env=os.environ | (env or {}), check=True, capture_output=True)

    return fastest(run)


def least_processor_time(*arguments: str, env: dict[str, str] | None = None) -> float:
    """Seconds of processor time that `reshard ARGUMENTS` takes, at best."""
    return min(measured([COMMAND, *arguments], os.environ | (env or {})).cpu for _ in range(REPEATS))
