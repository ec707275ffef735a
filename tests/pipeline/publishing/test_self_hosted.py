"""Hubs that others host: what they leave out or do otherwise, and what reshard can still promise there."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from reshard.pipeline.errors import ChangeOverwritten, TargetRaced
from reshard.pipeline.publishing.commit import Published
from reshard.pipeline.publishing.rollback import rollback
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import Run, upload
from tests.pipeline.publishing.jobs import COMMIT, Job, commits, job, repo
from tests.support.models import add_friends, arrays, numbered, save_sharded

__all__ = ["job", "repo"]

SIZE = 20_000


def test_a_hub_that_shortens_commit_ids_where_no_revision_is_named_can_be_published_to_twice(
    repo: str, on_hub: Namespace, go: Run, tmp_path: Path
) -> None:
    on_hub.admin.settings(short_sha=8)
    first = go(repo, on_hub.repo("target"), size=SIZE)
    assert go(repo, on_hub.repo("target"), size=SIZE).published.commit == first.published.commit
    second = go(repo, on_hub.repo("target"), size=2 * SIZE)
    assert second.published.commit == on_hub.admin.head(on_hub.repo("target")) != first.published.commit
    assert not second.plan.drift and second.plan.kept == (".gitattributes",)


@pytest.mark.parametrize("status", [404, 405, 501])
def test_a_hub_without_auth_check_is_used_without_it_and_the_plan_notes_it(
    tmp_path: Path, on_hub: Namespace, go: Run, status: int
) -> None:
    save_sharded(tmp_path / "model", numbered(arrays(8, 4000), 2))
    repo = upload(on_hub, "source", tmp_path / "model", visibility="private")
    on_hub.admin.settings(auth_check_status=status)
    report = go(repo, on_hub.repo("target"), size=SIZE)
    assert report.published.commit == on_hub.admin.head(on_hub.repo("target"))
    assert any("no auth-check/write" in note for note in report.plan.notes)


def race(job: Job, on_hub: Namespace, theirs: dict[str, bytes], target: str) -> list[Published | Exception]:
    """Publish, and let others commit between the read of the head and our commit."""
    rule = on_hub.admin.fault(COMMIT, "hold", times=1)
    results: list[Published | Exception] = []

    def publish() -> None:
        try:
            results.append(job.publish())
        except Exception as error:  # noqa: BLE001
            results.append(error)

    thread = threading.Thread(target=publish)
    thread.start()
    on_hub.admin.wait_for_fault(rule, waiting=1)
    on_hub.admin.put_files(target, theirs)
    on_hub.admin.release(rule)
    thread.join(60)
    return results


@pytest.mark.parametrize("path", ["config.json", "README.md", "model.safetensors.index.json"])
def test_a_change_that_the_hub_let_us_overwrite_is_an_error_that_names_it(
    job: Job, on_hub: Namespace, path: str
) -> None:
    on_hub.admin.settings(guards_parents=False)
    target = on_hub.repo("target")
    [error] = race(job, on_hub, {path: b"theirs"}, target)
    assert isinstance(error, ChangeOverwritten), error
    assert error.exit_code == 6 and path in str(error)
    assert on_hub.admin.read(target, path, error.facts["parent"]) == b"theirs"
    assert error.facts["commit"] == on_hub.admin.head(target)
    if path != "README.md":  # which an owner may have edited before our commit
        with pytest.raises(ChangeOverwritten):  # also when the commit is only found
            job.publish()
    assert commits(on_hub) == 1


@pytest.mark.parametrize("path", ["config.json", "README.md"])
def test_a_change_that_was_overwritten_by_a_commit_without_an_answer_is_an_error(
    job: Job, on_hub: Namespace, path: str
) -> None:
    on_hub.admin.settings(guards_parents=False)
    on_hub.admin.fault(COMMIT, "lost_response", times=1)
    [error] = race(job, on_hub, {path: b"theirs"}, on_hub.repo("target"))
    assert isinstance(error, ChangeOverwritten) and path in str(error), error
    assert commits(on_hub) == 1


def test_a_change_beside_ours_is_no_reason_to_fail_where_the_hub_guards_nothing(job: Job, on_hub: Namespace) -> None:
    on_hub.admin.settings(guards_parents=False)
    target = on_hub.repo("target")
    [published] = race(job, on_hub, {"notes.txt": b"theirs"}, target)
    assert isinstance(published, Published)
    assert published.commit == on_hub.admin.head(target)
    assert on_hub.admin.read(target, "notes.txt") == b"theirs"


def test_a_rollback_that_overwrote_a_change_says_so(job: Job, on_hub: Namespace) -> None:
    on_hub.admin.settings(guards_parents=False)
    target, ours = on_hub.repo("target"), job.publish().commit
    rule = on_hub.admin.fault(COMMIT, "hold", times=1)
    errors: list[Exception] = []

    def undo() -> None:
        try:
            rollback(job.target, ours)
        except ChangeOverwritten as error:
            errors.append(error)

    thread = threading.Thread(target=undo)
    thread.start()
    on_hub.admin.wait_for_fault(rule, waiting=1)
    on_hub.admin.put_files(target, {"config.json": b"theirs"})
    on_hub.admin.release(rule)
    thread.join(60)
    assert len(errors) == 1


def test_a_lost_answer_is_no_conflict_where_the_history_has_no_messages(job: Job, on_hub: Namespace) -> None:
    on_hub.admin.settings(commit_messages=False)
    on_hub.admin.fault(COMMIT, "lost_response", times=1)
    published = job.publish()
    assert published.found and published.commit == on_hub.admin.head(on_hub.repo("target"))
    assert job.publish().commit == published.commit
    assert commits(on_hub) == 1


def test_a_second_size_replaces_the_first_where_the_history_has_no_messages(
    tmp_path: Path, on_hub: Namespace, go: Run
) -> None:
    save_sharded(tmp_path / "model", numbered(arrays(8, 4000), 2))
    add_friends(tmp_path / "model")
    repo, target = upload(on_hub, "source", tmp_path / "model"), on_hub.repo("target")
    on_hub.admin.settings(commit_messages=False)
    go(repo, target, size=SIZE)
    report = go(repo, target, size=2 * SIZE)
    shards = {path for path in on_hub.admin.files(target) if path.endswith(".safetensors")}
    assert shards == {shard.path for shard in report.plan.shards}


@pytest.mark.parametrize("status", [409, 412])
def test_a_race_that_is_lost_every_time_is_named_and_may_be_tried_again(
    job: Job, on_hub: Namespace, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reshard.pipeline.publishing.commit.BACKOFF_FIRST", 0.001)
    on_hub.admin.fault(COMMIT, "status", status=status)
    with pytest.raises(TargetRaced) as caught:
        job.publish()
    assert caught.value.code == "target.race" and caught.value.retryable


def test_a_hub_that_takes_one_commit_at_a_time_is_asked_again(job: Job, on_hub: Namespace) -> None:
    on_hub.admin.fault(COMMIT, "status", status=409, times=2)
    published = job.publish()
    assert not published.found and published.commit == on_hub.admin.head(on_hub.repo("target"))
