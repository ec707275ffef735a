"""Buckets of a Hub: files of its content store by path, without commits. Read by hash, written over Xet.

The form of each call was checked against huggingface_hub 2.4.0 (``HfApi``, ``list_bucket_tree`` and
``batch_bucket_files``); hub_api.py says why they are not made through it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import httpx2

from reshard.pipeline.errors import (
    AccessError,
    BucketNotFound,
    HubError,
    HubRefused,
    MemoryLimit,
    ObjectLost,
    ReshardError,
    TokenMissing,
    UnsafePath,
    UsageError,
)
from reshard.pipeline.limits import BUCKET_BATCH, LISTED_MAX, MEMORY_FLOOR_XET
from reshard.pipeline.places import Hub, HubBucket
from reshard.pipeline.protocols import Leave, Source, Target, Visibility
from reshard.pipeline.request import Options, Transport
from reshard.pipeline.stores.answers import BucketBatch, BucketInfo, BucketItem
from reshard.pipeline.stores.carry import send_own
from reshard.pipeline.stores.connect import Context
from reshard.pipeline.stores.credentials import elsewhere
from reshard.pipeline.stores.hub_api import HubApi
from reshard.pipeline.stores.hub_target import UNTOLD
from reshard.pipeline.stores.objects import OWN, ObjectTarget, refuse_unfinished
from reshard.pipeline.stores.observed import MAY_LACK
from reshard.pipeline.stores.record import Listing, digest_of
from reshard.pipeline.stores.refusal import Refusal, meaning
from reshard.pipeline.stores.xet import XetSink, XetSource, installed
from reshard.pipeline.tensors import Pin, StoredFile
from reshard.pipeline.text import counted, unsafe_path


def open_source(place: HubBucket, context: Context, transport: Transport, chosen: str) -> Source:
    bucket = _Bucket(context.api(Hub(repo=place.bucket), "read"), place)
    over_http = "http" in (transport, chosen) or context.memory_limit < MEMORY_FLOOR_XET or not installed()
    if over_http and transport == "xet":
        raise UsageError(what=f"--transport xet: {place} cannot be read over Xet here")
    with meaning(lambda refusal: refusal.as_source(str(place))):
        visibility = bucket.visibility()
        there = bucket.listed()
    memory = None if over_http else context.memory_limit
    refuse_unfinished(HubBucketSource(bucket, there, digest_of(there), visibility, {}, memory))
    listing = {path: seen for path, seen in there.items() if not path.startswith(OWN)}
    if not listing:
        raise BucketNotFound(place=place, why="no files found", setting="HF_ENDPOINT")
    return HubBucketSource(bucket, listing, digest_of(listing), visibility, {}, memory)


def open_target(place: HubBucket, options: Options, context: Context) -> Target:
    """What cannot be written here is refused when it is prepared: until then a target is only looked at."""
    api = context.api(Hub(repo=place.bucket), "write")
    return ObjectTarget(BucketObjects(api, place, context.memory_limit, _unwritable(place, options, context)))


def _unwritable(place: HubBucket, options: Options, context: Context) -> ReshardError | None:
    if options.transport == "http" or not installed():
        why = "--transport http" if options.transport == "http" else "hf_xet is not installed or is disabled"
        return UsageError(what=f"{place} can only be written over Xet ({why})")
    if context.memory_limit < MEMORY_FLOOR_XET:
        return MemoryLimit(what=str(place), needed=MEMORY_FLOOR_XET, limit=context.memory_limit)
    return None


class _Bucket:
    """The calls; all raise Refusal."""

    def __init__(self, api: HubApi, place: HubBucket) -> None:
        self.api = api
        self.place = place
        self.path = f"/api/buckets/{place.bucket}"
        self._prefix = f"{place.path}/" if place.path else ""

    def visibility(self, extensions: Mapping[str, Any] | None = None) -> Visibility:
        return "private" if self.api.data(BucketInfo, "GET", self.path, extensions=extensions).private else "public"

    def listed(self) -> Listing:
        """Raises HubRefused for more files than LISTED_MAX, and UnsafePath."""
        below = f"/{quote(self._prefix.rstrip('/'), safe='')}" if self._prefix else ""
        found: dict[str, tuple[int, str]] = {}
        for item in self.api.pages(list[BucketItem], f"{self.path}/tree{below}", {"recursive": "true"}):
            # The Hub takes the prefix for the beginning of a name, too.
            if item.type != "file" or not str(item.path).startswith(self._prefix):
                continue
            path = str(item.path).removeprefix(self._prefix)
            if why := unsafe_path(path, published=False):
                raise UnsafePath(file=self.place, path=repr(path)[:300], why=why)
            found[path] = (item.size, item.xetHash or "")
            if len(found) > LISTED_MAX:
                why = f"more than {counted(LISTED_MAX, 'file')}; use the folder of the checkpoint"
                raise HubRefused(endpoint=self.place, what="a listing", why=why)
        return dict(sorted(found.items()))

    def address(self, path: str) -> str:
        return f"{self.api.endpoint}/buckets/{self.place.bucket}/resolve/{quote(self._prefix + path, safe='')}"

    def batch(
        self, operations: Sequence[Mapping[str, Any]], check: Callable[[], None] = lambda: None
    ) -> list[tuple[str, str]]:
        """Carry them out, in this order; returns what failed, by path and why. The rest is done all the same.

        ``check`` may end it, with what it raises, just before anything is sent, however long that had to wait.
        """
        failed: list[tuple[str, str]] = []
        for first in range(0, len(operations), BUCKET_BATCH):
            rows = [{**one, "path": self._prefix + one["path"]} for one in operations[first : first + BUCKET_BATCH]]
            body = "".join(json.dumps(row) + "\n" for row in rows).encode()
            headers = {"Content-Type": "application/x-ndjson"}
            try:
                response = self.api.call("POST", f"{self.path}/batch", headers, check, content=body)
                answer = self.api.decoded(BucketBatch, response)
            except Refusal as refusal:
                if refusal.status != 422:  # all of them failed
                    raise
                answer = self.api.decoded(BucketBatch, refusal.response)
            failed += [(one.path.removeprefix(self._prefix), one.error) for one in answer.failed]
        return failed


class HubBucketSource(XetSource):
    """A bucket's folder as it was listed: by their hashes, its files are read even where others have replaced them."""

    read_min = 1  # over HTTP, which reads by path, it could be of another file

    def __init__(
        self,
        bucket: _Bucket,
        listing: Listing,
        commit: str,
        visibility: Visibility,
        sha256: Mapping[str, str],
        memory_limit: int | None,
    ) -> None:
        """Without a ``memory_limit`` it is read over HTTP, by path."""
        super().__init__(bucket.api, Hub(repo=bucket.place.bucket), commit, visibility, memory_limit or 0)
        self._bucket = bucket
        self.place, self.pin = bucket.place, Pin(None, str(bucket.place), commit)
        self.transport, self._is_away = ("http", True) if memory_limit is None else ("xet", False)
        self.token_route = f"{bucket.path}/xet-read-token"
        files = {p: StoredFile(p, size, sha256=sha256.get(p), xet=str(x) or None) for p, (size, x) in listing.items()}
        self._files = MappingProxyType(files)

    def _address(self, path: str) -> str:
        return self._bucket.address(path)

    def _learn(self, file: StoredFile, asked: str, response: httpx2.Response) -> None:
        now = response.headers.get("x-xet-hash")
        if now and file.xet and now != file.xet:
            raise self._changed(f"{file.path} was replaced")
        super()._learn(file, asked, response)


class BucketObjects:
    """What `objects.py` asks of a bucket. Nothing in it is conditional: a claim is written, and then read again."""

    transport = "xet"

    def __init__(self, api: HubApi, place: HubBucket, memory_limit: int, unwritable: ReshardError | None) -> None:
        self.place = place
        self._unwritable = unwritable
        self._api = api
        self._memory_limit = memory_limit
        self._bucket = _Bucket(api, place)
        self._visibility: Visibility = "private"  # until it was looked at
        self._uploads = XetSink(api, str(place), f"{self._bucket.path}/xet-write-token", memory_limit)

    def _meaning(self) -> Any:
        return meaning(lambda refusal: refusal.as_target(str(self.place)))

    def look(self) -> Visibility | None:
        try:
            self._visibility = self._bucket.visibility(MAY_LACK)
        except Refusal as refusal:
            if refusal.code == "RepoNotFound":
                return None
            raise refusal.as_target(str(self.place)) from refusal
        return self._visibility

    def leave(self, exists: bool) -> Leave:
        if self._unwritable:
            return Leave(False, str(self._unwritable))
        if self._api.credential is None:
            return Leave(None, "no token")
        try:
            account = self._api.whoami()
        except Refusal as refusal:
            error = refusal.as_target(str(self.place))
            return Leave(False if isinstance(error, AccessError) else None, str(error))
        except HubError as error:  # a mirror may answer anything there; a run shows it
            return Leave(None, str(error))
        if account.may_write(self.place.bucket):
            return Leave(True, f"the token of {account.name} can write there")
        return Leave(None, UNTOLD)

    def prepare(self, private: bool) -> None:
        if self._unwritable:
            raise self._unwritable
        if self._api.credential is None:
            endpoint, how = self._api.endpoint, elsewhere(self._api.endpoint, self.place.bucket)
            raise TokenMissing(endpoint=endpoint, need=f"writing to {self.place}", **how)
        with self._meaning():
            if self.look() is None:
                self._api.create(self._bucket.path, {"visibility": "private" if private else "public"})
                self.look()
            token = self._api.kept_xet_token(f"{self._bucket.path}/xet-write-token")
        if token is None:
            why = "it does not issue Xet tokens for buckets"
            raise HubRefused(endpoint=self._api.endpoint, what=f"a write to {self.place}", why=why)

    def listed(self) -> Listing:
        with self._meaning():
            return self._bucket.listed()

    def read(self, path: str) -> bytes | None:
        try:
            return self._api.call("GET", self._bucket.address(path), extensions=MAY_LACK).content
        except Refusal as refusal:
            if refusal.status == 404:
                return None
            raise refusal.as_target(str(self.place)) from refusal

    def write(self, path: str, content: bytes) -> None:
        self.put(send_own(self._uploads.batch([]), {path: content}))

    def claim(self, path: str, content: bytes) -> bool:
        if self.read(path) is not None:
            return False
        self.write(path, content)
        return self.read(path) == content

    def put(self, files: Sequence[StoredFile], check: Callable[[], None] = lambda: None) -> None:
        now = round(time.time() * 1000)
        rows = [{"type": "addFile", "path": one.path, "xetHash": one.xet, "mtime": now} for one in files]
        with self._meaning():
            failed = dict(self._bucket.batch(rows, check))
        if not failed:
            return
        if lost := self.lost([file for file in files if file.path in failed]):
            raise ObjectLost([file.sha256 for file in lost], repo=str(self.place), what=lost[0].path)
        self._refuse(failed)

    def delete(self, paths: Sequence[str], check: Callable[[], None] = lambda: None) -> None:
        with self._meaning():
            failed = dict(self._bucket.batch([{"type": "deleteFile", "path": path} for path in paths], check))
        if failed and (left := failed.keys() & self.listed().keys()):
            self._refuse({path: failed[path] for path in left})

    def _refuse(self, failed: Mapping[str, str]) -> None:
        path, why = next(iter(failed.items()))
        raise HubRefused(endpoint=self._api.endpoint, what=f"{path} in {self.place}", why=why)

    def source(self, listing: Listing, commit: str, sha256: Mapping[str, str]) -> Source:
        memory = None if self._unwritable else self._memory_limit
        return HubBucketSource(self._bucket, listing, commit, self._visibility, sha256, memory)

    def sink(self, token: str) -> XetSink:
        return self._uploads

    def lost(self, stored: Sequence[StoredFile]) -> list[StoredFile]:
        lost = [file for file in stored if not file.xet]
        return lost + self._uploads.lost([file for file in stored if file.xet])

    def discard(self, token: str) -> None:
        """Whoever opens a batch aborts it, and nothing else is held."""

    def clear(self, stored: Sequence[StoredFile]) -> None:
        """The content store is the Hub's."""
