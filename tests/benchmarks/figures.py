"""A measured figure against what was promised, and the list of them in build/bench.json."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

COMMAND = Path(sys.executable).parent / "reshard"
REPEATS = 5  # of what takes a fraction of a second; the fastest counts, because the machine only ever adds to it


@dataclass(frozen=True, slots=True)
class Figure:
    """Smaller is better; a ``must`` that is not met fails the benchmark, an ``aim`` is only reported."""

    name: str
    value: float
    unit: str
    target: float
    kind: Literal["must", "aim"]

    @property
    def met(self) -> bool:
        return self.value <= self.target

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


def save(figures: Iterable[Figure], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([figure.to_dict() for figure in figures], indent=2) + "\n")


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
