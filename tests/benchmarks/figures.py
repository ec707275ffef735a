"""What is measured: figures against what was promised, and races of several that do the same."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tests.benchmarks.race import Cost, measured

COMMAND = Path(sys.executable).parent / "reshard"
REPEATS = 5  # of what takes a fraction of a second; the fastest counts, because the machine only ever adds to it

# What a busy machine does not change, and tests may hold.
STEADY = frozenset({"MB"})


@dataclass(frozen=True, slots=True)
class Figure:
    """Smaller is better. A ``must`` that is not met fails the benchmark; an ``aim`` and a ``report`` are only told."""

    name: str
    value: float
    unit: str
    target: float
    kind: Literal["must", "aim", "report"]

    @property
    def met(self) -> bool:
        return self.value <= self.target

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


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
