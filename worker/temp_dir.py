"""A temporary folder for each process, which says by a lock whether its process is alive.

Everything that a worker puts on disk lies in it, so that another process of the machine can remove what a killed one
left. The lock and not the name says who is dead: a pid means nothing to another container that shares the disk.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from uuid import uuid4

from reshard.pipeline.errors import TempDirUnusable
from reshard.worker.settings import KEEP_TEMP_DIR

log = logging.getLogger(__name__)

LOCK = ".lock"
OURS = re.compile(r"reshard-\d+-[0-9a-f]{32}")  # nothing else in a shared temporary folder is ours to remove


class ProcessTempDir:
    """The folder of this process; it also becomes the one that Python's tempfile uses."""

    def __init__(self, path: Path, lock: int) -> None:
        """``lock`` is the open file that is locked."""
        self.path, self.lock = path, lock
        self._tempdir_before, tempfile.tempdir = tempfile.tempdir, str(path)

    @classmethod
    def make(cls, tmpdir: Path) -> ProcessTempDir:
        """A new one. Raises TempDirUnusable."""
        path = tmpdir / f"reshard-{os.getpid()}-{uuid4().hex}"
        try:
            path.mkdir(parents=True, mode=0o700)
            lock = os.open(path / LOCK, os.O_WRONLY | os.O_CREAT, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise TempDirUnusable(path=str(tmpdir), why=error.strerror or str(error)) from error
        return cls(path, lock)

    def stands(self) -> bool:
        """Whether it is there: systems have cleaners that remove what was not touched for some days."""
        return (self.path / LOCK).exists()

    def close(self) -> None:
        """Remove it and all that is in it."""
        tempfile.tempdir = self._tempdir_before
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def sweep(tmpdir: Path) -> list[Path]:
    """Remove the folders of processes that are dead, and return them."""
    swept = []
    for folder in tmpdir.glob("reshard-*"):
        if OURS.fullmatch(folder.name) and _abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)
            swept.append(folder)
            log.info("removed %s, left over from a dead process", folder)
    return swept


def _abandoned(folder: Path) -> bool:
    try:
        with (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
    except FileNotFoundError:
        # Between its making and its lock a folder is nobody's for a moment; it may also be gone by now.
        try:
            return folder.is_dir() and time.time() - folder.stat().st_mtime > KEEP_TEMP_DIR
        except OSError:
            return False
    except OSError:  # locked, or another user's
        return False
