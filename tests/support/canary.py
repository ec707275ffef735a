"""What a hostile pickle holds: a call, and a canary file that shows whether somebody made it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Runs:
    """Pickles as a call of ``function`` with ``args``."""

    def __init__(self, function: Callable[..., Any], *args: object) -> None:
        self._reduced = (function, args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self._reduced


def touch(canary: Path) -> Runs:
    """Whoever loads it runs a shell that makes ``canary``."""
    return Runs(os.system, f"touch {canary}")
