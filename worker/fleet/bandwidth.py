"""One copy's share of the bandwidth that an operator gave to all copies together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from reshard.worker.queue.scripts import BROKER_UNAVAILABLE

SHARE = 0.1  # seconds of the whole bandwidth in one share: ten calls a second for all copies, however many there are
CHECK = 0.2  # seconds between two signs of life, and two reads of the limit, while it waits


class Share(NamedTuple):
    bytes: int
    wait: float  # seconds until they may be read


class BandwidthLimiter:
    """Counts what a copy reads, and has it wait for its turn."""

    def __init__(
        self, bandwidth: Callable[[], int | None], take: Callable[[int], Share], check: Callable[[], None]
    ) -> None:
        """``bandwidth`` is in bytes a second, None without a limit; ``take`` has a share of at least so many bytes.

        ``check`` is called through every wait; whatever it raises ends the wait.
        """
        self._bandwidth = bandwidth
        self._take = take
        self._check = check
        self._allowed = 0  # bytes that may still be read, fewer than none when more were
        self._wait = 0.0  # seconds, of the last share

    def spend(self, count: int) -> None:
        """``count`` bytes were read; returns when they were allowed."""
        bandwidth = self._bandwidth()
        if bandwidth is None:
            self._allowed = 0
            return
        self._allowed -= count
        if self._allowed >= 0:
            return
        try:
            share, self._wait = self._take(-self._allowed)
        except BROKER_UNAVAILABLE:
            share = -self._allowed  # as slow as it was
        self._allowed += share
        until = time.monotonic() + self._wait
        while (left := until - time.monotonic()) > 0 and self._bandwidth() == bandwidth:
            self._check()
            time.sleep(min(left, CHECK))
