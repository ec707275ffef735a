"""One commit, whatever is lost on the way and whoever commits beside us."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from huggingface_hub import HfApi

from reshard.pipeline.copying.loop import Stopped
from reshard.pipeline.errors import (
    HubRefused,
    HubUnreachable,
    ObjectLost,
    ReadBackDiffers,
    ReceiptWrong,
    TargetConflict,
)
from reshard.pipeline.publishing.commit import Published, spoiled
from reshard.pipeline.reshard import confirm
from reshard.pipeline.verifying.meta_load import MetaLoader
from tests.hub.fixtures import Namespace
from tests.pipeline.publishing.jobs import COMMIT, Job, commits, job, repo
from tests.support.checker import from_hub, read_checkpoint

__all__ = ["job", "repo"]

OLD, NEW = {"model.safetensors": b"old"}, {"model.safetensors": b"new"}


@pytest.mark.parametrize("messages", [True, False])
def test_a_forced_commit_whose_answer_is_lost_is_made_once(
    repo: str, on_hub: Namespace, meta_loader: MetaLoader, messages: bool
) -> None:
    """Also on a Hub whose history does not keep what our commits say of themselves."""
    on_hub.admin.create_repo(on_hub.repo("target"))
    Job(repo, on_hub.repo("target"), meta_loader).publish()
    on_hub.admin.settings(commit_messages=messages)
    forced = Job(repo, on_hub.repo("target"), meta_loader, force=True, overwrite=True)
    count = on_hub.admin.state(on_hub.repo("target"))["commits"]
    on_hub.admin.fault(COMMIT, "lost_response", times=1)
    published = forced.publish()
    on_hub.admin.settings(commit_messages=True)
    assert on_hub.admin.state(on_hub.repo("target"))["commits"] == count + 1
    assert published.commit == on_hub.admin.head(on_hub.repo("target"))


NONSENSE = [
    "[]",
    "null",
    "{}",
    '{"commitOid": "../../x"}',
    '{"commitOid": null}',
    '{"commitOid": "\\ud800"}',
    "<html>",
    "[" * 10_000,
]


@pytest.mark.parametrize("body", NONSENSE, ids=lambda body: body[:25])
def test_a_commit_answered_with_nonsense_is_looked_for_and_never_sent_again(
    job: Job, on_hub: Namespace, body: str
) -> None:
    on_hub.admin.fault(COMMIT, "status", status=200, body=body)  # and nothing is committed
    with pytest.raises(HubRefused, match="/commit/") as refused:
        job.publish()
    assert not refused.value.retryable and commits(on_hub) == 1
    on_hub.admin.clear_faults()
    on_hub.admin.fault(COMMIT, "nonsense", body=body)  # and it is committed
    published = job.publish()
    assert published.found and published.commit == on_hub.admin.head(on_hub.repo("target")) and commits(on_hub) == 2


@pytest.mark.parametrize(
    ("lost", "where", "answer"),
    [
        (True, "commits", {"status": 200, "body": "[null]"}),
        (False, "commits", {"status": 200, "body": "[null]"}),
        *((True, where, {"status": status}) for where in ("revision", "commits") for status in (401, 402, 403, 404)),
        *((False, "commits", {"status": status}) for status in (401, 402, 403, 404)),
    ],
)
def test_a_target_that_cannot_be_read_after_the_commit_leaves_open_whether_it_stands(
    job: Job, on_hub: Namespace, lost: bool, where: str, answer: dict[str, Any]
) -> None:
    if lost:
        on_hub.admin.fault(COMMIT, "lost_response", times=1)

    def break_reads() -> None:
        before = 1 if where == "revision" else 0  # the head is read once more before the commit
        on_hub.admin.fault(f"GET /api/models/.*/{where}/", "status", skip=before, **answer)

    with pytest.raises(HubUnreachable, match="a commit may have been made") as unknown:
        job.publish(break_reads)
    assert unknown.value.retryable and commits(on_hub) == 1
    on_hub.admin.clear_faults()
    assert job.publish().found and commits(on_hub) == 1


def test_a_pull_request_answered_with_nonsense_is_looked_for(
    repo: str, on_hub: Namespace, meta_loader: MetaLoader
) -> None:
    on_hub.admin.create_repo(on_hub.repo("target"))
    job = Job(repo, on_hub.repo("target"), meta_loader, pr=True)
    where = "POST /api/models/[^/]*/[^/]*/discussions$"
    on_hub.admin.fault(where, "status", status=200, body="[]", times=1)
    with pytest.raises(HubRefused):
        job.publish()
    on_hub.admin.fault(where, "nonsense", body="[]")
    assert job.publish().ref == "refs/pr/1"


def test_a_commit_answered_by_silence_is_found_and_not_made_twice(job: Job, on_hub: Namespace) -> None:
    on_hub.admin.fault(COMMIT, "lost_response", times=1)
    published = job.publish()
    assert published.commit == on_hub.admin.head(on_hub.repo("target")) and published.found
    assert commits(on_hub) == 1
    confirm(job.plan, job.plan.shards, job.receipts, published, job.target)


def test_a_commit_that_never_arrived_is_made(job: Job, on_hub: Namespace) -> None:
    on_hub.admin.fault(COMMIT, "reset", times=1)
    published = job.publish()
    assert published.commit == on_hub.admin.head(on_hub.repo("target")) and not published.found


def test_publishing_again_finds_the_commit_of_the_first_time(job: Job, on_hub: Namespace) -> None:
    first, second = job.publish(), job.publish()
    assert (second.commit, second.found) == (first.commit, True)
    assert commits(on_hub) == 1


def test_two_finishers_at_once_make_one_commit(job: Job, on_hub: Namespace) -> None:
    rule = on_hub.admin.fault(COMMIT, "hold", times=2)
    results: list[Published] = []
    threads = [threading.Thread(target=lambda: results.append(job.publish())) for _ in range(2)]
    for thread in threads:
        thread.start()
    on_hub.admin.wait_for_fault(rule, waiting=2)
    on_hub.admin.release(rule)
    for thread in threads:
        thread.join(60)
    assert len({result.commit for result in results}) == 1
    assert sorted(result.found for result in results) == [False, True]


def test_a_commit_of_others_to_other_files_is_built_upon_and_theirs_in_the_next_publication(
    job: Job, repo: str, on_hub: Namespace, meta_loader: MetaLoader
) -> None:
    target = on_hub.repo("target")
    theirs = on_hub.admin.put_files(target, {"notes.txt": b"theirs"})
    published = job.publish()
    assert published.commit == on_hub.admin.head(target) != theirs
    fetch = from_hub(on_hub.endpoint, target)
    assert fetch("notes.txt") == b"theirs"
    assert read_checkpoint(fetch) == read_checkpoint(from_hub(on_hub.endpoint, on_hub.repo("source")))
    after = Job(repo, target, meta_loader, manifest=False).plan
    assert after.deletes and "notes.txt" not in after.deletes and "notes.txt" in after.kept


def test_a_commit_of_others_between_our_look_and_our_commit_is_built_upon(job: Job, on_hub: Namespace) -> None:
    target = on_hub.repo("target")
    rule = on_hub.admin.fault(COMMIT, "hold", times=1)
    results: list[Published] = []
    thread = threading.Thread(target=lambda: results.append(job.publish()))
    thread.start()
    on_hub.admin.wait_for_fault(rule, waiting=1)
    on_hub.admin.put_files(target, {"notes.txt": b"theirs"})
    on_hub.admin.release(rule)
    thread.join(60)
    assert results[0].commit == on_hub.admin.head(target)
    assert from_hub(on_hub.endpoint, target)("notes.txt") == b"theirs"


def test_a_commit_of_others_to_our_files_is_a_conflict(job: Job, on_hub: Namespace) -> None:
    target = on_hub.repo("target")
    theirs = on_hub.admin.put_files(target, {"config.json": b"{}"})
    with pytest.raises(TargetConflict, match=r"config\.json"):
        job.publish()
    assert on_hub.admin.head(target) == theirs


@pytest.fixture
def replacing(repo: str, on_hub: Namespace, meta_loader: MetaLoader) -> Job:
    """A job that takes an old file of its target away."""
    target = on_hub.repo("target")
    on_hub.admin.create_repo(target)
    on_hub.admin.put_files(target, OLD, lfs=list(OLD))
    job = Job(repo, target, meta_loader, overwrite=True)
    assert job.plan.deletes == (*OLD,)
    return job


def test_a_commit_of_others_to_a_file_that_we_would_delete_is_a_conflict(replacing: Job, on_hub: Namespace) -> None:
    theirs = on_hub.admin.put_files(on_hub.repo("target"), NEW, lfs=list(NEW))
    with pytest.raises(TargetConflict, match=r"model\.safetensors"):
        replacing.publish()
    assert on_hub.admin.head(on_hub.repo("target")) == theirs


@pytest.mark.parametrize("theirs", [b"junk", None], ids=["replaced", "deleted"])
@pytest.mark.parametrize("kind", ["weights", "config.json"])
def test_a_commit_of_others_to_a_file_that_is_to_stay_is_a_conflict(
    job: Job, repo: str, on_hub: Namespace, meta_loader: MetaLoader, kind: str, theirs: bytes | None
) -> None:
    target = on_hub.repo("target")
    job.publish()
    on_hub.admin.put_files(repo, {"notes.txt": b"new"})
    next_one = Job(repo, target, meta_loader)
    path = next_one.plan.reused[0] if kind == "weights" else kind
    if theirs is None:
        HfApi(on_hub.endpoint, on_hub.token).delete_file(path, target)
    else:
        on_hub.admin.put_files(target, {path: theirs})
    head = on_hub.admin.head(target)
    with pytest.raises(TargetConflict, match=path):
        next_one.publish()
    assert on_hub.admin.head(target) == head


def test_another_publication_of_ours_is_not_taken_for_this_one(
    job: Job, repo: str, on_hub: Namespace, meta_loader: MetaLoader
) -> None:
    other = Job(repo, on_hub.repo("target"), meta_loader, manifest=False).publish()
    with pytest.raises(TargetConflict):
        job.publish()
    assert on_hub.admin.head(on_hub.repo("target")) == other.commit


def test_a_target_whose_history_was_rewritten_is_a_conflict(job: Job, on_hub: Namespace) -> None:
    target = on_hub.repo("target")
    on_hub.admin.put_files(target, {"notes.txt": b"theirs"})
    HfApi(on_hub.endpoint, on_hub.token).super_squash_history(target)
    head = on_hub.admin.head(target)
    with pytest.raises(TargetConflict, match="history"):
        job.publish()
    assert on_hub.admin.head(target) == head


def test_what_equals_the_plan_already_is_adopted(
    job: Job, repo: str, on_hub: Namespace, meta_loader: MetaLoader
) -> None:
    published = job.publish()
    HfApi(on_hub.endpoint, on_hub.token).super_squash_history(on_hub.repo("target"), commit_message="squashed")
    head = on_hub.admin.head(on_hub.repo("target"))
    assert head != published.commit
    again = Job(repo, on_hub.repo("target"), meta_loader).publish()
    assert (again.commit, again.found) == (head, True)
    assert on_hub.admin.head(on_hub.repo("target")) == head


def test_who_is_stopped_at_the_point_of_no_return_commits_nothing(job: Job, on_hub: Namespace) -> None:
    head = on_hub.admin.head(on_hub.repo("target"))

    def begin() -> None:
        raise Stopped("cancel")

    with pytest.raises(Stopped):
        job.publish(begin)
    assert on_hub.admin.head(on_hub.repo("target")) == head and commits(on_hub) == 0


@pytest.mark.parametrize("on_hub", ["http"], indirect=True)
def test_an_object_that_the_store_lost_is_named_for_another_copy(job: Job, on_hub: Namespace) -> None:
    lost = job.receipts[job.plan.shards[1].digest]
    on_hub.admin.drop_object(lost.sha256)
    with pytest.raises(ObjectLost) as caught:
        job.publish()
    assert spoiled(caught.value, job.receipts) == {lost.shard}
    assert commits(on_hub) == 0


@pytest.mark.parametrize("lie", ["missing", "size", "tensor", "witness", "unattested"])
def test_receipts_that_do_not_fit_the_plan_publish_nothing(job: Job, on_hub: Namespace, lie: str) -> None:
    shard = job.plan.shards[0]
    receipt = job.receipts[shard.digest]
    name = shard.entries[0].name
    if lie == "missing":
        del job.receipts[shard.digest]
    elif lie == "size":
        job.receipts[shard.digest] = replace(receipt, size=receipt.size - 1)
    elif lie == "tensor":
        job.receipts[shard.digest] = replace(receipt, tensors=receipt.tensors | {"one more": "0" * 32})
    elif lie == "witness":
        job.receipts[shard.digest] = replace(receipt, tensors=receipt.tensors | {name: "0" * 32})
    else:
        job.attested = job.attested[1:]
    with pytest.raises(ReceiptWrong):
        job.publish()
    assert commits(on_hub) == 0


def test_a_pull_request_whose_creation_was_answered_by_silence_is_found(
    repo: str, on_hub: Namespace, meta_loader: MetaLoader
) -> None:
    on_hub.admin.create_repo(on_hub.repo("target"))
    job = Job(repo, on_hub.repo("target"), meta_loader, pr=True)
    on_hub.admin.fault("POST /api/models/.*/discussions", "lost_response", times=1)
    published = job.publish()
    assert published.ref == "refs/pr/1"
    assert job.publish().commit == published.commit


def test_a_pull_request_whose_commit_was_answered_by_silence_is_no_draft(
    repo: str, on_hub: Namespace, meta_loader: MetaLoader
) -> None:
    on_hub.admin.create_repo(on_hub.repo("target"))
    job = Job(repo, on_hub.repo("target"), meta_loader, pr=True)
    on_hub.admin.fault(COMMIT, "lost_response", times=1)
    assert job.publish().found
    details = HfApi(endpoint=on_hub.endpoint, token=on_hub.token).get_discussion_details(on_hub.repo("target"), 1)
    assert details.status == "open"


def test_a_file_that_came_back_after_it_was_deleted_is_named(replacing: Job, on_hub: Namespace) -> None:
    replacing.publish()
    back = Published(on_hub.admin.put_files(on_hub.repo("target"), NEW, lfs=list(NEW)), "main", found=False)
    with pytest.raises(ReadBackDiffers, match=r"model\.safetensors should have been deleted"):
        confirm(replacing.plan, replacing.plan.shards, replacing.receipts, back, replacing.target)


def test_a_config_that_does_not_say_what_the_weights_were_cast_to_is_named(
    repo: str, on_hub: Namespace, meta_loader: MetaLoader
) -> None:
    before = {"config.json": b'{"torch_dtype": "float32"}'}
    target = on_hub.repo("target")
    on_hub.admin.put_files(repo, before)
    on_hub.admin.create_repo(target)
    job = Job(repo, target, meta_loader, dtype="float16")
    assert [edit.path for edit in job.plan.edits] == ["config.json"]
    confirm(job.plan, job.plan.shards, job.receipts, job.publish(), job.target)
    undone = Published(on_hub.admin.put_files(target, before), "main", found=False)
    with pytest.raises(ReadBackDiffers, match=r"config\.json"):
        confirm(job.plan, job.plan.shards, job.receipts, undone, job.target)


@pytest.mark.parametrize("there", ["object", "regular"])
@pytest.mark.parametrize("path", ["tokenizer.model", "tokenizer.json"])
def test_a_carried_file_of_the_same_length_and_other_bytes_is_named_however_it_is_stored(
    path: str, there: str, repo: str, on_hub: Namespace, meta_loader: MetaLoader
) -> None:
    on_hub.admin.put_files(repo, {"tokenizer.model": bytes(range(256)) * 50}, lfs=["tokenizer.model"])
    target = on_hub.repo("target")
    on_hub.admin.create_repo(target)
    job = Job(repo, target, meta_loader)
    was = on_hub.admin.read(target, path, job.publish().commit)
    lfs = [path] if there == "object" else []
    for content, passes in ((was, True), (was[::-1], False)):
        commit = on_hub.admin.put_files(target, {path: content}, lfs=lfs)
        published = Published(commit, "main", found=False)
        with nullcontext() if passes else pytest.raises(ReadBackDiffers, match=f"{path} was copied"):
            confirm(job.plan, job.plan.shards, job.receipts, published, job.target)


def test_a_file_that_a_target_stores_as_an_object_reads_back_as_the_git_blob_that_it_was(
    repo: str, on_hub: Namespace, meta_loader: MetaLoader
) -> None:
    target = on_hub.repo("target")
    on_hub.admin.create_repo(target)
    on_hub.admin.put_files(target, {".gitattributes": b"*.json filter=lfs diff=lfs merge=lfs -text\n"})
    job = Job(repo, target, meta_loader)
    published = job.publish()
    assert job.target.at(published.commit).files()["tokenizer.json"].oid is None
    confirm(job.plan, job.plan.shards, job.receipts, published, job.target)
