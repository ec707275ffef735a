"""Putting a tensor's bytes in order, window by window, when its source keeps them in another one.

Strided, transposed, big-endian and sharded tensors have no `Tensor.range`. Their packed, little-endian, C-order bytes
are made window by window: a window is cut into boxes, each box is met with the pieces that tile the tensor, and each
meeting becomes a strided copy out of one or more stretches of the source. What a window reads, in how many requests,
and what it holds in memory is known before a byte moves. Pure; `assemble` is handed what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np

from reshard.pipeline.limits import GATHER_READ
from reshard.pipeline.tensors import DTYPE_BITS, Piece, Tensor

# The parts of an element that a big-endian file stores in reverse, where they are not the element itself, in bytes.
_PARTS = {"C64": 4}


class Window(NamedTuple):
    """``start <= byte < stop`` of a tensor's packed bytes."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Step:
    """Stretches of a source file, one or some at even distances, and the strided copy of them into the window.

    Stretch ``n`` is the ``length`` bytes at ``start + n * distance``; put side by side, element ``i`` (a multi-index
    below ``shape``) is at ``sum(i * source_strides)`` of them and goes to ``target_at + sum(i * target_strides)`` of
    the window. Strides and offsets are bytes.
    """

    file: int
    start: int
    length: int
    count: int
    distance: int
    order: Literal["little", "big"]
    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_at: int
    target_strides: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes that are held until they are copied."""
        return self.count * self.length


class _Cover(NamedTuple):
    """How the source of a meeting is read; see there."""

    outer: tuple[int, ...]  # axes, from the widest stride inwards
    batch: int
    split: int | None
    rows: int
    span: int


@dataclass(frozen=True, slots=True)
class _Meeting:
    """Where a box of the window and a piece meet, and how its source is read.

    One read spans ``span`` bytes and covers the dimensions that are neither in ``outer`` nor ``split``; the outer ones
    are walked index by index, the last of them ``batch`` indices at a time, and ``split`` in runs of ``rows`` indices.
    """

    file: int
    offset: int  # byte of the file where element 0 lies
    order: Literal["little", "big"]
    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_at: int
    target_strides: tuple[int, ...]
    cover: _Cover

    def _runs(self, axis: int | None, step: int) -> Iterator[tuple[int, int]]:
        """(first index, indices) of the runs of ``step`` indices that make up an axis; (0, 1) when there is none."""
        if axis is None:
            yield 0, 1
            return
        for first in range(0, self.shape[axis], step):
            yield first, min(step, self.shape[axis] - first)

    def _length(self, rows: int) -> int:
        """The bytes of a read that covers ``rows`` indices of the split dimension."""
        split = self.cover.split
        return self.cover.span + (rows - 1) * (self.source_strides[split] if split is not None else 0)

    @property
    def _walks(self) -> int:
        return prod(self.shape[axis] for axis in self.cover.outer)

    @property
    def reads(self) -> int:
        return self._walks * sum(1 for _ in self._runs(self.cover.split, self.cover.rows))

    @property
    def bytes_read(self) -> int:
        return self._walks * sum(self._length(rows) for _, rows in self._runs(self.cover.split, self.cover.rows))

    @property
    def largest_step(self) -> int:
        """Bytes."""
        longest = max(self._length(rows) for _, rows in self._runs(self.cover.split, self.cover.rows))
        last = self.cover.outer[-1:]
        return longest * (min(self.cover.batch, self.shape[last[0]]) if last else 1)

    def steps(self) -> Iterator[Step]:
        """The reads in ascending order of the file."""
        walked, batched = self.cover.outer[:-1], self.cover.outer[-1] if self.cover.outer else None
        for index in product(*(range(self.shape[axis]) for axis in walked)):
            fixed = dict(zip(walked, index, strict=True))
            for first_read, count in self._runs(batched, self.cover.batch):
                for first_row, rows in self._runs(self.cover.split, self.cover.rows):
                    yield self._step(fixed, batched, first_read, count, first_row, rows)

    def _step(
        self, fixed: dict[int, int], batched: int | None, first_read: int, count: int, first_row: int, rows: int
    ) -> Step:
        shape = [1 if axis in fixed else extent for axis, extent in enumerate(self.shape)]
        strides = list(self.source_strides)
        at = dict(fixed)
        distance, length = 0, self._length(rows)
        if batched is not None:
            at[batched], shape[batched] = first_read, count
            distance, strides[batched] = strides[batched], length
        if self.cover.split is not None:
            at[self.cover.split], shape[self.cover.split] = first_row, rows
        return Step(
            file=self.file,
            start=self.offset + sum(i * self.source_strides[axis] for axis, i in at.items()),
            length=length,
            count=count,
            distance=distance,
            order=self.order,
            shape=tuple(shape),
            source_strides=tuple(strides),
            target_at=self.target_at + sum(i * self.target_strides[axis] for axis, i in at.items()),
            target_strides=self.target_strides,
        )


@dataclass(frozen=True, slots=True)
class Gathering:
    """How one window of a tensor is put together."""

    window: Window
    dtype: str
    meetings: tuple[_Meeting, ...]

    @property
    def reads(self) -> int:
        """How many stretches are read."""
        return sum(meeting.reads for meeting in self.meetings)

    @property
    def bytes_read(self) -> int:
        """What is read of the source."""
        return sum(meeting.bytes_read for meeting in self.meetings)

    @property
    def memory(self) -> int:
        """Bytes held at once: the window, and the largest step."""
        largest = max((meeting.largest_step for meeting in self.meetings), default=0)
        return self.window.stop - self.window.start + largest

    def steps(self) -> Iterator[Step]:
        for meeting in self.meetings:
            yield from meeting.steps()


def windows(tensor: Tensor, limit: int) -> Iterator[Window]:
    """Windows of at most ``limit`` bytes that cover the tensor in order, each of them a box.

    Raises ValueError when ``limit`` is less than one element.
    """
    width = _width(tensor)
    if limit < width:
        raise ValueError(f"a window of {limit} bytes holds no element of {width}")
    if tensor.size == 0:
        return
    # The first axis whose rows (everything behind one of its indices) fit; windows never cross an index before it.
    row = block = tensor.size
    for extent in tensor.shape:
        block, row = row, row // extent
        if row <= limit:
            break
    step = limit // row * row
    for base in range(0, tensor.size, block):
        for start in range(base, base + block, step):
            yield Window(start, min(start + step, base + block))


def gather(tensor: Tensor, window: Window, *, read_max: int = GATHER_READ) -> Gathering:
    """How to make ``window`` of the packed bytes of ``tensor``, whose pieces tile it exactly.

    A step holds at most ``read_max`` bytes, or one element.
    Raises ValueError when the window does not begin and end between elements.
    """
    width = _width(tensor)
    start, stop = window
    if start % width or stop % width or not 0 <= start <= stop <= tensor.size:
        raise ValueError(f"{window} is no window of {tensor.size} bytes in elements of {width}")
    target_strides = _packed(tensor.shape, width)
    meetings = []
    if start < stop:
        for at, extent in _boxes(tensor.shape, start // width, stop // width):
            for piece in tensor.pieces:
                meeting = _meet(at, extent, piece, width, start, target_strides, read_max)
                if meeting is not None:
                    meetings.append(meeting)
    return Gathering(window, tensor.dtype, tuple(meetings))


def assemble(
    gathering: Gathering, read: Callable[[int, int, int], Iterator[memoryview]], into: bytearray | None = None
) -> memoryview:
    """The bytes of the window; ``read(file, start, stop)`` yields exactly those bytes of a source file.

    They are made in the beginning of ``into``, where it is given: one buffer is enough for all windows of a tensor.
    """
    size = gathering.window.stop - gathering.window.start
    made = memoryview(bytearray(size) if into is None else into)[:size]
    for step in gathering.steps():
        held = bytearray(step.size)
        view = memoryview(held)
        at = 0
        for number in range(step.count):
            start = step.start + number * step.distance
            for some in read(step.file, start, start + step.length):
                view[at : at + len(some)] = some
                at += len(some)
        place(step, gathering.dtype, held, made)
    return made


def place(step: Step, dtype: str, held: bytes | bytearray | memoryview, made: memoryview) -> None:
    """Copy what ``step`` wants out of the stretches that it asked for, side by side, into the window that is made."""
    width = DTYPE_BITS[dtype] // 8
    part = _PARTS.get(dtype, width)
    shape = step.shape
    source_strides, target_strides = step.source_strides, step.target_strides
    if part != width:
        shape = (*shape, width // part)
        source_strides, target_strides = (*source_strides, part), (*target_strides, part)
    order = ">" if step.order == "big" else "<"
    source: np.ndarray[Any, Any] = np.ndarray(shape, f"{order}u{part}", held, 0, source_strides)
    target: np.ndarray[Any, Any] = np.ndarray(shape, f"<u{part}", made, step.target_at, target_strides)
    target[...] = source


# ------------------------------------------------------------------------------------------------------- the parts


def _width(tensor: Tensor) -> int:
    bits = DTYPE_BITS[tensor.dtype]
    if bits % 8:
        raise ValueError(f"{tensor.dtype} is packed: its elements cannot be moved one by one")
    return bits // 8


def _packed(shape: Sequence[int], width: int) -> tuple[int, ...]:
    """The strides of C order."""
    return tuple(width * prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(first index, extent) of the boxes that elements ``start <= i < stop`` of C order are made of, in order."""
    if not shape:
        yield (), ()
        return
    rest = shape[1:]
    row = prod(rest)
    first, into = divmod(start, row)
    last, beyond = divmod(stop, row)
    if first == last:
        for at, extent in _boxes(rest, into, beyond):
            yield (first, *at), (1, *extent)
        return
    if into:
        for at, extent in _boxes(rest, into, row):
            yield (first, *at), (1, *extent)
        first += 1
    if first < last:
        yield (first, *(0 for _ in rest)), (last - first, *rest)
    if beyond:
        for at, extent in _boxes(rest, 0, beyond):
            yield (last, *at), (1, *extent)


def _meet(
    at: tuple[int, ...],
    extent: tuple[int, ...],
    piece: Piece,
    width: int,
    window_start: int,
    target_strides: tuple[int, ...],
    read_max: int,
) -> _Meeting | None:
    low = tuple(max(a, b) for a, b in zip(at, piece.at, strict=True))
    high = tuple(min(a + n, b + m) for a, n, b, m in zip(at, extent, piece.at, piece.shape, strict=True))
    shape = tuple(last - first for last, first in zip(high, low, strict=True))
    if any(n <= 0 for n in shape):
        return None
    strides = piece.strides if piece.strides is not None else _packed(piece.shape, width)
    offset = piece.offset + sum((i - j) * stride for i, j, stride in zip(low, piece.at, strides, strict=True))
    target_at = sum(i * stride for i, stride in zip(low, target_strides, strict=True)) - window_start
    cover = _cover(shape, strides, width, read_max)
    return _Meeting(piece.file, offset, piece.order, shape, strides, target_at, target_strides, cover)


def _cover(shape: tuple[int, ...], strides: tuple[int, ...], width: int, read_max: int) -> _Cover:
    """Which dimensions one read covers, from the tightest stride outwards."""
    by_stride = sorted((axis for axis, extent in enumerate(shape) if extent > 1), key=lambda axis: strides[axis])
    covered: list[int] = []
    span = width
    for axis in by_stride:
        if strides[axis] > span:
            break
        covered.append(axis)
        span += (shape[axis] - 1) * strides[axis]
    outer = by_stride[len(covered) :]
    split, rows = None, 1
    while span > read_max and covered:
        axis = covered.pop()
        span -= (shape[axis] - 1) * strides[axis]
        if span <= read_max:
            split, rows = axis, (read_max - span) // strides[axis] + 1
            break
        outer.insert(0, axis)
    batch = 1 if split is not None else max(1, read_max // span)
    return _Cover(tuple(reversed(outer)), batch, split, rows, span)
