"""`reshard fleet ...` against a real broker on which nobody works."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from reshard.pipeline.errors import TempDirUnusable
from reshard.worker.fleet.fleet import Fleet
from reshard.worker.fleet.heartbeat import announce, withdraw
from reshard.worker.queue.events import append
from reshard.worker.queue.jobs import JobStore, Process
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.scripts import PREFIX, server_ms
from tests.cli.conftest import WHEN, Done, Queue
from tests.support.warm import COMMAND
from tests.worker.conftest import Wakes, ask, followed, process


def test_a_paused_service_says_so_wherever_somebody_waits_for_it(queue: Queue, tmp_path: Path) -> None:
    (paused,) = queue("fleet", "pause", "--reason", "the line is down", "--json").documents
    assert paused["paused"]["reason"] == "the line is down"
    said = "the service has been paused since "
    submitted = queue("submit", "a/model", "--to", "b/paused", "--json")
    (job,) = submitted.documents
    assert job["waits"].startswith(said)
    assert said in queue("submit", "a/model", "--to", "b/paused").err
    for done in (queue("status"), queue("status", job["id"]), queue("fleet", "status")):
        assert said in done.out
        assert "the line is down" in done.out
    listed = queue("list")
    assert said in listed.err
    assert said not in listed.out
    queue("cancel", job["id"])
    assert said in queue("retry", job["id"]).err
    mirror = tmp_path / "mirror.yaml"
    mirror.write_text("name: mirror\ndefaults: {to: 'b/{name}', size: 1MB}\nentries: [{repo: a/model}]\n")
    assert said in queue("catalog", "submit", str(mirror)).err
    assert re.search(f"^waiting +{said}.*the line is down", queue("catalog", "status", "mirror").out, re.M)
    (expanding,) = queue("catalog", "status", "mirror", "--json").documents
    assert expanding["state"] == "expanding" and expanding["waits"].startswith(said)
    queue("schedule", "add", "nightly", "a/model", "--to", "b/nightly", "--cron", "0 3 * * *")
    assert said in queue("schedule", "run", "nightly").err

    again = queue("fleet", "pause").out
    assert again.startswith("Already paused: the service has been paused since ")
    assert "the line is down" in again
    assert queue("fleet", "resume").out == "Resumed the service\n"
    assert said not in queue("status").out and said not in queue("catalog", "status", "mirror").out
    queue("catalog", "cancel", "mirror")
    assert "waiting" not in queue("catalog", "status", "mirror").out


def test_a_watch_says_once_that_it_is_paused(clean: dict[str, str], url: str) -> None:
    with JobStore.at(url) as store:
        job = store.submit(ask("watched")).id
        Fleet(store).pause("me")
        environment = clean | {"RESHARD_BROKER_URL": url}
        watch = [COMMAND, "watch", job, "--json"]
        with subprocess.Popen(watch, env=environment, stdout=subprocess.PIPE, text=True) as watching:
            assert watching.stdout is not None
            said = (json.loads(line) for line in watching.stdout)
            waits = next(document["waits"] for document in said if document.keys() == {"schema", "waits"})
            store.cancel(job)
            rest = list(said)
        Fleet(store).resume()
    assert waits.startswith("the service has been paused since ")
    assert not any(document.keys() == {"schema", "waits"} for document in rest)


def test_limits_are_set_shown_and_taken_off(queue: Queue) -> None:
    done = queue(
        "fleet", "limit", "--bandwidth", "200MB/s", "--night-bytes", "2TB", "--window", "22:00-06:00",
        "--tz", "Europe/Berlin",
    )  # fmt: skip
    assert done.code == 0
    shown = queue("fleet", "status").out
    for what in ("limit 200 MB/s", "limit 2.0 TB per day", "22:00-06:00 (Europe/Berlin)", "not running"):
        assert what in shown
    (facts,) = queue("fleet", "status", "--json").documents
    assert facts["limits"] == {
        "bandwidth": 200_000_000,
        "night_bytes": 2 * 10**12,
        "window": "22:00-06:00",
        "tz": "Europe/Berlin",
    }
    (job,) = queue("submit", "a/model", "--to", "b/bulk", "--priority", "bulk", "--json").documents
    if facts["bulk_rests"] is not None:  # what time it is
        assert job["waits"].startswith("bulk jobs are on hold until ")
    (facts,) = queue("fleet", "limit", "--closed", "00:00-23:59", "--bandwidth", "none", "--json").documents
    assert facts["limits"]["window"] == "23:59-00:00"
    assert facts["limits"]["bandwidth"] is None
    (facts,) = queue("fleet", "limit", "--closed", "none", "--night-bytes", "none", "--tz", "none", "--json").documents
    assert facts["limits"] == {"bandwidth": None, "night_bytes": None, "window": None, "tz": "UTC"}
    assert facts["bulk_rests"] is None


def test_what_is_wrong_is_said_in_one_line(queue: Queue) -> None:
    for options, said in (
        (("limit",), "error[usage.limit]: set at least one limit"),
        (("limit", "--bandwidth", "200MB"), "error[usage.limit]: --bandwidth 200MB: use bytes per second"),
        (("limit", "--tz", "Mars/Base"), "error[usage.limit]: --tz 'Mars/Base' is not a time zone"),
        (("drain", "nobody"), "error[queue.no_worker]: no worker matches nobody (workers: none)"),
    ):
        done = queue("fleet", *options)
        assert done.code in {2, 10}
        assert done.err.startswith(said)
        assert len(done.err.splitlines()) == 2


def test_a_silent_worker_is_shown_with_what_to_do(queue: Queue, url: str) -> None:
    worker = process("there:7")
    with JobStore.at(url) as store:
        announce(store.redis, worker)
        store.redis.delete(f"{PREFIX}process:{worker.name}")  # as after PRESUMED_DEAD
        (fleet,) = queue("fleet", "status", "--json").documents
        (service,) = queue("status", "--json").documents
        shown = queue("fleet", "status").out
        withdraw(store.redis, worker)
    (one,) = fleet["silent"]
    assert (one["name"], one["why"]) == (worker.name, "unknown") and fleet["workers"] == []
    assert {**one, "says": ""} == {**service["silent"][0], "says": ""}
    assert re.search(r"^worker +there:7 has not been heard from for \d+ s: check the machine it runs on$", shown, re.M)
    assert "not running" not in shown and queue("fleet", "status", "--json").documents[0]["silent"] == []


def test_a_worker_is_drained_and_shown_so(queue: Queue, url: str) -> None:
    with JobStore.at(url) as store:

        def alive(*arguments: str) -> Done:
            """A command while the worker gives a sign of life, which a slow machine may outlast."""
            announce(store.redis, Process("here:7", "worker", "1", "here", 7, 2, 0.0, False))
            return queue(*arguments)

        assert alive("fleet", "drain", "he", "--quiet").out == "here:7\n"
        assert alive("fleet", "drain", "here").out.endswith("run `reshard fleet undrain here:7`\n")
        shown = alive("status").out
        assert re.search(rf"here:7: drained, up to 2 copies at a time, version 1, started {WHEN} \(.* ago\)", shown), (
            shown
        )
        *_, head, row = (line.split() for line in alive("fleet", "status").out.splitlines())
        assert head == ["WORKER", "STATE", "STARTED", "COPIES", "VERSION", "NOW"]
        assert (row[:2], row[-2:]) == (["here:7", "drained"], ["2", "1"])
        assert re.fullmatch(WHEN, " ".join(row[2:-2]))
        job = store.submit(ask("drained")).id
        said = "all workers are drained; to undo that, run `reshard fleet undrain here:7`"
        assert alive("status", job, "--json").documents[0]["waits"] == said
        assert alive("fleet", "undrain", "here:7").out == "Worker here:7 accepts work again\n"
        (facts,) = alive("fleet", "status", "--json").documents
    process = {"name": "here:7", "concurrency": 2, "started": 0.0, "version": "1"}
    assert facts["workers"] == [process | {"state": "takes work", "at": []}]


def test_beside_each_worker_is_what_it_has_and_why_it_paused_itself(queue: Queue, url: str) -> None:
    with JobStore.at(url) as store:
        job = store.submit(ask("had")).id
        lease = Leases(store, Wakes(), "there:7.1").claim(job)
        assert lease is not None and lease.unit == "plan"
        error = TempDirUnusable(path="/scratch", why="it is gone")
        Fleet(store).rest("there:8", error.to_dict())
        for number in (7, 8):
            announce(store.redis, Process(f"there:{number}", "worker", "1", "here", number, 2, 0.0, False))
        said = queue("fleet", "status").out.splitlines()
        store.cancel(job)
    (head,) = (line for line in said if line.startswith("WORKER"))
    seven, eight = said[-2:]
    assert [line.split()[:2] for line in (seven, eight)] == [["there:7", "ready"], ["there:8", "paused"]], said
    assert seven.index("ready") == eight.index("paused itself") == head.index("STATE")
    now = head.index("NOW")
    assert seven[now:] == f"{job} plan"
    assert eight[now:].startswith("paused itself on ") and "/scratch" in eight


def test_usage_tells_what_jobs_took_by_submitter_catalog_and_day(queue: Queue, url: str) -> None:
    with JobStore.at(url) as store:
        followed(store)
        for key in store.redis.scan_iter("reshard:spent:*"):  # of the tests before
            store.redis.delete(key)
        assert queue("usage", "--days", "7").out == "No jobs ended in the last 7 days\n"
        now = server_ms(store.redis)
        for by, ago, read in (("ada", 0, 2_000_000), ("catalog mirror", 0, 3_000_000), ("ada", 40, 500_000)):
            moved = {"read": str(read), "uploaded": "1000", "deduplicated": "0"}
            at = now - ago * 86_400_000
            append(store.redis, "spent", at, job="j", unit="plan", by=by, took="61000", calls="7", **moved)
        followed(store)
    rows = [re.split(r" {2,}", line.strip()) for line in queue("usage", "--by", "catalog").out.splitlines()]
    assert rows[0] == ["CATALOG", "JOBS", "FAILED", "READ", "UPLOADED", "DEDUPLICATED", "HUB CALLS", "WORKER TIME"]
    assert rows[1:] == [
        ["mirror", "0", "0", "3.0 MB", "1.0 kB", "0 bytes", "7", "1 min 1 s"],
        ["(none)", "0", "0", "2.0 MB", "1.0 kB", "0 bytes", "7", "1 min 1 s"],
        ["total", "0", "0", "5.0 MB", "2.0 kB", "0 bytes", "14", "2 min 2 s"],
    ]
    (by_day,) = queue("usage", "--by", "day", "--days", "41", "--json").documents
    assert [row["read"] for row in by_day["rows"]] == [5_000_000, 500_000]
    assert by_day["total"] == {"jobs": 0, "failed": 0, "read": 5_500_000, "uploaded": 3000, "deduplicated": 0} | {
        "calls": 21, "worker_seconds": 183.0,
    }  # fmt: skip
    assert queue("usage", "--days", "401").code == 2
