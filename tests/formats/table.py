"""The generated part of docs/formats.md: to text, and back. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tests.formats.cases import CASES
from tests.formats.gguf_rows import GgufRow
from tests.formats.refused import Refusal
from tests.formats.run import COLUMNS, EQUAL, Row

BEGIN = "<!-- begin: written by `python -m tests.formats --write docs/formats.md`; tests/formats compares it -->\n"
END = "<!-- end -->\n"

Cells = dict[str, dict[str, str]]  # case -> column -> cell


def rendered(rows: Sequence[Row], refused: Sequence[Refusal], gguf: Sequence[GgufRow] = ()) -> str:
    """The markdown between the markers."""
    notes: dict[str, int] = {}
    lines = ["", *_heads("case", "", "saved as", *COLUMNS, "class")]
    for row in rows:
        case = CASES[row.name]
        cells = [_cell(row.cells[column], notes) for column in COLUMNS]
        lines.append(_line(f"`{row.name}`", case.what, case.saved, *cells, row.level))
    lines += ["", *(f"{number}. `{error}`" for error, number in notes.items())]
    lines += ["", "### The plan of each", ""]
    for row in rows:
        case = CASES[row.name]
        lines += [f"**{case.what}** (`{row.name}`): {row.plan[0]}", "", *(f"* {line}" for line in row.plan[1:]), ""]
    lines += ["### GGUF, read by llama.cpp's `gguf`", ""]
    lines += _heads("what", "saved as", "cut by", "written", "tensors", "keys", "copied")
    lines += [_line(*row) for row in gguf]
    lines += ["", "### Refused", "", *_heads("what", "error", "says")]
    lines += [_line(r.what, f"`{r.code}`", r.message) for r in refused]
    return "\n".join(lines) + "\n\n"


def _heads(*titles: str) -> list[str]:
    return [_line(*titles), _line(*("---" for _ in titles))]


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _cell(cell: str, notes: dict[str, int]) -> str:
    if cell == EQUAL or ":" not in cell:
        return cell
    number = notes.setdefault(cell.replace("`", "'"), len(notes) + 1)
    return f"{cell.partition(':')[0]} ({number})"


def cells_of(text: str) -> Cells:
    """The cells of the table in ``text``."""
    found: Cells = {}
    for line in text.splitlines():
        if match := re.match(r"\| `([a-z0-9-]+)` \|", line):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            found[match[1]] = dict(zip(COLUMNS, cells[3 : 3 + len(COLUMNS)], strict=True))
    return found


def falls(before: Mapping[str, Mapping[str, str]], after: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The cells that were equal and are so no more, a case that is gone among them."""
    return [
        f"{name}, {column}: was {EQUAL}, is {after.get(name, {}).get(column, 'gone')}"
        for name, cells in before.items()
        for column, cell in cells.items()
        if cell == EQUAL and after.get(name, {}).get(column) != EQUAL
    ]


def between(page: str) -> str:
    """What stands between the markers of a page."""
    return page.partition(BEGIN)[2].partition(END)[0]


def replaced(page: str, text: str) -> str:
    """The page with ``text`` between its markers."""
    head, _, rest = page.partition(BEGIN)
    return head + BEGIN + text + END + rest.partition(END)[2]
