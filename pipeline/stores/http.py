"""A repository at one commit, read over plain HTTP: ranges of signed URLs, resumed at the byte where they broke."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from types import MappingProxyType
from urllib.parse import quote, urljoin

import httpcore2
import httpx2

from reshard.pipeline.errors import HubRefused, ReshardError, SourceChanged
from reshard.pipeline.limits import BACKOFF_FIRST, CHUNK, RECEIVE, RENEWALS, STALL_BYTES, STALL_WINDOW
from reshard.pipeline.places import AnyPlace, Hub
from reshard.pipeline.protocols import Visibility
from reshard.pipeline.stores.answers import is_url
from reshard.pipeline.stores.hub_api import HubApi
from reshard.pipeline.stores.refusal import Refusal, meaning
from reshard.pipeline.stores.retry import is_transient, own
from reshard.pipeline.tensors import Pin, StoredFile

# What a content server says of a signed URL that has expired, or that it no longer knows.
_STALE = frozenset({400, 401, 403, 404, 410})
HOPS_MAX = 5  # redirects in a row; a renamed repository takes one more than the usual one
# httpcore has no setting for it. Over TLS a record of 16 KiB is all that a call brings, and nothing changes.
httpcore2.HTTP11Connection.READ_NUM_BYTES = RECEIVE
_IDENTITY = {"Accept-Encoding": "identity"}  # compressed bytes would not be the file's


class HubSource:
    """A Source over HTTP; safe to read from several threads."""

    transport = "http"

    def __init__(self, api: HubApi, place: Hub, commit: str, visibility: Visibility) -> None:
        self.api = api
        self.place: AnyPlace = place
        self._repo = place.repo
        self.pin = Pin(api.endpoint, place.repo, commit)
        self.visibility: Visibility = visibility
        self._lock = threading.Lock()
        self._files: Mapping[str, StoredFile] | None = None
        self._urls: dict[str, str] = {}  # signed, by path

    @classmethod
    def open(cls, api: HubApi, place: Hub) -> HubSource:
        """The repository, its revision pinned to the commit that it is now; raises the SourceError family."""
        with meaning(lambda refusal: refusal.as_source(place.repo, place.branch)):
            info = api.info(place.repo, place.branch)
            if info.visibility != "public":
                api.check_access(place.repo)
        return cls(api, place, info.sha, info.visibility)

    def files(self) -> Mapping[str, StoredFile]:
        with self._lock:
            if self._files is None:
                with meaning(self._unreadable):
                    files = {file.path: file for file in self.api.tree(self._repo, self.pin.commit)}
                self._files = MappingProxyType(files)
            return self._files

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[memoryview]:
        if not 0 <= start <= stop:
            raise ValueError(f"{start} to {stop} is not a range")
        if stop > file.size:
            raise self._changed(f"{file.path} has {file.size:,} bytes, but {stop:,} were requested")
        retry = self.api.retry()
        at, renewed, hops = start, 0, 0
        while at < stop:
            url, signed = self._url(file.path)
            try:
                with closing(self._get(url, signed, at, stop)) as response:
                    if response.status_code not in (200, 206):
                        response.read()  # a body left unread costs the connection
                    if response.has_redirect_location and hops < HOPS_MAX:
                        hops += 1
                        self._learn(file, url, response)
                    elif response.status_code in (200, 206):
                        self._check(file, at, stop, response, signed)
                        for view in _views(response, stop - at):
                            at, renewed, hops = at + len(view), 0, 0
                            retry.progress()
                            yield view
                    elif is_transient(response):
                        retry.after(response)
                    elif signed and response.status_code in _STALE and renewed < RENEWALS:
                        self._forget(file.path, url)
                        if renewed:  # a new one that is stale at once: the line is slow, or the clocks are apart
                            self.api.limiter.sleep(BACKOFF_FIRST, "the signed URL expired")
                        renewed += 1
                    else:
                        raise self._refused(file, response, signed)
            except httpx2.TransportError as error:
                retry.after(error)

    # --------------------------------------------------------------------------------------------- one request

    def _get(self, url: str, signed: bool, at: int, stop: int) -> httpx2.Response:
        headers = _IDENTITY | {"Range": f"bytes={at}-{stop - 1}"}
        if not signed:
            self.api.limiter.before("resolve")
            headers |= self.api.headers
        client = self.api.client
        return client.send(client.build_request("GET", url, headers=headers), stream=True)

    def _url(self, path: str) -> tuple[str, bool]:
        """Where to ask for a file, and whether that is a signed URL elsewhere, which must not see our token."""
        with self._lock:
            known = self._urls.get(path)
        if known is not None:
            return known, not own(self.api.endpoint, known)
        return self._address(path), False

    def _address(self, path: str) -> str:
        return f"{self.api.endpoint}/{self._repo}/resolve/{quote(self.pin.commit, safe='')}/{quote(path)}"

    def _learn(self, file: StoredFile, asked: str, response: httpx2.Response) -> None:
        """Keep where a redirect leads, if what it leads to is still the file that was listed."""
        self._same(file, response.headers.get("x-linked-etag"), response.headers.get("x-linked-size"))
        try:
            url = urljoin(asked, response.headers["location"])
        except ValueError:
            url = ""
        if not is_url(url):
            why = "it redirects to an invalid URL"
            raise HubRefused(endpoint=self.api.endpoint, what=f"the content of {file.path}", why=why)
        with self._lock:
            self._urls[file.path] = url

    def _forget(self, path: str, url: str) -> None:
        with self._lock:
            if self._urls.get(path) == url:
                del self._urls[path]

    def _check(self, file: StoredFile, at: int, stop: int, response: httpx2.Response, signed: bool) -> None:
        """The answer holds the very bytes that were asked for, of the file that was listed."""
        if response.status_code == 206:
            range_, _, total = response.headers.get("content-range", "").partition("/")
            if range_ != f"bytes {at}-{stop - 1}":
                raise self._changed(f"{file.path}: requested bytes {at}-{stop - 1}, but got different ones")
        else:
            total = response.headers.get("content-length", "")
            if at != 0:
                why = "it sends only whole files"
                raise HubRefused(endpoint=self.api.endpoint, what=f"a range of {file.path}", why=why)
        if signed and not _fits(total, file.size):
            raise self._changed(f"the content of {file.path} has a different length")  # of another host nothing is told
        self._same(file, None if signed else response.headers.get("etag"), total)

    def _same(self, file: StoredFile, etag: str | None, size: str | None) -> None:
        """A file on the Hub has its sha256 as ETag where it is large, the git blob's sha1 where it is not."""
        found = (etag or "").removeprefix("W/").strip('"')
        expected = file.sha256 or file.oid
        if found and expected and found != expected:
            raise self._changed(f"{file.path} was {expected} and is now {found}")
        if not _fits(size, file.size):
            raise self._changed(f"{file.path} had {file.size} bytes and now has {size}")

    def _refused(self, file: StoredFile, response: httpx2.Response, signed: bool) -> Exception:
        refusal = Refusal(response, self.api)
        if response.status_code == 416 or (signed and response.status_code in (404, 410)):
            return self._changed(f"{file.path}: {refusal.why}", **refusal.request)
        if signed:
            return HubRefused(endpoint=self.api.endpoint, what=f"the content of {file.path}", why=refusal.why)
        return self._unreadable(refusal)

    def _unreadable(self, refusal: Refusal) -> ReshardError:
        """What it means that the commit that we are pinned to is refused."""
        if refusal.code == "RevisionNotFound":
            return self._changed(f"commit {self.pin.commit} no longer exists", **refusal.request)
        return refusal.as_source(str(self.place.at(None)))

    def _changed(self, what: str, **facts: str) -> SourceChanged:
        return SourceChanged(place=str(self.place), what=what, **facts)


def _fits(told: str | None, size: int) -> bool:
    """Whether a header may be of a file of ``size`` bytes; one that holds no number says nothing."""
    return not told or not told.isdecimal() or (told.lstrip("0") or "0") == str(size)


def _views(response: httpx2.Response, wanted: int) -> Iterator[memoryview]:
    """``wanted`` bytes of the body, gathered into chunks: a socket brings RECEIVE at most, and every view costs.

    What came before a break is handed out before the break is raised. A trickle too slow to ever trip a socket's
    timeout counts as a break.
    """
    chunk, filled, mark, brought = memoryview(bytearray(min(CHUNK, wanted))), 0, time.monotonic(), 0
    try:
        for piece in response.iter_raw():
            if not wanted:
                break  # a server that ignores ranges sends more than was asked for
            rest = memoryview(piece)[:wanted]
            brought += len(rest)
            while rest:
                step = min(len(rest), len(chunk) - filled)
                chunk[filled : filled + step] = rest[:step]
                filled, wanted, rest = filled + step, wanted - step, rest[step:]
                if filled == len(chunk):
                    yield chunk
                    chunk, filled = memoryview(bytearray(min(CHUNK, wanted))), 0
                    mark, brought = time.monotonic(), 0  # the consumer's own time does not count as a stall
            if time.monotonic() - mark > STALL_WINDOW:
                if brought < STALL_BYTES:
                    raise httpx2.ReadTimeout(f"only {brought:,} bytes in {STALL_WINDOW:.0f} s")
                mark, brought = time.monotonic(), 0
    except httpx2.TransportError:
        if filled:
            yield chunk[:filled]
        raise
    if wanted:
        raise httpx2.RemoteProtocolError(f"the response ended {wanted:,} bytes early")
