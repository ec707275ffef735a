"""Temporary files within a limit: all of them together, and whoever comes too late waits for those that leave."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from reshard.pipeline.errors import DiskFull
from reshard.pipeline.stores.scratch import ScratchFile, ScratchSpace
from tests.support.full_disk import files_of_at_most


def test_all_temporary_files_share_one_limit(tmp_path: Path) -> None:
    disk = ScratchSpace(tmp_path, limit=1000)
    first = disk.open(600)
    with pytest.raises(DiskFull) as full:
        disk.open(500)
    assert (full.value.facts["needed"], full.value.facts["free"]) == (500, 400)
    first.close()
    disk.open(1000).close()
    assert not list(tmp_path.iterdir())


def test_no_more_than_the_disk_has_is_begun(tmp_path: Path) -> None:
    disk = ScratchSpace(tmp_path)
    with pytest.raises(DiskFull, match=str(tmp_path)):
        disk.open(1 << 60)


def test_bytes_that_open_files_have_yet_to_write_are_not_room(tmp_path: Path) -> None:
    disk = ScratchSpace(tmp_path)
    free = disk.room()
    first = disk.open(free * 3 // 4)
    with pytest.raises(DiskFull, match=str(tmp_path)):
        disk.open(free // 2)  # nothing is written yet, so the disk itself is as free as before
    first.close()
    disk.open(free // 2).close()


def test_what_is_written_is_taken_from_the_room_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = 0
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000 - used))
    disk = ScratchSpace(tmp_path)
    with closing(disk.open(600)) as scratch:
        assert disk.room() == 400
        for _ in range(2):
            scratch.write(memoryview(bytes(300)))
            used += 300
            assert disk.room() == 400


def test_what_does_not_fit_waits_for_what_is_leaving(tmp_path: Path) -> None:
    disk = ScratchSpace(tmp_path, limit=1000)
    first = disk.open(600)
    first.leaving = True
    opened: list[ScratchFile] = []
    later = threading.Thread(target=lambda: opened.append(disk.open(500)))
    later.start()
    later.join(0.2)
    assert later.is_alive() and not opened
    first.close()
    later.join(10)
    assert len(opened) == 1


def test_a_view_is_filled_whole_or_not_at_all(tmp_path: Path) -> None:
    with closing(ScratchSpace(tmp_path).open(10)) as scratch:
        scratch.write(memoryview(b"0123456789"))
        view = bytearray(4)
        scratch.read_into(memoryview(view), 6)
        assert view == b"6789"
        with pytest.raises(EOFError, match="byte 10"):
            scratch.read_into(memoryview(view), 8)


def test_a_disk_that_fills_up_is_named(tmp_path: Path) -> None:
    scratch = ScratchSpace(tmp_path).open(3_000_000)
    with files_of_at_most(2_000_000), pytest.raises(DiskFull, match=str(tmp_path)):
        scratch.write(memoryview(bytes(3_000_000)))
    scratch.close()
