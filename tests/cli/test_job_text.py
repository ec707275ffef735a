"""How a job's end is put into words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import pytest

from reshard.cli.job_text import SHORT_ROWS, describe, ended, in_short, into, page, summary, took, undo_rows
from reshard.cli.jobs import DELETE, RETRY, done_text, row
from reshard.client.models.jobs import Acted, Deleted, Finished, JobNow, Moved, Refused
from reshard.client.models.plans import Plan, Replaced
from reshard.client.models.records import Check, Commit, Problem
from reshard.client.operations import jobs as operations
from reshard.client.operations.jobs import shown
from reshard.client.queue import waits
from reshard.pipeline.errors import HubUnreachable, JobNotFound, NoWeights
from reshard.pipeline.places import AnyPlace, Folder, Hub
from reshard.pipeline.request import Options, Request
from reshard.worker.queue.record import Claim, Job
from reshard.worker.queue.states import JobState


def check(name: str, result: Any, reason: str) -> Check:
    return Check(name=name, result=result, level="", reason=reason, figures={}, findings=[])


PASSED = [check(name, "passed", "") for name in ("structure", "copy", "read back")]
SKIPPED = [check("reload model", "skipped", "no class")]
MANY = [check(f"reload model {number}", "skipped", "no class") for number in range(9)]


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


def done(target: AnyPlace, checks: Sequence[Check] = (), found: bool = False, **more: Any) -> Finished:
    """How a run into ``target`` ended."""
    ref = "main" if target.branch else ""
    given: dict[str, Any] = {
        "source_bytes": {},
        "moved": Moved(read=2_000_000, uploaded=1_000, deduplicated=500_000, expected=1_000),
        "seconds": 1.0,
    }
    published = Commit(commit="c" * 40, ref=ref, found=found)
    return Finished(state="done", target=str(target), published=published, checks=[*checks], **given | more)


HUB = Hub(repo="us/m", endpoint="https://hub.example")
OUT = Folder(path="/out")


def test_one_line_says_where_the_result_is_and_what_it_took() -> None:
    said = summary(done(HUB, PASSED + SKIPPED, seconds=94.2), HUB, 12, 2_070_000_000)
    assert said == "Published https://hub.example/us/m: 12 files, 2.1 GB, 3 checks passed, 1 skipped (1 min 34 s)"
    assert summary(done(OUT, PASSED), OUT, 12, 10) == "Wrote /out: 12 files, 10 bytes, 3 checks passed (1 s)"


def test_what_was_there_already_is_no_work_unless_this_job_did_it() -> None:
    assert summary(done(OUT, found=True), OUT, 1, 10) == "Nothing to do: /out is up to date (1 s)"
    nothing = summary(done(HUB, found=True), HUB, 1, 10)
    assert nothing == f"Nothing to do: https://hub.example/us/m is up to date, commit {'c' * 12} (1 s)"
    assert in_short(done(HUB, found=True), HUB, []) == [], "which says it all"
    assert summary(done(OUT, PASSED, found=True), OUT, 1, 10).startswith("Wrote /out: 1 file, ")
    assert summary(done(HUB, PASSED, found=True), HUB, 1, 0) == nothing, "of weights that were there already"
    assert ": 1 file unchanged, 3 checks passed" in summary(done(HUB, PASSED), HUB, 1, 0), "such as with a signature"


def test_a_few_lines_follow_and_a_folder_has_neither_uploads_nor_a_branch() -> None:
    levels = {"checked": ["a", "b"], "as delivered": ["c"]}
    assert in_short(done(HUB, PASSED + SKIPPED, source_bytes=levels), HUB, []) == [
        ("commit", "cccccccccccc on main"),
        ("moved", "read 2.0 MB, uploaded 1.0 kB (500 kB deduplicated)"),
        ("source", "2 files, sha256 verified; 1 file, no upstream hash"),
        ("reload model", "skipped: no class"),
    ]
    assert ("source", "1 file, signed") in in_short(done(OUT, source_bytes={"signed": ["a"]}), OUT, [])
    rows = in_short(done(OUT, PASSED, source_bytes=levels), OUT, [])
    assert rows == [("source", "2 files, sha256 verified; 1 file, no upstream hash")]
    assert len(in_short(done(HUB, MANY, source_bytes=levels), HUB, [])) == SHORT_ROWS


def test_the_end_tells_what_a_cast_made_infinite_and_no_other_reason_of_what_passed() -> None:
    clean = check("reload model", "passed", "Llama accepts all tensors, none missing")
    lost = check("read back", "passed", "the cast made 3 values infinite in 1 tensor, such as a")
    assert in_short(done(OUT, [clean, *PASSED]), OUT, []) == []
    rows = in_short(done(OUT, [clean, *MANY, lost]), OUT, [])
    assert rows[0] == ("read back", "passed: the cast made 3 values infinite in 1 tensor, such as a")
    assert len(rows) == SHORT_ROWS


@pytest.mark.parametrize(
    ("target", "options", "says"),
    [
        ("us/m", {}, "undo with `reshard rollback us/m@main`"),
        ("us/m", {"branch": "cut"}, "undo with `reshard rollback us/m@cut`"),
        ("/us/m", {}, "undo with `reshard rollback /us/m` before the next run"),
        ("/us/my m", {}, "undo with `reshard rollback '/us/my m'` before the next run"),
        ("us/m", {"pr": True}, None),
    ],
)
def test_the_end_of_a_job_in_place_says_how_it_is_undone(
    target: str, options: dict[str, Any], says: str | None
) -> None:
    request = Request.of(target, target, **options)
    plan = Plan.model_construct(
        in_place=True, takes=True, occupied=[], replaced=[Replaced(path="a", size=1, deleted=False)]
    )
    rows = undo_rows(request, plan)
    assert rows == ([("changed", f"the source itself; {says}")] if says else [])
    assert in_short(done(request.target, MANY), request.target, rows)[:1] == (rows or ANY)
    for verbose in (False, True):
        said = ended(done(request.target), request, 1, 10, rows, verbose)
        assert says in said if says else "undo" not in said
    assert undo_rows(request, plan.model_copy(update={"takes": False})) == []


def document(job: Job) -> JobNow:
    return JobNow(**dict(shown(job)), waits=None)


def test_a_status_names_source_and_target() -> None:
    job = Job("id", JobState.queued, Request.of("them/m@v1", "us/m"), created=0, since=0)
    assert {"source": "them/m@v1", "target": "us/m"}.items() <= dict(describe(document(job))).items()


def test_a_status_tells_the_options_as_they_are_typed() -> None:
    given: dict[str, Any] = {"dtype": "bfloat16", "strict_dtype": True, "ranks": "ep8", "exclude": ["*.bin", "a b"]}
    asked = Request.of("them/m", "us/m@v1", size="1GB", pr=True, manifest=False, visibility="private", **given)
    told = dict(describe(document(Job("id", JobState.queued, asked, created=0, since=0))))
    typed = "--for ep8 --dtype bfloat16 --strict-dtype --exclude '*.bin' --exclude 'a b' --private --no-manifest"
    assert told["options"] == typed
    plain = Request.of("them/m", "us/m", size="1GB", branch="cut")
    assert "options" not in dict(describe(document(Job("id", JobState.queued, plain, created=0, since=0))))


def test_a_failed_job_is_listed_with_its_error_code() -> None:
    error = NoWeights(place="them/m", found="").to_dict()
    job = Job("id", JobState.failed, Request.of("them/m", "us/m"), created=0, since=0, error=error)
    assert row(document(job))[:2] == ("id", "failed, source.no_weights")


def test_a_job_between_two_tries_says_when_the_next_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1_000.0)
    error = HubUnreachable(endpoint="http://hub", what="it is away").to_dict()
    told = Job("id", JobState.copying, Request.of("them/m", "us/m"), created=0, since=0, last_error=error)

    def trouble(**facts: float) -> str:
        job = replace(told, last_error=error | {"facts": error["facts"] | facts})
        return dict(describe(document(job)))["last error"]

    assert trouble(retry_at=1_090.0).endswith(
        " (retrying in 1 min 30 s; to retry now, run `reshard cancel id` and `reshard retry id`)"
    )
    assert trouble(retry_at=999.0).endswith(" (retrying)")
    assert trouble().endswith(" (retrying)"), "a job of an older release"


@pytest.mark.parametrize("state", [JobState.done, JobState.cancelled, JobState.failed])
def test_a_job_that_has_ended_neither_waits_nor_is_retried(state: JobState) -> None:
    error = HubUnreachable(endpoint="http://hub", what="it is away").to_dict()
    job = Job("id", state, Request.of("them/m", "us/m"), created=0, since=0, last_error=error, note="its place is full")
    assert not {"waiting", "last error"} & dict(describe(document(job))).keys()


def claim(waits: str) -> Claim:
    return Claim("group:00000", "worker", 0.0, 0, 1, waits)


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
    assert waits(lambda bulk: "no control is running", job, lambda: True) == why


@pytest.mark.parametrize(
    ("started", "since", "says"),
    [(0, 400_000, "111 h 6 min"), (399_970, 400_000, "30 s"), (5, 5, "5 s"), (9, -9, "0 s")],
)
def test_what_a_job_took_counts_from_its_last_retry_and_is_never_negative(
    started: float, since: float, says: str
) -> None:
    request = Request.of("them/m", "us/m")
    assert took(document(Job("id", JobState.done, request, created=0, since=since, started=started))) == says


def test_a_job_at_work_says_how_long_since_its_last_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1_000.0)
    job = Job("id", JobState.copying, Request.of("them/m", "us/m"), created=0, since=900, started=900)
    assert took(document(job)) == "1 min 40 s"
    assert dict(describe(document(job)))["took"] == "1 min 40 s so far"
    assert dict(describe(document(replace(job, state=JobState.failed))))["took"] == "15 min 0 s"


@pytest.mark.parametrize("act", [RETRY, DELETE])
def test_that_more_jobs_may_match_is_said_also_where_some_were_refused_or_kept(
    act: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "CHOSEN_MAX", 3)
    refused = Refused(id="c", error=Problem.model_validate(JobNotFound(job="c")))
    done: Any = Acted(dry_run=False, ids=["a", "b"], refused=[refused])
    if act is DELETE:
        done = Deleted(deleted=2, dry_run=False, ids=["a", "b"], kept=["c"])
    assert done_text(act, done).endswith("\nMore jobs may match; run the command again")
    assert "More" not in done_text(act, done.model_copy(update={"ids": ["a"]}))
