"""Files written a block at a time: every byte, in order, around the cache where it can be, in bounded memory."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from mmap import mmap
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_128_hexdigest

from reshard.pipeline.errors import TargetFull
from reshard.pipeline.limits import DISK_BLOCK, MIB
from reshard.pipeline.stores.folder import blocks
from reshard.pipeline.stores.folder.blocks import BlockFile, Disk
from tests.support.full_disk import files_of_at_most

WAIT = 60  # seconds; for what a broken implementation never does


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.close()


def noise(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


def fill(file: BlockFile, data: bytes, step: int = MIB) -> str:
    for at in range(0, len(data), step):
        file.write(memoryview(data)[at : at + step])
    return file.finish()


@pytest.mark.parametrize("step", [1000, 4096, MIB, 3 * DISK_BLOCK])
@pytest.mark.parametrize("size", [0, 1, DISK_BLOCK - 1, DISK_BLOCK, DISK_BLOCK + 1, 3 * DISK_BLOCK + 777])
def test_a_file_holds_what_was_written_however_it_came(disk: Disk, tmp_path: Path, size: int, step: int) -> None:
    file, data = disk.create(tmp_path / "file", size), noise(size)
    assert fill(file, data, step) == xxh3_128_hexdigest(data)
    disk.flush()
    assert file.on_disk
    assert (tmp_path / "file").read_bytes() == data


def test_files_are_filled_side_by_side(disk: Disk, tmp_path: Path) -> None:
    sizes = {str(number): 2 * DISK_BLOCK + number for number in range(5)}
    files = {name: disk.create(tmp_path / name, size) for name, size in sizes.items()}
    for at in range(0, 2 * DISK_BLOCK + 5, MIB):
        for name, size in sizes.items():
            files[name].write(memoryview(noise(size))[at : at + MIB])
    for file in files.values():
        file.finish()
    disk.flush()
    assert all((tmp_path / name).read_bytes() == noise(size) for name, size in sizes.items())


def descriptor_of(path: Path) -> int:
    """By which this process has the file open."""
    for one in Path("/dev/fd").iterdir():
        with suppress(OSError):  # that of the listing is closed by now
            if os.path.samestat(os.fstat(int(one.name)), path.stat()):
                return int(one.name)
    raise AssertionError(f"{path} is not open")


def goes_around_the_cache(disk: Disk, path: Path, size: int) -> bool:
    file = disk.create(path, size)
    direct = fcntl.fcntl(descriptor_of(path), fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0)
    file.close()
    return bool(direct)


def on_a_disk(path: Path) -> bool:
    return sys.platform == "linux" and os.major(path.stat().st_dev) != 0


def test_a_large_file_goes_around_the_cache_and_a_small_one_through_it(disk: Disk, tmp_path: Path) -> None:
    assert goes_around_the_cache(disk, tmp_path / "large", DISK_BLOCK) is on_a_disk(tmp_path)
    assert not goes_around_the_cache(disk, tmp_path / "small", DISK_BLOCK - 1)


def test_where_there_is_no_disk_of_this_machine_a_large_file_goes_through_the_cache(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network file system, whose major number is 0."""
    monkeypatch.setattr(os, "major", lambda device: 0)
    assert not goes_around_the_cache(disk, tmp_path / "large", DISK_BLOCK)


def test_where_the_disk_takes_nothing_but_through_the_cache_it_gets_it_so(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file system may that takes the flag and refuses the write; here two of them at once."""
    write, flags, refused = os.pwrite, fcntl.fcntl, []
    both = threading.Barrier(2)

    def taken(descriptor: int, command: int, given: int = 0) -> int:
        """Also the flag that the tests' own disk may not take."""
        try:
            return flags(descriptor, command, given)
        except OSError:
            return 0

    def refusing(descriptor: int, view: memoryview, at: int) -> int:
        if descriptor == of_the_file and len(refused) < 2:
            refused.append(len(view))
            both.wait(WAIT)
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, view, at)

    data = noise(3 * DISK_BLOCK + 5)
    with monkeypatch.context() as patched:
        patched.setattr(os, "major", lambda device: 8)
        patched.setattr(fcntl, "fcntl", taken)
        file = disk.create(tmp_path / "file", len(data))
    of_the_file = descriptor_of(tmp_path / "file")
    monkeypatch.setattr(os, "pwrite", refusing)
    fill(file, data)
    disk.flush()
    assert refused == [DISK_BLOCK, DISK_BLOCK]
    assert (tmp_path / "file").read_bytes() == data


def test_few_blocks_are_enough_however_slow_the_disk_is_and_none_is_filled_before_it_is_written(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk has two to write at once, and the cache one; another is filled meanwhile."""
    made, last, go_on = [], threading.Event(), threading.Event()
    write, most = os.pwrite, 3 if on_a_disk(tmp_path) else 2

    def counted(*arguments: int) -> mmap:
        made.append(arguments)
        if len(made) == most:
            last.set()
        return mmap(*arguments)

    def slow(descriptor: int, view: memoryview, at: int) -> int:
        assert descriptor != of_the_file or go_on.wait(WAIT)
        return write(descriptor, view, at)

    monkeypatch.setattr(blocks, "mmap", counted)
    data = noise(20 * DISK_BLOCK)
    file = disk.create(tmp_path / "file", len(data))
    of_the_file = descriptor_of(tmp_path / "file")
    monkeypatch.setattr(os, "pwrite", slow)
    writer = threading.Thread(target=fill, args=(file, data))
    writer.start()
    assert last.wait(WAIT)
    go_on.set()
    writer.join(WAIT)
    disk.flush()
    assert len(made) == most
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("size", [0, 1, DISK_BLOCK])
def test_few_files_are_open_however_many_are_finished(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    files: list[BlockFile] = []
    most = [0]
    fsync = os.fsync

    def counted(descriptor: int) -> None:
        most[0] = max(most[0], sum(not file.on_disk for file in files))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", counted)
    for number in range(50):
        files.append(disk.create(tmp_path / str(number), size))
        fill(files[-1], bytes(size))
    disk.flush()
    assert 1 <= most[0] <= 3


def test_what_the_disk_says_is_raised_by_a_later_call(disk: Disk, tmp_path: Path) -> None:
    with closing(disk.create(tmp_path / "file", 4 * DISK_BLOCK)) as file, files_of_at_most(DISK_BLOCK + 1000):
        with pytest.raises(TargetFull, match="8.4 MB needed") as refused:
            fill(file, bytes(4 * DISK_BLOCK))
        assert refused.value.facts["needed"] == 4 * DISK_BLOCK
        assert not file.on_disk


@pytest.mark.parametrize(
    ("code", "kind", "told"), [(errno.ENOSPC, TargetFull, "3 bytes needed"), (errno.EIO, OSError, "file")]
)
def test_what_a_sync_says_is_raised_with_the_files_name(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception], told: str
) -> None:
    def failing(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", failing)
    file = disk.create(tmp_path / "file", 3)
    fill(file, b"abc")
    with pytest.raises(kind, match=told):
        disk.flush()
    assert not file.on_disk
    file.close()


def test_a_file_is_on_the_disk_no_sooner_than_it_was_synced(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        begun.set()
        assert go_on.wait(WAIT)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    file = disk.create(tmp_path / "file", 3)
    fill(file, b"abc")
    assert begun.wait(WAIT)
    assert not file.on_disk
    go_on.set()
    disk.flush()
    assert file.on_disk
