"""The stream of events of the real process: each event once and in order, for many readers, over restarts."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx2
import psutil
import pytest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.types import Message

from reshard.client.events import Followed, News
from reshard.client.queue import Queue
from reshard.client.served import Served
from reshard.pipeline.errors import BrokerUnavailable
from reshard.pipeline.places import Hub
from reshard.pipeline.planning.model import Plan
from reshard.pipeline.request import Request
from reshard.web import streams
from reshard.web.app import Web, build
from reshard.web.auth import Scope, add_token
from reshard.web.settings import WebSettings
from reshard.web.streams import BEHIND_MAX, READERS_OF_ONE, Streams
from reshard.worker.queue.events import EVENTS
from reshard.worker.queue.jobs import JobStore
from reshard.worker.settings import Settings
from tests.support.procs import Broker, Machine, answer, busy, free_port, wait_for
from tests.support.stuck import STUCK
from tests.web.conftest import Site, dial, start
from tests.worker.conftest import another, copying, plan

__all__ = ["plan"]

PATH = "/api/v1/events"
READERS = 200
MEMORY = 20_000_000  # bytes that so many readers may take together


class Reader:
    """An open stream, read as browsers do; ``last`` is the id that it would come back with."""

    def __init__(self, site: Site, path: str = PATH, last: str = "", scope: str = "read") -> None:
        self._line = dial(site)
        self._buffer, self.last = b"", last
        head = [f"GET {path} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {site.tokens[scope]}"]
        head += [f"Last-Event-ID: {last}"] if last else []
        self._line.sendall("\r\n".join([*head, "", ""]).encode())
        self.headers = self._until(b"\r\n\r\n")
        assert self.headers.startswith(b"HTTP/1.1 200 ") and b"text/event-stream" in self.headers, self.headers
        assert b": open" in self._until(b"\n\n")

    def next(self) -> tuple[str, dict[str, Any]]:
        """The next message: event or progress, and what it holds; raises EOFError where it was hung up on."""
        while True:
            fields: dict[str, str] = {}
            for line in self._until(b"\n\n").decode().splitlines():
                name, _, value = line.partition(": ")
                fields[name] = value
            if "data" in fields:
                self.last = fields.get("id", self.last)
                return fields["event"], json.loads(fields["data"])

    def events(self, count: int) -> list[dict[str, Any]]:
        found = []
        while len(found) < count:
            kind, data = self.next()
            if kind == "event":
                found.append(data["event"])
        return found

    def close(self) -> None:
        self._line.close()

    def _until(self, end: bytes) -> bytes:
        """What comes up to ``end``, and it; the sizes of chunks stand on lines of their own between the messages."""
        while end not in self._buffer:
            data = self._line.recv(1 << 20)
            if not data:
                raise EOFError
            self._buffer += data
        found, _, self._buffer = self._buffer.partition(end)
        return found + end


@pytest.fixture
def own(tmp_path: Path, broker: Broker, site: Site) -> Iterator[Site]:
    """A service of this test's alone, with the tokens of the shared one."""
    (tmp_path / "tokens").write_bytes((site.machine.folder / "tokens").read_bytes())
    with Machine(tmp_path, broker.url) as machine:
        port = free_port()
        process = start(machine, tmp_path / "tokens", port)
        yield Site(machine, process, f"http://127.0.0.1:{port}", {**site.tokens})


def submit(store: JobStore, number: int) -> str:
    return store.submit(Request(source=Hub(repo="them/model"), target=Hub(repo=f"us/m{number}"))).id


def test_events_come_in_order_and_those_of_one_job_alone_where_it_is_asked_for(site: Site, store: JobStore) -> None:
    first = submit(store, 0)
    with closing(Reader(site)) as every, closing(Reader(site, f"/api/v1/jobs/{first[:6]}/events")) as one:
        others = [submit(store, number) for number in range(1, 20)]
        store.cancel(first)
        assert [event["job"] for event in every.events(19)] == others
        kinds = [(event["kind"], event.get("state")) for event in one.events(2)]
        assert kinds == [("state", "cancelled"), ("ended", "cancelled")]
        assert [event["job"] for event in every.events(2)] == [first, first]
    with site.client("read") as client:
        assert client.get("/api/v1/jobs/none/events").status_code == 404


def test_a_reader_that_comes_back_gets_each_event_once_also_over_a_restart(own: Site, store: JobStore) -> None:
    with closing(Reader(own)) as reader:
        jobs = [submit(store, number) for number in range(5)]
        assert [event["job"] for event in reader.events(5)] == jobs
        last = reader.last
        own.process.terminate()
        with pytest.raises((EOFError, ConnectionResetError)):
            reader.events(1)
    own.process.wait(30)
    jobs = [submit(store, number) for number in range(5, 1205)]  # more than are read at once, or may wait
    restarted = start(own.machine, own.machine.folder / "tokens", int(own.url.rpartition(":")[2]))
    assert restarted.alive()
    with closing(Reader(own, last=last)) as reader:
        jobs.append(submit(store, 1205))
        assert [event["job"] for event in reader.events(1201)] == jobs


def test_progress_of_what_is_at_work_comes_between_and_has_no_id(site: Site, store: JobStore, plan: Plan) -> None:
    with closing(Reader(site)) as reader:
        worker = another(store)
        job, lease = copying(store, worker, plan)
        worker.renew(lease, 123, progress=True)
        while (found := reader.next())[0] != "progress" or found[1]["progress"]["bytes_done"] != 123:
            pass
        said, before = found[1]["progress"], reader.last
    assert said["id"] == job and said["shards"] == len(plan.shards) and found[1]["schema"] == 1
    assert {claim["unit"]: claim["bytes"] for claim in said["claims"]} == {"check": 0, lease.unit: 123}
    assert before in {id.decode() for id, _ in store.redis.xrange(EVENTS)}


@pytest.mark.parametrize(
    "last",
    [
        "x",
        "99999999999999999999-0",
        "0-99999999999999999999",
        f"{2**64 - 1}-{2**64 - 1}",
        "-1",
        "0-0-0",
        "\u0663-0",
        "$",
    ],
)
def test_an_id_that_no_event_has_is_none(site: Site, store: JobStore, last: str) -> None:
    with closing(Reader(site)) as earlier:
        submitted = submit(store, 0)
        while earlier.events(1)[0]["job"] != submitted:
            pass  # what is still to be handed out would come to a stream that is opened meanwhile, too
    headers = {"Last-Event-ID": last.encode()}
    with site.client("read", headers=headers) as client, client.stream("GET", PATH) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert next(lines) == ": open"
        job = submit(store, 1)
        data = next(line for line in lines if line.startswith("data: ") and "event" in line)
    assert json.loads(data.removeprefix("data: "))["event"]["job"] == job
    assert "Traceback" not in site.process.said()


def test_an_event_that_cannot_be_read_is_left_out(site: Site, store: JobStore) -> None:
    with closing(Reader(site)) as reader:
        store.redis.xadd(EVENTS, {"kind": "state", "at": "never"})
        store.redis.xadd(EVENTS, {"nothing": "known"})
        store.redis.xadd(EVENTS, {"kind": "failed", "at": "1", "job": "x", "error": "no json"})
        job = submit(store, 0)
        assert reader.events(1)[0]["job"] == job


def test_one_token_takes_some_of_the_places_and_leaves_the_others(own: Site, store: JobStore) -> None:
    with ExitStack() as stack:
        readers = [stack.enter_context(closing(Reader(own))) for _ in range(READERS_OF_ONE)]
        for path in (PATH, f"/api/v1/jobs/{submit(store, 0)}/events"):
            with own.client("read") as client, client.stream("GET", path) as refused:
                assert refused.status_code == 503
                error = json.loads(refused.read())["error"]
            assert error["code"] == "queue.readers" and "reader" in error["message"]
        stack.enter_context(closing(Reader(own, scope="act")))
        readers[0].close()
        wait_for(lambda: again(own), "a place that is free again")


def again(site: Site) -> bool:
    with site.client("read") as client, client.stream("GET", PATH) as answer:
        return answer.status_code == 200


def test_200_readers_cost_little_memory_and_no_connections_of_the_broker(own: Site, store: JobStore) -> None:
    process = psutil.Process(own.process.pid)
    with closing(Reader(own)) as first:
        job = submit(store, 0)
        assert first.events(1)[0]["job"] == job, "and it is sent to none of those below"
    before, connected = process.memory_info().rss, len(store.redis.client_list())
    with ExitStack() as stack:
        for name in ("ada", "bob"):
            own.tokens[name] = add_token(own.machine.folder / "tokens", name, Scope.read)
        readers = [stack.enter_context(closing(Reader(own, scope=name))) for name in ("ada", "bob") * (READERS // 2)]
        jobs = [submit(store, number) for number in range(1, 51)]
        for reader in readers:
            assert [event["job"] for event in reader.events(len(jobs))] == jobs
        assert own.get("/api/v1/jobs")["jobs"][0]["id"] == jobs[-1]
        grown = process.memory_info().rss - before
        assert len(store.redis.client_list()) - connected <= 3, "those of the service's own pool"
    assert grown < MEMORY, f"{grown:,} bytes"
    wait_for(lambda: not open_lines(process), "the end of the last connection")


def open_lines(process: psutil.Process) -> int:
    """Connections of readers, which come to the port that it listens at."""
    lines = process.net_connections("tcp")
    ports = {line.laddr.port for line in lines if line.status == psutil.CONN_LISTEN}
    return sum(line.laddr.port in ports and line.status == psutil.CONN_ESTABLISHED for line in lines)


@pytest.mark.slow
def test_a_reader_that_never_reads_is_hung_up_on_and_the_others_get_everything(own: Site, store: JobStore) -> None:
    process, count = psutil.Process(own.process.pid), 4 * BEHIND_MAX
    with closing(dial(own, receive=4096)) as silent, closing(Reader(own)) as reader:
        head = [f"GET {PATH} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {own.tokens['read']}", "", ""]
        silent.sendall("\r\n".join(head).encode())
        wait_for(lambda: open_lines(process) == 2, "both readers")
        before, seen = process.memory_info().rss, list[str]()
        while len(seen) < count:
            with store.redis.pipeline(transaction=False) as pipe:
                for number in range(len(seen), len(seen) + 500):
                    pipe.xadd(
                        EVENTS, {"kind": "state", "state": "done", "at": 1, "job": str(number), "note": "x" * 4000}
                    )
                pipe.execute()
            seen += [event["job"] for event in reader.events(500)]
        assert seen == [str(number) for number in range(count)]
        wait_for(lambda: open_lines(process) == 1, "the end of the silent one's connection")
        assert process.memory_info().rss - before < MEMORY
        assert httpx2.get(f"{own.url}/healthz").text == "ok\n"


def test_a_broker_that_is_away_is_logged_once_and_once_that_it_is_back(
    store: JobStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(streams, "AGAIN", 0.0)
    seen = threading.Event()
    looks = iter(["away"] * 3 + ["there"] * 2 + ["away"] * 2 + ["there"])

    def look(followed: Followed, wait: float) -> list[News]:
        if (now := next(looks, None)) is None:
            seen.set()
        if now == "away":
            raise BrokerUnavailable(url="redis://there", why="it is gone")
        return []

    monkeypatch.setattr(Followed, "look", look)

    async def run() -> None:
        async with Streams(Queue(store)).running(Starlette()):
            await run_in_threadpool(seen.wait, STUCK)

    asyncio.run(run())
    lines = ["cannot read events: ", "the broker is available again"] * 2
    assert [line.startswith(start) for line, start in zip(caplog.messages, lines, strict=True)] == [True] * 4


@pytest.mark.parametrize("events", [0, 5])
def test_a_stream_ends_when_its_token_is_taken_out_also_while_it_has_much_to_tell(
    events: int, store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "CHECKED", 0.0)
    monkeypatch.setattr(streams, "ALIVE", STUCK if events else 0.01)
    tokens, parts = tmp_path / "tokens", list[bytes]()
    token = add_token(tokens, "ada", Scope.read)
    queue = Queue(store)
    web = Web(queue, partial(Served, queue, Settings()), WebSettings(tokens=tokens))
    app = build(web)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("the other end stays")

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body" and (part := message["body"]):
            parts.append(part)
            if len(parts) == 3:
                tokens.write_text("")

    async def run() -> None:
        async with asyncio.timeout(STUCK), web.streams.running(app):
            headers = [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {token}".encode())]
            headers += [(b"last-event-id", b"0-0")]
            asked = {"type": "http", "method": "GET", "path": PATH, "query_string": b"", "headers": headers}
            await app(asked | {"state": {"connection": Mock()}}, receive, send)

    for number in range(events):
        submit(store, number)
    asyncio.run(run())
    assert len(parts) == 3 and all((b"event: event" in part) == bool(events) for part in parts[1:])


def test_a_broker_that_a_script_holds_up_is_unavailable_to_all_who_ask(site: Site, store: JobStore) -> None:
    with busy(store.redis):
        assert answer(int(site.url.rpartition(":")[2]), "/readyz") == (503, "the broker is not responding")
        with site.client() as client:
            refused = client.get("/api/v1/jobs")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue.unavailable")
        done = site.machine.run("list")
        assert done.returncode == 10 and "is not responding: BUSY" in done.stderr, done.stderr
    assert answer(int(site.url.rpartition(":")[2]), "/readyz") == (200, "ok")
