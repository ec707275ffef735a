"""What the queue knows, as data and in words."""

from __future__ import annotations

import json

from reshard.client.facts import outcome_text
from reshard.worker.followers.schedules import Run


def test_what_became_of_a_run_is_told_as_it_stands_where_a_newer_release_wrote_it() -> None:
    run = Run.read(json.dumps({"at": 0, "due": 0, "outcome": "postponed", "job": ""}))
    assert outcome_text(run) == "postponed"
