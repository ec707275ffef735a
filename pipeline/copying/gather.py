"""Putting a tensor's bytes in order, window by window, when its source keeps them in another one.

Strided, transposed, big-endian and sharded tensors have no `Tensor.range`. Their packed, little-endian, C-order bytes
are made from one file that holds all of their pieces: a window meets each piece in a box, which is a strided copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from reshard.pipeline.limits import GATHER_HOLE, GATHER_READ
from reshard.pipeline.tensors import DTYPE_BITS, Box, Tensor, packed_strides

# The parts of an element that a big-endian file stores in reverse, where they are not the element itself, in bytes.
_PARTS = {"C64": 4}

_Array = np.ndarray[Any, Any]
Read = Callable[[memoryview, int], None]  # fills a view with the bytes of the file from an offset on


def windows(tensor: Tensor, limit: int) -> Iterator[Box]:
    """Boxes of at most ``limit`` bytes that make up the tensor, in the order of its packed bytes: each is a stretch.

    Raises ValueError when ``limit`` is less than one element.

    >>> [window.at for window in windows(Tensor("w", "U8", (2, 5), ()), 3)]
    [(0, 0), (0, 3), (1, 0), (1, 3)]
    """
    width, shape = _width(tensor), tensor.shape
    if limit < width:
        raise ValueError(f"a window of {limit} bytes holds no element of {width}")
    if tensor.size <= limit:
        if tensor.size:
            yield Box((0,) * len(shape), shape)
        return
    rows = packed_strides(shape, width)
    axis = next(axis for axis, row in enumerate(rows) if row <= limit)
    step, inner = limit // rows[axis], shape[axis + 1 :]
    for outer in product(*map(range, shape[:axis])):
        for first in range(0, shape[axis], step):
            extent = min(step, shape[axis] - first)
            yield Box((*outer, first, *(0 for _ in inner)), (*(1 for _ in outer), extent, *inner))


def gather(tensor: Tensor, window: Box, read: Read, into: bytearray, *, read_max: int = GATHER_READ) -> memoryview:
    """The packed bytes of ``window``, made at the beginning of ``into``; the pieces of ``tensor`` tile it exactly.

    One buffer is enough for all windows. Beside it at most ``read_max`` bytes, or one element, are held at once.
    """
    width = _width(tensor)
    part = _PARTS.get(tensor.dtype, width)
    target: _Array = np.ndarray((*window.shape, width // part), f"<u{part}", into)
    for piece in tensor.pieces:
        low = [max(a, b) for a, b in zip(window.at, piece.at, strict=True)]
        high = [min(a + n, b + m) for a, n, b, m in zip(*window, piece.at, piece.shape, strict=True)]
        if all(first < last for first, last in zip(low, high, strict=True)):
            strides = piece.steps(width)
            start = piece.offset + sum((i - at) * s for i, at, s in zip(low, piece.at, strides, strict=True))
            box = target[tuple(slice(a - at, b - at) for a, b, at in zip(low, high, window.at, strict=True))]
            _copy(start, (*strides, part), box, ">" if piece.order == "big" else "<", read, read_max)
    return memoryview(into)[: target.nbytes]


def _copy(start: int, strides: Sequence[int], target: _Array, order: str, read: Read, read_max: int) -> None:
    """Fill ``target``, whose element ``i`` is at ``start + sum(i * strides)`` of the file, in ``order``.

    One read spans the axes of the tightest strides, as many as leave no large hole and fit. Along the next axis, reads
    are made longer or put side by side until they come to ``read_max``; the others are walked index by index.
    """
    shape, kind = target.shape, f"{order}u{target.itemsize}"
    strides = [stride if extent > 1 else 0 for stride, extent in zip(strides, shape, strict=True)]
    axis, *outer = sorted(range(target.ndim), key=strides.__getitem__)
    span = target.itemsize
    while (
        outer
        and strides[axis] <= span + GATHER_HOLE
        and (longer := span + (shape[axis] - 1) * strides[axis]) <= read_max
    ):
        span, (axis, *outer) = longer, outer
    extent, stride = shape[axis], strides[axis]
    apart = stride > span + GATHER_HOLE
    step = min(extent, max(1, read_max // span if apart else (read_max - span) // max(stride, 1) + 1))
    reads, length = (step, span) if apart else (1, span + (step - 1) * stride)
    held = memoryview(bytearray(reads * length))
    held_strides = [span if apart and one == axis else strides[one] for one in range(target.ndim)]
    outer.reverse()
    for index in _indices([shape[one] for one in outer]):
        walked = dict(zip(outer, index, strict=True))
        at = start + sum(i * strides[one] for one, i in walked.items())
        for first in range(0, extent, step):
            count = min(step, extent - first)
            if not apart:
                length = span + (count - 1) * stride
            for number in range(count if apart else 1):
                read(held[number * length : (number + 1) * length], at + (first + number) * stride)
            taken = {**{one: slice(i, i + 1) for one, i in walked.items()}, axis: slice(first, first + count)}
            box = target[tuple(taken.get(one, slice(None)) for one in range(target.ndim))]
            box[...] = np.ndarray(box.shape, kind, held, 0, held_strides)


def _indices(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every index in C order. There may be millions: `product`, and numpy's `ndindex`, would hold each range whole."""
    rows = packed_strides(shape)
    for number in range(prod(shape)):
        yield tuple(number // row % extent for row, extent in zip(rows, shape, strict=True))


def _width(tensor: Tensor) -> int:
    bits = DTYPE_BITS[tensor.dtype]
    if bits % 8:
        raise ValueError(f"{tensor.dtype} is packed: its elements cannot be moved one by one")
    return bits // 8
