"""HTTP/1.1 messages: a request whose body is a stream, a response whose body may be part of a file."""

import io
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

CHUNK = 1 << 20  # bytes held per connection, whatever the size of a body
MAX_HEAD_LINE = 1 << 16
MAX_JSON = 64 << 20  # a commit with many regular files is the largest body that is ever held in memory


class Disconnected(Exception):
    """The peer went away, or a fault cut the connection; nothing can be answered."""


class Malformed(Exception):
    """The bytes on the connection are not an HTTP/1.1 request."""


QUEUED = 0.1  # seconds; what the buffers of a line hold, which keeps it busy while a sender is late


class Throttle:
    """A shared rate in bytes per second; every user of the same throttle waits for the others' bytes."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.step = max(1024, min(CHUNK, int(rate / 20)))
        self._lock = threading.Lock()
        self._free_at = 0.0

    def spend(self, count: int) -> None:
        """Wait until ``count`` bytes are paid for."""
        with self._lock:
            self._free_at = max(time.monotonic() - QUEUED, self._free_at) + count / self.rate
            wait = self._free_at - time.monotonic()
        time.sleep(max(0.0, wait))


class RequestBody:
    """The body of one request, read once, in chunks; ``received`` counts its bytes."""

    def __init__(self, stream: io.BufferedReader, length: int | None) -> None:
        """``length`` is None for a chunked body."""
        self._stream = stream
        self._left = length
        self._chunked = length is None
        self._kept: bytes | None = None
        self.length = length
        self.received = 0
        self.ended = length == 0
        self.throttle: Throttle | None = None
        self.cut_after: int | None = None

    def chunks(self) -> Iterator[memoryview]:
        """Views of one reused buffer: a view is valid until the next one is asked for."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            yield memoryview(kept)
        buffer = memoryview(bytearray(min(CHUNK, self.length or CHUNK)))
        while not self.ended:
            if count := self._fill(buffer):
                yield buffer[:count]

    def read(self, limit: int = MAX_JSON) -> bytes:
        parts = bytearray()
        for chunk in self.chunks():
            parts += chunk
            if len(parts) > limit:
                raise Malformed(f"body larger than {limit} bytes")
        return bytes(parts)

    def json(self) -> Any:
        return json.loads(self.read() or b"null")

    def keep(self, limit: int) -> None:
        """Take a small body off the connection now, so that it can be carried out without its sender."""
        if self.length is not None and self.length <= limit:
            self._kept = self.read()

    def discard(self, limit: int) -> bool:
        """Read what is left, up to ``limit`` bytes; True if the connection can be used for a next request."""
        if self._left is not None and self._left > limit:
            return False
        for chunk in self.chunks():
            limit -= len(chunk)
            if limit < 0:
                return False
        return True

    def _fill(self, buffer: memoryview) -> int:
        if self._chunked and not self._left:
            self._left = self._next_chunk_size()
            if self._left == 0:
                self.ended = True
                return 0
        assert self._left is not None
        want = min(len(buffer), self._left)
        if self.throttle:
            want = min(want, self.throttle.step)
        if self.cut_after is not None:
            want = min(want, self.cut_after - self.received)
            if want <= 0:
                raise Disconnected("the upload was cut by a fault")
        count = self._stream.readinto1(buffer[:want])
        if not count:
            raise Disconnected("the request body ended early")
        self.received += count
        self._left -= count
        if self._left == 0:
            if self._chunked:
                self._stream.readline(MAX_HEAD_LINE)
            else:
                self.ended = True
        if self.throttle:
            self.throttle.spend(count)
        return count

    def _next_chunk_size(self) -> int:
        line = self._stream.readline(MAX_HEAD_LINE)
        try:
            size = int(line.split(b";")[0], 16)
        except ValueError:
            raise Disconnected("the chunked body ended early") from None
        if size == 0:
            while self._stream.readline(MAX_HEAD_LINE).strip():
                pass  # trailers
        return size


@dataclass
class Request:
    """One request. ``path`` is still percent-encoded: a revision is one segment of it (``refs%2Fpr%2F1``)."""

    method: str
    target: str
    headers: dict[str, str]  # lower-case names
    body: RequestBody
    path: str = field(init=False)
    query: dict[str, list[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.path, _, query = self.target.partition("?")
        self.query = parse_qs(query, keep_blank_values=True)

    def arg(self, name: str) -> str | None:
        """The first value of a query argument; ``expand`` is also found as ``expand[]``."""
        return next(iter(self.args(name)), None)

    def args(self, name: str) -> list[str]:
        return self.query.get(name, []) + self.query.get(f"{name}[]", [])

    @property
    def origin(self) -> str:
        return f"http://{self.headers.get('host', '127.0.0.1')}"

    @property
    def other_origin(self) -> str:
        """The same server under its other name: what a CDN's host is to the Hub's."""
        host, _, port = self.headers.get("host", "127.0.0.1").partition(":")
        names = {"127.0.0.1": "localhost", "localhost": "127.0.0.1"}
        return f"http://{names.get(host, f'cdn.{host}')}:{port}"


class FileBody:
    """``length`` bytes of a file from ``offset``; opened now, so that a later removal does no harm."""

    def __init__(self, path: Path, offset: int, length: int) -> None:
        self.file = path.open("rb")
        self.offset = offset
        self.length = length

    def chunks(self) -> Iterator[bytes]:
        at, end = self.offset, self.offset + self.length
        while at < end:
            data = os.pread(self.file.fileno(), min(CHUNK, end - at), at)
            if not data:
                raise Disconnected(f"{self.file.name} is shorter than it was said to be")
            at += len(data)
            yield data

    def close(self) -> None:
        self.file.close()


class StreamBody:
    """``length`` bytes, made piece by piece; ``offset`` is where they begin in the file that they are part of."""

    def __init__(self, pieces: Iterator[bytes], offset: int, length: int) -> None:
        self._pieces = pieces
        self.offset = offset
        self.length = length

    def chunks(self) -> Iterator[bytes]:
        return self._pieces

    def close(self) -> None:
        pass


class BytesBody(StreamBody):
    """A body that is in memory."""

    def __init__(self, data: bytes, offset: int = 0) -> None:
        super().__init__(iter((data,) if data else ()), offset, len(data))


Body = FileBody | StreamBody


@dataclass
class Response:
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: Body = field(default_factory=lambda: BytesBody(b""))


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    data = json.dumps(value).encode()
    return Response(status, {"Content-Type": "application/json; charset=utf-8", **(headers or {})}, BytesBody(data))
