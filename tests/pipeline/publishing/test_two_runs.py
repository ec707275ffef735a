"""Two runs into one folder at once: one commit each time, and the loser is told what really happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.pipeline.errors import TargetConflict, TargetDrifted
from reshard.pipeline.places import Folder
from reshard.pipeline.stores.folder.target import FolderTarget
from reshard.pipeline.verifying.meta_load import MetaLoader
from tests.pipeline.conftest import TRANSPORT, Run
from tests.pipeline.publishing.jobs import Job
from tests.support.checker import from_folder, read_checkpoint
from tests.support.models import add_friends, arrays, numbered, save_sharded


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(TRANSPORT, "http")
    save_sharded(tmp_path / "model", numbered(arrays(8, 4000), 2))
    add_friends(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("there_before", [False, True])
def test_the_slower_of_two_equal_runs_finds_the_commit_of_the_other(
    model: Path, tmp_path: Path, meta_loader: MetaLoader, there_before: bool
) -> None:
    out = tmp_path / "out"
    if there_before:
        out.mkdir()
        (out / "mine.txt").write_text("mine")
    first, second = Job(str(model), str(out), meta_loader), Job(str(model), str(out), meta_loader)
    published = first.publish()
    assert second.publish().commit == published.commit
    first.target.discard("token"), second.target.discard("token")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


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
