"""What a terminal is shown: colours, and lines that end between words. Loaded where there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.highlighter import RegexHighlighter
from rich.theme import Theme


def _cell(style: str, *words: str) -> str:
    """A pattern for these words where they are a cell of a row, or its beginning."""
    return rf"(?m)(?:^|  |: )(?P<{style}>(?:{'|'.join(words)})\b)(?=[,:;]| \(|  |$)"


class _Words(RegexHighlighter):
    """Colours states and results where they fill a cell or begin one, and the codes of errors."""

    highlights = (
        _cell("good", "done", "passed", "ok", "ready"),
        _cell("bad", "failed", "trouble", "published unverified", "stopped"),
        _cell("weak", "cancelled", "paused", "drained", "paused itself", "warning", "skipped", "inconclusive"),
        r"(?m)(?P<bad>^error\[[^\]]+\])",
    )


_COLOURS = Theme({"good": "green", "bad": "red", "weak": "yellow"})


class Terminal(Console):
    """Prints text as ``laid_out`` makes it for so many columns, or for a pipe (None)."""

    def __init__(self, stream: Any, laid_out: Callable[[str, int | None], str]) -> None:
        super().__init__(file=stream, markup=False, emoji=False, highlighter=_Words(), theme=_COLOURS)
        self._laid_out = laid_out

    def print(self, *objects: Any, **options: Any) -> None:
        if any(isinstance(text, str) for text in objects):
            options["soft_wrap"] = True  # a word too long for a line is the terminal's to break
        width = self.width if self.file.isatty() else None
        super().print(*(self._laid_out(o, width) if isinstance(o, str) else o for o in objects), **options)
