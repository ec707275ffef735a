"""The commands over the API: the same documents as by the broker, one line for each thing that goes wrong."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from reshard.cli import completion
from reshard.client import PAGE_MAX
from reshard.client.operations.table import BODY_MAX
from reshard.pipeline.places import Hub
from reshard.pipeline.planning.model import Plan
from reshard.pipeline.request import Request
from reshard.web.auth import Scope, add_token
from reshard.worker.followers.catalogs import Catalogs
from reshard.worker.queue.jobs import JobStore, Process
from reshard.worker.queue.scripts import PREFIX
from reshard.worker.settings import settings as cached
from tests.cli.conftest import Run, clean, model, reshard
from tests.hub.fixtures import Namespace
from tests.support.loaded import HEAVY, breaks, loaded_by
from tests.support.procs import Broker, Machine, free_port
from tests.support.warm import COMMAND
from tests.web.conftest import ROOT, Site, start
from tests.worker.conftest import another, copying, plan

__all__ = ["clean", "model", "plan", "reshard"]

CATALOG = "name: mirror\nentries:\n- {repo: a/model, to: us/model}\n"
SUBMIT = ("submit", "a/model", "--to", "b/model")
ASKED = [("list",), ("status",), ("status", "abcd"), ("watch", "abcd"), ("cancel", "abcd"), ("retry", "abcd"), SUBMIT]


def settings(site: Site, scope: str = "act") -> dict[str, str]:
    return {"RESHARD_API_URL": site.url, "RESHARD_API_TOKEN": site.tokens[scope]}


@pytest.fixture
def api(site: Site, reshard: Run) -> Run:
    """``reshard`` over the API alone."""
    return lambda *arguments, scope="act": reshard(*arguments, env=settings(site, scope))


Both = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def both(api: Run, reshard: Run, broker: Broker) -> Both:
    """The documents of a command, which are the same by the broker and over the API."""

    def run(*arguments: str, code: int = 0) -> list[dict[str, Any]]:
        by_api = api(*arguments, "--json")
        by_broker = reshard(*arguments, "--json", env={"RESHARD_BROKER_URL": broker.url})
        assert by_api.code == by_broker.code == code, by_api.out + by_broker.out
        assert by_api.documents == by_broker.documents
        return by_api.documents

    return run


def test_what_is_seen_is_the_same_over_the_api(both: Both, store: JobStore, plan: Plan) -> None:
    worker = another(store)
    job, group = copying(store, worker, plan)
    told = {"at": 1.5, "level": "INFO", "unit": group.unit, "worker": "w", "text": "said"}
    assert worker.log(group, [json.dumps(told)]) == "ok"
    assert both("logs", job[:6]) == [{"id": job, "state": "copying", "logged": 1, "lines": [told]}]
    (facts,) = both("status", job)
    assert facts["state"] == "copying" and facts["claims"][-1]["unit"] == group.unit
    assert both("status", job[:6], "--report")[0]["result"] == "unfinished"
    assert both("rollback", job, code=11)[0]["error"]["code"] == "job.state"
    store.cancel(job)
    shown, *events = both("watch", job, code=11)
    assert "event" in shown and {"event", "plan", "error"} == {*shown} | {name for one in events for name in one}
    for number in range(3):
        store.submit(store.get(job).request.model_copy(update={"priority": "bulk", "asked_by": str(number)}))
    assert len(both("list", "--all")) == 2
    assert both("list", "--state", "cancelled", "--limit", "1")[0]["id"] == job
    assert both("list", "--state", "done") == []
    assert both("status")[0]["jobs"] == {"queued": 1, "cancelled": 1}
    both("cancel", job)
    for command in ("status", "watch", "cancel", "retry"):
        assert both(command, "nobody", code=11)[0]["error"]["code"] == "job.not_found"
    both("status", "../service", code=11)


def test_more_jobs_than_one_answer_holds_are_all_listed(api: Run, store: JobStore) -> None:
    made = [store.submit(Request(source=Hub(repo="a/b"), target=Hub(repo=f"c/{n}"))).id for n in range(PAGE_MAX + 20)]
    assert sorted(api("list", "--all", "-q").out.split()) == sorted(made)
    assert len(api("list", "--limit", str(PAGE_MAX + 5), "-q").out.split()) == PAGE_MAX + 5


def test_what_is_typed_arrives_and_who_asked_is_the_token(
    api: Run, store: JobStore, reshard: Run, broker: Broker
) -> None:
    options = ("--size", "3300B", "--branch", "cut", "--exclude", "*.md", "--config-from", "c/config", "--overwrite")
    typed = ("submit", "a/model@v1", "--to", "b/model", *options, "--priority", "bulk")
    (made,) = api(*typed, "--json").documents
    assert not made["existed"] and "no worker or control" in made["waits"]
    asked = store.get(made["id"]).request
    assert asked.asked_by == "acter"
    (again,) = reshard(*typed, "--json", env={"RESHARD_BROKER_URL": broker.url}).documents
    assert again == made | {"existed": True}
    store.cancel(made["id"])
    (own,) = reshard(*typed, "--json", env={"RESHARD_BROKER_URL": broker.url}).documents
    assert store.get(own["id"]).request.model_copy(update={"asked_by": "acter"}) == asked


def test_both_set_the_api_is_asked(api: Run, site: Site, reshard: Run, store: JobStore) -> None:
    elsewhere = settings(site) | {"RESHARD_BROKER_URL": "redis://127.0.0.1:1/0"}
    for command in ("list", "fleet status", "catalog status", "schedule list", "delete --state done"):
        assert reshard(*command.split(), env=elsewhere).code == 0
    assert api("doctor").out.splitlines()[-1].split() == ["ok", "api", site.url]
    assert reshard("list", env=elsewhere | {"RESHARD_API_URL": f"{site.url}{ROOT}/"}).code == 0, "as is meant"


def test_jobs_are_deleted_over_the_api(both: Both, api: Run, site: Site, store: JobStore) -> None:
    first, second, third = (
        store.submit(Request(source=Hub(repo="a/b"), target=Hub(repo=f"c/{name}"))).id for name in "abc"
    )
    assert both("delete", first, code=11)[0]["error"]["code"] == "job.under_way"
    assert both("delete", "nobody", code=11)[0]["error"]["code"] == "job.not_found"
    assert both("delete", "x" * 200, code=2)[0]["error"]["code"] == "usage"
    for job in (first, second):
        store.cancel(job)
    (would,) = both("delete", "--state", "cancelled", "--dry-run")
    assert would == {"deleted": 0, "dry_run": True, "ids": would["ids"], "kept": []} and {*would["ids"]} == {
        first,
        second,
    }
    (done,) = api("delete", first[:8], "--json").documents
    assert done == {"deleted": 1, "dry_run": False, "ids": [first], "kept": []}
    assert api("delete", "--older-than", "1d", "--yes").out == "Deleted 0 jobs\n"
    assert api("delete", "--state", "cancelled", "--yes").out == f"Deleted 1 job: {second}\n"
    assert [job.id for job in store.recent()] == [third]
    store.cancel(third)
    assert (
        site.post("/api/v1/jobs/delete", {})["deleted"]
        == site.post("/api/v1/jobs/delete", {"age": 9e4})["deleted"]
        == 0
    )
    with site.client() as client:
        assert [client.delete(f"/api/v1/jobs/{'x' * length}").status_code for length in (50, 200)] == [404, 404]
    refused = api("delete", third, scope="read")
    assert refused.code == 4 and refused.err.startswith("error[access.scope]: ")


@pytest.mark.slow
def test_the_fleet_is_steered_over_the_api(both: Both, api: Run, store: JobStore) -> None:
    process = Process("box", "worker", "1", "box", 1, 3, 0.0, False)
    store.redis.sadd(f"{PREFIX}processes", "box")
    store.redis.set(f"{PREFIX}process:box", json.dumps(asdict(process)))
    (seen,) = both("fleet", "status")
    assert seen["workers"] == [
        {"name": "box", "state": "takes work", "concurrency": 3, "started": 0.0, "version": "1", "at": []}
    ]
    (limits,) = both("fleet", "limit", "--bandwidth", "200MB/s", "--closed", "08:00-18:00")
    assert limits["limits"] == {"bandwidth": 200_000_000, "night_bytes": None, "window": "18:00-08:00", "tz": "UTC"}
    (limits,) = both("fleet", "limit", "--bandwidth", "none")
    assert limits["limits"]["bandwidth"] is None and limits["limits"]["window"] == "18:00-08:00"
    for wrong in ((), ("--bandwidth", "fast"), ("--tz", "Nowhere"), ("--window", "1", "--closed", "2")):
        both("fleet", "limit", *wrong, code=2)
    assert api("fleet", "pause", "--reason", "lunch", "--json").documents[0]["paused"]["by"] == "acter"
    assert both("fleet", "pause")[0]["paused"]["reason"] == "lunch"
    assert api("fleet", "status").out == api("fleet", "status", scope="read").out
    assert api("fleet", "resume").out == "Resumed the service\n" and both("fleet", "resume")[0]["was_paused"] is False
    assert both("fleet", "drain", "b")[0] == {"name": "box", "drained": True}
    for command in ("drain", "undrain"):
        assert both("fleet", command, "nobody", code=10)[0]["error"]["code"] == "queue.no_worker"
    assert api("fleet", "undrain", "box").out == "Worker box accepts work again\n"
    for name, shown in (("../pause", "../pause"), ("", "''")):
        said = f"no worker matches {shown} (workers: box)"
        assert both("fleet", "drain", name, code=10)[0]["error"]["message"] == said
    assert api("fleet", "pause", scope="read").err.startswith("error[access.scope]: ")


def test_a_catalog_is_carried_through_over_the_api(both: Both, api: Run, store: JobStore, tmp_path: Path) -> None:
    file = tmp_path / "mirror.yaml"
    file.write_text(CATALOG)
    (made,) = api("catalog", "submit", str(file), "--at-once", "3", "--json").documents
    assert (made["name"], made["existed"]) == ("mirror", False) and "no worker or control" in made["waits"]
    kept = Catalogs(store).get("mirror").definition
    assert (kept.asked_by, kept.at_once, kept.text) == ("acter", 3, file.read_text())
    assert both("catalog", "submit", str(file), "--at-once", "3")[0]["existed"] is True
    assert both("catalog", "status")[0]["asked_by"] == "acter"
    assert both("catalog", "status", "mirror")[0]["state"] == "expanding"
    assert both("catalog", "failures", "mirror") == [{"name": "mirror", "failures": {}}]
    assert both("catalog", "retry", "mirror", "--only", "a.code", code=2)[0]["error"]["code"] == "usage.only"
    assert api("catalog", "pause", "mirror").out == "Paused catalog mirror\n"
    assert both("catalog", "watch", "mirror", code=10)[-1]["error"]["code"] == "queue.catalog_state"
    assert api("catalog", "resume", "mirror").out == "Catalog mirror is expanding\n"
    assert both("catalog", "remove", "mirror", code=10)[0]["error"]["code"] == "queue.catalog_state"
    assert api("catalog", "cancel", "mirror", scope="read").code == 4
    assert api("catalog", "cancel", "mirror").out == "Cancelled catalog mirror and 0 jobs\n"
    report = tmp_path / "report.md"
    assert api("catalog", "status", "mirror", "--report", str(report)).code == 0
    assert report.read_text().startswith("# Catalog mirror: cancelled\n")
    assert api("catalog", "remove", "mirror", "--json").documents == [
        {"name": "mirror", "removed": True, "schedules": []}
    ]
    for command in ("status", "watch", "failures", "retry", "pause", "resume", "cancel", "remove"):
        for name in ("mirror", "../jobs"):
            assert both("catalog", command, name, code=10)[0]["error"]["code"] == "queue.no_catalog"


@pytest.mark.slow
def test_a_schedule_is_kept_over_the_api(both: Both, api: Run, store: JobStore, tmp_path: Path) -> None:
    file = tmp_path / "mirror.yaml"
    file.write_text(CATALOG)
    (added,) = api("schedule", "add", "nightly", "a/model", "--to", "b/model", "--cron", "@daily", "--json").documents
    assert added["name"] == "nightly"
    weekly = ("schedule", "add", "weekly", "--catalog", str(file), "--at-once", "2", "--cron", "0 3 * * 0")
    assert api(*weekly).out.startswith("Added schedule weekly: catalog mirror, ")
    assert both(*weekly, code=10)[0]["error"]["code"] == "queue.schedule_exists"
    for wrong in (("Big", "@daily"), ("small", "99 * * * *")):
        typed = ("schedule", "add", wrong[0], "a/model", "--to", "b/model", "--cron", wrong[1])
        assert both(*typed, code=2)[0]["error"]["code"] == "usage.schedule"
    file.write_text(CATALOG + "- {repo: a/other, to: us/other}\n")
    (done,) = api("schedule", "set", "weekly", "--catalog", str(file), "--json").documents
    (seen,) = both("schedule", "show", "weekly")
    assert seen["digest"] == done["digest"] and seen["catalog"]["at_once"] == 2
    assert (seen["catalog"]["text"], seen["catalog"]["asked_by"]) == (file.read_text(), "acter")
    assert [one["name"] for one in both("schedule", "list")] == ["nightly", "weekly"]
    assert both("schedule", "show", "nightly")[0]["request"]["priority"] == "bulk"
    assert len(both("schedule", "next", "nightly", "-n", "3")[0]["next"]) == 3
    assert both("schedule", "pause", "nightly") == [{"name": "nightly", "next": None}]
    assert both("schedule", "resume", "nightly")[0]["next"] == added["next"]
    (fired,) = api("schedule", "run", "nightly", "--json").documents
    assert store.get(fired["job"]).request.asked_by == "schedule nightly"
    assert api("schedule", "run", "nightly").out.startswith("Schedule nightly: skipped: previous job ")
    assert api("schedule", "pause", "weekly", scope="read").code == 4
    assert api("schedule", "remove", "weekly").out == "Removed schedule weekly\n"
    for command in ("show", "next", "run", "pause", "resume", "remove"):
        for name in ("weekly", ".."):
            assert both("schedule", command, name, code=10)[0]["error"]["code"] == "queue.no_schedule"


def test_what_a_shell_offers_comes_over_the_api(site: Site, store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in settings(site).items():
        monkeypatch.setenv(name, value)
    job = store.submit(Request(source=Hub(repo="a/b"), target=Hub(repo="c/d"))).id
    cached.cache_clear()
    try:
        assert completion.jobs(job[:3]) == [(job, "queued, a/b -> c/d")]
        assert completion.catalogs("") == completion.schedules("") == completion.workers("") == []
    finally:
        cached.cache_clear()


def test_a_host_that_cannot_be_is_one_line(reshard: Run) -> None:
    done = reshard("list", env={"RESHARD_API_URL": "http://ex..ample"})
    assert done.err.startswith("error[queue.api_unavailable]: http://ex..ample is not responding: "), done.err


@pytest.mark.parametrize("command", ASKED, ids=lambda words: " ".join(words[:2]))
def test_a_service_that_is_not_there_is_one_line(reshard: Run, command: tuple[str, ...]) -> None:
    env = {"RESHARD_API_URL": "http://127.0.0.1:1", "RESHARD_API_TOKEN": "rsh_hush"}
    done = reshard(*command, env=env)
    error, hint = done.err.splitlines()
    assert done.code == 10 and error.startswith("error[queue.api_unavailable]: http://127.0.0.1:1 is not responding: ")
    assert hint.startswith("hint: check RESHARD_API_URL") and "hush" not in done.err


def test_who_may_not_is_told_what_to_set(api: Run, site: Site, store: JobStore, reshard: Run) -> None:
    assert api("list", scope="read").code == 0
    refused = api(*SUBMIT, scope="read")
    assert refused.code == 4 and refused.err.startswith("error[access.scope]: reader has read-only access, ")
    for token, why in (({}, "requires a token"), ({"RESHARD_API_TOKEN": "rsh_hush"}, "rejected RESHARD_API_TOKEN")):
        for command in (SUBMIT, ("watch", "abcd")):
            done = reshard(*command, env={"RESHARD_API_URL": site.url} | token)
            assert done.code == 4 and done.err.startswith(f"error[access.api_token]: {site.url} {why}\n"), done.err
            assert "set RESHARD_API_TOKEN" in done.err and "hush" not in done.err
        looked = reshard("doctor", env={"RESHARD_API_URL": site.url} | token).out
        assert "trouble  api " in looked and f"{site.url} {why} (ask its operator for a token" in looked
        assert "hush" not in looked


@pytest.mark.parametrize(
    "env",
    [
        {"RESHARD_API_URL": "ftp://hush"},
        {"RESHARD_API_URL": "http://ada:hush@127.0.0.1:1"},
        {"RESHARD_API_URL": "http://127.0.0.1:1", "RESHARD_API_TOKEN": "two hush"},
        {"RESHARD_API_URL": "http://127.0.0.1:1", "RESHARD_API_TOKEN": "hüsh"},
        {"RESHARD_API_URL": "http://127.0.0.1:1", "ALL_PROXY": "socks5://hush:1"},
        {"RESHARD_API_URL": "http://127.0.0.1:1", "HTTPS_PROXY": "http://one:1", "HTTP_PROXY": "http://ada:hush@x:y"},
    ],
)
def test_a_setting_that_makes_no_sense_is_named_and_not_shown(reshard: Run, env: dict[str, str]) -> None:
    done = reshard("list", env=env)
    assert done.code == 2 and done.err.startswith(f"error[usage.setting]: {[*env][-1]}=...: ")
    assert "hush" not in done.err and "hüsh" not in done.err


def test_certificates_that_cannot_be_read_are_named_by_their_setting(reshard: Run) -> None:
    done = reshard("list", env={"RESHARD_API_URL": "https://127.0.0.1:1", "SSL_CERT_FILE": "/none"})
    assert done.code == 2 and done.err.startswith("error[usage.setting]: SSL_CERT_FILE=/none: No such file")


@contextmanager
def answering(status: int, body: bytes, asked: list[str] | None = None, **headers: str) -> Iterator[str]:
    """The URL of a server that has one answer, and notes what it is ``asked``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            (asked if asked is not None else []).append(self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


NEWER = json.dumps({"schema": 2, "jobs": {}}).encode()
PROBLEM = {"code": "job.unheard_of", "message": "a\x1b[2Jb", "hint": "", "facts": {}}
UNKNOWN = json.dumps({"schema": 1, "error": PROBLEM}).encode()


@pytest.mark.parametrize(
    ("status", "body", "code", "exit_code"),
    [
        (200, b"<html>", "queue.not_the_api", 10),
        pytest.param(*(200, b"[1]", "queue.not_the_api", 10), marks=pytest.mark.slow),
        (200, b"[" * 100_000, "queue.not_the_api", 10),
        (200, NEWER, "queue.not_the_api", 10),
        pytest.param(*(200, b'{"schema": 1, "jobs": {}}', "queue.not_the_api", 10), marks=pytest.mark.slow),
        (302, b"", "queue.not_the_api", 10),
        pytest.param(*(404, b'{"schema": 1, "error": "no"}', "queue.not_the_api", 10), marks=pytest.mark.slow),
        (401, b"sign in", "access.api_token", 4),
        pytest.param(*(403, b"no", "access.api_token", 4), marks=pytest.mark.slow),
        (502, b"<html>", "queue.api_unavailable", 10),
        (500, UNKNOWN, "internal", 1),
    ],
)
def test_what_is_not_the_api_is_said_to_be_none(
    reshard: Run, status: int, body: bytes, code: str, exit_code: int
) -> None:
    with answering(status, body, Location="http://127.0.0.1:1/elsewhere") as url:
        done = reshard("status", env={"RESHARD_API_URL": url, "RESHARD_API_TOKEN": "rsh_hush"})
    assert done.code == exit_code and done.err.startswith(f"error[{code}]: ") and len(done.err.splitlines()) == 2
    assert "hush" not in done.err and "\x1b" not in done.err and ".traceback" not in done.err


@pytest.mark.parametrize("job", [{}, {"id": "abcd", "state": 1}, {"id": "abcd", "state": "done", "request": []}])
def test_what_no_job_is_said_to_be_is_not_the_api(reshard: Run, job: dict[str, Any]) -> None:
    with answering(200, json.dumps({"schema": 1} | job).encode()) as url:
        done = reshard("status", "abcd", env={"RESHARD_API_URL": url})
    assert done.err.startswith(f"error[queue.not_the_api]: {url} ") and len(done.err.splitlines()) == 2, done.err


def test_catalogs_are_listed_by_one_call(reshard: Run) -> None:
    row = {"name": "mirror", "state": "running", "note": None, "started": 0.0, "since": 0.0, "success": None}
    row |= {"empty": [1], "entries": 4, "todo": 0, "active": 1}
    row |= {"counts": {"published": 2, "failed": 1, "failed:hub": 1}}
    asked = list[str]()
    body = json.dumps({"schema": 1, "catalogs": [row, row | {"name": "other"}]}).encode()
    with answering(200, body, asked) as url:
        done = reshard("catalog", "status", env={"RESHARD_API_URL": url})
        assert reshard("catalog", "status", "--quiet", env={"RESHARD_API_URL": url}).out == "mirror\nother\n"
    assert asked == ["/api/v1/catalogs"] * 2
    _, mirror, other = done.out.splitlines()
    assert mirror.split()[:2] == ["mirror", "running"] and other.split()[0] == "other"
    assert mirror.endswith("2 published, 1 failed, 1 running; 1 entry matches no models")


def test_a_connection_that_is_not_safe_is_not_used(site: Site, reshard: Run) -> None:
    env = settings(site) | {"RESHARD_API_URL": site.url.replace("http", "https")}
    done = reshard("list", env=env)
    assert (done.code, done.err.partition(":")[0]) == (10, "error[queue.api_untrusted]"), done.err


def test_a_submission_over_the_api_loads_neither_the_broker_nor_anything_heavy(
    site: Site, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings(site).items():
        monkeypatch.setenv(name, value)
    modules = loaded_by(*SUBMIT, "--quiet")
    assert "httpx2" in modules and not breaks(modules, HEAVY | {"redis"})
    assert [job.request.asked_by for job in store.recent()] == ["acter"]


@pytest.mark.slow
def test_a_watch_outlives_a_restart_of_the_service(
    tmp_path: Path, clean: dict[str, str], broker: Broker, store: JobStore, plan: Plan
) -> None:
    port = free_port()
    token = add_token(tmp_path / "tokens", "ada", Scope.read)
    job, _ = copying(store, another(store), plan)
    env = clean | {"RESHARD_API_URL": f"http://127.0.0.1:{port}", "RESHARD_API_TOKEN": token}
    with Machine(tmp_path, broker.url) as machine:
        service = start(machine, tmp_path / "tokens", port)
        with subprocess.Popen([COMMAND, "watch", job], env=env, stderr=subprocess.PIPE, text=True) as watching:
            assert watching.stderr is not None
            try:
                wait_for_line(watching.stderr, "copying")
                service.kill()
                wait_for_line(watching.stderr, "the API is not responding (")
                start(machine, tmp_path / "tokens", port)
                store.cancel(job)
                assert f"error[job.cancelled]: job {job} was cancelled\n" in watching.stderr.read()
                assert watching.wait() == 11
            finally:
                watching.kill()


def wait_for_line(stream: Any, what: str) -> None:
    for line in stream:
        if what in line:
            return
    raise AssertionError(f"it ended without {what}")


def test_a_catalog_that_is_too_long_for_the_service_says_where_it_can_go(api: Run, tmp_path: Path) -> None:
    (tmp_path / "long.yaml").write_text(CATALOG + "# a comment\n" * (BODY_MAX // 12))
    for command in (("catalog", "submit"), ("schedule", "add", "nightly", "--cron", "@daily", "--catalog")):
        refused = api(*command, str(tmp_path / "long.yaml"))
        assert refused.code == 2 and "error[usage.too_large]" in refused.err
        assert "hint: split the catalog" in refused.err and "RESHARD_BROKER_URL" in refused.err


def test_a_model_is_resharded_and_undone_over_the_api(
    tmp_path: Path, broker: Broker, store: JobStore, namespace: Namespace, model: Path, reshard: Run
) -> None:
    source, target, port = namespace.repo("source"), namespace.repo("target"), free_port()
    namespace.admin.create_repo(source)
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    namespace.admin.put_files(source, files, lfs=["model.safetensors"])
    token = add_token(tmp_path / "tokens", "ada", Scope.act)
    api = {"RESHARD_API_URL": f"http://127.0.0.1:{port}", "RESHARD_API_TOKEN": token, "HF_ENDPOINT": namespace.endpoint}
    hub = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token}
    with Machine(tmp_path, broker.url, **hub) as machine:
        machine.control()
        machine.worker(concurrency=1)
        start(machine, tmp_path / "tokens", port)
        done = reshard("submit", source, "--to", target, "--size", "3300B", "--watch", "--json", env=api)
        assert done.code == 0, done.out
        submitted, *_, end = done.documents
        assert {*end} >= {"source_bytes", "checks", "seconds"} and end["state"] == "done"
        assert end["request"]["asked_by"] == "ada" and end["source_bytes"] == {"checked": ["model.safetensors"]}
        assert [one["plan"]["target"] for one in done.documents if "plan" in one] == [target]
        assert sum(path.endswith(".safetensors") for path in namespace.admin.files(target)) == 4
        by_broker = reshard("watch", submitted["id"], "--json", env=hub | {"RESHARD_BROKER_URL": broker.url})
        assert reshard("watch", submitted["id"], "--json", env=api).documents == by_broker.documents
        (undone,) = reshard("rollback", submitted["id"], "--json", env=api).documents
        assert undone["undone"] == end["published"]["commit"]
        assert store.get(submitted["id"]).rolled_back == undone["commit"]


def test_what_a_named_credential_published_is_undone_with_it_by_a_service_and_with_their_own_token_by_a_person(
    tmp_path: Path, broker: Broker, store: JobStore, namespace: Namespace, model: Path, reshard: Run
) -> None:
    lab, source, port = namespace.admin.create_user(f"lab-{namespace.name}"), namespace.repo("source"), free_port()
    namespace.admin.create_repo(source)
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    namespace.admin.put_files(source, files, lfs=["model.safetensors"])
    scope = f'[[credential]]\nendpoint = "{namespace.endpoint}"\nnamespace = "{lab.name}"\n'
    credentials = tmp_path / "credentials.toml"
    credentials.write_text(f'{scope}env = "HF_TOKEN"\n{scope}name = "lab"\nenv = "LAB_TOKEN"\n')
    hub = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token, "LAB_TOKEN": lab.token}
    token = add_token(tmp_path / "tokens", "ada", Scope.act)
    api = {"RESHARD_API_URL": f"http://127.0.0.1:{port}", "RESHARD_API_TOKEN": token}
    with Machine(tmp_path, broker.url, RESHARD_CREDENTIALS=str(credentials), **hub) as machine:
        machine.control()
        machine.worker(concurrency=1)
        start(machine, tmp_path / "tokens", port)
        submit = ("submit", source, "--to", f"{lab.name}/cut", "--to-credential", "lab", "--watch", "--json")
        end = reshard(*submit, env=api).documents[-1]
        (undone,) = reshard("rollback", end["id"], "--json", env=api).documents
        assert undone["undone"] == end["published"]["commit"] and not undone["already"]
        own = {"RESHARD_BROKER_URL": broker.url, "HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": lab.token}
        (again,) = reshard("rollback", end["id"], "--json", env=own).documents
        assert again["commit"] == undone["commit"] and again["already"]
