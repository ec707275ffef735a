"""How much memory moving bytes takes, in a process of its own, whatever the size of a file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from reshard.pipeline.limits import MB, MEMORY_FLOOR
from tests.hub.admin import HubAdmin
from tests.hub.fixtures import Namespace
from tests.pipeline.stores.moves import move
from tests.support.s3 import OddStore


def sparse(folder: Path, size: int) -> Path:
    """A file of zeros that takes no room."""
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(size)
    return folder / "model.safetensors"


@pytest.mark.parametrize("kind", ["hub", *(pytest.param(k, marks=pytest.mark.slow) for k in ("folder", "bucket"))])
def test_moving_a_large_file_takes_little_memory(
    kind: str, hub: HubAdmin, namespace: Namespace, odd_store: OddStore, tmp_path: Path
) -> None:
    file = sparse(tmp_path / "source", 600 * MB)
    if kind == "hub":
        hub.create_repo(namespace.repo("big"))
        hub.import_files(namespace.repo("big"), {"model.safetensors": file})
        places = namespace.repo("big"), namespace.repo("copy")
    elif kind == "bucket":
        odd_store.objects = {"model.safetensors": (600 * MB, "v1")}
        places = "s3://odd", namespace.repo("copy")
    else:
        places = str(file.parent), str(tmp_path / "target")
    found = move(*places, 200 * MB, "http", namespace, tmp_path)
    shutil.rmtree(tmp_path / ".target.reshard", ignore_errors=True)  # 600 MB that pytest would keep
    assert found["bytes"] == 600 * MB
    assert found["rss"] <= MEMORY_FLOOR
