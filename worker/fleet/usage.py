"""What a process and all that it started take of their machine, told with each sign of life; by Linux's /proc alone."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from reshard.worker.queue.jobs import Process
from reshard.worker.temp_dir import LOCK, OURS

PROC = Path("/proc")
GONE = (FileNotFoundError, ProcessLookupError)  # it ended, or closed the file, while we looked


def measured(process: Process, tmpdir: Path) -> Process:
    """This process with its memory, and its temporary files below ``tmpdir``; None where the system does not tell."""
    try:
        family = [*_family()]
        return replace(process, memory=sum(map(_resident, family)), temporary=_temporary(family, tmpdir))
    except (OSError, RuntimeError):  # RuntimeError: a loop of links
        return process


def _family() -> Iterator[int]:
    """This process, those that it started, those that they started, and so on. Raises OSError where that is unknown."""
    (PROC / f"self/task/{os.getpid()}/children").stat()
    found = [os.getpid()]
    for pid in found:
        yield pid
        with suppress(*GONE):
            for thread in (PROC / f"{pid}/task").iterdir():
                with suppress(*GONE):
                    found += map(int, (thread / "children").read_text().split())


def _resident(pid: int) -> int:
    with suppress(*GONE):
        return int((PROC / f"{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _temporary(family: list[int], tmpdir: Path) -> int:
    """Bytes of disk. Most are in files without a name (scratch.py), which only those who have them open know of."""
    tmpdir, folders = tmpdir.resolve(), set[Path]()
    sizes: dict[tuple[int, int], int] = {}  # by file: several may have one open

    def count(found: os.stat_result) -> None:
        sizes[found.st_dev, found.st_ino] = 512 * found.st_blocks

    for pid in family:
        with suppress(*GONE):
            for opened in (PROC / f"{pid}/fd").iterdir():
                with suppress(*GONE):
                    name = opened.readlink()
                    if not name.is_relative_to(tmpdir):
                        continue
                    found = opened.stat()
                    if stat.S_ISREG(found.st_mode) and not found.st_nlink:
                        count(found)
                    elif name.name == LOCK and OURS.fullmatch(name.parent.name):
                        folders.add(name.parent)
    for folder in folders:
        for place, _, inside in os.walk(folder):
            for file in inside:
                with suppress(*GONE):
                    count((Path(place) / file).lstat())
    return sum(sizes.values())
