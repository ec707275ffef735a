"""What strangers, other sites, other users and hostile clients try at the real process."""

from __future__ import annotations

import json
import re
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from markupsafe import escape

from reshard.client.operations import operations
from reshard.client.operations.table import BODY_MAX, Operation
from reshard.pipeline.limits import REQUEST_MAX
from reshard.web.app import pages  # it has all operations in the table
from reshard.web.auth import COOKIE, Scope, add_token
from reshard.web.connections import CONNECTIONS, STRANGERS_MAX, STRANGERS_OF_PEER
from reshard.worker.queue.jobs import JobStore
from tests.support.measured import within
from tests.support.procs import Broker, Machine, free_port, wait_for
from tests.web.conftest import PROXY, ROOT, Site, client_of, dial, fill, is_ended, readable, signed_in, start

BODY = {"source": "a/model", "target": "b/model"}


def url_of(endpoint: Operation[..., Any]) -> str:
    return ROOT + re.sub(r"{\w+}", "some", endpoint.path)


def code_of(response: httpx2.Response) -> str:
    """The error's code, of an answer that no browser takes for anything else than data."""
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-content-type-options"] == "nosniff"
    return str(response.json()["error"]["code"])


def alive(site: Site) -> None:
    assert site.process.alive(), site.process.said()[-3000:]
    assert site.get(f"{ROOT}/service")["jobs"] is not None
    assert "Traceback" not in site.process.said()


# -------------------------------------------------------------------------------------------------------- who may


@pytest.mark.parametrize("endpoint", operations(), ids=lambda one: f"{one.method} {one.path}")
def test_no_endpoint_answers_who_has_no_token_or_only_one_to_read(site: Site, endpoint: Operation[..., Any]) -> None:
    known = site.tokens["act"]
    for said in (None, "Bearer", "Bearer rsh_wrong", f"Bearer {known[:-1]}", f"Basic {known}", "Bearer " + "x" * 9000):
        with site.client(None, headers={"Authorization": said} if said is not None else {}) as client:
            refused = client.request(endpoint.method, url_of(endpoint))
        assert (refused.status_code, code_of(refused)) == (401, "access.sign_in")
        assert refused.headers["www-authenticate"] == "Bearer"
    with site.client("read") as client:
        answer = client.request(endpoint.method, url_of(endpoint))
    if endpoint.method == "GET":
        assert answer.status_code in {200, 404}
    else:
        assert (answer.status_code, code_of(answer)) == (403, "access.scope")


@pytest.mark.parametrize("path", [f"{ROOT}/events", f"{ROOT}/jobs/some/events", f"{ROOT}/openapi.json"])
def test_no_stream_and_no_document_is_for_who_has_no_token(site: Site, path: str) -> None:
    with site.client(None) as client:
        assert client.get(path).status_code == 401


def test_a_token_ends_with_its_line(broker: Broker, store: JobStore, tmp_path: Path) -> None:
    with Machine(tmp_path, broker.url) as machine:
        port, tokens = free_port(), tmp_path / "tokens"
        given = machine.run("token", "ada", "--quiet").stdout.strip()
        (tmp_path / "data" / "web-tokens").rename(tokens)
        site = Site(machine, start(machine, tokens, port), f"http://127.0.0.1:{port}", {"read": given})
        alive(site)
        tokens.write_text(tokens.read_text().rstrip())  # as some editors leave it
        added = Site(machine, site.process, site.url, {"read": add_token(tokens, "bob", Scope.read)})
        alive(site)
        alive(added)
        tokens.write_text("ada read\n")
        with site.client("read") as client:
            broken = client.get(f"{ROOT}/service")
            assert (broken.status_code, code_of(broken)) == (500, "usage.setting")
        tokens.write_text("")
        with site.client("read") as client:
            assert client.get(f"{ROOT}/service").status_code == 401


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "evil.example:127.0.0.1",
        "",
        "[::2]",
        "a" * 9000,
        "127.0.0.1:evil",
        "127.0.0.1:80:80",
        "127.0.0.1:123456",
        "[::1]evil",
        "[::1]:evil",
        "127.0.0.1:٣",
    ],
)
def test_a_name_that_is_not_ours_is_refused_also_where_it_leads_here(site: Site, host: str) -> None:
    with site.client("act", headers={"Host": host.encode()}) as client:
        refused = client.get(f"{ROOT}/jobs")
        assert refused.status_code == 400
        assert host[:100] not in refused.text or code_of(refused) == "usage.host"
        assert client.get("/healthz").text == client.get("/readyz").text == "ok\n"


def test_a_name_that_is_not_ours_is_told_as_its_setting_takes_it(site: Site) -> None:
    with site.client("act", headers={"Host": "box:8474"}) as client:
        error = client.get(f"{ROOT}/jobs").json()["error"]
        assert (error["code"], error["message"]) == ("usage.host", "host not allowed: box")
        assert "RESHARD_WEB_HOSTS" in error["hint"] and "--help" not in error["hint"]


@pytest.mark.parametrize(
    ("sent", "ours"),
    [
        ({}, False),
        ({"Origin": "https://evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://127.0.0.1"}, False),
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "same-site"}, False),
        ({"Sec-Fetch-Site": "none"}, False),
        ({"Sec-Fetch-Site": "cross-site", "Origin": "SELF"}, False),
        ({"Origin": "SELF"}, True),
        ({"Sec-Fetch-Site": "same-origin"}, True),
    ],
)
def test_what_a_browser_sends_by_itself_counts_from_our_own_page_only(
    site: Site, store: JobStore, sent: dict[str, str], ours: bool
) -> None:
    headers = {name: value.replace("SELF", site.url) for name, value in sent.items()}
    with site.client(None, headers=headers | {"Cookie": f"{COOKIE}={site.tokens['act']}"}) as client:
        assert client.get(f"{ROOT}/jobs").status_code == 200
        answer = client.post(f"{ROOT}/jobs", json=BODY)
    assert answer.status_code == 200 if ours else code_of(answer) == "access.cross_site"
    assert len(store.recent()) == ours


@pytest.mark.parametrize("path", [path for method, path, _ in pages.PAGES if method == "POST"])
def test_no_form_does_anything_for_who_may_only_read_or_was_misled(site: Site, store: JobStore, path: str) -> None:
    url = re.sub(r"{\w+}", "some", path)
    for token, sent, status in (
        (None, "same-origin", 303),
        ("read", "same-origin", 403),
        ("act", "cross-site", 403),
        ("act", "same-site", 403),
    ):
        cookie = {"Cookie": f"{COOKIE}={site.tokens[token]}"} if token else {}
        with site.client(None, headers={"Sec-Fetch-Site": sent} | cookie) as client:
            answer = client.post(url, data={"source": "a/model", "target": "b/model"})
        assert answer.status_code == status and "default-src 'none'" in answer.headers["content-security-policy"]
        assert status != 303 or answer.headers["location"].startswith("/sign-in")
    assert store.recent() == [] and site.get(f"{ROOT}/fleet")["paused"] is None


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory, broker: Broker) -> Iterator[dict[str, Site]]:
    """Behind a proxy at this address, and behind one at another."""
    with ExitStack() as stack:
        sites = {}
        for name, proxy in {"here": "10.0.0.0/8,127.0.0.1", "elsewhere": "10.0.0.0/8"}.items():
            folder, port = tmp_path_factory.mktemp(name), free_port()
            machine = stack.enter_context(Machine(folder, broker.url))
            process = start(machine, folder / "tokens", port, RESHARD_WEB_PROXY=proxy, **PROXY)
            sites[name] = Site(machine, process, f"http://127.0.0.1:{port}", {})
        yield sites


@pytest.mark.parametrize(
    ("where", "users", "read", "act"),
    [
        ("here", ["ada"], 200, 200),
        ("here", ["bob"], 200, 403),
        ("here", ["ada", "bob"], 401, 401),  # one of the two may be what the client sent
        ("here", ["ada, bob"], 403, 403),
        ("here", ["<script>"], 403, 403),
        ("here", ["ada+ops@example.org"], 200, 403),
        ("here", ["o'brien@example.org"], 200, 403),
        ("here", ["a" * 242 + "@example.org"], 200, 403),
        ("here", ["a" * 243 + "@example.org"], 403, 403),
        ("here", [""], 401, 401),
        ("here", [], 401, 401),
        ("elsewhere", ["ada"], 401, 401),
    ],
)
def test_whom_a_proxy_names_is_believed_of_the_proxy_alone(
    behind: dict[str, Site], store: JobStore, where: str, users: list[str], read: int, act: int
) -> None:
    more = [("X-User", user) for user in users] + [("X-Forwarded-For", "10.0.0.1"), ("X-Forwarded-User", "ada")]
    site = behind[where]
    with client_of(site.url, headers=[*more, ("Sec-Fetch-Site", "same-origin")]) as client:
        assert client.get(f"{ROOT}/jobs").status_code == read
        assert client.post(f"{ROOT}/jobs", json=BODY).status_code == act
    with client_of(site.url, headers=more) as client:  # a browser that another page misled
        assert client.post(f"{ROOT}/jobs", json=BODY).status_code == (401 if read == 401 else 403)


@pytest.mark.parametrize(
    "user", ["a b", "*", "ada,bob", "<b>", "a`b", "a[b](c)", '"a"', "a\tb", "a\x1b[2J", "a\x9b2J", "ad\xe4"]
)
def test_a_name_that_is_told_nowhere_is_refused_in_words_on_the_page_too(behind: dict[str, Site], user: str) -> None:
    with client_of(behind["here"].url, headers=[(b"X-User", user.encode("latin-1"))]) as client:
        for refused in (client.get(f"{ROOT}/jobs"), client.get("/")):
            assert refused.status_code == 403 and "access.user_name" in refused.text
            assert "RESHARD_WEB_USER_HEADER" in refused.text and "\x1b" not in refused.text
            assert "<b>" not in refused.text or code_of(refused)


def test_what_a_proxys_user_does_is_told_under_their_name(behind: dict[str, Site], store: JobStore) -> None:
    user = PROXY["RESHARD_WEB_ACTORS"].partition(",")[2]
    with client_of(behind["here"].url, headers=[("X-User", user), ("Sec-Fetch-Site", "same-origin")]) as client:
        job = client.post(f"{ROOT}/jobs", json=BODY).json()["id"]
        assert store.get(job).request.asked_by == user
        assert [one["id"] for one in client.get(f"{ROOT}/jobs", params={"by": user}).json()["jobs"]] == [job]
        assert f'<span class="who">{escape(user)}</span>' in client.get("/").text


# ------------------------------------------------------------------------------------------------------ what is sent


def chunks(size: int) -> Iterator[bytes]:
    for _ in range(size // 50_000 + 1):
        yield b" " * 50_000


@pytest.mark.parametrize(
    "path, most", [(f"{ROOT}/jobs", REQUEST_MAX), (f"{ROOT}/catalogs", BODY_MAX), (f"{ROOT}/plan", REQUEST_MAX)]
)
def test_a_body_that_is_too_long_is_refused_however_it_comes(site: Site, path: str, most: int) -> None:
    with site.client() as client:
        for size in {most, BODY_MAX}:
            for content in (b" " * (size + 1), chunks(size)):
                refused = client.post(path, content=content)
                assert code_of(refused) == "usage.too_large"
                hint = refused.json()["error"]["hint"]
                assert ("split the catalog" in hint) == (size == BODY_MAX and path.endswith("catalogs"))
        assert code_of(client.post(path, content=b" " * most)) == "usage.body"
    alive(site)


@pytest.mark.parametrize("path", ["/catalogs", "/new/catalogs", "/schedules", "/sign-in"])
def test_a_form_that_is_too_long_is_refused_on_a_page(site: Site, path: str) -> None:
    with signed_in(site) as client:
        for content in (b"text=" + b"a" * BODY_MAX, chunks(BODY_MAX)):
            refused = client.post(path, content=content)
            assert refused.status_code == 413 and refused.headers["content-type"].startswith("text/html")
            assert "usage.too_large" in refused.text and ("Split the catalog" in refused.text) == (path != "/sign-in")
    alive(site)


@pytest.mark.parametrize("path", [f"{ROOT}/jobs", f"{ROOT}/events", "/"])
def test_a_body_that_is_too_long_and_that_nobody_reads_is_refused_too(site: Site, path: str) -> None:
    with site.client() as client:
        assert client.request("GET", path, content=b" " * (BODY_MAX + 1)).status_code == 413


def test_who_is_not_known_is_told_that_first_and_nothing_of_a_long_body_is_taken(site: Site) -> None:
    with closing(dial(site)) as line:
        head = f"POST {ROOT}/catalogs HTTP/1.1\r\nHost: 127.0.0.1\r\nExpect: 100-continue\r\n"
        line.sendall(f"{head}Content-Length: {BODY_MAX + 1}\r\n\r\n".encode())
        assert line.recv(65536).startswith(b"HTTP/1.1 401 ")


HOSTILE = {
    "deep lists": b"[" * 60_000,
    "deep maps": b'{"a":' * 12_000,
    "no text": b"\xff\xfe",
    "half a character": b'{"source": "a/\\ud800", "target": "b/c", "options": {"branch": "\\ud800"}}',
    "no number": b'{"source": "a/b", "target": "b/c", "options": {"size": NaN}}',
    "a long number": b'{"source": "a/b", "target": "b/c", "options": {"size": ' + b"9" * 60_000 + b"}}",
    "a list": b"[]",
    "twice": b'{"source": "a/b", "source": 1, "target": "b/c"}',
    "unknown names": b'{"source": "a/b", "target": "b/c", "asked_by": "root"}',
    "a folder": b'{"source": "/etc", "target": "b/c"}',
    "a way up": b'{"source": {"kind": "hub", "repo": "us/../them/model"}, "target": "b/c"}',
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("path", [f"{ROOT}/jobs", f"{ROOT}/plan"])
def test_a_hostile_body_is_refused_in_words(site: Site, store: JobStore, path: str, body: bytes) -> None:
    with site.client() as client:
        refused = client.post(path, content=body)
    assert refused.status_code in {400, 403}, refused.text
    assert code_of(refused).partition(".")[0] in {"usage", "access"} and len(refused.text) < 2000
    assert store.recent() == []
    alive(site)


BOMBS = {
    "lists in lists": "name: a\nentries: " + "[" * 900_000,
    "dashes": "- " * 400_000,
    "itself": "name: a\nentries: &a [*a]\n",
    "laughs": "x0: &x0 [a]\n"
    + "".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 10)}]\n" for n in range(1, 12))
    + "name: a\nentries: *x11\n",
    "code": "name: !!python/object/apply:os.system ['true']\n",
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_a_hostile_catalog_is_refused_in_words(site: Site, store: JobStore, text: str) -> None:
    with site.client() as client:
        assert code_of(client.post(f"{ROOT}/catalogs", json={"text": text})) == "usage.catalog"
    alive(site)


@pytest.mark.parametrize(
    "query",
    [
        "limit=0", "limit=501", "limit=" + "9" * 5000, "after=x", "after=" + "9" * 400 + "-a", "after=%D9%A3-a",
        "since=nan", "since=inf", "since=1e308", "state=gone", "unknown=1", "limit=1&limit=x", "after=%00", "since=%ff",
    ],
)  # fmt: skip
def test_a_hostile_query_is_refused_in_words(site: Site, query: str) -> None:
    with site.client("read") as client:
        refused = client.get(f"{ROOT}/jobs?{query}")
    assert refused.status_code == 400 and code_of(refused) == "usage.body"
    alive(site)


PATHS = """
/../../etc/passwd /%2e%2e/%2e%2e/etc/passwd //etc/passwd /api/v1/../../healthz/x /api/v1//jobs /docs /static/..%2fapp.py
/api/v1/jobs/%00 /api/v1/jobs/%2e%2e /api/v1/jobs/a%2fb /api/v1/jobs/%ff%fe /api/v1/jobs/%0d%0aSet-Cookie:x=y
/api/v1/jobs/<script>alert(1)</script> /<script>alert(1)</script> /catalogs/<script>alert(1)</script>
/api/v1/catalogs/<img%20src=x> /api/v1/catalogs/%00 /api/v1/schedules/..
http://evil.example/api/v1/jobs/x /api/v1/jobs/LONG
"""


@pytest.mark.parametrize("path", PATHS.split())
def test_no_path_leads_anywhere_else(site: Site, path: str) -> None:
    """Over a socket, as clients tidy paths up."""
    answer = said(site, f"GET {path.replace('LONG', 'a' * 8000)}", f"Authorization: Bearer {site.tokens['act']}")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert re.match(rb"HTTP/1.1 (404|400) ", head), answer[:500]
    assert b"set-cookie" not in head.lower() and b"x-content-type-options: nosniff" in head
    if path.startswith("/api/"):
        kinds = {"usage.no_page", "job.not_found", "queue.no_catalog", "queue.no_schedule"}
        assert json.loads(body)["error"]["code"] in kinds
    else:
        assert b"usage.no_page" in body and b"root:" not in body and b"<script>alert" not in body
    alive(site)


@pytest.mark.parametrize("method", ["PUT", "PATCH", "OPTIONS", "TRACE", "CONNECT", "DELETE", "GET /x HTTP/1.1\r\nX: "])
def test_no_other_method_does_anything(site: Site, method: str) -> None:
    answer = said(site, f"{method} /api/v1/jobs")
    assert re.match(rb"HTTP/1.1 (400|404|405) ", answer), answer[:300]
    alive(site)


@pytest.mark.parametrize(
    ("asked", "allowed"),
    [
        ("PUT /api/v1/jobs", "GET, HEAD, POST"),
        ("DELETE /api/v1/jobs", "GET, HEAD, POST"),
        ("POST /api/v1/jobs/some", "DELETE, GET, HEAD"),
        ("POST /api/v1/events", "GET, HEAD"),
        ("GET /hooks/hub", "POST"),
        ("PUT /sign-in", "GET, HEAD, POST"),
        ("POST /static/page.css", "GET, HEAD"),
        ("DELETE /healthz", "GET, HEAD"),
    ],
)
def test_a_method_that_a_path_does_not_have_is_told_those_that_it_has(site: Site, asked: str, allowed: str) -> None:
    head = said(site, asked).partition(b"\r\n\r\n")[0].decode().lower()
    assert head.startswith("http/1.1 405 ") and f"\r\nallow: {allowed.lower()}\r\n" in f"{head}\r\n"


def said(site: Site, asked: str, *headers: str) -> bytes:
    """The whole answer to a request without a body."""
    with closing(dial(site)) as line:
        head = [f"{asked} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", *headers, "", ""]
        line.sendall("\r\n".join(head).encode())
        return b"".join(iter(lambda: line.recv(65536), b""))


# -------------------------------------------------------------------------------------------------- how it is sent


HALVES = [
    b"",
    b"GET /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\n",
    b"POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer TOKEN\r\nContent-Length: 1000\r\n\r\n{",
    b"POST /hooks/hub HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n",
]


def test_who_says_half_a_request_keeps_nobody_waiting(site: Site) -> None:
    with ExitStack() as stack:
        for half in HALVES * 40:
            line = stack.enter_context(closing(dial(site)))
            line.sendall(half.replace(b"TOKEN", site.tokens["act"].encode()))
        alive(site)


@pytest.mark.slow
def test_who_says_half_a_request_is_hung_up_on(site: Site) -> None:
    with ExitStack() as stack:
        lines = [stack.enter_context(closing(dial(site))) for _ in HALVES]
        for line, half in zip(lines, HALVES, strict=True):
            line.sendall(half.replace(b"TOKEN", site.tokens["act"].encode()))
        for line in lines:
            with suppress(ConnectionResetError):
                while line.recv(65536):
                    pass
    alive(site)


@pytest.fixture
def many_files() -> Iterator[None]:
    """As many connections as a test opens, whatever a process may open by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def kept(site: Site, silent: list[socket.socket]) -> list[socket.socket]:
    """Which of these connections the service keeps; it answers to probes."""
    with site.client(None) as client:
        assert client.get("/healthz").text == client.get("/readyz").text == "ok\n"
    return [line for line in silent if not readable(line) or not is_ended(line)]


def few(site: Site, silent: list[socket.socket]) -> bool:
    return len(kept(site, silent)) <= STRANGERS_OF_PEER


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n",
        b"POST /sign-in HTTP/1.1\r\nHost: 127.0.0.1\r\nSec-Fetch-Site: same-origin\r\nContent-Length: 9\r\n\r\n",
    ],
    ids=["nothing", "half a head", "no body"],
)
def test_1000_silent_connections_stop_neither_the_service_nor_its_probes(
    site: Site, many_files: None, said: bytes
) -> None:
    for _ in range(2):  # as who comes again at once
        with ExitStack() as stack:
            lines = []
            for _ in range(1000):
                lines.append(stack.enter_context(closing(dial(site))))
                with suppress(ConnectionError):
                    lines[-1].sendall(said)
            wait_for(partial(few, site, lines), "the end of the others")
            alive(site)  # while they come, a request may be told to come again, and no probe


def test_silent_connections_of_many_addresses_are_few_together(site: Site, many_files: None) -> None:
    with ExitStack() as stack:
        lines = []
        for peer in range(2, 32):
            source = f"127.0.0.{peer}"
            lines += [stack.enter_context(closing(dial(site, source=source))) for _ in range(STRANGERS_OF_PEER)]
        newest = lines[-STRANGERS_OF_PEER // 2 :]
        held = wait_for(lambda: len(some := kept(site, lines)) <= STRANGERS_MAX and some, "the end of the others")
        assert {*newest} <= {*held}
        alive(site)


def test_who_says_nothing_is_hung_up_on_before_who_has_a_token(site: Site) -> None:
    half = HALVES[2].replace(b"TOKEN", site.tokens["act"].encode())
    with closing(dial(site)) as known, closing(dial(site)) as silent, closing(dial(site)) as answered:
        known.sendall(half)
        answered.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        head = answered.recv(65536)
        assert b"ok\n" in (head if b"ok\n" in head else head + answered.recv(65536))
        assert is_ended(silent) and is_ended(answered)
        assert not readable(known)
        known.sendall(b" " * 999)
        assert known.recv(65536).startswith(b"HTTP/1.1 400 "), "it is still heard"


def test_probes_are_answered_past_the_limit_of_connections(site: Site, many_files: None) -> None:
    half = HALVES[2].replace(b"TOKEN", site.tokens["act"].encode())
    with ExitStack() as stack:
        for _ in range(CONNECTIONS - 1):
            line = stack.enter_context(closing(dial(site)))
            line.sendall(half.replace(b"\r\n\r\n{", b"\r\nExpect: 100-continue\r\n\r\n"))
            assert line.recv(65536).startswith(b"HTTP/1.1 100 "), "its token is known"
        with site.client() as client:
            assert client.get(f"{ROOT}/service").status_code == 503
            assert client.get("/healthz").text == client.get("/readyz").text == "ok\n"
    wait_for(lambda: site.client().get(f"{ROOT}/service").status_code == 200, "room for the next")


def test_a_header_without_end_is_refused(site: Site) -> None:
    with closing(dial(site)) as line:
        line.sendall(b"GET / HTTP/1.1\r\nX: " + b"a" * 1_000_000)
        with suppress(ConnectionResetError):
            assert line.recv(65536).startswith(b"HTTP/1.1 400 ")
    alive(site)


@pytest.mark.slow
def test_the_first_page_of_100_000_jobs_costs_little(site: Site, store: JobStore) -> None:
    """Mean of the service's own processor time: at most 50 ms."""
    fill(store, 100_000)
    process, calls = psutil.Process(site.process.pid), 40
    with site.client("read") as client:
        client.get(f"{ROOT}/jobs")
        before = process.cpu_times()
        for _ in range(calls):
            page: dict[str, Any] = client.get(f"{ROOT}/jobs").json()
        after = process.cpu_times()
    assert len(page["jobs"]) == 50 and page["next"]
    mean = (after.user + after.system - before.user - before.system) / calls
    print(f"MEAN {mean * 1000:.1f} ms")
    assert within(mean, 0.050), f"{mean * 1000:.1f} ms"
