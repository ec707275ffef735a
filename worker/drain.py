"""How a worker is told to end: one byte that the main process shares with its children, and the signals that set it.

SIGTERM (or Ctrl-C) once: take nothing new, copies hand back at their next window, shorter steps finish; what has not
ended after the drain time is handed back unfinished. A second time: everything is handed back at once.

Celery's warm shutdown waits for its children and tells them nothing, and it ignores a second SIGTERM; its cold one
kills them without a word. So the byte is ours, and so is the second signal. The byte is shared memory because a child
may be anywhere when it is set.
"""

from __future__ import annotations

import mmap
import os
import signal
import time
from types import FrameType
from typing import Any

GRACE = 5.0  # seconds after the second signal at which the main process ends whatever its children do
HANDED_OVER = 75  # exit code of a child that gave its work back: EX_TEMPFAIL of sysexits.h

_RUN, _DRAIN, _NOW = 0, 1, 2

_shared = mmap.mmap(-1, 1)  # anonymous and shared: what the parent writes, its forked children read
_own = _RUN  # what this process alone was told
_since: float | None = None  # when this process first saw that it shall end
_busy = False


def wanted() -> bool:
    """Whether this process shall end soon."""
    return max(_shared[0], _own) != _RUN


def overdue(limit: float) -> bool:
    """Whether it should have ended by now: ``limit`` seconds after it first saw, or at once after a second signal."""
    global _since
    if not wanted():
        return False
    if max(_shared[0], _own) == _NOW:
        return True
    _since = _since or time.monotonic()
    return time.monotonic() - _since > limit


def busy(now: bool) -> None:
    """Whether a unit is being worked on in this child."""
    global _busy
    _busy = now


def in_main(**_: Any) -> None:
    """On the first signal to the main process (Celery's ``worker_shutting_down``)."""
    _shared[0] = max(_shared[0], _DRAIN)
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(name, _again)


def _again(number: int, frame: FrameType | None) -> None:
    _shared[0] = _NOW
    signal.signal(signal.SIGALRM, lambda number, frame: os._exit(128 + signal.SIGTERM))
    signal.setitimer(signal.ITIMER_REAL, GRACE)


def in_child(**_: Any) -> None:
    """In each new child: a SIGTERM that reaches it directly drains it too (a process manager may signal all of us)."""
    signal.signal(signal.SIGTERM, _told)


def _told(number: int, frame: FrameType | None) -> None:
    global _own
    if not _busy:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    _own = min(_own + 1, _NOW)
