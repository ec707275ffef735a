"""What workers and control log: nothing that lets anybody in, and each job's start and end once."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import redis

from reshard.pipeline.places import Hub
from reshard.pipeline.planning.model import Plan
from reshard.pipeline.request import Request
from reshard.worker.fleet.fleet import Fleet
from reshard.worker.followers.counters import Counters
from reshard.worker.logs import JsonFormatter, at_work
from reshard.worker.queue.events import TOTALS, Reader, follow
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from tests.hub.fixtures import Namespace
from tests.support.models import arrays, save_single
from tests.support.procs import Broker, Machine, Proc, in_a_process, kill_this_process, wait_for
from tests.worker.conftest import another, ask, claimed, copied, copying, followed

FETCH = """
import logging
logging.basicConfig(level=logging.INFO)
import reshard.worker.app
from reshard.pipeline.places import Hub
from reshard.pipeline.stores.connect import Context, open_source
import sys
source = open_source(Hub(repo=sys.argv[1]), Context.from_env(), transport="http")
file = source.files()["model.safetensors"]
assert sum(len(view) for view in source.read(file, 0, file.size)) == file.size
logging.getLogger("reshard").info("read it")
logging.getLogger("other").info("%s", "a\\x1b[2J\\nb")
"""


def test_a_worker_logs_no_signed_url(namespace: Namespace, tmp_path: Path) -> None:
    repo = namespace.repo("logged")
    namespace.admin.create_repo(repo)
    namespace.admin.put_files(repo, {"model.safetensors": bytes(1000)}, lfs=["model.safetensors"])
    env = os.environ | {
        "HF_ENDPOINT": namespace.endpoint,
        "HF_TOKEN": namespace.token,
        "RESHARD_BROKER_URL": "redis://127.0.0.1:1/0",
    }
    done = subprocess.run([sys.executable, "-c", FETCH, repo], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "read it" in done.stderr
    assert "a\\x1b[2J\\x0ab" in done.stderr, "names from outside are escaped, whatever logs them"
    assert any("/_cdn/" in entry["path"] and "signature=" in entry["path"] for entry in namespace.admin.log())
    assert "signature=" not in done.stderr
    assert namespace.token not in done.stderr


TROUBLE = {"code": "hub.quota", "message": "no storage left", "hint": "free some", "facts": {}}


def told(records: Iterable[Any]) -> list[tuple[str, str, str | None]]:
    """Of each job's start and end: what, of which job, and the state in which it ended."""
    facts = [record if isinstance(record, dict) else record.__dict__ for record in records]
    return [(line["event"], line["job"], line.get("state")) for line in facts if "event" in line]


def cancelled(store: JobStore, caplog: pytest.LogCaptureFixture) -> str:
    """A job that was cancelled before anybody began it; the log is kept from now on."""
    caplog.set_level(logging.INFO)
    job = store.submit(ask()).id
    store.cancel(job)
    return job


def test_a_jobs_start_and_end_are_logged_once_and_those_of_a_retry_anew(
    store: JobStore, leases: Leases, plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    job, lease = copying(store, leases, plan)
    assert another(store).claim(job) is not None
    assert leases.again(lease, TROUBLE, 0) == "ok"
    assert leases.fail(claimed(leases, job, "group:00002"), TROUBLE) == "ok"
    followed(store)
    store.retry(job)
    claimed(leases, job, "check")
    claimed(leases, job, "group:00000")
    followed(store)
    assert told(caplog.records) == [("started", job, None), ("ended", job, "failed"), ("started", job, None)]
    ended = next(record for record in caplog.records if getattr(record, "event", "") == "ended")
    assert ended.getMessage().endswith(" s, error[hub.quota]")
    assert "them/model -> us/model, 0 bytes" in ended.getMessage()


def test_a_start_is_logged_and_timed_also_after_a_retry(
    store: JobStore, leases: Leases, plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    job, lease = copying(store, leases, plan)
    assert leases.fail(lease, TROUBLE) == "ok"
    before = int(store.redis.hincrby(f"reshard:job:{job}", "started", -90_000))
    store.retry(job)
    claimed(leases, job, "check")
    claimed(leases, job, "group:00000")
    assert told(caplog.records) == [("started", job, None)] * 2
    assert store.get(job).started >= before / 1000 + 90


def test_ends_while_control_was_away_are_logged_each_as_it_was_with_the_figures_of_the_last(
    store: JobStore, leases: Leases, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    job = store.submit(ask()).id
    store.cancel(job)
    store.retry(job)
    assert leases.fail(claimed(leases, job, "plan"), TROUBLE) == "ok"
    store.retry(job)
    assert leases.done(claimed(leases, job, "plan"), {"commit": "c0ffee"}) == "ok"
    followed(store)
    ends = [record for record in caplog.records if getattr(record, "event", "") == "ended"]
    assert told(ends) == [("ended", job, state) for state in ("cancelled", "failed", "done")]
    assert [record.getMessage().partition(": ")[2] for record in ends[:2]] == [
        "them/model -> us/model",
        "them/model -> us/model, error[hub.quota]",
    ]
    assert ends[2].getMessage().endswith(" s, commit c0ffee")


def test_an_end_is_logged_by_one_of_two_controls_and_once_where_its_effect_is_written_twice(
    store: JobStore, caplog: pytest.LogCaptureFixture
) -> None:
    job = cancelled(store, caplog)
    readers = [Reader(store.redis, Counters.group, take_over=0) for _ in range(2)]
    taken = [reader.take() for reader in readers]
    with Heard(lambda: store.redis.hincrby(TOTALS, "moved", 1)):  # as another control that counts just then
        for reader, events in zip(readers, taken, strict=True):
            Counters(store).handle(events, reader)
    assert told(caplog.records) == [("ended", job, "cancelled")]


def test_an_end_is_logged_by_the_next_control_where_one_is_killed_over_it(
    store: JobStore, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    job = cancelled(store, caplog)

    def killed(own: JobStore) -> None:
        with Heard(kill_this_process):
            follow(Counters(own), Reader(own.redis, Counters.group))

    assert in_a_process(broker.url, killed) == signal.SIGKILL
    follow(Counters(store), Reader(store.redis, Counters.group, take_over=0))
    assert told(caplog.records) == [("ended", job, "cancelled")]


class Heard(logging.Handler):
    """Inside ``with``, ``then`` is done when the end of a job is logged first."""

    def __init__(self, then: Callable[[], object]) -> None:
        super().__init__()
        self._then = then

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "event", "") == "ended":
            logging.getLogger("reshard.jobs").removeHandler(self)
            self._then()

    def __enter__(self) -> None:
        logging.getLogger("reshard.jobs").addHandler(self)
        logging.getLogger("reshard.jobs").setLevel(logging.INFO)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("reshard.jobs").removeHandler(self)
        logging.getLogger("reshard.jobs").setLevel(logging.NOTSET)


def test_an_end_counts_the_seconds_since_the_start_and_names_the_commit(
    store: JobStore, leases: Leases, plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    job = copied(store, leases, plan)
    caplog.set_level(logging.INFO)
    publish = claimed(leases, job, "publish")
    assert leases.begin(publish) == "ok"
    published = {"commit": "c0ffee", "ref": "main", "found": False, "source": "s", "attested": {}, "checks": []}
    assert leases.done(publish, published) == "ok"
    for moment in ("created", "started"):
        started = int(store.redis.hincrby(f"reshard:job:{job}", moment, -90_000)) / 1000
    assert leases.done(claimed(leases, job, "confirm"), []) == "ok"
    followed(store)
    (line,) = [record.__dict__ for record in caplog.records if "event" in record.__dict__]
    assert (line["state"], line["commit"], line["code"]) == ("done", "c0ffee", None)
    assert line["bytes"] == store.get(job).bytes == sum(shard.size for shard in plan.shards)
    assert line["seconds"] == round(store.get(job).since - started, 3) >= 90


def test_an_end_is_logged_without_what_cannot_be_read_of_its_request(
    store: JobStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    job = store.submit(ask()).id
    store.cancel(job)
    store.redis.hset(f"reshard:job:{job}", "request", "{}")
    followed(store)
    assert told(caplog.records) == [("ended", job, "cancelled")]


def test_a_start_is_logged_although_no_wake_can_be_sent_and_its_request_cannot_be_read(
    store: JobStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    job = store.submit(ask()).id
    store.redis.hset(f"reshard:job:{job}", "request", "not JSON")
    store.redis.zadd(f"reshard:job:{job}:todo", {"check": 0})  # a second unit, for which to send a wake

    def gone(queue: str, job: str) -> None:
        raise redis.ConnectionError("gone")

    with pytest.raises(redis.ConnectionError, match="gone"):
        Leases(store, gone, "worker-a").claim(job)
    assert told(caplog.records) == [("started", job, None)]


@pytest.fixture
def machine(tmp_path: Path, broker: Broker, store: JobStore) -> Any:
    save_single(tmp_path / "model", arrays(20, 100_000))
    with Machine(tmp_path, broker.url, RESHARD_ALLOWED_FOLDERS=str(tmp_path)) as machine:
        yield machine


def command(*words: str) -> list[str]:
    """What a person types, in a process of its own."""
    return [sys.executable, "-c", "from reshard.cli.main import main; main()", *words]


def submit(machine: Machine, source: str, target: str) -> str:
    at = machine.folder
    done = machine.run("submit", str(at / source), "--to", str(at / target), "--size", "300KB", "--quiet")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def ended(store: JobStore, *jobs: str) -> None:
    wait_for(lambda: all(store.get(job).state.ended for job in jobs), f"the end of {', '.join(jobs)}", 60 * len(jobs))


def stop(*processes: Proc) -> None:
    """As a process manager that signals every process of a service."""
    for process in processes:
        process.signal_all(signal.SIGTERM)
    assert [process.wait(40) for process in processes] == [0] * len(processes)


def test_logs_in_json_are_an_object_a_line_and_tell_of_each_job_once(machine: Machine, store: JobStore) -> None:
    control = machine.start("control", command("control", "--log-format", "json"))
    dropped = submit(machine, "model", "dropped")
    store.cancel(dropped)
    worker = machine.start("worker", command("worker", "--concurrency", "2", "--log-format", "json"))
    done, failed = submit(machine, "model", "out"), submit(machine, "nothing", "none")
    ended(store, done, failed)
    store.retry(failed)
    ended(store, failed)
    wait_for(lambda: control.said().count('"event": "ended"') == 4, "control's hearing of each end")
    processes = store.processes()
    stop(worker, control)

    lines = [json.loads(line) for process in (control, worker) for line in process.said().splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert [line for line in lines if line["logger"].startswith("celery") and line["level"] == "INFO"] == []
    assert sorted(told(lines), key=str) == sorted(
        [
            ("ended", dropped, "cancelled"),
            *(("started", done, None), ("ended", done, "done")),
            *2 * (("started", failed, None), ("ended", failed, "failed")),
        ],
        key=str,
    )
    (end,) = [line for line in lines if line.get("event") == "ended" and line["job"] == done]
    facts = store.get(done)
    places = (str(machine.folder / "model"), str(machine.folder / "out"))
    assert (end["source"], end["target"], end["bytes"]) == (*places, facts.bytes)
    assert end["commit"] == (facts.published or {})["commit"]
    assert isinstance(end["seconds"], float)
    assert {line["code"] for line in lines if line.get("state") == "failed"} == {"source.no_folder"}
    (begun,) = [line for line in lines if line.get("event") == "started" and line["job"] == done]
    main = next(process.name for process in processes if process.kind == "worker")
    assert begun["worker"].rpartition(".")[0] == main
    of_units = [line for line in lines if line["logger"] == "reshard.worker.steps"]
    assert {line["unit"] for line in of_units if line["job"] == done} >= {"plan", "check", "group:00000", "publish"}
    assert all(line["attempt"] == 1 and line["worker"].rpartition(".")[0] == main for line in of_units)


def test_whatever_is_logged_during_a_unit_names_it_whichever_thread_and_module_says_it() -> None:
    formatted: list[dict[str, Any]] = []

    def say() -> None:
        record = logging.makeLogRecord({"msg": "said", "code": "hub.refused"})
        formatted.append(json.loads(JsonFormatter().format(record)))

    with at_work({"job": "one", "unit": "plan"}):
        thread = threading.Thread(target=say)
        thread.start()
        thread.join()
    say()
    during, after = formatted
    assert (during["job"], during["unit"], during["code"]) == ("one", "plan", "hub.refused")
    assert after.keys() == {"time", "level", "logger", "message", "code"}


def test_what_a_hub_refused_is_logged_with_its_id_of_the_request_by_worker_and_control(
    namespace: Namespace, tmp_path: Path, broker: Broker, store: JobStore
) -> None:
    environment = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token, "RESHARD_LOG_FORMAT": "json"}
    with Machine(tmp_path, broker.url, **environment) as machine:
        control, worker = machine.control(), machine.worker()
        request = Request(source=Hub(repo=namespace.repo("none")), target=Hub(repo=namespace.repo("out")))
        job = store.submit(request).id
        ended(store, job)
        said = wait_for(lambda: [line for line in control.said().splitlines() if job in line], "the line of its end")
        lines = [json.loads(line) for line in [*worker.said().splitlines(), *said]]
        known = {f"hub-{entry['n']}" for entry in namespace.admin.log()}
    told = [line for line in lines if line.get("code") == "source.not_found"]
    assert {line["logger"] for line in told} == {"reshard.worker.steps", "reshard.jobs"}
    assert all(line["request_id"] in known for line in told)
    assert {line["unit"] for line in told if "unit" in line} == {"plan"}


def test_a_normal_end_leaves_no_banner_task_or_traceback_in_a_log_not_even_in_the_middle_of_a_copy(
    machine: Machine, store: JobStore
) -> None:
    control, worker = machine.control(), machine.worker()
    done = submit(machine, "model", "first")
    ended(store, done)
    Fleet(store).limit({"bandwidth": "50kB/s"})
    job = submit(machine, "model", "second")
    wait_for(lambda: any(claim.unit.startswith("group") for claim in store.get(job).claims), "a copy under way")
    stop(worker, control)
    said = worker.said() + control.said()
    assert f"INFO reshard.jobs: job {done} done: " in said
    assert not [word for word in ("Traceback", "[tasks]", "reshard.wake", "SecurityWarning") if word in said]
    assert all(" reshard." in line or " WARNING " in line or " ERROR " in line for line in said.splitlines()), said
