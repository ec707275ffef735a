"""What the queue knows, as data and in words."""

from __future__ import annotations

import json

import pytest

from reshard.client.facts import outcome_text
from reshard.worker.followers.schedules import Run


def test_what_became_of_a_run_is_told_as_it_stands_where_a_newer_release_wrote_it() -> None:
    run = Run.read(json.dumps({"at": 0, "due": 0, "outcome": "postponed", "job": ""}))
    assert outcome_text(run) == "postponed"


@pytest.mark.parametrize(
    ("outcome", "job", "past", "present"),
    [
        ("fired", "abc", "submitted job abc", "submitted job abc"),
        ("fired", "", "submitted its catalog", "submitted its catalog"),
        ("missed", "", "missed: the control process was not running", "missed: the control process was not running"),
        *(
            ("overlap", job, *(f"skipped: {of} {was} still in progress" for was in ("was", "is")))
            for job, of in (("", "previous run"), ("abc", "previous job abc"))
        ),
        (
            "busy",
            "abc",
            *(f"skipped: job abc {was} writing to the same target for another request" for was in ("was", "is")),
        ),
    ],
)
def test_what_became_of_a_run_is_told_with_why(outcome: str, job: str, past: str, present: str) -> None:
    run = Run.read(json.dumps({"at": 0, "due": 0, "outcome": outcome, "job": job}))
    assert (outcome_text(run), outcome_text(run, now=True)) == (past, present)
