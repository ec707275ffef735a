"""Counts in messages agree with their nouns: what may be one is written by `counted`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from reshard.pipeline.errors import PickleCutShort
from reshard.pipeline.text import counted

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path for room in ("pipeline", "worker", "client", "web", "cli") for path in (ROOT / room).rglob("*.py")
)
# A number, then a noun in the plural, perhaps with a word or two between them.
_PLURAL = re.compile(r" (?:[a-z-]+ ){0,2}?([a-z]{3,}[^s\W]s)\b")
# Ends of words in the singular, and what is never one: sizes of files, limits, spans of time.
_OTHERS = frozenset({"bytes", "texts", "does", "was", "has", "its", "seconds", "characters", "days", "lies", "ends"})

_PARTITIVE = re.compile(r"\b(?:of|among)(?: the| its)? $")  # "1 of 1 tensors"


def miscounted(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.JoinedStr):
            continue
        for before, value, after in zip([None, *node.values], node.values, node.values[1:], strict=False):
            if not isinstance(value, ast.FormattedValue) or not isinstance(after, ast.Constant):
                continue
            spec = ast.unparse(value.format_spec) if value.format_spec else ""
            number = "," in spec or (
                isinstance(value.value, ast.Call) and ast.unparse(value.value.func) in {"len", "sum"}
            )
            limit = ast.unparse(value.value).rpartition(".")[2].isupper()
            of_several = isinstance(before, ast.Constant) and _PARTITIVE.search(str(before.value))
            plural = _PLURAL.match(str(after.value))
            if number and not limit and not of_several and plural and plural[1] not in _OTHERS:
                yield f"{node.lineno}: {ast.unparse(node)[:150]}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_count_that_may_be_one_is_followed_by_a_plural(path: Path) -> None:
    assert list(miscounted(path.read_text())) == []


def test_such_a_count_is_found() -> None:
    assert list(miscounted("f'{len(names)} tensors are lost'"))
    assert list(miscounted("f'it has {n:,} other files'"))
    assert not list(miscounted("f'{len(names)} of {n:,} tensors, at most {MOST:,} files'"))


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [(1, "tensor", "1 tensor"), (0, "file", "0 files"), (2048, "file", "2,048 files"), (2, "copy", "2 copies"),
     (2, "key", "2 keys")],
)  # fmt: skip
def test_a_count_and_its_noun(number: int, noun: str, text: str) -> None:
    assert counted(number, noun) == text


def test_errors_count_alike() -> None:
    assert str(PickleCutShort(file="a.bin", bytes=1)) == "a.bin: truncated pickle: it ends after 1 byte"
    assert str(PickleCutShort(file="a.bin", bytes=1001)).endswith("after 1,001 bytes")
