"""How fast this worker calls the Hub: as the Hub asks, and never so patiently that a cancel or a drain goes unheard."""

from __future__ import annotations

import time
from collections.abc import Callable

from reshard.pipeline.stores.retry import OwnPace

SLICE = 1.0  # seconds between two looks whether the work shall go on


class WorkerPace(OwnPace):
    """A wait that the Hub asked for is life, not a hang, and is cut short by whatever ``check`` raises."""

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self._check = check

    def sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._check()
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, SLICE))
            self._check()


def paces(check: Callable[[], None]) -> Callable[[str], WorkerPace]:
    """One pace for each budget, all of which heed ``check``."""
    made: dict[str, WorkerPace] = {}
    return lambda budget: made.setdefault(budget, WorkerPace(check))
