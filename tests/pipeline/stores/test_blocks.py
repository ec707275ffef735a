"""Files that are written a block at a time: every byte, in order, past the cache where it can be, in bounded memory."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from reshard.pipeline.errors import DiskFull
from reshard.pipeline.limits import DISK_BLOCK, MIB
from reshard.pipeline.stores.folder.blocks import DiskLane


@pytest.fixture
def lane() -> Iterator[DiskLane]:
    lane = DiskLane()
    yield lane
    lane.close()


def noise(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


@pytest.mark.parametrize("step", [1000, 4096, MIB, 3 * DISK_BLOCK])
@pytest.mark.parametrize("size", [0, 1, DISK_BLOCK - 1, DISK_BLOCK, DISK_BLOCK + 1, 3 * DISK_BLOCK + 777])
def test_a_file_holds_what_was_written_however_it_came(lane: DiskLane, tmp_path: Path, size: int, step: int) -> None:
    data = noise(size)
    file = lane.open(tmp_path / "file", size)
    for at in range(0, size, step):
        file.write(memoryview(data)[at : at + step])
    file.finish()
    lane.flush()
    assert file.on_disk
    assert (tmp_path / "file").read_bytes() == data


def test_files_are_filled_side_by_side(lane: DiskLane, tmp_path: Path) -> None:
    sizes = {str(number): 2 * DISK_BLOCK + number for number in range(5)}
    files = {name: lane.open(tmp_path / name, size) for name, size in sizes.items()}
    for at in range(0, 2 * DISK_BLOCK + 5, MIB):
        for name, size in sizes.items():
            files[name].write(memoryview(noise(size))[at : at + MIB])
    for file in files.values():
        file.finish()
    lane.flush()
    assert all((tmp_path / name).read_bytes() == noise(size) for name, size in sizes.items())


@pytest.mark.skipif(sys.platform != "linux", reason="there is no O_DIRECT")
def test_a_large_file_goes_past_the_cache_and_a_small_one_through_it(lane: DiskLane, tmp_path: Path) -> None:
    direct = {}
    for name, size in {"large": DISK_BLOCK, "small": DISK_BLOCK - 1}.items():
        file = lane.open(tmp_path / name, size)
        direct[name] = bool(fcntl.fcntl(file._file.fileno(), fcntl.F_GETFL) & os.O_DIRECT)
        file.close()
    assert direct == {"large": True, "small": False}


def test_few_blocks_are_held_however_large_a_file_is(lane: DiskLane, tmp_path: Path) -> None:
    """Also where the disk is slower than who writes."""
    file = lane.open(tmp_path / "file", 50 * DISK_BLOCK)
    view = memoryview(bytes(DISK_BLOCK))
    for _ in range(50):
        file.write(view)
    file.finish()
    lane.flush()
    assert len(lane._free) <= 4  # all that were made


def test_what_the_disk_says_is_raised_by_a_later_call(lane: DiskLane, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (DISK_BLOCK + 1000, hard))
    try:
        file = lane.open(tmp_path / "file", 4 * DISK_BLOCK)
        with pytest.raises(DiskFull, match=f"{4 * DISK_BLOCK} bytes needed"):
            for _ in range(4):
                file.write(memoryview(bytes(DISK_BLOCK)))
            file.finish()
            lane.flush()
        assert not file.on_disk
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
        file.close()


def test_a_file_is_on_the_disk_no_sooner_than_it_was_synced(
    lane: DiskLane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        begun.set()
        go_on.wait(60)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    file = lane.open(tmp_path / "file", 3)
    file.write(memoryview(b"abc"))
    file.finish()
    assert begun.wait(60)
    assert not file.on_disk
    go_on.set()
    lane.flush()
    assert file.on_disk
