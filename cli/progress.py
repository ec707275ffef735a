"""Long work, as it is seen: a bar with bytes, rate and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack

from reshard.cli.output import Output, console, human_bytes

LINE_EVERY = 10.0  # seconds between plain lines; a log wants few, and a person some sign of life


class Bar(ExitStack):
    """Shows progress, and here nothing at all; ``done`` and ``total`` count bytes of the weights."""

    def show(self, step: str, done: int, total: int) -> None:
        pass

    def say(self, text: str) -> None:
        """Something to read between two states of the bar."""

    def agrees(self, question: str) -> bool:
        """The answer of who sits at the terminal; where nobody does, yes."""
        return True


def bar(output: Output) -> Bar:
    """The bar that fits ``output`` and the terminal that stderr is or is not."""
    if not output.human:
        return Bar()
    return _Terminal() if sys.stderr.isatty() else _Lines()


class _Terminal(Bar):
    def __init__(self) -> None:
        super().__init__()
        from rich import progress as rich

        columns = (rich.BarColumn(), rich.DownloadColumn(), rich.TransferSpeedColumn(), rich.TimeRemainingColumn())
        self._progress = rich.Progress("{task.description}", *columns, console=console(sys.stderr), transient=True)
        self._task = self._progress.add_task("waiting", total=None)
        self.enter_context(self._progress)

    def show(self, step: str, done: int, total: int) -> None:
        self._progress.update(self._task, description=step, completed=done, total=total or None)

    def say(self, text: str) -> None:
        self._progress.console.print(text)

    def agrees(self, question: str) -> bool:
        from typer import confirm

        if not sys.stdin.isatty():
            return True
        self._progress.stop()
        try:
            return confirm(question, err=True)
        finally:
            self._progress.start()


class _Lines(Bar):
    def __init__(self) -> None:
        super().__init__()
        self._step = ""
        self._first = (0.0, 0)  # when this step was first seen, and the bytes done by then
        self._last = 0.0

    def show(self, step: str, done: int, total: int) -> None:
        now = time.monotonic()
        if step != self._step:
            self._step, self._first = step, (now, done)
        elif now - self._last < LINE_EVERY:
            return
        self._last = now
        sys.stderr.write(self._line(now, done, total) + "\n")
        sys.stderr.flush()

    def say(self, text: str) -> None:
        console(sys.stderr).print(text)

    def _line(self, now: float, done: int, total: int) -> str:
        if done >= total:  # nothing to copy yet, or everything copied
            return self._step
        started, before = self._first
        rate = (done - before) / (now - started) if now > started else 0.0
        left = f", {human_bytes(int(rate))}/s, {(total - done) / rate:.0f} s left" if rate > 0 else ""
        return f"{self._step}: {human_bytes(done)} of {human_bytes(total)}{left}"
