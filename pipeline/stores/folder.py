"""A folder as a source, and as a target that changes by one swap.

A target's new state is built beside it, from hard links of what stays and the staged files of what is new, and takes
its place in one step: ``renameat2(RENAME_EXCHANGE)`` where the file system has it, else two renames under a journal
that the next run completes. Beside a target ``x`` lie, while a job works and never after it:

    .x.reshard/<token>/     files that somebody is writing
    .x.reshard/objects/     files that are sealed, by sha256, so that another process can go on with them
    .x.reshard.new          the next state, or, after the swap, the last one on its way out
    .x.reshard.old, .x.reshard.intent    the last state and the journal, where there is no exchange

``.reshard/`` inside the target records our own publications. It is not among its files.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import IO, Any, NamedTuple

from xxhash import xxh3_128

from reshard.pipeline.checkpoint.tool_files import is_tool_folder
from reshard.pipeline.errors import (
    DiskFull,
    FolderNotFound,
    FolderNotWritable,
    ObjectLost,
    ReshardError,
    SourceChanged,
    SourceCorrupt,
    TargetConflict,
    UnsafePath,
)
from reshard.pipeline.limits import CHUNK, KEPT_MAX, STAGING_AGE
from reshard.pipeline.places import Folder
from reshard.pipeline.protocols import (
    Addition,
    Change,
    Commit,
    HeadMoved,
    HistoryRewritten,
    Source,
    TargetState,
    Traffic,
    Visibility,
)
from reshard.pipeline.request import key_of
from reshard.pipeline.stores.scratch import FULL
from reshard.pipeline.tensors import Pin, StoredFile, git_blob

log = logging.getLogger(__name__)

RECORD = ".reshard"


class Seen(NamedTuple):
    """What tells whether a file was touched."""

    size: int  # bytes
    mtime_ns: int


def list_folder(root: Path) -> dict[str, Seen]:
    """Every file below ``root`` by its POSIX path, sorted. Links to files are followed as far as the repository goes.

    A snapshot of the huggingface_hub cache is made of links to its ``blobs`` folder, which belong to it. Raises
    FolderNotFound, and UnsafePath for any other link out of the folder and for links to folders.
    """
    real = root.resolve()
    homes = [real]
    if real.parent.name == "snapshots":
        homes.append(real.parent.parent / "blobs")
    found: dict[str, Seen] = {}

    def failed(error: OSError) -> None:
        raise FolderNotFound(path=str(error.filename or root), why=error.strerror or str(error)) from error

    for folder, subfolders, names in os.walk(root, onerror=failed):
        prefix = Path(folder).relative_to(root).as_posix()
        prefix = "" if prefix == "." else f"{prefix}/"
        subfolders[:] = [name for name in subfolders if not is_tool_folder(prefix + name)]
        for name in subfolders:
            if Path(folder, name).is_symlink():
                raise UnsafePath(file=str(root), path=f"{prefix}{name}")
        for name in names:
            seen = _look(Path(folder, name), homes, root, prefix + name)
            if seen is not None:
                found[prefix + name] = seen
    return dict(sorted(found.items()))


def _look(file: Path, homes: Sequence[Path], root: Path, path: str) -> Seen | None:
    """A regular file's size and time; None for what is no file at all (a socket, a pipe)."""
    try:
        path.encode()
        if file.is_symlink() and not any(file.resolve().is_relative_to(home) for home in homes):
            raise UnsafePath(file=str(root), path=path)
        status = file.stat()
    except UnicodeEncodeError as error:
        raise FolderNotFound(path=repr(path), why="its name is no UTF-8") from error
    except OSError as error:
        raise FolderNotFound(path=str(file), why=error.strerror or str(error)) from error
    return Seen(status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def digest_of(listing: Mapping[str, Seen]) -> str:
    """What a folder's state is called: a digest of its files' paths, sizes and times."""
    return key_of([[path, *seen] for path, seen in listing.items()])


EMPTY = digest_of({})  # the state of a folder that is not there


# --------------------------------------------------------------------------------------------------------- source


class FolderSource:
    """A Source. Its files have no sha256, unless they were published by us and nobody touched them since."""

    transport = "file"
    # A local folder is its owner's; nothing of it becomes public unasked.
    visibility: Visibility = "private"

    def __init__(
        self, place: Folder, listing: Mapping[str, Seen], commit: str, sha256: Mapping[str, str] | None = None
    ) -> None:
        self.place = place
        self.pin = Pin(None, place.path, commit)
        self._listing = listing
        known = sha256 or {}
        files = {path: StoredFile(path, seen.size, sha256=known.get(path)) for path, seen in listing.items()}
        self._files = MappingProxyType(files)

    @classmethod
    def open(cls, place: Folder) -> FolderSource:
        """The folder as it is now; raises FolderNotFound, UnsafePath."""
        root = Path(place.path)
        _require_folder(root)
        listing = list_folder(root)
        return cls(place, listing, digest_of(listing))

    def files(self) -> Mapping[str, StoredFile]:
        return self._files

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[memoryview]:
        if not 0 <= start <= stop:
            raise ValueError(f"{start} to {stop} is no range")
        if stop > file.size:
            raise self._changed(f"{file.path} is {file.size} bytes long, and {stop} are asked for")
        try:
            descriptor = os.open(Path(self.place.path, file.path), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._changed(f"{file.path}: {error.strerror}") from error
        try:
            self._untouched(file, descriptor)
            at = start
            while at < stop:
                chunk = os.pread(descriptor, min(CHUNK, stop - at), at)
                if not chunk:
                    raise self._changed(f"{file.path} ends at byte {at}")
                at += len(chunk)
                yield memoryview(chunk)
            self._untouched(file, descriptor)
        finally:
            os.close(descriptor)

    def _untouched(self, file: StoredFile, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if Seen(status.st_size, status.st_mtime_ns) != self._listing.get(file.path):
            raise self._changed(f"{file.path} was written to")

    def _changed(self, what: str) -> SourceChanged:
        return SourceChanged(place=self.place.path, what=what)


def _require_folder(root: Path) -> None:
    if not root.exists():
        raise FolderNotFound(path=str(root), why="there is nothing")
    if not root.is_dir():
        raise FolderNotFound(path=str(root), why="it is a file")


# ----------------------------------------------------------------------------------------------------------- sink


class FolderSink:
    """A Sink beside the target: files named by its token until they are sealed, then by their sha256."""

    transport = "file"

    def __init__(self, staging: Path, token: str) -> None:
        self._staging = staging
        self._token = token

    def batch(self, reads: Sequence[StoredFile], source: Source | None = None) -> FolderBatch:
        return FolderBatch(self._staging, _token_folder(self._staging, self._token))


@dataclass
class _Staged:
    """A file on its way; ``sha256`` is empty until it is complete."""

    path: str
    size: int
    temporary: Path
    file: IO[bytes]
    sha256: str = ""


class FolderBatch:
    def __init__(self, staging: Path, mine: Path) -> None:
        self._objects = staging / "objects"
        self._mine = mine
        self._staged: list[_Staged] = []
        self._number = 0
        self.traffic = Traffic()

    def open(self, path: str, size: int) -> FolderWriter:
        with _disk_errors(self._mine, size):
            _make(self._mine)
            free = shutil.disk_usage(self._mine).free
            if free < size:
                raise DiskFull(path=str(self._mine), needed=size, free=free)
            self._number += 1
            temporary = self._mine / f"{os.getpid()}-{id(self)}-{self._number}"
            staged = _Staged(path, size, temporary, temporary.open("xb", buffering=0))
        self._staged.append(staged)
        return FolderWriter(staged, self._forget)

    def seal(self) -> list[StoredFile]:
        """Each file is on the disk, and then under its sha256, before it is answered for."""
        sealed = []
        for staged in self._staged:
            with _disk_errors(staged.temporary, staged.size):
                os.fsync(staged.file.fileno())
                staged.file.close()
                self._objects.mkdir(exist_ok=True)
                staged.temporary.replace(self._objects / staged.sha256)
            sealed.append(StoredFile(staged.path, staged.size, sha256=staged.sha256))
        if sealed:
            _sync_folder(self._objects)
        self._staged.clear()
        self.traffic = Traffic(uploaded=sum(file.size for file in sealed))
        return sealed

    def abort(self) -> None:
        for staged in list(self._staged):
            self._forget(staged)

    def _forget(self, staged: _Staged) -> None:
        staged.file.close()
        staged.temporary.unlink(missing_ok=True)
        self._staged.remove(staged)


class FolderWriter:
    """Writes one file and takes the one sha256 that its bytes ever get."""

    def __init__(self, staged: _Staged, forget: Callable[[_Staged], None]) -> None:
        self._staged = staged
        self._forget = forget
        self._sha256 = hashlib.sha256()
        self._handed = xxh3_128()
        self._written = 0

    def write(self, view: memoryview) -> None:
        self._sha256.update(view)
        self._handed.update(view)
        self._written += len(view)
        with _disk_errors(self._staged.temporary, self._staged.size):
            while view:
                view = view[self._staged.file.write(view) :]

    def finish(self) -> str:
        if self._written != self._staged.size:
            raise ReshardError(what=f"{self._staged.path}: {self._written} of {self._staged.size} bytes were written")
        self._staged.sha256 = self._sha256.hexdigest()
        return self._handed.hexdigest()

    def abort(self) -> None:
        self._forget(self._staged)


# --------------------------------------------------------------------------------------------------------- record


@dataclass(frozen=True, slots=True)
class _Publication:
    id: str
    parent: str
    title: str
    message: str


@dataclass
class _Record:
    """Our publications, oldest first, and what the last of them left in the folder."""

    publications: list[_Publication] = field(default_factory=list)
    files: dict[str, tuple[int, int, str]] = field(default_factory=dict)  # path: size, mtime_ns, sha256
    kept: dict[str, str] = field(default_factory=dict)  # base64 of small files, to tell an owner's edit later

    @staticmethod
    def load(root: Path) -> _Record:
        file = root / RECORD / "publications.json"
        try:
            data: dict[str, Any] = json.loads(file.read_text())
            return _Record(
                [_Publication(**item) for item in data["publications"]],
                {path: (size, mtime_ns, sha256) for path, (size, mtime_ns, sha256) in data["files"].items()},
                data["kept"],
            )
        except FileNotFoundError:
            return _Record()
        except (ValueError, KeyError, TypeError) as error:
            raise TargetConflict(target=str(root), what=f"{file} is not as we wrote it") from error

    def save(self, root: Path) -> None:
        folder = root / RECORD
        folder.mkdir(exist_ok=True)
        _write(folder / "publications.json", json.dumps(asdict(self)).encode())

    def sha256(self, listing: Mapping[str, Seen]) -> dict[str, str]:
        """The sha256 of those of our files that nobody touched."""
        return {
            path: sha256
            for path, (size, mtime_ns, sha256) in self.files.items()
            if listing.get(path) == Seen(size, mtime_ns)
        }


class _LastPublication(FolderSource):
    """What we published last, in a folder that somebody changed since: listed whole, read as far as it is there."""

    def __init__(self, place: Folder, record: _Record) -> None:
        listing = {path: Seen(size, mtime_ns) for path, (size, mtime_ns, _) in record.files.items()}
        sha256 = {path: entry[2] for path, entry in record.files.items()}
        super().__init__(place, listing, record.publications[-1].id, sha256)
        self._kept = record.kept

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[memoryview]:
        kept = self._kept.get(file.path)
        if kept is None:
            return super().read(file, start, stop)
        return iter([memoryview(base64.b64decode(kept))[start:stop]])


# --------------------------------------------------------------------------------------------------------- target


class FolderTarget:
    """A Target that is a folder, or becomes one with its first commit."""

    branch = ""
    transport = "file"

    def __init__(self, place: Folder) -> None:
        self.place = place
        self._root = Path(place.path).resolve()
        beside = self._root.parent / f".{self._root.name}.reshard"
        self._staging = beside
        self._new = beside.with_name(f"{beside.name}.new")
        self._old = beside.with_name(f"{beside.name}.old")
        self._intent = beside.with_name(f"{beside.name}.intent")

    def state(self) -> TargetState:
        self._recover()
        if not self._root.exists():
            return TargetState(False, "private", None)
        return TargetState(True, "private", self._now())

    def prepare(self, private: bool) -> str:
        """Creates nothing: the folder appears whole with its first commit. Raises FolderNotWritable."""
        if self._root.exists() and not self._root.is_dir():
            raise FolderNotWritable(path=self.place.path, why="it is a file")
        if self._root.is_mount():
            raise FolderNotWritable(path=self.place.path, why="it is a mount point, which cannot be swapped")
        existing = next(parent for parent in self._root.parents if parent.exists())
        if not os.access(existing, os.W_OK | os.X_OK):
            raise FolderNotWritable(path=str(existing), why="no permission")
        self._sweep()
        return self.head()

    def request(self, digest: str, base: str, title: str, message: str) -> FolderTarget:
        return self

    def head(self) -> str:
        self._recover()
        return self._now()

    def _now(self) -> str:
        return digest_of(list_folder(self._root)) if self._root.exists() else EMPTY

    def at(self, commit: str) -> Source:
        """The folder as it is, or as we last left it; raises TargetConflict for any other state, which is gone."""
        listing = list_folder(self._root) if self._root.exists() else {}
        record = _Record.load(self._root)
        if digest_of(listing) == commit:
            return FolderSource(self.place, listing, commit, record.sha256(listing))
        if record.publications and record.publications[-1].id == commit:
            return _LastPublication(self.place, record)
        raise TargetConflict(target=self.place.path, what="somebody wrote to it")

    def history(self, at: str, since: str | None) -> Iterator[Commit]:
        """Our publications; whatever lies between them and did not come from us is one commit of nobody's."""
        publications = _Record.load(self._root).publications
        known = [ours.id for ours in publications]
        reached = at
        for ours in reversed(publications[: known.index(at) + 1] if at in known else publications):
            if reached == since:
                return
            if ours.id != reached:
                yield Commit(reached, "changed by somebody else", "", "")
                if ours.id == since:
                    return
            yield Commit(ours.id, ours.title, ours.message, "reshard")
            reached = ours.parent
        if since is not None and reached != since:
            raise HistoryRewritten(since)

    def sink(self, token: str) -> FolderSink:
        return FolderSink(self._staging, token)

    def discard(self, token: str) -> None:
        _remove(_token_folder(self._staging, token))
        self._recover()
        self._remove_empty_staging()

    def _remove_empty_staging(self) -> None:
        for folder in (self._staging / "objects", self._staging):
            _remove_if_empty(folder)

    def holds(self, stored: Sequence[StoredFile]) -> list[StoredFile]:
        return [file for file in stored if not self._object(file)]

    def _object(self, file: StoredFile) -> Path | None:
        path = self._staging / "objects" / (file.sha256 or "")
        return path if path.is_file() and path.stat().st_size == file.size else None

    def carry(self, files: Sequence[StoredFile], source: Source, token: str) -> list[Addition]:
        """Copies, never links: a file that is later edited in place must not change in two folders."""
        batch = self.sink(token).batch(files)
        try:
            for file in files:
                writer = batch.open(file.path, file.size)
                blob = git_blob(file.size)
                for view in source.read(file, 0, file.size):
                    blob.update(view)
                    writer.write(view)
                writer.finish()
                if file.oid and blob.hexdigest() != file.oid:
                    raise SourceCorrupt(
                        file=file.path, place=str(source.place), expected=file.oid, actual=blob.hexdigest()
                    )
            sealed = batch.seal()
        finally:
            batch.abort()
        for file, stored in zip(files, sealed, strict=True):
            if file.sha256 and file.sha256 != stored.sha256:
                raise SourceCorrupt(file=file.path, place=str(source.place), expected=file.sha256, actual=stored.sha256)
        return [Addition(stored.path, stored=stored) for stored in sealed]

    # -------------------------------------------------------------------------------------------------- commit

    def commit(self, change: Change, parent: str) -> str:
        with self._lock(wait=True), _disk_errors(self._root, 0):
            self._complete()
            if self._now() != parent:
                raise HeadMoved(parent)
            commit = self._build(change, parent)
            self._swap()
            _remove(self._staging)
            return commit

    def _build(self, change: Change, parent: str) -> str:
        """The next state in ``.new``; returns what it is called."""
        _remove(self._new)
        self._new.mkdir(parents=True)
        replaced = {addition.path for addition in change.additions} | set(change.deletes)
        if self._root.exists():
            _link_tree(self._root, self._new, replaced)
        for addition in change.additions:
            self._add(addition)
        for path in change.deletes:
            _remove_emptied(self._new, PurePosixPath(path))
        listing = list_folder(self._new)
        commit = digest_of(listing)
        self._updated_record(change, parent, commit, listing).save(self._new)
        for folder, _, _ in os.walk(self._new):
            _sync_folder(Path(folder))
        return commit

    def _add(self, addition: Addition) -> None:
        path = PurePosixPath(addition.path)
        if path.is_absolute() or ".." in path.parts or path.parts[0] == RECORD:
            raise UnsafePath(file=addition.path, path=addition.path)
        goal = self._new / path
        goal.parent.mkdir(parents=True, exist_ok=True)
        if addition.stored is None:
            _write(goal, addition.content or b"")
            return
        staged = self._object(addition.stored)
        if staged is None:
            lost = [addition.stored.sha256]
            raise ObjectLost(repo=self.place.path, what=addition.path, lost=lost)
        if staged.stat().st_nlink > 1:  # two paths with equal content stay two files
            shutil.copyfile(staged, goal)
        else:
            goal.hardlink_to(staged)

    def _updated_record(self, change: Change, parent: str, commit: str, listing: Mapping[str, Seen]) -> _Record:
        old = _Record.load(self._root)
        sha256 = old.sha256(listing)
        kept = {path: content for path, content in old.kept.items() if path in sha256}
        for addition in change.additions:
            if addition.stored is not None:
                sha256[addition.path] = addition.stored.sha256 or ""
                kept.pop(addition.path, None)
            else:
                content = addition.content or b""
                sha256[addition.path] = hashlib.sha256(content).hexdigest()
                if len(content) <= KEPT_MAX:
                    kept[addition.path] = base64.b64encode(content).decode()
        files = {path: (*listing[path], digest) for path, digest in sha256.items() if path in listing}
        ours = _Publication(commit, parent, change.title, change.message)
        return _Record([*old.publications, ours], files, kept)

    # ---------------------------------------------------------------------------------------------------- swap

    def _swap(self) -> None:
        if not self._root.exists():
            self._new.rename(self._root)
        elif not exchange(self._new, self._root):
            self._replace()
        _sync_folder(self._root.parent)
        _remove(self._new)

    def _replace(self) -> None:
        """Two renames; the journal says that the second belongs to the first."""
        _write(self._intent, b"swap\n")
        _sync_folder(self._root.parent)
        self._root.rename(self._old)
        self._new.rename(self._root)
        _sync_folder(self._root.parent)
        _remove(self._old)
        self._intent.unlink()

    def _recover(self) -> None:
        """Complete and tidy up what a killed commit left, unless a living one is at it."""
        if self._intent.exists() or self._new.exists() or self._published():
            with self._lock(wait=False) as locked:
                if locked:
                    self._complete()

    def _complete(self) -> None:
        """A swap that was begun goes forward; without its journal, what lies beside the target is of no use."""
        if self._intent.exists():
            if not self._root.exists() and self._new.exists():
                self._new.rename(self._root)
                _sync_folder(self._root.parent)
            _remove(self._old)
            self._intent.unlink()
        _remove(self._new)
        for path in self._published():
            path.unlink()
        self._remove_empty_staging()

    def _published(self) -> list[Path]:
        """Staged objects that are files of the target by now."""
        return [path for path in self._staging.glob("objects/*") if _links(path) > 1]

    @contextmanager
    def _lock(self, wait: bool) -> Iterator[bool]:
        """One committer at a time. The lock is the parent folder itself, so that no lock file is left behind."""
        self._root.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._root.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield _flock(descriptor, wait)
        finally:
            os.close(descriptor)

    def _sweep(self) -> None:
        """Remove what jobs that nobody went on with left in the staging folder."""
        for path in (*self._staging.glob("objects/*"), *self._staging.glob("t-*/*")):
            try:
                if time.time() - path.stat().st_mtime > STAGING_AGE:
                    path.unlink()
            except FileNotFoundError:
                continue  # another process was faster


def exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step; False where the kernel or the file system cannot (renameat2(2))."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    at_cwd, rename_exchange = -100, 2  # linux/fcntl.h, linux/fs.h
    if renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), rename_exchange) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


# ---------------------------------------------------------------------------------------------------------- disk


def _token_folder(staging: Path, token: str) -> Path:
    """A folder that no other token has, whatever characters it is made of."""
    return staging / f"t-{hashlib.sha256(token.encode()).hexdigest()[:32]}"


def _link_tree(old: Path, new: Path, without: set[str]) -> None:
    """Every folder, link and file of ``old`` in ``new``, as the same files, except the paths ``without``."""
    for folder, subfolders, names in os.walk(old):
        here = Path(folder).relative_to(old)
        for name in [*subfolders, *names]:
            source, goal = Path(folder, name), new / here / name
            if source.is_symlink():
                if (here / name).as_posix() not in without:
                    goal.symlink_to(source.readlink())
            elif source.is_dir():
                goal.mkdir()
            elif (here / name).as_posix() not in without:
                _link(source, goal)
    for folder, _, _ in os.walk(old):
        shutil.copystat(folder, new / Path(folder).relative_to(old))


def _link(source: Path, goal: Path) -> None:
    try:
        goal.hardlink_to(source)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copy2(source, goal)  # a file system without hard links


def _flock(descriptor: int, wait: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _links(file: Path) -> int:
    try:
        return file.stat().st_nlink
    except FileNotFoundError:
        return 0  # another process was faster


def _make(folder: Path) -> None:
    """Raises FolderNotWritable where one cannot be made, as in /proc, unless the disk is full."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise FolderNotWritable(path=error.filename or str(folder), why=error.strerror or str(error)) from error


def _write(file: Path, content: bytes) -> None:
    with file.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Remove a tree; what cannot be removed is logged, because by now the commit stands or never will."""

    def failed(_function: object, path: str, info: Any) -> None:
        if not isinstance(info[1], FileNotFoundError):
            log.warning("cannot remove %s: %s", path, info[1])

    shutil.rmtree(folder, onerror=failed)


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
            raise


def _remove_emptied(root: Path, deleted: PurePosixPath) -> None:
    """Folders exist for their files, as in git: those that a deletion emptied go with it."""
    for parent in list(deleted.parents)[:-1]:
        _remove_if_empty(root / parent)


@contextmanager
def _disk_errors(path: Path, needed: int) -> Iterator[None]:
    """A full disk and a forbidden folder in our own words."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            existing = next(folder for folder in (path, *path.parents) if folder.exists())
            free = shutil.disk_usage(existing).free
            raise DiskFull(path=str(path), needed=needed, free=free) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EBUSY):
            raise FolderNotWritable(path=error.filename or str(path), why=error.strerror or str(error)) from error
        raise
