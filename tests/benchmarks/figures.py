"""A measured figure against what was promised, and the list of them in build/bench.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal


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
