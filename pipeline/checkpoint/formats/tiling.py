"""Whether boxes tile an array exactly: every element in one of them, and none in two. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from types import EllipsisType

from reshard.pipeline.limits import TILING_CELLS_MAX
from reshard.pipeline.tensors import Box, Piece, packed_strides
from reshard.pipeline.text import counted


def flaw_in_tiling(shape: Sequence[int], boxes: Sequence[Box | Piece]) -> str | None:
    """What is wrong with ``boxes`` as a tiling of an array of ``shape``, in words; None when nothing is.

    A sum of volumes would take two overlapping boxes and a gap for a tiling. So the array is cut along every edge of
    every box into cells, and each box takes its cells: none may be taken twice, none may stay free.
    """
    for box in boxes:
        if len(box.at) != len(shape) or len(box.shape) != len(shape):
            return f"a part at {list(box.at)} has a different number of dimensions"
        if any(first + extent > whole for first, extent, whole in zip(box.at, box.shape, shape, strict=True)):
            return f"the part at {list(box.at)} extends outside {list(shape)}"
    if 0 in shape:
        return None
    solid = [box for box in boxes if 0 not in box.shape]
    edges = [
        sorted({0, whole, *(edge for box in solid for edge in (box.at[axis], box.at[axis] + box.shape[axis]))})
        for axis, whole in enumerate(shape)
    ]
    if prod(len(cuts) - 1 for cuts in edges) > TILING_CELLS_MAX:
        return f"{counted(len(solid), 'part', 'is')} cut too irregularly to be checked"
    import numpy as np  # which a copy of plain files does without, as of their 20 MB

    cell_at = [{edge: cell for cell, edge in enumerate(cuts)} for cuts in edges]
    taken = np.zeros([len(cuts) - 1 for cuts in edges], bool)
    for box in solid:
        index: list[slice | EllipsisType] = [
            slice(cells[first], cells[first + extent])
            for cells, first, extent in zip(cell_at, box.at, box.shape, strict=True)
        ]
        inside = taken[(*index, ...)]
        if inside.any():
            return f"the part at {list(box.at)} overlaps another"
        inside[...] = True
    if not taken.all():
        free = np.unravel_index(int(np.argmin(taken)), taken.shape)
        return f"no part covers the elements at {[edges[axis][int(cell)] for axis, cell in enumerate(free)]}"
    return None


def boxes_of(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes, in their order, that elements ``start <= i < stop`` of a packed array of ``shape`` make up.

    >>> [(box.at, box.shape) for box in boxes_of((4, 3), 2, 11)]
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 2))]
    """
    rows = packed_strides(shape)
    while start < stop:
        if not shape:
            yield Box((), ())
            return
        axis = next(axis for axis, row in enumerate(rows) if start % row == 0 and start + row <= stop)
        at = tuple(start // row % extent for row, extent in zip(rows, shape, strict=True))
        extent = min((stop - start) // rows[axis], shape[axis] - at[axis])
        yield Box(at, (*(1 for _ in range(axis)), extent, *shape[axis + 1 :]))
        start += extent * rows[axis]
