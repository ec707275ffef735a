"""A folder of an object store (S3 and what speaks it, Google's, Azure's), read in ranges by obstore.

Which endpoint, and with which credentials, the environment of the process says, by the variables that obstore knows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import httpx2

from reshard.pipeline.errors import (
    BucketNotFound,
    BucketRefused,
    BucketSetting,
    CloudExtraMissing,
    HubRefused,
    HubUnreachable,
    ReshardError,
    SourceChanged,
    UnsafePath,
)
from reshard.pipeline.limits import ATTEMPTS, CHUNK, CONNECT_TIMEOUT, FIRST_ATTEMPTS, LISTED_MAX, READ_TIMEOUT
from reshard.pipeline.places import Bucket
from reshard.pipeline.protocols import Visibility
from reshard.pipeline.stores.objects import OWN, refuse_unfinished
from reshard.pipeline.stores.pace import RateLimiter
from reshard.pipeline.stores.record import Listing, digest_of
from reshard.pipeline.stores.retry import TRANSIENT_STATUS, Retry
from reshard.pipeline.tensors import Pin, StoredFile
from reshard.pipeline.text import counted, unsafe_path
from reshard.pipeline.urls import is_http

# Where the environment names another endpoint than the store's own.
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
# What becomes part of a request. Keys of Google's are JSON, which may have several lines.
_SENT = {
    "s3": ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    "gs": (),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY"),
}
_PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
# obstore has some answers as classes of their own, and names the status of all others in its text.
_STATUS_OF = {
    "FileNotFoundError": 404,
    "PermissionDeniedError": 403,
    "UnauthenticatedError": 401,
    "PreconditionError": 412,
}
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")  # the store's own word for it, in the XML that it answers with


def opened(place: Bucket, timeout: float = READ_TIMEOUT, retries: int = 0) -> tuple[Any, Any]:
    """The module obstore, and its store of ``place``; nothing is asked of it yet.

    Raises BucketRefused, BucketSetting, CloudExtraMissing.
    """
    try:
        import obstore
        from obstore import exceptions
        from obstore import store as stores
    except ImportError as error:
        raise CloudExtraMissing(place=place) from error
    kind, rest = _kind(place), place.url.partition("://")[2]
    _check_environment(place)
    bucket, _, prefix = rest.partition("/")
    plain = any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS[kind])
    options: dict[str, Any] = {
        # Of the whole answer: a longer one breaks then, and goes on where it broke.
        "timeout": timedelta(seconds=timeout),
        "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT),
        **({"allow_http": True} if plain else {}),
    }
    kinds = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}
    with panics_refused(place):
        try:
            store = kinds[kind](
                bucket, prefix=prefix or None, client_options=options, retry_config={"max_retries": retries}
            )
        except (exceptions.BaseError, ValueError) as error:
            raise _refused(place, told(error)) from error
    return obstore, store


class BucketSource:
    """A Source; what tells one state of its files from another are their ETags.

    They have no sha256, unless we published them and they are unchanged since.
    """

    transport = "http"
    # Whoever may read a bucket was given leave to; nothing of it becomes public unasked.
    visibility: Visibility = "private"

    def __init__(
        self,
        place: Bucket,
        limiter: RateLimiter,
        listing: Listing = MappingProxyType({}),
        sha256: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Without a ``listing`` it is empty, and can be ``listed``."""
        self.place = place
        self._obstore, self._store = opened(place)
        self._refusals = (self._obstore.exceptions.BaseError, OSError)
        self._limiter = limiter
        self._etags = {path: etag for path, (_, etag) in listing.items()}
        files = {path: StoredFile(path, size, sha256=sha256.get(path)) for path, (size, _) in listing.items()}
        self._files = MappingProxyType(files)
        self.pin = Pin(None, place.url, digest_of(listing))

    @classmethod
    def open(cls, place: Bucket, limiter: RateLimiter, most: int = LISTED_MAX) -> BucketSource:
        """The folder as it is now, of at most so many objects.

        Raises BucketNotFound, BucketRefused, CloudExtraMissing, UnsafePath, SourceLocked, SourceUnfinished, and
        the HubError family.
        """
        found = cls(place, limiter).listed(most)
        refuse_unfinished(cls(place, limiter, found))
        listing = {path: seen for path, seen in found.items() if not path.startswith(OWN)}
        if not listing:
            raise _not_found(place, "no objects found")
        return cls(place, limiter, listing)

    def files(self) -> Mapping[str, StoredFile]:
        return self._files

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[memoryview]:
        if not 0 <= start <= stop:
            raise ValueError(f"{start} to {stop} is not a range")
        known = self._files.get(file.path)
        if known is None or stop > known.size:
            has = f"has {known.size:,} bytes" if known else "is missing"
            raise SourceChanged(place=self.place, what=f"{file.path} {has}, but {stop:,} were requested")
        retry, at = self._retry(), start
        while at < stop:
            try:
                with panics_refused(self.place):
                    for chunk in self._chunks(file.path, at, stop):
                        for first in range(0, len(chunk), CHUNK):
                            view = chunk[first : first + CHUNK]
                            at += len(view)
                            retry.progress()
                            yield view
                if at < stop:
                    retry.after(httpx2.RemoteProtocolError(f"the response ended {stop - at:,} bytes early"))
            except self._refusals as error:
                self._go_on(retry, error, file.path)

    def _chunks(self, path: str, at: int, stop: int) -> Iterator[memoryview]:
        etag = self._etags[path]
        got = self._obstore.get(self._store, path, options={"range": (at, stop), "if_match": f'"{etag}"'})
        # A store that knows no If-Match answers all the same.
        if (_bare(got.meta["e_tag"]), got.range) != (etag, (at, stop)):
            raise SourceChanged(place=self.place, what=f"{path} was replaced")
        for chunk in got.stream(min_chunk_size=CHUNK):
            yield memoryview(chunk)

    def listed(self, most: int = LISTED_MAX) -> Listing:
        """Size and ETag of every object now, by path, sorted, but for those that only stand for a folder."""
        retry, unheard = self._retry(), self._retry(FIRST_ATTEMPTS)
        while True:
            try:
                with panics_refused(self.place):
                    found = self._listed(most)
                break
            except self._refusals as error:
                self._go_on(retry if _status(error) else unheard, error, "")
        folders = {path[:end] for path in found for end, letter in enumerate(path) if letter == "/"}
        return {p: found[p] for p in sorted(found) if p and not (found[p][0] == 0 and p in folders)}

    def _listed(self, most: int) -> dict[str, tuple[int, str]]:
        found: dict[str, tuple[int, str]] = {}
        for some in self._obstore.list(self._store, chunk_size=1000):
            for item in some:
                if item["path"] and (why := unsafe_path(item["path"], published=False)):
                    raise UnsafePath(file=self.place, path=repr(item["path"])[:300], why=why)
                if not (etag := _bare(item["e_tag"])):
                    why = f"{item['path']!r} has no ETag, which is needed to detect changes"
                    raise HubRefused(endpoint=self.place, what="a listing", why=why)
                found[item["path"]] = (item["size"], etag)
            if len(found) > most:
                why = f"more than {counted(most, 'object')}; use the folder of the checkpoint"
                raise HubRefused(endpoint=self.place, what="a listing", why=why)
        return found

    def _retry(self, attempts: int = ATTEMPTS) -> Retry:
        return Retry(self.place.url, self._limiter, attempts, setting=_ENDPOINTS[_kind(self.place)][0])

    def _go_on(self, retry: Retry, error: Exception, path: str) -> None:
        """Wait until the next try; raises what ``error`` means where there is none."""
        meant = meaning(error, self.place, path)
        if meant is not None:
            raise meant from error
        status = _status(error)
        retry.after(httpx2.Response(status) if status else httpx2.TransportError(told(error)))


def _check_environment(place: Bucket) -> None:
    """Refuse what obstore panics at, which is known beforehand; raises BucketSetting."""
    kind = _kind(place)
    for name in _ENDPOINTS[kind]:
        value = os.environ.get(name)
        if value is not None and (not is_http(value) or re.search(r"\s", value)):
            why = "is not a URL such as http://localhost:9000" if value else "is empty: unset it"
            raise BucketSetting(place=place, settings=name, why=why)
    for name in _SENT[kind]:
        if not os.environ.get(name, "").isprintable():
            raise BucketSetting(place=place, settings=name, why="has a line break or another control character")


@contextmanager
def panics_refused(place: Bucket) -> Iterator[None]:
    """Around each call of obstore, which panics, in Rust, where it can make no request; raises BucketRefused."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of PyO3, which no module exports
            raise
        why = "cannot make a request with the region, endpoint and credentials in the environment"
        raise _refused(place, why) from None


def _kind(place: Bucket) -> str:
    return place.url.partition("://")[0]


def _refused(place: Bucket, why: str) -> BucketRefused:
    return BucketRefused(place=place, why=why, settings=f"{_PREFIXES[_kind(place)]}*")


def unreachable(place: Bucket, what: str) -> HubUnreachable:
    return HubUnreachable(endpoint=place, what=what, setting=_ENDPOINTS[_kind(place)][0])


def _not_found(place: Bucket, why: str) -> BucketNotFound:
    return BucketNotFound(place=place, why=why, setting=_ENDPOINTS[_kind(place)][0])


def _bare(etag: str | None) -> str:
    """An ETag without its quotes, which Azure's lists leave out; empty where there is none."""
    return (etag or "").strip('"')


def _status(error: Exception) -> int | None:
    known = _STATUS_OF.get(type(error).__name__)
    match = _STATUS.search(str(error))
    return known or (int(match[1]) if match else None)


def meaning(error: Exception, place: Bucket, path: str = "") -> ReshardError | None:
    """The error that no further try would change; ``path`` is empty of the folder itself."""
    status = _status(error)
    if type(error).__name__ == "InvalidPathError":
        return UnsafePath(file=place, path="of an object", why=told(error))
    if status in (404, 412, 416) and path:
        return SourceChanged(place=place, what=f"{path} {'is gone' if status == 404 else 'was replaced'}")
    if status == 404:
        return _not_found(place, told(error))
    # Nothing follows a redirect: S3 answers so of a bucket in another region.
    if "redirect" in told(error) or status in (301, 307):
        if _kind(place) == "s3":
            why = f"is not the region of the bucket ({told(error)})"
            return BucketSetting(place=place, settings="AWS_REGION", why=why)
        return _refused(place, told(error))
    if status is not None and status not in TRANSIENT_STATUS:
        return _refused(place, told(error))
    return None


def told(error: Exception) -> str:
    """One line of what obstore says, without URLs, which may be signed, and without what it quotes of a setting."""
    text = str(error).partition("\n\nDebug source")[0]
    status, code = _STATUS.search(text), _CODE.search(text)
    if status:
        return f"HTTP {status[1]}{f', {code[1]}' if code else ''}"
    line = text.partition("\n")[0].rpartition(" - ")[2]
    return re.sub(r"\S*://\S*", "...", re.sub(r'".*"', '"..."', line))[:200] or type(error).__name__
