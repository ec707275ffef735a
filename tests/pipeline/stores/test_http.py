"""Reading over HTTP while the network and the content servers misbehave."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
import pytest
from huggingface_hub import HfApi
from pydantic import SecretStr

from reshard.pipeline.errors import (
    HubError,
    HubRefused,
    HubUnreachable,
    RevisionNotFound,
    SourceChanged,
    SourceGated,
    SourceNotFound,
    TokenMissing,
    TokenRefused,
)
from reshard.pipeline.limits import ATTEMPTS
from reshard.pipeline.places import Hub
from reshard.pipeline.protocols import Source
from reshard.pipeline.stores import http
from reshard.pipeline.stores.connect import Context, open_source
from reshard.pipeline.stores.credentials import Credential, Credentials
from reshard.pipeline.stores.http import HubSource
from reshard.pipeline.stores.hub_api import HubApi
from reshard.pipeline.tensors import StoredFile
from tests.hub.admin import HubAdmin
from tests.hub.fixtures import Namespace
from tests.pipeline.stores.conftest import Impatient, MakeSource, noise, read

DATA = noise(5_000_000, 7)
CDN = "GET /_cdn/"


@pytest.fixture
def source(hub_source: MakeSource, hub: HubAdmin) -> Source:
    made = hub_source({"model.safetensors": DATA, "config.json": b"{}"})
    made.files()
    hub.log(reset=True)
    return made


def ranges(hub: HubAdmin) -> int:
    """How many content requests there were."""
    return sum(line["path"].startswith("/_cdn/") for line in hub.log())


@pytest.mark.parametrize("fin", [False, True])
def test_a_broken_body_is_resumed_at_the_byte_where_it_broke(source: Source, hub: HubAdmin, fin: bool) -> None:
    hub.fault(CDN, "truncate", after=1_500_000, fin=fin, times=3)
    assert read(source, "model.safetensors") == DATA
    sent = sum(line["down"] for line in hub.log() if line["path"].startswith("/_cdn/"))
    assert ranges(hub) == 4
    # An orderly end loses nothing; a reset also takes what had arrived and was not yet read.
    assert sent == len(DATA) if fin else sent <= len(DATA) + 3 * 1_500_000


def test_progress_makes_the_attempts_count_anew(source: Source, hub: HubAdmin) -> None:
    hub.fault(CDN, "truncate", after=400_000, times=2 * ATTEMPTS)
    assert read(source, "model.safetensors") == DATA


@pytest.mark.parametrize(
    ("action", "options"),
    [
        ("reset", {}),
        ("truncate_head", {"after": 12, "fin": True}),  # in the status line
        ("truncate_head", {"after": 100, "fin": True}),  # in the headers
        ("truncate_head", {"after": 100}),
        ("status", {"status": 503}),
        ("status", {"status": 500}),
        ("status", {"status": 408}),
    ],
)
def test_a_passing_failure_is_waited_out(
    source: Source, hub: HubAdmin, pace: Impatient, action: str, options: dict[str, int]
) -> None:
    hub.fault(CDN, action, times=3, **options)
    assert read(source, "model.safetensors") == DATA
    assert len(pace.slept) == 3 and pace.slept[0] < pace.slept[2]


def test_a_failure_that_stays_ends_the_read(source: Source, hub: HubAdmin) -> None:
    hub.fault(CDN, "status", status=503)
    with pytest.raises(HubError) as gone:
        read(source, "model.safetensors")
    assert gone.value.retryable and ranges(hub) == ATTEMPTS


def test_a_hub_that_went_away_is_unreachable(source: Source, hub: HubAdmin) -> None:
    hub.fault("GET", "reset")
    with pytest.raises(HubUnreachable):
        read(source, "model.safetensors")


@pytest.mark.parametrize(
    "headers",
    [{"Retry-After": "7"}, {"RateLimit": '"api";r=0;t=6', "RateLimit-Policy": '"fixed window";"api";q=1;w=9'}],
)
def test_a_rate_limit_slows_down_everybody_for_as_long_as_it_says(
    source: Source, hub: HubAdmin, pace: Impatient, headers: dict[str, str]
) -> None:
    hub.fault("GET .*/resolve/", "status", status=429, headers=headers, times=1)
    assert read(source, "model.safetensors") == DATA
    assert pace.slowed == pace.slept == [7.0] and pace.refusals == 1


def test_what_another_host_asks_for_slows_down_nobody_else(source: Source, hub: HubAdmin, pace: Impatient) -> None:
    hub.fault(CDN, "status", status=503, headers={"Retry-After": "17"}, times=1)
    assert read(source, "model.safetensors") == DATA
    assert pace.slowed == [] and pace.slept == [10.0, 7.0]


def test_a_signed_url_is_used_for_every_range_of_its_file(source: Source, hub: HubAdmin) -> None:
    for start in range(0, 5_000_000, 500_000):
        assert read(source, "model.safetensors", start, start + 10) == DATA[start : start + 10]
    assert sum("/resolve/" in line["path"] for line in hub.log()) == 1


def test_a_signed_url_that_expired_is_asked_for_anew(source: Source, hub: HubAdmin) -> None:
    hub.settings(cdn_lifetime=-1.0)
    with pytest.raises(HubRefused):  # one that is refused while it is fresh is no accident
        read(source, "model.safetensors")
    hub.settings(cdn_lifetime=3600.0)
    hub.log(reset=True)
    assert read(source, "model.safetensors") == DATA
    assert [line["status"] for line in hub.log()] == [403, 302, 206]


def test_signed_urls_that_are_stale_before_their_first_byte_are_renewed_a_few_times(
    source: Source, hub: HubAdmin
) -> None:
    hub.fault(CDN, "status", status=403, times=3)
    assert read(source, "model.safetensors") == DATA
    hub.fault(CDN, "status", status=403, times=4)
    with pytest.raises(HubRefused):
        read(source, "model.safetensors", 0, 10)


def test_an_expiry_in_the_middle_of_a_file_goes_unnoticed(source: Source, hub: HubAdmin) -> None:
    hub.fault(CDN, "truncate", after=1_000_000, times=1)
    hub.fault(CDN, "status", status=403, times=1, skip=1)
    assert read(source, "model.safetensors") == DATA


def test_connections_are_used_again(source: Source, hub: HubAdmin) -> None:
    connections = set()
    for start in range(0, 100_000, 10_000):
        read(source, "model.safetensors", start, start + 10_000)
        api = source.api  # type: ignore[attr-defined]
        connections |= {id(c) for c in api.client._transport._pool.connections}
    assert len(connections) == 2  # the Hub's and the content server's


def test_a_file_that_was_replaced_in_the_store_is_not_read(source: Source, hub: HubAdmin) -> None:
    hub.fault("GET .*/resolve/", "status", status=302, headers={"Location": "/x", "X-Linked-Etag": '"0000"'})
    with pytest.raises(SourceChanged):
        read(source, "model.safetensors")


def test_an_object_that_the_store_lost_is_named(source: Source, hub: HubAdmin) -> None:
    hub.drop_object(str(source.files()["model.safetensors"].sha256))
    with pytest.raises(SourceChanged, match=r"model\.safetensors"):
        read(source, "model.safetensors")


def test_a_repo_deleted_while_it_is_read_is_named(source: Source, hub: HubAdmin, namespace: Namespace) -> None:
    hub.fault("GET .*/resolve/", "status", status=404, headers={"X-Error-Code": "RepoNotFound"})
    with pytest.raises(SourceNotFound):
        read(source, "config.json")


def test_a_renamed_repo_is_followed(
    hub_source: MakeSource, hub: HubAdmin, context: Context, namespace: Namespace
) -> None:
    repo = hub_source({"model.safetensors": DATA, "config.json": b"{}"}).pin.repo
    httpx2.post(
        f"{hub.endpoint}/api/repos/move", json={"fromRepo": repo, "toRepo": namespace.repo("new-name")},
        headers={"authorization": f"Bearer {namespace.token}"},
    ).raise_for_status()  # fmt: skip
    source = open_source(Hub(repo=repo), context)
    assert read(source, "model.safetensors") == DATA and read(source, "config.json") == b"{}"


@pytest.mark.parametrize("path", ["model.safetensors", "config.json"])
def test_a_commit_that_is_gone_is_named(source: Source, hub: HubAdmin, namespace: Namespace, path: str) -> None:
    """As after a force-push, once git has collected its garbage. What was listed before is not listed again."""
    files = source.files()
    squash(source, hub, namespace)
    with pytest.raises(SourceChanged, match=source.pin.commit):
        list(source.read(files[path], 0, 1))


def test_a_commit_that_went_before_it_was_listed_is_named(
    hub_source: MakeSource, hub: HubAdmin, namespace: Namespace
) -> None:
    source = hub_source({"config.json": b"{}"})
    squash(source, hub, namespace)
    with pytest.raises(SourceChanged, match=source.pin.commit):
        source.files()


def squash(source: Source, hub: HubAdmin, namespace: Namespace) -> None:
    HfApi(endpoint=hub.endpoint, token=namespace.token).super_squash_history(source.pin.repo)
    assert source.pin.commit in hub.forget_commits(source.pin.repo)


def test_a_redirect_that_leads_in_circles_ends(source: Source, hub: HubAdmin) -> None:
    hub.fault("GET ", "status", status=302, headers={"Location": "/again"})
    with pytest.raises(HubRefused):
        read(source, "model.safetensors")


def test_a_trickle_is_given_up_and_resumed(source: Source, hub: HubAdmin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "STALL_WINDOW", 0.3)
    hub.fault(CDN, "throttle", rate=20_000, times=1)
    assert read(source, "model.safetensors") == DATA
    assert ranges(hub) == 2


# ----------------------------------------------------------------------------------------------------- odd servers


@contextmanager
def serving(*answers: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that gives these answers, one for each connection: its URL, and the requests that it got."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        requests: list[bytes] = []

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    requests.append(connection.recv(65536))
                    connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests


@contextmanager
def answering(*answers: bytes) -> Iterator[Source]:
    """A source on such a server."""
    with serving(*answers) as (endpoint, _):
        yield HubSource(HubApi(endpoint, None, Impatient()), Hub(repo="a/b"), "c" * 40, "public")


FILE = StoredFile("x.bin", 10)


def test_a_server_that_ignores_ranges_is_read_from_the_start_only() -> None:
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n0123456789"
    with answering(whole, whole) as source:
        assert b"".join(source.read(FILE, 0, 4)) == b"0123"
        with pytest.raises(HubRefused):
            list(source.read(FILE, 4, 8))


def test_an_answer_with_another_range_is_refused() -> None:
    answer = b"HTTP/1.1 206 Partial Content\r\nContent-Length: 4\r\nContent-Range: bytes 2-5/10\r\n\r\n2345"
    with answering(answer) as source, pytest.raises(SourceChanged):
        list(source.read(FILE, 0, 4))


def test_a_file_of_another_size_is_refused() -> None:
    answer = b"HTTP/1.1 206 Partial Content\r\nContent-Length: 4\r\nContent-Range: bytes 0-3/11\r\n\r\n0123"
    with answering(answer) as source, pytest.raises(SourceChanged):
        list(source.read(FILE, 0, 4))


def test_an_answer_that_ends_early_without_saying_so_is_resumed() -> None:
    short = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-9/10\r\n\r\n0123"  # ended by closing
    rest = b"HTTP/1.1 206 Partial Content\r\nContent-Length: 10\r\nContent-Range: bytes 0-9/10\r\n\r\nabcdefghij"
    with answering(short, rest) as source:
        assert b"".join(source.read(FILE, 0, 10)) == b"abcdefghij"


# --------------------------------------------------------------------------------------------------------- opening


def opened(repo: str, context: Context, revision: str | None = None) -> Source:
    source = open_source(Hub(repo=repo, revision=revision), context)
    source.files()
    return source


def test_a_repo_that_is_not_there(context: Context, namespace: Namespace) -> None:
    with pytest.raises(SourceNotFound, match=r"repository not found on http://.*: nobody/nothing"):
        opened("nobody/nothing", context)


def test_a_repo_that_is_not_there_for_somebody_without_a_token(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(SourceNotFound):
        opened("nobody/nothing", context)


def test_a_private_repo_looks_like_none_to_others(context: Context, hub: HubAdmin) -> None:
    hub.create_user("somebody-else")
    hub.create_repo("somebody-else/secret", visibility="private")
    with pytest.raises(SourceNotFound):
        opened("somebody-else/secret", context)


def test_a_revision_that_is_not_there(context: Context, hub: HubAdmin, namespace: Namespace) -> None:
    hub.create_repo(namespace.repo("m"))
    with pytest.raises(RevisionNotFound, match="has no branch, tag or commit v9"):
        opened(namespace.repo("m"), context, "v9")


def test_a_gated_repo_needs_leave(context: Context, hub: HubAdmin, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.create_user("keeper")
    hub.create_repo("keeper/gated", gated="manual")
    with pytest.raises(SourceGated) as refused:
        opened("keeper/gated", context)
    assert "keeper/gated" in refused.value.next_step
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(TokenMissing):
        opened("keeper/gated", context)


def test_who_was_let_in_reads_a_gated_repo(context: Context, hub: HubAdmin, namespace: Namespace) -> None:
    hub.create_repo("keeper/open", gated="auto", granted=[namespace.name])
    assert opened("keeper/open", context).visibility == "gated"


def test_a_token_that_the_hub_does_not_know(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    with pytest.raises(TokenRefused) as refused:
        opened("a/b", context)
    assert "hf_expired" not in str(refused.value) + repr(refused.value) + str(refused.value.to_dict())


def test_an_endpoint_where_nobody_listens(context: Context, pace: Impatient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(HubUnreachable, match=endpoint):
        open_source(Hub(repo="a/b", endpoint=endpoint), context)
    assert len(pace.slept) == ATTEMPTS - 1


def test_an_endpoint_that_is_no_url_is_not_tried_again(context: Context, pace: Impatient) -> None:
    with pytest.raises(HubUnreachable):
        open_source(Hub(repo="a/b", endpoint="gopher://hub"), context)
    assert pace.slept == []


def test_a_server_that_is_no_hub_is_told_so(context: Context) -> None:
    page = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>"
    with answering(page) as odd, pytest.raises(HubRefused, match="is this a Hub?"):
        open_source(Hub(repo="a/b", endpoint=str(odd.pin.endpoint)), context)


def test_the_revision_is_pinned_once(hub_source: MakeSource, hub: HubAdmin) -> None:
    source = hub_source({"config.json": b"{}"})
    hub.put_files(source.pin.repo, {"config.json": b"{1}", "new.txt": b"n"})
    assert read(source, "config.json") == b"{}" and "new.txt" not in source.files()


def test_a_tree_of_many_pages_is_listed_whole(hub_source: MakeSource, hub: HubAdmin) -> None:
    hub.settings(tree_page=7)
    files = {f"f{n:03}.txt": b"x" for n in range(50)}
    assert files.keys() <= hub_source(files).files().keys()


def test_the_token_is_shown_to_the_hub_only() -> None:
    content = b"HTTP/1.1 206 Partial Content\r\nContent-Length: 10\r\nContent-Range: bytes 0-9/10\r\n\r\n0123456789"
    with serving(content) as (elsewhere, asked_there):
        redirect = f"HTTP/1.1 302 Found\r\nLocation: {elsewhere}/x\r\nContent-Length: 0\r\n\r\n".encode()
        with serving(redirect) as (endpoint, asked_here):
            api = HubApi(endpoint, Credential("T", SecretStr("hf_secret")), Impatient())
            source = HubSource(api, Hub(repo="a/b"), "c" * 40, "public")
            assert b"".join(source.read(FILE, 0, 10)) == b"0123456789"
    assert b"hf_secret" in asked_here[0] and b"hf_secret" not in asked_there[0]


def test_the_token_is_not_shown_where_the_hub_sends_an_upload() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    with serving(answer) as (elsewhere, asked_there), serving(answer) as (endpoint, asked_here):
        api = HubApi(endpoint, Credential("T", SecretStr("hf_secret")), Impatient())
        for place in (endpoint, elsewhere):
            assert api.call("POST", f"{place}/verify", json={}).json() == {}
    assert b"hf_secret" in asked_here[0] and b"hf_secret" not in asked_there[0]


def test_a_private_repo_is_read_with_the_token(context: Context, hub: HubAdmin, namespace: Namespace) -> None:
    repo = namespace.repo("hidden")
    hub.create_repo(repo, visibility="private")
    hub.put_files(repo, {"model.safetensors": DATA, "config.json": b"{}"}, lfs=["model.safetensors"])
    source = open_source(Hub(repo=repo), context, transport="http")
    assert source.visibility == "private"
    assert read(source, "model.safetensors") == DATA and read(source, "config.json") == b"{}"


def test_a_token_for_one_endpoint_is_not_sent_to_another(hub: HubAdmin, namespace: Namespace, context: Context) -> None:
    other = Context(Credentials("https://elsewhere.example"), context.tmpdir, context.memory_limit)
    hub.create_repo(namespace.repo("secret"), visibility="private")
    with pytest.raises(SourceNotFound):
        open_source(Hub(repo=namespace.repo("secret"), endpoint=hub.endpoint), other)
