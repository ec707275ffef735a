"""Where a Hub may lead: servers on loopback play the services that only this machine can reach."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import pytest

from reshard.pipeline.errors import (
    EndpointNotAllowed,
    HubError,
    HubRefused,
    HubUnreachable,
    ReshardError,
    SourceCorrupt,
    UnsafeRedirect,
)
from reshard.pipeline.places import Hub
from reshard.pipeline.stores import network
from reshard.pipeline.stores.carry import read_whole
from reshard.pipeline.stores.connect import Context
from reshard.pipeline.stores.http import HubSource
from reshard.pipeline.stores.hub_api import HubApi
from reshard.pipeline.stores.lfs import LfsSink, missing
from reshard.pipeline.stores.network import is_public
from reshard.pipeline.stores.refusal import Refusal
from reshard.pipeline.stores.scratch import ScratchSpace
from reshard.pipeline.tensors import StoredFile
from tests.hub.admin import HubAdmin
from tests.hub.fixtures import Namespace
from tests.pipeline.stores.conftest import Impatient

SECRET = b"instance-role: admin"
PUBLIC = "93.184.215.14"
STATUSES = {"broken": 500, "denied": 403}  # what is answered to a path that ends in this


class Internal(ThreadingHTTPServer):
    """A service that no stranger should reach, and what it was asked."""

    def __init__(self, host: str) -> None:
        asked: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                self.send_response(STATUSES.get(self.path.rpartition("/")[2], 200))
                self.send_header("x-error-code", "GatedRepo")
                self.send_header("content-length", str(len(SECRET)))
                self.send_header("x-error-message", "the password is swordfish")
                self.end_headers()
                self.wfile.write(SECRET)

            do_PUT = do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        super().__init__((host, 0), Handler)
        self.asked = asked
        self.connections = 0
        self.url = f"http://{host}:{self.server_address[1]}/latest/meta-data"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def verify_request(self, *_: object) -> bool:
        self.connections += 1
        return True


@pytest.fixture
def internal() -> Iterator[Internal]:
    with Internal("127.0.0.2") as server:
        yield server
        server.shutdown()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[str]]]:
    """What names resolve to, time after time; the last answer stays. The Hub of the tests counts as a public one."""
    known: dict[str, list[list[str]]] = {"127.0.0.1": [[PUBLIC]]}
    real = network.resolve

    def resolve(host: str, port: int) -> list[str]:
        answers = known.get(host)
        if answers is None:
            return real(host, port)
        return answers.pop(0) if len(answers) > 1 else answers[0]

    monkeypatch.setattr(network, "resolve", resolve)
    return known


@pytest.fixture
def api(namespace: Namespace, context: Context, names: dict[str, list[list[str]]], hub: HubAdmin) -> Iterator[HubApi]:
    """A Hub that counts as public, although it is connected to on loopback."""
    api = context.api(Hub(repo=namespace.repo("bait")), "write")
    api.close()  # so that it has no connection to it yet
    yield api
    api.close()


def bait(hub: HubAdmin, namespace: Namespace, api: HubApi, leads_to: str, **listed: object) -> HubSource:
    """A repository whose file is wherever the Hub's redirect says."""
    repo = namespace.repo("bait")
    hub.create_repo(repo)
    hub.put_files(repo, {"notes.txt": b"x" * len(SECRET)})
    item = {"type": "file", "path": "notes.txt", "size": len(SECRET), "oid": "0" * 40, **listed}
    hub.fault(f"{repo}/tree/", "status", status=200, body=json.dumps([item]))
    hub.fault(f"{repo}/resolve/", "status", status=302, headers={"location": leads_to})
    return HubSource.open(api, Hub(repo=repo))


def content(source: HubSource) -> bytes:
    return read_whole(source.files()["notes.txt"], source)


@pytest.mark.parametrize(
    ("text", "public"),
    [
        (PUBLIC, True), ("8.8.8.8", True), ("2606:4700::1111", True), ("64:ff9b::808:808", True),
        ("127.0.0.1", False), ("0.0.0.0", False), ("10.1.2.3", False), ("172.16.0.1", False), ("192.168.1.1", False),
        ("169.254.169.254", False), ("100.64.0.1", False), ("224.0.0.1", False), ("240.0.0.1", False),
        ("255.255.255.255", False), ("::", False), ("::1", False), ("fe80::1%eth0", False), ("fd00:ec2::254", False),
        ("::ffff:169.254.169.254", False), ("64:ff9b::7f00:1", False), ("2002:7f00:1::", False), ("ff02::1", False),
        ("168.63.129.16", False), ("::ffff:168.63.129.16", False), ("::8.8.8.8", False), ("64:ff9b:1::808:808", False),
    ],
)  # fmt: skip
def test_an_address_is_public_only_where_strangers_reach_it(text: str, public: bool) -> None:
    assert is_public(text) is public


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_public_hub_leads_to_no_private_address(
    hub: HubAdmin, namespace: Namespace, api: HubApi, internal: Internal, scheme: str
) -> None:
    source = bait(hub, namespace, api, internal.url.replace("http:", f"{scheme}:"))
    with pytest.raises(UnsafeRedirect, match=r"127\.0\.0\.2") as refused:
        content(source)
    assert refused.value.code == "hub.redirect" and not refused.value.retryable
    assert internal.asked == []


def test_a_public_hub_leads_by_https_only_and_to_no_other_port_of_its_own(
    hub: HubAdmin, namespace: Namespace, api: HubApi, internal: Internal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "is_public", lambda address: True)
    with Internal("127.0.0.1") as beside:
        for server in (internal, beside):
            with pytest.raises(UnsafeRedirect, match="does not use HTTPS"):
                content(bait(hub, namespace, api, server.url))
            hub.clear_faults()
            assert (server.connections, server.asked) == (0, [])
        beside.shutdown()


def test_a_content_store_has_no_private_address_either(
    hub: HubAdmin, namespace: Namespace, api: HubApi, internal: Internal
) -> None:
    """hf_xet connects to it, past all that is checked here at a connection."""
    route = f"/api/models/{namespace.repo('bait')}/xet-read-token/main"
    for url in (internal.url, internal.url.replace("http:", "https:")):
        answer = {"casUrl": url, "accessToken": "x", "exp": 2_000_000_000}
        hub.fault("/xet-read-token/", "status", status=200, body=json.dumps(answer), times=1)
        with pytest.raises(UnsafeRedirect, match=r"127\.0\.0\.2"):
            api.xet_token(route)


def test_a_hub_whose_name_was_not_found_for_a_moment_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[list[str] | OSError] = [OSError("no such name, for now"), ["10.0.0.1"]]

    def resolve(host: str, port: int) -> list[str]:
        if host != "hub.test":
            return ["10.0.0.2"]
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(network, "resolve", resolve)
    guard = network.Guard("http://hub.test")
    with pytest.raises(HubUnreachable, match="for now") as error:
        guard.check("http://storage.test/x")
    assert error.value.retryable
    guard.check("http://storage.test/x")  # a private Hub may lead to its own network
    assert answers == []


def test_a_hub_whose_name_cannot_be_one_is_unreachable() -> None:
    with pytest.raises(HubUnreachable):
        network.Guard(f"http://{'x' * 64}.test").check("http://storage.test/x")


def test_of_several_addresses_only_the_public_ones_are_connected_to(
    api: HubApi, names: dict[str, list[list[str]]]
) -> None:
    names["mixed.test"] = [["127.0.0.2", "10.0.0.1", PUBLIC]]
    assert api.guard.addresses("mixed.test", 443) == [PUBLIC]


def test_the_address_that_was_checked_is_the_one_that_is_connected_to(
    context: Context, internal: Internal, names: dict[str, list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "is_public", lambda address: address == "127.0.0.2")  # its service is the public one
    names["127.0.0.1"] = [["127.0.0.2"]]
    names["rebinds.test"] = [["127.0.0.2"], ["127.0.0.1"], ["127.0.0.1"]]
    address = network.Guard("http://127.0.0.1:1").addresses("rebinds.test", internal.server_address[1])
    names["rebinds.test"] = [["127.0.0.2"], ["127.0.0.1"], ["127.0.0.1"]]
    client = network.GuardedClient(network.Guard("https://127.0.0.1:1"), {})
    with client, pytest.raises(httpx2.ConnectError):  # it was reached, and speaks no TLS
        client.get(f"https://rebinds.test:{internal.server_address[1]}/x")
    assert internal.connections == 1
    assert address == ["127.0.0.2"] and names["rebinds.test"] == [["127.0.0.1"], ["127.0.0.1"]], "it was asked once"


@pytest.mark.parametrize(
    "call",
    [
        lambda api, repo: list(api.commits(repo, "main")),
        lambda api, repo: api.whoami(),
        lambda api, repo: api.create_repo(repo, private=True),
    ],
)
def test_a_call_that_is_redirected_is_as_guarded(
    hub: HubAdmin, namespace: Namespace, api: HubApi, internal: Internal, call: Callable[[HubApi, str], object]
) -> None:
    hub.fault("/api/", "status", status=307, headers={"location": internal.url})
    with pytest.raises(UnsafeRedirect):
        call(api, namespace.repo("bait"))
    assert internal.asked == []


def test_a_call_that_is_redirected_in_circles_ends(hub: HubAdmin, context: Context, namespace: Namespace) -> None:
    hub.fault("/api/whoami-v2", "status", status=302, headers={"location": "/api/whoami-v2"})
    with pytest.raises(HubRefused, match="GET /api/whoami-v2: it redirects too many times") as refused:
        context.api(Hub(repo=namespace.repo("bait")), "write").whoami()
    assert (refused.value.code, refused.value.exit_code) == ("hub.refused", 9)


@pytest.mark.parametrize(
    "location", ["http://[::1", "http://x:99999/", "//", "mailto:a@b", "ftp://hub/", "http://é..com/", "x" * 70_000]
)
def test_a_redirect_to_what_is_no_url_is_an_error_of_the_hub(
    hub: HubAdmin, context: Context, namespace: Namespace, location: str
) -> None:
    hub.fault("/api/whoami-v2", "status", status=302, headers={"location": location})
    with pytest.raises(HubError):
        context.api(Hub(repo=namespace.repo("bait")), "write").whoami()


def test_an_answer_that_cannot_be_decompressed_is_an_error_of_the_hub(
    hub: HubAdmin, context: Context, namespace: Namespace
) -> None:
    hub.fault("/api/whoami-v2", "status", status=200, headers={"content-encoding": "gzip"}, body="{}")
    with pytest.raises(HubRefused, match="GET /api/whoami-v2: the response cannot be decompressed"):
        context.api(Hub(repo=namespace.repo("bait")), "write").whoami()


def test_listings_and_uploads_lead_to_no_private_address_either(
    hub: HubAdmin, namespace: Namespace, api: HubApi, internal: Internal
) -> None:
    hub.fault("/commits/", "status", status=200, body="[]", headers={"link": f'<{internal.url}>; rel="next"'})
    with pytest.raises(UnsafeRedirect):
        list(api.commits(namespace.repo("bait"), "main"))
    oid = hashlib.sha256(b"data").hexdigest()
    actions = {"objects": [{"oid": oid, "size": 4, "actions": {"upload": {"href": internal.url}}}]}
    hub.fault("objects/batch", "status", status=200, body=json.dumps(actions))
    assert missing(api, namespace.repo("bait"), [StoredFile("x", 4, sha256=oid)])
    batch = LfsSink(api, namespace.repo("bait"), ScratchSpace()).batch([])
    writer = batch.open("x", 4)
    writer.write(b"data")
    writer.finish()
    with pytest.raises(UnsafeRedirect):
        batch.seal()
    batch.abort()
    assert internal.asked == []


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254", "::ffff:169.254.169.254", "::a9fe:a9fe", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a9fe:a9fe",
        "2002:a9fe:a9fe::1", "fe80::a9fe:a9fe%eth0", "fd00:ec2::254", "fd20:ce::254", "fd00:c1::a9fe:a9fe",
        "100.100.100.200", "::ffff:100.100.100.200", "168.63.129.16",
    ],
)  # fmt: skip
def test_a_private_hub_leads_to_no_clouds_metadata(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    known = {"hub.test": "10.0.0.2", "metadata.test": address, "own.test": "fd00::2"}
    monkeypatch.setattr(network, "resolve", lambda host, port: [known[host]])
    guard = network.Guard("http://hub.test")
    assert guard.addresses("own.test", 80) == ["fd00::2"]
    with pytest.raises(UnsafeRedirect):
        guard.addresses("metadata.test", 80)


def test_a_private_hub_leads_to_its_own_network_but_to_no_link_local_address(
    hub: HubAdmin, namespace: Namespace, context: Context, internal: Internal, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = network.resolve
    monkeypatch.setattr(
        network, "resolve", lambda host, port: ["169.254.169.254"] if host == "metadata.test" else real(host, port)
    )
    api = context.api(Hub(repo=namespace.repo("bait")), "write")
    source = bait(hub, namespace, api, internal.url)
    with pytest.raises(SourceCorrupt, match="got different bytes"):  # it was reached
        content(source)
    assert len(internal.asked) == 1
    with pytest.raises(UnsafeRedirect):
        api.call("GET", "http://metadata.test/latest")
    with pytest.raises(Refusal) as refused:
        api.call("GET", f"{internal.url}/denied")
    assert (refused.value.code, refused.value.why) == ("", "403 from 127.0.0.2"), "its own words count for nothing"


@pytest.mark.parametrize("listed", [{}, {"size": 7}])
@pytest.mark.parametrize("path", ["", "/broken", "/denied"])
def test_an_error_tells_nothing_of_what_another_host_sent(
    hub: HubAdmin, namespace: Namespace, context: Context, internal: Internal, listed: dict[str, object], path: str
) -> None:
    api = HubApi(namespace.endpoint, context.api(Hub(repo="a/b"), "read").credential, Impatient())
    source = bait(hub, namespace, api, internal.url + path, **listed)
    with pytest.raises(ReshardError) as error:
        content(source)
    told = json.dumps(error.value.to_dict())
    blob = hashlib.sha1(b"blob %d\0" % len(SECRET) + SECRET).hexdigest()
    for secret in (blob, hashlib.sha256(SECRET).hexdigest(), "swordfish", SECRET.decode()):
        assert secret not in told
    if "size" in listed:
        assert f"{len(SECRET)}" not in told.replace(namespace.endpoint, "").replace(namespace.user.name, "")
    api.close()


def test_a_queue_calls_only_the_hubs_that_its_operator_names(internal: Internal, context: Context) -> None:
    place = Hub(repo="alice/bait", endpoint=internal.url.rpartition("/latest")[0])
    fleet = replace(context, endpoints=frozenset({context.credentials.default_endpoint}))
    with pytest.raises(EndpointNotAllowed, match=r"127\.0\.0\.2") as refused:
        fleet.api(place, "read")
    assert refused.value.exit_code == 4 and "RESHARD_ALLOWED_ENDPOINTS" in refused.value.next_step
    assert fleet.api(Hub(repo="alice/bait"), "read").endpoint == context.credentials.default_endpoint
    assert internal.asked == []
