"""Honest requests beside the bounds on connections: many at once, through a proxy, and with a body that has to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvicorn

from reshard.web import connections
from reshard.web.connections import STRANGERS_OF_PEER, Connection, State
from tests.support.procs import Broker, Machine, free_port
from tests.web.conftest import PROXY, ROOT, Site, dial, is_ended, readable, start


def test_requests_that_came_at_once_from_one_address_are_all_answered(site: Site) -> None:
    """The process is stopped meanwhile, so that it accepts all of them before it reads any."""
    asked = f"GET {ROOT}/service HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {site.tokens['read']}\r\n\r\n"
    service = psutil.Process(site.process.pid)
    with ExitStack() as stack:
        service.suspend()
        stack.callback(service.resume)
        lines = [stack.enter_context(closing(dial(site))) for _ in range(4 * STRANGERS_OF_PEER)]
        for line in lines:
            line.sendall(asked.encode())
        service.resume()
        for line in lines:
            assert line.recv(65536).startswith(b"HTTP/1.1 200 ")


@pytest.fixture
def proxied(tmp_path: Path, broker: Broker) -> Iterator[Site]:
    """Behind a proxy at this address."""
    port = free_port()
    with Machine(tmp_path, broker.url) as machine:
        process = start(machine, tmp_path / "tokens", port, RESHARD_WEB_PROXY="127.0.0.1", **PROXY)
        yield Site(machine, process, f"http://127.0.0.1:{port}", {})


def test_the_proxys_address_holds_more_connections_than_others(proxied: Site) -> None:
    with ExitStack() as stack:
        some = STRANGERS_OF_PEER + 10
        proxys = [stack.enter_context(closing(dial(proxied))) for _ in range(some)]
        others = [stack.enter_context(closing(dial(proxied, source="127.0.0.2"))) for _ in range(some)]
        assert is_ended(others[0])
        assert not any(readable(line) for line in proxys)


def test_who_sends_a_body_is_not_silent_while_the_service_does_not_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where all threads are busy: uvicorn stops reading at 64 kB."""
    monkeypatch.setattr(connections, "LOOK", 0.001)
    monkeypatch.setattr(connections, "SILENT", 0.1)
    assert b"\r\n1000000\r\n" in asyncio.run(_sent_late(1_000_000))


async def _sent_late(size: int) -> bytes:
    """The answer to a body of this size, which is taken when a silent connection would have ended."""
    paused, late = asyncio.Event(), asyncio.Event()

    class Looked(Connection):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.flow.read_paused and not paused.is_set():
                paused.set()
                self._wait(1000)

        def _wait(self, looks: int) -> None:
            """As long as so many looks at a connection take, on this very loop."""
            if looks and not late.is_set():
                self.loop.call_later(connections.LOOK, self._wait, looks - 1)
            else:
                late.set()

        def connection_lost(self, exc: Exception | None) -> None:
            late.set()
            super().connection_lost(exc)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await late.wait()
        taken, more = 0, True
        while more and (message := await receive())["type"] == "http.request":
            taken, more = taken + len(message["body"]), message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(taken).encode()})

    config = uvicorn.Config(app, http=Looked, ws="none", lifespan="off", log_config=None)
    config.load()
    state, loop = State(lambda peer: False), asyncio.get_running_loop()
    async with await loop.create_server(lambda: Looked(config, state, {}), "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(f"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n".encode())
        writer.write(b" " * size)
        await paused.wait()
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()
