"""A day as bars, an hour each, drawn on the server as SVG. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

HEIGHT = 40.0  # units of the drawing, which is stretched to its place
STEP = 10.0  # from one bar to the next


class Bar(NamedTuple):
    """``kind`` gives its colour."""

    x: float
    y: float
    height: float
    kind: str
    title: str


class Chart(NamedTuple):
    """``about`` says in words what the bars show."""

    name: str
    about: str
    width: float
    bars: list[Bar]


Piece = tuple[str, float, str]  # kind, value, and the value in words


def bars(name: str, about: str, hours: Sequence[tuple[str, Sequence[Piece]]], most: float = 0) -> Chart:
    """Each hour has a label, and pieces that are piled up.

    The highest hour, or ``most``, fills the drawing. A value that is not zero is always seen.
    """
    most = max([most, *(sum(value for _, value, _ in pieces) for _, pieces in hours)])
    drawn = []
    for number, (label, pieces) in enumerate(hours):
        top = HEIGHT
        for kind, value, told in pieces:
            if value > 0:
                height = min(top, max(1.0, HEIGHT * value / most))
                top -= height
                drawn.append(Bar(number * STEP, round(top, 2), round(height, 2), kind, f"{label}: {told}"))
    return Chart(name, about, len(hours) * STEP, drawn)
