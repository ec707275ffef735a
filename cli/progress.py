"""Long work, as it is seen: a line for each phase on a terminal, few plain lines elsewhere."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from math import inf
from threading import RLock, Timer

from reshard.cli.output import Output, agrees, console, count, has_console, human_bytes, lasted, show
from reshard.client.text import human_rate

PHASE = 18  # columns of the longest phase
WIDE = 100  # columns of a terminal that has room for a long bar
LONG_BAR, SHORT_BAR = 20, 8  # columns
GAPS = 3  # columns between phase, bar and figures, and one at the end
LINE_EVERY = 10.0  # seconds between plain lines; a log wants few, and a person some sign of life

Files = tuple[int, int]  # that are written, of how many


class Bar(ExitStack):
    """Shows progress, and here nothing at all.

    ``done`` and ``total`` count bytes of the weights, and are zero, as ``files`` are, where a phase has none. What is
    done is never shown as more than all. ``figures`` are words for what is done where something else is counted.
    """

    def show(self, phase: str, done: int = 0, total: int = 0, files: Files = (0, 0), figures: str = "") -> None:
        """``phase`` is at work, and those shown before it are over."""

    def waits(self, why: str) -> None:
        """What the work waits for; "" when it goes on."""

    def say(self, text: str) -> None:
        """Something to read between two states of the bar."""

    def agrees(self, question: str) -> bool:
        """The answer of who sits at the terminal; where nobody does, yes."""
        return agrees(question) if sys.stdin.isatty() else True


def bar(output: Output) -> Bar:
    """The bar that fits ``output`` and the terminal that stderr is or is not."""
    if not output.human:
        return Bar()
    shown = console(sys.stderr) if has_console(sys.stderr) else None
    return _Terminal() if shown and shown.is_terminal and not shown.is_dumb_terminal else _Lines()


class _Terminal(Bar):
    """A line for each phase: over, with the time it took, or at work, with a bar."""

    def __init__(self) -> None:
        super().__init__()
        from rich import progress as rich
        from rich.table import Column

        phase = rich.TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, min_width=PHASE))
        shown = console(sys.stderr)
        width = LONG_BAR if shown.width >= WIDE else SHORT_BAR
        self._room = shown.width - PHASE - width - GAPS  # columns for the figures
        # A row that fills the terminal is two once somebody types Ctrl-C behind it.
        figures = rich.TextColumn("{task.fields[figures]}", markup=False, table_column=Column(max_width=self._room))
        columns = (phase, rich.BarColumn(width, table_column=Column(no_wrap=True, min_width=width)), figures)
        self._progress = rich.Progress(*columns, console=shown, transient=True)
        self._phase, self._task = "", rich.TaskID(0)
        self._rate = _Rate()
        self._figures: Callable[[int], str] = lambda room: ""
        self._why = ""
        self.enter_context(self._progress)

    def show(self, phase: str, done: int = 0, total: int = 0, files: Files = (0, 0), figures: str = "") -> None:
        done = min(done, total)
        if phase != self._phase:
            if self._phase:
                self._progress.update(self._task, total=1, completed=1, figures=lasted(self._rate.seconds))
            self._phase, self._rate = phase, _Rate(done)
            self._task = self._progress.add_task(phase, total=None, figures=self._why)
        self._figures = lambda room: figures or self._rate.text(done, total, files, room)
        self._progress.update(self._task, completed=done, total=total or None)
        self._draw()

    def waits(self, why: str) -> None:
        self._why = f"waiting: {re.sub('https?://', '', why)}" if why else ""
        if why and not self._phase:
            self.show("waiting")
        if self._phase:
            self._draw()

    def _draw(self) -> None:
        # One that has no room takes more than one line anyway.
        beside = len(f"; {self._why}") if 0 < len(self._why) <= self._room else 0
        figures = self._figures(self._room - beside)
        if beside and len(figures) > self._room - beside:
            figures = ""
        self._progress.update(self._task, figures="; ".join(filter(None, (figures, self._why))))

    def say(self, text: str) -> None:
        self._progress.console.print(text)

    def agrees(self, question: str) -> bool:
        self._progress.stop()
        try:
            return super().agrees(question)
        finally:
            self._progress.start()


class _Lines(Bar):
    """A line at most every ``LINE_EVERY`` seconds: how far the work is, and what it waits for.

    What comes between is told with the next line, the phase if it still is the phase, and a wait also if it is over.
    """

    def __init__(self) -> None:
        super().__init__()
        self._phase = self._progress = self._why = ""
        self._waits = False  # for ``_why`` now
        self._untold = False  # that it does, or did
        self._rate = _Rate()
        self._last = -inf
        self._lock = RLock()  # waits are told by whatever thread waits
        self._timer: Timer | None = None  # tells what nobody comes back to tell
        self.callback(self._stop)

    def show(self, phase: str, done: int = 0, total: int = 0, files: Files = (0, 0), figures: str = "") -> None:
        done = min(done, total)
        with self._lock:
            if phase != self._phase:
                self._phase, self._rate = phase, _Rate(done)
            figures = figures or self._rate.text(done, total, files)
            self._progress = f"{phase}: {figures}" if figures else phase
            self._tell()

    def waits(self, why: str) -> None:
        with self._lock:
            if why and (why != self._why or not self._waits):
                self._why, self._untold = why, True
            self._waits = bool(why)
            if self._waits or self._untold:
                self._tell()

    def say(self, text: str) -> None:
        show(sys.stderr, text)

    def _tell(self) -> None:
        left = LINE_EVERY - (time.monotonic() - self._last)
        if left <= 0:
            self._stop()
            self._last = time.monotonic()
            wait = f"{'waiting' if self._waits else 'waited'}: {self._why}"
            self.say("; ".join(filter(None, (self._progress, wait if self._waits or self._untold else ""))))
            self._untold = False
        elif self._timer is None:
            self._timer = Timer(left, self._tell_late)
            self._timer.daemon = True
            self._timer.start()

    def _tell_late(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer = None
                self._tell()

    def _stop(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None


class _Rate:
    """How fast a phase is, from its first sight on."""

    def __init__(self, done: int = 0) -> None:
        self._began, self._first = time.monotonic(), done

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def text(self, done: int, total: int, files: Files, room: float = inf) -> str:
        """``3 of 12 files, 20.0 MB of 100.0 MB, 2.0 MB/s, 40 s left``; as much of it as there is and has ``room``."""
        if not total:
            return ""
        moved = f"{human_bytes(done)} of {human_bytes(total)}"
        parts = [f"{files[0]:,} of {count(files[1], 'file')}", moved] if files[1] else [moved]
        choices = [parts, [moved]]
        rate = (done - self._first) / self.seconds if self.seconds > 0 else 0.0
        if rate > 0:
            left = f"{lasted((total - done) / rate)} left"
            choices[:0] = [[*parts, human_rate(int(rate)), left], [*parts, left]]
        texts = [", ".join(choice) for choice in choices]
        return next((text for text in texts if len(text) <= room), moved)
