"""`reshard fleet ...` against a real broker on which nobody works."""

from __future__ import annotations

import threading
from pathlib import Path

from reshard.worker.fleet.fleet import Fleet
from reshard.worker.fleet.heartbeat import announce
from reshard.worker.queue.jobs import JobStore, Process
from tests.cli.conftest import Queue
from tests.worker.conftest import ask


def test_a_paused_service_says_so_wherever_somebody_waits_for_it(queue: Queue, tmp_path: Path) -> None:
    (paused,) = queue("fleet", "pause", "--reason", "the line is down", "--json").documents
    assert paused["paused"]["reason"] == "the line is down"
    said = "the service is paused since "
    submitted = queue("submit", "a/model", "--to", "b/paused", "--json")
    (job,) = submitted.documents
    assert job["waits"].startswith(said)
    assert said in queue("submit", "a/model", "--to", "b/paused").err
    for done in (queue("status"), queue("status", job["job"]), queue("fleet", "status")):
        assert said in done.out
        assert "the line is down" in done.out
    listed = queue("list")
    assert said in listed.err
    assert said not in listed.out
    queue("cancel", job["job"])
    assert said in queue("retry", job["job"]).err
    mirror = tmp_path / "mirror.yaml"
    mirror.write_text("name: mirror\ndefaults: {to: 'b/{name}', size: 1MB}\nentries: [{repo: a/model}]\n")
    assert said in queue("catalog", "submit", str(mirror)).err
    queue("schedule", "add", "nightly", "a/model", "--to", "b/nightly", "--cron", "0 3 * * *")
    assert said in queue("schedule", "run", "nightly").err

    again = queue("fleet", "pause").out
    assert again.startswith("paused already: the service is paused since ")
    assert "the line is down" in again
    assert queue("fleet", "resume").out == "it goes on\n"
    assert said not in queue("status").out


def test_a_watch_says_once_that_it_is_paused(queue: Queue, url: str) -> None:
    with JobStore.at(url) as store:
        job = store.submit(ask("watched")).id
        Fleet(store).pause("me")
        cancel = threading.Timer(3.0, store.cancel, (job,))
        cancel.start()
        documents = queue("watch", job, "--json").documents
        cancel.join()
        Fleet(store).resume()
    (waits,) = [document["waits"] for document in documents if document.keys() == {"waits"}]
    assert waits.startswith("the service is paused since ")


def test_limits_are_set_shown_and_taken_off(queue: Queue) -> None:
    done = queue(
        "fleet", "limit", "--bandwidth", "200MB/s", "--night-bytes", "2TB", "--window", "22:00-06:00",
        "--tz", "Europe/Berlin",
    )  # fmt: skip
    assert done.code == 0
    shown = queue("fleet", "status").out
    for what in ("at most 200.0 MB/s", "at most 2.0 TB", "22:00-06:00 in Europe/Berlin", "none is running"):
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
        assert job["waits"].startswith("bulk work rests until ")
    (facts,) = queue("fleet", "limit", "--closed", "00:00-23:59", "--bandwidth", "none", "--json").documents
    assert facts["limits"]["window"] == "23:59-00:00"
    assert facts["limits"]["bandwidth"] is None
    (facts,) = queue("fleet", "limit", "--closed", "none", "--night-bytes", "none", "--tz", "none", "--json").documents
    assert facts["limits"] == {"bandwidth": None, "night_bytes": None, "window": None, "tz": "UTC"}
    assert facts["bulk_rests"] is None


def test_what_is_wrong_is_said_in_one_line(queue: Queue) -> None:
    for options, said in (
        (("limit",), "error[usage.limit]: no limit is named"),
        (("limit", "--bandwidth", "200MB"), "error[usage.limit]: --bandwidth 200MB: bytes a second are meant"),
        (("limit", "--tz", "Mars/Base"), "error[usage.limit]: --tz 'Mars/Base' is no time zone"),
        (("drain", "nobody"), "error[queue.no_worker]: no worker is called nobody; there are: none"),
    ):
        done = queue("fleet", *options)
        assert done.code in {2, 10}
        assert done.err.startswith(said)
        assert len(done.err.splitlines()) == 2


def test_a_worker_is_drained_and_shown_so(queue: Queue, url: str) -> None:
    with JobStore.at(url) as store:
        announce(store.redis, Process("here:7", "worker", "1", "here", 7, 2, 0.0, False))
        assert queue("fleet", "drain", "he", "--quiet").out == "here:7\n"
        for shown in (queue("fleet", "status").out, queue("status").out):
            assert "here:7: drained" in shown
            assert "2 copies at once" in shown
        job = store.submit(ask("drained")).id
        said = "every worker is drained; `reshard fleet undrain here:7` has it take work again"
        assert queue("status", job, "--json").documents[0]["waits"] == said
        assert queue("fleet", "undrain", "here:7").out == "worker here:7 takes work again\n"
        announce(store.redis, Process("here:7", "worker", "1", "here", 7, 2, 0.0, False))
        (facts,) = queue("fleet", "status", "--json").documents
    assert facts["workers"] == [{"name": "here:7", "state": "takes work", "concurrency": 2, "at": []}]
