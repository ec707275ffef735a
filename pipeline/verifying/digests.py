"""The digest of every tensor of a checkpoint, whatever files and format it lies in, and where two tensors part ways.

Each checkpoint is read once, in the order in which it is stored, so two of them can be held against each other though
nothing of their layouts is alike. Memory is bounded by a read and a gather, whatever the size of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from blake3 import blake3

from reshard.pipeline.checkpoint.formats.torch_names import DTYPES
from reshard.pipeline.copying.casts import Caster
from reshard.pipeline.copying.hashing import FileHasher, tensor_digest
from reshard.pipeline.copying.stream import Stream, Tick, packed
from reshard.pipeline.planning.model import Entry
from reshard.pipeline.planning.pack import in_source_order
from reshard.pipeline.planning.ranges import Part, part, read_segments
from reshard.pipeline.protocols import Source
from reshard.pipeline.stores.scratch import ScratchSpace
from reshard.pipeline.tensors import DTYPE_BITS, Checkpoint, Record, StoredFile, Tensor

# How an element is shown; kinds without an entry are shown as the byte that holds it.
_NUMPY: dict[str, np.dtype[Any]] = {
    ours: np.dtype(getattr(ml_dtypes, name, name)).newbyteorder("<") for name, ours in DTYPES.items() if ours != "F4"
}


class Digests(NamedTuple):
    """Two digests of one tensor: one that nobody can forge, and the one that manifests hold."""

    blake3: str
    xxh3: str


def digests(
    checkpoint: Checkpoint,
    files: Sequence[StoredFile],
    source: Source,
    tick: Tick = lambda count: None,
    tmpdir: Path | None = None,
    *,
    hashers: Mapping[int, FileHasher] = MappingProxyType({}),
    casts: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Digests]:
    """Tensor -> digests of its packed bytes (little-endian, C order); ``files`` are those that the pieces count in.

    The tensors that ``casts`` names are cast to those dtypes first. Names that share their bytes are read once. The
    files that have one of ``hashers`` pass it whole and must match: raises SourceCorrupt. Raises SourceChanged and the
    HubError family as reading does.
    """
    names: dict[tuple[object, ...], list[str]] = {}
    entries = []
    for entry in in_source_order(Entry(t, casts.get(t.name, t.dtype)) for t in checkpoint.tensors):
        sharing = names.setdefault((entry.tensor.dtype, entry.as_dtype, entry.tensor.shape, entry.tensor.pieces), [])
        if not sharing:
            entries.append(entry)
        sharing.append(entry.name)
    parts = [part(entry) for entry in entries]
    segments = read_segments((place for one in parts for place in one.ranges), hashers, files)
    stream = Stream(source, files, segments, hashers, tick)
    found: dict[str, Digests] = {}
    for one, sharing in zip(parts, names.values(), strict=True):
        unforgeable, recorded = blake3(), tensor_digest()
        for view in _cast(one.entry, packed(one, stream.take, ScratchSpace(tmpdir))):
            unforgeable.update(view)
            recorded.update(view)
        found |= dict.fromkeys(sharing, Digests(unforgeable.hexdigest(), recorded.hexdigest()))
    stream.finish()
    return found


def _cast(entry: Entry, views: Iterator[memoryview]) -> Iterator[memoryview]:
    """The bytes as the entry wants them."""
    if not entry.cast:
        yield from views
        return
    caster = Caster(entry.name, entry.tensor.dtype, entry.as_dtype)
    for view in views:
        yield from caster.feed(view)
    caster.finish()


def hashers_of(checkpoint: Checkpoint, files: Sequence[StoredFile]) -> dict[int, FileHasher]:
    """One for each file of the checkpoint that says, by a sha256 or in its records, what its bytes should be."""
    records: dict[int, list[Record]] = {number: [] for number in checkpoint.files}
    for record in checkpoint.records:
        records[record.file].append(record)
    return {
        number: FileHasher(files[number], (), ours)
        for number, ours in records.items()
        if files[number].sha256 is not None or any(record.crc32 is not None for record in ours)
    }


class Stored(NamedTuple):
    """One tensor, where to read it, and what to make of it."""

    tensor: Tensor
    files: Sequence[StoredFile]
    source: Source
    as_dtype: str

    def read(self, tmpdir: Path | None) -> Iterator[memoryview]:
        """Its packed bytes, cast."""
        one: Part = part(Entry(self.tensor, self.as_dtype))
        stream = Stream(self.source, self.files, read_segments(one.ranges, (), self.files), {}, lambda count: None)
        yield from _cast(one.entry, packed(one, stream.take, ScratchSpace(tmpdir)))
        stream.finish()


class Difference(NamedTuple):
    """The first element that differs, and what each side has there."""

    element: tuple[int, ...]
    first: str
    second: str


def first_difference(first: Stored, second: Stored, tmpdir: Path | None = None) -> Difference | None:
    """Where two tensors of one dtype and shape part ways; None if nowhere. Reads no further than that."""
    found = first_unequal(first.read(tmpdir), second.read(tmpdir))
    if found is None:
        return None
    at, byte, *sides = found
    bits, shape = DTYPE_BITS[first.as_dtype], first.tensor.shape
    element = (at + byte) * 8 // bits
    index = tuple(int(i) for i in np.unravel_index(element, shape)) if shape else ()
    start = element * bits // 8 - at
    return Difference(index, *(_shown(first.as_dtype, side[start : start + max(1, bits // 8)]) for side in sides))


# Bytes that are compared at once: a multiple of every element's size, so that no element is cut in two.
_BLOCK = 1 << 20


def first_unequal(
    one: Iterator[memoryview], other: Iterator[memoryview], tick: Tick = lambda count: None
) -> tuple[int, int, bytes, bytes] | None:
    """Of two streams of one length: where the first unequal blocks begin, the unequal byte in them, and both blocks."""
    at = 0
    for first, second in zip(_blocks(one), _blocks(other), strict=True):
        tick(len(first))
        if first != second:
            unequal = np.frombuffer(first, np.uint8) != np.frombuffer(second, np.uint8)
            return at, int(unequal.argmax()), first, second
        at += len(first)
    return None


def _blocks(views: Iterator[memoryview]) -> Iterator[bytes]:
    """The same bytes in blocks of one size, whatever the store's views are; the last one may be shorter."""
    held = bytearray()
    for view in views:
        held += view
        while len(held) >= _BLOCK:
            yield bytes(held[:_BLOCK])
            del held[:_BLOCK]
    if held:
        yield bytes(held)


def _shown(dtype: str, element: bytes) -> str:
    """The value, and its bytes where two values may look alike (NaNs, zeros, rounding in print)."""
    kind = _NUMPY.get(dtype)
    if kind is None:
        return f"0x{element.hex()}"
    return f"{np.frombuffer(element, kind)[0]!s} (0x{element[::-1].hex()})"
