"""A folder as a source: what it lists, and reads that fail when a file was touched since."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from reshard.pipeline.checkpoint.discover import is_index, is_weights, part_by
from reshard.pipeline.checkpoint.tool_files import is_tool_folder
from reshard.pipeline.errors import (
    BadPlace,
    BrokenLink,
    CacheFolder,
    FolderLink,
    FolderNotFound,
    LinkLoop,
    PartOfCheckpoint,
    PathTooLong,
    ResourceError,
    SourceChanged,
    SourceError,
    Unreadable,
    UnsafePath,
    WholeCache,
)
from reshard.pipeline.limits import CHUNK, FOLDER_DEPTH_MAX
from reshard.pipeline.paths import resolved
from reshard.pipeline.places import Folder
from reshard.pipeline.protocols import Visibility
from reshard.pipeline.stores.folder.hf_cache import Owns, is_moved_snapshot, owned_by_cache, snapshot_below, snapshot_in
from reshard.pipeline.stores.record import digest_of
from reshard.pipeline.tensors import Pin, StoredFile

# A folder may be a download, whose links are its author's, or one that its owner made.
_OWN_LINK = UnsafePath.defaults["cure"] + "; if the link is your own, replace it with a copy of the {}"


class FileStat(NamedTuple):
    """What tells whether a file was touched."""

    size: int  # bytes
    mtime_ns: int


def list_folder(root: Path) -> dict[str, FileStat]:
    """Every file below ``root`` by its POSIX path, sorted, but for those in folders of tools.

    Links to files are followed as far as the checkpoint goes.
    A snapshot of huggingface_hub's cache is made of links to what that cache owns (hf_cache.py), which belongs to it.
    Raises FolderNotFound, and UnsafePath for any other link out of the folder and for links to folders.
    """
    real = _real(root)
    owns = owned_by_cache(real)
    found: dict[str, FileStat] = {}
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        if prefix.count("/") > FOLDER_DEPTH_MAX:
            raise PathTooLong(path=str(root), why=f"more than {FOLDER_DEPTH_MAX} nested folders")
        try:
            with os.scandir(root / prefix) as entries:
                for entry in entries:
                    path = prefix + entry.name
                    if entry.is_dir():
                        if is_tool_folder(path):
                            continue
                        if entry.is_symlink():
                            raise _folder_link(entry, real, root, path)
                        waiting.append(f"{path}/")
                    elif (seen := _stat(entry, real, owns, root, path)) is not None:
                        found[path] = seen
        except OSError as error:
            raise _unreadable(error, error.filename or root) from error
    return dict(sorted(found.items()))


def _followed(root: Path) -> Path:
    """Raises LinkLoop, and BadPlace for any other path that no system call takes."""
    try:
        return resolved(str(root))
    except BadPlace as error:
        if isinstance(cause := error.__cause__, OSError) and cause.errno == errno.ELOOP:
            raise _unreadable(cause, root) from error
        raise


def _real(root: Path) -> Path:
    """Where ``root`` leads; raises UnsafePath for what only looks like a snapshot of huggingface_hub's cache."""
    real = _followed(root)
    if is_moved_snapshot(root, real):
        raise UnsafePath(file=str(root), path=str(real))
    return real


def _folder_link(link: os.DirEntry[str], real: Path, root: Path, path: str) -> UnsafePath:
    to = Path(os.path.realpath(link))
    if to.is_relative_to(real):
        return FolderLink(file=str(root), path=path, to=str(to))
    return UnsafePath(file=str(root), path=path, cure=_OWN_LINK.format("folder"))


def _stat(file: os.DirEntry[str] | Path, real: Path, owns: Owns, root: Path, path: str) -> FileStat | None:
    """The size and time of a regular file; None for a socket, a pipe and the like."""
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise FolderNotFound(path=repr(path), why="name is not UTF-8") from error
    if file.is_symlink():
        to = Path(os.path.realpath(file))
        if not to.is_relative_to(real) and not owns(to):
            raise UnsafePath(file=str(root), path=path, cure=_OWN_LINK.format("file"))
    status = file.stat()
    return FileStat(status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


_KINDS: dict[int | None, type[SourceError]] = {
    errno.ELOOP: LinkLoop,
    errno.ENAMETOOLONG: PathTooLong,
    errno.ENOENT: FolderNotFound,
    errno.ENOTDIR: FolderNotFound,
}


def _unreadable(error: OSError, path: Path | str) -> SourceError:
    if error.errno == errno.ENOENT and os.path.islink(path):  # noqa: PTH114 -- it may be any text
        return BrokenLink(path=str(path), to=os.readlink(path))  # noqa: PTH115
    return _KINDS.get(error.errno, Unreadable)(path=str(path), why=error.strerror or str(error))


class FolderSource:
    """A Source. Its files have no sha256, unless we published them and they are unchanged since."""

    transport = "file"
    # A local folder is its owner's; nothing of it becomes public unasked.
    visibility: Visibility = "private"

    def __init__(
        self, place: Folder, listing: Mapping[str, FileStat], commit: str, sha256: Mapping[str, str] | None = None
    ) -> None:
        self.place = place
        self.folder = place.local.parent if place.local.is_file() else place.local  # a weight file stands for one
        self.pin = Pin(None, place.path, commit)
        self._listing = listing
        known = sha256 or {}
        files = {path: StoredFile(path, seen.size, sha256=known.get(path)) for path, seen in listing.items()}
        self._files = MappingProxyType(files)

    @classmethod
    def open(cls, place: Folder) -> FolderSource:
        """The folder as it is now; raises FolderNotFound, CacheFolder, UnsafePath."""
        root = Path(place.path)
        _followed(root)
        try:
            if root.is_file() and is_weights(root.name):
                return cls._of_file(place, root)
            if root.is_file():
                folder = f"pass the folder instead: {root.parent}"
                raise FolderNotFound(path=str(root), why="it is a file, but not a weight file", cure=folder)
            if not root.exists():
                raise _unreadable(FileNotFoundError(errno.ENOENT, "no such folder"), root)
            if not root.is_dir():
                raise FolderNotFound(path=str(root), why="not a folder")
        except PermissionError as error:  # of a folder above; later Pythons find nothing there
            raise _unreadable(error, root) from error
        if snapshot := snapshot_in(resolved(place.path)):
            raise CacheFolder(path=str(root), snapshot=str(snapshot))
        if snapshot := snapshot_below(resolved(place.path)):
            raise WholeCache(path=str(root), snapshot=str(snapshot))
        listing = list_folder(root)
        return cls(place, listing, digest_of(listing))

    @classmethod
    def _of_file(cls, place: Folder, file: Path) -> FolderSource:
        """A weight file, which stands for a folder with nothing else in it; raises as ``open``, and PartOfCheckpoint.

        Of those beside it, only indexes are read, which may name it. Links lead as far as those of its folder.
        """
        real = _real(file.parent)
        owns = owned_by_cache(real)
        try:
            paths = [file, *sorted(path for path in file.parent.iterdir() if is_index(path.name))]
            seen = {path.name: _stat(path, real, owns, file.parent, path.name) for path in paths}
        except OSError as error:
            raise _unreadable(error, error.filename or file) from error
        listing = {name: status for name, status in seen.items() if status is not None}
        folder = cls(place, listing, digest_of(listing))
        if why := part_by(folder, file.name):
            raise PartOfCheckpoint(path=place.path, why=why, folder=str(file.parent))
        listing = {file.name: listing[file.name]}
        return cls(place, listing, digest_of(listing))

    def files(self) -> Mapping[str, StoredFile]:
        return self._files

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[memoryview]:
        if not 0 <= start <= stop:
            raise ValueError(f"{start} to {stop} is not a range")
        if stop > file.size:
            raise self._changed(f"{file.path} has {file.size:,} bytes, but {stop:,} were requested")
        try:
            descriptor = os.open(self.folder / file.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise ResourceError(what=f"{file.path}: {error.strerror}") from error
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                raise self._changed(f"{file.path}: {error.strerror}") from error
            raise _unreadable(error, self.folder / file.path) from error
        try:
            self._untouched(file, descriptor)
            at = start
            while at < stop:
                try:
                    chunk = os.pread(descriptor, min(CHUNK, stop - at), at)
                except OSError as error:  # of a disk that fails
                    raise _unreadable(error, self.folder / file.path) from error
                if not chunk:
                    raise self._changed(f"{file.path} ends at byte {at}")
                at += len(chunk)
                yield memoryview(chunk)
            self._untouched(file, descriptor)
        finally:
            os.close(descriptor)

    def _untouched(self, file: StoredFile, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if FileStat(status.st_size, status.st_mtime_ns) != self._listing.get(file.path):
            raise self._changed(f"{file.path} was changed")

    def _changed(self, what: str) -> SourceChanged:
        return SourceChanged(place=self.place.path, what=what)
