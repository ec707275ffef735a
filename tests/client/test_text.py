"""Figures as people read them."""

from __future__ import annotations

import pytest

from reshard.client.models.jobs import JobNow
from reshard.client.text import expected


@pytest.mark.parametrize(
    ("place", "waiting", "left", "says"),
    [
        (37, 412, 371.0, "37th of 412, about 6 min"),
        (1, 1, None, "1st of 1"),
        (22, 1200, 40.4, "22nd of 1,200, about 40 s"),
        (1113, 2003, 90_000.0, "1,113th of 2,003, about 25 h"),
        (103, 103, 0.2, "103rd of 103"),
        (None, None, 400.0, "about 6 min left"),
        (None, None, None, ""),
    ],
)
def test_when_a_job_begins_or_has_copied_all_is_told_as_far_as_it_is_known(
    place: int | None, waiting: int | None, left: float | None, says: str
) -> None:
    assert expected(JobNow.model_construct(place=place, waiting=waiting, left=left)) == says
