"""How a job's end is put into words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast
from unittest.mock import ANY

import pytest

from reshard.cli.job_text import SHORT_ROWS, describe, in_short, into, page, summary, took, undo_rows
from reshard.cli.jobs import _row
from reshard.client.queue import Queue, waits
from reshard.pipeline.errors import HubUnreachable, NoWeights
from reshard.pipeline.places import Folder, Hub
from reshard.pipeline.request import Options, Request
from reshard.worker.queue.record import Claim, Job
from reshard.worker.queue.states import JobState

PASSED = [{"name": name, "result": "passed", "reason": ""} for name in ("structure", "copy", "read back")]
SKIPPED = [{"name": "reload model", "result": "skipped", "reason": "no class"}]


@pytest.mark.parametrize(
    ("ref", "address"),
    [
        ("main", "https://hub.example/us/m"),
        ("v1/cut", "https://hub.example/us/m/tree/v1%2Fcut"),
        ("refs/pr/3", "https://hub.example/us/m/discussions/3"),
    ],
)
def test_a_repository_is_named_by_the_page_of_its_branch_or_pull_request(ref: str, address: str) -> None:
    assert page(Hub(repo="us/m", endpoint="https://hub.example/"), ref) == address


def test_a_repository_without_an_endpoint_is_on_the_hub_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9/")
    assert page(Hub(repo="us/m"), "main") == "http://127.0.0.1:9/us/m"
    monkeypatch.delenv("HF_ENDPOINT")
    assert page(Hub(repo="us/m"), "main") == "https://huggingface.co/us/m"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (Options(size=1), "us/m"),
        (Options(size=1, branch="cut"), "us/m@cut"),
        (Options(size=1, pr=True), "us/m, as a pull request"),
        (Options(size=1, branch="cut", pr=True), "us/m@cut, as a pull request"),
    ],
)
def test_a_target_is_named_with_its_branch_or_pull_request(options: Options, says: str) -> None:
    assert into(Request(source=Hub(repo="a/b"), target=Hub(repo="us/m"), options=options)) == says


def test_one_line_says_where_the_result_is_and_what_it_took() -> None:
    hub, published = (
        Hub(repo="us/m", endpoint="https://hub.example"),
        {"ref": "main", "found": False, "commit": "c" * 40},
    )
    said = summary(hub, published, 12, 2_070_000_000, 94.2, PASSED + SKIPPED)
    assert said == "published https://hub.example/us/m: 12 files, 2.1 GB, 1 min 34 s, 3 checks passed, 1 skipped"


def test_what_was_there_already_is_no_work_unless_this_job_did_it() -> None:
    published = {"ref": "", "found": True, "commit": "c" * 64}
    nothing = summary(Folder(path="/out"), published, 1, 10, 1.0, [])
    assert nothing == "nothing to do: /out has this already, 1 s"
    hub = Hub(repo="us/m", endpoint="https://hub.example")
    nothing = summary(hub, published | {"ref": "main"}, 1, 10, 1.0, [])
    assert nothing == f"nothing to do: https://hub.example/us/m has this already, commit {'c' * 12}, 1 s"
    assert in_short(hub, published | {"ref": "main"}, (0, 0, 0), {}, []) == [], "which says it all"
    assert summary(Folder(path="/out"), published, 1, 10, 1.0, PASSED).startswith("wrote /out: 1 file, ")


def test_a_few_lines_follow_and_a_folder_has_neither_uploads_nor_a_branch() -> None:
    published = {"ref": "main", "found": False, "commit": "c" * 40}
    levels = {"checked": ["a", "b"], "as delivered": ["c"]}
    moved = (2_000_000, 1_000, 500_000)
    assert in_short(Hub(repo="us/m"), published, moved, levels, PASSED + SKIPPED) == [
        ("commit", "cccccccccccc on main"),
        ("moved", "read 2.0 MB, sent 1.0 kB, 500.0 kB were there"),
        ("source", "2 files checked by sha256, 1 file as delivered"),
        ("reload model", "skipped: no class"),
    ]
    assert ("source", "1 file signed") in in_short(Folder(path="/out"), published, moved, {"signed": ["a"]}, [])
    rows = in_short(Folder(path="/out"), published, moved, levels, PASSED)
    assert rows == [("source", "2 files checked by sha256, 1 file as delivered")]
    assert len(in_short(Hub(repo="us/m"), published, moved, levels, SKIPPED * 9)) == SHORT_ROWS


def test_the_end_tells_what_a_cast_made_infinite_and_no_other_reason_of_what_passed() -> None:
    clean = {"name": "reload model", "result": "passed", "reason": "Llama takes every tensor and lacks none"}
    lost = {"name": "read back", "result": "passed", "reason": "values that the cast made infinite: 3; tensors: 1"}
    target, published = Folder(path="/out"), {"ref": "", "found": False, "commit": ""}
    assert in_short(target, published, (0, 0, 0), {}, [clean, *PASSED]) == []
    rows = in_short(target, published, (0, 0, 0), {}, [clean, *SKIPPED * 9, lost])
    assert rows[0] == ("read back", "passed: values that the cast made infinite: 3; tensors: 1")
    assert len(rows) == SHORT_ROWS


@pytest.mark.parametrize(
    ("target", "options", "says"),
    [
        ("us/m", {}, "`reshard rollback us/m@main` brings it back"),
        ("us/m", {"branch": "cut"}, "`reshard rollback us/m@cut` brings it back"),
        ("/us/m", {}, "`reshard rollback /us/m` brings it back until the next run"),
        ("us/m", {"pr": True}, None),
    ],
)
def test_the_end_of_a_job_in_place_says_how_it_is_undone(
    target: str, options: dict[str, Any], says: str | None
) -> None:
    request = Request.of(target, target, **options)
    rows = undo_rows(request, changes_source=True)
    assert rows == ([("undo", f"the source itself was changed; {says}")] if says else [])
    assert in_short(request.target, {"ref": "", "commit": "", "found": False}, (0, 0, 0), {}, SKIPPED * 9, rows)[
        :1
    ] == (rows or ANY)
    assert undo_rows(request, changes_source=False) == []


def test_a_status_names_source_and_target() -> None:
    job = Job("id", JobState.queued, Request.of("them/m@v1", "us/m"), created=0, since=0)
    assert {"source": "them/m@v1", "target": "us/m"}.items() <= dict(describe(job)).items()


def test_a_failed_job_is_listed_with_its_error_code() -> None:
    error = NoWeights(place="them/m", found="").to_dict()
    job = Job("id", JobState.failed, Request.of("them/m", "us/m"), created=0, since=0, error=error)
    assert _row(job)[:2] == ("id", "failed, source.no_weights")


def test_a_job_between_two_tries_says_when_the_next_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1_000.0)
    error = HubUnreachable(endpoint="http://hub", what="it is away").to_dict()
    told = Job("id", JobState.copying, Request.of("them/m", "us/m"), created=0, since=0, last_error=error)

    def trouble(**facts: float) -> str:
        return dict(describe(replace(told, last_error=error | {"facts": error["facts"] | facts})))["trouble"]

    assert trouble(retry_at=1_090.0).endswith(
        " (tried again in 1 min 30 s; at once after `reshard cancel id` and `reshard retry id`)"
    )
    assert trouble(retry_at=999.0).endswith(" (tried again)")
    assert trouble().endswith(" (tried again)"), "a job of an older release"


def claim(waits: str) -> Claim:
    return Claim("group:00000", "worker", 0.0, 0, 1, waits)


class Nobody:
    """A queue whose control is away."""

    def waits(self, bulk: bool) -> str | None:
        return "no control is running"


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ([], "no control is running"),
        ([claim("")], None),
        ([claim(""), claim("rate limited, 40 s")], None),
        ([claim("rate limited, 40 s"), claim("rate limited, 30 s")], "group:00000: rate limited, 40 s"),
    ],
)
def test_a_job_waits_only_if_nothing_of_it_moves(claims: list[Claim], why: str | None) -> None:
    request = Request.of("them/m", "us/m")
    job = Job("id", JobState.copying, request, created=0, since=0, claims=tuple(claims))
    assert waits(cast(Queue, Nobody()), job) == why


@pytest.mark.parametrize(
    ("started", "since", "says"),
    [(0, 400_000, "111 h 6 min"), (399_970, 400_000, "30 s"), (5, 5, "5 s"), (9, -9, "0 s")],
)
def test_what_a_job_took_counts_from_its_last_retry_and_is_never_negative(
    started: float, since: float, says: str
) -> None:
    request = Request.of("them/m", "us/m")
    assert took(Job("id", JobState.done, request, created=0, since=since, started=started)) == says


def test_a_job_at_work_says_how_long_since_its_last_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1_000.0)
    job = Job("id", JobState.copying, Request.of("them/m", "us/m"), created=0, since=900, started=900)
    assert took(job) == "1 min 40 s"
    assert dict(describe(job))["took"] == "1 min 40 s so far"
    assert dict(describe(replace(job, state=JobState.failed)))["took"] == "15 min 0 s"
