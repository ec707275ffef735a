"""Weights as streams of deduplicated chunks, by hf_xet: down, through the copy loop, up again, and never on the disk.

hf_xet repeats its own requests, refreshes its own tokens and takes the sha256 of what it uploads. Ours is what it does
not do: one session for each process after a fork, buffers that fit the memory limit, reads that go on where a stream
broke, and errors in words of our own. Checked against hf_xet 1.8.0; tests/pipeline/stores/test_contracts.py says what
is relied on.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from urllib.parse import quote

import httpx2
from xxhash import xxh3_128

from reshard.pipeline.errors import HubUnreachable, ReshardError, SourceChanged
from reshard.pipeline.limits import (
    BACKOFF_FIRST,
    CHUNK,
    CONNECT_TIMEOUT,
    PRIME,
    PRIME_MIN,
    PULSE,
    READ_TIMEOUT,
    XET_ATTEMPTS,
    XET_CHECKS,
    XET_READ_MIN,
    XORB_MAX,
)
from reshard.pipeline.places import Hub
from reshard.pipeline.protocols import Source, Traffic, Visibility
from reshard.pipeline.stores import heap
from reshard.pipeline.stores.answers import Reconstruction
from reshard.pipeline.stores.carry import check_written
from reshard.pipeline.stores.http import HubSource
from reshard.pipeline.stores.hub_api import HubApi
from reshard.pipeline.stores.lfs import missing
from reshard.pipeline.stores.pace import RateLimiter
from reshard.pipeline.stores.refusal import Refusal, meaning
from reshard.pipeline.stores.retry import Retry
from reshard.pipeline.tensors import StoredFile

log = logging.getLogger(__name__)

# What hf_xet raises: builtin classes and its own subclasses of OSError, distinguished only by their text.
XetFailure = (OSError, RuntimeError, ValueError)
_URL = re.compile(r"https?://\S+")

_sessions: dict[tuple[int, int], Any] = {}


def installed() -> bool:
    """Whether hf_xet is installed and not switched off, by huggingface_hub's own rule."""
    return find_spec("hf_xet") is not None and os.environ.get("HF_HUB_DISABLE_XET", "").upper() not in {
        "1", "ON", "YES", "TRUE",
    }  # fmt: skip


def session(memory_limit: int) -> Any:
    """This process's XetSession for a memory limit in bytes; a child of a fork gets one of its own."""
    key = (os.getpid(), memory_limit)
    if key not in _sessions:
        import hf_xet

        heap.for_xet()
        _sessions.setdefault(key, hf_xet.XetSession(hf_xet.XetConfig().with_config(settings(memory_limit))))
    return _sessions[key]


def settings(memory_limit: int) -> dict[str, Any]:
    """hf_xet's knobs that decide how much it holds at once; its defaults take gigabytes.

    A sixteenth of the limit is read ahead, in fetches of a quarter to a half of that. Most of the rest goes to xorbs
    of up to 64 MiB on their way up: one that is being filled, one that is being packed, and one that is sent.
    """
    ahead = memory_limit // 16
    streams = max(1, memory_limit // (8 * XORB_MAX))
    return {
        "reconstruction.download_buffer_size": ahead,
        "reconstruction.download_buffer_perfile_size": ahead,
        "reconstruction.download_buffer_limit": ahead,
        "reconstruction.min_prefetch_buffer": ahead // 2,
        "reconstruction.min_reconstruction_fetch_size": ahead // 4,
        "reconstruction.max_reconstruction_fetch_size": ahead // 2,
        "client.ac_max_download_concurrency": 4 * streams,
        "client.ac_initial_download_concurrency": 2,
        "client.ac_max_upload_concurrency": streams,
        "client.ac_initial_upload_concurrency": 1,
        "client.connect_timeout": f"{CONNECT_TIMEOUT:.0f}s",
        "client.read_timeout": f"{READ_TIMEOUT:.0f}s",
        "client.retry_base_delay": f"{BACKOFF_FIRST * 1000:.0f}ms",
        "telemetry.enabled": False,
    }


def plain(error: BaseException) -> str:
    """hf_xet's message on one line, without URLs, which may be signed."""
    return _URL.sub("<url>", " ".join(str(error).split()))


def is_not_found(error: BaseException) -> bool:
    """Whether the store said that it has no such object."""
    return type(error).__name__ == "XetObjectNotFoundError" or "404 Not Found" in str(error)


# ------------------------------------------------------------------------------------------------------------ source


class XetSource(HubSource):
    """A repository at one commit whose large files are read as streams, and the rest over HTTP."""

    transport = "xet"
    read_min = XET_READ_MIN

    def __init__(self, api: HubApi, place: Hub, commit: str, visibility: Visibility, memory_limit: int) -> None:
        super().__init__(api, place, commit, visibility)
        self._memory_limit = memory_limit
        self.token_route = f"/api/models/{place.repo}/xet-read-token/{quote(commit, safe='')}"
        self._groups: dict[int, Any] = {}
        # The content store is away, as that of the Hub which a mirror copies: each read would wait for it.
        self._is_away = False

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[memoryview]:
        if self._is_away or file.xet is None or not 0 <= start <= stop - self.read_min or stop > file.size:
            return super().read(file, start, stop)
        return self._stream(file, start, stop)

    def _stream(self, file: StoredFile, start: int, stop: int) -> Iterator[memoryview]:
        """A stream, and another one where it broke; what the content store will not give comes over HTTP instead."""
        retry = Retry(self.api.endpoint, self.api.limiter, XET_ATTEMPTS)
        at = start
        while at < stop:
            try:
                for view in self._open(file, at, stop):
                    at += len(view)
                    retry.progress()
                    yield view
                if at < stop:
                    raise ConnectionError(f"the stream ended {stop - at:,} bytes early")
            except XetFailure as error:
                self._judge(file, error)
                try:
                    retry.after(httpx2.ReadError(plain(error)))
                except HubUnreachable as unreachable:
                    self._is_away = self._is_away or at == start
                    log.warning("%s: switched to HTTP at byte %d: %s", file.path, at, unreachable)
                    yield from super().read(file, at, stop)
                    return

    def _open(self, file: StoredFile, at: int, stop: int) -> Iterator[memoryview]:
        """One stream in views of at most CHUNK bytes; hf_xet yields as much as 64 MiB at once."""
        import hf_xet

        stream = self._group().download_stream(hf_xet.XetFileInfo(file.xet, file.size), start=at, end=stop)
        try:
            for data in stream:
                view = memoryview(data)
                for first in range(0, len(view), CHUNK):
                    yield view[first : first + CHUNK]
        finally:
            stream.cancel()

    def _group(self) -> Any:
        """This process's connection to the store for this repository."""
        if os.getpid() not in self._groups:
            self._groups[os.getpid()] = session(self._memory_limit).new_download_stream_group(
                token_refresh_url=self.api.endpoint + self.token_route,
                token_refresh_headers=self.api.headers,
            )
        return self._groups[os.getpid()]

    def _judge(self, file: StoredFile, error: BaseException) -> None:
        """Returns when the failure may pass. The Hub is asked first: it says why it gives no token, hf_xet does not."""
        with meaning(self._unreadable):
            self.api.xet_token(self.token_route)
        if is_not_found(error):
            raise SourceChanged(place=str(self.place), what=f"{file.path} is no longer in the store") from error


# -------------------------------------------------------------------------------------------------------------- sink


def write_token_route(repo: str, ref: str, pull_request: bool) -> str:
    """Where a token comes from for ``ref``, or for a pull request to it that is yet to be opened."""
    return f"/api/models/{repo}/xet-write-token/{quote(ref, safe='')}" + ("?create_pr=1" if pull_request else "")


class XetSink:
    """A Sink for one repository; ``route`` is where the Hub gives out its write tokens."""

    transport = "xet"

    def __init__(self, api: HubApi, repo: str, route: str, memory_limit: int, pull_request: bool = False) -> None:
        self.api = api
        self.repo = repo
        self._route = route
        self._pull_request = pull_request
        self._memory_limit = memory_limit

    def batch(self, reads: Sequence[StoredFile], source: Source | None = None) -> XetBatch:
        heads = [file for file in reads if source is not None and file.xet and file.size >= PRIME_MIN]
        return XetBatch(self, heads, source)

    def upload(self) -> Any:
        with self.meaning():
            return session(self._memory_limit).new_upload_commit(
                token_refresh_url=self.api.endpoint + self._route, token_refresh_headers=self.api.headers
            )

    @contextmanager
    def meaning(self) -> Iterator[None]:
        """Inside, a failure of hf_xet is what it means. The Hub is asked first: it says why it gives no token."""
        try:
            yield
        except XetFailure as error:
            with meaning(lambda refusal: refusal.as_target(self.repo, self._pull_request)):
                self.api.xet_token(self._route)
            raise HubUnreachable(endpoint=f"the content store of {self.api.endpoint}", what=plain(error)) from error

    def lost(self, stored: Sequence[StoredFile]) -> list[StoredFile]:
        """Those of ``stored`` that the store has no record of, or whose first bytes are gone.

        An object that came over LFS, from a job that began without Xet, is asked for there.
        """
        lost = missing(self.api, self.repo, [file for file in stored if not file.xet], self._pull_request)
        chunked = [file for file in stored if file.xet]
        if not chunked:
            return lost
        with meaning(lambda refusal: refusal.as_target(self.repo, self._pull_request)):
            token = self.api.kept_xet_token(self._route)
        if token is None:  # the Hub has no such store any more
            return lost + chunked
        with ThreadPoolExecutor(XET_CHECKS) as pool:
            gone = pool.map(lambda file: self._is_gone(file, token.casUrl, token.accessToken), chunked)
            return lost + [file for file, is_gone in zip(chunked, gone, strict=True) if is_gone]

    def _is_gone(self, file: StoredFile, store: str, token: str) -> bool:
        """Asked of the store itself (https://huggingface.co/docs/xet/api): hf_xet's streams may end without an error.

        Only a 404 counts. The Hub refuses a commit that names an object which is gone after all.
        """
        headers = {"Authorization": f"Bearer {token}", "Range": "bytes=0-0"}
        try:
            path = f"{store}/v1/reconstructions/{file.xet}"
            part = self.api.data(Reconstruction, "GET", path, headers=headers).first
            self.api.call("GET", part.url, headers={"Range": f"bytes={part.url_range.start}-{part.url_range.end}"})
        except Refusal as refusal:
            if refusal.status == 404:
                return True
            log.warning("cannot tell whether %s is still stored: %s", file.path, refusal)
        return False


class XetBatch:
    """One upload commit: nothing in it is visible before ``seal`` returns."""

    def __init__(self, sink: XetSink, heads: Sequence[StoredFile], source: Source | None) -> None:
        self._sink = sink
        self._heads = heads
        self._source = source
        self._upload: Any = None
        self._end_pulse: Callable[[], None] = lambda: None
        self._stored: list[tuple[str, Any]] = []
        self.traffic = Traffic()

    def open(self, path: str, size: int) -> XetWriter:
        if self._upload is None:
            self._upload = self._sink.upload()
            self._end_pulse = _pulse(self._upload, self._sink.api.limiter)
            self._prime()
        with self._sink.meaning():
            return XetWriter(self._sink, self._stored, self._upload.start_upload_stream(name=path), path, size)

    def _prime(self) -> None:
        """Send the head of each source file as a file that no commit will name.

        A file's first chunk is always one that the store may be asked about. Its answer lists the chunks that follow
        in the source, so that of the shards only what is new has to be sent.
        """
        for file in self._heads:
            assert self._source is not None
            writer = self.open(f"head of {file.path}", min(PRIME, file.size))
            for view in self._source.read(file, 0, min(PRIME, file.size)):
                writer.write(view)
            writer.end()  # and forget what it is called

    def settle(self) -> list[StoredFile]:
        return []  # hf_xet answers for a whole upload

    def seal(self) -> list[StoredFile]:
        if self._upload is None:
            return []
        with self._sink.meaning():
            metrics = self._upload.wait_to_finish().dedup_metrics
        self._end()
        self.traffic = Traffic(metrics.total_bytes_uploaded, metrics.deduped_bytes)
        return [StoredFile(path, x.file_size, sha256=x.sha256, xet=x.hash) for path, x in self._stored]

    def abort(self) -> None:
        if self._upload is not None:
            self._upload.abort()
            self._end()
        self._stored.clear()

    def _end(self) -> None:
        self._upload = None
        self._end_pulse()
        heap.give_back()


def _pulse(upload: Any, limiter: RateLimiter) -> Callable[[], None]:
    """Tell the rate limiter what hf_xet sends while we wait for it, which may be long where a line is slow.

    Returns what ends that.
    """
    ended = threading.Event()

    def watch() -> None:
        sent = 0
        while not ended.wait(PULSE):
            now = upload.progress().total_transfer_bytes_completed
            if now > sent:
                limiter.moved(now - sent)
                sent = now

    def end() -> None:
        ended.set()
        thread.join()

    thread = threading.Thread(target=watch, name="xet-pulse", daemon=True)
    thread.start()
    return end


class XetWriter:
    """One stream of an upload commit; ``stored`` gets its path, and what the store calls it."""

    def __init__(self, sink: XetSink, stored: list[tuple[str, Any]], stream: Any, path: str, size: int) -> None:
        self._sink = sink
        self._stored = stored
        self._stream = stream
        self._path = path
        self._size = size
        self._handed = xxh3_128()
        self._written = 0

    def write(self, view: memoryview) -> None:
        self._handed.update(view)
        self._written += len(view)
        with self._sink.meaning():
            self._stream.write(bytes(view))  # it takes nothing else

    def finish(self) -> str:
        check_written(self._path, self._written, self._size)
        stored = self.end()
        if stored.file_size != self._size:
            raise ReshardError(what=f"{self._path}: {stored.file_size} of {self._size} bytes arrived")
        self._stored.append((self._path, stored))
        return self._handed.hexdigest()

    def end(self) -> Any:
        """Complete the stream; returns what the store calls it."""
        with self._sink.meaning():
            return self._stream.finish().xet_info
