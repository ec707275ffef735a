"""Object stores as `objects.py` writes to them: files are staged below ``.reshard/``, and copied by the store itself.

.reshard/data/TOKEN/N                        the bytes of a file
.reshard/objects/SHA256/SIZE/TOKEN/N         an empty object that says that they are complete
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from uuid import uuid4

from xxhash import xxh3_128

from reshard.pipeline.errors import (
    BucketNotFound,
    BucketReadOnly,
    BucketRefused,
    NoConditionalWrites,
    NoTargetBucket,
    ObjectLost,
    ReshardError,
    SourceChanged,
    TargetConflict,
)
from reshard.pipeline.limits import (
    ANSWER_MAX,
    ATTEMPTS,
    PART_MIN,
    PARTS_MAX,
    STAGING_AGE,
    STORE_COPIES,
    STORE_COPY_MAX,
    WRITE_TIMEOUT,
)
from reshard.pipeline.places import Bucket
from reshard.pipeline.protocols import Leave, Source, Traffic, Visibility
from reshard.pipeline.request import Options
from reshard.pipeline.stores.bucket import BucketSource, meaning, opened, panics_refused, told, unreachable
from reshard.pipeline.stores.carry import SinkOf, check_written
from reshard.pipeline.stores.connect import Context
from reshard.pipeline.stores.lane import Lane
from reshard.pipeline.stores.objects import OWN, ObjectTarget
from reshard.pipeline.stores.pace import RateLimiter
from reshard.pipeline.stores.record import Listing
from reshard.pipeline.tensors import StoredFile

log = logging.getLogger(__name__)

DATA, SEALED = f"{OWN}data/", f"{OWN}objects/"
_SEALED_PATH = re.compile(f"{re.escape(SEALED)}([0-9a-f]{{64}})/([0-9]{{1,19}})/(.+)")  # sha256, bytes, name


def open_source(place: Bucket, context: Context, *_: object) -> BucketSource:
    return BucketSource.open(place, context.limiters(place.url))


def open_target(place: Bucket, options: Options, context: Context) -> ObjectTarget:
    return ObjectTarget(StoreObjects(place, context.limiters(place.url)))


class StoreObjects:
    """One folder. Its store must be able to write an object only where there is none, which ``prepare`` tries."""

    transport = "http"

    def __init__(self, place: Bucket, limiter: RateLimiter) -> None:
        self.place = place
        self._limiter = limiter
        self._obstore, self._store = opened(place, WRITE_TIMEOUT, ATTEMPTS)
        self._reader = BucketSource(place, limiter)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Inside, what obstore raises is what it means that the store cannot be written."""
        try:
            with panics_refused(self.place):
                yield
        except (self._obstore.exceptions.BaseError, OSError) as error:
            meant: ReshardError = meaning(error, self.place) or unreachable(self.place, told(error))
            kinds = {BucketRefused: BucketReadOnly, BucketNotFound: NoTargetBucket}
            raise kinds.get(type(meant), type(meant))(**meant.facts) from error

    def look(self) -> Visibility | None:
        return "private" if any(not path.startswith(OWN) for path in self.listed()) else None

    def leave(self, exists: bool) -> Leave:
        return Leave(None, "checked when the run starts")

    def prepare(self, private: bool) -> None:
        # By one name, as whoever may not delete leaves it there; another run may remove it between the two writes.
        if not any(self._guards(f"{OWN}probe{own}") for own in ("", f"-{uuid4().hex}")):
            raise NoConditionalWrites(target=str(self.place))

    def _guards(self, probe: str) -> bool:
        """Whether the store writes ``probe`` only where there is none."""
        try:
            guarded = self.claim(probe, b"1") and not self.claim(probe, b"2")
        except NotImplementedError:  # where a setting of obstore's says that the store has none
            guarded = False
        self.delete([probe])
        return guarded

    def listed(self) -> Listing:
        try:
            return self._reader.listed()
        except BucketNotFound as error:
            raise NoTargetBucket(**error.facts) from error

    def read(self, path: str) -> bytes | None:
        with self.writing():
            try:
                found = self._obstore.get(self._store, path)
                if found.meta["size"] <= ANSWER_MAX:
                    return bytes(found.bytes())
            except FileNotFoundError:
                return None
        raise TargetConflict(target=str(self.place), what=f"{path} has more than {ANSWER_MAX:,} bytes")

    def write(self, path: str, content: bytes) -> None:
        with self.writing():
            self._obstore.put(self._store, path, content)

    def claim(self, path: str, content: bytes) -> bool:
        with self.writing():
            try:
                self._obstore.put(self._store, path, content, mode="create")
                return True
            except self._obstore.exceptions.AlreadyExistsError:
                return self.read(path) == content  # ours, where the answer to the first try was lost

    def put(self, files: Sequence[StoredFile], check: Callable[[], None] = lambda: None) -> None:
        sealed = self._sealed()

        def one(file: StoredFile) -> None:
            staged = sealed.get((file.sha256 or "", file.size))
            if staged is None:
                raise ObjectLost([file.sha256], repo=str(self.place), what=file.path)
            check()
            try:
                with self.writing():
                    self._copy(staged, file)
            except NoTargetBucket as error:  # another that took over the lock has cleared what was staged
                if isinstance(error.__cause__, FileNotFoundError):
                    raise ObjectLost([file.sha256], repo=str(self.place), what=file.path) from error
                raise

        in_s3 = self.place.url.startswith("s3://")
        through_us = [file for file in files if in_s3 and file.size > STORE_COPY_MAX]
        with ThreadPoolExecutor(STORE_COPIES) as pool:
            list(pool.map(one, [file for file in files if file not in through_us]))
        for file in through_us:  # one at a time: they share this process's line and memory
            one(file)

    def _copy(self, staged: str, file: StoredFile) -> None:
        """By the store; what is too large for that in S3 comes and goes through this process, however long it takes."""
        if file.size <= STORE_COPY_MAX or not self.place.url.startswith("s3://"):
            self._obstore.copy(self._store, staged, file.path)
            return
        there = self.listed()
        source = BucketSource(self.place, self._limiter, {path: there[path] for path in there if path == staged})
        writer = self.upload(file.path, file.size)
        try:
            for view in source.read(StoredFile(staged, file.size), 0, file.size):
                writer.write(view)
        except SourceChanged as error:
            raise ObjectLost([file.sha256], repo=str(self.place), what=file.path) from error
        writer.close()

    def delete(self, paths: Sequence[str], check: Callable[[], None] = lambda: None) -> None:
        with self.writing():
            for path in paths:
                check()
                with suppress(FileNotFoundError):
                    self._obstore.delete(self._store, path)

    def source(self, listing: Listing, commit: str, sha256: Mapping[str, str]) -> Source:
        return BucketSource(self.place, self._limiter, listing, sha256)

    def sink(self, token: str) -> SinkOf:
        return SinkOf(lambda: StoreBatch(self, f"{token}/{uuid4().hex}"))

    def upload(self, path: str, size: int) -> Any:
        """A writer of obstore's, whose object appears when it is closed."""
        part = max(PART_MIN, -(-size // PARTS_MAX))  # bytes, of which two or three are held at a time
        with self.writing():
            return self._obstore.open_writer(self._store, path, buffer_size=part, max_concurrency=2)

    def _sealed(self) -> dict[tuple[str, int], str]:
        """Where the bytes of each sealed file are staged, by sha256 and size."""
        there = self.listed()
        found = {}
        for path in there:
            if (one := _parse_sealed(path)) and there.get(one.data, (-1, ""))[0] == one.content[1]:
                found[one.content] = one.data
        return found

    def lost(self, stored: Sequence[StoredFile]) -> list[StoredFile]:
        sealed = self._sealed() if stored else {}
        return [file for file in stored if (file.sha256 or "", file.size) not in sealed]

    def discard(self, token: str) -> None:
        kept = {*self._sealed().values()}
        self.delete([path for path in self.listed() if path.startswith(f"{DATA}{token}/") and path not in kept])

    def clear(self, stored: Sequence[StoredFile]) -> None:
        """Also copies of it, which a killed worker stored in vain, and what nobody went on with for STAGING_AGE."""
        contents = {(file.sha256 or "", file.size) for file in stored}
        with self.writing():
            staged = [item for some in self._obstore.list(self._store, prefix=OWN) for item in some]
        complete = [(item["path"], one) for item in staged if (one := _parse_sealed(item["path"]))]
        placed = {name for path, one in complete if one.content in contents for name in (path, one.data)}
        old = time.time() - STAGING_AGE
        self.delete([
            path for item in staged
            if (path := item["path"]).startswith((DATA, SEALED))
            and (path in placed or item["last_modified"].timestamp() < old)
        ])  # fmt: skip


class _Sealed(NamedTuple):
    """A file that a staged object says is complete."""

    content: tuple[str, int]  # sha256, bytes
    data: str  # the object with its bytes


def _parse_sealed(path: str) -> _Sealed | None:
    """What a staged object says; None of what others put beside them."""
    match = _SEALED_PATH.fullmatch(path)
    return match and _Sealed((match[1], int(match[2])), DATA + match[3])


class StoreBatch:
    """Each file is an object of its own as soon as it is finished, and sealed by an empty one."""

    def __init__(self, objects: StoreObjects, name: str) -> None:
        self._objects = objects
        self._name = name
        self._number = 0
        self._open: list[StoreWriter] = []
        self._hashing = Lane("sha256")
        self.traffic = Traffic()

    def open(self, path: str, size: int) -> StoreWriter:
        self._number += 1
        writer = StoreWriter(self._objects, path, size, f"{self._name}-{self._number}", self._hashing)
        self._open.append(writer)
        return writer

    def settle(self) -> list[StoredFile]:
        sealed = []
        while self._open and self._open[0].sha256:
            one = self._open.pop(0)
            self._objects.write(f"{SEALED}{one.sha256}/{one.size}/{one.name}", b"")
            sealed.append(StoredFile(one.path, one.size, sha256=one.sha256))
        self.traffic = Traffic(uploaded=sum(file.size for file in sealed))
        return sealed

    def seal(self) -> list[StoredFile]:
        self._hashing.close()
        return self.settle()

    def abort(self) -> None:
        self._hashing.close()
        for writer in self._open:
            try:
                writer.abort()
            except ReshardError as error:  # whatever ended the batch is what is told
                log.warning("cannot remove the parts of %s: %s", writer.path, error)
        self._open.clear()


class StoreWriter:
    """Uploads one file in parts and takes its sha256, which is empty until it is complete."""

    def __init__(self, objects: StoreObjects, path: str, size: int, name: str, hashing: Lane) -> None:
        self.path, self.size, self.name = path, size, name
        self.sha256 = ""
        self._objects = objects
        self._upload = objects.upload(DATA + name, size)
        self._hashing = hashing
        self._digest, self._handed = hashlib.sha256(), xxh3_128()
        self._written = 0

    def write(self, view: memoryview) -> None:
        self._hashing.put(self._digest.update, view)
        self._handed.update(view)
        self._written += len(view)
        with self._objects.writing():
            self._upload.write(view)

    def finish(self) -> str:
        check_written(self.path, self._written, self.size)
        with self._objects.writing():
            self._upload.close()
        self._hashing.flush()
        self.sha256 = self._digest.hexdigest()
        return self._handed.hexdigest()

    def abort(self) -> None:
        """A part that was sent is freed only with the whole, so it is completed first."""
        if not self._upload.closed():
            with self._objects.writing():
                self._upload.close()
        self._objects.delete([DATA + self.name])
