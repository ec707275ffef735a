"""The copy loop reads on while it casts, and ends wherever a thread of its own does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard.pipeline.copying.casts import Caster
from reshard.pipeline.reshard import Watcher, run
from reshard.pipeline.stores.connect import Context
from reshard.pipeline.stores.folder.blocks import BlockFile
from tests.pipeline.conftest import asked
from tests.support.stuck import STUCK


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """16 MB, more than what may be under way between two threads."""
    (tmp_path / "m").mkdir()
    save_file({"w": torch.randn(2048, 2048, generator=torch.Generator().manual_seed(1))}, tmp_path / "m/w.safetensors")
    return tmp_path / "m"


def test_the_next_bytes_are_read_while_a_tensor_is_cast(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed, views, read_on = Caster.feed, 0, threading.Event()

    def slow(self: Caster, view: memoryview) -> Iterator[memoryview]:
        assert read_on.wait(STUCK)
        return feed(self, view)

    def moved(count: int) -> None:
        nonlocal views
        views += 1
        if views == 2:
            read_on.set()

    monkeypatch.setattr(Caster, "feed", slow)
    run(asked(weights, tmp_path / "out", dtype="bfloat16"), Context.from_env(), Watcher(moved=moved))
    (made,) = (load_file(file) for file in (tmp_path / "out").glob("*.safetensors"))
    assert made["w"].equal(load_file(weights / "w.safetensors")["w"].bfloat16())


def test_what_a_disk_says_of_a_cast_tensor_ends_the_run(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that casts waits for the one that writes, and the one that reads for both."""

    def full(self: BlockFile, view: memoryview) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(BlockFile, "write", full)
    with pytest.raises(OSError, match="the disk is gone"):
        run(asked(weights, tmp_path / "out", dtype="bfloat16"), Context.from_env())
    assert not (tmp_path / "out").exists()
    assert not [thread for thread in threading.enumerate() if thread.name in {"reshard-cast", "reshard-write"}]
