"""From a shard to the source bytes that make it up, in the order in which they are written. Pure.

A group reads its files once, front to back, wherever the layout allows. `itinerary` says every byte range that it
will ask for, so what is read, and how much of it twice, is known before a byte moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from reshard.pipeline.copying.gather import runs
from reshard.pipeline.limits import GAP_MAX
from reshard.pipeline.planning.model import Cut, Entry, Shard
from reshard.pipeline.tensors import DTYPE_BITS, ByteRange, Piece, StoredFile, Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a shard and the source ranges that it is read from, in the order of reading.

    ``straight``: the ranges, one after the other, are its bytes. Else each range is what one piece spans, and the
    bytes must be put in order before they are written.
    """

    entry: Entry
    ranges: tuple[ByteRange, ...]
    straight: bool


def part(entry: Entry) -> Part:
    """Where the bytes of ``entry`` come from."""
    whole = entry.tensor.range
    if whole is not None:
        return Part(entry, (whole,) if whole.start < whole.stop else (), straight=True)
    in_order = runs(entry.tensor)
    if in_order is not None:
        return Part(entry, in_order, straight=True)
    return Part(entry, tuple(_span(piece, entry.tensor) for piece in entry.tensor.pieces), straight=False)


def _span(piece: Piece, tensor: Tensor) -> ByteRange:
    """The bytes of the file from the first to the last element of ``piece``."""
    width = DTYPE_BITS[tensor.dtype] // 8
    if piece.strides is None:
        return ByteRange(piece.file, piece.offset, piece.offset + prod(piece.shape) * width)
    reach = sum((extent - 1) * stride for extent, stride in zip(piece.shape, piece.strides, strict=True))
    return ByteRange(piece.file, piece.offset, piece.offset + reach + width)


def parts(shard: Shard) -> Iterator[Part]:
    """What the data section of ``shard`` is made of, in output order."""
    return map(part, shard.entries)


def cuts_of(number: int, shard: Shard) -> Iterator[Cut]:
    """Every source range that shard ``number`` is made of."""
    for one in parts(shard):
        for i, place in enumerate(one.ranges):
            yield Cut(number, one.entry.name, i, *place)


@dataclass(frozen=True, slots=True)
class Leg:
    """One stretch of an itinerary: ``start <= byte < stop`` of a file, read in one go.

    Bytes from ``fresh`` on pass for the first time and are attested; the bytes of a ``wanted`` leg make up shards.
    """

    file: int
    start: int
    stop: int
    fresh: int
    wanted: bool


def itinerary(
    shards: Sequence[Shard], attests: Iterable[int], files: Sequence[StoredFile] | Mapping[int, StoredFile]
) -> list[Leg]:
    """Every stretch that a group reads, in order: the shards' ranges, and between them what is only attested.

    Files in ``attests`` pass whole and in order, whatever was copied before or is copied by others.
    """
    return route((place for shard in shards for part in parts(shard) for place in part.ranges), attests, files)


def route(
    places: Iterable[ByteRange], attests: Iterable[int], files: Sequence[StoredFile] | Mapping[int, StoredFile]
) -> list[Leg]:
    """Every stretch to read so that ``places`` come in their order and the files in ``attests`` pass whole."""
    cursor = dict.fromkeys(attests, 0)
    wanted = joined(places)
    last = {place.file: i for i, place in enumerate(wanted)}
    legs: list[Leg] = []
    for i, place in enumerate(wanted):
        if place.file in cursor:
            passed = cursor[place.file]
            if passed < place.start:
                legs.append(Leg(place.file, passed, place.start, passed, wanted=False))
            cursor[place.file] = max(passed, place.stop)
            fresh = min(max(place.start, passed), place.stop)
            legs.append(Leg(place.file, place.start, place.stop, fresh, wanted=True))
        else:
            previous = legs[-1] if legs else None
            if previous and previous.file == place.file and 0 < place.start - previous.stop <= GAP_MAX:
                legs.append(Leg(place.file, previous.stop, place.start, place.start, wanted=False))
            legs.append(Leg(place.file, place.start, place.stop, place.stop, wanted=True))
        if last[place.file] == i and place.file in cursor:
            legs += _rest(place.file, cursor.pop(place.file), files)
    for file, passed in cursor.items():
        legs += _rest(file, passed, files)
    return legs


def joined(places: Iterable[ByteRange]) -> list[ByteRange]:
    """The ranges, joined where one ends at the byte where the next begins."""
    joined: list[ByteRange] = []
    for place in places:
        if joined and joined[-1].file == place.file and joined[-1].stop == place.start:
            joined[-1] = ByteRange(place.file, joined[-1].start, place.stop)
        else:
            joined.append(place)
    return joined


def _rest(file: int, passed: int, files: Sequence[StoredFile] | Mapping[int, StoredFile]) -> list[Leg]:
    size = files[file].size
    return [Leg(file, passed, size, passed, wanted=False)] if passed < size else []


def requests(legs: Sequence[Leg]) -> Iterator[tuple[Leg, ...]]:
    """The legs, joined where one ends at the byte where the next begins: each tuple is one request to the store."""
    joined: list[Leg] = []
    for leg in legs:
        if joined and (joined[-1].file != leg.file or joined[-1].stop != leg.start):
            yield tuple(joined)
            joined = []
        joined.append(leg)
    if joined:
        yield tuple(joined)
