"""Rate limits as the Hub states them: fixed windows per token, in the RateLimit headers of every answer."""

import math
import threading
import time

from .errors import HubError


class Budget:
    """Counts requests per (class, caller) in fixed windows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._windows: dict[tuple[str, str], tuple[float, int]] = {}  # -> (end, used)

    def spend(self, kind: str, caller: str, quota: int, window: int) -> dict[str, str]:
        """Count one request; the headers that say what is left, or HubError 429."""
        now = time.monotonic()
        with self._lock:
            end, used = self._windows.get((kind, caller), (now + window, 0))
            if now >= end:
                end, used = now + window, 0
            used += 1
            self._windows[kind, caller] = (end, used)
        headers = {
            "RateLimit": f'"{kind}";r={max(0, quota - used)};t={math.ceil(end - now)}',
            "RateLimit-Policy": f'"fixed window";"{kind}";q={quota};w={window}',
        }
        if used > quota:
            raise HubError(429, "We had to rate limit you. Retry later.", headers=headers)
        return headers

    def reset(self) -> None:
        with self._lock:
            self._windows.clear()
