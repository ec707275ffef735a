"""How options are named: in sections of help, and in errors as Python and pages tell them, who have none; and sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from reshard.pipeline.errors import BadSize, ReshardError, shortened
from reshard.pipeline.limits import BARE_SIZE_MIN

# Sections of help.
WEIGHTS, FILES, PUBLISHING, ACCESS = "Weights", "Other files", "Publishing", "Access and transfer"
# Options that take no value, and those with another name here; request.py adds the flags that `Options` declares.
FLAGS = {"--no-manifest": "manifest=False", "--public": 'visibility="public"', "--private": 'visibility="private"'}
NAMES = {"--to": "target=", "--catalog": "--catalog", "--help": "--help"}
# What may follow an option as its value in a sentence, and is not the sentence's next word.
_VALUE = r"bfloat16|float16|float32|auto|fail|own-shard|fused|separate[\w-]*|xet|http|user/repo|\./\w+|\d[\w.,]*"
_OPTION = re.compile(rf"`[^`]*`|(?<![\w./-])(--[a-z][a-z-]*)(?: ({_VALUE})(?![\w]))?")
_SENTENCES = {
    "run the same command again": "call it again",
    "run the same command with": "call it again with",
    "see `reshard --help`": "docs/library.md lists the arguments",
}


# A size that no model reaches: everything goes into one file.
SINGLE = 1 << 62  # bytes

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"(?P<number>\d{1,20}(?:\.\d{1,20})?)\s*(?P<unit>[A-Za-z]*)", re.ASCII)


def parse_size(value: str, option: str = "--size") -> int:
    """Bytes of ``200MB`` (decimal), ``200MiB`` (binary) or ``200000000``; raises BadSize and says why.

    Bits, rates, zero, negatives and bare letters (``5G``: which?) are refused, because tools disagree on them, and so
    are small numbers without a unit, which was forgotten.
    """
    text = value.strip()
    if text.startswith("-"):
        raise BadSize(option=option, value=value, why="the size must be greater than zero")
    if "/" in text or text.lower().endswith(("ps", "bit", "bits")):
        raise BadSize(option=option, value=value, why="use bytes, not a rate or bits")
    match = _SIZE.fullmatch(text)
    if match is None:
        why = "remove the commas" if "," in text else "not a number of bytes"
        raise BadSize(option=option, value=value, why=why)
    unit = match["unit"]
    if re.fullmatch(r"[KMGTkmgt]i?b", unit) and unit.upper() != unit and not unit.islower():
        raise BadSize(option=option, value=value, why=f"{unit} means bits, not bytes")
    factor = _UNITS.get(unit.upper())
    if factor is None:
        raise BadSize(option=option, value=value, why=f"unknown unit {shortened(unit)!r}")
    size = int(float(match["number"]) * factor) if "." in match["number"] else int(match["number"]) * factor
    if size <= 0:
        raise BadSize(option=option, value=value, why="the size must be greater than zero")
    if size > SINGLE:
        raise BadSize(option=option, value=value, why="too large for a file")
    if not unit and size < BARE_SIZE_MIN:
        why = f"without a unit this means bytes; did you mean {text}MB or {text}B?"
        raise BadSize(option=option, value=value, why=why)
    return size


def as_arguments(text: str) -> str:
    """``text`` with the arguments of `Request.of` in place of options; commands stay as they are typed.

    >>> as_arguments("--size 5G: unknown unit 'G'; leave out --strict-dtype")
    "size=5G: unknown unit 'G'; leave out strict_dtype=True"
    """
    return retold(text, _SENTENCES, _argument)


def retold(text: str, sentences: Mapping[str, str], name: Callable[[str, str | None], str]) -> str:
    """``text`` with other sentences, by patterns, and options as ``name(option, value)`` calls them; not in code."""
    for pattern, theirs in sentences.items():
        text = re.sub(pattern, theirs, text)
    return _OPTION.sub(lambda found: found[0] if found[1] is None else name(found[1], found[2]), text)


def _argument(option: str, value: str | None) -> str:
    if option in FLAGS:
        return FLAGS[option] + (f" {value}" if value else "")
    name = NAMES.get(option, f"{option[2:].replace('-', '_')}=")
    if value is None:
        return name
    return f"{name}{value}" if value[0].isdigit() else f'{name}"{value}"'


@contextmanager
def in_python() -> Iterator[None]:
    """What is raised from inside names arguments; `cli` tells it by options again."""
    try:
        yield
    except ReshardError as error:
        error.told = as_arguments
        raise
