"""Two runs into one place at once: one commit each time, and the loser is told what really happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.pipeline.errors import TargetChanged, TargetConflict, TargetDrifted
from reshard.pipeline.places import Folder
from reshard.pipeline.publishing.commit import weights
from reshard.pipeline.stores.folder.target import FolderTarget
from reshard.pipeline.tensors import StoredFile
from reshard.pipeline.verifying.meta_load import MetaLoader
from tests.pipeline.conftest import TRANSPORT, Run
from tests.pipeline.publishing.jobs import Job
from tests.support.checker import from_folder, read_checkpoint
from tests.support.models import add_friends, arrays, numbered, save_sharded
from tests.support.s3 import S3


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(TRANSPORT, "http")
    save_sharded(tmp_path / "model", numbered(arrays(8, 4000), 2))
    add_friends(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("there_before", [False, True])
def test_the_slower_of_two_equal_runs_finds_the_commit_of_the_other(
    model: Path, tmp_path: Path, meta_loader: MetaLoader, there_before: bool, late: bool
) -> None:
    out = tmp_path / "out"
    if there_before:
        out.mkdir()
        (out / "mine.txt").write_text("mine")
    first, second = (Job(str(model), str(out), meta_loader, token) for token in ("1", "2"))
    published = first.publish()
    if late:
        second.copy()
    assert second.publish().commit == published.commit
    first.target.discard(first.token), second.target.discard(second.token)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


@pytest.mark.parametrize("late", [False, True])
def test_the_slower_of_two_equal_runs_into_an_object_store_finds_the_commit_of_the_other(
    bucket: S3, model: Path, meta_loader: MetaLoader, late: bool
) -> None:
    out = f"{bucket.url}/models/out"
    first, second = (Job(str(model), out, meta_loader, token) for token in ("1", "2"))
    published = first.publish()
    if late:
        second.copy()
    assert second.publish().commit == published.commit
    first.target.discard(first.token), second.target.discard(second.token)
    files = bucket.files("models/out")
    assert read_checkpoint(files.get) == read_checkpoint(from_folder(model))
    assert {path for path in files if path.startswith(".reshard/")} == {".reshard/publications.json"}  # none is staged


@pytest.mark.parametrize("same", [True, False])
def test_what_another_run_published_while_a_run_was_planned_is_a_publication_of_ours(
    model: Path, tmp_path: Path, go: Run, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    prepare, out = FolderTarget.prepare, tmp_path / "out"
    published: list[str] = []

    def late(self: FolderTarget, private: bool) -> str:
        monkeypatch.undo()
        published.append(go(model, out, **{} if same else {"dtype": "float16"}).published.commit)
        return prepare(self, private)

    monkeypatch.setattr(FolderTarget, "prepare", late)
    if same:
        assert go(model, out).published.commit == published[0]
    else:
        with pytest.raises(TargetDrifted, match="is from a job submitted later"):
            go(model, out)


def test_the_slower_of_two_different_runs_is_told_of_a_conflict(
    model: Path, tmp_path: Path, meta_loader: MetaLoader
) -> None:
    out = tmp_path / "out"
    first, second = Job(str(model), str(out), meta_loader), Job(str(model), str(out), meta_loader, dtype="float16")
    first.publish()
    with pytest.raises(TargetConflict):
        second.publish()
    assert read_checkpoint(from_folder(out)) == read_checkpoint(from_folder(model))


def test_a_run_into_a_folder_that_others_change_meanwhile_goes_on_when_run_again(
    model: Path, tmp_path: Path, meta_loader: MetaLoader
) -> None:
    out = tmp_path / "out"
    job = Job(str(model), str(out), meta_loader)
    out.mkdir()
    (out / "notes.txt").write_text("theirs")
    with pytest.raises(TargetChanged, match="others added, changed or removed files") as refused:
        job.publish()
    assert refused.value.next_step == "run the same command again to plan from its current state"
    Job(str(model), str(out), meta_loader).publish()
    assert (out / "notes.txt").read_text() == "theirs" and read_checkpoint(from_folder(out))


def test_a_commit_leaves_alone_what_another_run_is_writing(
    model: Path, tmp_path: Path, meta_loader: MetaLoader
) -> None:
    job, other = Job(str(model), str(tmp_path / "out"), meta_loader), FolderTarget(Folder(path=str(tmp_path / "out")))
    batch = other.sink("other").batch([])
    sealed = batch.open("a", 1)
    sealed.write(memoryview(b"a"))
    sealed.finish()
    [stored] = batch.seal()
    batch = other.sink("other").batch([])
    writer = batch.open("b", 1)
    job.publish()
    job.target.discard("token")
    writer.write(memoryview(b"b"))
    writer.finish()
    assert [file.path for file in batch.seal()] == ["b"] and other.holds([stored]) == []


def test_what_a_dead_run_left_is_removed_by_the_next_commit(
    model: Path, tmp_path: Path, meta_loader: MetaLoader
) -> None:
    job, dead = Job(str(model), str(tmp_path / "out"), meta_loader), FolderTarget(Folder(path=str(tmp_path / "out")))
    dead.sink("dead").batch([]).open("a", 1)
    del dead  # and with it, as with its process, its lock
    job.publish()
    job.target.discard("token")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def staged(job: Job, data: bytes) -> StoredFile:
    batch = job.target.sink(job.token).batch([])
    writer = batch.open(data.decode(), len(data))
    writer.write(memoryview(data))
    writer.finish()
    [stored] = batch.seal()
    return stored


def test_what_a_run_staged_after_the_commit_of_an_equal_one_goes_with_it(
    model: Path, tmp_path: Path, meta_loader: MetaLoader
) -> None:
    first, second = (Job(str(model), str(tmp_path / "out"), meta_loader, token) for token in ("1", "2"))
    first.publish()
    first.target.discard(first.token)
    staged(second, b"late")
    assert second.publish().found
    second.target.discard(second.token)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_what_is_staged_goes_with_the_last_run_that_another_overtook(
    model: Path, tmp_path: Path, meta_loader: MetaLoader
) -> None:
    dtypes = ("float32", "float16", "bfloat16")
    first, second, third = (Job(str(model), str(tmp_path / "out"), meta_loader, d, dtype=d) for d in dtypes)
    first.publish()
    first.target.discard(first.token)
    with pytest.raises(TargetConflict):
        second.publish()
    stored = staged(third, b"late")
    second.target.discard(second.token)
    assert third.target.holds([stored, *weights(third.plan.shards, third.receipts)]) == []
    third.target.discard(third.token)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_what_a_run_staged_that_nobody_overtook_stays_for_the_next(
    model: Path, tmp_path: Path, meta_loader: MetaLoader
) -> None:
    first = Job(str(model), str(tmp_path / "out"), meta_loader)
    first.publish()
    first.target.discard(first.token)
    (tmp_path / "out" / "theirs.txt").write_text("theirs")
    second = Job(str(model), str(tmp_path / "out"), meta_loader, dtype="float16", overwrite=True)
    second.target.discard(second.token)
    assert second.target.holds(weights(second.plan.shards, second.receipts)) == []
