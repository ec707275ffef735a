"""What documents and bodies take: those of other releases, and no more than can be carried out."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from reshard.client.models.jobs import Happened
from reshard.client.models.records import Known
from reshard.client.operations.catalogs import Submission
from reshard.client.operations.jobs import shown
from reshard.client.operations.table import BODY_MAX
from reshard.pipeline.limits import CATALOG_MAX
from reshard.pipeline.request import Options, Request
from reshard.worker.queue.record import Job
from reshard.worker.queue.states import JobState


def test_what_a_newer_release_adds_is_passed_over_or_shown_and_hides_nothing_else() -> None:
    problem = {"code": "hub", "message": "m", "hint": "h", "facts": {}, "since": 1}
    event = Happened.model_validate({"kind": "trouble", "at": 1.0, "error": problem, "tries": 3, "why": None})
    assert event.error is not None and event.error.code == "hub"
    assert event.model_dump(mode="json")["tries"] == 3
    request = {"source": {"kind": "hub", "repo": "a/b"}, "target": {"kind": "hub", "repo": "c/d"}}
    shown = TypeAdapter(Known).validate_python(request | {"options": {"dtype": "newer", "later": True}})
    assert (shown.target.repo, shown.options) == ("c/d", Options())


def test_a_catalog_of_more_than_a_body_is_submitted_in_process() -> None:
    assert len(Submission(text="#" * (BODY_MAX + 1)).text) > BODY_MAX
    with pytest.raises(ValidationError):
        Submission(text="#" * (CATALOG_MAX + 1))


@pytest.mark.parametrize(
    ("target", "offered"),
    [
        ("us/m", True),
        ("/models/m", True),
        ("s3://bucket/m", False),
        ("hf://buckets/us/bucket/m", False),
    ],
)
def test_a_rollback_is_offered_where_the_target_keeps_what_a_publication_replaces(target: str, offered: bool) -> None:
    published = {"commit": "c" * 40, "ref": "", "found": False}
    job = Job("id", JobState.done, Request.of("them/m", target), created=0, since=0, published=published)
    assert ("rollback" in shown(job).may()) == offered
