"""New files, written a block at a time behind whoever makes their bytes, and past the system's cache where it can be.

To copy bytes into the cache and have the system write them from there takes more processor time than all their digests,
and what was just written is not read again soon.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from contextlib import suppress
from functools import partial
from mmap import mmap
from pathlib import Path

from reshard.pipeline.limits import DISK_BLOCK
from reshard.pipeline.stores.folder.disk import disk_errors
from reshard.pipeline.stores.lane import Lane


class DiskLane:
    """The thread that writes and syncs files, and the blocks that are filled for it: two wait for it, or fewer."""

    def __init__(self) -> None:
        self._lane = Lane("disk", limit=2 * DISK_BLOCK)
        self._free: list[mmap] = []

    def open(self, path: Path, size: int) -> BlockFile:
        """A new file that will have ``size`` bytes; raises as ``disk_errors``."""
        with disk_errors(path, size):
            return BlockFile(path, size, self._lane, self._free)

    def flush(self) -> None:
        """Wait until every file that was finished is on the disk; raises what was raised for one."""
        self._lane.flush()

    def close(self) -> None:
        """Stop, whatever is not written yet."""
        self._lane.close()


class BlockFile:
    """A file of a lane. Errors of the disk are raised by a later call, of this file or another one."""

    def __init__(self, path: Path, size: int, lane: Lane, free: list[mmap]) -> None:
        self._path, self._size = path, size
        self._lane, self._free = lane, free
        self._file = path.open("xb", buffering=0)
        self._direct = size >= DISK_BLOCK and _past_cache(self._file.fileno())
        self._block: mmap | None = None
        self._filled = 0

    def write(self, view: memoryview) -> None:
        while view:
            if self._block is None:
                self._block = self._free.pop() if self._free else mmap(-1, DISK_BLOCK)
            step = min(len(view), DISK_BLOCK - self._filled)
            self._block[self._filled : self._filled + step] = view[:step]
            self._filled += step
            view = view[step:]
            if self._filled == DISK_BLOCK:
                self._hand_over(self._block)

    def finish(self) -> None:
        """Have it brought to the disk; it is there once it is ``on_disk``."""
        if self._block is not None:
            self._hand_over(self._block)
        self._lane.put(self._sync, memoryview(b""))

    @property
    def on_disk(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        self._file.close()

    def _hand_over(self, block: mmap) -> None:
        self._lane.put(partial(self._write, block, self._filled), memoryview(block))  # however much of it is filled
        self._block, self._filled = None, 0

    def _write(self, block: mmap, filled: int, _: memoryview) -> None:
        left = memoryview(block)[:filled]
        with disk_errors(self._path, self._size):
            while left:
                left = left[self._write_some(left) :]
        self._free.append(block)

    def _write_some(self, view: memoryview) -> int:
        try:
            return self._file.write(view)
        except OSError as error:
            if not self._direct or error.errno != errno.EINVAL:
                raise
        # Only whole sectors pass by the cache, and a file's end is none.
        self._direct = False
        fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) & ~os.O_DIRECT)
        return self._file.write(view)

    def _sync(self, _: memoryview) -> None:
        with disk_errors(self._path, self._size):
            os.fsync(self._file.fileno())
            self._file.close()


def _past_cache(descriptor: int) -> bool:
    """Whether what is written to the file goes by the cache from now on; not every file system can."""
    if sys.platform == "linux":
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
            return True
    return False
