"""What we rely on in huggingface_hub and hf_xet that their documentation does not promise.

When one of these fails after an upgrade, the library changed under us: the message says what, and the module named in
the test is where to follow it.
"""

from __future__ import annotations

import hashlib
import inspect
from importlib.metadata import version
from typing import Any

import hf_xet
import httpcore2
import httpx2
import huggingface_hub
import pytest
from huggingface_hub import utils

from reshard.pipeline.limits import MEMORY_FLOOR_XET, MIB, RECEIVE
from reshard.pipeline.stores import xet
from reshard.pipeline.stores.xet import is_not_found, settings
from tests.hub.admin import HubAdmin
from tests.hub.fixtures import Namespace, hub_process
from tests.pipeline.stores.conftest import noise

__all__ = ["hub_process"]  # of its own: other files would leave chunks there, and what is sent is counted

CHANGED = f"hf_xet {version('hf_xet')} or huggingface_hub {version('huggingface_hub')} changed: "


@pytest.fixture
def upload(hub: HubAdmin, namespace: Namespace) -> Any:
    """A new upload commit on a repository of ours, made as stores/xet.py makes it."""
    hub.create_repo(namespace.repo("contract"))
    return hf_xet.XetSession().new_upload_commit(
        token_refresh_url=f"{hub.endpoint}/api/models/{namespace.repo('contract')}/xet-write-token/main",
        token_refresh_headers={"authorization": f"Bearer {namespace.token}"},
    )


# ---------------------------------------------------------------------------------- huggingface_hub: hub_api, retry


def test_headers_carry_the_token_or_none() -> None:
    signed = utils.build_hf_headers(token="hf_x", library_name="reshard", library_version="1")
    anonymous = utils.build_hf_headers(token=False, library_name="reshard", library_version="1")
    assert signed["authorization"] == "Bearer hf_x", CHANGED + "build_hf_headers names its headers otherwise"
    assert "authorization" not in anonymous and "reshard/1" in anonymous["user-agent"]


def test_rate_limits_are_parsed() -> None:
    found = utils.parse_ratelimit_headers({"RateLimit": '"api";r=0;t=55'})
    assert found is not None and (found.remaining, found.reset_in_seconds) == (0, 55), (
        CHANGED + "parse_ratelimit_headers"
    )


def test_the_token_is_looked_up_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("hf_one", "hf_two"):
        monkeypatch.setenv("HF_TOKEN", value)
        assert huggingface_hub.get_token() == value, CHANGED + "get_token reads HF_TOKEN once only"


def test_the_http_client_streams_what_it_is_given() -> None:
    """stores/lfs.py sends iterators with a Content-Length, and stores/http.py reads pieces as they come."""
    request = httpx2.Client().build_request("PUT", "http://x", headers={"Content-Length": "3"}, content=iter([b"abc"]))
    assert request.headers["content-length"] == "3" and "transfer-encoding" not in request.headers
    assert issubclass(httpx2.ReadTimeout, httpx2.TransportError)
    assert issubclass(httpx2.RemoteProtocolError, httpx2.TransportError)


def test_a_socket_is_asked_for_as_much_as_we_say() -> None:
    asked = []

    class Wire(httpcore2.MockStream):
        def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
            asked.append(max_bytes)
            return super().read(max_bytes, timeout)

    class Wires(httpcore2.MockBackend):
        def connect_tcp(self, *_: Any, **__: Any) -> httpcore2.NetworkStream:
            return Wire([b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"])

    with httpcore2.ConnectionPool(network_backend=Wires([])) as pool:
        assert pool.request("GET", "http://x/").content == b"abc"
    assert set(asked) == {RECEIVE}, f"httpcore {version('httpcore2')} changed: READ_NUM_BYTES"


# ------------------------------------------------------------------------------------------------------ hf_xet: xet


def test_every_knob_that_bounds_memory_is_there() -> None:
    known = set(hf_xet.XetConfig().keys())
    assert settings(MEMORY_FLOOR_XET).keys() <= known, CHANGED + "XetConfig lost a key"
    config = hf_xet.XetConfig().with_config(settings(MEMORY_FLOOR_XET))
    for name, value in settings(MEMORY_FLOOR_XET).items():
        found = config.get(name)
        if isinstance(value, str):  # a duration
            expected = float(value[:-2]) / 1000 if value.endswith("ms") else float(value[:-1])
            assert found.total_seconds() == expected, CHANGED + f"{name} is no duration any more"
        else:
            assert found == value, CHANGED + f"{name} is not taken over"


def test_the_defaults_are_still_too_large_to_be_left_alone() -> None:
    assert hf_xet.XetConfig().get("reconstruction.download_buffer_size") > 2 * MEMORY_FLOOR_XET


@pytest.mark.parametrize("method", ["new_upload_commit", "new_download_stream_group"])
def test_sessions_take_a_route_for_tokens(method: str) -> None:
    parameters = inspect.signature(getattr(hf_xet.XetSession, method)).parameters
    assert {"token_refresh_url", "token_refresh_headers"} <= parameters.keys(), CHANGED + method


def test_a_stream_knows_its_sha256_and_is_finished_once(upload: Any) -> None:
    data = noise(2 * MIB, 31)
    stream = upload.start_upload_stream(name="x")
    stream.write(data)
    found = stream.finish().xet_info
    assert (found.file_size, found.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert len(found.hash) == 64, CHANGED + "XetFileInfo"
    with pytest.raises(RuntimeError):
        stream.finish()
    metrics = upload.wait_to_finish().dedup_metrics
    assert metrics.total_bytes == len(data) and metrics.total_bytes_uploaded >= len(data)
    assert metrics.deduped_bytes == 0, CHANGED + "DeduplicationMetrics"


def test_a_stream_takes_bytes_only(upload: Any) -> None:
    """If this fails, XetWriter.write need not copy any more."""
    stream = upload.start_upload_stream(name="x")
    with pytest.raises(TypeError):
        stream.write(memoryview(b"x"))
    upload.abort()


def test_an_aborted_commit_takes_nothing_more(upload: Any) -> None:
    stream = upload.start_upload_stream(name="x")
    upload.abort()
    upload.abort()
    with pytest.raises(xet.XetFailure):
        stream.write(b"x")


def test_a_stream_of_what_is_not_there_fails_or_ends_early(hub: HubAdmin, namespace: Namespace) -> None:
    """Which of the two is a race inside hf_xet: no end of a stream can be taken for the end of the file."""
    hub.create_repo(namespace.repo("contract"))
    group = hf_xet.XetSession().new_download_stream_group(
        token_refresh_url=f"{hub.endpoint}/api/models/{namespace.repo('contract')}/xet-read-token/main",
        token_refresh_headers={"authorization": f"Bearer {namespace.token}"},
    )
    for _ in range(5):
        try:
            got = b"".join(group.download_stream(hf_xet.XetFileInfo("1" * 64, 100), start=0, end=100))
        except xet.XetFailure as failure:
            assert is_not_found(failure), CHANGED + f"a missing file is now {failure!r}"
        else:
            assert got == b""


def test_the_store_tells_what_it_has_by_its_reconstructions(upload: Any, hub: HubAdmin, namespace: Namespace) -> None:
    """XetSink.lost speaks to the store itself, in the open protocol's first version."""
    stream = upload.start_upload_stream(name="x")
    stream.write(noise(MIB, 33))
    info = stream.finish().xet_info
    upload.wait_to_finish()
    route = f"{hub.endpoint}/api/models/{namespace.repo('contract')}/xet-write-token/main"
    token = httpx2.get(route, headers={"authorization": f"Bearer {namespace.token}"}).json()
    headers = {"authorization": f"Bearer {token['accessToken']}", "range": "bytes=0-0"}
    answer = httpx2.get(f"{token['casUrl']}/v1/reconstructions/{info.hash}", headers=headers).json()
    part = answer["fetch_info"][answer["terms"][0]["hash"]][0]
    assert {"start", "end"} <= part["url_range"].keys() and part["url"].startswith("http")


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refused_token_is_a_failure_of_a_kind_that_we_know(hub: HubAdmin, status: int) -> None:
    hub.fault("GET .*/xet-write-token", "status", status=status)
    with pytest.raises(xet.XetFailure):
        hf_xet.XetSession().new_upload_commit(
            token_refresh_url=f"{hub.endpoint}/api/models/a/b/xet-write-token/main", token_refresh_headers={}
        )


def test_a_range_of_a_stream_is_that_range(upload: Any, hub: HubAdmin, namespace: Namespace) -> None:
    data = noise(3 * MIB, 32)
    stream = upload.start_upload_stream(name="x")
    stream.write(data)
    info = stream.finish().xet_info
    upload.wait_to_finish()
    group = hf_xet.XetSession().new_download_stream_group(
        token_refresh_url=f"{hub.endpoint}/api/models/{namespace.repo('contract')}/xet-read-token/main",
        token_refresh_headers={"authorization": f"Bearer {namespace.token}"},
    )
    for start, stop in ((0, len(data)), (1, 2), (700_000, 2_500_001)):
        pieces = list(group.download_stream(hf_xet.XetFileInfo(info.hash, info.file_size), start=start, end=stop))
        assert all(type(piece) is bytes for piece in pieces) and b"".join(pieces) == data[start:stop]
