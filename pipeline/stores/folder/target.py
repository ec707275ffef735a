"""A folder as a target: it changes by one swap (swap.py), from one complete state to the next."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from stat import S_ISREG

from reshard.pipeline.errors import FolderNotWritable, ObjectLost, TargetConflict, TargetUnfinished, UnsafePath
from reshard.pipeline.limits import RECORD_MAX
from reshard.pipeline.paths import resolved
from reshard.pipeline.places import Folder
from reshard.pipeline.protocols import Addition, Change, Commit, HeadMoved, Leave, Source, TargetState
from reshard.pipeline.stores.carry import SinkOf
from reshard.pipeline.stores.folder.disk import disk_errors, mounted_in, remove_if_empty, sync_folder, walk, write_file
from reshard.pipeline.stores.folder.sink import FolderBatch
from reshard.pipeline.stores.folder.source import FileStat, FolderSource, list_folder
from reshard.pipeline.stores.folder.swap import Swap, copy_file, fingerprint, link_file, link_tree
from reshard.pipeline.stores.marks import mark
from reshard.pipeline.stores.record import (
    EMPTY,
    PUBLICATIONS,
    RECORD,
    Record,
    RecordedPublication,
    RecordedTarget,
    Remembered,
    digest_of,
)
from reshard.pipeline.stores.scratch import free_at
from reshard.pipeline.tensors import StoredFile

OTHER_NAME = "choose a folder, or a name that does not exist yet"


def open_source(place: Folder, *_: object) -> FolderSource:
    return FolderSource.open(place)


def open_target(place: Folder, *_: object) -> FolderTarget:
    return FolderTarget(place)


class FolderTarget(RecordedTarget):
    """A Target that is a folder, or becomes one with its first commit."""

    transport = "file"

    def __init__(self, place: Folder) -> None:
        self.place = place
        self._root = resolved(place.path)
        self._swap = Swap(self._root, _name)
        self._planned_on: str | None = None  # the last publication when the run was planned, or ""

    @property
    def notes(self) -> tuple[str, ...]:
        last = self._swap.last
        what = f"{last}, kept by an earlier run, will be deleted; to keep it, move it first"
        return (what,) if last.exists() else ()

    def recover(self) -> None:
        with disk_errors(self._root, None):
            self._swap.recover()

    def state(self) -> TargetState:
        with disk_errors(self._root, None):
            if self._swap.half_done():
                raise TargetUnfinished(target=self.place.path)
            exists = self._exists()
            return TargetState(exists, "private", self._now() if exists else None)

    def _exists(self) -> bool:
        if self._root.exists() and not self._root.is_dir():
            raise FolderNotWritable(path=self.place.path, why="it is a file", cure=OTHER_NAME)
        return self._root.exists()

    def leave(self, exists: bool) -> Leave:
        try:
            with disk_errors(self._root, None):
                self._check_writable()
        except FolderNotWritable as error:
            return Leave(False, str(error))
        return Leave(True, "")

    def prepare(self, private: bool) -> str:
        """Creates nothing: the folder appears whole with its first commit. Raises FolderNotWritable."""
        with disk_errors(self._root, None):
            if self._exists():
                self._check_movable()
            self._check_writable()
            self._swap.sweep()
        head = self.head()
        self._planned_on = _name(self._root) or ""
        return head

    def _check_writable(self) -> None:
        existing = next(parent for parent in self._root.parents if parent.exists())
        if not existing.is_dir():
            raise FolderNotWritable(path=str(existing), why="it is a file", cure=OTHER_NAME)
        if not os.access(existing, os.W_OK | os.X_OK):
            raise FolderNotWritable(path=str(existing), why="no permission")

    def _check_movable(self) -> None:
        """Raises FolderNotWritable if a swap would lose something: what is mounted in it, or unreadable."""
        mount = mounted_in(self._root)
        if mount == self._root:
            why, cure = "it is a mount point, which cannot be replaced", "choose a folder inside it"
            raise FolderNotWritable(path=self.place.path, why=why, cure=cure)
        if mount is not None:
            why, cure = f"it contains a mount point, {mount}", "choose another folder, or unmount it first"
            raise FolderNotWritable(path=self.place.path, why=why, cure=cure)
        for _ in walk(self._root):
            pass

    def head(self) -> str:
        self._swap.recover()
        return self._now()

    def _now(self) -> str:
        return digest_of(list_folder(self._root)) if self._root.exists() else EMPTY

    def at(self, commit: str) -> Source:
        """The folder as it is, as we last left it, or what is kept of what was replaced.

        Raises TargetConflict for any other state, which is gone.
        """
        listing = list_folder(self._root) if self._root.exists() else {}
        record = _load(self._root)
        if digest_of(listing) == commit:
            return FolderSource(self.place, listing, commit, record.sha256(listing))
        if record.publications and record.publications[-1].id == commit:
            # An object store that was copied here has tags in its record, which are no times.
            times = {path: (size, at if isinstance(at, int) else 0) for path, (size, at, _) in record.files.items()}
            then = {path: FileStat(size, mtime_ns) for path, (size, mtime_ns) in times.items()}
            return Remembered(FolderSource(self.place, then, commit, record.sha256(then)), record.kept)
        if (kept := self._kept(record)) is not None and kept.pin.commit == commit:
            return kept
        raise TargetConflict(target=self.place.path, what="another run or program wrote to it")

    def history(self, at: str, since: str | None) -> Iterator[Commit]:
        record = _load(self._root)
        kept = self._kept(record) if since is None else None
        return record.history(at, since, kept.pin.commit if kept is not None else None)

    def _kept(self, record: Record) -> FolderSource | None:
        """The state before our last commit, where it is kept.

        It is known by that commit's parent: files that both states share may have been written to since.
        """
        if not record.publications or not self._swap.last.exists():
            return None
        if _name(self._swap.last) != _last_of(record.publications[:-1]):
            return None  # of an earlier commit, while another process is about to replace it
        listing = list_folder(self._swap.last)
        place = Folder(path=str(self._swap.last))
        return FolderSource(place, listing, record.publications[-1].parent, {})

    def original(self) -> FolderSource | None:
        return self._kept(_load(self._root))

    def room(self) -> int:
        return free_at(self._root) + self._swap.staged()

    def sink(self, token: str) -> SinkOf:
        return SinkOf(lambda: FolderBatch(self._swap.staging, partial(self._swap.claim, token)))

    def discard(self, token: str) -> None:
        self._swap.release(token)
        self._swap.recover()
        if self._planned_on not in (None, _name(self._root) or "") and self._swap.staging.exists():
            # A commit left what is staged here to us, who lived, and now to any other run that still does.
            with self._swap.lock(wait=True):
                self._swap.clear_staging()
        self._swap.remove_empty_staging()

    def show(self) -> None:
        """What turned out to be there already does not stay staged."""
        if self._swap.staging.exists():
            with self._swap.lock(wait=True):
                self._swap.clear_staging()

    def holds(self, stored: Sequence[StoredFile]) -> list[StoredFile]:
        return [file for file in stored if not self._object(file)]

    def _object(self, file: StoredFile) -> Path | None:
        path = self._swap.staging / "objects" / (file.sha256 or "")
        return path if path.is_file() and path.stat().st_size == file.size else None

    # -------------------------------------------------------------------------------------------------- commit

    def commit(self, change: Change, parent: str) -> str:
        with self._swap.lock(wait=True), disk_errors(self._root, None):
            self._swap.complete()
            before = fingerprint(self._root) if self._root.exists() else ""
            if self._now() != parent:
                raise HeadMoved(parent)
            commit = self._build(change, parent)
            if not self._swap.swap(_name(self._swap.new) or "", change.takes, before):
                raise HeadMoved(parent)
            self._swap.clear_staging()
            return commit

    def _build(self, change: Change, parent: str) -> str:
        """The next state in ``.new``; returns what it is called."""
        self._swap.put_aside(self._swap.new)
        self._swap.new.mkdir(parents=True)
        replaced = {addition.path for addition in change.additions} | set(change.deletes)
        if self._root.exists():
            self._check_movable()
            link_tree(self._root, self._swap.new, replaced)
        for addition in change.additions:
            self._add(addition)
        for path in change.deletes:  # and the folders that this empties, which exist for their files, as in git
            for folder in list(PurePosixPath(path).parents)[:-1]:
                remove_if_empty(self._swap.new / folder)
        listing = list_folder(self._swap.new)
        commit = digest_of(listing)
        stored = {one.path: one.stored.sha256 or "" for one in change.additions if one.stored is not None}
        content = {one.path: one.content or b"" for one in change.additions if one.stored is None}
        ours = RecordedPublication(commit, parent, change.title, change.message)
        record = _load(self._root).after(ours, mark(change.message), listing, stored, content)
        _save(record, self._swap.new)
        for path, _, _ in os.walk(self._swap.new):
            sync_folder(Path(path))
        return commit

    def _add(self, addition: Addition) -> None:
        path = PurePosixPath(addition.path)
        if path.is_absolute() or ".." in path.parts or path.parts[0] == RECORD:
            raise UnsafePath(file=addition.path, path=addition.path)
        goal = self._swap.new / path
        goal.parent.mkdir(parents=True, exist_ok=True)
        if goal.is_dir() and not goal.is_symlink():  # of files that go, or that never were
            for folder, _, _ in os.walk(goal, topdown=False):
                Path(folder).rmdir()
        if addition.stored is None:
            write_file(goal, addition.content or b"")
            return
        staged = self._object(addition.stored)
        if staged is None:
            raise ObjectLost([addition.stored.sha256], repo=self.place.path, what=addition.path)
        if staged.stat().st_nlink > 1:  # two paths with equal content stay two files
            copy_file(staged, goal)
        else:
            link_file(staged, goal)


def _load(root: Path) -> Record:
    """Raises TargetConflict for what none of us wrote, whatever it is: nothing is followed or waited for."""
    file = root / RECORD / PUBLICATIONS
    try:
        number = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not S_ISREG((status := os.fstat(number)).st_mode):
                raise TargetConflict(target=str(root), what=f"{file} is not a file")
            with open(number, "rb", closefd=False) as opened:
                text = opened.read(min(status.st_size, RECORD_MAX) + 1)  # which takes that much memory at once
        finally:
            os.close(number)
    except FileNotFoundError:
        return Record()
    except OSError as error:
        raise TargetConflict(target=str(root), what=f"{file}: {error.strerror}") from error
    if len(text) > RECORD_MAX:
        raise TargetConflict(target=str(root), what=f"{file} has more than {RECORD_MAX:,} bytes")
    return Record.parse(text, str(root), str(file))


def _save(record: Record, root: Path) -> None:
    file = root / RECORD / PUBLICATIONS
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)  # it may be the last state's own, linked here
    write_file(file, record.text())


def _name(folder: Path) -> str | None:
    """The last publication that the record in ``folder`` names; None without one that can be read."""
    try:
        return _last_of(_load(folder).publications)
    except TargetConflict:
        return None


def _last_of(publications: Sequence[RecordedPublication]) -> str | None:
    """By its number, too: a commit that only takes others' files away may have the id of the one before."""
    return f"{len(publications)}:{publications[-1].id}" if publications else None
