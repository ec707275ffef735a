"""Undoing a publication: the state before it, by one commit, and only where that makes sense."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from reshard.pipeline.errors import ChangedSince, NothingToRollBack
from reshard.pipeline.places import parse_place
from reshard.pipeline.protocols import Target
from reshard.pipeline.publishing.rollback import rollback
from reshard.pipeline.request import Options
from reshard.pipeline.stores.connect import Context, open_target
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import Run, upload
from tests.support.checker import from_hub, read_checkpoint
from tests.support.models import add_friends, arrays, numbered, save_sharded

SIZE = 20_000


@pytest.fixture
def repo(tmp_path: Path, on_hub: Namespace) -> str:
    save_sharded(tmp_path / "model", numbered(arrays(12, 4000), 2))
    add_friends(tmp_path / "model")
    return upload(on_hub, "model", tmp_path / "model")


def place(repo: str) -> Target:
    return open_target(parse_place(repo), Options(), Context.from_env())


def state(space: Namespace, repo: str) -> dict[str, object]:
    return {path: (file["size"], file.get("sha256")) for path, file in space.admin.files(repo).items()}


def test_what_was_before_is_there_again(repo: str, on_hub: Namespace, go: Run) -> None:
    before = state(on_hub, repo)
    tensors = read_checkpoint(from_hub(on_hub.endpoint, repo))
    published = go(repo, repo, size=SIZE).published.commit
    assert state(on_hub, repo) != before
    undone = rollback(place(repo), published).commit
    assert undone == on_hub.admin.head(repo) != published
    assert state(on_hub, repo) == before
    assert read_checkpoint(from_hub(on_hub.endpoint, repo)) == tensors


def test_a_second_time_finds_that_it_is_done(repo: str, on_hub: Namespace, go: Run) -> None:
    published = go(repo, repo, size=SIZE).published.commit
    first = rollback(place(repo), published)
    assert rollback(place(repo), published) == replace(first, found=True)
    assert not first.found and first.commit == on_hub.admin.head(repo)


def test_an_answer_that_is_lost_makes_no_second_commit(repo: str, on_hub: Namespace, go: Run) -> None:
    published = go(repo, repo, size=SIZE).published.commit
    on_hub.admin.fault("POST /api/models/.*/commit/", "lost_response", times=1)
    undone = rollback(place(repo), published)
    assert undone.commit == on_hub.admin.head(repo) and not undone.found


def test_files_of_others_stay(repo: str, on_hub: Namespace, go: Run) -> None:
    published = go(repo, repo, size=SIZE).published.commit
    on_hub.admin.put_files(repo, {"theirs.txt": b"theirs"})
    rollback(place(repo), published)
    assert on_hub.admin.read(repo, "theirs.txt") == b"theirs"


def test_a_path_that_somebody_changed_since_is_named(repo: str, on_hub: Namespace, go: Run) -> None:
    published = go(repo, repo, size=SIZE).published.commit
    head = on_hub.admin.put_files(repo, {"README.md": b"# Mine\n"})
    with pytest.raises(ChangedSince, match=r"README\.md") as refused:
        rollback(place(repo), published)
    assert "retry" not in refused.value.next_step  # the job is done: there is nothing to retry
    assert on_hub.admin.head(repo) == head


def test_a_commit_of_somebody_else_is_not_ours_to_undo(repo: str, on_hub: Namespace) -> None:
    theirs = on_hub.admin.put_files(repo, {"notes.txt": b"theirs"})
    with pytest.raises(NothingToRollBack, match="did not make it"):
        rollback(place(repo), theirs)


def test_a_commit_that_is_nowhere_is_told(repo: str, on_hub: Namespace) -> None:
    with pytest.raises(NothingToRollBack, match="not in the history"):
        rollback(place(repo), "0" * 40)


def test_a_repository_that_was_deleted_has_nothing_to_roll_back(repo: str, on_hub: Namespace, go: Run) -> None:
    published = go(repo, repo, size=SIZE).published.commit
    HfApi(on_hub.endpoint, on_hub.token).delete_repo(repo)
    with pytest.raises(NothingToRollBack, match="cannot roll back .*: it was deleted, or the token"):
        rollback(place(repo), published)


def test_a_folder_keeps_no_past(repo: str, tmp_path: Path, go: Run) -> None:
    published = go(tmp_path / "model", tmp_path / "out", size=SIZE).published.commit
    with pytest.raises(NothingToRollBack, match="no earlier version was kept") as refused:
        rollback(place(str(tmp_path / "out")), published)
    assert "until the next run" in refused.value.next_step
    assert published not in str(refused.value), "a folder has no commits"
    assert list((tmp_path / "out").glob("*.safetensors"))


def test_what_was_undone_is_done_again_when_asked(repo: str, on_hub: Namespace, go: Run) -> None:
    target = on_hub.repo("target")
    first = go(repo, target, size=SIZE).published.commit
    rollback(place(target), first)
    again = go(repo, target, size=SIZE)
    assert not again.published.found and again.published.commit == on_hub.admin.head(target)
    assert read_checkpoint(from_hub(on_hub.endpoint, target)) == read_checkpoint(from_hub(on_hub.endpoint, repo))
