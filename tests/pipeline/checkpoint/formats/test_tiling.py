"""A tiling is one exactly when painting the boxes paints every element once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline.checkpoint.formats.tiling import flaw_in_tiling
from reshard.pipeline.tensors import Box


def painted_once(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    count = np.zeros(shape, int)
    for box in boxes:
        count[(*(slice(at, at + extent) for at, extent in zip(box.at, box.shape, strict=True)), ...)] += 1
    return bool((count == 1).all())


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tiling by repeated cuts, irregular as a rule, and sometimes with one box changed or lost."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.shape[axis]))
        for at, extent in ((box.at[axis], cut), (box.at[axis] + cut, box.shape[axis] - cut)):
            boxes.append(
                Box(
                    (*box.at[:axis], at, *box.at[axis + 1 :]),
                    (*box.shape[:axis], extent, *box.shape[axis + 1 :]),
                )
            )
    change = draw(st.sampled_from(["none", "lose", "double", "move"]))
    number = draw(st.integers(0, len(boxes) - 1))
    if change == "lose":
        boxes.pop(number)
    elif change == "double":
        boxes.append(boxes[number])
    elif change == "move" and shape:
        axis = draw(st.integers(0, len(shape) - 1))
        box = boxes[number]
        at = draw(st.integers(0, shape[axis] - box.shape[axis]))
        boxes[number] = Box((*box.at[:axis], at, *box.at[axis + 1 :]), box.shape)
    return shape, draw(st.permutations(boxes))


@given(tilings())
def test_agrees_with_painting(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    assert (flaw_in_tiling(shape, boxes) is None) == painted_once(shape, boxes)


def test_says_which_element_is_free() -> None:
    assert flaw_in_tiling((4, 6), [Box((0, 0), (4, 3)), Box((0, 3), (2, 3))]) == "no part covers the elements at [2, 3]"


def test_a_grid_of_a_hundred_thousand_parts_of_a_huge_array_is_checked_at_once() -> None:
    side = 300
    step = 2**30
    boxes = [Box((i * step, j * step), (step, step)) for i in range(side) for j in range(side)]
    assert flaw_in_tiling((side * step, side * step), boxes) is None
    assert flaw_in_tiling((side * step, side * step), boxes[:-1]) is not None


def test_parts_that_are_cut_into_too_many_cells_are_refused() -> None:
    boxes = [Box((i, i), (1, 1)) for i in range(3000)]
    assert flaw_in_tiling((3000, 3000), boxes) == "3,000 parts are cut too irregularly to be checked"
