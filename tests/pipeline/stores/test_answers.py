"""Every answer of a Hub, spoiled in every way: what comes of it is an error with a code, and never a bug of ours."""

from __future__ import annotations

import copy
import gzip
import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from pydantic import SecretStr

from reshard.pipeline.catalogs.definition import parse
from reshard.pipeline.catalogs.expand import expand
from reshard.pipeline.doctor.probes import probe_hub
from reshard.pipeline.errors import HubRefused, ReshardError
from reshard.pipeline.limits import ANSWER_MAX, MEMORY_FLOOR_XET
from reshard.pipeline.places import Hub
from reshard.pipeline.stores import hub_api
from reshard.pipeline.stores.answers import HistoryItem
from reshard.pipeline.stores.connect import Context
from reshard.pipeline.stores.credentials import Credential, Credentials, Reference
from reshard.pipeline.stores.http import HubSource
from reshard.pipeline.stores.hub_api import HubApi
from reshard.pipeline.stores.lfs import LfsSink, missing
from reshard.pipeline.stores.refusal import Refusal
from reshard.pipeline.stores.scratch import ScratchSpace
from reshard.pipeline.stores.xet import XetSink
from reshard.pipeline.tensors import StoredFile
from tests.pipeline.stores.conftest import Impatient

SHA, OID = "c" * 40, "a" * 64
FILE = StoredFile("x.bin", 4, sha256=OID, xet="b" * 64)
Answer = tuple[int, dict[str, str], bytes]


class Scripted(ThreadingHTTPServer):
    """Answers each request with what ``answers`` says of its path, or else with ``rest``."""

    def __init__(self) -> None:
        outer = self
        self.rest: Answer = (200, {}, b"{}")
        self.answers: dict[str, Answer] = {}
        self.asked: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 1 << 16  # one segment for an answer, which no delayed acknowledgement holds back

            def do_GET(self) -> None:
                length = self.headers.get("content-length", "0")
                self.rfile.read(int(length) if length.isdecimal() else 0)
                outer.asked.append(f"{self.command} {self.path}")
                found = (answer for part, answer in outer.answers.items() if part in self.path)
                status, headers, body = next(found, outer.rest)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_PUT = do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    with Scripted() as running:
        yield running
        running.shutdown()


@pytest.fixture
def scripted(server: Scripted) -> Scripted:
    server.rest, server.answers, server.asked = (200, {}, b"{}"), {}, []
    return server


@pytest.fixture
def api(scripted: Scripted) -> Iterator[HubApi]:
    api = HubApi(scripted.url, Credential("HF_TOKEN", SecretStr("hf_x")), Impatient())
    yield api
    api.close()


def sent(api: HubApi) -> object:
    batch = LfsSink(api, "a/b", ScratchSpace()).batch([])
    try:
        writer = batch.open("x.bin", 4)
        writer.write(b"data")
        writer.sha256 = OID
        return writer.send()
    finally:
        batch.abort()


def lost(api: HubApi) -> object:
    return XetSink(api, "a/b", "/token/xet", MEMORY_FLOOR_XET).lost([FILE])


def listed(api: HubApi) -> object:
    """A catalog of a query and of two models of one owner, which a list is asked for."""
    text = "name: mine\ndefaults: {to: 'us/{name}', size: 5MB}\nentries:\n"
    text += "- {query: {author: a, min_downloads: 1}}\n- repo: a/b\n- repo: a/c\n"
    return expand(parse(text, "c.yaml"), context(api)).models


def collected(api: HubApi) -> object:
    text = "name: mine\ndefaults: {to: 'us/{name}', size: 5MB}\nentries:\n- {query: {collection: a/c-1, name: '*'}}\n"
    return expand(parse(text, "c.yaml"), context(api)).models


def context(api: HubApi) -> Context:
    from pathlib import Path

    return Context(Credentials(api.endpoint), Path(tempfile.gettempdir()), 10**9, limiters=lambda budget: api.limiter)


def probed(api: HubApi) -> object:
    probe = probe_hub(Reference(api.endpoint, None, None, api.credential), lambda: 0.0)
    if probe.error:
        raise probe.error
    return probe


MODEL = {"id": "a/b", "sha": SHA, "private": False, "gated": "auto", "usedStorage": 7, "downloads": 3}
UPLOAD = {"upload": {"href": "URL/put", "header": {"x-a": "b"}}, "verify": {"href": "URL/verify", "header": {}}}
PARTS = {"upload": {"href": "URL/done", "header": {"chunk_size": "4", "1": "URL/part"}}}
TOKEN = {"casUrl": "URL/cas", "accessToken": "t", "exp": 1}
TERMS = {"terms": [{"hash": "h"}], "fetch_info": {"h": [{"url": "URL/xorb", "url_range": {"start": 0, "end": 3}}]}}
ACCESS = {"role": "fineGrained", "fineGrained": {"scoped": [{"entity": {"name": "a"}, "permissions": ["repo.write"]}]}}
ACCOUNT = {"name": "a", "orgs": [{"name": "o", "roleInOrg": "write"}], "auth": {"accessToken": ACCESS}}


def lfs(actions: dict[str, Any]) -> dict[str, Any]:
    return {"objects": [{"oid": OID, "size": 4, "actions": actions}]}


@dataclass(frozen=True)
class Call:
    """One call: how it is made, where it goes, a proper answer to it, and what else is asked on the way."""

    make: Callable[[HubApi], object]
    path: str
    good: Any
    before: tuple[tuple[str, Any], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    ends: str = ""  # the code of the error that the proper answer leads to


CALLS = {
    "info": Call(lambda api: api.info("a/b", "main"), "/revision/", MODEL),
    "visibility": Call(lambda api: api.visibility("a/b"), "/api/models/a/b", MODEL),
    "tree": Call(
        lambda api: list(api.tree("a/b", SHA)),
        "/tree/",
        [{"type": "file", "path": "x", "size": 3, "oid": SHA, "lfs": {"oid": OID, "size": 3}, "xetHash": "b" * 64}],
    ),
    "commits": Call(
        lambda api: list(api.commits("a/b", "main")),
        "/commits/",
        [{"id": SHA, "title": "t", "message": "m", "authors": [{"user": "a"}]}],
    ),
    "whoami": Call(lambda api: api.whoami(), "/whoami-v2", ACCOUNT),
    "doctor": Call(probed, "/whoami-v2", ACCOUNT),
    "pull_requests": Call(
        lambda api: list(api.pull_requests("a/b", "a")),
        "/discussions?",
        {"discussions": [{"num": 1, "status": "open"}], "count": 1},
        (("/discussions/1", {"status": "open", "author": {"name": "a"}, "events": []}),),
    ),
    "pull_request": Call(
        lambda api: api.pull_request("a/b", 1),
        "/discussions/1",
        {
            "status": "open",
            "author": {"name": "a"},
            "events": [{"type": "comment", "data": {"latest": {"raw": "text"}}}],
        },
    ),
    "open_pull_request": Call(lambda api: api.open_pull_request("a/b", "t", "d"), "/discussions", {"num": 1}),
    "preupload": Call(
        lambda api: api.preupload("a/b", "main", [{"path": "x"}]),
        "/preupload/",
        {"files": [{"path": "x", "uploadMode": "lfs"}]},
    ),
    "duplicate": Call(
        lambda api: api.duplicate("a/b", "a/c", [FILE]),
        "/lfs-files/duplicate",
        {"failed": [{"sha256": OID, "error": "no"}]},
    ),
    "missing": Call(lambda api: missing(api, "a/b", [FILE]), "/objects/batch", lfs(UPLOAD)),
    "lfs_error": Call(
        lambda api: api.lfs_batch("a/b", [StoredFile("y", 1, sha256=OID)]),
        "/objects/batch",
        {"objects": [{"oid": OID, "error": {"code": 404, "message": "no"}}]},
        ends="hub.refused",
    ),
    "send": Call(sent, "/objects/batch", lfs(UPLOAD)),
    "send_parts": Call(sent, "/objects/batch", lfs(PARTS), headers=(("etag", '"e"'),)),
    "xet_token": Call(lambda api: api.xet_token("/xet-read-token/main"), "/xet-read-token/", TOKEN),
    "xet_lost": Call(lost, "/token/xet", TOKEN, (("/v1/reconstructions/", TERMS),)),
    "reconstruction": Call(lost, "/v1/reconstructions/", TERMS, (("/token/xet", TOKEN),)),
    "catalog": Call(listed, "/api/models?", [MODEL], (("/api/models/", MODEL),)),
    "catalog_one": Call(listed, "/api/models/", MODEL, (("/api/models?", []),)),
    "collection": Call(
        collected, "/api/collections/", {"items": [{"type": "model", "id": "a/b"}]}, (("/api/models/", MODEL),)
    ),
}  # fmt: skip


DEEP = b"[" * 100_000
WHOLE: dict[str, bytes] = {
    "null": b"null", "a list": b"[null]", "a list in a list": b"[[]]", "a list of nothing much": b"[{}]",
    "a text": b'"x"', "a number": b"7", "a truth": b"true", "NaN": b"NaN", "a long number": b"1" * 10_000,
    "deep": DEEP + b"]" * 100_000, "deep in an object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "half of it": b'{"id": "a/', "nothing": b"", "a page": b"<html>hello</html>",
    "not UTF-8": b'{"id": "\xff\xfe"}', "UTF-16 by its look": b"\xff\xfe{\x00", "a lone surrogate": b'"\\ud800"',
}  # fmt: skip
VALUES: list[Any] = [
    None, [], {}, [None], "", "\ud800", "\x1b[2J\x00", "../../x", "x" * 100_000, -1, 1e400, 10**30, True, 1.5,
    "http://[", "https://", "file:///etc/passwd", "http://\x00", "http://a:99999/", {"a": {"b": []}},
]  # fmt: skip


def spoiled(answer: Any) -> Iterator[Any]:
    """``answer`` with each value in it, at any depth, replaced by each of VALUES, and with each key left out."""

    def places(value: Any, at: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        yield at
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, one in inner:
            yield from places(one, (*at, key))

    def inside(root: Any, at: tuple[Any, ...]) -> Any:
        for key in at:
            root = root[key]
        return root

    for *outer, last in (at for at in places(answer, ()) if at):
        for value in VALUES:
            copied = copy.deepcopy(answer)
            inside(copied, tuple(outer))[last] = value
            yield copied
        copied = copy.deepcopy(answer)
        inside(copied, tuple(outer)).pop(last)
        yield copied


def answered(call: Call, api: HubApi, scripted: Scripted, body: bytes) -> str:
    """Makes the call with this answer to it; the code of its error, or nothing."""

    def filled(answer: Any) -> bytes:
        return json.dumps(answer).replace("URL", scripted.url).encode()

    headers = dict(call.headers)
    scripted.rest = (200, headers, b"{}")
    scripted.answers = {path: (200, {}, filled(answer)) for path, answer in call.before}
    scripted.answers[call.path] = (200, {}, body.replace(b"URL", scripted.url.encode()))
    try:
        call.make(api)
    except Refusal as refusal:
        return refusal.as_source("a/b").code
    except ReshardError as error:
        error.to_dict()
        return error.code
    return ""


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_answer_of_another_kind_is_refused(call: Call, api: HubApi, scripted: Scripted) -> None:
    assert answered(call, api, scripted, json.dumps(call.good).encode()) == call.ends
    for name, body in WHOLE.items():
        assert answered(call, api, scripted, body) == "hub.refused", name


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_answer_with_one_thing_wrong_never_ends_as_a_bug(call: Call, api: HubApi, scripted: Scripted) -> None:
    for answer in spoiled(call.good):
        code = answered(call, api, scripted, json.dumps(answer).encode())
        assert code != "internal", answer


@pytest.mark.parametrize("value", ["../../x", "main", "A" * 40, "a" * 6, "\x1b[2J", 7])
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("info", ("sha",)),
        ("tree", (0, "oid")),
        ("tree", (0, "lfs", "oid")),
        ("tree", (0, "xetHash")),
        ("commits", (0, "id")),
        ("missing", ("objects", 0, "oid")),
    ],
)
def test_what_is_not_a_hash_is_never_taken_for_one(
    name: str, keys: tuple[str | int, ...], value: object, api: HubApi, scripted: Scripted
) -> None:
    call = CALLS[name]
    answer = inner = copy.deepcopy(call.good)
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    assert answered(call, api, scripted, json.dumps(answer).encode()) == "hub.refused"


HEADERS = [
    {"link": '<>; rel="next"'}, {"link": '<http://[>; rel="next"'}, {"link": '<file:///etc/passwd>; rel="next"'},
    {"link": "\x80<;;,"}, {"retry-after": "\xb2"}, {"retry-after": "9" * 5000},
    {"ratelimit": f'"api";r=0;t={"9" * 5000}', "ratelimit-policy": '"fixed window";"api";q=1;w=9'},
    {"x-error-code": "\x80"}, {"x-error-message": "\x80\x9b"}, {"date": "yesterday"}, {"content-type": "\xff"},
]  # fmt: skip


@pytest.mark.parametrize("headers", HEADERS, ids=lambda headers: ascii(headers)[:30])
@pytest.mark.parametrize("status", [200, 302, 404, 429])
def test_no_header_ends_as_a_bug(api: HubApi, scripted: Scripted, headers: dict[str, str], status: int) -> None:
    scripted.rest = (status, headers, b"[]")
    for make in (lambda: list(api.commits("a/b", "main")), lambda: probed(api)):
        try:
            make()
        except (ReshardError, Refusal) as error:
            assert getattr(error, "code", "") != "internal"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"error": "Repository  not\nfound"}, "Repository not found"),
        *((body, "404 Not Found") for body in ({"error": {"a": "x"}}, {"error": 7}, {"error": None}, ["x"], "x")),
    ],
)
def test_a_refusal_says_why_in_the_words_of_the_hub_or_by_its_status(
    api: HubApi, scripted: Scripted, body: object, says: str
) -> None:
    scripted.rest = (404, {}, json.dumps(body).encode())
    with pytest.raises(Refusal) as refused:
        list(api.commits("a/b", "main"))
    assert refused.value.why == says


@pytest.mark.parametrize("where", ["http://[", "file:///etc/passwd", "https://", "http://\x80", "//", "\\\\x"])
def test_a_redirect_to_what_is_no_url_is_refused(api: HubApi, scripted: Scripted, where: str) -> None:
    scripted.rest = (302, {"location": where}, b"")
    source = HubSource(api, Hub(repo="a/b"), SHA, "public")
    with pytest.raises(ReshardError) as error:
        b"".join(source.read(StoredFile("x", 4, oid=SHA), 0, 4))
    assert error.value.code.startswith("hub")


@pytest.mark.parametrize("headers", [{"content-range": "bytes 0-3/\xb2"}, {"content-range": "bytes 0-3/" + "9" * 5000}])
def test_a_size_that_is_no_number_says_nothing(api: HubApi, scripted: Scripted, headers: dict[str, str]) -> None:
    scripted.rest = (206, headers, b"data")
    source = HubSource(api, Hub(repo="a/b"), SHA, "public")
    try:
        assert b"".join(source.read(StoredFile("x", 4, oid=SHA), 0, 4)) == b"data"
    except ReshardError as error:
        assert error.code == "source.changed"


@pytest.mark.parametrize("lacking", [{"size": 3}, {"oid": SHA}, {"lfs": {"oid": OID}}])
def test_a_file_is_listed_with_its_size_and_a_hash_or_not_at_all(
    api: HubApi, scripted: Scripted, lacking: dict[str, object]
) -> None:
    whole = [{"type": "directory", "path": "a"}, {"type": "file", "path": "x", "size": 3, "oid": SHA}]
    scripted.rest = (200, {}, json.dumps(whole).encode())
    assert [(file.path, file.size, file.oid) for file in api.tree("a/b", SHA)] == [("x", 3, SHA)]
    scripted.rest = (200, {}, json.dumps([{"type": "file", "path": "x", **lacking}]).encode())
    with pytest.raises(HubRefused, match="without"):
        list(api.tree("a/b", SHA))


@pytest.mark.parametrize("following", ["{url}", "/api/models/a/b/commits/main"])
def test_a_listing_that_leads_back_ends_at_once(api: HubApi, scripted: Scripted, following: str) -> None:
    link = following.format(url=f"{scripted.url}/api/models/a/b/commits/main")
    scripted.rest = (200, {"link": f'<{link}>; rel="next"'}, json.dumps([{"id": SHA}]).encode())
    with pytest.raises(HubRefused, match="next page"):
        list(api.commits("a/b", "main"))
    assert len(scripted.asked) == 1


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("status", [200, 302, 403])
def test_an_answer_longer_than_any_is_refused_once(api: HubApi, scripted: Scripted, status: int, packed: bool) -> None:
    body = b" " * (ANSWER_MAX + 1) + b"{}"
    headers = {"location": "/api/models/c/d"} if status == 302 else {}
    headers |= {"content-encoding": "gzip"} if packed else {}
    scripted.rest = status, headers, gzip.compress(body, 1) if packed else body
    with pytest.raises(HubRefused, match=r"GET /api/models/a/b: the response has more than 33,554,432 bytes"):
        api.visibility("a/b")
    assert len(scripted.asked) == 1
    scripted.rest = 200, {}, json.dumps(MODEL).encode().rjust(ANSWER_MAX)
    assert api.visibility("a/b") == "gated"


def test_a_listing_without_an_end_ends(api: HubApi, scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_api, "PAGES_MAX", 5)
    for page in range(9):
        link = f"/api/models/a/b/commits/main?p={page + 1}"
        body = json.dumps([{"id": SHA}]).encode()
        scripted.answers[f"p={page}"] = (200, {"link": f'<{link}>; rel="next"'}, body)
    with pytest.raises(HubRefused, match="next page"):
        list(api.pages(list[HistoryItem], "/api/models/a/b/commits/main", {"p": "0"}))
    assert len(scripted.asked) == 5


def test_a_list_of_pull_requests_that_repeats_itself_ends(api: HubApi, scripted: Scripted) -> None:
    body = {"discussions": [{"num": 1, "status": "closed"}], "count": 10**12}
    scripted.rest = (200, {}, json.dumps(body).encode())
    assert list(api.pull_requests("a/b", "a")) == []
    assert len(scripted.asked) == 2
