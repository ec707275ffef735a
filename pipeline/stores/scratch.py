"""Temporary files, within what the operator gives them."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from reshard.pipeline.errors import DiskFull, TempDirUnusable
from reshard.pipeline.errors.machine import FULL
from reshard.pipeline.limits import STAGING_AGE


class ScratchSpace:
    """A folder for temporary files, and the most bytes that they may take at once; one job's copying shares one."""

    def __init__(self, path: Path | None = None, limit: int | None = None) -> None:
        self.path = path or Path(tempfile.gettempdir())
        self._limit = limit
        self._open: list[ScratchFile] = []
        self._change = threading.Condition()

    def room(self) -> int:
        """Bytes that a new file may take: free on the disk, but for what open files have yet to write, and left of
        the limit; raises TempDirUnusable."""
        try:
            free = shutil.disk_usage(self.path).free
        except OSError as error:
            raise TempDirUnusable(path=str(self.path), why=error.strerror or str(error)) from error
        opened = [*self._open]
        free -= sum(scratch.size - scratch.written for scratch in opened)
        return free if self._limit is None else min(free, self._limit - sum(scratch.size for scratch in opened))

    def open(self, size: int) -> ScratchFile:
        """A file for ``size`` bytes; waits while others are leaving, and raises DiskFull without room even then."""
        with self._change:
            while size > self.room():
                if not any(scratch.leaving for scratch in self._open):
                    raise DiskFull(path=str(self.path), needed=size, free=self.room())
                self._change.wait()
            with full_disk_errors(self.path, size):
                scratch = ScratchFile(self, size)
            self._open.append(scratch)
            return scratch

    def forget(self, scratch: ScratchFile) -> None:
        with self._change:
            if scratch in self._open:
                self._open.remove(scratch)
            self._change.notify_all()


class ScratchFile:
    """A file without a name, which is gone with the process that made it, however that ends."""

    def __init__(self, disk: ScratchSpace, size: int) -> None:
        self.size = size  # bytes
        self.written = 0  # bytes, of these
        self.leaving = False  # it is complete, and is closed once it was sent
        self.file = tempfile.TemporaryFile(dir=disk.path, prefix="reshard-", buffering=0)  # noqa: SIM115
        self._disk = disk

    def write(self, view: memoryview) -> None:
        """All of ``view``; raises DiskFull."""
        with full_disk_errors(self._disk.path, self.size):
            while view:
                count = self.file.write(view)
                self.written += count
                view = view[count:]

    def read_into(self, view: memoryview, at: int) -> None:
        """Fill ``view`` with the bytes from ``at`` on; raises EOFError where the file ends before."""
        while view:
            count = os.preadv(self.file.fileno(), [view], at)
            if not count:
                raise EOFError(f"a scratch file ends at byte {at}")
            view, at = view[count:], at + count

    def close(self) -> None:
        self.file.close()
        self._disk.forget(self)


def remove_abandoned(files: Iterable[Path]) -> None:
    """Remove those that nobody wrote to for STAGING_AGE."""
    for file in files:
        with suppress(FileNotFoundError):  # another process was faster
            if time.time() - file.stat().st_mtime > STAGING_AGE:
                file.unlink()


@contextmanager
def full_disk_errors(path: Path, needed: int) -> Iterator[None]:
    """Inside, a disk without room is DiskFull."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise DiskFull(path=str(path), needed=needed, free=free_at(path)) from error


def free_at(path: Path) -> int:
    """Bytes that are free on the disk of ``path``, or of what is there of the folders that it will lie in."""
    return shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.exists())).free
