"""How a worker is drained: one byte that the main process shares with its children, and the signals that set it.

SIGTERM (or Ctrl-C) once: take nothing new, copies hand back at once, shorter steps finish; what has not ended after the
drain time is handed back unfinished. A second time: everything is handed back at once.

Celery's warm shutdown waits for its children and tells them nothing, and it ignores a second SIGTERM; its cold one
kills them without a word. So the byte is ours, and so is the second signal. It is shared memory because a child may be
anywhere when it is set.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

GRACE = 5.0  # seconds after the second signal at which the main process ends whatever its children do
HANDED_OVER = 75  # exit code of a child that gave its work back: EX_TEMPFAIL of sysexits.h

_RUN, _DRAIN, _NOW = 0, 1, 2

_shared = mmap.mmap(-1, 2)  # anonymous and shared: what the parent writes, its forked children read
_SIGNAL, _AFAR = 0, 1  # what the signals say, and whether an operator has it drained for now (fleet.py)
_own = _RUN  # the level that only this process was signalled
_since: float | None = None  # when this process first saw that it shall end


def wanted() -> bool:
    """Whether this process shall take nothing new and hand back what it has."""
    return bool(_level() or _shared[_AFAR])


def _level() -> int:
    return max(_shared[_SIGNAL], _own)


def overdue(limit: float) -> bool:
    """Whether that should be over by now: ``limit`` seconds after it first saw, or at once after a second signal."""
    global _since
    if not wanted():
        _since = None
        return False
    if _level() == _NOW:
        return True
    _since = _since or time.monotonic()
    return time.monotonic() - _since > limit


def from_afar(drained: bool) -> None:
    """In the main process: an operator has this worker drained, or has it take work again."""
    _shared[_AFAR] = int(drained)


def in_main(**_: Any) -> None:
    """On the first signal to the main process (Celery's ``worker_shutting_down``)."""
    log.info("shutting down: tasks that cannot finish soon are handed back; a second signal stops the worker at once")
    _shared[_SIGNAL] = max(_shared[_SIGNAL], _DRAIN)
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(name, _again)


def _again(number: int, frame: FrameType | None) -> None:
    _shared[_SIGNAL] = _NOW
    signal.signal(signal.SIGALRM, lambda number, frame: os._exit(128 + signal.SIGTERM))
    signal.setitimer(signal.ITIMER_REAL, GRACE)


@contextmanager
def heeded() -> Iterator[None]:
    """While a child works: a SIGTERM that reaches it directly drains it, and ends it when the work was handed back.

    A process manager may signal every process of a service. An idle child dies of it, which is what it shall do;
    Celery installs that handler after every hook that it offers, so ours is here.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # a pool of threads has one main process, which has the signal
        return
    before = signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if _own:
            os.kill(os.getpid(), signal.SIGTERM)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    global _own
    _own = min(_own + 1, _NOW)
