"""How a command answers: text for people, one JSON document per line, or only what a script needs."""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, TextIO
from unicodedata import east_asian_width

from reshard.cli.help import as_typed
from reshard.client import SCHEMA
from reshard.client import text as figures
from reshard.pipeline.errors import FolderNotWritable, UsageError
from reshard.pipeline.text import printable, printable_json, printable_lines

if TYPE_CHECKING:
    from reshard.cli.terminal import Terminal
    from reshard.client.models.records import Document

WRAP_MIN = 16  # columns; a narrower column is harder to read than a long line
_FIGURE = re.compile(r"(?<![^\s(])(\d(?:[\d.,]*\d)?) (?=[^\W\d]|%)")  # a number before its unit
# By which rich takes a pipe for a terminal.
_TERMINAL_BY_WISH = frozenset({"FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"})


@dataclass(frozen=True)
class Output:
    """Where answers go: results to stdout; messages on the way to stderr, so that results can be piped."""

    json: bool = False
    quiet: bool = False

    @property
    def human(self) -> bool:
        return not self.json and not self.quiet

    def result(self, data: Mapping[str, Any] | Document, text: str, bare: str = "") -> None:
        """One answer in its three forms: ``data`` for --json, ``text`` for people, ``bare`` for --quiet."""
        self.listing([data], text, [bare] if bare else [])

    def listing(self, data: Iterable[Mapping[str, Any] | Document], text: str, bare: Sequence[str]) -> None:
        """Many answers of one kind: a document for each, or all of them in ``text`` or in ``bare``."""
        if self.json:
            for one in data:
                self.document(one)
        elif not self.quiet:
            show(sys.stdout, text)
        elif bare:
            sys.stdout.write("\n".join([*(printable_lines(as_typed(one)) for one in bare), ""]))

    def document(self, data: Mapping[str, Any] | Document) -> None:
        """One line of JSON, which a terminal shows and does not obey; a reader of a pipe sees it when it happens."""
        facts = dict(data) if isinstance(data, Mapping) else data.document()
        plain = codecs.lookup(sys.stdout.encoding or "utf-8").name != "utf-8"  # then escapes have to be those of JSON
        line = json.dumps({"schema": SCHEMA} | facts, ensure_ascii=plain, default=str)
        sys.stdout.write(printable_json(line) + "\n")
        sys.stdout.flush()

    def say(self, text: str) -> None:
        """Something for a person to read on the way."""
        if self.human:
            show(sys.stderr, text)

    def warn(self, text: str) -> None:
        """What an answer lacks, said beside --json too."""
        if not self.quiet:
            show(sys.stderr, f"warning: {text}")

    def waits(self, why: str | None) -> None:
        """Why what was asked for does not start yet, if anything keeps it."""
        if why:
            self.say(f"waiting: {why}")


def agrees(question: str) -> bool:
    """The answer of whoever sits at the terminal: only yes is one."""
    sys.stderr.write(f"{printable(question)} [y/N]: ")  # Typer's own leaves a blank on stdout
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def lines(
    rows: Sequence[Sequence[str]], right: Collection[int] = (), indent: str = "", stream: TextIO | None = None
) -> str:
    """Rows under each other with aligned columns, those numbered in ``right`` to the right.

    On a terminal the last column is wrapped between words, under its own beginning, or under its row where there is no
    room for it or for one of its words beside the others. Where there is none for these others, the first column has a
    line of its own. Nothing is ever cut. ``stream`` is where they go, or else stdout.
    """
    stream = stream or sys.stdout
    if not rows:
        return ""
    rows = [[_spread(printable(cell)) for cell in row] for row in rows]
    width = console(stream).width if stream.isatty() else sys.maxsize
    return "\n".join(_joined(line.rstrip()) for shown in _rows(rows, right, indent, width) for line in shown)


def _rows(rows: Sequence[Sequence[str]], right: Collection[int], indent: str, width: int) -> list[list[str]]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    layout = "  ".join(f"{{:{'>' if i in right else '<'}{width}}}" for i, width in enumerate(widths))
    start = len(indent) + sum(widths[:-1]) + 2 * len(widths[:-1])
    if start > width and len(widths) > 2:
        others = _rows([row[1:] for row in rows], {i - 1 for i in right}, f"{indent}  ", width)
        return [[indent + row[0], *below] for row, below in zip(rows, others, strict=True)]
    beside = start + min(widths[-1], WRAP_MIN) <= width
    own = len(indent) + 4  # where the lines begin that the last column has for itself
    shown = []
    for row in rows:
        cell, begin = _broken(row[-1], max(WRAP_MIN, width - start)), start
        if not beside or any(start + len(line) > width for line in cell):
            cell, begin = ["", *_broken(row[-1], max(WRAP_MIN, width - own))], own
        first, *more = cell or [""]
        shown.append([indent + layout.format(*row[:-1], first), *(" " * begin + line for line in more)])
    return shown


def _spread(text: str) -> str:
    """``text`` as long as the columns that it takes: each character of two with one behind it that no text has."""
    if text.isascii():
        return text
    return "".join(f"{one}\1" if east_asian_width(one) in "WF" else one for one in text)


def _joined(spread: str) -> str:
    return spread.replace("\1", "")


def _broken(text: str, width: int, indent: str = "", hanging: str = "") -> list[str]:
    """The text in lines of ``width`` columns that end between words; a number stays with its unit."""
    joined = _FIGURE.sub("\\1\0", text)  # which no printable text has
    found = wrap(
        joined, width, initial_indent=indent, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace("\0", " ") for line in found]


def _hanging(row: str, width: int) -> list[str]:
    """The row as it is where it fits, else broken, with what follows indented under it."""
    text = row.lstrip()
    indent = row[: len(row) - len(text)]
    return [row] if len(row) <= width else _broken(text, width, indent, f"{indent}  ")


def refuse_unwritable(file: Path, option: str) -> None:
    """Before long work for ``file``: raises FolderNotWritable where it cannot be, and UsageError for stdout."""
    if str(file) == "-":
        raise UsageError(what=f"{option} -: standard output already has the result; give the name of a file")
    if os.path.isdir(file) or not os.path.isdir(file.parent):  # noqa: PTH112 -- Path raises for long names
        why = "it is a folder" if file.parent.is_dir() else "its folder does not exist"
        raise FolderNotWritable(path=str(file), why=why)


def write(file: Path, text: str) -> None:
    """Raises FolderNotWritable."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FolderNotWritable(path=str(file), why=error.strerror or str(error)) from error


def _laid_out(text: str, width: int | None) -> str:
    """The text, which may hold names from outside, escaped; in lines of ``width`` columns on a terminal."""
    rows = printable_lines(as_typed(text)).split("\n")
    if width is not None:
        rows = [_joined(line) for row in rows for line in _hanging(_spread(row), max(WRAP_MIN, width))]
    return "\n".join(rows)


def has_console(stream: TextIO) -> bool:
    """Whether it may be a terminal, or someone wants it to be treated as one; no other waits for rich to be loaded."""
    return stream.isatty() or any(name in os.environ for name in _TERMINAL_BY_WISH)


def show(stream: TextIO, text: str) -> None:
    """Print ``text``, in colours on a terminal."""
    if has_console(stream):
        console(stream).print(text)
    else:
        stream.write(_laid_out(text, None) + "\n")
        stream.flush()


def console(stream: Any) -> Terminal:
    """A console that reads no markup into file names, and neither colours nor breaks lines in a pipe.

    NO_COLOR (https://no-color.org) takes the colours off a terminal, too.
    """
    from reshard.cli.terminal import Terminal

    return Terminal(stream, _laid_out)


def first(rows: Sequence[str], most: int, noun: str = "", where: str = "use --json to show all") -> list[str]:
    """The first ``most`` of them, and a line that counts the rest and says ``where`` they are."""
    more = len(rows) - most
    shown = [printable(row) for row in rows[:most]]
    return [*shown, f"{more:,} more{noun and f' {noun}'}; {where}"] if more > 0 else shown


def some(names: Sequence[str], most: int = 8) -> str:
    """``a, b and 3 more``."""
    more = len(names) - most
    return ", ".join(map(printable, names[:most])) + (f" and {more:,} more" if more > 0 else "")


def ago(moment: float) -> str:
    """``12 s ago``, ``3 h ago``: how long since ``moment``, in seconds since the epoch."""
    return f"{figures.long(max(0, int(time.time() - moment)))} ago"


def when(moment: float, form: str = "%b %d %H:%M") -> str:
    """``Jun 01 22:00``, in the time zone of this machine; ``moment`` is in seconds since the epoch."""
    return datetime.fromtimestamp(moment).astimezone().strftime(form)


def dated(moment: float) -> str:
    """``Jun 01 22:00 (3 h ago)``; ``moment`` is in seconds since the epoch."""
    return f"{when(moment)} ({ago(moment)})"


def succeeded(moment: float | None, as_text: Callable[[float], str] = when) -> str:
    """When something last ended well; ``moment`` in seconds since the epoch."""
    return "none yet" if moment is None else as_text(moment)


# What the page says in the same words.
count, human_bytes, lasted = figures.count, figures.human_bytes, figures.lasted
