"""GGUF headers: parsed as if an enemy wrote them, and written as llama.cpp's gguf-split writes them.

The format (https://github.com/ggml-org/ggml, docs/gguf.md), little-endian: the magic, a version, the numbers of tensors
and of keys; each key with its type and value; each tensor's name, dimensions (the fastest first), type and offset;
padding to ``general.alignment``; then the tensors, each padded to it. Versions 2 and 3 differ in nothing else than that
3 may be big-endian, which llama.cpp does not read on other machines, and nor do we.

A model in several files has all keys in the first of them. Which part a file is, and of how many, say ``split.no``,
``split.count`` and ``split.tensors.count``; a file that was merged from parts has a ``split.count`` of 0.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from struct import Struct
from typing import NamedTuple

from reshard.pipeline.checkpoint.formats.pointers import refuse_pointer
from reshard.pipeline.checkpoint.formats.ranged import Read, read_bytes
from reshard.pipeline.checkpoint.formats.safetensors import Header, Spec, padded
from reshard.pipeline.errors import BadHeader, BadLength, BadRename, NotRead
from reshard.pipeline.limits import (
    GGUF_ALIGNMENT_MAX,
    GGUF_DIMENSIONS_MAX,
    GGUF_ENTRIES_MAX,
    GGUF_HEADER_MAX,
    GGUF_NAME_MAX,
    GGUF_READ,
    GGUF_RENAME_MAX,
    HEADER_READ,
)
from reshard.pipeline.tensors import StoredFile, size_in_bytes
from reshard.pipeline.text import counted

SUFFIX = ".gguf"
MAGIC = b"GGUF"  # as the length of a safetensors header it would be more than that format allows
ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32
SPLIT_COUNT = "split.count"
SPLIT_KEYS = ("split.no", "split.tensors.count", SPLIT_COUNT)  # in gguf-split's order
# What is no model, and llama.cpp takes as one file beside one, by --mmproj, --lora, --imatrix or --control-vector.
_BESIDE = {"general.type": ("mmproj", "adapter", "imatrix"), "general.architecture": ("clip", "controlvector")}
PARTS_MAX = 65_535  # of a model, which gguf-split counts in 16 bits

_TYPES = dict(
    enumerate(["F32", "F16", "Q4_0", "Q4_1", "", "", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
               "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8",
               "I16", "I32", "I64", "F64", "IQ1_M", "BF16", "", "", "", "TQ1_0", "TQ2_0", "", "", "", "MXFP4",
               "NVFP4", "Q1_0"])
)  # fmt: skip
_NUMBERS = {name: number for number, name in _TYPES.items() if name}

# The kinds of values; a bool takes a byte.
_U16, _U32, _I32, _STRING, _ARRAY = 2, 4, 5, 8, 9
_WIDTHS = {0: 1, 1: 1, _U16: 2, 3: 2, _U32: 4, _I32: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_SIGNED = {1: True, 3: True, _I32: True, 11: True, 0: False, _U16: False, _U32: False, 10: False}

_INT32, _INT64 = Struct("<I"), Struct("<Q")

Keys = Mapping[str, memoryview | bytes]
_Infos = dict[str, tuple[str, tuple[int, ...], int]]  # name -> (dtype, shape, offset)


@dataclass(frozen=True, slots=True)
class GgufHeader(Header):
    """The header of one GGUF file; ``keys`` has each value with its type before it, as it stands in the file.

    They are views of what was read: a vocabulary is held once.
    """

    keys: Keys


class Split(NamedTuple):
    """Which part of a model a file is: number (from 0), of how many, and the tensors of all of them."""

    number: int
    parts: int
    tensors: int


class _Short(Exception):
    """The header goes on behind the bytes at hand, at least up to ``stop``."""

    def __init__(self, stop: int) -> None:
        super().__init__(stop)
        self.stop = stop


def read_header(read: Read, file: StoredFile) -> GgufHeader:
    """The header of a file, whose length only its end tells: in reads that grow with it.

    Raises BadHeader, BadLength, NotRead and LfsPointer.
    """
    data, stop = bytearray(), HEADER_READ
    parser = _Parser(data, file.path, file.size)
    while True:
        data += read_bytes(read, file, len(data), min(stop, file.size))
        try:
            return parser.header()
        except _Short as short:
            stop = max(short.stop, len(data) + min(len(data), GGUF_READ))


def parse_header(data: bytes | memoryview, *, file: str, file_size: int) -> GgufHeader:
    """The header of a file of ``file_size`` bytes, of which ``data`` holds the whole header or more.

    Raises BadHeader, BadLength or NotRead naming ``file``, and LfsPointer.
    """
    try:
        return _Parser(data, file, file_size).header()
    except _Short as short:
        raise BadLength(file=file, actual=len(data), expected=f"{short.stop:,} or more") from None


class _Parser:
    """Goes through a header once; what it holds beside ``data``, which may grow between two tries, is names."""

    def __init__(self, data: bytes | bytearray | memoryview, file: str, file_size: int) -> None:
        self._data = data
        self._file = file
        self._size = file_size
        self._at = 0
        self._spans: dict[str, tuple[int, int]] = {}  # of the keys' values

    def header(self) -> GgufHeader:
        """The header; raises _Short where ``data`` ends before it does, to be called again with more."""
        self._at = 0
        refuse_pointer(memoryview(self._data)[:64], self._file)
        if bytes(self._data[:4]) != MAGIC:
            raise self._bad("not a GGUF file: invalid magic bytes")
        self._take(len(MAGIC))
        version = self._int32()
        if version in {2 << 24, 3 << 24}:
            raise self._not_read("big-endian GGUF (only for llama.cpp on big-endian machines)")
        if version not in {2, 3}:
            raise self._not_read(f"GGUF version {version}")
        tensors, keys = self._count("tensors"), self._count("keys")
        self._keys(keys)
        raw = self._spans.get(ALIGNMENT_KEY)
        alignment = DEFAULT_ALIGNMENT if raw is None else self._alignment(bytes(self._data[slice(*raw)]))
        found = self._tensors(tensors)
        view = memoryview(self._data)
        return self._placed(found, {key: view[start:stop] for key, (start, stop) in self._spans.items()}, alignment)

    def _keys(self, count: int) -> None:
        if self._spans:  # of an earlier try
            self._at = next(reversed(self._spans.values()))[1]
        while len(self._spans) < count:
            key = self._name("a key")
            if not key or key in self._spans:
                raise self._bad(f"duplicate key {key[:100]!r}" if key else "a key has no name")
            start = self._at
            self._skip_value(key)
            self._spans[key] = start, self._at

    def _skip_value(self, key: str) -> None:
        kind, count = self._int32(), 1
        if kind == _ARRAY:
            kind, count = self._int32(), self._int64()
        if kind == _STRING:
            self._skip_strings(count)
        elif kind in _WIDTHS:
            self._take(count * _WIDTHS[kind])
        else:
            raise self._bad(
                f"{key[:100]!r} is " + ("an array of arrays" if kind == _ARRAY else f"of unknown type {kind}")
            )

    def _skip_strings(self, count: int) -> None:
        self._within(self._at + count * _INT64.size)  # before it is a loop
        at, last = self._at, len(self._data) - _INT64.size
        for _ in range(count):
            if at > last:
                at += _INT64.size
                break
            at += _INT64.size + _INT64.unpack_from(self._data, at)[0]
        self._take(at - self._at)

    def _alignment(self, raw: bytes) -> int:
        alignment = integer(raw)
        if alignment is None or raw[:4] != _INT32.pack(_U32):
            raise self._bad(f"{ALIGNMENT_KEY} is not a 32-bit unsigned integer")
        if not 0 < alignment <= GGUF_ALIGNMENT_MAX or alignment & (alignment - 1):
            raise self._bad(f"{ALIGNMENT_KEY} is {alignment:,}, not a power of two up to {GGUF_ALIGNMENT_MAX:,}")
        return alignment

    def _tensors(self, count: int) -> _Infos:
        found: _Infos = {}
        for _ in range(count):
            name = self._name("a tensor's name")
            if name in found:
                raise self._bad(f"duplicate tensor {name[:100]!r}")
            dimensions = self._int32()
            if dimensions > GGUF_DIMENSIONS_MAX:
                raise self._bad(f"{name[:100]!r} claims {counted(dimensions, 'dimension')}")
            shape = tuple(self._int64() for _ in range(dimensions))[::-1]
            if prod(max(1, length) for length in shape) >= 1 << 63:
                raise self._bad(f"{name[:100]!r} has too many elements to count")
            number = self._int32()
            if not (dtype := _TYPES.get(number)):
                raise self._not_read(f"{name[:100]!r} (tensor type {number})")
            found[sys.intern(name)] = dtype, shape, self._int64()
        return found

    def _placed(self, tensors: _Infos, keys: Keys, alignment: int) -> GgufHeader:
        """The header, each tensor where it lies; they follow each other as they are named, as llama.cpp asks."""
        start = padded(self._at, alignment)
        end, stop = start, self._at
        specs: dict[str, Spec] = {}
        for name, (dtype, shape, offset) in tensors.items():
            try:
                size = size_in_bytes(dtype, shape)
            except ValueError as error:
                raise self._bad(f"{name[:100]!r}: {error}") from None
            if start + offset != end:
                raise self._bad(
                    f"{name[:100]!r} is at offset {offset:,}, but the previous tensor ends at {end - start:,}"
                )
            stop = end + size
            specs[name] = Spec(dtype, shape, end, stop)
            end = padded(stop, alignment)
        if not stop <= self._size <= end:  # some writers leave out the padding at the end
            raise BadLength(file=self._file, actual=self._size, expected=stop if self._size < stop else end)
        return GgufHeader(self._file, {}, specs, start, self._size, keys)

    def _count(self, what: str) -> int:
        count = self._int64()
        if count > GGUF_ENTRIES_MAX:
            raise self._bad(f"header claims {count:,} {what}, and the limit is {GGUF_ENTRIES_MAX:,}")
        return count

    def _name(self, what: str) -> str:
        length = self._int64()
        if length > GGUF_NAME_MAX:
            raise self._bad(f"{what} claims {length:,} bytes, and the limit is {GGUF_NAME_MAX:,}")
        start = self._take(length)
        try:
            return str(self._data[start : self._at], "utf-8")
        except UnicodeDecodeError:
            raise self._bad(f"{what} is not UTF-8") from None

    def _int32(self) -> int:
        return int(_INT32.unpack_from(self._data, self._take(_INT32.size))[0])

    def _int64(self) -> int:
        return int(_INT64.unpack_from(self._data, self._take(_INT64.size))[0])

    def _take(self, size: int) -> int:
        """Where the next ``size`` bytes begin; raises _Short where they are not at hand."""
        start, stop = self._at, self._at + size
        self._within(stop)
        if stop > len(self._data):
            raise _Short(stop)
        self._at = stop
        return start

    def _within(self, stop: int) -> None:
        """Raises where the header cannot go on to ``stop``, before anyone asks for those bytes."""
        if stop > self._size:
            raise BadLength(file=self._file, actual=self._size, expected=f"{stop:,} or more")
        if stop > GGUF_HEADER_MAX:
            raise self._bad(f"header claims {stop:,} bytes or more, and the limit is {GGUF_HEADER_MAX:,}")

    def _bad(self, why: str) -> BadHeader:
        return BadHeader(file=self._file, why=why)

    def _not_read(self, what: str) -> NotRead:
        set_of_it = re.sub(r"-\d{5}(-of-\d{5}\.gguf)$", r"-*\1", self._file)
        cure = f"skip it with --exclude {set_of_it!r}, or convert the model again"
        return NotRead(file=self._file, what=what, cure=cure)


def integer(raw: memoryview | bytes) -> int | None:
    """The number that a key's value is, of any integer type; None for everything else."""
    kind = _INT32.unpack_from(raw)[0]
    return int.from_bytes(raw[4:], "little", signed=_SIGNED[kind]) if kind in _SIGNED else None


def goes_beside(keys: Keys) -> bool:
    """Whether a file with these keys is no model, but goes whole beside one."""
    said = ((key, value) for key, values in _BESIDE.items() for value in values)
    return any(keys.get(key) == _INT32.pack(_STRING) + _string(value) for key, value in said)


def split_of(keys: Keys) -> Split | None:
    """What the keys of a file say of its part in a model; None where they do not, or say that it is all of it."""
    number, tensors, count = (integer(keys[key]) if key in keys else None for key in SPLIT_KEYS)
    if not count:
        return None
    return Split(-1 if number is None else number, count, -1 if tensors is None else tensors)


def split_faults(parts: Sequence[GgufHeader]) -> Iterator[tuple[str, str]]:
    """(file, what is wrong) where the split keys of the files of a model, in order, are not those of its parts."""
    tensors = sum(len(part.tensors) for part in parts)
    for number, part in enumerate(parts):
        split = split_of(part.keys)
        if split is None and len(parts) == 1:
            continue
        if split is None or split[:2] != (number, len(parts)):
            says = f"number {split.number + 1} of {split.parts}" if split else "not part of a set"
            yield part.file, f"its split keys say {says}, but it is number {number + 1} of {len(parts)}"
        elif split.tensors != tensors:
            yield (
                part.file,
                f"its split keys say {counted(split.tensors, 'tensor')} in all parts, but there are {tensors:,}",
            )


# -------------------------------------------------------------------------------------------------------- writing


def check_renamed(names: Iterable[str], before: Iterable[str]) -> None:
    """Raises BadRename where tensors get a longer name than readers take, or than the model had ``before``."""
    most = max([GGUF_RENAME_MAX, *(len(name.encode()) for name in before)])
    for name in names:
        if (size := len(name.encode())) > most:
            why = f"{name[:100]!r} is {size:,} bytes long, but names in this GGUF model can have at most {most:,}"
            raise BadRename(rules="RULES", why=why)


def alignment_of(keys: Keys) -> int:
    """What the tensors of a file with these keys are aligned to."""
    return (integer(keys[ALIGNMENT_KEY]) if ALIGNMENT_KEY in keys else None) or DEFAULT_ALIGNMENT


def keys_of_part(keys: Keys, number: int, count: int, tensors: int) -> Keys:
    """The keys of part ``number`` (from 0) of ``count`` of a model that has ``keys`` and ``tensors``.

    The parts are gguf-split's, but for the alignment, which stands in each of them: gguf-split loses it. A whole has
    split keys only where its source had them, with a count of 0.
    """
    if count == 1:
        merged = {SPLIT_COUNT: _INT32.pack(_U16) + bytes(2)} if SPLIT_COUNT in keys else {}
        return {key: raw for key, raw in keys.items() if key != SPLIT_COUNT} | merged
    everywhere = {ALIGNMENT_KEY} if alignment_of(keys) != DEFAULT_ALIGNMENT else set()
    kept = {key: raw for key, raw in keys.items() if key not in SPLIT_KEYS and (number == 0 or key in everywhere)}
    values = [(_U16, 2, number), (_I32, 4, tensors), (_U16, 2, count)]
    made = [_INT32.pack(kind) + value.to_bytes(width, "little") for kind, width, value in values]
    return kept | dict(zip(SPLIT_KEYS, made, strict=True))


def build_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], keys: Keys) -> bytes:
    """Everything before the data, padding included, for (name, dtype, shape) in the order of the data."""
    alignment, offset, count = alignment_of(keys), 0, 0
    infos = bytearray()
    for name, dtype, shape in tensors:
        infos += _string(name) + _INT32.pack(len(shape)) + b"".join(map(_INT64.pack, reversed(shape)))
        infos += _INT32.pack(_NUMBERS[dtype]) + _INT64.pack(offset)
        offset += padded(size_in_bytes(dtype, shape), alignment)
        count += 1
    size = keys_size(keys) + len(infos)
    pairs = chain.from_iterable((_string(key), raw) for key, raw in keys.items())
    counts = _INT32.pack(3) + _INT64.pack(count) + _INT64.pack(len(keys))
    return b"".join([MAGIC, counts, *pairs, infos, bytes(padded(size, alignment) - size)])


def _string(text: str) -> bytes:
    raw = text.encode()
    return _INT64.pack(len(raw)) + raw


def keys_size(keys: Keys) -> int:
    """The bytes of a header without tensors, before it is padded."""
    return 24 + sum(_INT64.size + len(key.encode()) + len(raw) for key, raw in keys.items())


def entry_size(name: str, shape: tuple[int, ...]) -> int:
    """The bytes of a tensor's entry in a header."""
    return _INT64.size + len(name.encode()) + _INT32.size + _INT64.size * len(shape) + _INT32.size + _INT64.size
