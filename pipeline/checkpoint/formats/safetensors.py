"""Safetensors headers: parsed as if an enemy wrote them, and written so that every loader reads them.

The format (https://github.com/huggingface/safetensors, README "Format"): 8 bytes, the header's length as an unsigned
little-endian integer; the header, a JSON object that names each tensor's dtype, shape and ``data_offsets`` (relative
to the end of the header), and may hold string pairs under ``__metadata__``; then the data, without holes or overlaps.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import islice, repeat, starmap
from math import isinf, prod
from operator import add, ne, sub
from typing import Any, NamedTuple

from reshard.pipeline.checkpoint.formats.pointers import refuse_pointer
from reshard.pipeline.errors import BadHeader, BadLength
from reshard.pipeline.limits import ALIGNMENT, DIMENSIONS_MAX, HEADER_MAX, OPENED_FREE, OPENED_OF_TENSOR
from reshard.pipeline.tensors import DTYPE_BITS, Piece, Tensor, rows_as, size_in_bytes
from reshard.pipeline.text import counted

LENGTH_BYTES = 8
_OPENING = '{"__metadata__":'
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_ORDER = ("dtype", "shape", "data_offsets")
_FIELDS = frozenset(_ORDER)
_DEPTH_MAX = 127  # arrays and objects inside each other, at which serde_json stops
# A surrogate pair, half of one (six characters), or any other escape (two): read from left to right, none is missed.
_ESCAPES = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u[dD][89a-fA-F]..|\\.", re.DOTALL)

_OFFSET = "(0|[1-9][0-9]{0,17})"
# (name, kind, start, stop)
_ENTRY = re.compile(
    r'"([^"\\\x00-\x1f]*)":\{"dtype":"(\w{1,16}","shape":\[[0-9,]{0,4096})\],"data_offsets":\['
    rf"{_OFFSET},{_OFFSET}\]\}}"
)
_DECODER = json.JSONDecoder()
_OPENED = re.compile(r'"(?:[^"\\]++|\\.)*+"|[\[{]', re.DOTALL)  # a string, or the beginning of an array or an object


class Spec(NamedTuple):
    """One tensor of a header; ``start`` and ``stop`` are bytes of the file, not of its data section."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """The parsed header of one file; ``tensors`` is in the order of the data."""

    file: str
    metadata: dict[str, str]
    tensors: dict[str, Spec]
    data_start: int  # where the data section begins: 8 + the header's length
    file_size: int

    def specs(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape), which is all that a loader's class can be held against."""
        return {name: (spec.dtype, spec.shape) for name, spec in self.tensors.items()}

    def as_tensors(self, file: int) -> list[Tensor]:
        """The tensors as pieces of source file number ``file``."""
        if not self.tensors:
            return []
        dtypes, shapes, starts, _ = zip(*self.tensors.values(), strict=True)  # columns, as in _parse_compact
        packed = map(repeat, Piece._field_defaults.values())
        boxes = zip(repeat(file), starts, map(_origin, map(len, shapes)), shapes, *packed)
        pieces = zip(rows_as(Piece, boxes), strict=True)
        return list(rows_as(Tensor, zip(self.tensors, dtypes, shapes, pieces, strict=True)))


@lru_cache(maxsize=16)
def _origin(dimensions: int) -> tuple[int, ...]:
    return (0,) * dimensions


def header_length(prefix: bytes | memoryview, *, file: str, file_size: int) -> int:
    """The length that the first 8 bytes claim; raises BadHeader before anyone allocates it, and LfsPointer."""
    if len(prefix) < LENGTH_BYTES:
        raise BadHeader(file=file, why=f"{len(prefix)} bytes is too short for a safetensors file")
    refuse_pointer(prefix, file)
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > HEADER_MAX:
        raise BadHeader(file=file, why=f"header claims {length:,} bytes, and the limit of the format is {HEADER_MAX:,}")
    if LENGTH_BYTES + length > file_size:
        raise BadLength(file=file, actual=file_size, expected=f"{LENGTH_BYTES + length:,} or more")
    return length


def parse_header(data: bytes | memoryview, *, file: str, file_size: int) -> Header:
    """The header of a file of ``file_size`` bytes, of which ``data`` holds at least 8 + header length.

    Raises BadHeader or BadLength naming ``file``. Accepts what the safetensors library accepts and refuses what it
    refuses: the oddities below are those of its JSON reader (serde), held against it by a test.
    """
    length = header_length(data, file=file, file_size=file_size)
    data_start = LENGTH_BYTES + length
    if len(data) < data_start:
        raise BadLength(file=file, actual=len(data), expected=data_start)
    raw = memoryview(data)[LENGTH_BYTES:data_start]
    metadata, found = _parse_compact(raw, data_start) or _parse_json(raw, data_start, file)
    tensors = found
    if _misplaced(found, data_start) is not None:
        tensors = dict(sorted(found.items(), key=lambda item: item[1][2:]))
        if (name := _misplaced(tensors, data_start)) is not None:
            before = max((spec.stop for spec in tensors.values() if spec[2:] < tensors[name][2:]), default=data_start)
            trouble = "overlaps another tensor" if tensors[name].start < before else "leaves a hole before it"
            raise BadHeader(file=file, why=f"{name} {trouble}")
    end = next(reversed(tensors.values())).stop if tensors else data_start
    if end != file_size:
        raise BadLength(file=file, actual=file_size, expected=end)
    return Header(file, metadata, tensors, data_start, file_size)


def _misplaced(tensors: Mapping[str, Spec], position: int) -> str | None:
    """The first tensor that does not begin where the one before it ends, the first of all at ``position``."""
    for name, spec in tensors.items():
        if spec.start != position:
            return name
        position = spec.stop
    return None


def _parse_compact(raw: memoryview, data_start: int) -> tuple[dict[str, str], dict[str, Spec]] | None:
    """What ``_parse_json`` answers, in a quarter of its time: a header may have 500,000 entries.

    None for a header that is not written as all known writers do, without spaces, escapes and repeated names, or that
    is wrong anywhere.
    """
    try:
        text = str(raw, "utf-8")
        metadata, start = _DECODER.raw_decode(text, len(_OPENING)) if text.startswith(_OPENING) else ({}, 0)
    except (ValueError, RecursionError):
        return None
    if "\\" in text or type(metadata) is not dict or not all(type(value) is str for value in metadata.values()):
        return None
    parts = _ENTRY.split(text)
    between, names, texts, starts, stops = (parts[column::5] for column in range(5))
    opening = f"{text[:start]}," if start else "{"
    del text, parts  # 50 MB each
    if between[:-1] != [opening, *[","] * (len(names) - 1)] or between[-1].rstrip(" ") != "}":
        return None
    kinds = list(map(_kind, texts))
    del between, texts
    lasts = [data_start + int(offset) for offset in stops]
    if starts[1:] == stops[:-1]:  # nearly always, and then one number serves as the end of one and the next one's start
        firsts = [*(data_start + int(offset) for offset in starts[:1]), *lasts[:-1]]
    else:
        firsts = [data_start + int(offset) for offset in starts]
    del starts, stops
    if any(map(ne, map(sub, lasts, firsts), [size for _, _, size in kinds])):
        return None
    rows = zip([kind[0] for kind in kinds], [kind[1] for kind in kinds], firsts, lasts, strict=True)
    # The same names are in the source's headers, its index and the planned headers: one copy serves all.
    found = dict(zip(map(sys.intern, names), rows_as(Spec, rows), strict=True))
    if len(found) < len(names) or "__metadata__" in found:
        return None
    return metadata, found


@lru_cache(maxsize=4096)
def _kind(text: str) -> tuple[str, tuple[int, ...], int | None]:
    """(dtype, shape, bytes) of what ``_ENTRY`` calls so; None for the bytes where it is wrong."""
    dtype, _, counts = text.partition('","shape":[')
    try:
        shape = json.loads(f"[{counts}]")
        if (
            _is_dtype(dtype)
            and _are_counts(shape)
            and len(shape) <= DIMENSIONS_MAX
            and prod(map(max, shape, repeat(1))) < 1 << 64
        ):
            return sys.intern(dtype), tuple(shape), size_in_bytes(dtype, tuple(shape))
    except ValueError:
        pass
    return dtype, (), None


def _parse_json(raw: memoryview, data_start: int, file: str) -> tuple[dict[str, str], dict[str, Spec]]:
    """(metadata, tensors in no order) of a header; of a name that is there twice the last counts, as for loaders."""
    try:
        text = str(raw, "utf-8")
        refuse_unpaired(text)
        _refuse_clutter(text)
        content = json.loads(
            text,
            object_pairs_hook=tuple,  # and arrays are lists
            # A call for each number doubles the time; without -0, the exact integers only have to be in range.
            parse_int=_integer if "-0" in text else None,
            parse_float=_finite,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError) as error:
        raise BadHeader(file=file, why=f"header is not JSON ({str(error).splitlines()[0][:200]})") from None
    if type(content) is not tuple:
        raise BadHeader(file=file, why="header is not a JSON object")
    metadata: dict[str, str] | None = None
    found: dict[str, Spec] = {}
    for name, value in content:
        if name != "__metadata__":
            # The same names are in the source's headers, its index and the planned headers: one copy serves all.
            found[sys.intern(name)] = _spec(name, value, data_start, file)
        elif metadata is not None:
            raise BadHeader(file=file, why="duplicate __metadata__")
        else:
            metadata = _metadata(value, file)
    for name, spec in found.items():  # of a name that is there twice, only the last has to be right
        _check(name, spec, file)
    return metadata or {}, found


def refuse_unpaired(text: str) -> None:
    """Raises ValueError where a string of this JSON has half a surrogate pair, which no UTF-8 can hold."""
    if "\\u" in text and any(len(escape[0]) == len(r"\ud800") for escape in _ESCAPES.finditer(text)):
        raise ValueError("a string has an unpaired surrogate")


def _refuse_clutter(text: str) -> None:
    """Raises ValueError for far more arrays and objects than tensors need: each takes 20 times its text in memory."""
    most = OPENED_FREE + OPENED_OF_TENSOR * text.count('"data_offsets"')
    if text.count("[") + text.count("{") > most:
        opened = (found for found in _OPENED.finditer(text) if found[0][0] != '"')
        if next(islice(opened, most, None), None) is not None:
            raise ValueError(f"too many arrays and objects (more than {most:,})")


def _integer(digits: str) -> int | float:
    """Unsigned integers of 64 bits and small negative ones; all others are floating point numbers, -0 among them."""
    if len(digits) < 20 and digits != "-0":
        return int(digits)
    value = _finite(digits)
    return int(digits) if 0 <= value <= 2**64 and int(digits) < 2**64 and digits[0] != "-" else value


def _finite(digits: str) -> float:
    value = float(digits)
    if isinf(value):
        raise ValueError("a number is out of range")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def _metadata(value: Any, file: str) -> dict[str, str]:
    if value is None:
        return {}
    if type(value) is not tuple or not all(type(text) is str for _, text in value):
        raise BadHeader(file=file, why="__metadata__ has values that are not strings")
    return dict(value)


def _is_dtype(value: Any) -> bool:
    return type(value) is str and value in DTYPE_BITS


def _are_counts(value: Any) -> bool:
    if type(value) is not list:
        return False
    return all([type(count) is int and 0 <= count < 1 << 64 for count in value])


def _spec(name: str, entry: Any, data_start: int, file: str) -> Spec:
    """A tensor's entry, however it is written: the fields may stand in a list, and others may stand beside them."""
    if type(entry) is list and len(entry) == len(_ORDER):
        entry = tuple(zip(_ORDER, entry, strict=True))
    if type(entry) is not tuple or sorted(key for key, _ in entry if key in _FIELDS) != sorted(_FIELDS):
        raise BadHeader(file=file, why=f"{name} does not have each of {', '.join(sorted(_FIELDS))} exactly once")
    try:
        deep = any(_depth(value) > _DEPTH_MAX - 2 for key, value in entry if key not in _FIELDS)
    except ValueError as error:
        raise BadHeader(file=file, why=f"{name}: {error}") from None
    if deep:
        raise BadHeader(file=file, why=f"{name} is nested more than {_DEPTH_MAX} levels deep")
    dtype, shape, offsets = map(dict(entry).__getitem__, _ORDER)
    if type(dtype) is tuple and len(dtype) == 1 and dtype[0][1] is None:
        dtype = dtype[0][0]  # {"F32": null}
    if not _is_dtype(dtype):
        raise BadHeader(file=file, why=f"{name} has the unknown dtype {str(dtype)[:40]!r}")
    if not _are_counts(shape):
        raise BadHeader(file=file, why=f"{name} has no valid shape")
    if len(shape) > DIMENSIONS_MAX:
        raise BadHeader(
            file=file, why=f"{name} has {counted(len(shape), 'dimension')}, and the limit is {DIMENSIONS_MAX:,}"
        )
    if not _are_counts(offsets) or len(offsets) != 2:
        raise BadHeader(file=file, why=f"{name} has no valid data_offsets")
    return Spec(dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _depth(value: Any) -> int:
    """How many arrays and objects lie in each other; raises ValueError for a number that is out of range."""
    deepest, waiting = 0, [(value, 1)]
    while waiting:
        value, depth = waiting.pop()
        if type(value) is int:
            _finite(str(value))
        elif type(value) in (list, tuple):
            deepest = max(deepest, depth)
            waiting += [(part, depth + 1) for part in (value if type(value) is list else [part for _, part in value])]
    return deepest


def _check(name: str, spec: Spec, file: str) -> None:
    """Raises BadHeader unless its shape fills its bytes; elements are counted in 64 bits, first dimension first."""
    elements = 1
    for count in spec.shape:
        elements *= count
        if elements >= 1 << 64:
            raise BadHeader(file=file, why=f"{name} has too many elements to count")
    bits, size = elements * DTYPE_BITS[spec.dtype], spec.stop - spec.start
    if bits != size * 8:
        needed = f"{bits // 8:,} bytes" if bits % 8 == 0 else f"{bits:,} bits"
        raise BadHeader(file=file, why=f"{name} has {size:,} bytes, but {spec.dtype}{list(spec.shape)} needs {needed}")


# -------------------------------------------------------------------------------------------------------- writing


_quoted = json.encoder.encode_basestring


@lru_cache(maxsize=4096)
def _written_kind(dtype: str, shape: tuple[int, ...]) -> tuple[str, int]:
    """(text of a tensor's entry between its name and its offsets, bytes of the tensor)."""
    text = f':{{"dtype":"{dtype}","shape":[{",".join(map(str, shape))}],"data_offsets":['
    return text, size_in_bytes(dtype, shape)


def _metadata_fragment(metadata: Mapping[str, str]) -> str:
    text = json.dumps(dict(sorted(metadata.items())), separators=(",", ":"), ensure_ascii=False)
    return f'{{"__metadata__":{text}'


def build_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str], align: int = ALIGNMENT
) -> bytes:
    """Everything before the data: length, JSON and padding, for (name, dtype, shape) in the order of the data.

    The data begins at a multiple of ``align`` bytes.
    """
    made = bytearray(LENGTH_BYTES) + _metadata_fragment(metadata).encode()
    position = 0
    for name, dtype, shape in tensors:
        text, size = _written_kind(dtype, shape)
        stop = position + size
        made += f",{_quoted(name)}{text}{position},{stop}]}}".encode()
        position = stop
    made += b"}"
    made += b" " * (padded(len(made), align) - len(made))
    made[:LENGTH_BYTES] = (len(made) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
    return bytes(made)


def metadata_size(metadata: Mapping[str, str]) -> int:
    """The bytes of a header without tensors, before it is padded."""
    return LENGTH_BYTES + len(_metadata_fragment(metadata).encode()) + len("}")


def padded(size: int, align: int = ALIGNMENT) -> int:
    """``size`` up to a multiple of ``align``."""
    return size + -size % align


def entry_sizes(names: Sequence[str], kinds: Iterable[tuple[str, tuple[int, ...]]]) -> Iterator[int]:
    """The bytes of each tensor's entry in a header, its comma included, but for the digits of its two offsets.

    ``kinds``: the (dtype, shape) of each.
    """
    # Nearly always no name needs an escape, or has a character of several bytes: one look tells it of all.
    plain = len(_quoted("".join(names)).encode()) == sum(map(len, names)) + 2
    written = [len(name) + 2 for name in names] if plain else [len(_quoted(name).encode()) for name in names]
    fixed = cache(lambda dtype, shape: len(_written_kind(dtype, shape)[0]) + len(",") + len(",]}"))
    return map(add, written, starmap(fixed, kinds))
