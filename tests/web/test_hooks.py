"""Webhooks as the Hub sends them, to the real process, which asks the Hub on loopback whose commits they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from reshard.client.models.catalogs import Pushed
from reshard.client.served import HUB_CALLS
from reshard.pipeline.places import Hub
from reshard.pipeline.request import Request
from reshard.web.auth import Scope, add_token
from reshard.web.hooks import AT_ONCE
from reshard.worker.followers.schedules import ALL, Schedule, Schedules
from reshard.worker.queue.jobs import JobStore
from tests.hub.fixtures import Namespace
from tests.support.models import add_friends, arrays, numbered, save_sharded
from tests.support.procs import Broker, Machine, free_port
from tests.web.conftest import SECRET, Site, answered, post, pushed, start


@pytest.fixture
def watched(namespace: Namespace, broker: Broker, tmp_path: Path) -> Iterator[Site]:
    """The service, with the Hub on loopback."""
    hub = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token}
    with Machine(tmp_path, broker.url, RESHARD_ALLOWED_TARGETS=namespace.name, **hub) as machine:
        port, tokens = free_port(), {"act": add_token(tmp_path / "tokens", "ada", Scope.act)}
        yield Site(machine, start(machine, tmp_path / "tokens", port), f"http://127.0.0.1:{port}", tokens)


def told(site: Site, payload: object) -> dict[str, Any]:
    document: dict[str, Any] = answered(post(site, payload))
    Pushed.model_validate_json(json.dumps(document))
    return document


def keep(store: JobStore, name: str, source: str, target: str) -> None:
    request = Request(source=Hub(repo=source), target=Hub(repo=target))
    Schedules(store).add(Schedule(name=name, cron="@daily", request=request))


def test_a_push_fires_the_schedule_that_reads_it_once(watched: Site, store: JobStore, namespace: Namespace) -> None:
    source = namespace.repo("source")
    namespace.admin.create_repo(source)
    commit = namespace.admin.put_files(source, {"config.json": b"{}"}, message="mine")
    keep(store, "nightly", source, namespace.repo("target"))
    keep(store, "others", "them/model", namespace.repo("more"))
    (carried,) = told(watched, pushed(source, commit))["carried"]
    assert (carried["schedule"], carried["outcome"], carried["commit"]) == ("nightly", "submitted", commit)
    assert [job.id for job in store.recent()] == [carried["job"]]
    assert told(watched, pushed(source, commit))["carried"][0]["outcome"] == "repeat"
    assert told(watched, pushed(source, commit, "refs/pr/1"))["carried"] == []
    assert len(store.recent()) == 1


def test_a_commit_of_ours_and_its_rollback_start_nothing(
    watched: Site, store: JobStore, namespace: Namespace, tmp_path: Path
) -> None:
    save_sharded(tmp_path / "model", numbered(arrays(6, 2000), 2))
    add_friends(tmp_path / "model")
    middle = namespace.repo("middle")
    done = watched.machine.run("run", "./model", "--to", middle, "--size", "10KB")
    assert done.returncode == 0, done.stderr
    keep(store, "chained", middle, namespace.repo("end"))
    ours = namespace.admin.head(middle)
    assert told(watched, pushed(middle, ours))["carried"][0]["outcome"] == "own"
    assert watched.machine.run("rollback", middle).returncode == 0
    assert told(watched, pushed(middle, namespace.admin.head(middle)))["carried"][0]["outcome"] == "own"
    theirs = namespace.admin.put_files(middle, {"notes.md": b"mine"})
    assert told(watched, pushed(middle, theirs))["carried"][0]["outcome"] == "submitted"


def test_what_is_not_allowed_or_not_known_here_is_refused_and_the_rest_is_done(
    watched: Site, store: JobStore, namespace: Namespace
) -> None:
    source = namespace.repo("source")
    namespace.admin.create_repo(source)
    commit = namespace.admin.put_files(source, {"config.json": b"{}"})
    keep(store, "a", source, "elsewhere/target")
    keep(store, "b", source, namespace.repo("target"))
    carried = told(watched, pushed(source, commit))["carried"]
    assert [one["outcome"] for one in carried] == ["refused", "submitted"]
    assert carried[0]["error"]["code"] == "access.target_not_allowed"
    stored = json.loads(store.redis.hget(ALL, "a") or b"")
    stored["request"]["target"]["repo"] = namespace.repo("more")
    store.redis.hset(ALL, "a", json.dumps(stored | {"unheard": 1}))
    carried = told(watched, pushed(source, namespace.admin.put_files(source, {"notes.md": b""})))["carried"]
    assert [one["outcome"] for one in carried] == ["refused", "existed"]
    assert carried[0]["error"]["code"] == "queue.schedule_unreadable"


def test_a_hub_that_makes_it_wait_does_not_keep_a_push_from_its_job(
    watched: Site, store: JobStore, namespace: Namespace
) -> None:
    keep(store, "nightly", namespace.repo("source"), namespace.repo("target"))
    namespace.admin.fault("GET .*/commits/", "status", status=429, headers={"Retry-After": "3000"})
    assert told(watched, pushed(namespace.repo("source"), "1" * 40))["carried"][0]["outcome"] == "submitted"


def test_pushes_that_wait_for_a_hub_keep_nobody_else_waiting(
    watched: Site, store: JobStore, namespace: Namespace
) -> None:
    """More of them than there are threads."""
    keep(store, "nightly", namespace.repo("source"), namespace.repo("target"))
    rule, count = namespace.admin.fault("GET .*/commits/", "hold"), 60
    with ThreadPoolExecutor(count) as pool:
        waiting = [pool.submit(told, watched, pushed(namespace.repo("source"), f"{n:040}")) for n in range(count)]
        namespace.admin.wait_for_fault(rule, waiting=AT_ONCE)
        assert watched.get("/api/v1/jobs", scope="act")["jobs"] == []
        assert httpx2.get(f"{watched.url}/readyz").text == "ok\n"
        namespace.admin.release(rule)
        outcomes = [carried["outcome"] for answer in waiting for carried in answer.result()["carried"]]
    assert len(outcomes) == count and set(outcomes) == {"submitted", "existed"}
    assert len(store.recent()) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"event": {"action": "create", "scope": "discussion"}},
        {"event": {"action": "update", "scope": "repo.config"}},
        {"event": {"action": "create", "scope": "repo"}},
        {"repo": {"type": "dataset", "name": "a/model"}},
        {"updatedRefs": [{"ref": "refs/heads/main", "oldSha": "1" * 40, "newSha": None}]},
        {"updatedRefs": []},
    ],
)
def test_what_is_no_push_to_a_model_does_nothing(site: Site, store: JobStore, changed: dict[str, Any]) -> None:
    keep(store, "nightly", "a/model", "b/model")
    document = told(site, pushed("a/model", "1" * 40) | changed)
    assert document["carried"] == [] and document["ignored"]
    assert store.recent() == []


@pytest.mark.parametrize("secret", [None, "", SECRET[:-1], SECRET + "x", SECRET.upper(), "x" * 10_000, "\xe9"])
def test_without_the_secret_it_is_refused(site: Site, store: JobStore, secret: str | None) -> None:
    keep(store, "nightly", "a/model", "b/model")
    refused = post(site, pushed("a/model", "1" * 40), secret)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "access.hook")
    assert store.recent() == []


def test_where_no_secret_is_set_every_hook_is_refused(broker: Broker, store: JobStore, tmp_path: Path) -> None:
    with Machine(tmp_path, broker.url) as machine:
        port = free_port()
        process = start(machine, tmp_path / "tokens", port, RESHARD_WEB_HOOK_SECRET="")
        bare = Site(machine, process, f"http://127.0.0.1:{port}", {})
        for secret in (None, "", "None"):
            assert post(bare, pushed("a/model", "1" * 40), secret).status_code == 403


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"event": 1}', b"[" * 100_000, json.dumps(pushed("a/b", "../..")).encode(), b"\xff"]
)
def test_what_is_no_payload_is_said_to_be_none(site: Site, store: JobStore, body: bytes) -> None:
    refused = post(site, body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "usage.body")


def test_plans_that_wait_for_a_hub_keep_nobody_else_waiting(
    watched: Site, store: JobStore, namespace: Namespace
) -> None:
    rule = namespace.admin.fault("GET .*/revision/", "hold")
    body = {"source": namespace.repo("source"), "target": namespace.repo("target")}
    with ThreadPoolExecutor(HUB_CALLS) as pool, watched.client() as client:
        waiting = [pool.submit(watched.client().post, "/api/v1/plan", json=body) for _ in range(HUB_CALLS)]
        namespace.admin.wait_for_fault(rule, waiting=HUB_CALLS)
        refused = client.post("/api/v1/plan", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue.plans")
        assert watched.get("/api/v1/jobs", scope="act")["jobs"] == []
        namespace.admin.release(rule)
        assert {answer.result().json()["error"]["code"] for answer in waiting} == {"source.not_found"}
        assert client.post("/api/v1/plan", json=body).json()["error"]["code"] == "source.not_found"
