"""What workers log of a job is kept with it: bounded, without secrets, and never in the way of the work."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from reshard.pipeline.planning.model import Plan
from reshard.worker import keeper, logs
from reshard.worker.keeper import LeaseKeeper
from reshard.worker.logs import LINE_MAX, LINES, at_work, taken
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Lease, Leases
from reshard.worker.queue.record import LogLine
from reshard.worker.queue.scripts import job_key, known_fields
from reshard.worker.settings import KEEP_DETAILS
from tests.support.models import arrays, save_single
from tests.support.procs import Broker, Machine, wait_for
from tests.worker.conftest import QUICK, Wakes, age, another, ask, claimed, copied, copying

UNIT = {"job": "one", "unit": "group:00000", "worker": "machine:1.2"}
TOKEN = "hf_" + "q" * 34
SIGNED = "https://cdn.example/a/b?X-Amz-Signature=5ec2e7&x=1"


@pytest.fixture
def logged() -> Iterator[logging.Logger]:
    """The logger of a library, in a process that logs as a worker does."""
    root, factory = logging.getLogger(), logging.getLogRecordFactory()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()  # those are pytest's, and would be closed
    logs.configure("text")
    library = logging.getLogger("huggingface_hub.file_download")
    library.setLevel(logging.DEBUG)  # more than its own WARNING, and than what is kept
    yield library
    library.setLevel(logging.NOTSET)
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.setLogRecordFactory(factory)
    logging.captureWarnings(False)


def lines() -> list[LogLine]:
    return [known_fields(LogLine, line) for line in taken()]


def test_what_a_unit_logs_is_kept_whichever_thread_and_library_says_it(logged: logging.Logger) -> None:
    logged.warning("before it")
    with at_work(UNIT):
        logged.debug("too much")
        logged.info("read %s", "it")
        thread = threading.Thread(target=lambda: logged.error("failed"))
        thread.start()
        thread.join()
        found = lines()
    assert [(line.level, line.unit, line.worker, line.text) for line in found] == [
        ("INFO", UNIT["unit"], UNIT["worker"], "huggingface_hub.file_download: read it"),
        ("ERROR", UNIT["unit"], UNIT["worker"], "huggingface_hub.file_download: failed"),
    ]
    assert found[0].at <= found[1].at


def test_what_one_unit_left_is_not_told_of_the_next(logged: logging.Logger) -> None:
    with at_work(UNIT):
        logged.warning("of the first")
    with at_work(UNIT | {"job": "two"}):
        assert lines() == []


def test_a_line_that_cannot_be_formatted_breaks_no_work(
    logged: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    logs.configure("text")  # without pytest's own handler, which raises it
    with at_work(UNIT):
        logged.info("%d files", "no")
        logged.info("%d files", 2)
        assert [line.text.partition(": ")[2] for line in lines()] == ["2 files"]
    assert "%d files" in capfd.readouterr().err, "it is reported"


def test_no_line_lets_anybody_in_or_moves_a_terminal_wherever_it_is_cut(logged: logging.Logger) -> None:
    with at_work(UNIT):
        logged.warning("GET %s as %s", SIGNED, TOKEN)
        logged.warning("%s%s", "x" * (LINE_MAX - 60), f"GET {SIGNED} Bearer {TOKEN}")
        logged.warning("\x1b[2J\nover\u202ethere\ud800")
        logging.getLogger(f"\x1b[2Jof {SIGNED}").warning("by a logger of that name")
        try:
            raise ValueError(f"{TOKEN}\n{SIGNED}")
        except ValueError:
            logged.exception("it failed")
        found = lines()
    told = [line.text for line in found]
    assert not [text for text in told if TOKEN[:20] in text or "5ec2e7" in text]
    assert max(map(len, told)) == LINE_MAX and told[1].endswith("…")
    assert "\\x1b[2J\\x0aover\\u202ethere\\ud800" in told[2]
    assert all(text.isprintable() for text in told)
    assert [text.partition(":")[0] for text in told[4:]].count("Traceback (most recent call last)") == 1
    assert any(text.startswith("ValueError: hf_...") for text in told[4:])


def test_of_many_lines_the_last_are_kept_between_two_looks_and_of_a_job(
    logged: logging.Logger, store: JobStore, leases: Leases
) -> None:
    lease = claimed(leases, store.submit(ask()).id, "plan")
    with at_work(UNIT):
        for number in range(LINES + 1):
            logged.info("line %d", number)
        some = taken()
    assert len(some) == LINES and some[0].endswith('line 1"}')
    assert leases.log(lease, some) == "ok"
    assert [line.text.partition(": ")[2] for line in store.log(lease.job)] == [f"line {n + 1}" for n in range(LINES)]
    assert leases.log(lease, some[:1]) == "ok"
    kept = store.log(lease.job)
    assert len(kept) == LINES and kept[0].text.endswith("line 2") and kept[-1].text.endswith("line 1")
    assert store.get(lease.job).logged == LINES + 1


def line(text: str) -> str:
    """As a newer release may write it."""
    return json.dumps({"at": 1.5, "level": "INFO", "unit": "check", "worker": "w", "text": text, "newer": 1})


def test_who_lost_a_unit_or_whose_job_was_cancelled_or_deleted_adds_nothing(
    store: JobStore, leases: Leases, plan: Plan
) -> None:
    job, lease = copying(store, leases, plan)
    age(store, job, 3600)
    other = another(store)
    while (taken_over := other.claim(job)) and taken_over.unit != lease.unit:
        pass
    assert taken_over and leases.log(lease, [line("late")]) == "lost"
    assert other.log(taken_over, [line("in time")]) == "ok"
    store.cancel(job)
    assert other.log(taken_over, [line("late")]) == "cancelled"
    assert [one.text for one in store.log(job)] == ["in time"] and store.get(job).logged == 1
    store.delete([job])
    assert other.log(taken_over, [line("late")]) == "lost"
    assert store.redis.keys(job_key(job) + "*") == []


def test_a_log_goes_with_its_job_and_an_hour_after_one_that_is_done(
    store: JobStore, leases: Leases, plan: Plan
) -> None:
    job = copied(store, leases, plan)
    publish = claimed(leases, job, "publish")
    assert leases.log(publish, [line("published")]) == "ok"
    assert leases.begin(publish) == leases.done(publish, {"commit": "c", "ref": "main", "found": False}) == "ok"
    confirm = claimed(leases, job, "confirm")
    assert leases.done(confirm, []) == "ok"
    assert 0 < store.redis.ttl(job_key(job, "log")) <= KEEP_DETAILS
    assert leases.log(confirm, [line("late")]) == "ok", "as for whoever did not hear the answer"
    assert [one.text for one in store.log(job)] == ["published"]
    store.delete([job])
    assert store.redis.exists(job_key(job, "log")) == 0


def test_a_client_that_wrote_over_a_log_stops_no_work(store: JobStore, leases: Leases) -> None:
    lease = claimed(leases, store.submit(ask()).id, "plan")
    store.redis.set(job_key(lease.job, "log"), "not a list")
    assert leases.log(lease, [line("there")]) == "ok"
    assert [one.text for one in store.log(lease.job)] == ["there"]


@pytest.mark.parametrize("wrong", ["{", "[]", '{"at": "never"}', b"\xff", "[" * 100_000])
def test_a_malformed_line_hides_no_other(store: JobStore, leases: Leases, wrong: str | bytes) -> None:
    lease = claimed(leases, store.submit(ask()).id, "plan")
    assert leases.log(lease, [line("there")]) == "ok"
    store.redis.rpush(job_key(lease.job, "log"), wrong)
    assert [one.text for one in store.log(lease.job)] == ["there"]


# ------------------------------------------------------------------------------------------------ with the lease


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path) as running:
        yield running


@pytest.fixture
def lease(own_broker: Broker) -> Iterator[tuple[JobStore, Leases, Lease]]:
    with JobStore.at(own_broker.url) as store:
        leases = Leases(store, Wakes(), "worker-a")
        yield store, leases, claimed(leases, store.submit(ask()).id, "plan")


def test_lines_are_handed_on_while_the_work_goes_on(
    logged: logging.Logger, lease: tuple[JobStore, Leases, Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "RENEWALS", 0.05)
    store, leases, own = lease
    with at_work(own.fields), LeaseKeeper(leases, own, QUICK):
        logged.warning("tried again")
        (told,) = wait_for(lambda: store.log(own.job), "the line")
    assert (told.unit, told.worker) == ("plan", "worker-a") and told.text.endswith("tried again")


def test_the_last_lines_come_before_the_unit_is_handed_in_and_a_broker_that_is_away_loses_no_more_than_the_first(
    logged: logging.Logger,
    lease: tuple[JobStore, Leases, Lease],
    own_broker: Broker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper, "RENEWALS", 600)
    monkeypatch.setattr(keeper, "RETRY_FIRST", 0.05)
    store, leases, own = lease
    with at_work(own.fields), LeaseKeeper(leases, own, QUICK) as kept:
        own_broker.kill()
        for number in range(LINES + 50):
            logged.info("line %d", number)
        logged.error("it failed for good")
        restart = threading.Timer(0.5, own_broker.start)
        restart.start()
        assert kept.finish(lambda: leases.fail(own, {"code": "x", "message": "", "hint": "", "facts": {}})) == "ok"
        restart.join()
    texts = [one.text.partition(": ")[2] for one in store.log(own.job)]
    assert "it failed for good" in texts and len(texts) == LINES
    assert store.get(own.job).state == "failed"


def test_lines_that_nobody_takes_keep_no_unit_from_being_handed_in(
    logged: logging.Logger, lease: tuple[JobStore, Leases, Lease]
) -> None:
    store, leases, own = lease
    store.redis.set(job_key(own.job, "log"), "not a list")
    with at_work(own.fields), LeaseKeeper(leases, own, QUICK) as kept:
        logged.error("of no use")
        assert kept.finish(lambda: leases.done(own, {"commit": "c", "ref": "main", "found": True})) == "ok"
    assert store.get(own.job).state == "done"


# ------------------------------------------------------------------------------------------------- a real worker


def test_a_workers_lines_are_kept_with_their_job_and_printed(tmp_path: Path, broker: Broker, store: JobStore) -> None:
    save_single(tmp_path / "model", arrays(20, 100_000))
    with Machine(tmp_path, broker.url, RESHARD_ALLOWED_FOLDERS=str(tmp_path)) as machine:
        machine.control(), machine.worker()
        ids = []
        for source in ("model", "none"):
            asked = ("submit", str(tmp_path / source), "--to", str(tmp_path / f"{source}-out"), "--size", "300KB")
            ids.append(machine.run(*asked, "--quiet").stdout.strip())
        done, failed = ids
        wait_for(lambda: all(store.get(job).state.ended for job in ids), "both ends")
        printed = machine.run("logs", failed)
        bare = machine.run("logs", done[:6], "--quiet").stdout
    units = {line.unit for line in store.log(done)}
    assert {"plan", "check", "group:00000", "publish", "confirm"} <= units
    assert store.get(done).state == "done" and bare.splitlines() == [line.text for line in store.log(done)]
    told = store.log(failed)
    assert told[-1].level == "WARNING" and store.get(failed).error
    assert (store.get(failed).error or {})["message"] in told[-1].text
    assert printed.returncode == 0 and told[-1].text in printed.stdout and " WARNING " in printed.stdout
