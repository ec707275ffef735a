"""Several source files at a time, as many as cores, memory and disk allow.

The thread that calls waits, so that Ctrl-C reaches it whatever the others wait for.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeVar

from reshard.pipeline.limits import ABORT_WAIT, COPY_CORES, JOBS_MAX, MEMORY_FLOOR, MEMORY_FLOOR_XET, MEMORY_MORE
from reshard.pipeline.planning.estimate import needs
from reshard.pipeline.planning.model import Plan
from reshard.pipeline.text import counted

T = TypeVar("T")


def jobs_here(plan: Plan, asked: int | None, memory: int, disk: int) -> tuple[int, str]:
    """How many source files of ``plan`` to copy at a time, and why it is not as many as ``asked``, or "".

    Unless asked it is one for two cores. The first takes MEMORY_FLOOR of ``memory`` and each more MEMORY_MORE; over Xet
    each takes MEMORY_FLOOR_XET, most of which are hf_xet's buffers. On ``disk`` lies what waits to be sent; in bytes.
    """
    over_xet = "xet" in plan.transports
    fit = memory // MEMORY_FLOOR_XET if over_xet else 1 + (memory - MEMORY_FLOOR) // MEMORY_MORE
    room = {"RESHARD_MEMORY_LIMIT": fit}
    if lies := needs(plan, {}).least_disk:
        room["RESHARD_TMPDIR"] = disk // lies
    least = min(room, key=room.__getitem__)
    wanted = max(1, min(cores() // COPY_CORES if asked is None else asked, len(plan.groups), JOBS_MAX))
    jobs = max(1, min(wanted, room[least]))
    if asked is None or jobs == wanted:
        return jobs, ""
    return jobs, f"copying {counted(jobs, 'source file')} at a time instead of {wanted}, limited by {least}"


def cores() -> int:
    """Those that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def abreast(items: Sequence[T], jobs: int, work: Callable[[T], None], halt: threading.Event) -> None:
    """Call ``work`` with each item, ``jobs`` at a time; raises the first error.

    ``halt`` is then set, as after an interrupt, and the others end; one that does not is left behind after ABORT_WAIT.

    >>> done = []
    >>> abreast([1, 2, 3], 2, done.append, threading.Event())
    >>> sorted(done)
    [1, 2, 3]
    """
    if jobs == 1:
        for item in items:
            work(item)
        return
    waiting, ends = iter(items), SimpleQueue[BaseException | None]()

    def some() -> None:
        try:
            for item in waiting:
                if halt.is_set():
                    break
                work(item)
        except BaseException as error:  # raised below  # noqa: BLE001
            ends.put(error)
            halt.set()
        else:
            ends.put(None)

    threads = [threading.Thread(target=some, name=f"reshard-copy-{n}", daemon=True) for n in range(jobs)]
    try:
        for thread in threads:
            thread.start()
        for _ in threads:
            if (error := ends.get()) is not None:
                raise error
    finally:
        halt.set()
        until = time.monotonic() + ABORT_WAIT
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))
