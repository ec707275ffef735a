"""What an observer is told of calls: each once, when its answer came or broke, and nothing that lets anybody in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from pydantic import SecretStr

from reshard.pipeline.errors import SourceNotFound, TargetNotFound
from reshard.pipeline.limits import MEMORY_FLOOR_XET
from reshard.pipeline.places import Hub, HubBucket
from reshard.pipeline.stores.credentials import Credential
from reshard.pipeline.stores.http import HubSource
from reshard.pipeline.stores.hub_api import HubApi
from reshard.pipeline.stores.hub_bucket import BucketObjects
from reshard.pipeline.stores.hub_target import HubTarget
from reshard.pipeline.stores.lfs import LfsSink
from reshard.pipeline.stores.network import GuardedClient
from reshard.pipeline.stores.observed import Call
from tests.hub.admin import HubAdmin
from tests.hub.fixtures import Namespace
from tests.pipeline.stores.conftest import Impatient, noise

DATA = noise(5_000_000, 3)


@pytest.fixture
def calls() -> list[Call]:
    return []


@pytest.fixture
def source(hub: HubAdmin, namespace: Namespace, calls: list[Call]) -> Iterator[HubSource]:
    repo = namespace.repo("model")
    hub.create_repo(repo)
    hub.put_files(repo, {"model.safetensors": DATA}, lfs=["model.safetensors"])
    api = HubApi(namespace.endpoint, Credential("T", SecretStr(namespace.token)), Impatient(), calls.append)
    made = HubSource.open(api, Hub(repo=repo))
    made.files()
    calls.clear()
    yield made
    api.close()


def read(source: HubSource, stop: int) -> bytes:
    return b"".join(source.read(source.files()["model.safetensors"], 0, stop))


def facts(calls: list[Call], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(call.facts.get(name) for name in names) for call in calls]


def test_a_call_is_told_when_its_body_is_read_and_of_another_host_without_its_path(
    source: HubSource, hub: HubAdmin, calls: list[Call]
) -> None:
    hub.log(reset=True)
    views = source.read(source.files()["model.safetensors"], 0, len(DATA))
    next(views)
    assert len(calls) == 1, "the redirect has been read, and of the content a part"
    assert len(b"".join(views)) < len(DATA)
    entry, content = hub.log()
    path = f"/{source.place.repo}/resolve/{source.pin.commit}/model.safetensors"
    names = ("url.path", "http.response.status_code", "http.response.body.size", "reshard.request_id")
    assert facts(calls, *names) == [(path, 302, entry["down"], f"hub-{entry['n']}"), (None, 206, len(DATA), None)]
    assert "signature=" in content["path"] and "signature=" not in repr(calls)
    assert all(call.start < call.end for call in calls)


def test_what_broke_a_body_is_told(source: HubSource, hub: HubAdmin, calls: list[Call]) -> None:
    hub.fault("GET /_cdn/", "truncate", after=1_500_000, fin=True, times=1)
    assert read(source, 2_000_000) == DATA[:2_000_000]
    told = facts(calls[1:], "error.type", "http.response.body.size")
    assert told == [("RemoteProtocolError", 1_500_000), (None, 500_000)]


def test_a_call_without_an_answer_and_one_that_is_refused_are_errors(
    source: HubSource, hub: HubAdmin, calls: list[Call]
) -> None:
    hub.fault("GET /api/whoami-v2", "reset", times=1)
    source.api.whoami()
    hub.fault("GET /api/whoami-v2", "status", status=503, times=1)
    source.api.whoami()
    assert facts(calls, "error.type") == [("ReadError",), (None,), ("503",), (None,)]
    assert "http.response.status_code" not in calls[0].facts


def test_a_target_that_is_not_there_yet_is_no_error_and_a_source_is(namespace: Namespace, calls: list[Call]) -> None:
    api = HubApi(namespace.endpoint, Credential("T", SecretStr(namespace.token)), Impatient(), calls.append)
    repo = namespace.repo("none")
    bucket = BucketObjects(api, HubBucket(url=f"hf://buckets/{repo}"), MEMORY_FLOOR_XET, None)
    with pytest.raises(SourceNotFound):
        HubSource.open(api, Hub(repo=repo))
    assert not HubTarget(api, Hub(repo=repo), "main", LfsSink).state().exists
    with pytest.raises(TargetNotFound):
        HubTarget(api, Hub(repo=repo), "main", LfsSink, pull_request=True).state()
    assert bucket.look() is None and bucket.read("claim") is None
    api.close()
    assert facts(calls, "http.response.status_code", "error.type") == [
        (404, "404"), (404, None), (404, "404"), (404, None), (404, None),
    ]  # fmt: skip


def test_without_an_observer_the_client_is_the_plain_one(namespace: Namespace) -> None:
    api = HubApi(namespace.endpoint, None, Impatient())
    assert type(api.client) is GuardedClient
    api.close()


def test_a_user_and_a_password_in_an_endpoint_are_not_told(hub: HubAdmin, calls: list[Call]) -> None:
    endpoint = httpx2.URL(hub.endpoint).copy_with(username="us", password="s3cret")
    api = HubApi(str(endpoint), None, Impatient(), calls.append)
    api.client.get(f"{api.endpoint}/api/whoami-v2?token=t0ken")
    api.close()
    (call,) = calls
    assert call.facts["url.path"] == "/api/whoami-v2"
    assert "s3cret" not in repr(calls) and "t0ken" not in repr(calls)
