"""When the next request to a Hub may go, and what is told of a wait. No HTTP client is loaded for it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

TELL_EVERY = 10.0  # seconds between two words about a long wait, which ends sooner as time goes on


class RateLimitWindow(NamedTuple):
    """What the Hub says is left of one fixed window, in the ``RateLimit`` headers of its answers."""

    kind: str  # api, resolve
    left: int  # calls
    seconds: int  # until the window ends
    quota: int  # calls of a whole window
    window: int  # seconds of it


class Waits:
    """Why threads wait, told to ``tell``: each new reason, the one before where one is over, and "" after the last."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._reasons: list[str] = []

    @contextmanager
    def told(self, why: str) -> Iterator[None]:
        """Inside, somebody waits."""
        with self._lock:
            self._reasons.append(why)
            self._tell(why)
        try:
            yield
        finally:
            with self._lock:
                self._reasons.remove(why)
                self._tell(self._reasons[-1] if self._reasons else "")


class RateLimiter:
    """When the next request to one Hub with one credential may go, for all threads of a process.

    This one waits as long as the Hub asked, and heeds nothing else; others may raise to stop the work.
    """

    def __init__(self, waits: Waits | None = None) -> None:
        self._waits = waits or Waits(lambda why: None)
        self._lock = threading.Lock()
        self._not_before = 0.0

    def before(self, kind: str) -> None:
        """Called before each request; ``kind`` is ``api`` or ``resolve``, the Hub's own rate classes."""
        while (wait := self._not_before - time.monotonic()) > 0:
            self.sleep(min(wait, TELL_EVERY), rate_limited(wait))

    def update(self, window: RateLimitWindow) -> None:
        """Called with each answer that reports its rate-limit window; never raises."""

    def refused(self) -> None:
        """Called with each 429, a call that was one too many; never raises."""

    def slow_down(self, seconds: float) -> None:
        """The Hub asked for ``seconds`` without requests."""
        with self._lock:
            self._not_before = max(self._not_before, time.monotonic() + seconds)

    def sleep(self, seconds: float, why: str) -> None:
        """Every wait between two attempts is spent here; ``why`` is for those who wait for the work."""
        with self._waits.told(why):
            self._wait(seconds)

    def _wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def moved(self, count: int) -> None:
        """``count`` bytes of a request's body went out: a sign of life from whatever thread sends. Never raises."""


def rate_limited(seconds: float) -> str:
    """Why a call waits that the Hub's limits hold back."""
    return f"rate limited for {math.ceil(seconds)} s"
