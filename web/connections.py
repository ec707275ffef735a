"""Connections whose other end is too slow, or too many of one kind: nobody holds the service by them.

A connection is a stranger's until a request on it shows who asks: by a token, the proxy's header or the secret of
webhooks.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Callable
from ipaddress import IPv4Address, ip_address
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from reshard.web.guard import PROBES
from reshard.web.streams import Streams

# Together with those to the broker they fit into the 1,024 files that a process may open by default.
CONNECTIONS = 800  # at once; beyond it every request is answered 503, but for the probes
STRANGERS_MAX = 150  # at once; beyond it the oldest one that is silent is ended for the next
STRANGERS_OF_PEER = 50  # the same, of one address but the trusted proxy's; a browser opens six
# Seconds before a connection counts. Many are accepted before any is read, and what they sent must be read first. In a
# longer time a flood of some thousand a second would reach CONNECTIONS.
YOUNG = 0.1

LOOK = 2.5  # seconds between two looks at a connection
SILENT = 5  # seconds that a stranger is given to say a whole request, and to say another one
ASKING = 30  # seconds that others are given; the longest body then comes at 40 kB/s
STUCK = 15  # seconds in which an answer that waits must move; its buffer of some ten kilobytes is full all the while
KEEP_ALIVE = 30  # seconds that an idle connection is kept, of whoever is known

IPV6_SITE = 64  # bits of an address that name one site, whose owner has all addresses below it


class Connection(H11Protocol):
    """Uvicorn's own ends only those that are idle after an answer."""

    known = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.app_state = {**self.app_state, "connection": self}
        self.timeout_keep_alive = SILENT
        self._asking = self._stuck = 0.0  # seconds, as the looks count them
        self._look = self.loop.call_later(LOOK, self._watch)
        self._count = self.loop.call_later(YOUNG, self._strangers.add, self)

    @property
    def limit_concurrency(self) -> int | None:
        """Uvicorn reads it for each request, once its path is known."""
        return None if self.scope["path"] in PROBES else CONNECTIONS

    @limit_concurrency.setter
    def limit_concurrency(self, configured: int | None) -> None:
        """What is configured is of no path."""

    @property
    def peer(self) -> str:
        """The address of the other end; of IPv6 its site."""
        try:
            address = ip_address(self.client[0] if self.client else "")
        except ValueError:  # of a Unix socket
            return ""
        if isinstance(address, IPv4Address) or address.ipv4_mapped:
            return str(address)
        return str(int(address) >> (address.max_prefixlen - IPV6_SITE))

    @property
    def waits(self) -> bool:
        """Whether it is the other end that has to say something; of a body that we do not take yet, it is not."""
        if self.flow.read_paused:
            return False
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def recognize(self) -> None:
        """It is no stranger's; may be called by any thread."""
        self.known, self.timeout_keep_alive = True, KEEP_ALIVE

    def connection_lost(self, exc: Exception | None) -> None:
        self._look.cancel()
        self._count.cancel()
        self._strangers.discard(self)
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        self._stuck = 0
        super().resume_writing()

    @property
    def _strangers(self) -> Strangers:
        assert isinstance(self.server_state, State)
        return self.server_state.strangers

    def _watch(self) -> None:
        idle = self.timeout_keep_alive_task is not None  # uvicorn ends it then
        self._asking = self._asking + LOOK if self.waits and not idle else 0
        self._stuck = self._stuck + LOOK if self.flow.write_paused else 0
        if self._asking >= (ASKING if self.known else SILENT) or self._stuck >= STUCK:
            self.transport.abort()
        else:
            self._look = self.loop.call_later(LOOK, self._watch)


class Strangers:
    """The connections of strangers, oldest first: where there are too many, the oldest that is silent gives way."""

    def __init__(self, trusted: Callable[[str], bool]) -> None:
        """``trusted`` says whether an address is the proxy's, on whose connections many people come."""
        self._trusted = trusted
        self._all: dict[Connection, None] = {}
        self._of: defaultdict[str, dict[Connection, None]] = defaultdict(dict)

    def add(self, connection: Connection) -> None:
        if connection.known:
            return
        rooms = [(self._all, STRANGERS_MAX)]
        if not (connection.client and self._trusted(connection.client[0])):
            rooms.insert(0, (self._of[connection.peer], STRANGERS_OF_PEER))
        for room, most in rooms:
            room[connection] = None
            if len(room) > most:
                self._make_room(room, most)

    def discard(self, connection: Connection) -> None:
        self._all.pop(connection, None)
        if (room := self._of.get(connection.peer)) is not None:
            room.pop(connection, None)
            if not room:
                del self._of[connection.peer]

    def _make_room(self, room: dict[Connection, None], most: int) -> None:
        """Those that became known count no more; and who waits for our answer is not silent."""
        for one in [*room]:
            if one.known:
                self.discard(one)
            elif len(room) > most and one.waits:
                one.transport.abort()
                self.discard(one)


class State(ServerState):
    def __init__(self, trusted: Callable[[str], bool]) -> None:
        super().__init__()
        self.strangers = Strangers(trusted)


class Server(uvicorn.Server):
    """Uvicorn's waits for every answer before it tells the application that it is to end; a stream has no end."""

    def __init__(self, config: uvicorn.Config, streams: Streams, trusted: Callable[[str], bool]) -> None:
        super().__init__(config)
        self.server_state = State(trusted)
        self._streams = streams

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._streams.end()
        await super().shutdown(sockets)
