"""A target whose store has no commits: objects below one prefix, which change one by one.

A change is written down whole before the first file changes; whoever publishes next finishes what a crash cut off:

    .reshard/lock.json          one publication at a time, as far as the store can say so; its holder renews it
    .reshard/pending.json       the whole change: from here on it is finished, by this process or by the next
    the files                   weights and all others, then the indexes, then deletions
    .reshard/publications.json  what was published, as a folder keeps it; the change is no longer pending
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol
from uuid import uuid4

from pydantic import ConfigDict, NonNegativeInt, ValidationError

from reshard.pipeline.checkpoint.discover import is_weight_index
from reshard.pipeline.errors import (
    AccessError,
    HubError,
    ObjectLost,
    ReshardError,
    SourceChanged,
    SourceLocked,
    SourceUnfinished,
    TargetConflict,
    TargetLocked,
    TargetUnfinished,
    UnsafePath,
)
from reshard.pipeline.limits import KEPT_MAX, LOCK_AGE, LOCK_MAX, LOCK_RENEW, LOCK_SURE, MESSAGES_MAX
from reshard.pipeline.places import AnyPlace
from reshard.pipeline.protocols import Change, Commit, HeadMoved, Leave, Sink, Source, TargetState, Visibility
from reshard.pipeline.stores.carry import send_own
from reshard.pipeline.stores.marks import is_mark, mark
from reshard.pipeline.stores.record import (
    EMPTY,
    PUBLICATIONS,
    RECORD,
    Listing,
    Record,
    RecordedPublication,
    RecordedTarget,
    Remembered,
    digest_of,
)
from reshard.pipeline.tensors import StoredFile
from reshard.pipeline.text import unsafe_path
from reshard.pipeline.validation import Strict

log = logging.getLogger(__name__)

OWN = f"{RECORD}/"
LOCK, PENDING, PUBLISHED = f"{OWN}lock.json", f"{OWN}pending.json", f"{OWN}{PUBLICATIONS}"


class Objects(Protocol):
    """What the target asks of its store; paths are below the prefix. Raises the HubError and AccessError families."""

    @property
    def place(self) -> AnyPlace: ...

    @property
    def transport(self) -> str: ...

    def look(self) -> Visibility | None:
        """Who may see what is there; None where nothing is."""

    def leave(self, exists: bool) -> Leave: ...

    def prepare(self, private: bool) -> None:
        """Create what is missing, and make sure that we may write."""

    def listed(self) -> Listing:
        """Every object; nothing where nothing is."""

    def read(self, path: str) -> bytes | None:
        """A small object of our own; None where there is none. Raises TargetConflict, HubRefused for a large one."""

    def write(self, path: str, content: bytes) -> None: ...

    def claim(self, path: str, content: bytes) -> bool:
        """``write``, unless there is such an object: False then."""

    def put(self, files: Sequence[StoredFile], check: Callable[[], None] = ...) -> None:
        """Give what a sink stored its place; raises ObjectLost. Doing it again changes nothing.

        ``check`` may end it, with what it raises, before each step, however long that had to wait; so of ``delete``.
        """

    def delete(self, paths: Sequence[str], check: Callable[[], None] = ...) -> None: ...

    def source(self, listing: Listing, commit: str, sha256: Mapping[str, str]) -> Source: ...

    def sink(self, token: str) -> Sink: ...

    def lost(self, stored: Sequence[StoredFile]) -> list[StoredFile]: ...

    def discard(self, token: str) -> None:
        """Free what the sink of ``token`` has not sealed."""

    def clear(self, stored: Sequence[StoredFile]) -> None:
        """Free what has its place now."""


class _Pending(Strict):
    """A change that was begun."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    id: str
    parent: str
    title: str
    message: str
    mark: str | None  # of the machine that began it; who finishes it vouches for nothing
    files: tuple[tuple[str, NonNegativeInt, str, str | None], ...]  # path, bytes, sha256, xet
    deletes: tuple[str, ...]
    texts: dict[str, bytes]  # small files of our own

    @staticmethod
    def parse(text: bytes, target: str) -> _Pending:
        """Raises TargetConflict and UnsafePath for what none of us wrote."""
        try:
            found = _Pending.model_validate_json(text)
        except ValidationError as error:
            raise TargetConflict(target=target, what=f"{PENDING} was changed") from error
        for path in (*(file[0] for file in found.files), *found.deletes):
            if why := unsafe_path(path) or (path.startswith(OWN) and "it is reshard's own"):
                raise UnsafePath(file=target, path=repr(path)[:300], why=why)
        return found

    @property
    def stored(self) -> list[StoredFile]:
        return [StoredFile(path, size, sha256=sha256, xet=xet) for path, size, sha256, xet in self.files]


class LockLost(Exception):
    """Another may have the right to publish by now: it could not be renewed for too long."""


class _Lock:
    """The right to publish, renewed inside ``with`` and then released, unless another has taken it over."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._id = uuid4().hex
        self._renewed = float("-inf")
        self._ended = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name="lock", daemon=True)

    @staticmethod
    def lives(text: bytes) -> bool:
        """Whether the holder of the lock that says ``text`` has renewed it lately."""
        try:
            return abs(time.time() - float(json.loads(text)["time"])) <= LOCK_AGE
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):  # none of us wrote it
            return False

    def _text(self) -> bytes:
        return json.dumps({"id": self._id, "time": round(time.time())}).encode()

    def claim(self) -> bool:
        self._renewed = time.monotonic()
        return self._objects.claim(LOCK, self._text())

    def check(self) -> None:
        """Raises LockLost well before others may take it for a dead process's; asks nobody."""
        if time.monotonic() - self._renewed > LOCK_SURE:
            raise LockLost

    def is_ours(self) -> bool:
        return self._id.encode() in (self._objects.read(LOCK) or b"")

    def _renew(self) -> None:
        while not self._ended.wait(LOCK_RENEW):
            try:
                began = time.monotonic()
                if not self.is_ours():
                    return
                self._objects.write(LOCK, self._text())
                self._renewed = began
            except ReshardError as error:  # the publication goes on, and notices where the lock is lost
                log.warning("cannot renew %s: %s", LOCK, error)

    def __enter__(self) -> _Lock:
        self._renewing.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._renewing.join()
        if self.is_ours():
            self._objects.delete([LOCK])


def refuse_unfinished(whole: Source) -> None:
    """Refuse a folder, listed with what is reshard's own, in which files change one by one, or did until a crash.

    Also one below it. Raises SourceLocked and SourceUnfinished.
    """
    files = whole.files()
    for path in files:
        if path != PENDING and not path.endswith(f"/{PENDING}"):
            continue
        lock = files.get(path.removesuffix(PENDING) + LOCK)
        try:
            held = lock is not None and _Lock.lives(b"".join(whole.read(lock, 0, min(lock.size, LOCK_MAX))))
        except SourceChanged:  # its holder has just renewed it, or is done
            held = True
        folder = f"{whole.place}/{path.removesuffix(PENDING)}".rstrip("/")
        raise (SourceLocked if held else SourceUnfinished)(place=folder)


@contextmanager
def _tidying() -> Iterator[None]:
    """What fails inside is no failure of a publication; what stays staged goes with a later run."""
    try:
        yield
    except (HubError, AccessError) as error:
        log.warning("cannot remove staged files: %s", error)


class ObjectTarget(RecordedTarget):
    """A Target of one prefix."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.place = objects.place

    @property
    def transport(self) -> str:
        return self.objects.transport

    @property
    def notes(self) -> tuple[str, ...]:
        how = "its files change one after the other, the index last, and a publication cannot be rolled back"
        return (f"{self.place} has no commits: {how}",)

    def state(self) -> TargetState:
        visibility = self.objects.look()
        if visibility is None:
            return TargetState(False, "private", None)
        self._refuse_unfinished()
        head = digest_of(self._listed())
        return TargetState(True, visibility, None if head == EMPTY else head)

    def leave(self, exists: bool) -> Leave:
        return self.objects.leave(exists)

    def prepare(self, private: bool) -> str:
        self.objects.prepare(private)
        return self.head()

    def head(self) -> str:
        self._recover()
        return digest_of(self._listed())

    def _listed(self) -> Listing:
        return {path: seen for path, seen in self.objects.listed().items() if not path.startswith(OWN)}

    def _record(self) -> Record:
        text = self.objects.read(PUBLISHED)
        return Record() if text is None else Record.parse(text, str(self.place), PUBLISHED)

    def at(self, commit: str) -> Source:
        """The target as it is, or as we last left it; raises TargetConflict for any other state, which is gone."""
        listing, record = self._listed(), self._record()
        if digest_of(listing) == commit:
            return self.objects.source(listing, commit, record.sha256(listing))
        if record.publications and record.publications[-1].id == commit:
            # A folder that was copied here has times in its record, which are no tags of this store's.
            then = {path: (size, str(seen)) for path, (size, seen, _) in record.files.items()}
            return Remembered(self.objects.source(then, commit, record.sha256(then)), record.kept)
        raise TargetConflict(target=str(self.place), what="another run or program wrote to it")

    def history(self, at: str, since: str | None) -> Iterator[Commit]:
        return self._record().history(at, since)

    def original(self) -> None:
        return None

    def room(self) -> None:
        return None

    def sink(self, token: str) -> Sink:
        return self.objects.sink(token)

    def discard(self, token: str) -> None:
        with _tidying():
            self.objects.discard(token)

    def holds(self, stored: Sequence[StoredFile]) -> list[StoredFile]:
        return self.objects.lost(stored)

    # -------------------------------------------------------------------------------------------------- commit

    def commit(self, change: Change, parent: str) -> str:
        """What interrupts it after the change is pending leaves that to the next who looks at the target."""
        id_ = uuid4().hex
        own = {one.path: one.content or b"" for one in change.additions if one.stored is None}
        stored = [replace(one.stored, path=one.path) for one in change.additions if one.stored is not None]
        if lost := self.holds(stored):
            raise ObjectLost([file.sha256 for file in lost], repo=str(self.place), what=lost[0].path)
        stored += send_own(self.sink(id_).batch([]), own)
        pending = _Pending(
            id=id_,
            parent=parent,
            title=change.title,
            message=change.message,
            mark=mark(change.message),
            files=tuple((file.path, file.size, file.sha256 or "", file.xet) for file in stored),
            deletes=tuple(change.deletes),
            texts={path: data for path, data in own.items() if len(data) <= KEPT_MAX},
        )
        lock = _Lock(self.objects)
        if not lock.claim():
            self._recover()
            self._free()
            raise HeadMoved(parent)
        with lock:
            if self._pending() is not None or digest_of(self._listed()) != parent:
                raise HeadMoved(parent)
            self.objects.write(PENDING, pending.model_dump_json().encode())
            made = self._finish(pending, lock)
        if made is None:
            raise HeadMoved(parent)  # where it is found, once another has finished it
        self.show()
        return made

    def show(self) -> None:
        """Nothing that has its place stays staged: what was copied for the change, or in vain by an equal run."""
        with _tidying():
            placed = [StoredFile(path, size, sha256=digest) for path, (size, _, digest) in self._record().files.items()]
            self.objects.clear(placed)

    def _finish(self, pending: _Pending, lock: _Lock) -> str | None:
        """The commit; None where another has taken over the lock, and may have begun the next.

        Every step may be done twice. Raises ObjectLost while it is pending.
        """
        files = pending.stored
        indexes = [file for file in files if is_weight_index(file.path)]
        try:
            for part in ([file for file in files if file not in indexes], indexes):
                try:
                    self.objects.put(part, lock.check)
                except ObjectLost:
                    if lock.is_ours():
                        raise
                if not lock.is_ours():
                    return None
            self.objects.delete(pending.deletes, lock.check)
        except LockLost:  # after a wait that the store asked for, as long as others wait for a dead process
            return None
        listing, record = self._listed(), self._record()
        commit = digest_of(listing)
        last = record.publications[-1] if record.publications else None
        if last is None or (last.id, last.parent) != (commit, pending.parent):
            ours = RecordedPublication(commit, pending.parent, pending.title, pending.message)
            sha256 = {file.path: file.sha256 or "" for file in files if file.path not in pending.texts}
            made = pending.mark if is_mark(pending.mark) else None
            self.objects.write(PUBLISHED, record.after(ours, made, listing, sha256, pending.texts, MESSAGES_MAX).text())
        if not lock.is_ours():
            return None
        self.objects.delete([PENDING])
        return commit

    def _pending(self) -> _Pending | None:
        text = self.objects.read(PENDING)
        return None if text is None else _Pending.parse(text, str(self.place))

    def _refuse_unfinished(self) -> None:
        """Whoever only looks leaves it to those who write."""
        if self._pending() is None:
            return
        if self._is_locked():
            raise TargetLocked(**self._held)
        if self._pending() is not None:  # its holder may have ended well just now
            raise TargetUnfinished(target=str(self.place))

    def recover(self) -> None:
        if self.objects.look() is not None:  # as the first look does, which says soon and rightly what is in its way
            self._recover()

    def _recover(self) -> None:
        """Finish what a dead process began; what has lost an object is given up, as others have written there since.

        Raises TargetLocked while the process that began it lives: to join in would change what it is about to record.
        """
        if self._pending() is None:
            return
        lock, held = _Lock(self.objects), TargetLocked(**self._held)
        if not (self._free() and lock.claim()):
            raise held
        with lock:
            pending = self._pending()
            if pending is None:  # its owner has just finished it
                return
            try:
                if self._finish(pending, lock) is None:
                    raise held
            except ObjectLost as error:
                log.warning("gave up an interrupted publication: %s", error)
                self.objects.delete([PENDING])
                return
        self.show()

    @property
    def _held(self) -> dict[str, object]:
        return {"target": str(self.place), "age": round(LOCK_AGE)}

    def _is_locked(self) -> bool:
        text = self.objects.read(LOCK)
        return text is not None and _Lock.lives(text)

    def _free(self) -> bool:
        """Break the lock of a dead process; False where its holder lives."""
        if self._is_locked():
            return False
        self.objects.delete([LOCK])
        return True
