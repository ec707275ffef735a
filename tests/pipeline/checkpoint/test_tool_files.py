"""Files of tools: whatever a folder does not list is not carried either, and nothing else is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.pipeline.checkpoint.tool_files import is_tool_file, leftover
from reshard.pipeline.stores.folder.source import list_folder
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import Run, upload
from tests.support.models import add_friends, arrays, numbered, save_sharded

TOOLS = [
    ".git/HEAD",
    ".cache/huggingface/download/x.metadata",
    "x/.cache/huggingface/y",
    "x/y/.reshard/z",
    ".reshard/z",
]
GIT = [".gitattributes", "x/.gitattributes", "x/.gitignore"]
MODEL = ["x.git/y", ".github/y", "x/.cache/y", ".cache/huggingface.json", "reshard/y", "x/gitattributes"]


@pytest.mark.parametrize("path", TOOLS + GIT + MODEL)
def test_a_folder_lists_whatever_is_carried(path: str, tmp_path: Path) -> None:
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text("x")
    assert is_tool_file(path) == (path not in MODEL)
    assert (path in list_folder(tmp_path)) == (path not in TOOLS)


def test_a_repository_with_files_of_tools_becomes_a_folder_without_them(
    tmp_path: Path, on_hub: Namespace, go: Run
) -> None:
    save_sharded(tmp_path / "model", numbered(arrays(4, 400), 2))
    add_friends(tmp_path / "model")
    repo = upload(on_hub, "source", tmp_path / "model")
    deep = [path for path in TOOLS if not path.startswith(".git/")] + ["x/.cache/huggingface/a.safetensors"]
    on_hub.admin.put_files(repo, {path: b"x" for path in (*deep, *GIT, *MODEL)})
    report = go(repo, tmp_path / "out", size=2000)
    left_out = {path for path, why in report.plan.left_out if "part of the repository" in why}
    assert left_out == {*deep, *GIT}
    listed = list_folder(tmp_path / "out").keys()
    assert listed >= set(MODEL) and not listed & {*deep, *GIT}


SECRETS = [".env", "scripts/.env.production", ".netrc", ".ssh/config"]
LEFTOVERS = [
    ".DS_Store", "x/.DS_Store", "__pycache__/a.cpython-312.pyc", "__pycache__/b.txt", "a.pyc", "Thumbs.db",
    "config.json~", ".config.json.swp", "._model.safetensors", ".idea/x.xml", ".svn/entries", ".git",
]  # fmt: skip
KEPT = ["env", "environment.json", ".envoy", "thumbs.dbx", "modeling.py", "x/pycache/y", ".github/y", "swp"]


@pytest.mark.parametrize("path", SECRETS + LEFTOVERS + KEPT)
def test_secrets_and_leftovers_are_known_at_any_depth(path: str) -> None:
    assert (leftover(path) is None) == (path in KEPT)


@pytest.mark.parametrize("home", ["folder", "repository"])
def test_secrets_and_leftovers_are_left_out_and_listed(home: str, tmp_path: Path, on_hub: Namespace, go: Run) -> None:
    """Also those of a repository: a private one's readers may be fewer than the copy's."""
    save_sharded(tmp_path / "model", numbered(arrays(4, 400), 2))
    for path in (*SECRETS, *LEFTOVERS, *KEPT):
        (tmp_path / "model" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / path).write_text("x")
    wanted = {*LEFTOVERS}
    if home == "repository":
        (tmp_path / "model" / ".git").unlink()  # no Hub takes one
        wanted.remove(".git")
    source = tmp_path / "model" if home == "folder" else upload(on_hub, "source", tmp_path / "model")
    report = go(source, tmp_path / "out", size=2000)
    left_out = dict(report.plan.left_out)
    assert all("secrets" in left_out[path] for path in SECRETS)
    assert all("left over from a tool" in left_out[path] for path in wanted)
    assert list_folder(tmp_path / "out").keys() >= set(KEPT)
    assert not list_folder(tmp_path / "out").keys() & {*SECRETS, *LEFTOVERS}


def test_a_leftover_is_carried_where_it_is_asked_for(tmp_path: Path, go: Run) -> None:
    save_sharded(tmp_path / "model", numbered(arrays(4, 400), 2))
    (tmp_path / "model" / ".env").write_text("x")
    report = go(tmp_path / "model", tmp_path / "out", size=2000, include=(".env",))
    assert ".env" in {file.path for file in report.plan.carried}
