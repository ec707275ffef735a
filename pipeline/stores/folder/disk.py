"""Small steps on the disk that every part of a folder target takes."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reshard.pipeline.errors import FolderNotWritable, ResourceError, TargetFilled, TargetFull
from reshard.pipeline.errors.machine import FULL
from reshard.pipeline.stores.scratch import free_at

_FORBIDDEN = frozenset({
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EBUSY, errno.ENAMETOOLONG, errno.ELOOP,
    errno.EXDEV,  # of a folder in the lower layer of an overlay
})  # fmt: skip

MOUNTS = Path("/proc/self/mountinfo")  # proc_pid_mountinfo(5)
_ESCAPED = re.compile(rb"\\([0-7]{3})")

log = logging.getLogger(__name__)


def make_folder(folder: Path) -> None:
    """Raises FolderNotWritable where one cannot be made, as in /proc, unless the disk is full."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise FolderNotWritable(path=error.filename or str(folder), why=error.strerror or str(error)) from error


def write_file(file: Path, content: bytes) -> None:
    """A link at ``file`` is an OSError: whoever made it would choose what is overwritten."""
    with open(file, "wb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o666)) as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(folder: Path) -> None:
    """Remove a tree; what cannot be removed is logged, because by now the commit stands or never will."""

    def failed(_function: object, path: str, info: Any) -> None:
        if not isinstance(info[1], FileNotFoundError):
            log.warning("cannot remove %s: %s", path, info[1])

    shutil.rmtree(folder, onerror=failed)


def walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """os.walk, for which a folder that may not be read is empty; here that raises, but for one that has just gone."""

    def failed(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    return os.walk(folder, onerror=failed)


def mounted_in(root: Path) -> Path | None:
    """Where something is mounted below ``root``, or at it: it would not follow into the folder's next state.

    By what Linux lists, which also knows folders of the same device; where nothing is listed, by the device.
    """
    try:
        lines = MOUNTS.read_bytes().splitlines()
    except OSError:
        return next((Path(folder) for folder, _, _ in os.walk(root) if Path(folder).is_mount()), None)
    names = (_ESCAPED.sub(lambda code: bytes([int(code[1], 8)]), line.split(b" ")[4]) for line in lines)
    return next((point for point in map(Path, map(os.fsdecode, names)) if point.is_relative_to(root)), None)


def remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT, errno.ENOTDIR):
            raise


@contextmanager
def disk_errors(path: Path, needed: int | None) -> Iterator[None]:
    """A full disk and a forbidden folder in our own words; ``needed`` is None for many small writes."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL and needed is not None:
            raise TargetFull(path=str(path), needed=needed, free=free_at(path)) from error
        if error.errno in FULL:
            raise TargetFilled(path=str(path), free=free_at(path)) from error
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise ResourceError(what=f"{error.filename or path}: {error.strerror}") from error
        if error.errno in _FORBIDDEN:
            raise FolderNotWritable(path=error.filename or str(path), why=error.strerror or str(error)) from error
        error.filename = error.filename or str(path)  # of a descriptor, the system names none
        raise
