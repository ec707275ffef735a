"""`reshard web` as a process of its own, with a broker and tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from reshard.web.auth import Scope, add_token
from reshard.worker.queue.jobs import JobStore
from tests.support.procs import Broker, Machine, Proc, free_port, wait_for

SECRET = "a secret that the Hub and the service share"
WEB = [sys.executable, "-c", "from reshard.cli.main import main; main()", "web"]


@dataclass
class Site:
    """A running service, and clients of it with each scope."""

    machine: Machine
    process: Proc
    url: str
    tokens: dict[str, str]

    def client(self, scope: str | None = "act", **more: Any) -> httpx2.Client:
        headers = {"Authorization": f"Bearer {self.tokens[scope]}"} if scope else {}
        return httpx2.Client(base_url=self.url, headers=headers | more.pop("headers", {}), timeout=30, **more)

    def get(self, path: str, scope: str | None = "read") -> Any:
        with self.client(scope) as client:
            return answered(client.get(path))

    def post(self, path: str, body: Any = None, scope: str | None = "act") -> Any:
        with self.client(scope) as client:
            return answered(client.post(path, json=body))


def answered(response: httpx2.Response) -> Any:
    """The document, whose request was carried out."""
    assert response.status_code == 200, response.text
    document = response.json()
    assert document.pop("schema") == 1
    return document


def start(machine: Machine, tokens: Path, port: int, **environment: str) -> Proc:
    """`reshard web` on this port, once it answers."""
    own = {"RESHARD_WEB_PORT": str(port), "RESHARD_WEB_TOKENS": str(tokens), "RESHARD_WEB_HOOK_SECRET": SECRET}
    process = machine.launch("web", WEB, **own | environment)

    def there() -> bool:
        assert process.alive(), process.said()
        try:
            return httpx2.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
        except httpx2.TransportError:
            return False

    wait_for(there, "the service's first answer", 60)
    return process


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("broker")) as broker:
        yield broker


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, broker: Broker) -> Iterator[Site]:
    """The service with nobody who works."""
    folder, port = tmp_path_factory.mktemp("site"), free_port()
    tokens = {scope: add_token(folder / "tokens", f"{scope}er", Scope(scope)) for scope in ("read", "act")}
    with Machine(folder, broker.url, RESHARD_ALLOWED_FOLDERS=str(tmp_path_factory.getbasetemp())) as machine:
        yield Site(machine, start(machine, folder / "tokens", port), f"http://127.0.0.1:{port}", tokens)


@pytest.fixture
def store(broker: Broker) -> Iterator[JobStore]:
    """The queue behind it, emptied."""
    broker.client().flushall()
    with JobStore.at(broker.url) as store:
        yield store
