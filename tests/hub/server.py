"""A threaded HTTP/1.1 server: one thread per connection, streamed bodies, sendfile, and faults on the wire.

Threads rather than an event loop: hashing, file reads and socket calls release the interpreter lock, and
"wait until released", "reset the connection now" or "send slowly" are plain statements here.
"""

import os
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from http import HTTPStatus

from .errors import HubError, bad_request
from .faults import Effects, Faults, Rule
from .log import Entry, Log
from .wire import (
    MAX_HEAD_LINE,
    Body,
    BytesBody,
    Disconnected,
    FileBody,
    Malformed,
    Request,
    RequestBody,
    Response,
)

DISCARD = 1 << 30  # a refused upload is read up to here, so that its sender gets to see the answer
KEEP = 16 << 20  # a held request up to this size is read first, and carried out even if its sender is gone
LOST = (Disconnected, ConnectionError)  # there is no one left to tell

Handler = Callable[[Request, Entry], Response]


class Server:
    """Listens on 127.0.0.1 unless told otherwise; ``localhost`` reaches it because clients fall back from ::1."""

    def __init__(self, address: str, port: int, handle: Handler, faults: Faults, log: Log) -> None:
        self.handle = handle
        self.faults = faults
        self.log = log
        self._socket = socket.create_server((address, port), backlog=512)
        self.port: int = self._socket.getsockname()[1]

    def serve(self) -> None:
        """Accept connections for ever."""
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(target=_Connection(self, connection).run, daemon=True).start()


class _Connection:
    def __init__(self, server: Server, sock: socket.socket) -> None:
        self.server = server
        self.sock = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.stream = sock.makefile("rb")
        self.sent = 0  # body bytes of the current answer

    def run(self) -> None:
        try:
            while (request := self._next_request()) is not None:
                if not self._exchange(request):
                    break
        except LOST:
            pass
        except Malformed as error:
            self._send(bad_request(str(error)).response(), head_only=False, close=True)
        finally:
            self.stream.close()
            self.sock.close()

    def _next_request(self) -> Request | None:
        line = self.stream.readline(MAX_HEAD_LINE)
        if not line:
            return None
        words = line.decode("latin-1").split()
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            raise Malformed(f"not a request line: {line[:80]!r}")
        headers: dict[str, str] = {}
        while (line := self.stream.readline(MAX_HEAD_LINE)) not in (b"\r\n", b"\n"):
            name, colon, value = line.decode("latin-1").partition(":")
            if not colon:
                raise Malformed(f"not a header: {line[:80]!r}")
            headers[name.strip().lower()] = value.strip()
        length = headers.get("content-length", "0")
        if not length.isdecimal():
            raise Malformed(f"not a length: {length[:80]!r}")
        chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        body = RequestBody(self.stream, None if chunked else int(length))
        if headers.get("expect", "").lower() == "100-continue":
            self.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        return Request(words[0], words[1], headers, body)

    def _exchange(self, request: Request) -> bool:
        """Carry out one request under its faults; True if the connection lives on."""
        entry = self.server.log.begin(request.method, request.target, request.path)
        if request.path.startswith("/_test/"):
            response = self._carry_out(request, entry)
            return self._answer(request, response, request.body.discard(DISCARD))
        effects = self.server.faults.effects(f"{request.method} {request.target}")
        entry.fault = effects.named()
        try:
            self._wait(effects, "request", request)
            if effects.first("reset"):
                raise Disconnected("reset by a fault")
            request.body.throttle = effects.throttle
            if cut := effects.first("reset_upload"):
                request.body.cut_after = cut.options["after"]
            if status := effects.first("status"):
                body = BytesBody(status.options["body"].encode())
                response = Response(status.options["status"], dict(status.options["headers"]), body)
            else:
                response = self._carry_out(request, entry)
            reusable = request.body.discard(DISCARD)
            self._wait(effects, "answer", request)
            if nonsense := effects.first("nonsense"):
                response.body.close()
                response = Response(200, {}, BytesBody(nonsense.options["body"].encode()))
            if effects.first("lost_response"):
                raise Disconnected("the answer was lost by a fault")
        except LOST:
            entry.up = request.body.received
            self.server.log.add(entry)
            self._reset()
            raise
        return self._answer(request, response, reusable, entry, effects)

    def _wait(self, effects: Effects, when: str, request: Request) -> None:
        for rule in effects.waits(when):
            if rule.action == "delay":
                time.sleep(rule.options["seconds"])
            else:
                request.body.keep(KEEP)
                self.server.faults.hold(rule)

    def _carry_out(self, request: Request, entry: Entry) -> Response:
        try:
            return self.server.handle(request, entry)
        except HubError as refusal:
            return refusal.response()
        except (*LOST, Malformed):
            raise
        except Exception as bug:  # noqa: BLE001 - any bug of a handler is reported and answered with 500
            traceback.print_exc(file=sys.stderr)
            return HubError(500, f"{type(bug).__name__}: {bug}").response()

    def _answer(
        self,
        request: Request,
        response: Response,
        reusable: bool,
        entry: Entry | None = None,
        effects: Effects | None = None,
    ) -> bool:
        """Log and send; True if the connection is good for another request."""
        body = response.body
        try:
            lives = reusable and request.headers.get("connection", "").lower() != "close"
            head_only = request.method == "HEAD" or response.status in (204, 304)
            if entry:
                entry.status = response.status
                entry.up = request.body.received
                entry.down = 0 if head_only else body.length
                response.headers.setdefault("X-Request-Id", f"hub-{entry.n}")
                self.server.log.add(entry)
            try:
                self._send(response, head_only, close=not lives, effects=effects)
            except LOST:
                if entry:
                    self.server.log.cut(entry, self.sent)
                raise
            return lives
        finally:
            body.close()

    def _send(self, response: Response, head_only: bool, close: bool, effects: Effects | None = None) -> None:
        body = response.body
        try:
            reason = HTTPStatus(response.status).phrase
        except ValueError:
            reason = "Unknown"
        headers = {**response.headers, "Connection": "close" if close else "keep-alive"}
        headers.setdefault("Content-Length", str(body.length))
        lines = [f"HTTP/1.1 {response.status} {reason}", *(f"{name}: {value}" for name, value in headers.items())]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        self.sent = 0
        if effects and (cut := effects.first("truncate_head")):
            self._send_part_of(head, cut)
        elif head_only or not body.length:
            self.sock.sendall(head)
        elif isinstance(body, FileBody) and not (effects and effects.touch(body.offset, body.length)):
            self.sock.sendall(head)
            self._send_file(body)
        else:
            self._send_pieces(head, body, effects)

    def _send_file(self, body: FileBody) -> None:
        while self.sent < body.length:
            at = body.offset + self.sent
            count = os.sendfile(self.sock.fileno(), body.file.fileno(), at, body.length - self.sent)
            if not count:
                raise Disconnected("the stored file is shorter than it was said to be")
            self.sent += count

    def _send_pieces(self, head: bytes, body: Body, effects: Effects | None) -> None:
        """Head and first piece go out together; throttles, wrong bytes and cuts apply."""
        throttle = effects.throttle if effects else None
        truncate = effects.first("truncate") if effects else None
        end = truncate.options["after"] if truncate else body.length
        flips = effects.flips(body.offset, body.length) if effects else []
        for whole in _pieces(body, flips, throttle.step if throttle else None):
            piece = whole[: end - self.sent]
            self.sock.sendall(head + piece if head else piece)
            head = b""
            self.sent += len(piece)
            if throttle:
                throttle.spend(len(piece))
            if truncate and self.sent == end:
                self._cut(fin=truncate.options["fin"])
                raise Disconnected("the answer was cut by a fault")

    def _send_part_of(self, head: bytes, cut: Rule) -> None:
        """Never so much that the head is complete."""
        self.sock.sendall(head[: min(cut.options["after"], len(head) - 1)])
        self._cut(fin=cut.options["fin"])
        raise Disconnected("the answer's head was cut by a fault")

    def _cut(self, fin: bool) -> None:
        if fin:
            self.sock.shutdown(socket.SHUT_RDWR)
        else:
            self._reset()

    def _reset(self) -> None:
        """Close with RST instead of FIN."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _pieces(body: Body, flips: list[int], step: int | None) -> Iterator[bytes]:
    """The body's pieces with wrong bytes put in, in steps of at most ``step`` bytes."""
    at = body.offset
    for chunk in body.chunks():
        for offset in flips:
            if at <= offset < at + len(chunk):
                changed = bytearray(chunk)
                changed[offset - at] ^= 0xFF
                chunk = bytes(changed)
        at += len(chunk)
        size = step or max(1, len(chunk))
        for start in range(0, len(chunk), size):
            yield chunk[start : start + size]
