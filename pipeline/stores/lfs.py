"""Shards into a repository over git LFS: spooled while their sha256 is taken, sent while the next one is read.

The LFS protocol names an object by its sha256 before its first byte is sent, so a shard must lie somewhere until it
is complete: in a temporary file (disk.py).
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import ceil
from typing import IO

import httpx2
from xxhash import xxh3_128

from reshard.pipeline.errors import HubRefused, ObjectLost, ReshardError
from reshard.pipeline.limits import ABORT_WAIT, CHUNK, STAGED_SHARDS_MAX
from reshard.pipeline.protocols import Source, Traffic
from reshard.pipeline.stores.answers import LfsAction
from reshard.pipeline.stores.hub_api import LFS_HEADERS, HubApi
from reshard.pipeline.stores.refusal import Refusal
from reshard.pipeline.stores.retry import Retry, is_transient
from reshard.pipeline.stores.scratch import ScratchFile, ScratchSpace
from reshard.pipeline.tensors import StoredFile
from reshard.pipeline.text import counted


class LfsSink:
    """A Sink for one repository."""

    transport = "lfs"

    def __init__(self, api: HubApi, repo: str, disk: ScratchSpace) -> None:
        self._api = api
        self._repo = repo
        self._disk = disk

    def batch(self, reads: Sequence[StoredFile], source: Source | None = None) -> LfsBatch:
        return LfsBatch(self._api, self._repo, self._disk)

    def lost(self, stored: Sequence[StoredFile]) -> list[StoredFile]:
        """Those of ``stored`` that the store would have to be sent again."""
        return missing(self._api, self._repo, stored)


@dataclass
class StagedShard:
    """A shard on disk; ``done`` is set when the store has it (``sent`` if from us) or its sending failed."""

    path: str
    size: int
    scratch: ScratchFile
    sha256: str = ""
    sent: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class LfsBatch:
    """At most ``STAGED_SHARDS_MAX`` shards on disk: one being written, and one that a background thread sends."""

    def __init__(self, api: HubApi, repo: str, disk: ScratchSpace) -> None:
        self._api = api
        self._repo = repo
        self._disk = disk
        self._staged: list[StagedShard] = []
        self._sending: queue.SimpleQueue[StagedShard | None] = queue.SimpleQueue()
        self._sender: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._aborted = threading.Event()
        self.traffic = Traffic()

    def open(self, path: str, size: int) -> LfsWriter:
        """Waits until there is room for one more staged shard; raises DiskFull when there is none even then."""
        self._raise_failure()
        pending = [staged for staged in self._staged if not staged.done.is_set()]
        while len(pending) >= STAGED_SHARDS_MAX:
            pending.pop(0).done.wait()
            self._raise_failure()
        staged = StagedShard(path, size, self._disk.open(size))
        self._staged.append(staged)
        return LfsWriter(staged, self._send_later)

    def settle(self) -> list[StoredFile]:
        ready = [*takewhile(lambda staged: staged.done.is_set(), self._staged)]
        self._raise_failure()  # after the look: what fails later is not among them
        return self._answered(ready)

    def seal(self) -> list[StoredFile]:
        """Waits for the last object."""
        self._stop_sender()
        self._raise_failure()
        return self._answered([*self._staged])

    def _answered(self, ready: Sequence[StagedShard]) -> list[StoredFile]:
        """Asks the store once more about each of the first shards, which it has been sent."""
        stored = [StoredFile(staged.path, staged.size, sha256=staged.sha256) for staged in ready]
        if stored and (lost := missing(self._api, self._repo, stored)):
            raise ObjectLost([o.sha256 for o in lost], repo=self._repo, what=", ".join(o.path for o in lost))
        sent = sum(staged.size for staged in ready if staged.sent)
        self.traffic = Traffic(uploaded=sent, deduplicated=sum(staged.size for staged in ready) - sent)
        del self._staged[: len(ready)]
        return stored

    def abort(self) -> None:
        """Ends an upload at its next block. It does not wait for a server that accepts no bytes."""
        self._aborted.set()
        self._stop_sender(ABORT_WAIT)
        for staged in self._staged:
            if not staged.sha256:  # those that are complete are the sender's to close
                staged.scratch.close()
        self._staged.clear()

    # ------------------------------------------------------------------------------------------------ sending

    def _send_later(self, staged: StagedShard) -> None:
        if self._sender is None:
            self._sender = threading.Thread(target=self._send_all, name="reshard-lfs", daemon=True)
            self._sender.start()
        staged.scratch.leaving = True
        self._sending.put(staged)

    def _stop_sender(self, wait: float | None = None) -> None:
        if self._sender is not None:
            self._sending.put(None)
            self._sender.join(wait)
            self._sender = None

    def _send_all(self) -> None:
        while (staged := self._sending.get()) is not None:
            try:
                if self._failure is None and not self._aborted.is_set():
                    staged.sent = send(
                        self._api, self._repo, staged.scratch.file, staged.size, staged.sha256, self._aborted
                    )
            except BaseException as error:  # raised by the next call of open or seal  # noqa: BLE001
                self._failure = error
            finally:
                staged.scratch.close()
                staged.done.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class LfsWriter:
    """Writes one staged shard and takes the one sha256 that its bytes ever get."""

    def __init__(self, staged: StagedShard, sealed: Callable[[StagedShard], None]) -> None:
        self._staged = staged
        self._sealed = sealed
        self._sha256 = hashlib.sha256()
        self._handed = xxh3_128()
        self._written = 0

    def write(self, view: memoryview) -> None:
        self._sha256.update(view)
        self._handed.update(view)
        self._written += len(view)
        self._staged.scratch.write(view)

    def finish(self) -> str:
        if self._written != self._staged.size:
            raise ReshardError(
                what=f"{self._staged.path}: {self._written:,} of {self._staged.size:,} bytes were written"
            )
        self._staged.sha256 = self._sha256.hexdigest()
        self._sealed(self._staged)
        return self._handed.hexdigest()


def missing(api: HubApi, repo: str, stored: Sequence[StoredFile]) -> list[StoredFile]:
    """Those of ``stored`` that the repository's LFS store would have to be sent; raises the error tree."""
    try:
        actions = api.lfs_batch(repo, stored)
    except Refusal as refusal:
        raise refusal.as_target(repo) from refusal
    return [file for file in stored if actions.get(file.sha256 or "")]


# ----------------------------------------------------------------------------------------------------- one object


class Aborted(Exception):
    """The batch was aborted while its object was being sent."""


def send(api: HubApi, repo: str, file: IO[bytes], size: int, sha256: str, aborted: threading.Event) -> bool:
    """Bring an object into the store, in one request or in parts as the store asks; raises the error tree.

    False: the store has it already, and nothing was sent. Signed URLs that expire on the way are asked for anew.
    """
    retry = api.retry()
    target = StoredFile(path=sha256, size=size, sha256=sha256)
    try:
        while (actions := api.lfs_batch(repo, [target])[sha256]) and actions.upload:
            upload = _Upload(api, retry, file, size, sha256, aborted)
            if upload.send(actions.upload):
                if verify := actions.verify:
                    headers = LFS_HEADERS | verify.header
                    api.call("POST", verify.href, headers=headers, json={"oid": sha256, "size": size})
                return True
    except Refusal as refusal:
        raise refusal.as_target(repo) from refusal
    return False


class _Upload:
    """One answer of the batch API, carried out."""

    def __init__(
        self, api: HubApi, retry: Retry, file: IO[bytes], size: int, sha256: str, aborted: threading.Event
    ) -> None:
        self._api = api
        self._retry = retry
        self._file = file
        self._size = size
        self._sha256 = sha256
        self._aborted = aborted

    def send(self, action: LfsAction) -> bool:
        """False when the URLs have expired and new ones must be asked for."""
        if "chunk_size" not in action.header:
            return self._put(action.href, 0, self._size, action.header) is not None
        try:
            part_size, urls = action.parts
        except ValueError as error:
            raise self._refused(f"its upload has no proper parts: {error}") from error
        if len(urls) != ceil(self._size / part_size):
            raise self._refused(f"{counted(len(urls), 'part')} of {part_size:,} bytes are not {self._size:,} bytes")
        parts = []
        for number, url in enumerate(urls, 1):
            start = (number - 1) * part_size
            answer = self._put(url, start, min(start + part_size, self._size), {})
            if answer is None:
                return False
            if "etag" not in answer.headers:
                raise self._refused("a part was stored without an ETag")
            parts.append({"partNumber": number, "etag": answer.headers["etag"]})
        body = {"oid": self._sha256, "parts": parts}
        self._api.call("POST", action.href, headers=LFS_HEADERS, json=body)
        return True

    def _refused(self, why: str) -> HubRefused:
        return HubRefused(endpoint=self._api.endpoint, what=f"the object {self._sha256}", why=why)

    def _put(self, url: str, start: int, stop: int, headers: dict[str, str]) -> httpx2.Response | None:
        """The store's answer to bytes ``start <= b < stop``; None when it no longer honours the URL."""
        while True:
            try:
                response = self._api.client.put(
                    url, headers=headers | {"Content-Length": str(stop - start)}, content=self._blocks(start, stop)
                )
            except httpx2.TransportError as error:
                self._api.after(self._retry, error)
                continue
            if response.is_success:
                self._retry.progress()
                return response
            if response.status_code in (401, 403, 404, 410):
                self._retry.after(response)
                return None
            if not is_transient(response):
                raise Refusal(response, self._api)
            self._retry.after(response)

    def _blocks(self, start: int, stop: int) -> Iterator[bytes]:
        for at in range(start, stop, CHUNK):
            if self._aborted.is_set():
                raise Aborted
            block = os.pread(self._file.fileno(), min(CHUNK, stop - at), at)
            yield block
            self._api.limiter.moved(len(block))
