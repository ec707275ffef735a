"""The step in which a folder's next state takes the place of the last.

The next state is built beside the target, from hard links of what stays and the staged files of what is new, and takes
its place in one step: ``renameat2(RENAME_EXCHANGE)`` where the file system has it, else two renames under a journal
that the next run completes. Beside a target ``x`` lie, while a job works and never after it:

    .x.reshard/<token>/     files that are being written
    .x.reshard/objects/     files that are stored, by sha256, so that another process can go on with them
    .x.reshard.new          the next state, or, after the swap, the last one on its way out
    .x.reshard.old          the last state, where there is no exchange
    .x.reshard.intent       the journal of a swap
    .x.reshard.gone-*       what was kept once, on its way out

One thing stays, until the next commit: ``.x.reshard.last``, the last state, where it held what somebody else put there.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from glob import escape
from pathlib import Path
from stat import S_ISDIR, S_ISLNK
from uuid import uuid4

from reshard.pipeline.errors import BadPlace, ReshardError, TargetConflict
from reshard.pipeline.paths import resolved
from reshard.pipeline.stores.folder.disk import make_folder, remove_if_empty, remove_tree, sync_folder, walk, write_file
from reshard.pipeline.stores.locks import FileLock
from reshard.pipeline.stores.scratch import remove_abandoned


class Swap:
    """The paths beside one target, and the steps that exchange its states."""

    def __init__(self, root: Path, name: Callable[[Path], str | None]) -> None:
        """``name`` says which commit of ours a folder is the result of, in words of its own; None for any other."""
        self.root = root
        self._name = name
        self.staging = root.parent / f".{root.name}.reshard"
        self.new = self.staging.with_name(f"{self.staging.name}.new")
        self._old = self.staging.with_name(f"{self.staging.name}.old")
        self.last = self.staging.with_name(f"{self.staging.name}.last")
        self._aside = self.staging.with_name(f"{self.staging.name}.gone-")
        self._intent = self.staging.with_name(f"{self.staging.name}.intent")
        try:
            resolved(longest := f"{self._aside}{'0' * 8}")
        except BadPlace as error:
            why = f"{error.facts['why']}: the run needs {Path(longest).name} beside it"
            raise BadPlace(value=str(root), why=why, cure="choose a folder with a shorter name or path") from error
        self._claims: dict[str, FileLock] = {}  # by token

    def claim(self, token: str) -> Path:
        """The folder of a run's own files, made and locked: no other run removes it while this one lives."""
        folder = self._token_folder(token)
        if token not in self._claims:
            make_folder(self.staging)
            with self.lock(wait=True):
                make_folder(folder)
                if token not in self._claims:  # else another thread was faster
                    lock = _opened(folder)
                    lock.take(fcntl.LOCK_SH)
                    self._claims[token] = lock
        return folder

    def release(self, token: str) -> None:
        """Remove what ``claim`` made."""
        if (lock := self._claims.pop(token, None)) is not None:
            lock.close()
        remove_tree(self._token_folder(token))

    def _token_folder(self, token: str) -> Path:
        """A folder for this token alone; a token may hold any characters."""
        return self.staging / f"t-{hashlib.sha256(token.encode()).hexdigest()[:32]}"

    def clear_staging(self) -> None:
        """Remove what is staged once a commit stands; of what other living runs have here, only what it published."""
        mine = {self._token_folder(token) for token in self._claims}
        if any(_is_locked(folder) for folder in set(self.staging.glob("t-*")) - mine):
            for path in self._published():
                path.unlink(missing_ok=True)
            return
        for token in list(self._claims):
            self.release(token)
        remove_tree(self.staging)

    def swap(self, name: str, keep: bool, before: str) -> bool:
        """Put the next state, ``name``, in place; with ``keep`` the last one stays beside, as ``last``.

        What was kept before goes once the next state stands. False where the last state's ``fingerprint`` is not
        ``before``, as somebody wrote to it since it was looked at: then it is in its place again.
        """
        if self.root.exists():
            if not self._replace(name, keep, before):
                return False
        else:
            self.put_aside(self.last)  # of a folder that is no more
            self.new.rename(self.root)
            sync_folder(self.root.parent)
        self._remove_aside()
        return True

    def _replace(self, name: str, keep: bool, before: str) -> bool:
        """An exchange, or two renames; the journal says what the next state is, what becomes of the last, and which."""
        write_file(self._intent, f"{'keep' if keep else 'swap'} {name} {before}\n".encode())
        sync_folder(self.root.parent)
        if exchange(self.new, self.root):
            stands = is_as_before(self.new, before) or not exchange(self.new, self.root)
        else:
            self.root.rename(self._old)
            if stands := is_as_before(self._old, before):
                self.new.rename(self.root)
            else:
                self._old.rename(self.root)
        if not stands:
            self._intent.unlink()
        sync_folder(self.root.parent)
        if stands:
            self._settle()
        return stands

    def _settle(self) -> None:
        """Complete what the journal says was begun: the second rename, and what becomes of the last state.

        A journal that was not written to its end is of a swap that never began. What is to go is renamed first: to
        remove a tree takes long, and some files resist.
        """
        journal = self._intent.read_text()
        what, name, before = [*journal.split(), "", "", ""][:3]
        if self._old.exists():  # between two renames, where somebody may have made the folder anew, and empty
            with suppress(OSError):
                self.root.rmdir()
        if not self.root.exists() and self.new.exists():
            self.new.rename(self.root)
            sync_folder(self.root.parent)
        if self._old.exists() and self._name(self.root) != name:
            raise TargetConflict(target=str(self.root), what=f"an interrupted run left its last state in {self._old}")
        # By the next state's name, or by where the last is, if somebody has changed the next since.
        stands = self._name(self.root) == name or is_as_before(self.new, before)
        if journal.endswith("\n") and name and stands:
            replaced = next((folder for folder in (self._old, self.new) if folder.exists()), None)
            # Where somebody wrote to it at the last moment, and nobody lived to put it back, it is kept as well.
            keep = what == "keep" or (bool(before) and replaced is not None and not is_as_before(replaced, before))
            if replaced is not None or not keep:
                self.put_aside(self.last)
            if replaced is not None and keep:
                replaced.rename(self.last)
        self._intent.unlink()
        sync_folder(self.root.parent)

    def put_aside(self, folder: Path) -> None:
        """Out of the way: what is there is removed later, as far as it can be."""
        if folder.exists():
            folder.rename(f"{self._aside}{uuid4().hex[:8]}")

    def _asides(self) -> list[Path]:
        return [*self._aside.parent.glob(f"{escape(self._aside.name)}*")]

    def _remove_aside(self) -> None:
        """Also what a swap left behind."""
        self.put_aside(self.new)
        self.put_aside(self._old)
        for folder in self._asides():
            remove_tree(folder)

    def half_done(self) -> bool:
        """Whether neither state is in its place, as the process that was exchanging them is dead; changes nothing."""
        if self.root.exists() or not self._intent.exists():
            return False
        with self.lock(wait=True):  # a living one needs but a moment
            return self._intent.exists()

    def recover(self) -> None:
        """Complete and tidy up what a killed commit left, unless a living one is at it."""
        begun = self._intent.exists()  # a living committer is at its end then
        if begun or self.new.exists() or self._old.exists() or self._asides() or self._published():
            with self.lock(wait=begun) as locked:
                if locked:
                    self.complete()

    def complete(self) -> None:
        """A swap that was begun goes forward; without its journal, what lies beside the target is removed."""
        if self._intent.exists():
            self._settle()
        self._remove_aside()
        for path in self._published():
            path.unlink(missing_ok=True)
        self.remove_empty_staging()

    def _published(self) -> list[Path]:
        """Staged objects that are files of the target by now."""
        return [path for path, status in self._sealed() if status.st_nlink > 1]

    @contextmanager
    def lock(self, wait: bool) -> Iterator[bool]:
        """One committer at a time. The lock is the parent folder itself, so that no lock file is left behind."""
        self.root.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.root.parent, wait) as locked:
            yield locked

    def staged(self) -> int:
        """Bytes of the stored files that wait for a commit."""
        return sum(status.st_size for _, status in self._sealed())

    def sweep(self) -> None:
        """Remove what abandoned jobs staged."""
        remove_abandoned([*self.staging.glob("objects/*"), *self.staging.glob("t-*/*")])

    def _sealed(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Those of the staged files, but for what another process was faster to remove."""
        for path in self.staging.glob("objects/*"):
            with suppress(FileNotFoundError):
                yield path, path.stat()

    def remove_empty_staging(self) -> None:
        for folder in (self.staging / "objects", self.staging):
            remove_if_empty(folder)


def fingerprint(folder: Path) -> str:
    """Of all that is in a folder, by paths, sizes and times, and of links by what they say. Raises OSError."""
    found = list[tuple[str, str, int, int]]()
    for path, subfolders, names in walk(folder):
        for name in (*subfolders, *names):
            status = (at := Path(path, name)).lstat()
            size, mtime = (0, 0) if S_ISDIR(status.st_mode) else (status.st_size, status.st_mtime_ns)
            said = os.readlink(at) if S_ISLNK(status.st_mode) else ""  # noqa: PTH115 -- a Path would tidy it
            found.append((at.relative_to(folder).as_posix(), said, size, mtime))
    return hashlib.sha256(repr(sorted(found)).encode(errors="surrogateescape")).hexdigest()


def is_as_before(folder: Path, before: str) -> bool:
    """Whether its ``fingerprint`` is that; also False where it cannot be taken, as somebody is at work in it."""
    try:
        return folder.exists() and fingerprint(folder) == before
    except (OSError, ReshardError):
        return False


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


def link_tree(old: Path, new: Path, without: set[str]) -> None:
    """Every folder, link and file of ``old`` in ``new``, as the same files, except the paths ``without``."""
    for folder, subfolders, names in walk(old):
        here = Path(folder).relative_to(old)
        for name in [*subfolders, *names]:
            source, goal = Path(folder, name), new / here / name
            if source.is_symlink():
                if (here / name).as_posix() not in without:
                    goal.symlink_to(source.readlink())
            elif source.is_dir():
                goal.mkdir()
            elif (here / name).as_posix() not in without:
                link_file(source, goal)
    for folder, _, _ in walk(old):
        shutil.copystat(folder, new / Path(folder).relative_to(old))


def link_file(source: Path, goal: Path) -> None:
    """``source`` as ``goal``, too: the same file, or, where none can have two names, a copy that is on the disk."""
    try:
        goal.hardlink_to(source)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS):
            raise
        copy_file(source, goal)


def copy_file(source: Path, goal: Path) -> None:
    """A copy that is on the disk."""
    shutil.copy2(source, goal)
    with goal.open("rb") as file:
        os.fsync(file.fileno())


def _opened(folder: Path) -> FileLock:
    return FileLock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


@contextmanager
def _locked(folder: Path, wait: bool) -> Iterator[bool]:
    """Inside, ``folder`` is locked; False where another has it and we do not wait."""
    with closing(_opened(folder)) as lock:
        locked = False
        with suppress(BlockingIOError):
            lock.take(fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        yield locked


def _is_locked(folder: Path) -> bool:
    with _locked(folder, wait=False) as locked:
        return not locked
