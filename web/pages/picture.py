"""A plan as a picture: source files on the left, target files on the right, tensors as bands between them. Pure.

A band is a stretch of a source file and the stretch of a target file that is made of it, so that the bands of a target
file tile all of it behind its header. Neighbours become one band: tensors of one layer, and where that leaves too many,
whatever lies side by side in both files, and at last all that one file has of another, piled up. Files beyond FILES_MAX
share a box. So a picture has a bounded number of shapes, whatever the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reshard.client.text import count
from reshard.pipeline.planning.blocks import block_of
from reshard.pipeline.planning.model import Plan
from reshard.pipeline.planning.ranges import part

FILES_MAX = 32  # boxes of a side
BANDS_MAX = 300  # before neighbours of different layers share one
SHAPES_MAX = 2 * FILES_MAX + FILES_MAX**2

HEIGHT = 340.0  # pixels of the larger side's bytes
LEAST = 4.0  # of a box
GAP = 5.0  # between two boxes


@dataclass(slots=True)
class Band:
    """Bytes ``[start, stop)`` of box ``source`` on the left, and those of box ``target`` that they become."""

    name: str
    tensors: int
    source: int
    start: int
    stop: int
    target: int
    begin: int
    end: int


class Box(NamedTuple):
    """A file, or several; ``members`` are the numbers of its files in the plan."""

    name: str
    size: int
    members: range


class Picture(NamedTuple):
    sources: list[Box]
    targets: list[Box]
    bands: list[Band]


def picture(plan: Plan) -> Picture:
    sources = _boxes([(file.path, file.size) for file in plan.files])
    targets = _boxes([(shard.path, shard.size) for shard in plan.shards])
    bands = _merged(_bands(plan, sources, targets), of_one_layer=True)
    if len(bands) > BANDS_MAX:
        bands = _merged(bands)
    if len(bands) > BANDS_MAX:
        bands = _stacked_by_pair(bands)
    return Picture(sources, targets, bands)


def _boxes(files: Sequence[tuple[str, int]]) -> list[Box]:
    each = -(-len(files) // FILES_MAX) or 1
    found = []
    for first in range(0, len(files), each):
        some = files[first : first + each]
        name = some[0][0] if len(some) == 1 else f"{some[0][0]} and {len(some) - 1} more"
        found.append(Box(name, sum(size for _, size in some), range(first, first + len(some))))
    return found


def _places(boxes: Sequence[Box], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Of each file its box, and where in that it begins."""
    found = []
    for number, box in enumerate(boxes):
        at = 0
        for member in box.members:
            found.append((number, at))
            at += sizes[member]
    return found


def _bands(plan: Plan, sources: Sequence[Box], targets: Sequence[Box]) -> Iterator[Band]:
    """A band for each range of a tensor, in the order of the target."""
    froms = _places(sources, [file.size for file in plan.files])
    tos = _places(targets, [shard.size for shard in plan.shards])
    for number, shard in enumerate(plan.shards):
        target, at = tos[number]
        at += len(shard.header)
        for entry in shard.entries:
            name, ranges = block_of(entry.name), part(entry).ranges
            read, whole, made = 0, sum(r.stop - r.start for r in ranges), 0
            for r in ranges:
                read += r.stop - r.start
                ends = entry.size * read // whole
                source, offset = froms[r.file]
                yield Band(
                    name, int(made == 0), source, offset + r.start, offset + r.stop, target, at + made, at + ends
                )
                made = ends
            at += entry.size + shard.padding(entry)


def _merged(bands: Iterable[Band], of_one_layer: bool = False) -> list[Band]:
    """Whatever lies side by side in both files as one band, or only what is ``of_one_layer``."""
    found: list[Band] = []
    for band in bands:
        last = found[-1] if found else None
        if last and _follows(last, band) and (last.name == band.name or not of_one_layer):
            _join(last, band)
        else:
            found.append(band)
    return found


def _follows(one: Band, other: Band) -> bool:
    return (one.source, one.stop, one.target, one.end) == (other.source, other.start, other.target, other.begin)


def _join(one: Band, other: Band) -> None:
    one.stop, one.end = other.stop, other.end
    one.tensors += other.tensors
    if one.name != other.name:
        one.name = f"{one.name.partition(' to ')[0]} to {other.name.partition(' to ')[2] or other.name}"


def _stacked_by_pair(bands: Sequence[Band]) -> list[Band]:
    """One band of all that a target has of a source: as high as all of it, wherever in the files it is."""
    pairs: dict[tuple[int, int], Band] = {}
    lefts, rights = dict[int, int](), dict[int, int]()  # where the next band of each box begins
    for band in bands:
        lefts[band.source] = min(lefts.get(band.source, band.start), band.start)
        rights[band.target] = min(rights.get(band.target, band.begin), band.begin)
        pair = pairs.setdefault((band.source, band.target), Band("", 0, band.source, 0, 0, band.target, 0, 0))
        pair.stop += band.stop - band.start
        pair.end += band.end - band.begin
        pair.tensors += band.tensors
    for (source, target), pair in sorted(pairs.items()):
        pair.name = count(pair.tensors, "tensor")
        pair.start, pair.stop = lefts[source], lefts[source] + pair.stop
        pair.begin, pair.end = rights[target], rights[target] + pair.end
        lefts[source], rights[target] = pair.stop, pair.end
    return list(pairs.values())


# ------------------------------------------------------------------------------------------------------- in pixels


class Rect(NamedTuple):
    box: Box
    y: float
    height: float


class Path(NamedTuple):
    """A band as it is drawn, over a width of 100; ``hue`` tells its source."""

    band: Band
    d: str
    hue: int


class Drawing(NamedTuple):
    height: float
    sources: list[Rect]
    targets: list[Rect]
    paths: list[Path]


HUES = 6


def drawing(seen: Picture) -> Drawing:
    """Where each box and band of a picture is; both sides have one scale, but that no box is too low to be seen."""
    scale = HEIGHT / max(1, *(sum(box.size for box in side) for side in (seen.sources, seen.targets)))
    sources, targets = _stacked(seen.sources, scale), _stacked(seen.targets, scale)
    height = max([LEAST, *(r.y + r.height for r in (*sources[-1:], *targets[-1:]))])
    paths = []
    for band in seen.bands:
        left, right = sources[band.source], targets[band.target]
        a, b = (_at(left, byte) for byte in (band.start, band.stop))
        c, d = (_at(right, byte) for byte in (band.begin, band.end))
        line = f"M0 {a:.2f}C50 {a:.2f} 50 {c:.2f} 100 {c:.2f}V{d:.2f}C50 {d:.2f} 50 {b:.2f} 0 {b:.2f}Z"
        paths.append(Path(band, line, band.source % HUES))
    return Drawing(round(height, 2), sources, targets, paths)


def _stacked(boxes: Sequence[Box], scale: float) -> list[Rect]:
    found, y = [], 0.0
    for box in boxes:
        height = max(LEAST, box.size * scale)
        found.append(Rect(box, round(y, 2), round(height, 2)))
        y += height + GAP
    return found


def _at(rect: Rect, byte: int) -> float:
    return rect.y + rect.height * min(1.0, byte / max(1, rect.box.size))  # what is read twice may be more than all
