"""Notices: what is told to a real server and real programs, once by any number of controls, again when one dies."""

from __future__ import annotations

import json
import logging
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from reshard.pipeline.errors import BadSetting, ExtraMissing, NoticeFailed, NoWeights, SourceNotFound, UsageError
from reshard.worker import local
from reshard.worker.control import Control
from reshard.worker.followers import notices
from reshard.worker.followers.cursor import Cursor
from reshard.worker.followers.notices import (
    NOTICES,
    NOTICES_MAX,
    NOTIFY_FIRST,
    NOTIFY_FOR,
    NOTIFY_LEASE,
    Command,
    Notice,
    Notifier,
    Services,
    Url,
    hooks,
    keep,
    waiting,
)
from reshard.worker.followers.schedules import LATE, Schedule, Schedules
from reshard.worker.queue.events import TOTALS, append, relay
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.scripts import PREFIX, server_ms
from reshard.worker.settings import Settings, settings
from tests.support.procs import Broker, Machine, busy, wait_for
from tests.worker.conftest import Clock, Wakes, another, ask, followed, restricted
from tests.worker.followers.builders import DAY, begin, definition, fail, finish, jobs, nightly, rows

SECRET = "s3cr3t-in-the-url"


@dataclass
class Receiver:
    """A server that takes notices: ``answers`` come first, then 200; while ``open`` is not set, nothing is answered."""

    answers: list[int] = field(default_factory=list)
    posted: list[dict[str, Any]] = field(default_factory=list)
    open: threading.Event = field(default_factory=threading.Event)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/{SECRET}"

    @property
    def ids(self) -> list[str]:
        return [notice["id"] for notice in self.posted]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    state = Receiver()
    state.open.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            state.posted.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            state.open.wait(60)
            status = state.answers.pop(0) if state.answers else 200
            self.send_response(status)
            if status == 302:
                self.send_header("location", state.url)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield state
    state.open.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def notifier(store: JobStore, receiver: Receiver) -> Notifier:
    """Of a control whose hook is the receiver, and which has said so."""
    found = Notifier(store, [Url(receiver.url)])
    found.listen()
    return found


@pytest.fixture
def url(receiver: Receiver) -> Url:
    return Url(receiver.url)


def now(store: JobStore) -> float:
    """By the server's clock, in seconds."""
    return server_ms(store.redis) / 1000


def told(store: JobStore, notifier: Notifier, receiver: Receiver) -> list[dict[str, Any]]:
    """What is new at the receiver once everything was told."""
    followed(store)
    before = len(receiver.posted)
    while (ended := notifier.tell(Url(receiver.url))) is not None:
        assert ended == "told"
    return receiver.posted[before:]


def age(store: JobStore, seconds: float, hook: str = "url") -> None:
    """Let ``seconds`` pass for what a hook was given and has not taken."""
    for entry in store.redis.xpending_range(NOTICES, hook, "-", "+", 1000):
        idle = entry["time_since_delivered"] + round(seconds * 1000)
        store.redis.xclaim(NOTICES, hook, entry["consumer"], 0, [entry["message_id"]], idle=idle, justid=True)


def fire(store: JobStore, name: str = "nightly") -> str:
    """The job that a schedule fires now, by hand."""
    schedules = Schedules(store)
    if name not in {seen.schedule.name for seen in schedules.all()}:
        schedules.add(nightly(name, ask(name)))
    job = schedules.run(name).job
    assert job is not None
    return job


def something_fails(store: JobStore, name: str = "nightly") -> None:
    fail(another(store), fire(store, name))
    followed(store)


def test_a_schedule_tells_of_failures_and_once_that_it_is_over(
    store: JobStore, leases: Leases, notifier: Notifier, receiver: Receiver
) -> None:
    began = now(store)
    finish(leases, fire(store))
    assert told(store, notifier, receiver) == [], "nothing was amiss before"
    before = Schedules(store).get("nightly").success
    assert before is not None and began <= before <= now(store)

    job = fire(store)
    fail(leases, job)
    (notice,) = told(store, notifier, receiver)
    assert [notice[part] for part in ("kind", "what", "name", "schedule")] == [
        "failed", "schedule", "nightly", "nightly",
    ]  # fmt: skip
    assert (notice["job"], notice["codes"]) == (job, {NoWeights.code: 1})
    assert notice["error"]["hint"] and notice["error"]["message"] in notice["text"]
    assert notice["next"] == f"reshard status {job}"
    assert before <= notice["at"] <= now(store)
    assert Schedules(store).get("nightly").success == before

    store.retry(job)
    finish(leases, job)
    (recovered,) = told(store, notifier, receiver)
    assert (recovered["kind"], recovered["name"], recovered["codes"]) == ("recovered", "nightly", None)
    assert recovered["id"] != notice["id"]
    finish(leases, fire(store))
    assert told(store, notifier, receiver) == []
    after = Schedules(store).get("nightly").success
    assert after is not None and after > before


def test_who_cancels_a_job_is_not_told_of_it(store: JobStore, notifier: Notifier, receiver: Receiver) -> None:
    store.cancel(fire(store))
    assert told(store, notifier, receiver) == []
    assert Schedules(store).get("nightly").success is None


def test_jobs_of_no_schedule_and_of_a_removed_one_tell_nothing(
    store: JobStore, leases: Leases, notifier: Notifier, receiver: Receiver
) -> None:
    fail(leases, store.submit(ask("alone")).id)
    job = fire(store)
    Schedules(store).remove("nightly")
    fail(leases, job)
    assert told(store, notifier, receiver) == []
    assert store.redis.hgetall(f"{PREFIX}schedules:trouble") == {}


def test_an_end_that_comes_before_what_the_client_told_that_fired_it_counts_once(
    store: JobStore, leases: Leases, notifier: Notifier, receiver: Receiver
) -> None:
    with restricted(store) as client:
        job = fire(client)
        fail(leases, job)
        assert told(store, notifier, receiver) == []
        relay(store.redis)
        (notice,) = told(store, notifier, receiver)
        assert (notice["kind"], notice["job"], notice["codes"]) == ("failed", job, {NoWeights.code: 1})
        client.retry(job)
        finish(leases, job)
        relay(store.redis)
        assert [notice["kind"] for notice in told(store, notifier, receiver)] == ["recovered"]
        before = Schedules(store).get("nightly").success
        finish(leases, fire(client))
        followed(store)
        relay(store.redis)
        assert told(store, notifier, receiver) == []
    after = Schedules(store).get("nightly").success
    assert before is not None and after is not None and after > before


def test_two_schedules_of_one_request_share_its_job_and_its_end(
    store: JobStore, leases: Leases, notifier: Notifier, receiver: Receiver
) -> None:
    schedules = Schedules(store)
    for name in ("early", "late"):
        schedules.add(nightly(name))
    job = schedules.run("early").job
    assert job is not None
    assert schedules.run("late").job == job
    fail(leases, job)
    assert {notice["name"] for notice in told(store, notifier, receiver)} == {"early", "late"}


def test_a_catalog_tells_what_failed_by_code(
    store: JobStore, leases: Leases, notifier: Notifier, receiver: Receiver
) -> None:
    catalogs = Cursor(store)
    wanted = definition(4)
    found = rows(wanted)
    absent = SourceNotFound(repo="them/m3", endpoint="https://hub")
    begin(catalogs, wanted, [*found[:3], (found[3][0], absent)])
    first, second, third = jobs(catalogs)
    fail(leases, first)
    fail(leases, second)
    finish(leases, third)
    assert jobs(catalogs) == []
    (notice,) = told(store, notifier, receiver)
    assert (notice["kind"], notice["what"], notice["name"], notice["schedule"]) == ("failed", "catalog", "mirror", None)
    assert notice["codes"] == {NoWeights.code: 2, "source.not_found": 1}
    assert (notice["entries"], notice["counts"]) == (4, {"failed": 3, "same": 1})
    assert notice["text"] == f"catalog mirror: 3 of 4 models failed: {NoWeights.code} 2, source.not_found 1"
    assert notice["next"] == "reshard catalog failures mirror"
    assert catalogs.get("mirror").success is None

    # Another turn for some is still a failure, of what is left.
    assert catalogs.retry("mirror", only=NoWeights.code) == 2
    for job in jobs(catalogs):
        finish(leases, job)
    assert jobs(catalogs) == []
    (notice,) = told(store, notifier, receiver)
    assert (notice["codes"], notice["counts"]) == ({"source.not_found": 1}, {"failed": 1, "same": 3})

    begin(catalogs, wanted, found)
    for job in jobs(catalogs):
        finish(leases, job)
    jobs(catalogs)
    (recovered,) = told(store, notifier, receiver)
    assert (recovered["kind"], recovered["what"]) == ("recovered", "catalog")
    success = catalogs.get("mirror").success
    assert success is not None and notice["at"] <= success <= now(store)
    begin(catalogs, wanted, found)  # nothing changed: well again, and not worth a word
    assert told(store, notifier, receiver) == []
    assert (catalogs.get("mirror").success or 0) > success


def test_a_catalog_that_stops_or_cannot_be_expanded_tells_why(
    store: JobStore, leases: Leases, notifier: Notifier, receiver: Receiver
) -> None:
    catalogs = Cursor(store)
    begin(catalogs, definition(3, at_once=2, max_failures=0))
    first, second = jobs(catalogs)
    fail(leases, first)
    assert jobs(catalogs) == [second]
    (notice,) = told(store, notifier, receiver)
    assert notice["text"].startswith("catalog mirror: stopped: more than 0 models failed; 1 of 3 models failed: ")
    finish(leases, second)
    assert jobs(catalogs) == []
    assert told(store, notifier, receiver) == [], "its last job says nothing new"
    catalogs.cancel("mirror")
    assert told(store, notifier, receiver) == []

    assert catalogs.submit(definition(1))
    run = catalogs.claim("mirror", "control")
    catalogs.refuse("mirror", run, "control", UsageError(what="no such collection"))
    (notice,) = told(store, notifier, receiver)
    assert notice["text"].startswith("cannot expand catalog mirror: no such collection")
    assert notice["next"] == "reshard catalog status mirror"


def test_a_catalogs_run_is_its_schedules_too_and_is_told_once(
    store: JobStore, leases: Leases, notifier: Notifier, receiver: Receiver
) -> None:
    schedules, catalogs = Schedules(store), Cursor(store)
    wanted = definition(1)
    schedules.add(Schedule(name="nightly", cron="0 3 * * *", catalog=wanted))

    def run(good: bool) -> list[dict[str, Any]]:
        assert schedules.run("nightly").outcome == "fired"
        token = uuid4().hex
        assert catalogs.fill("mirror", catalogs.claim("mirror", token), token, rows(wanted, source=token))
        (job,) = jobs(catalogs)
        (finish if good else fail)(leases, job)
        jobs(catalogs)
        return told(store, notifier, receiver)

    (failed,) = run(good=False)
    assert (failed["what"], failed["name"], failed["schedule"]) == ("catalog", "mirror", "nightly")
    assert schedules.get("nightly").success is None
    (recovered,) = run(good=True)
    assert (recovered["kind"], recovered["schedule"]) == ("recovered", "nightly")
    assert schedules.get("nightly").success == catalogs.get("mirror").success is not None


def test_a_night_that_did_not_happen_is_told_with_the_reason(
    store: JobStore, leases: Leases, notifier: Notifier, receiver: Receiver
) -> None:
    clock = Clock("2026-06-01T12:00")
    schedules = Schedules(store, clock)
    schedules.add(nightly("once", ask("once")))
    clock.now = schedules.add(nightly("skip", ask("skip"), missed="skip")) + LATE + 1
    schedules.fire_due()
    late, left_out = sorted(told(store, notifier, receiver), key=lambda notice: notice["name"])
    assert late["text"] == "schedule once, due on 2026-06-02 03:00 UTC: fired late: no control process was running"
    assert left_out["text"].endswith("skipped: no control process was running")
    assert (late["kind"], late["next"]) == ("missed", "reshard schedule show once")
    assert [job.request.target.repo for job in store.recent()] == ["us/once"]

    clock.now += DAY - LATE
    other = store.submit(ask("skip", size=12345)).id
    schedules.fire_due()
    overlap, busy = sorted(told(store, notifier, receiver), key=lambda notice: notice["name"])
    assert overlap["text"].endswith("skipped: previous run still in progress")
    assert busy["text"].endswith(f"skipped: job {other} is writing to the same target for another request")

    finish(leases, store.recent()[-1].id)  # late, and done
    (recovered,) = told(store, notifier, receiver)
    assert (recovered["kind"], recovered["name"]) == ("recovered", "once")
    schedules.run("skip")  # by hand: who types it sees what comes of it
    assert told(store, notifier, receiver) == []


def test_what_is_refused_is_told_again_later_under_the_same_id(
    store: JobStore, notifier: Notifier, receiver: Receiver, url: Url, caplog: pytest.LogCaptureFixture
) -> None:
    something_fails(store)
    receiver.answers = [503, 302]
    for wait in (NOTIFY_FIRST, 2 * NOTIFY_FIRST):
        assert notifier.tell(url) == "again"
        age(store, wait - 2)
        assert notifier.tell(url) is None, "not before its pause is over"
        age(store, 2)
    assert notifier.tell(url) == "told"
    assert notifier.tell(url) is None
    assert len(set(receiver.ids)) == 1 and len(receiver.ids) == 3, "a redirect is not followed"
    assert "attempt 1: cannot send a notification to the url: HTTP 503; trying again in 10 s" in caplog.text
    assert SECRET not in caplog.text
    assert waiting(store.redis)["url"] == 0


def test_a_broker_that_a_script_holds_up_is_waited_for_and_said_once(
    store: JobStore,
    notifier: Notifier,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(notices, "NOTIFY_LOOK", 0.01)
    looks, tell, ending = list[str](), Notifier.tell, threading.Event()
    monkeypatch.setattr(Notifier, "tell", lambda own, hook: looks.append(hook.name) or tell(own, hook))
    something_fails(store)
    with busy(store.redis):
        notifier.start(ending)
        wait_for(lambda: len(looks) > 5, "its looking, some times")
    wait_for(lambda: receiver.posted, "the notice")
    wait_for(lambda: "the broker is available again" in caplog.text, "that it is said")
    ending.set()
    assert caplog.text.count("notifications are waiting for the broker: BUSY") == 1
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_receiver_that_is_away_is_not_named(store: JobStore, receiver: Receiver) -> None:
    with pytest.raises(NoticeFailed) as failed:
        Url(f"http://127.0.0.1:9/{SECRET}").tell(Notice.test())
    assert SECRET not in str(failed.value) and failed.value.__suppress_context__


def test_many_controls_tell_each_notice_once(
    broker: Broker, store: JobStore, notifier: Notifier, receiver: Receiver
) -> None:
    for number in range(12):
        something_fails(store, f"n{number:02}")
    together = threading.Barrier(4)

    def control() -> None:
        with JobStore.at(broker.url) as own:
            mine, hook = Notifier(own, []), Url(receiver.url)
            together.wait()
            while mine.tell(hook) is not None:
                pass

    threads = [threading.Thread(target=control) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(receiver.ids) == len(set(receiver.ids)) == 12


def test_what_a_dead_control_was_about_to_tell_is_told_by_the_next(
    store: JobStore, notifier: Notifier, receiver: Receiver, url: Url, caplog: pytest.LogCaptureFixture
) -> None:
    something_fails(store)

    class Slow:
        name = url.name

        def tell(self, notice: Notice) -> None:
            assert notifier.tell(url) is None, "it may be telling it right now"
            age(store, NOTIFY_LEASE)
            receiver.answers = [503]
            assert notifier.tell(url) == "again"

    # The first one was only slow, and succeeded after all: nobody tells it again.
    assert Notifier(store, []).tell(Slow()) == "told"
    assert [line.partition(": ")[2][:9] for line in caplog.messages if ": attempt " in line] == ["attempt 2"]
    age(store, DAY)
    assert notifier.tell(url) is None


def test_after_a_day_a_notice_is_dropped_and_counted(
    store: JobStore, notifier: Notifier, receiver: Receiver, url: Url, caplog: pytest.LogCaptureFixture
) -> None:
    something_fails(store)
    [(id, fields)] = store.redis.xrange(NOTICES)
    day_old = f"{int(id.partition(b'-')[0]) - round((NOTIFY_FOR + 1) * 1000)}-0"
    store.redis.delete(NOTICES)
    notifier.listen()
    store.redis.xadd(NOTICES, fields, id=day_old)
    receiver.answers = [503]
    assert notifier.tell(url) == "again"
    notifier.listen()
    assert notifier.tell(url) == "dropped"
    assert notifier.tell(url) is None
    totals = store.redis.hgetall(TOTALS)
    assert (totals[b"notices:url:failed"], totals[b"notices:url:dropped"]) == (b"1", b"1")
    assert [record.levelno for record in caplog.records if "dropped after 1 attempt by" in record.message] == [
        logging.ERROR
    ]


@pytest.mark.parametrize("others", [False, True])
def test_what_waits_for_a_hook_that_was_removed_is_dropped_once_the_stream_has_it_no_more(
    store: JobStore, notifier: Notifier, receiver: Receiver, url: Url, others: bool
) -> None:
    receiver.answers = [503]
    something_fails(store)
    [(gone, _)] = store.redis.xrange(NOTICES)
    assert notifier.tell(url) == "again"
    without = Notifier(store, [])
    without.listen()
    assert waiting(store.redis)["url"] == 1, "another control may have the hook"
    something_fails(store, "later")
    if others:
        store.redis.xdel(NOTICES, gone)
    else:
        store.redis.xtrim(NOTICES, maxlen=0)  # as a day later
    for _ in range(2):
        without.listen()
    assert store.redis.xpending(NOTICES, "url")["pending"] == 0
    assert waiting(store.redis)["url"] == others, "what the stream still has is told if the hook is set again"
    assert store.redis.hget(TOTALS, "notices:url:dropped") == b"1"
    assert notifier.tell(url) == ("told" if others else None)


def test_an_event_that_control_hears_of_after_more_than_a_day_leaves_no_notice(
    store: JobStore, notifier: Notifier, receiver: Receiver
) -> None:
    Schedules(store).add(nightly())
    for at in (now(store) - NOTIFY_FOR - 1, now(store) - NOTIFY_FOR + 600):
        append(store.redis, "missed", round(at * 1000), name="nightly", job="", due="0", outcome="missed")
    (notice,) = told(store, notifier, receiver)
    assert notice["at"] > now(store) - NOTIFY_FOR


def test_only_so_many_are_kept_and_the_oldest_go(store: JobStore, notifier: Notifier, receiver: Receiver) -> None:
    something_fails(store, "oldest")
    receiver.answers = [503]
    assert notifier.tell(Url(receiver.url)) == "again"
    for number in range(NOTICES_MAX - 1):
        keep(0, kind="missed", name=str(number))(store.redis)
    something_fails(store, "newest")
    assert store.redis.xlen(NOTICES) == NOTICES_MAX
    assert store.redis.xrevrange(NOTICES, count=1)[0][1][b"name"] == b"newest"
    while store.redis.xreadgroup("url", "all the new ones", {NOTICES: ">"}):
        pass
    assert notifier.tell(Url(receiver.url)) == "dropped"
    assert store.redis.hget(TOTALS, "notices:url:dropped") == b"1"


def test_nothing_is_kept_where_nobody_has_a_hook(store: JobStore, leases: Leases) -> None:
    Notifier(store, []).listen()
    something_fails(store)
    assert not store.redis.exists(NOTICES)


def test_one_hook_that_fails_does_not_repeat_the_other(
    store: JobStore, notifier: Notifier, receiver: Receiver, url: Url, tmp_path: Path
) -> None:
    no = Command(["false"])
    both = Notifier(store, [url, no])
    both.listen()
    something_fails(store)
    assert (both.tell(url), both.tell(no)) == ("told", "again")
    age(store, NOTIFY_FIRST, "command")
    assert (both.tell(url), both.tell(no)) == (None, "again")
    assert len(receiver.posted) == 1


def program(folder: Path, body: str) -> list[str]:
    """A real program that ``body`` makes."""
    file = folder / "hook.py"
    file.write_text(f"import json, os, subprocess, sys, time\n{body}\n")
    return [sys.executable, str(file)]


def test_a_command_gets_the_notice_on_stdin_and_no_shell_in_between(
    store: JobStore, notifier: Notifier, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    body = "env = {k: v for k, v in os.environ.items() if k.startswith('RESHARD_NOTICE')}\n"
    body += f"open({str(out)!r}, 'w').write(json.dumps([sys.argv[1:], json.load(sys.stdin), env]))"
    line = shlex.join([*program(tmp_path, body), "$HOME; touch x"])
    (command,) = hooks(Settings(notify_command=line))
    Notifier(store, [command]).listen()
    something_fails(store)
    assert notifier.tell(command) == "told"
    arguments, given, env = json.loads(out.read_text())
    assert arguments == ["$HOME; touch x"]
    assert (given["kind"], given["name"]) == ("failed", "nightly")
    assert env == {
        f"RESHARD_NOTICE_{name.upper()}": given[name] for name in ("id", "kind", "what", "name", "text", "next")
    }


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["/nowhere/hook"], "cannot start it"),
        (["false"], "it exited with 1"),
        (["sh", "-c", "kill -9 $$"], "with -9"),
    ],
)
def test_a_command_that_does_not_end_well_did_not_take_it(arguments: list[str], why: str) -> None:
    with pytest.raises(NoticeFailed, match=why):
        Command(arguments).tell(Notice.test())


def test_what_a_hub_says_is_passed_on_whatever_it_says(receiver: Receiver, url: Url) -> None:
    odd = replace(Notice.test(), text="half a pair \ud800, a nul \0 and \u00e9")
    Command(["true"]).tell(odd)
    url.tell(odd)
    assert receiver.posted[0]["text"] == odd.text
    Services([service(receiver)]).tell(odd)
    assert receiver.posted[1]["message"] == "half a pair ?, a nul   and \u00e9"


def test_a_command_that_reads_nothing_may_take_it_all_the_same() -> None:
    Command(["true"]).tell(Notice.test())


def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "NOTIFY_TIMEOUT", 2.0)
    pid = tmp_path / "pid"
    body = f"open({str(pid)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid)); time.sleep(600)"
    with pytest.raises(NoticeFailed, match="it ran for more than 2 s"):
        Command(program(tmp_path, body)).tell(Notice.test())

    def gone() -> bool:
        stat = Path(f"/proc/{pid.read_text()}/stat")
        return not stat.exists() or stat.read_text().split()[2] == "Z"

    wait_for(gone, "the end of what it started")


def service(receiver: Receiver) -> str:
    """The URL by which Apprise posts JSON to the receiver."""
    return receiver.url.replace("http://", f"json://me:{SECRET}@")


def test_a_service_is_told_in_words_and_again_when_it_did_not_take_them(
    store: JobStore, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    hook = Services([service(receiver)])
    notifier = Notifier(store, [hook])
    notifier.listen()
    something_fails(store)
    receiver.answers = [503]
    assert notifier.tell(hook) == "again"
    assert notifier.tell(hook) is None
    age(store, NOTIFY_FIRST, hook.name)
    assert notifier.tell(hook) == "told"
    first, again = receiver.posted
    assert first == again
    assert (first["title"], first["type"]) == ("reshard: schedule nightly failed", "failure")
    text, command = first["message"].splitlines()
    assert text.startswith("schedule nightly failed: job ") and command.startswith("reshard status ")
    assert store.redis.hget(TOTALS, "notices:apprise:told") == b"1"
    assert "JSON failed" in caplog.text and SECRET not in caplog.text


def test_of_several_services_only_those_that_failed_are_told_again_by_any_process(
    store: JobStore, receiver: Receiver
) -> None:
    urls = [f"{service(receiver)}/{name}" for name in ("one", "other")]
    hook, another = Services(urls, store.redis), Services(urls, store.redis)
    receiver.answers = [200, 500]
    notice = Notice.test()
    with pytest.raises(NoticeFailed):
        hook.tell(notice)
    assert len(receiver.posted) == 2
    another.tell(notice)
    assert len(receiver.posted) == 3
    assert all(store.redis.ttl(key) > 0 for key in store.redis.scan_iter("*took*"))
    another.tell(replace(notice, id="another"))
    assert len(receiver.posted) == 5


def test_a_service_that_hangs_is_given_up_for_now(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "NOTIFY_TIMEOUT", 0.5)
    receiver.open.clear()
    with pytest.raises(NoticeFailed, match="JSON failed"):
        Services([service(receiver)]).tell(Notice.test())


def test_a_url_that_apprise_does_not_know_is_said_without_its_secret(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "apprise")
    with pytest.raises(BadSetting, match="URL number 2 is not supported by Apprise") as wrong:
        hooks(Settings(notify_apprise=f"json://127.0.0.1:9 slack://T1JJ3T3L2/{SECRET}/x"))
    assert SECRET not in str(wrong.value.to_dict()) + caplog.text


def test_without_apprise_nothing_is_started_and_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    assert hooks(Settings()) == []
    wanted = Settings(notify_apprise="json://127.0.0.1:9", data_dir=tmp_path)
    with pytest.raises(ExtraMissing, match=r"apprise is not installed \(required by RESHARD_NOTIFY") as missing:
        local.up(wanted)
    assert "[apprise]" in missing.value.next_step
    assert list(tmp_path.iterdir()) == []


def test_apprise_is_loaded_only_where_it_is_asked_for() -> None:
    script = (
        "import sys, reshard.worker.control as control\n"
        "from reshard.worker.followers.notices import hooks\n"
        "from reshard.worker.settings import Settings\n"
        "for url in (None, 'json://127.0.0.1:9'):\n"
        "    hooks(Settings(notify_apprise=url)); print('apprise' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_a_hook_that_hangs_holds_up_nothing_else(
    store: JobStore, leases: Leases, wakes: Wakes, receiver: Receiver
) -> None:
    receiver.open.clear()
    control = Control(store, leases, Settings(notify_url=receiver.url))
    Notifier(store, hooks(Settings(notify_url=receiver.url))).listen()
    something_fails(store)
    thread = threading.Thread(target=control.run)
    thread.start()
    try:
        wait_for(lambda: receiver.posted, "the first try")
        job = store.submit(ask("other")).id
        wait_for(lambda: ("interactive", job) in wakes.sent, "the wake")
    finally:
        control.stop()
        thread.join(10)
    assert not thread.is_alive()


def test_a_notice_outlives_its_control_and_two_tell_it_once(
    tmp_path_factory: pytest.TempPathFactory, receiver: Receiver
) -> None:
    folder = tmp_path_factory.mktemp("notices")
    receiver.answers = [503]
    with Broker(folder) as broker, Machine(folder, broker.url, RESHARD_NOTIFY_URL=receiver.url) as machine:
        first = machine.control()
        with JobStore.at(broker.url) as store:
            Schedules(store).add(nightly(missed="skip"))
            store.redis.zincrby("reshard:schedules:due", -2 * DAY * 1000, "nightly")
            wait_for(lambda: "again in 10 s" in first.said(), "the first try")
            first.kill()
            second, third = machine.control(), machine.control()
            age(store, NOTIFY_FIRST)
            wait_for(lambda: len(receiver.posted) == 2, "the second try")
            wait_for(lambda: store.redis.hget(f"{PREFIX}totals", "notices:url:told") == b"1", "its being noted")
            Schedules(store).add(nightly("another", ask("another"), missed="skip"))
            store.redis.zincrby("reshard:schedules:due", -2 * DAY * 1000, "another")
            wait_for(lambda: len(receiver.posted) >= 3, "the next notice")
            wait_for(lambda: store.redis.hget(f"{PREFIX}totals", "notices:url:told") == b"2", "its being noted")
        assert len(set(receiver.ids)) == 2 and receiver.ids[0] == receiver.ids[1]
        assert [notice["name"] for notice in receiver.posted] == ["nightly", "nightly", "another"]
        said = first.said() + second.said() + third.said()
        assert "delivered by the url hook" in said
        assert SECRET not in said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("URL", f"ftp://host/{SECRET}"),
        ("URL", f"http:///{SECRET}"),
        ("COMMAND", f"'{SECRET}"),
        ("COMMAND", " "),
        ("APPRISE", " "),
    ],
)
def test_a_wrong_hook_is_said_without_its_secret(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.cache_clear()
    monkeypatch.setenv(f"RESHARD_NOTIFY_{name}", value)
    with pytest.raises(BadSetting, match=f"RESHARD_NOTIFY_{name}=") as wrong:
        settings()
    settings.cache_clear()
    assert SECRET not in str(wrong.value.to_dict())


def test_a_hooks_secret_is_not_printed() -> None:
    secrets = {"notify_url": f"http://x/{SECRET}", "notify_command": f"curl {SECRET}", "notify_apprise": SECRET}
    assert SECRET not in repr(Settings(**secrets))
