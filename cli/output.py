"""How a command answers: text for people, one JSON document per line, or only what a script needs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from reshard.pipeline.text import printable, printable_json, printable_lines


@dataclass(frozen=True)
class Output:
    """Where answers go: results to stdout; what is said on the way to stderr, so that results can be piped."""

    json: bool = False
    quiet: bool = False

    @property
    def human(self) -> bool:
        return not self.json and not self.quiet

    def result(self, data: Mapping[str, Any], text: RenderableType, bare: str = "") -> None:
        """One answer in its three forms: ``data`` for --json, ``text`` for people, ``bare`` for --quiet."""
        if self.json:
            self.document(data)
        else:
            self.text(text, bare)

    def text(self, text: RenderableType, bare: str) -> None:
        """``text`` for people, ``bare`` for --quiet."""
        if not self.quiet:
            console(sys.stdout).print(text)
        elif bare:
            sys.stdout.write(f"{printable_lines(bare)}\n")

    def listing(self, data: Sequence[Mapping[str, Any]], text: RenderableType, bare: Sequence[str]) -> None:
        """Many answers of one kind: a document for each, or all of them in ``text`` or in ``bare``."""
        if self.json:
            for one in data:
                self.document(one)
        else:
            self.text(text, "\n".join(bare))

    def document(self, data: Mapping[str, Any]) -> None:
        """One line of JSON, written at once, so that a reader of a pipe sees it when it happens."""
        sys.stdout.write(json_line(data) + "\n")
        sys.stdout.flush()

    def say(self, text: RenderableType) -> None:
        """Something for a person to read on the way."""
        if self.human:
            console(sys.stderr).print(text)


def lines(rows: Sequence[Sequence[str]], right: Collection[int] = (), indent: str = "") -> Text:
    """Rows under each other with aligned columns, those numbered in ``right`` to the right; never cut nor wrapped."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [
        indent + "  ".join(f"{cell:{'>' if i in right else '<'}{widths[i]}}" for i, cell in enumerate(row))
        for row in rows
    ]
    return Text("\n".join(line.rstrip() for line in aligned))


def json_line(data: Mapping[str, Any]) -> str:
    """A document on one line, which a terminal shows and does not obey."""
    return printable_json(json.dumps(data, ensure_ascii=False, default=str))


class _Console(Console):
    """Escapes what it is given to print: names in it come from outside."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*map(_shown, objects), **options)


def _shown(text: Any) -> Any:
    if isinstance(text, Group):
        return Group(*map(_shown, text.renderables))
    if isinstance(text, Text):
        return Text(printable_lines(text.plain))
    return printable_lines(text) if isinstance(text, str) else text


def console(stream: Any) -> Console:
    """A console that reads no markup into file names, and neither colours nor breaks lines in a pipe."""
    is_terminal = stream.isatty()
    return _Console(file=stream, markup=False, highlight=False, emoji=False, soft_wrap=not is_terminal)


def first(rows: Sequence[str], most: int, noun: str = "") -> list[str]:
    """The first ``most`` of them, and a line that counts the rest."""
    more = len(rows) - most
    return [
        *map(printable, rows[:most]),
        *([f"{more:,} more{noun and f' {noun}'}; --json has them all"] if more > 0 else []),
    ]


def some(names: Sequence[str], most: int = 8) -> str:
    """``a, b and 3 more``."""
    more = len(names) - most
    return ", ".join(map(printable, names[:most])) + (f" and {more:,} more" if more > 0 else "")


def count(number: int, noun: str) -> str:
    """``1 file``, ``2,048 files``, ``2 copies``."""
    many = f"{noun.removesuffix('y')}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else many}"


def finds_none(number: int) -> str:
    """Of an entry of a catalog's file, by its number, as errors about the file name it."""
    return f"entries[{number}] finds no model"


def ago(moment: float) -> str:
    """``12 s ago``, ``3 h ago``: how long since ``moment``, in seconds since the epoch."""
    seconds = max(0, int(time.time() - moment))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit} ago"
    return f"{seconds} s ago"


def lasted(seconds: float) -> str:
    """``48 s``, ``7 min 20 s``, ``3 h 12 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, left = divmod(whole, 60)
    return f"{minutes} min {left} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def succeeded(moment: float | None) -> str:
    """When something last ended well, in seconds since the epoch."""
    return "no success yet" if moment is None else f"last success {ago(moment)}"


def human_bytes(size: int) -> str:
    """``47.2 MB``: decimal units, as sizes are typed; bytes below a kilobyte."""
    value = float(size)
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
