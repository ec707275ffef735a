"""The index rules held against whole folders: which files they name."""

from __future__ import annotations

from pathlib import Path

from reshard.pipeline.places import Folder
from reshard.pipeline.stores.folder.source import FolderSource
from reshard.pipeline.verifying.index_rules import ruled
from reshard.pipeline.verifying.opened import OpenedSide
from tests.support.models import arrays, numbered, save_sharded


def test_missing_files_of_a_folder_are_named_with_it(tmp_path: Path) -> None:
    save_sharded(tmp_path, numbered(arrays(4, 400), 2))
    save_sharded(tmp_path / "sub", numbered(arrays(4, 400), 2))
    for name in ("model-00002-of-00002.safetensors", "model.safetensors.index.json"):
        (tmp_path / "sub" / name).unlink()
    found = ruled(OpenedSide.attempt(FolderSource.open(Folder(path=str(tmp_path))))).findings
    assert [one.text for one in found] == [
        "sub/model is in numbered files, but its index sub/model.safetensors.index.json is missing",
        "file 2 of 2 of sub/model is missing",
    ]
