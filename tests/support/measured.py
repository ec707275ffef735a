"""Run a function in a process of its own and report its peak of memory and its processor time.

The peak is the kernel's high-water mark of the child's own memory (``VmHWM``); rusage would count what the parent had
when it forked.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

# Seconds of processor time: of a loop that stays in the processor's caches, and of one that does not.
REFERENCE_LOOP, REFERENCE_SPREAD = 0.4, 0.64
_PACES = 3  # times that the pace of this machine is taken, for each bound
_PACED_EVERY = 2.0  # seconds between two of them, each of which takes about one


class Measured(NamedTuple):
    peak: int  # bytes
    seconds: float  # by the clock, for benchmarks; a busy machine stretches them
    cpu: float  # seconds of processor time, without its children's
    result: Any


def measured(function: str, *arguments: Any, env: dict[str, str] | None = None, timeout: float = 600) -> Measured:
    """Call ``module:name`` with JSON-able arguments in a fresh interpreter; raises when it fails."""
    command = [sys.executable, "-m", "tests.support.measured", function, json.dumps(arguments)]
    root = Path(__file__).parents[2]
    try:
        done = subprocess.run(
            command, cwd=root, env=os.environ | (env or {}), capture_output=True, text=True, timeout=timeout, check=True
        )
    except subprocess.CalledProcessError as error:
        error.add_note(error.stderr[-2000:])  # which nothing else shows
        raise
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def within(cpu: float, seconds: float, paces: Sequence[float] = ()) -> bool:
    """Whether ``cpu`` is at most what the machine that bounds were taken on does in ``seconds`` of processor time.

    A host that is shared or throttled stretches processor time, too, up to five times and not evenly: neighbours who
    use the memory stretch what needs it, and no loop of the processor's own. So what is above the bound is held against
    both kinds, the slowest of three: those that were taken while it ran, as the next second may be another, and as many
    as are missing here and now.
    """
    return cpu <= seconds or cpu <= seconds * max(*paces, *(_slower() for _ in range(_PACES - len(paces))))


@contextmanager
def pacing() -> Iterator[list[float]]:
    """How many times slower than that machine this one is, up to three times while the body waits for its work."""
    paces, ended = list[float](), threading.Event()

    def sample() -> None:
        while len(paces) < _PACES and not ended.wait(_PACED_EVERY):
            paces.append(_slower())

    sampling = threading.Thread(target=sample, name="pacing")
    sampling.start()
    try:
        yield paces
    finally:
        ended.set()
        sampling.join()


def _slower() -> float:
    return max(_took(_loop) / REFERENCE_LOOP, _took(_spread) / REFERENCE_SPREAD)


def _took(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def _loop() -> None:
    sum(i * i for i in range(5_000_000))


def _spread() -> None:
    made = {f"layers.{i}": (i, "F32") for i in range(400_000)}
    sorted(made, key=lambda name: name[::-1])


def peak() -> int:
    """The most memory that this process ever had, in bytes."""
    match = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def main() -> None:
    module, _, name = sys.argv[1].partition(":")
    # 4 MB that httpcore2 imports where it is there: selenium brings it, for the tests of the page, and nothing of ours.
    sys.modules["trio"] = None
    start = time.perf_counter()
    result = getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2]))
    seconds = time.perf_counter() - start
    print(json.dumps({"peak": peak(), "seconds": seconds, "cpu": time.process_time(), "result": result}))


if __name__ == "__main__":
    main()
