"""What was asked of the Hub: every request in a ring, and totals per class."""

import itertools
import re
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

from .errors import HubError

RING = 100_000
CLASSES = ("api", "resolve", "cdn", "lfs", "xet", "telemetry")


def class_of(path: str) -> str:
    """``lfs`` has the batch call and the stored bytes, ``xet`` the content store; tokens and commits are ``api``."""
    if path.startswith("/_cdn/"):
        return "cdn"
    if path.startswith("/_lfs/") or ".git/info/lfs/" in path:
        return "lfs"
    if path.startswith("/_cas/"):
        return "xet"
    if path.startswith("/v1/"):
        return "telemetry"
    if "/resolve/" in path and not path.startswith("/api/"):
        return "resolve"
    return "api"


@dataclass
class Entry:
    """One request; ``status`` 0 means that no answer was sent, ``up`` and ``down`` count body bytes."""

    n: int
    method: str
    path: str  # with the query
    kind: str
    status: int = 0
    up: int = 0
    down: int = 0
    user: str | None = None
    fault: str = ""
    at: float = field(default_factory=time.time)
    seconds: float = 0.0


class Log:
    """The ring, and a condition that wakes whoever waits for a request to be seen."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        self._entries: deque[Entry] = deque(maxlen=RING)
        self._reset_totals()

    def begin(self, method: str, target: str, path: str) -> Entry:
        return Entry(next(self._numbers), method, target, class_of(path))

    def add(self, entry: Entry) -> None:
        """Record a request whose answer is about to be sent, so that its client finds it in the log."""
        entry.seconds = time.time() - entry.at
        with self._changed:
            self._entries.append(entry)
            total = self._totals[entry.kind]
            total["requests"] += 1
            total["up"] += entry.up
            total["down"] += entry.down
            self._changed.notify_all()

    def cut(self, entry: Entry, sent: int) -> None:
        """Correct an entry whose answer broke off after ``sent`` body bytes."""
        with self._changed:
            self._totals[entry.kind]["down"] -= entry.down - sent
            entry.down = sent

    def report(self, reset: bool) -> dict[str, Any]:
        with self._changed:
            report = {
                "requests": [asdict(entry) for entry in self._entries],
                "totals": {kind: dict(total) for kind, total in self._totals.items()},
            }
            if reset:
                self._entries.clear()
                self._reset_totals()
            return report

    def totals(self) -> dict[str, dict[str, int]]:
        with self._changed:
            return {kind: dict(total) for kind, total in self._totals.items()}

    def wait(self, match: str, count: int, timeout: float) -> list[dict[str, Any]]:
        """The first ``count`` answered requests that match ``METHOD path?query``; HubError 408 after ``timeout``."""
        pattern = re.compile(match)
        found: list[Entry] = []

        def enough() -> bool:
            found[:] = [e for e in self._entries if pattern.search(f"{e.method} {e.path}")][:count]
            return len(found) >= count

        with self._changed:
            if not self._changed.wait_for(enough, timeout):
                raise HubError(408, f"{len(found)} of {count} requests matched {match!r} in {timeout} s")
            return [asdict(entry) for entry in found]

    def _reset_totals(self) -> None:
        self._totals = {kind: {"requests": 0, "up": 0, "down": 0} for kind in CLASSES}
