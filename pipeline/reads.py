"""From a shard to the source bytes that make it up, in the order in which they are written. Pure.

A group reads its files once, front to back, wherever the layout allows. `itinerary` says every byte range that it
will ask for, so what is read, and how much of it twice, is known before a byte moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reshard.pipeline.limits import GAP_MAX
from reshard.pipeline.plan import Entry, Shard
from reshard.pipeline.tensors import StoredFile


class Run(NamedTuple):
    """Source bytes that are output bytes as they stand: one or more whole tensors, side by side in both files."""

    file: int
    start: int
    stop: int


class Gather(NamedTuple):
    """A tensor whose bytes must be put in order, or cast, on the way."""

    entry: Entry


def reads(shard: Shard) -> Iterator[Run | Gather]:
    """What the data section of ``shard`` is made of, in output order."""
    run: Run | None = None
    for entry in shard.entries:
        place = entry.tensor.range
        if place is None or entry.cast:
            if run is not None:
                yield run
                run = None
            yield Gather(entry)
        elif run is not None and run.file == place.file and run.stop == place.start:
            run = Run(run.file, run.start, place.stop)
        else:
            if run is not None:
                yield run
            run = Run(*place)
    if run is not None:
        yield run


@dataclass(frozen=True, slots=True)
class Leg:
    """One stretch of an itinerary: ``start <= byte < stop`` of a file, read in one go.

    Bytes from ``fresh`` on pass for the first time and go through the file's sha256; ``copied`` bytes are output.
    """

    file: int
    start: int
    stop: int
    fresh: int
    copied: bool


def itinerary(
    shards: Sequence[Shard], attests: Iterable[int], files: Sequence[StoredFile] | Mapping[int, StoredFile]
) -> list[Leg]:
    """Every stretch that a group reads, in order: the shards' runs, and between them what only has to be hashed.

    Files in ``attests`` pass through their sha256 whole, whatever was copied before or is copied by others. A tensor
    that is gathered (strided, cast) is read by its own rules and is no part of the itinerary.
    """
    cursor = dict.fromkeys(attests, 0)
    runs = [read for shard in shards for read in reads(shard) if isinstance(read, Run)]
    last = {run.file: i for i, run in enumerate(runs)}
    legs: list[Leg] = []
    for i, run in enumerate(runs):
        if run.file in cursor:
            passed = cursor[run.file]
            if passed < run.start:
                legs.append(Leg(run.file, passed, run.start, passed, copied=False))
            cursor[run.file] = max(passed, run.stop)
            fresh = min(max(run.start, passed), run.stop)
            legs.append(Leg(run.file, run.start, run.stop, fresh, copied=True))
        else:
            previous = legs[-1] if legs else None
            if previous and previous.file == run.file and 0 < run.start - previous.stop <= GAP_MAX:
                legs.append(Leg(run.file, previous.stop, run.start, run.start, copied=False))
            legs.append(Leg(run.file, run.start, run.stop, run.stop, copied=True))
        if last[run.file] == i and run.file in cursor:
            legs += _rest(run.file, cursor.pop(run.file), files)
    for file, passed in cursor.items():
        legs += _rest(file, passed, files)
    return legs


def _rest(file: int, passed: int, files: Sequence[StoredFile] | Mapping[int, StoredFile]) -> list[Leg]:
    size = files[file].size
    return [Leg(file, passed, size, passed, copied=False)] if passed < size else []


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
