"""Small steps on the disk that every part of a folder target takes."""

from __future__ import annotations

import errno
import logging
import os
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
