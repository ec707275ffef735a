"""What the queue knows, as data and in words."""

from __future__ import annotations

import json

import pytest

from reshard.client.facts import outcome_text, undoable
from reshard.pipeline.places import parse_place
from reshard.pipeline.request import Options, Request
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


@pytest.mark.parametrize(
    ("target", "branch", "typed"),
    [
        ("us/model", None, "us/model@main"),
        ("https://hub.example/us/model", None, "https://hub.example/us/model/tree/main"),
        ("https://hub.example/us/model", "cut/1", "https://hub.example/us/model/tree/cut%2F1"),
    ],
)
def test_what_undoes_a_job_names_the_hub_of_its_target(target: str, branch: str | None, typed: str) -> None:
    request = Request(source=parse_place("a/b"), target=parse_place(target), options=Options(branch=branch))
    assert undoable(request) == typed
    assert parse_place(typed) == request.target.at(branch or "main")
