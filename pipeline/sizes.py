"""Sizes as people type them; `figures.py` has them as people read them."""

from __future__ import annotations

import re

from reshard.pipeline.errors import BadSize, shortened
from reshard.pipeline.limits import BARE_SIZE_MIN

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
        raise BadSize(option=option, value=text, why="the size must be greater than zero")
    if "/" in text or text.lower().endswith(("ps", "bit", "bits")):
        raise BadSize(option=option, value=text, why="use bytes, not a rate or bits")
    match = _SIZE.fullmatch(text)
    if match is None:
        why = "remove the commas" if "," in text else "not a number of bytes"
        raise BadSize(option=option, value=text, why=why)
    unit = match["unit"]
    if re.fullmatch(r"[KMGTkmgt]i?b", unit) and unit.upper() != unit and not unit.islower():
        raise BadSize(option=option, value=text, why=f"{unit} means bits, not bytes")
    factor = _UNITS.get(unit.upper())
    if factor is None:
        raise BadSize(option=option, value=text, why=f"unknown unit {shortened(unit)!r}")
    size = int(float(match["number"]) * factor) if "." in match["number"] else int(match["number"]) * factor
    if size <= 0:
        raise BadSize(option=option, value=text, why="the size must be greater than zero")
    if size > SINGLE:
        raise BadSize(option=option, value=text, why="too large for a file")
    if not unit and size < BARE_SIZE_MIN:
        why = f"without a unit this means bytes; did you mean {text}MB or {text}B?"
        raise BadSize(option=option, value=text, why=why)
    return size
