"""Pushes on a real broker: what reads a source that was pushed to, and that no push is lost or carried out twice."""

from __future__ import annotations

import pytest

from reshard.pipeline.catalogs.definition import Catalog, parse
from reshard.pipeline.errors import HubUnreachable
from reshard.pipeline.planning.model import Plan
from reshard.pipeline.request import Request
from reshard.worker.followers.cursor import Cursor
from reshard.worker.followers.pushes import WAITING, Pushes, Watch
from reshard.worker.followers.records import Definition
from reshard.worker.followers.schedules import Schedule, Schedules
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from tests.worker.conftest import ask, claimed, followed
from tests.worker.followers.builders import begin, definition, finish, jobs, rows

MAIN = {"refs/heads/main", "main"}


@pytest.fixture
def pushes(store: JobStore) -> Pushes:
    return Pushes(store)


def scheduled(name: str, request: Request) -> Schedule:
    return Schedule(name=name, cron="@daily", request=request)


def of_catalog() -> Watch:
    """What a catalog would submit for a model of its own."""
    return Watch(catalog="mirror", request=ask(priority="bulk"))


def test_what_reads_a_source_is_found_by_its_name_and_its_revision(store: JobStore, pushes: Pushes) -> None:
    at_dev = ask().model_copy(update={"source": ask().source.model_copy(update={"revision": "dev"})})
    for name, request in {"one": ask("a"), "dev": at_dev, "paused": ask("c")}.items():
        Schedules(store).add(scheduled(name, request))
    Schedules(store).pause("paused")
    assert [watch.schedule for watch in pushes.watches("Them/Model", MAIN)] == ["one"]
    assert [watch.schedule for watch in pushes.watches("them/model", {"dev"})] == ["dev"]
    assert pushes.watches("them/other", MAIN) == []


def test_models_of_catalogs_are_found_as_they_were_expanded_and_before(store: JobStore, pushes: Pushes) -> None:
    catalogs = Cursor(store)
    begin(catalogs, definition(3))
    waiting = Definition(name="waiting", text="name: waiting\nentries: [{repo: them/m1, to: us/other}]\n")
    assert catalogs.submit(waiting)  # nobody has expanded it
    never = Definition(name="never", text="name: never\nentries: [{repo: them/m1, to: us/third}, {repo: a/b, to: c/d}]")
    Schedules(store).add(Schedule(name="nightly", cron="@daily", catalog=never))
    found = {watch.catalog: str(watch.request.target) for watch in pushes.watches("them/m1", MAIN)}
    assert found == {"mirror": "us/m1", "waiting": "us/other", "never": "us/third"}
    catalogs.pause("mirror")
    catalogs.cancel("waiting")
    assert [watch.catalog for watch in pushes.watches("them/m1", MAIN)] == ["never"]


def test_models_of_a_catalog_that_could_not_be_expanded_are_found_as_its_file_names_them(
    store: JobStore, pushes: Pushes
) -> None:
    catalogs = Cursor(store)
    assert catalogs.submit(definition(2))
    catalogs.refuse("mirror", catalogs.claim("mirror", "token"), "token", HubUnreachable(endpoint="x", what="refused"))
    assert catalogs.get("mirror").state == "failed"
    assert [str(watch.request.target) for watch in pushes.watches("them/m1", MAIN)] == ["us/m1"]


@pytest.mark.parametrize(
    "spelled",
    [
        "Them/M1",
        "'them/m1'",
        '"th\\x65m/\\\n      m1"',
        ">-\n      them/m1",
        "!!binary dGhlbS9tMQ==",
        "!!str them/m1",
        "https://hub.example//them//%6d1",
        "hf://them/m1",
        "&model them/m1",
    ],
)
def test_a_name_in_a_file_is_found_however_it_is_spelled(store: JobStore, pushes: Pushes, spelled: str) -> None:
    text = f"name: never\nentries:\n  - repo: {spelled}\n    to: us/third\n  - {{repo: them/m2, to: us/second}}\n"
    never = Definition(name="never", text=text)
    Schedules(store).add(Schedule(name="nightly", cron="@daily", catalog=never))
    for _ in range(2):
        assert [str(watch.request.target) for watch in pushes.watches("them/m1", MAIN)] == ["us/third"]
    assert pushes.watches("them/m", MAIN) == []


def test_the_file_of_a_catalog_is_parsed_once_and_only_for_what_it_may_name(
    store: JobStore, pushes: Pushes, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = list[str]()

    def counted(text: str, name: str) -> Catalog:
        parsed.append(name)
        return parse(text, name)

    monkeypatch.setattr("reshard.worker.followers.pushes.parse", counted)
    entries = "".join(f"  - repo: them/m{number}\n" for number in range(10))
    text = f"name: large\ndefaults: {{to: 'us/{{name}}'}}\nentries:\n{entries}"
    large = Definition(name="large", text=text)
    Schedules(store).add(Schedule(name="nightly", cron="@daily", catalog=large))
    assert pushes.watches("them/other", MAIN) == [] and parsed == []
    found = [pushes.watches(f"them/m{number}", MAIN)[0] for number in range(10)]
    assert [str(watch.request.target) for watch in found] == [f"us/m{number}" for number in range(10)]
    assert parsed == ["large"]
    changed = large.model_copy(update={"text": text.replace("us/", "them/new-")})
    Schedules(store).remove("nightly")
    Schedules(store).add(Schedule(name="nightly", cron="@daily", catalog=changed))
    assert [str(watch.request.target) for watch in pushes.watches("them/m1", MAIN)] == ["them/new-m1"]
    assert parsed == ["large", "large"]


@pytest.mark.parametrize("kind", ["schedule", "catalog"])
def test_a_commit_is_submitted_once_however_often_it_is_told(
    store: JobStore, leases: Leases, pushes: Pushes, kind: str
) -> None:
    watch = of_catalog()
    if kind == "schedule":
        Schedules(store).add(scheduled("nightly", ask()))
        watch = Watch(schedule="nightly", request=ask())
    first = pushes.push(watch, "1" * 40)
    assert first.job is not None and first.outcome == "submitted"
    assert pushes.push(watch, "1" * 40).outcome == "repeat"
    assert pushes.push(watch, "2" * 40) == ("existed", first.job)  # it is planned from what is there then
    finish(leases, first.job)
    assert pushes.push(watch, "2" * 40).outcome == "repeat"
    assert [job.id for job in store.recent()] == [first.job]
    asked = store.get(first.job).request
    assert asked.asked_by == ("schedule nightly" if kind == "schedule" else "webhook") and asked.priority == "bulk"


@pytest.mark.parametrize("lost", ["", "event", "job"])
def test_a_push_while_its_job_is_at_work_is_carried_out_after_it(
    store: JobStore, leases: Leases, pushes: Pushes, plan: Plan, lost: str
) -> None:
    begin(Cursor(store), definition(1))
    (job,) = jobs(Cursor(store))
    assert leases.planned(claimed(leases, job, "plan"), plan) == "ok"
    (watch,) = pushes.watches("them/m0", MAIN)
    for commit in "12":
        assert pushes.push(watch, commit * 40) == ("waits", job)
    followed(store)
    assert store.redis.hlen(WAITING) == 1, "several wait as one"
    store.cancel(job)
    if lost == "job":
        store.delete([job])
    followed(store) if lost == "" else pushes.reconcile()
    again = store.recent()[0]
    assert again.id != job and again.state == "queued" and again.request.key() == watch.request.key()
    followed(store)
    assert store.redis.hlen(WAITING) == 0 and store.recent()[0].id == again.id


def test_the_entries_of_catalogs_are_looked_through_once_for_all_pushes_that_waited(
    store: JobStore, pushes: Pushes
) -> None:
    begin(Cursor(store), definition(6))
    watches = [pushes.watches(f"them/m{number}", MAIN)[0] for number in range(1, 6)]
    for number, watch in enumerate(watches):
        store.redis.hset(WAITING, f"gone{number} {watch.what}", watch.model_dump_json(exclude_defaults=True))
    before = store.redis.info("commandstats")["cmdstat_hscan"]["calls"]
    pushes.reconcile()
    assert store.redis.info("commandstats")["cmdstat_hscan"]["calls"] == before + 1
    assert store.redis.hlen(WAITING) == 0
    submitted = {str(job.request.target) for job in store.recent() if job.request.asked_by == "webhook"}
    assert submitted == {f"us/m{number}" for number in range(1, 6)}


def test_a_push_waits_for_another_requests_job_on_its_target_also_for_the_next(
    store: JobStore, leases: Leases, pushes: Pushes
) -> None:
    other = store.submit(ask(size=10**9)).id
    Schedules(store).add(scheduled("nightly", ask()))
    assert pushes.push(Watch(schedule="nightly", request=ask()), "1" * 40) == ("waits", other)
    finish(leases, other)
    third = store.submit(ask(size=2 * 10**9)).id
    followed(store)
    finish(leases, third)
    followed(store)
    newest = store.recent()[0]
    assert newest.request.asked_by == "schedule nightly" and newest.state == "queued"


@pytest.mark.parametrize("planned", [False, True])
def test_a_push_for_an_edited_schedule_waits_for_the_job_of_what_it_asked_for_before(
    store: JobStore, leases: Leases, pushes: Pushes, planned: bool
) -> None:
    schedules = Schedules(store)
    schedules.add(scheduled("nightly", ask("before")))
    job = schedules.run("nightly").job or ""
    if planned:
        claimed(leases, job, "plan")
    schedules.edit(scheduled("nightly", ask("after")))
    (watch,) = pushes.watches("them/model", MAIN)
    assert pushes.push(watch, "1" * 40) == ("waits", job)
    store.cancel(job)
    followed(store)
    newest = store.recent()[0]
    assert str(newest.request.target) == "us/after" and newest.state == "queued"
    assert store.redis.hlen(WAITING) == 0


def test_a_push_that_waits_goes_on_by_what_its_schedule_asks_for_by_then(
    store: JobStore, leases: Leases, pushes: Pushes
) -> None:
    schedules, other = Schedules(store), store.submit(ask("before", size=10**9)).id
    schedules.add(scheduled("nightly", ask("before")))
    assert pushes.push(Watch(schedule="nightly", request=ask("before")), "1" * 40) == ("waits", other)
    schedules.edit(scheduled("nightly", ask("after")))
    job = schedules.run("nightly").job or ""
    claimed(leases, job, "plan")
    store.cancel(other)
    followed(store)
    store.cancel(job)
    followed(store)
    newest = store.recent()[0]
    assert newest.id != job and str(newest.request.target) == "us/after" and newest.state == "queued"


def test_what_waits_for_a_schedule_that_was_removed_is_forgotten(
    store: JobStore, leases: Leases, pushes: Pushes
) -> None:
    Schedules(store).add(scheduled("nightly", ask()))
    job = Schedules(store).run("nightly").job
    assert job is not None
    lease = claimed(leases, job, "plan")
    assert pushes.push(Watch(schedule="nightly", request=ask()), "1" * 40) == ("waits", job)
    Schedules(store).remove("nightly")
    assert leases.fail(lease, {"code": "source", "message": "gone", "hint": "none", "facts": {}}) == "ok"
    followed(store)
    assert store.redis.hlen(WAITING) == 0 and [one.id for one in store.recent()] == [job]


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("stopped", ["catalog cancel", "catalog pause", "schedule pause"])
def test_what_waits_for_what_was_stopped_meanwhile_is_forgotten(
    store: JobStore, leases: Leases, pushes: Pushes, plan: Plan, stopped: str, lost: bool
) -> None:
    kind, act = stopped.split()
    follower = Cursor(store) if kind == "catalog" else Schedules(store)
    if isinstance(follower, Cursor):
        begin(follower, definition(1))
        (job,) = jobs(follower)
    else:
        follower.add(scheduled("mirror", rows(definition(1))[0][0].request or ask()))
        job = follower.run("mirror").job or ""
    assert leases.planned(claimed(leases, job, "plan"), plan) == "ok"
    (watch,) = pushes.watches("them/m0", MAIN)
    assert pushes.push(watch, "1" * 40) == ("waits", job)
    getattr(follower, act)("mirror")
    if act == "pause":
        store.cancel(job)
    pushes.reconcile() if lost else followed(store)
    assert store.redis.hlen(WAITING) == 0 and [one.id for one in store.recent()] == [job]
