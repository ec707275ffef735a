"""The digest of every tensor of a checkpoint, whatever files and format it lies in, and where two tensors part ways.

Each checkpoint is read once, in the order in which it is stored, so two of them can be held against each other though
nothing of their layouts is alike. Memory is bounded by a read and a gather, whatever the size of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from reshard.pipeline.copying.dequantize import numpy_dtype
from reshard.pipeline.copying.hashing import FileHasher, tensor_digest
from reshard.pipeline.copying.loop import caster_of, file_hashers
from reshard.pipeline.copying.stream import Scales, Stream, Tick, packed
from reshard.pipeline.planning.model import Entry
from reshard.pipeline.planning.pack import in_source_order
from reshard.pipeline.planning.ranges import parts
from reshard.pipeline.protocols import Source
from reshard.pipeline.stores.scratch import ScratchSpace
from reshard.pipeline.tensors import BLOCKS, DTYPE_BITS, Checkpoint, StoredFile


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
    changed: Mapping[str, Entry] = MappingProxyType({}),
) -> dict[str, Digests]:
    """Tensor -> digests of its packed bytes (little-endian, C order); ``files`` are those that the pieces count in.

    The tensors that ``changed`` names are cast as it says first. Names that share their bytes are read once. The
    files that have one of ``hashers`` pass it whole and must match: raises SourceCorrupt. Raises SourceChanged and the
    HubError family as reading does.
    """
    names: dict[tuple[object, ...], list[str]] = {}
    entries = []
    for entry in in_source_order(changed.get(t.name) or Entry(t, t.dtype) for t in checkpoint.tensors):
        sharing = names.setdefault((entry.tensor[1:], entry[1:]), [])
        if not sharing:
            entries.append(entry)
        sharing.append(entry.name)
    places = (place for entry in entries for one in parts([entry]) for place in one.places)
    found: dict[str, Digests] = {}
    with closing(Stream(source, files, places, hashers, tick)) as stream:
        for entry, sharing in zip(entries, names.values(), strict=True):
            unforgeable, recorded = blake3(), tensor_digest()
            for view in _made(entry, stream, ScratchSpace(tmpdir)):
                unforgeable.update(view)
                recorded.update(view)
            found |= dict.fromkeys(sharing, Digests(unforgeable.hexdigest(), recorded.hexdigest()))
        stream.finish()
    return found


def _made(entry: Entry, stream: Stream, disk: ScratchSpace) -> Iterator[memoryview]:
    """The bytes as the entry wants them."""
    with closing(Scales(disk, parts([entry]))) as scales:
        for one in parts([entry]):
            if one.kept:
                scales.keep(one, stream.take)
                continue
            caster = caster_of(entry, scales)
            for view in packed(one, stream.take, disk, scales, stream.tick):
                yield from caster.feed(view) if caster else (view,)
            if caster:
                caster.finish()


def hashers_of(checkpoint: Checkpoint, files: Sequence[StoredFile]) -> dict[int, FileHasher]:
    """One for each file of the checkpoint that says, by a sha256 or in its records, what its bytes should be."""
    summed = {record.file for record in checkpoint.records if record.crc32 is not None}
    known = [number for number in checkpoint.files if files[number].sha256 is not None or number in summed]
    return file_hashers(files, known, checkpoint.records)


class Stored(NamedTuple):
    """One tensor and what to make of it, and where to read it."""

    entry: Entry
    files: Sequence[StoredFile]
    source: Source

    def read(self, tmpdir: Path | None) -> Iterator[memoryview]:
        """Its packed bytes, cast."""
        places = (place for one in parts([self.entry]) for place in one.places)
        with closing(Stream(self.source, self.files, places, {}, lambda count: None)) as stream:
            yield from _made(self.entry, stream, ScratchSpace(tmpdir))
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
    as_dtype, shape = first.entry.as_dtype, first.entry.tensor.shape
    bits = DTYPE_BITS.get(as_dtype, 8)
    if as_dtype in BLOCKS:  # the first element of the block
        elements, size = BLOCKS[as_dtype]
        element, start = (at + byte) // size * elements, byte
    else:
        element = (at + byte) * 8 // bits
        start = element * bits // 8 - at
    index = tuple(int(i) for i in np.unravel_index(element, shape)) if shape else ()
    return Difference(index, *(_shown(as_dtype, side[start : start + max(1, bits // 8)]) for side in sides))


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
    if DTYPE_BITS.get(dtype, 0) < 8:  # the byte that holds it, or the block
        return f"0x{element.hex()}"
    return f"{np.frombuffer(element, numpy_dtype(dtype))[0]!s} (0x{element[::-1].hex()})"
