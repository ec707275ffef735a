"""Connections whose other end is too slow: nobody holds one for long by half a request, or by taking no answer."""

from __future__ import annotations

import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from reshard.web.streams import Streams

LOOK = 5.0  # seconds between two looks at a connection
ASKING = 6  # looks after which a request must have come whole; the longest body then comes at 40 kB/s
STUCK = 3  # looks in which an answer that waits must move; its buffer of some ten kilobytes is full all the while


class Connection(H11Protocol):
    """Uvicorn's own ends only those that are idle after an answer."""

    _asking = _stuck = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._look = self.loop.call_later(LOOK, self._watch)

    def connection_lost(self, exc: Exception | None) -> None:
        self._look.cancel()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        self._stuck = 0
        super().resume_writing()

    def _watch(self) -> None:
        between = self.timeout_keep_alive_task is None and (self.cycle is None or self.cycle.response_complete)
        self._asking = self._asking + 1 if between or (self.cycle and self.cycle.more_body) else 0
        self._stuck = self._stuck + 1 if self.flow.write_paused else 0
        if self._asking >= ASKING or self._stuck >= STUCK:
            self.transport.abort()
        else:
            self._look = self.loop.call_later(LOOK, self._watch)


class Server(uvicorn.Server):
    """Uvicorn's waits for every answer before it tells the application that it is to end; a stream has no end."""

    streams: Streams

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.streams.end()
        await super().shutdown(sockets)
