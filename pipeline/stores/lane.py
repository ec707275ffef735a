"""Work that goes on behind its caller, in order, a bounded number of bytes behind."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from reshard.pipeline.limits import LANE_BYTES, LANE_STEPS

Step = Callable[[memoryview], object]


class Lane:
    """A thread that hands views to steps in the order in which they were put.

    ``put`` waits while more than ``limit`` bytes or LANE_STEPS are under way, so memory does not depend on what passes.
    The first error of a step ends the lane: every later call raises it. Views must not be written to once they were
    put.

    >>> from contextlib import closing
    >>> seen = []
    >>> with closing(Lane()) as lane:
    ...     for word in (b"read", b"hash", b"write"):
    ...         lane.put(lambda view: seen.append(bytes(view)), memoryview(word))
    ...     lane.flush()
    >>> seen
    [b'read', b'hash', b'write']
    """

    def __init__(self, name: str = "lane", limit: int = LANE_BYTES) -> None:
        self._limit = limit
        self._waiting: deque[tuple[Step, memoryview]] = deque()
        self._held = 0  # bytes put and not yet through
        self._busy = False
        self._ended = False
        self._failure: BaseException | None = None
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"reshard-{name}", daemon=True)
        self._thread.start()

    def put(self, step: Step, view: memoryview) -> None:
        """Have ``step(view)`` called behind everything that was put before; raises what an earlier step raised."""
        with self._change:
            if self._ended:
                raise RuntimeError("nothing can be put into a lane that was closed")
            while self._is_full(len(view)) and self._failure is None:
                self._change.wait()
            self.check()
            self._waiting.append((step, view))
            self._held += len(view)
            self._change.notify_all()

    def _is_full(self, more: int) -> bool:
        return len(self._waiting) >= LANE_STEPS or (self._held > 0 and self._held + more > self._limit)

    def flush(self, left: int = 0) -> None:
        """Wait until all but ``left`` of the steps that were put are through; raises what one raised."""
        with self._change:
            while len(self._waiting) + self._busy > left and self._failure is None:
                self._change.wait()
            self.check()

    def close(self, wait: float | None = None) -> None:
        """Drop what waits, and return when no step runs any more, or after ``wait`` seconds; raises nothing."""
        with self._change:
            self._waiting.clear()
            self._ended = True
            self._change.notify_all()
        self._thread.join(wait)

    def check(self) -> None:
        """Raises what a step raised."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._waiting and not self._ended:
                    self._change.wait()
                if not self._waiting:
                    return
                step, view = self._waiting.popleft()
                self._busy = True
            try:
                step(view)
            except BaseException as error:  # raised by the next put or flush  # noqa: BLE001
                with self._change:
                    self._failure = error
                    self._waiting.clear()
            with self._change:
                self._busy = False
                self._held -= len(view)
                self._change.notify_all()
            del step, view
