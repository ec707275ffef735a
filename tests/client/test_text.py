"""Figures as people read them."""

from __future__ import annotations

import pytest

from reshard.client.models.jobs import JobNow
from reshard.client.text import expected, human_bytes, human_rate


@pytest.mark.parametrize(
    ("place", "waiting", "left", "says"),
    [
        (37, 412, 371.0, "37th of 412, starts in about 6 min"),
        (1, 1, None, "1st of 1"),
        (22, 1200, 40.4, "22nd of 1,200, starts in about 40 s"),
        (1113, 2003, 90_000.0, "1,113th of 2,003, starts in about 25 h"),
        (103, 103, 0.2, "103rd of 103"),
        (None, None, 400.0, "about 6 min left"),
        (None, None, None, ""),
    ],
)
def test_when_a_job_begins_or_has_copied_all_is_told_as_far_as_it_is_known(
    place: int | None, waiting: int | None, left: float | None, says: str
) -> None:
    assert expected(JobNow.model_construct(place=place, waiting=waiting, left=left)) == says


@pytest.mark.parametrize(
    ("size", "says"),
    [(0, "0 B/s"), (1, "1 B/s"), (999, "999 B/s"), (99_940, "99.9 kB/s"), (99_960, "100 kB/s"), (999_600, "1.0 MB/s")],
)
def test_a_rate_is_said_as_a_size_is_but_for_bytes(size: int, says: str) -> None:
    assert human_rate(size) == says
    assert human_bytes(size) == says.removesuffix("/s").replace(" B", " byte" if size == 1 else " bytes")
