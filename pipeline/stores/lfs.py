"""Shards into a repository over git LFS: spooled while their sha256 is taken, sent while the next one is read.

The LFS protocol names an object by its sha256 before its first byte is sent, so a shard must lie somewhere until it
is complete: in a temporary file (scratch.py).
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import takewhile
from math import ceil

import httpx2
from xxhash import xxh3_128

from reshard.pipeline.errors import HubRefused, ObjectLost
from reshard.pipeline.limits import ABORT_WAIT, CHUNK, STAGED_SHARDS_MAX
from reshard.pipeline.protocols import Source, Traffic
from reshard.pipeline.stores.answers import LfsAction
from reshard.pipeline.stores.carry import check_written
from reshard.pipeline.stores.hub_api import LFS_HEADERS, HubApi
from reshard.pipeline.stores.lane import Lane
from reshard.pipeline.stores.refusal import Refusal, meaning
from reshard.pipeline.stores.scratch import ScratchSpace
from reshard.pipeline.tensors import StoredFile
from reshard.pipeline.text import counted


class LfsSink:
    transport = "lfs"

    def __init__(self, api: HubApi, repo: str, disk: ScratchSpace, pull_request: bool = False) -> None:
        self.api, self.repo, self.disk, self.pull_request = api, repo, disk, pull_request

    def batch(self, reads: Sequence[StoredFile], source: Source | None = None) -> LfsBatch:
        return LfsBatch(self)

    def lost(self, stored: Sequence[StoredFile]) -> list[StoredFile]:
        return missing(self.api, self.repo, stored, self.pull_request)


class LfsBatch:
    """At most ``STAGED_SHARDS_MAX`` shards on disk: one being written, and one that is sent behind it."""

    def __init__(self, sink: LfsSink) -> None:
        self.sink = sink
        self.aborted = threading.Event()
        self._staged: list[LfsWriter] = []
        self._sending = Lane("lfs")
        self.traffic = Traffic()

    def open(self, path: str, size: int) -> LfsWriter:
        """Waits until there is room for one more staged shard; raises DiskFull when there is none even then."""
        self._sending.flush(STAGED_SHARDS_MAX - 1)
        self._staged.append(writer := LfsWriter(self, path, size))
        return writer

    def settle(self) -> list[StoredFile]:
        ready = [*takewhile(lambda staged: staged.sent is not None, self._staged)]
        self._sending.check()  # after the look: what fails later is not among them
        return self._answered(ready)

    def seal(self) -> list[StoredFile]:
        self._sending.flush()
        self._sending.close()
        return self._answered([*self._staged])

    def _answered(self, ready: Sequence[LfsWriter]) -> list[StoredFile]:
        """Asks the store once more about each of the first shards, which it has been sent."""
        stored = [StoredFile(staged.path, staged.size, sha256=staged.sha256) for staged in ready]
        if stored and (lost := self.sink.lost(stored)):
            raise ObjectLost([o.sha256 for o in lost], repo=self.sink.repo, what=", ".join(o.path for o in lost))
        sent = sum(staged.size for staged in ready if staged.sent)
        self.traffic = Traffic(uploaded=sent, deduplicated=sum(staged.size for staged in ready) - sent)
        del self._staged[: len(ready)]
        return stored

    def abort(self) -> None:
        """Ends an upload at its next block. It does not wait for a server that accepts no bytes."""
        wait = 0.0 if self.aborted.is_set() else ABORT_WAIT
        self.aborted.set()
        self._sending.close(wait)
        for staged in self._staged:
            if not staged.sending:  # the others are closed where they are sent
                staged.scratch.close()
        self._staged.clear()

    def send_later(self, staged: LfsWriter) -> None:
        staged.scratch.leaving = True
        self._sending.put(partial(self._send, staged), memoryview(b""))

    def _send(self, staged: LfsWriter, _: memoryview) -> None:
        staged.sending = True
        try:
            staged.sent = staged.send()
        finally:
            staged.scratch.close()


_STALE = frozenset({401, 403, 404, 410})  # as answers to signed URLs: they have expired
_STALE_PUT = _STALE | {400}  # S3's to credentials that have, and to a line that was too slow


class Aborted(Exception):
    """The batch was aborted while its object was being sent."""


class LfsWriter:
    """One shard: written to the disk as the one sha256 that its bytes ever get is taken, then sent as the store asks.

    ``sent`` says, once the store has it, whether it is from us.
    """

    def __init__(self, batch: LfsBatch, path: str, size: int) -> None:
        self.path, self.size, self.scratch = path, size, batch.sink.disk.open(size)
        self.sha256 = ""
        self.sending = False
        self.sent: bool | None = None
        self._batch = batch
        self._api, self._repo, self._pull_request = batch.sink.api, batch.sink.repo, batch.sink.pull_request
        self._retry = self._api.retry()
        self._digest = hashlib.sha256()
        self._handed = xxh3_128()

    def write(self, view: memoryview) -> None:
        self._digest.update(view)
        self._handed.update(view)
        self.scratch.write(view)

    def finish(self) -> str:
        check_written(self.path, self.scratch.written, self.size)
        self.sha256 = self._digest.hexdigest()
        self._batch.send_later(self)
        return self._handed.hexdigest()

    def send(self) -> bool:
        """False: the store has it already, and nothing was sent. Raises the error tree.

        Signed URLs that expire on the way are asked for anew, a few times, as all parts are sent again then.
        """
        target = StoredFile(path=self.sha256, size=self.size, sha256=self.sha256)
        with meaning(lambda refusal: refusal.as_target(self._repo, self._pull_request)):
            while (actions := self._api.lfs_batch(self._repo, [target])[self.sha256]) and actions.upload:
                try:
                    self._upload(actions.upload)
                except Refusal as refusal:
                    if refusal.status not in (_STALE_PUT if refusal.response.request.method == "PUT" else _STALE):
                        raise
                    self._retry.after(refusal.response)
                else:
                    if verify := actions.verify:
                        body = {"oid": self.sha256, "size": self.size}
                        self._api.call("POST", verify.href, headers=LFS_HEADERS | verify.header, json=body)
                    return True
        return False

    def _upload(self, action: LfsAction) -> None:
        if "chunk_size" not in action.header:
            self._put(action.href, 0, self.size, action.header)
            return
        try:
            part_size, urls = action.parts
        except ValueError as error:
            raise self._refused(f"invalid upload parts: {error}") from error
        if len(urls) != ceil(self.size / part_size):
            raise self._refused(f"{counted(len(urls), 'part')} of {part_size:,} bytes do not add up to {self.size:,}")
        parts = []
        for number, url in enumerate(urls, 1):
            start = (number - 1) * part_size
            answer = self._put(url, start, min(start + part_size, self.size), {})
            if "etag" not in answer.headers:
                raise self._refused("a part was stored without an ETag")
            parts.append({"partNumber": number, "etag": answer.headers["etag"]})
        body = {"oid": self.sha256, "parts": parts}
        self._api.call("POST", action.href, headers=LFS_HEADERS, json=body)

    def _refused(self, why: str) -> HubRefused:
        return HubRefused(endpoint=self._api.endpoint, what=f"the object {self.sha256}", why=why)

    def _put(self, url: str, start: int, stop: int, headers: dict[str, str]) -> httpx2.Response:
        """The store's answer to bytes ``start <= b < stop``."""
        headers = headers | {"Content-Length": str(stop - start)}
        return self._api.repeated(
            lambda: self._api.client.put(url, headers=headers, content=self._blocks(start, stop)), self._api.retry()
        )

    def _blocks(self, start: int, stop: int) -> Iterator[bytes]:
        for at in range(start, stop, CHUNK):
            if self._batch.aborted.is_set():
                raise Aborted
            block = os.pread(self.scratch.file.fileno(), min(CHUNK, stop - at), at)
            yield block
            self._api.limiter.moved(len(block))


def missing(api: HubApi, repo: str, stored: Sequence[StoredFile], pull_request: bool = False) -> list[StoredFile]:
    """Those of ``stored`` that the repository's LFS store would have to be sent; raises the error tree."""
    with meaning(lambda refusal: refusal.as_target(repo, pull_request)):
        actions = api.lfs_batch(repo, stored)
    return [file for file in stored if actions.get(file.sha256 or "")]
