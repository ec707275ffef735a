"""How fast workers call the Hub: as it asks, all of them alike, and never so patiently that a cancel goes unheard.

One worker that is told to wait tells the others: the wait of each budget (an endpoint and a credential) is a key in
Redis that lives as long as the wait. While Redis is away each process waits on its own.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable

import redis

from reshard.pipeline.stores.retry import OwnPace
from reshard.worker.scripts import PREFIX

log = logging.getLogger(__name__)

SLICE = 1.0  # seconds between two looks whether the work shall go on


class SharedPace(OwnPace):
    """A wait that the Hub asked for is life, not a hang, and is cut short by whatever ``check`` raises."""

    def __init__(self, budget: str, client: redis.Redis, check: Callable[[], None], alive: Callable[[], None]) -> None:
        super().__init__()
        self._alive = alive
        self._key = f"{PREFIX}pace:{hashlib.sha256(budget.encode()).hexdigest()[:16]}"
        self._redis = client
        self._check = check

    def before(self, kind: str) -> None:
        while (wait := self._others_wait()) > 0:
            self.sleep(wait)
        super().before(kind)

    def slow_down(self, seconds: float) -> None:
        super().slow_down(seconds)
        longest = max(seconds, self._others_wait())
        try:
            self._redis.set(self._key, "", px=math.ceil(longest * 1000))
        except redis.RedisError as error:
            log.warning("other workers are not told to wait %.0f s: %s", seconds, error)

    def sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._check()
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, SLICE))
            self._check()

    def moved(self, count: int) -> None:
        """What is sent keeps a lease as well as what is read."""
        self._alive()

    def _others_wait(self) -> float:
        try:
            left = self._redis.pttl(self._key)
        except redis.RedisError as error:
            log.warning("how long other workers wait is not known: %s", error)
            return 0.0
        return max(0, int(str(left))) / 1000


def paces(client: redis.Redis, check: Callable[[], None], alive: Callable[[], None]) -> Callable[[str], SharedPace]:
    """One pace for each budget, all of which heed ``check`` when they wait and tell ``alive`` when bytes go out."""
    made: dict[str, SharedPace] = {}
    return lambda budget: made.setdefault(budget, SharedPace(budget, client, check, alive))
