"""New files, written a block at a time behind whoever makes their bytes, around the system's cache where that helps.

To copy bytes into the cache and have the system write them from there costs a copy as much processor time as its
sha256, and what was just written is not read again soon.
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

from xxhash import xxh3_128

from reshard.pipeline.limits import DISK_BLOCK, DISK_WRITES
from reshard.pipeline.stores.folder.disk import disk_errors
from reshard.pipeline.stores.lane import Lane

_ONE = memoryview(b"1")  # stands for one file in the lane that syncs


class Disk:
    """Threads that write a block each, and one that syncs files, one after the other.

    The system's cache takes one block of a file at a time.
    """

    def __init__(self) -> None:
        self._writing = [Lane(f"write-blocks-{number}", limit=DISK_BLOCK) for number in range(DISK_WRITES)]
        self._syncing = Lane("fsync", limit=1)
        self._free: list[mmap] = []

    def create(self, path: Path, size: int) -> BlockFile:
        """A new file that will have ``size`` bytes; raises as ``disk_errors``."""
        with disk_errors(path, size):
            return BlockFile(path, size, self._writing, self._syncing, self._free)

    def flush(self) -> None:
        """Wait until every finished file is on the disk; raises what was raised for one."""
        for lane in (*self._writing, self._syncing):
            lane.flush()

    def close(self) -> None:
        """Stop, whatever is not written yet."""
        for lane in (*self._writing, self._syncing):
            lane.close()


class BlockFile:
    """A file on its way to the disk. What that says of a block is raised by a later call, of this file or another."""

    def __init__(self, path: Path, size: int, writing: list[Lane], syncing: Lane, free: list[mmap]) -> None:
        self._path, self._size = path, size
        self._syncing, self._free = syncing, free
        self._file = path.open("xb", buffering=0)
        self._around_cache = size >= DISK_BLOCK and _bypass_cache(self._file.fileno())
        self._writing = writing if self._around_cache else writing[:1]
        self._at = 0  # where the next block begins
        self._block: mmap | None = None
        self._filled = 0
        self._digest = xxh3_128()
        self.on_disk = False

    def write(self, view: memoryview) -> None:
        while view:
            if self._block is None:
                # Of pages that a fork shares, as open(2) asks for with O_DIRECT.
                self._block = self._free.pop() if self._free else mmap(-1, DISK_BLOCK)
            step = min(len(view), DISK_BLOCK - self._filled)
            self._block[self._filled : self._filled + step] = view[:step]
            self._filled += step
            view = view[step:]
            if self._filled == DISK_BLOCK:
                self._hand_over(self._block)

    def finish(self) -> str:
        """Have the last of it written, and synced while the next file is filled; returns the xxh3-128 of its blocks."""
        if self._block is not None:
            self._hand_over(self._block)
        for lane in self._writing:
            lane.flush()
        self._syncing.put(self._sync, _ONE)
        return self._digest.hexdigest()

    def close(self) -> None:
        self._file.close()

    def _hand_over(self, block: mmap) -> None:
        self._digest.update(memoryview(block)[: self._filled])
        lane = self._writing[self._at // DISK_BLOCK % len(self._writing)]
        lane.put(partial(self._write, block, self._filled, self._at), memoryview(block))  # however much of it is filled
        self._at += self._filled
        self._block, self._filled = None, 0

    def _write(self, block: mmap, filled: int, at: int, _: memoryview) -> None:
        left = memoryview(block)[:filled]
        with disk_errors(self._path, self._size):
            while left:
                written = self._write_some(left, at)
                left, at = left[written:], at + written
        self._free.append(block)

    def _write_some(self, view: memoryview, at: int) -> int:
        try:
            return os.pwrite(self._file.fileno(), view, at)
        except OSError as error:
            if not self._around_cache or error.errno != errno.EINVAL:
                raise
        # Only whole sectors go around the cache: not the end of a file, and nothing where the file system cannot.
        _use_cache(self._file.fileno())
        return os.pwrite(self._file.fileno(), view, at)

    def _sync(self, _: memoryview) -> None:
        with disk_errors(self._path, self._size):
            os.fsync(self._file.fileno())
            self._file.close()
        self.on_disk = True


def _bypass_cache(descriptor: int) -> bool:
    """Have writes to the file go around the system's cache, and say whether they do.

    Only on a disk of this machine: a network file system would wait for its server after each block. File systems
    without a device of their own have 0 as its major number.
    """
    if sys.platform == "linux" and os.major(os.fstat(descriptor).st_dev) != 0:
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
            return True
    return False


def _use_cache(descriptor: int) -> None:
    if sys.platform == "linux":
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)
