"""What a scrape says, over real HTTP, of a real broker."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

import pytest
import yaml
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from reshard.pipeline.copying.loop import Moved
from reshard.pipeline.errors import HubUnreachable, NoWeights, SourceNotFound
from reshard.pipeline.planning.model import Plan
from reshard.pipeline.stores.pace import RateLimitWindow
from reshard.worker.control import Control
from reshard.worker.fleet.fleet import Fleet
from reshard.worker.fleet.heartbeat import announce
from reshard.worker.fleet.rate_limit import WINDOWS, rate_limiters
from reshard.worker.followers import cursor
from reshard.worker.followers.counters import HOUR, HOURS, KEEP_MOVED, by_hour, moved_key
from reshard.worker.followers.cursor import Cursor
from reshard.worker.followers.notices import HOOKS, Command, Notifier
from reshard.worker.followers.schedules import LATE, SUCCESS, Schedules
from reshard.worker.queue.events import TOTALS
from reshard.worker.queue.jobs import JobStore, Process
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.pace import SEEN
from reshard.worker.queue.scripts import PREFIX, server_ms, transact
from reshard.worker.queue.states import JobState
from reshard.worker.settings import Settings
from tests.support.procs import Broker, Machine, busy, wait_for
from tests.worker.conftest import Clock, Wakes, ask, claimed, followed, planned, receipts
from tests.worker.followers.builders import DAY, begin, definition, fail, finish, jobs, nightly, rows
from tests.worker.followers.scrapes import page, port, scrape, serving

__all__ = ["port"]

ROOT = Path(__file__).parents[3]
OPERATIONS = ROOT / "docs/operations.md"
RULES, DASHBOARD = ROOT / "deploy/prometheus/rules.yml", ROOT / "deploy/grafana/reshard.json"


def now(store: JobStore) -> float:
    seconds, micros = store.redis.time()
    return seconds + micros / 1e6


def test_jobs_are_counted_by_state_and_failures_by_code(store: JobStore, leases: Leases, port: int) -> None:
    for number in range(3):
        fail(leases, store.submit(ask(f"bad{number}")).id)
    store.submit(ask("waits"))
    away = claimed(leases, store.submit(ask("again")).id, "plan")
    leases.again(away, HubUnreachable(endpoint="https://hub", what="refused").to_dict(), 10)
    store.redis.lpush(f"{PREFIX}bulk", "a wake")
    seen = scrape(port)
    assert {state: value for (state,), value in seen["reshard_jobs"].items() if value} == {
        "failed": 3, "queued": 1, "planning": 1,
    }  # fmt: skip
    assert seen["reshard_queue_length"] == {("interactive",): 0, ("bulk",): 1}
    assert seen["reshard_job_failures_total"] == {(NoWeights.code,): 3}
    assert seen["reshard_step_retries_total"] == {(HubUnreachable.code,): 1}

    # What became of jobs is still known when they are not.
    for job in store.recent([JobState.failed]):
        store.delete([job.id])
    seen = scrape(port)
    assert seen.one("reshard_jobs", "failed") == 0
    assert seen.one("reshard_jobs_ended_total", "failed") == 3
    assert seen.one("reshard_jobs_ended_total", "done") == 0


def test_the_last_day_is_counted_by_hour_and_then_forgotten(store: JobStore, leases: Leases) -> None:
    fail(leases, store.submit(ask("bad")).id)
    followed(store)
    now = server_ms(store.redis)
    hours = by_hour(store.redis, now)
    assert len(hours) == HOURS and hours[-1][0] <= now / 1000 < hours[-1][0] + 3600
    ended = Counter[str]()
    for _, one in by_hour(store.redis, now + HOUR):  # the hour may have changed since
        ended.update(one)
    assert ended == {"ended:failed": 1, f"failed:{NoWeights.code}": 1}
    assert by_hour(store.redis, now + (HOURS + 1) * HOUR)[0][1] == {}
    [*keys] = store.redis.keys(f"{TOTALS}:*")
    assert all(store.redis.ttl(key) > HOURS * 3600 for key in keys) and keys


def test_what_could_be_claimed_is_counted_by_queue_with_its_oldest_wait(
    store: JobStore, leases: Leases, port: int, plan: Plan
) -> None:
    queued = store.submit(ask("bulk").model_copy(update={"priority": "bulk"})).id
    store.submit(ask("asked"))
    planned(store, leases, plan, ask("begun").model_copy(update={"priority": "bulk"}))
    units = 1 + len(plan.groups)  # the check, and the groups
    store.redis.zincrby(f"{PREFIX}bulk:due", -5000, queued)
    seen = scrape(port)
    assert seen["reshard_claimable_units"] == {("interactive",): 1, ("bulk",): 1 + units}
    assert 5 <= seen.one("reshard_oldest_wait_seconds", "bulk") < 60
    claimed(leases, queued, "plan")
    seen = scrape(port)
    assert seen.one("reshard_claimable_units", "bulk") == units
    assert seen.one("reshard_oldest_wait_seconds", "bulk") < 5


def test_of_many_jobs_in_a_queue_one_unit_each_is_counted(store: JobStore, port: int) -> None:
    for number in range(2 * SEEN):
        store.submit(ask(f"job{number}"))
    assert scrape(port).one("reshard_claimable_units", "interactive") == 2 * SEEN


def test_times_of_jobs_steps_and_queues_are_histograms(store: JobStore, leases: Leases, port: int, plan: Plan) -> None:
    job = store.submit(ask()).id
    store.redis.hincrby(f"{PREFIX}job:{job}", "created", -20_000)  # it waits for 20 s already
    lease = claimed(leases, job, "plan")
    store.redis.hincrby(f"{PREFIX}job:{job}:units", "plan.since", -3000)
    store.redis.hincrby(f"{PREFIX}job:{job}", "started", -400_000)
    assert leases.planned(lease, plan) == "ok"
    store.cancel(job)
    seen = scrape(port)
    assert [seen.one("reshard_queued_seconds_bucket", most) for most in ("15.0", "60.0", "+Inf")] == [0, 1, 1]
    assert [seen.one("reshard_step_seconds_bucket", most, "plan") for most in ("1.0", "5.0", "+Inf")] == [0, 1, 1]
    assert 3 <= seen.one("reshard_step_seconds_sum", "plan") < 60
    buckets = [seen.one("reshard_job_seconds_bucket", most, "cancelled") for most in ("300.0", "900.0", "+Inf")]
    assert buckets == [0, 1, 1] and seen.one("reshard_job_seconds_count", "cancelled") == 1


def test_a_clock_that_is_put_back_makes_no_negative_time(store: JobStore, leases: Leases, port: int) -> None:
    job = store.submit(ask()).id
    store.redis.hincrby(f"{PREFIX}job:{job}", "created", 60_000)
    claimed(leases, job, "plan")
    seen = scrape(port)
    assert seen.one("reshard_queued_seconds_count") == seen.one("reshard_queued_seconds_bucket", "0.1") == 1
    assert seen.one("reshard_queued_seconds_sum") == 0


def test_processes_are_counted_by_release(store: JobStore, port: int) -> None:
    for name, version in (("here:1", "1"), ("here:2", "1"), ("here:3", "2")):
        announce(store.redis, Process(name, "worker", version, "here", 1, 2, 0.0, False))
    assert scrape(port)["reshard_build_info"] == {("worker", "1"): 2, ("worker", "2"): 1}


def test_a_process_that_does_not_tell_of_its_memory_has_none(store: JobStore, port: int) -> None:
    old, new = (Process(f"here:{pid}", "worker", "1", "here", pid, 2, 0.0, False) for pid in (1, 2))
    announce(store.redis, replace(new, memory=5, temporary=0))
    announce(store.redis, old)
    told = {name: value for name, value in asdict(old).items() if name not in {"memory", "temporary"}}
    store.redis.set(f"{PREFIX}process:{old.name}", json.dumps(told))  # as a release wrote it that did not know them
    seen = scrape(port)
    assert seen["reshard_process_memory_bytes"] == {("worker", new.name): 5}
    assert seen["reshard_process_temporary_bytes"] == {("worker", new.name): 0}
    assert old in store.processes()


def test_bytes_add_up_over_jobs(store: JobStore, leases: Leases, port: int, plan: Plan) -> None:
    for name in ("one", "two"):
        job = planned(store, leases, plan, ask(name))
        leases.release(claimed(leases, job, "check"), "not now")
        lease = leases.claim(job)
        assert lease is not None
        if lease.kind == "check":
            assert leases.done(lease, []) == "ok"
            lease = claimed(leases, job, "group:00000")
        assert leases.seal(lease, receipts(plan, lease.group), Moved(100, 20, 3)) == "ok"
        assert leases.seal(lease, receipts(plan, lease.group), Moved(100, 20, 3)) == "ok"  # its answer was lost
    seen = scrape(port)
    found = [seen.one(f"reshard_{what}_bytes_total") for what in ("read", "uploaded", "deduplicated")]
    assert found == [200, 40, 6]


def test_bytes_are_told_by_worker_while_it_lives_and_forgotten_later(
    store: JobStore, wakes: Wakes, port: int, plan: Plan
) -> None:
    for worker in ("here:1", "here:2", "gone:3"):
        leases = Leases(store, wakes, f"{worker}.77")  # one of its children
        job = planned(store, leases, plan, ask(worker.replace(":", "-")))
        for unit in ("check", "group:00000", "group:00001"):
            lease = claimed(leases, job, unit)
            if unit != "check":
                assert leases.seal(lease, receipts(plan, lease.group), Moved(100, 20, 3)) == "ok"
    for pid in (1, 2, 9):
        announce(store.redis, Process(f"here:{pid}", "worker", "1", "here", pid, 2, 0.0, False))
    moved = {"read": 200, "uploaded": 40, "deduplicated": 6}
    seen = scrape(port)
    assert seen["reshard_worker_bytes_total"] == {
        (what, worker): size for worker in ("here:1", "here:2") for what, size in moved.items()
    }
    kept = store.redis.keys(f"{PREFIX}process:*:moved")
    assert len(kept) == 3 and all(0 < store.redis.ttl(key) <= KEEP_MOVED for key in kept)


def test_the_calls_that_a_hub_takes_are_those_of_the_credential_with_least(store: JobStore, port: int) -> None:
    of = rate_limiters(store.redis, lambda: None, lambda: None)
    one, other = of("https://me:secret@hub credential-1"), of("https://me:secret@hub credential-2")
    one.update(RateLimitWindow("api", 700, 60, 1000, 300))
    other.update(RateLimitWindow("api", 900, 60, 1000, 300))
    other.update(RateLimitWindow("resolve", 5, 60, 5000, 300))
    one.before("api")
    for _ in range(2):
        other.refused()
    seen = scrape(port)
    assert seen["reshard_hub_calls_left"] == {("https://hub", "api"): 699, ("https://hub", "resolve"): 5}
    assert seen["reshard_hub_calls_limit"] == {("https://hub", "api"): 1000, ("https://hub", "resolve"): 5000}
    assert seen["reshard_hub_refused_calls_total"] == {("https://hub",): 2}
    assert "secret" not in page(port) and "credential" not in page(port)

    (window,) = store.redis.scan_iter(f"{PREFIX}pace:*:resolve")
    store.redis.hset(window, "ends", 1)
    assert scrape(port).one("reshard_hub_calls_left", "https://hub", "resolve") == 5000, "its window is over"


def test_a_hub_that_was_not_called_for_long_is_left_out(store: JobStore, port: int) -> None:
    one, other = (rate_limiters(store.redis, lambda: None, lambda: None)(f"https://{name} me") for name in "ab")
    one.update(RateLimitWindow("api", 700, 60, 1000, 300))
    (window,) = store.redis.zrange(WINDOWS, 0, -1)
    store.redis.zadd(WINDOWS, {window: 1})
    assert scrape(port)["reshard_hub_calls_left"] == {}
    other.update(RateLimitWindow("api", 700, 60, 1000, 300))
    assert store.redis.zcard(WINDOWS) == 1, "what is forgotten does not pile up"


def test_a_schedule_says_when_it_last_ended_well_and_what_it_owes(store: JobStore, leases: Leases, port: int) -> None:
    began = now(store)
    clock = Clock("2026-06-01T12:00")
    schedules = Schedules(store, clock)
    due = schedules.add(nightly())
    name = "reshard_schedule_{}_timestamp_seconds".format
    seen = scrape(port)
    assert seen[name("next")] == {("nightly",): due}
    for never in ("last_success", "last_run", "unmet", "trouble"):
        assert seen[name(never)] == {}

    clock.now = due + 1
    schedules.fire_due()
    seen = scrape(port)
    assert (seen.one(name("unmet"), "nightly"), seen.one(name("next"), "nightly")) == (due, due + DAY)
    assert seen.one(name("last_run"), "nightly") == due + 1

    (job,) = store.recent()
    fail(leases, job.id)
    clock.now = due + DAY
    schedules.fire_due()
    seen = scrape(port)
    assert seen.one(name("unmet"), "nightly") == due, "the first time that was not met"
    assert began <= seen.one(name("trouble"), "nightly") <= now(store)
    assert seen[name("last_success")] == {}

    finish(leases, store.recent()[0].id)
    seen = scrape(port)
    assert began <= seen.one(name("last_success"), "nightly") <= now(store)
    assert seen[name("unmet")] == seen[name("trouble")] == {}

    clock.now = due + 2 * DAY + LATE + 1
    schedules.fire_due()
    assert scrape(port).one(name("unmet"), "nightly") == due + 2 * DAY
    schedules.pause("nightly")
    seen = scrape(port)
    assert seen[name("next")] == seen[name("unmet")] == {}, "a paused one owes nothing"
    schedules.remove("nightly")
    assert not any(scrape(port)[name(what)] for what in ("last_success", "last_run", "next", "unmet", "trouble"))


def test_a_catalogs_models_are_counted_by_how_they_ended(store: JobStore, leases: Leases, port: int) -> None:
    began = now(store)
    catalogs = Cursor(store)
    begin(catalogs, definition(5, at_once=2))
    first, second = jobs(catalogs)
    entries = scrape(port)["reshard_catalog_entries"]
    assert (entries["mirror", "active"], entries["mirror", "todo"]) == (2, 3)
    fail(leases, first)
    finish(leases, second)
    while active := jobs(catalogs):
        finish(leases, active[0])
    seen = scrape(port)
    entries = {labels: value for labels, value in seen["reshard_catalog_entries"].items() if value}
    assert entries == {("mirror", "same"): 4, ("mirror", "failed"): 1}
    assert seen["reshard_catalog_failures"] == {("mirror", NoWeights.code): 1}
    assert seen["reshard_catalog_last_success_timestamp_seconds"] == {}
    assert ("mirror",) in seen["reshard_catalog_trouble_timestamp_seconds"]

    catalogs.retry("mirror")
    (again,) = jobs(catalogs)
    assert scrape(port)["reshard_catalog_failures"] == {("mirror", NoWeights.code): 0}
    finish(leases, again)
    jobs(catalogs)
    seen = scrape(port)
    assert began <= seen.one("reshard_catalog_last_success_timestamp_seconds", "mirror") <= now(store)
    assert seen["reshard_catalog_trouble_timestamp_seconds"] == {}


def test_a_catalog_that_is_expanded_again_is_counted_once(
    store: JobStore, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogs = Cursor(store)
    wanted = definition(2)
    catalogs.submit(wanted)
    run = catalogs.claim("mirror", "one")
    absent = SourceNotFound(repo="them/m0", endpoint="https://hub")
    (entry, _), other = rows(wanted)

    def died(*_: object) -> NoReturn:
        raise ConnectionError("a control that died after its first rows")

    with monkeypatch.context() as patched, pytest.raises(ConnectionError):
        patched.setattr(cursor, "FILL", 1)
        steps = iter([transact, died])
        patched.setattr("reshard.worker.followers.catalogs.transact", lambda *step: next(steps)(*step))
        catalogs.fill("mirror", run, "one", [(entry, absent), other])
    assert scrape(port).one("reshard_catalog_failures", "mirror", "source.not_found") == 1
    assert catalogs.fill("mirror", run, "one", [(entry, absent), other])
    seen = scrape(port)
    assert seen.one("reshard_catalog_failures", "mirror", "source.not_found") == 1
    assert {labels[1]: value for labels, value in seen["reshard_catalog_entries"].items() if value} == {
        "failed": 1, "active": 1,
    }  # fmt: skip


def test_a_pause_of_the_fleet_says_when_it_began(store: JobStore, port: int) -> None:
    fleet = Fleet(store)
    assert scrape(port)["reshard_fleet_paused_timestamp_seconds"] == {}
    fleet.pause("alice")
    assert now(store) - 60 < scrape(port).one("reshard_fleet_paused_timestamp_seconds") <= now(store) + 1
    fleet.resume()
    assert scrape(port)["reshard_fleet_paused_timestamp_seconds"] == {}


def test_processes_give_signs_of_life(store: JobStore, leases: Leases, port: int) -> None:
    began = now(store)
    assert scrape(port)["reshard_processes"] == {("control",): 0, ("worker",): 0}
    assert scrape(port)["reshard_heartbeat_timestamp_seconds"] == {}
    Control(store, leases, Settings()).look(listen=0.1)
    seen = scrape(port)
    assert seen["reshard_processes"] == {("control",): 1, ("worker",): 0}
    (mine,) = (process.name for process in store.processes())
    assert seen.one("reshard_process_memory_bytes", "control", mine) > 10_000_000
    assert seen["reshard_process_temporary_bytes"].keys() == {("control", mine)}
    assert began - 1 <= seen.one("reshard_heartbeat_timestamp_seconds", "control") <= now(store), "in whole seconds"
    assert seen.one("reshard_broker_memory_bytes") == pytest.approx(store.redis.info("memory")["used_memory"], rel=0.2)


def test_notices_are_counted_by_what_became_of_them(store: JobStore, leases: Leases, port: int) -> None:
    hook = Command(["false"])
    notifier = Notifier(store, [hook])
    notifier.listen()
    schedules = Schedules(store)
    schedules.add(nightly())
    fail(leases, schedules.run("nightly").job or "")
    seen = scrape(port)
    assert seen["reshard_notices_waiting"] == {("command",): 1, ("url",): 0, ("apprise",): 0}
    assert set(seen["reshard_notices_total"]) == {(h, r) for h in HOOKS for r in ("told", "failed", "dropped")}
    assert notifier.tell(hook) == "again"
    seen = scrape(port)
    assert seen.one("reshard_notices_total", "command", "failed") == 1
    assert seen.one("reshard_notices_waiting", "command") == 1


def cost(store: JobStore, port: int) -> tuple[int, int]:
    """The commands and the bytes that one scrape asks of the broker."""
    scrape(port)  # connections are there now
    before = store.redis.info("stats")
    scrape(port)
    after = store.redis.info("stats")
    return tuple(after[name] - before[name] for name in ("total_commands_processed", "total_net_output_bytes"))


def test_a_scrape_costs_the_same_however_many_jobs_there_are(store: JobStore, leases: Leases, port: int) -> None:
    Schedules(store).add(nightly())
    begin(Cursor(store), definition(5))
    few = cost(store, port)
    with store.redis.pipeline(transaction=False) as pipeline:
        for first in range(0, 100_000, 1000):
            members = {f"job{number:06}": number for number in range(first, first + 1000)}
            pipeline.zadd(f"{PREFIX}jobs", members)
            pipeline.zadd(f"{PREFIX}jobs:done", members)
        pipeline.hset(f"{PREFIX}catalog:mirror:ended", mapping={str(n): "{}" for n in range(10_000)})
        pipeline.execute()
    commands, answered = cost(store, port)
    assert commands == few[0]
    assert answered < few[1] + 500, "numbers with more digits, and no more of them"
    assert scrape(port).one("reshard_jobs", "done") == 100_000


def test_a_broker_that_is_away_is_said_and_found_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Broker(tmp_path_factory.mktemp("away")) as broker, serving(broker.url) as port:
        assert scrape(port).one("reshard_broker_up") == 1
        broker.kill()
        assert scrape(port) == {"reshard_broker_up": {(): 0}}
        broker.start()
        assert scrape(port).one("reshard_broker_up") == 1


@pytest.mark.parametrize(
    ("key", "figure"),
    [(TOTALS, "reshard_jobs"), (f"{PREFIX}schedules:success", "reshard_schedule_next_timestamp_seconds")],
)
def test_of_a_key_that_a_client_wrote_over_some_figures_are_left_out_and_the_broker_is_up(
    store: JobStore, port: int, key: str, figure: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = scrape(port)
    store.redis.set(key, "x")
    seen = scrape(port)
    assert seen.one("reshard_broker_up") == 1 and "reshard_broker_memory_bytes" in seen
    assert figure in whole and figure not in seen
    assert "a client overwrote one of their keys" in caplog.text


def test_a_total_that_is_no_number_is_none(store: JobStore, port: int) -> None:
    store.redis.hset(TOTALS, mapping={"read": "x", b"\xff": 1})
    seen = scrape(port)
    assert seen.one("reshard_broker_up") == 1 and seen.one("reshard_read_bytes_total") == 0


def test_a_broker_that_takes_no_more_data_is_up_and_not_writable(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Broker(tmp_path_factory.mktemp("full")) as broker, serving(broker.url) as port:
        with JobStore.at(broker.url) as store:
            store.redis.config_set("maxmemory", 1)
            seen = scrape(port)
            assert (seen.one("reshard_broker_up"), seen.one("reshard_broker_writable")) == (1, 0)
            store.redis.config_set("maxmemory", 0)
        assert scrape(port).one("reshard_broker_writable") == 1


def test_of_a_broker_that_a_script_holds_up_no_figure_is_told(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Broker(tmp_path_factory.mktemp("busy")) as broker, serving(broker.url) as port:
        with broker.client() as client, busy(client):
            assert scrape(port) == {"reshard_broker_up": {(): 0}}
        assert (scrape(port).one("reshard_broker_up"), scrape(port).one("reshard_broker_writable")) == (1, 1)


def test_two_controls_on_one_port_and_one_of_them_answers(tmp_path_factory: pytest.TempPathFactory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("metrics")
    with Broker(folder) as broker, Machine(folder, broker.url, RESHARD_METRICS_PORT=str(port)) as machine:
        first, second = machine.control(), machine.control()
        assert f"health and metrics on http://127.0.0.1:{port}" in first.said()
        assert f"cannot serve health on 127.0.0.1:{port}" in second.said()
        seen = wait_for(lambda: scrape(port), "the answer")
        assert seen.one("reshard_processes", "control") == 2
        assert second.alive()


def test_the_documentation_has_every_figure_and_no_other(store: JobStore, port: int) -> None:
    named = set(re.findall(r"\breshard_[a-z_]+\b", OPERATIONS.read_text()))
    assert named == {figure(family) for family in text_string_to_metric_families(page(port))}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Debian's prometheus, is not on PATH")
@pytest.mark.parametrize(
    "command", [("check", RULES), ("test", Path(__file__).with_name("rules.yml"))], ids=["check", "test"]
)
def test_prometheus_takes_the_alert_rules_and_they_fire_when_they_should(command: tuple[str, Path]) -> None:
    verb, file = command
    done = subprocess.run(["promtool", verb, "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alert_rules_have_a_summary_and_nothing_beside_it() -> None:
    """Without quotes a comma ends a summary, and what follows is a name that Prometheus refuses."""
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert [rule["alert"] for rule in rules if rule["annotations"].keys() != {"summary"}] == []


def test_alert_rules_ask_for_labels_that_figures_have(store: JobStore, leases: Leases, port: int) -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    begin(Cursor(store), definition(1))
    finish(leases, jobs(Cursor(store))[0])
    jobs(Cursor(store))
    clock = Clock("2026-06-01T12:00")
    clock.now = Schedules(store, clock).add(nightly())
    Schedules(store, clock).fire_due()
    families = list(text_string_to_metric_families(page(port)))
    labels = {figure(family): {name for sample in family.samples for name in sample.labels} for family in families}
    for rule in rules:
        figures = re.findall(r"(?:max by \((\w+)\) \()?(reshard_[a-z_]+)(?:{(.*?)})?", rule["expr"])
        said = {*re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])}
        assert said <= {by for by, _, _ in figures}, rule["alert"]
        for by, name, selector in figures:
            asked = {*filter(None, [by])} | set(re.findall(r'\w+(?=!?=")', selector))
            assert name in labels and asked <= labels[name], rule["alert"]


def test_the_dashboard_asks_for_figures_and_labels_that_there_are(store: JobStore, leases: Leases, port: int) -> None:
    begin(Cursor(store), definition(1))
    finish(leases, jobs(Cursor(store))[0])
    fail(leases, store.submit(ask("bad")).id)
    leases.again(claimed(leases, store.submit(ask()).id, "plan"), HubUnreachable(endpoint="h", what="x").to_dict(), 10)
    announce(store.redis, Process("here:1", "worker", "1", "here", 1, 2, 0.0, False, memory=1, temporary=1))
    limiter = rate_limiters(store.redis, lambda: None, lambda: None)("https://hub me")
    limiter.update(RateLimitWindow("api", 700, 60, 1000, 300))
    limiter.refused()
    store.redis.hset(moved_key("here:1"), mapping={"read": 1, "uploaded": 1})
    Schedules(store).add(nightly())
    store.redis.hset(SUCCESS, nightly().name, 1)
    scrape(port)  # the followers have heard of all this
    families = text_string_to_metric_families(page(port))
    labels = {s.name: set(s.labels) for family in families for s in family.samples}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            (name,) = set(re.findall(r"reshard_[a-z_]+", target["expr"]))
            by = set(re.findall(r"\w+", "".join(re.findall(r"by \((.*?)\)", target["expr"]))))
            assert by <= labels[name], panel["title"]
            assert {*re.findall(r"{{(\w+)}}", target["legendFormat"])} <= by, panel["title"]


def figure(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def test_a_kind_of_process_that_only_a_newer_release_knows_is_counted_too(store: JobStore, port: int) -> None:
    announce(store.redis, Process("gateway:1", "gateway", "9", "here", 1, 2, 0.0, False))
    assert scrape(port)["reshard_processes"] == {("worker",): 0, ("control",): 0, ("gateway",): 1}
