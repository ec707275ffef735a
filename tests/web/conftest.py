"""`reshard web` as a process of its own, with a broker and tokens."""

from __future__ import annotations

import json
import select
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from reshard.pipeline.places import Hub
from reshard.pipeline.request import Request
from reshard.web.auth import Scope, add_token
from reshard.worker.queue.jobs import JobStore, submission
from reshard.worker.queue.scripts import PREFIX, job_key
from tests.support.procs import Broker, Machine, Proc, answer, free_port, wait_for

ROOT = "/api/v1"
PROXY = {"RESHARD_WEB_ACTORS": "ada,o'brien+{a}&amp;%*:|$x@example.org", "RESHARD_WEB_USER_HEADER": "X-User"}
HOOK = "/hooks/hub"
OURS = {"Sec-Fetch-Site": "same-origin"}

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
        return client_of(self.url, headers=headers | more.pop("headers", {}), **more)

    def get(self, path: str, scope: str | None = "read") -> Any:
        with self.client(scope) as client:
            return answered(client.get(path))

    def post(self, path: str, body: Any = None, scope: str | None = "act") -> Any:
        with self.client(scope) as client:
            return answered(client.post(path, json=body))


def client_of(url: str, **more: Any) -> httpx2.Client:
    """Of a service without TLS: to read certificates takes as long as several requests."""
    return httpx2.Client(base_url=url, timeout=30, verify=False, **more)


@contextmanager
def signed_in(site: Site, scope: str = "act") -> Iterator[httpx2.Client]:
    """A browser, more or less: it has nothing but the cookie."""
    with client_of(site.url, follow_redirects=True, headers=OURS) as client:
        there = client.post("/sign-in", data={"token": site.tokens[scope]})
        assert there.status_code == 200 and there.url.path == "/", there.text
        yield client


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
        with suppress(OSError):
            return answer(port, "/healthz")[0] == 200
        return False

    wait_for(there, "the service's first answer")
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


def dial(site: Site, receive: int | None = None, source: str = "127.0.0.1") -> socket.socket:
    line = socket.socket()
    line.bind((source, 0))
    if receive is not None:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    line.settimeout(60)
    line.connect(("127.0.0.1", int(site.url.rpartition(":")[2])))
    return line


def readable(line: socket.socket) -> bool:
    poll = select.poll()
    poll.register(line, select.POLLIN)
    return bool(poll.poll(0))


def is_ended(line: socket.socket) -> bool:
    with suppress(ConnectionResetError):
        return line.recv(65536) == b""
    return True


def fill(store: JobStore, count: int) -> None:
    """So many jobs that are done, as the steps leave them."""
    request = Request(source=Hub(repo="them/model"), target=Hub(repo="us/model"))
    published = json.dumps({"commit": "c" * 40, "ref": "main", "found": False, "source": "s" * 40, "attested": {}})
    with store.redis.pipeline(transaction=False) as pipe:
        for number in range(count):
            id, key, target, priority, stored, by = submission(request)
            at = 1_700_000_000_000 + number * 1000
            fields = {
                "id": id, "key": key, "target": target, "priority": priority, "request": stored, "asked_by": by,
                "created": at, "started": at, "state": "done", "since": at, "published": published, "confirmed": "[]",
                "bytes": 10**9, "bytes_sealed": 10**9, "shards": 5, "shards_sealed": 5,
            }  # fmt: skip
            pipe.hset(job_key(id), mapping=fields)
            pipe.zadd(f"{PREFIX}jobs", {id: at})
            pipe.zadd(f"{PREFIX}jobs:done", {id: at})
            pipe.zadd(f"{PREFIX}ids", {id: 0})
            if number % 5000 == 4999:
                pipe.execute()
        pipe.execute()
    wait_for(lambda: store.redis.zcard(f"{PREFIX}jobs") == count, "the last of them")


def pushed(repo: str, commit: str, ref: str = "refs/heads/main", scope: str = "repo.content") -> dict[str, Any]:
    """What the Hub sends of a push, by its documentation."""
    url = f"https://huggingface.co/{repo}"
    return {
        "event": {"action": "update", "scope": scope},
        "repo": {
            "type": "model",
            "name": repo,
            "id": "621ffdc036468d709f17434d",
            "private": False,
            "url": {"web": url, "api": f"https://huggingface.co/api/models/{repo}"},
            "owner": {"id": "628b753283ef59b5be89e937"},
            "headSha": commit,
        },
        "updatedRefs": [{"ref": ref, "oldSha": None, "newSha": commit}],
        "webhook": {"id": "6390e855e30d9209411de93b", "version": 3},
    }


def post(site: Site, payload: object, secret: str | None = SECRET) -> httpx2.Response:
    headers = {"X-Webhook-Secret": secret.encode()} if secret is not None else {}
    content = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    with client_of(site.url) as client:
        return client.post(HOOK, content=content, headers=headers)
