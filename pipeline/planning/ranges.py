"""From a shard to the source bytes that make it up, in the order in which they are written. Pure.

A group reads its files once, front to back, wherever the layout allows. `read_plan` says every byte range that it
will ask for, so what is read, and how much of it twice, is known before a byte moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeVar

from reshard.pipeline.limits import GAP_MAX
from reshard.pipeline.planning.model import Cut, Entry, Shard
from reshard.pipeline.tensors import DTYPE_BITS, ByteRange, Piece, Record, Span, StoredFile, Tensor


class Part(NamedTuple):
    """One tensor of a shard and the source ranges that it is read from, in the order of reading.

    ``contiguous``: the ranges, one after the other, are its bytes. Else each range is what one piece spans, and the
    bytes must be put in order before they are written. What is ``kept`` is a scale, and waits for its weight; ``after``
    is one that comes behind its weight, so that the weight has to wait for it.
    """

    entry: Entry
    ranges: tuple[ByteRange, ...]
    contiguous: bool
    kept: bool = False
    after: Part | None = None

    @property
    def places(self) -> tuple[ByteRange, ...]:
        """All that is read for it, in this order."""
        return self.ranges + self.after.ranges if self.after else self.ranges

    @property
    def as_stored(self) -> bool:
        """Whether ``ranges`` are, one after the other, the bytes that it is written or cast from."""
        return self.contiguous and self.entry.scale is None

    @property
    def span(self) -> int:
        """Bytes of all that."""
        return sum(place.stop - place.start for place in self.places)


def part(entry: Entry) -> Part:
    """Where the bytes of ``entry`` come from, but for those of its scale."""
    tensor = entry.stored
    whole = tensor.range
    if whole is not None:
        return Part(entry, (whole,) if whole.start < whole.stop else (), contiguous=True)
    in_order = runs(tensor)
    if in_order is not None:
        return Part(entry, in_order, contiguous=True)
    return Part(entry, tuple(_span(piece, tensor) for piece in tensor.pieces), contiguous=False)


def runs(tensor: Tensor) -> tuple[ByteRange, ...] | None:
    """The stretches that are the tensor's bytes as they stand, one after the other; None when it must be gathered.

    A tensor that is sharded by rows, as FSDP does, has them: one long read per shard.
    """
    if tensor.size == 0:
        return ()
    found = []
    position = 0
    for piece in sorted(tensor.pieces, key=lambda piece: piece.at):
        size = prod(piece.shape) * DTYPE_BITS[tensor.dtype] // 8
        if size == 0:
            continue
        if piece.strides is not None or piece.order != "little" or not _is_run(piece, tensor.shape):
            return None
        found.append(ByteRange(piece.file, piece.offset, piece.offset + size))
        position += size
    return tuple(found) if position == tensor.size else None


def _is_run(piece: Piece, shape: Sequence[int]) -> bool:
    """Whether the piece's elements follow each other in the tensor: only its first real dimension may be a part."""
    parted = next((axis for axis in range(len(shape)) if piece.shape[axis] != 1), len(shape))
    return piece.shape[parted + 1 :] == tuple(shape[parted + 1 :])


def _span(piece: Piece, tensor: Tensor) -> ByteRange:
    """The bytes of the file from the first to the last element of ``piece``."""
    width = DTYPE_BITS[tensor.dtype] // 8
    reach = sum((extent - 1) * stride for extent, stride in zip(piece.shape, piece.steps(width), strict=True))
    return ByteRange(piece.file, piece.offset, piece.offset + reach + width)


def parts(entries: Sequence[Entry]) -> Iterator[Part]:
    """What ``entries`` of a shard are made of, in output order, and the scales that its weights need.

    Scales that the source has before the next weight come before it, whosever they are: those of a whole file often
    stand together, and a file that passes whole passes them anyway.
    """
    waiting = [entry for entry in entries if entry.scale]
    if not waiting:
        yield from map(part, entries)
        return
    waiting.sort(key=lambda entry: _at(entry.scale.tensor) if entry.scale else (), reverse=True)
    kept: set[str] = set()
    for entry in entries:
        while waiting and waiting[-1].scale and _at(waiting[-1].scale.tensor) < _at(entry.tensor):
            yield from _kept(waiting.pop(), kept)
        if entry.scale and _same_file(entry.scale.tensor, entry.tensor) and entry.name not in kept:
            yield part(entry)._replace(after=_scale(entry))
            kept.add(entry.name)
        else:
            yield from _kept(entry, kept)
            yield part(entry)


def _kept(entry: Entry, kept: set[str]) -> Iterator[Part]:
    """The scale of ``entry``, unless it was there already."""
    if entry.scale and entry.name not in kept:
        kept.add(entry.name)
        yield _scale(entry)._replace(kept=True)


def _scale(entry: Entry) -> Part:
    assert entry.scale is not None
    return part(Entry(entry.scale.tensor, entry.scale.tensor.dtype))


def _at(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor begins; nowhere if it is of no bytes."""
    return min(((piece.file, piece.offset) for piece in tensor.pieces), default=(-1, -1))


def _same_file(one: Tensor, other: Tensor) -> bool:
    return not {piece.file for piece in one.pieces}.isdisjoint(piece.file for piece in other.pieces)


def cuts_of(number: int, shard: Shard) -> Iterator[Cut]:
    """Every source range that shard ``number`` is made of."""
    for one in parts(shard.entries):
        for i, place in enumerate(one.places):
            yield Cut(number, one.entry.name, i, *place)


@dataclass(frozen=True, slots=True)
class ReadSegment:
    """One stretch of a read plan: ``start <= byte < stop`` of a file, read in one go.

    Bytes from ``fresh`` on pass for the first time and are attested; the bytes of a ``wanted`` segment make up shards.
    """

    file: int
    start: int
    stop: int
    fresh: int
    wanted: bool


S = TypeVar("S", ByteRange, ReadSegment)


def attested(file: StoredFile, records: Sequence[Record]) -> Span:
    """What has to pass, whole and in order, for a file's bytes to be attested.

    All of a file with a sha256; of another, what its archive keeps sums of, from the first to the last that is used.

    What lies before and behind that is never read: a trainer's file may be an optimizer's state for two thirds.
    """
    if file.sha256 is not None or not records:
        return Span(0, file.size)
    return Span(min(record.start for record in records), max(record.stop for record in records))


def read_plan(shards: Sequence[Shard], attests: Mapping[int, Span]) -> list[ReadSegment]:
    """Every stretch that a group reads, in order: the shards' ranges, and between them what is only attested.

    What ``attests`` names passes whole and in order, whatever was copied before or is copied by others.
    """
    return read_segments((place for shard in shards for part in parts(shard.entries) for place in part.places), attests)


def read_segments(places: Iterable[ByteRange], attests: Mapping[int, Span]) -> list[ReadSegment]:
    """Every stretch to read so that ``places`` come in their order, and what ``attests`` says of a file passes whole.

    Of a file of 100 bytes, bytes 10 to 40 and 60 to 90 are wanted, in this order, and all are attested:

    >>> for part in read_segments([ByteRange(0, 60, 90), ByteRange(0, 10, 40)], {0: Span(0, 100)}):
    ...     print(part.start, part.stop, "wanted" if part.wanted else "passed", "and attested from", part.fresh)
    0 60 passed and attested from 0
    60 90 wanted and attested from 60
    10 40 wanted and attested from 40
    90 100 passed and attested from 90
    """
    cursor = {file: there.start for file, there in attests.items()}
    wanted = joined(places)
    last = {place.file: i for i, place in enumerate(wanted)}
    segments: list[ReadSegment] = []
    for i, place in enumerate(wanted):
        if place.file in cursor:
            passed = cursor[place.file]
            if passed < place.start:
                segments.append(ReadSegment(place.file, passed, place.start, passed, wanted=False))
            cursor[place.file] = max(passed, place.stop)
            fresh = min(max(place.start, passed), place.stop)
            segments.append(ReadSegment(place.file, place.start, place.stop, fresh, wanted=True))
        else:
            previous = segments[-1] if segments else None
            if previous and previous.file == place.file and 0 < place.start - previous.stop <= GAP_MAX:
                segments.append(ReadSegment(place.file, previous.stop, place.start, place.start, wanted=False))
            segments.append(ReadSegment(place.file, place.start, place.stop, place.stop, wanted=True))
        if last[place.file] == i and place.file in cursor:
            segments += _rest(place.file, cursor.pop(place.file), attests)
    for file, passed in cursor.items():
        segments += _rest(file, passed, attests)
    return segments


def joined(places: Iterable[ByteRange]) -> list[ByteRange]:
    """The ranges, joined where one ends at the byte where the next begins.

    >>> joined([ByteRange(0, 0, 4), ByteRange(0, 4, 6), ByteRange(0, 8, 9)])
    [ByteRange(file=0, start=0, stop=6), ByteRange(file=0, start=8, stop=9)]
    """
    return [ByteRange(some[0].file, some[0].start, some[-1].stop) for some in adjoining(places)]


def _rest(file: int, passed: int, attests: Mapping[int, Span]) -> list[ReadSegment]:
    stop = attests[file].stop
    return [ReadSegment(file, passed, stop, passed, wanted=False)] if passed < stop else []


def adjoining(stretches: Iterable[S]) -> Iterator[list[S]]:
    """The stretches, together as long as each begins at the byte where the one before ends.

    Those of a read plan that come together are one request to the store.
    """
    row: list[S] = []
    for one in stretches:
        if row and (row[-1].file != one.file or row[-1].stop != one.start):
            yield row
            row = []
        row.append(one)
    if row:
        yield row


def same_cut(
    shards: Sequence[Shard], tensors: Sequence[Tensor], files: Sequence[StoredFile], placed: bool = False
) -> bool:
    """Whether each file has the tensors of the source's file of the same name, all of them as they are.

    ``placed``: and at the same bytes of it.
    """

    def same(shard: Shard) -> bool:
        at = len(shard.header)
        for entry in shard.entries:
            found = entry.tensor.range
            if found is None or files[found.file].path != shard.path or entry.cast or entry.scale is not None:
                return False
            if placed and found.start != at:
                return False
            at += entry.tensor.size
        return True

    return sum(len(shard.entries) for shard in shards) == len(tensors) and all(map(same, shards))
