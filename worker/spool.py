"""A temporary folder for each lease, which says by a lock whether its process is alive.

The lock and not the name says so: a pid means nothing to another container that shares the disk.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reshard.worker.settings import KEEP_SPOOL

log = logging.getLogger(__name__)

LOCK = ".lock"
OURS = re.compile(r"reshard-\d+-[0-9a-f]{32}")  # nothing else in a shared temporary folder is ours to remove


@contextmanager
def spool(tmpdir: Path, token: str) -> Iterator[Path]:
    """A folder under ``tmpdir`` that is named by process and token, and is gone afterwards."""
    folder = tmpdir / f"reshard-{os.getpid()}-{token}"
    folder.mkdir(parents=True, mode=0o700)
    try:
        with (folder / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(tmpdir: Path, now: float) -> list[Path]:
    """Remove the folders of processes that are dead, and return them; ``now`` in seconds since the epoch."""
    swept = []
    for folder in tmpdir.glob("reshard-*"):
        if OURS.fullmatch(folder.name) and _abandoned(folder, now):
            shutil.rmtree(folder, ignore_errors=True)
            swept.append(folder)
            log.info("removed %s, which a dead process left behind", folder)
    return swept


def _abandoned(folder: Path, now: float) -> bool:
    try:
        with (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
    except BlockingIOError:
        return False
    except FileNotFoundError:
        # Between its making and its lock a folder is nobody's for a moment; it may also be gone by now.
        try:
            return folder.is_dir() and now - folder.stat().st_mtime > KEEP_SPOOL
        except FileNotFoundError:
            return False
