"""What a client may do with jobs, and what it is told."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from reshard.client.operations.jobs import shown
from reshard.pipeline.copying.loop import Moved
from reshard.pipeline.errors import (
    Ambiguous,
    BrokerRefused,
    BrokerUnavailable,
    BrokerUnsupported,
    JobNotFound,
    SourceNotFound,
    TargetBusy,
    WrongState,
)
from reshard.pipeline.places import Hub
from reshard.pipeline.planning.model import Plan
from reshard.worker.queue import jobs
from reshard.worker.queue.jobs import JobStore, broker_errors, open_redis, submission, without_password
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.listing import ended
from reshard.worker.queue.record import Job
from reshard.worker.queue.scripts import PREFIX, job_key
from reshard.worker.queue.states import ENDED, JobState
from tests.support.procs import Broker
from tests.worker.conftest import another, ask, claimed, copied, planned, receipts, waiting_lines

NOT_FOUND = SourceNotFound(repo="them/model", endpoint="https://hub").to_dict()


def test_a_new_job_is_queued_due_and_announced(store: JobStore) -> None:
    submitted = store.submit(ask())
    assert not submitted.existed
    job = store.get(submitted.id)
    assert (job.state, job.request) == (JobState.queued, ask())
    assert waiting_lines(store, job.id) == ["reshard:interactive:due"]
    assert store.redis.lrange("reshard:bell", 0, -1) == [job.id.encode()]


def test_the_same_request_is_the_same_job_until_it_ends(store: JobStore) -> None:
    first = store.submit(ask())
    again = store.submit(ask().model_copy(update={"asked_by": "somebody else"}))
    assert (again.id, again.existed) == (first.id, True)
    store.cancel(first.id)
    assert store.submit(ask()).id != first.id


def test_one_job_at_a_time_has_a_target(store: JobStore) -> None:
    job = store.submit(ask(size=1000)).id
    with pytest.raises(TargetBusy, match=job):
        store.submit(ask(size=2000))
    with pytest.raises(TargetBusy, match=job):
        store.submit(ask(size=2000, branch="main"))
    assert store.submit(ask(size=2000, branch="other")).existed is False
    assert store.submit(ask(name="other", size=2000)).existed is False


def test_each_pull_request_has_a_place_of_its_own(store: JobStore) -> None:
    assert store.submit(ask(size=1000, pr=True)).id != store.submit(ask(size=2000, pr=True)).id
    assert store.submit(ask(size=1000)).existed is False


def test_a_target_without_an_endpoint_is_where_this_machine_says(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = ask().model_copy(update={"target": Hub(repo="us/model", endpoint="https://hub.example")})
    assert submission(ask())[2] != submission(elsewhere)[2]
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example/")
    assert submission(ask())[2] == submission(elsewhere)[2]


def test_a_job_is_found_by_the_start_of_its_id(store: JobStore) -> None:
    jobs = [store.submit(ask(name=f"m{i}")).id for i in range(40)]
    assert store.resolve(jobs[0]) == jobs[0]
    assert store.get(jobs[0][:-1]).id == jobs[0]
    with pytest.raises(JobNotFound):
        store.get("nosuchjob")
    with pytest.raises(JobNotFound):
        store.get("")
    shared = next(a[0] for a in jobs for b in jobs if a != b and a[0] == b[0])
    with pytest.raises(Ambiguous):
        store.get(shared)


def test_recent_jobs_come_newest_first_and_by_state(store: JobStore) -> None:
    jobs = [store.submit(ask(name=f"m{i}")).id for i in range(3)]
    store.cancel(jobs[1])
    assert {job.id for job in store.recent()} == set(jobs)
    assert [job.id for job in store.recent([JobState.cancelled])] == [jobs[1]]
    assert len(store.recent(limit=2)) == 2
    created = [job.created for job in store.recent()]
    assert created == sorted(created, reverse=True)
    assert store.counts()[JobState.queued] == 2


def test_progress_counts_sealed_bytes_and_those_on_their_way(store: JobStore, leases: Leases, plan: Plan) -> None:
    job = planned(store, leases, plan)
    claimed(leases, job, "check")
    lease = claimed(leases, job, "group:00000")
    leases.seal(lease, receipts(plan, 0)[:1], Moved())
    leases.renew(lease, 123, progress=True)
    seen = store.get(job)
    assert seen.bytes == sum(shard.size for shard in plan.shards)
    assert seen.bytes_done == receipts(plan, 0)[0].size + 123
    assert (seen.shards, seen.shards_done) == (len(plan.shards), 1)
    assert [(held.unit, held.worker) for held in seen.claims] == [("check", "worker-a"), ("group:00000", "worker-a")]


def test_the_plan_can_be_read_back_whole(store: JobStore, leases: Leases, plan: Plan) -> None:
    job = store.submit(ask()).id
    assert store.plan(job) is None
    leases.planned(claimed(leases, job, "plan"), plan)
    assert store.plan(job) == plan


def test_events_tell_the_life_of_a_job_and_can_be_followed(store: JobStore, leases: Leases, plan: Plan) -> None:
    job = planned(store, leases, plan)
    events = store.events(job)
    assert [e["state"] for _, e in events if e["kind"] == "state"] == ["queued", "planning", "copying"]
    last = events[-1][0]
    assert store.events(job, last) == []
    store.cancel(job)
    assert [e["state"] for _, e in store.events(job, last, wait=1)] == ["cancelled"]


def test_a_finished_job_frees_its_target_and_lets_its_details_go(store: JobStore, leases: Leases, plan: Plan) -> None:
    job = copied(store, leases, plan)
    publish = claimed(leases, job, "publish")
    assert leases.begin(publish) == "ok"
    assert leases.done(publish, {"commit": "abc", "ref": "main", "found": False}) == "ok"
    assert store.get(job).state == JobState.confirming
    assert leases.done(claimed(leases, job, "confirm"), [{"name": "read back", "result": "passed"}]) == "ok"
    done = store.get(job)
    assert done.state == JobState.done
    assert done.published == {"commit": "abc", "ref": "main", "found": False}
    assert done.confirmed == [{"name": "read back", "result": "passed"}]
    assert 0 < store.redis.pttl(job_key(job, "plan")) <= 3_600_000
    assert store.redis.pttl(job_key(job)) == -1
    assert store.submit(ask()).existed is False
    assert leases.claim(job) is None


@pytest.mark.parametrize("state", ["queued", "planning", "copying", "publishing"])
def test_cancel_ends_a_job_before_the_point_of_no_return(
    store: JobStore, leases: Leases, plan: Plan, state: str
) -> None:
    job = in_state(store, leases, plan, state).id
    assert store.cancel(job) == state
    assert store.get(job).state == JobState.cancelled
    assert leases.claim(job) is None
    assert waiting_lines(store, job) == []
    assert store.cancel(job) == JobState.cancelled


@pytest.mark.parametrize("state", ["committing", "confirming", "done", "failed", "published_unverified"])
def test_cancel_is_refused_after_it(store: JobStore, leases: Leases, plan: Plan, state: str) -> None:
    job = in_state(store, leases, plan, state).id
    with pytest.raises(WrongState, match=state):
        store.cancel(job)
    assert store.get(job).state == state
    with pytest.raises(JobNotFound):
        store.cancel("nosuchjob")


@pytest.mark.parametrize("state", ["queued", "copying", "committing", "confirming", "done"])
def test_retry_is_refused_where_there_is_nothing_to_retry(
    store: JobStore, leases: Leases, plan: Plan, state: str
) -> None:
    job = in_state(store, leases, plan, state).id
    with pytest.raises(WrongState, match=state):
        store.retry(job)


def test_retry_goes_on_with_what_was_left(store: JobStore, leases: Leases, plan: Plan) -> None:
    job = planned(store, leases, plan)
    assert leases.done(claimed(leases, job, "check"), []) == "ok"
    first = claimed(leases, job, "group:00000")
    leases.seal(first, receipts(plan, 0), Moved())
    leases.done(first, [[], []])
    leases.fail(claimed(leases, job, "group:00001"), NOT_FOUND)
    failed = store.get(job)
    assert failed.state == JobState.failed
    assert failed.error == NOT_FOUND
    assert store.retry(job) == JobState.failed
    again = store.get(job)
    assert (again.state, again.error) == (JobState.copying, None)
    assert again.shards_done == len(plan.groups[0].shards)
    assert claimed(leases, job, "group:00001").attempts == 1


def test_retry_anew_plans_again_and_keeps_the_receipts(store: JobStore, leases: Leases, plan: Plan) -> None:
    job = planned(store, leases, plan)
    claimed(leases, job, "check")
    lease = claimed(leases, job, "group:00000")
    leases.seal(lease, receipts(plan, 0), Moved())
    leases.fail(lease, NOT_FOUND)
    store.retry(job, anew=True)
    assert store.get(job).state == JobState.queued
    assert store.plan(job) is None
    assert leases.planned(claimed(leases, job, "plan"), plan) == "ok"
    seen = store.get(job)
    assert seen.shards_done == len(plan.groups[0].shards)
    assert seen.bytes_done == sum(receipt.size for receipt in receipts(plan, 0))
    assert set(leases.receipts(job, [r.shard for r in receipts(plan, 0)])) == {r.shard for r in receipts(plan, 0)}


def test_a_job_knows_which_commit_undid_its_own_until_it_goes_on(store: JobStore, leases: Leases) -> None:
    job = store.submit(ask()).id
    assert leases.fail(claimed(leases, job, "plan"), NOT_FOUND, unsure=False) == "ok"
    store.rolled_back(job, "c0ffee")
    assert (store.get(job).rolled_back, store.recent()[0].rolled_back) == ("c0ffee", "c0ffee")
    store.retry(job)
    assert store.get(job).rolled_back is None


def test_a_job_that_was_forgotten_is_not_brought_back_by_its_undoing(store: JobStore) -> None:
    with pytest.raises(JobNotFound):
        store.rolled_back("forgotten", "c0ffee")
    assert not store.redis.exists(job_key("forgotten"))


def test_retry_is_refused_while_another_job_has_the_target(store: JobStore, leases: Leases, plan: Plan) -> None:
    first = store.submit(ask()).id
    store.cancel(first)
    second = store.submit(ask()).id
    with pytest.raises(TargetBusy, match=second):
        store.retry(first)


@pytest.mark.parametrize(("state", "goes_on"), [("committing", "committing"), ("confirming", "confirming")])
def test_retry_of_an_unverified_publication_stays_behind_the_point_of_no_return(
    store: JobStore, leases: Leases, plan: Plan, state: str, goes_on: str
) -> None:
    job = copied(store, leases, plan)
    lease = claimed(leases, job, "publish")
    leases.begin(lease)
    if state == "confirming":
        leases.done(lease, {"commit": "abc", "ref": "main", "found": False})
        lease = claimed(leases, job, "confirm")
    leases.fail(lease, NOT_FOUND, unsure=True)
    assert store.get(job).state == JobState.published_unverified
    store.retry(job)
    assert store.get(job).state == goes_on
    with pytest.raises(WrongState):
        store.cancel(job)
    claimed(leases, job, lease.unit)


def test_what_was_published_is_confirmed_and_not_planned_again(store: JobStore, leases: Leases, plan: Plan) -> None:
    job = copied(store, leases, plan)
    lease = claimed(leases, job, "publish")
    leases.begin(lease)
    leases.done(lease, {"commit": "abc", "ref": "main", "found": False})
    leases.fail(claimed(leases, job, "confirm"), NOT_FOUND)
    store.retry(job, anew=True)
    assert store.get(job).state == JobState.confirming
    assert store.plan(job) == plan
    claimed(leases, job, "confirm")


def test_what_was_published_is_confirmed_or_nothing_where_a_retry_is_to_overwrite(
    store: JobStore, leases: Leases, plan: Plan
) -> None:
    job = copied(store, leases, plan)
    lease = claimed(leases, job, "publish")
    leases.begin(lease)
    leases.done(lease, {"commit": "abc", "ref": "main", "found": False})
    leases.fail(claimed(leases, job, "confirm"), NOT_FOUND)
    with pytest.raises(WrongState, match="only has to be confirmed; retry it without --overwrite"):
        store.retry(job, overwrite=True)
    assert store.get(job).state == JobState.published_unverified
    store.retry(job)
    assert store.get(job).state == JobState.confirming


@pytest.mark.parametrize("anew", [False, True])
def test_what_was_rolled_back_is_planned_again_and_not_confirmed(
    store: JobStore, leases: Leases, plan: Plan, anew: bool
) -> None:
    job = copied(store, leases, plan)
    lease = claimed(leases, job, "publish")
    leases.begin(lease)
    leases.done(lease, {"commit": "abc", "ref": "main", "found": False})
    leases.fail(claimed(leases, job, "confirm"), NOT_FOUND)
    store.rolled_back(job, "c0ffee")
    store.retry(job, anew=anew)
    again = store.get(job)
    assert (again.state, again.published, again.rolled_back) == (JobState.queued, None, None)
    assert store.plan(job) is None
    assert leases.planned(claimed(leases, job, "plan"), plan) == "ok"
    claimed(leases, job, "check")


def test_only_a_job_that_has_ended_can_be_deleted(store: JobStore) -> None:
    job = store.submit(ask()).id
    assert store.delete([job]) == []
    assert store.get(job).state == JobState.queued
    store.cancel(job)
    other = store.submit(ask("other")).id
    store.cancel(other)
    assert store.delete(["gone", job, other, job]) == [job, other], "those that it deleted, each once"
    with pytest.raises(JobNotFound):
        store.get(job)
    assert store.redis.keys("reshard:*job*" + job + "*") == []
    assert store.recent() == []


def test_a_job_can_be_written_as_json(store: JobStore, leases: Leases, plan: Plan) -> None:
    job = in_state(store, leases, plan, "publishing")
    data = shown(job).document()
    assert data["state"] == "publishing"
    assert data["request"]["target"]["repo"] == "us/model"
    assert data["claims"][0]["unit"] == "publish"


def test_a_broker_that_is_away_is_said_so_without_its_password() -> None:
    client = open_redis("redis://:secret@127.0.0.1:1/0", timeout=0.2)
    with pytest.raises(BrokerUnavailable) as caught, broker_errors("redis://:secret@127.0.0.1:1/0"):
        JobStore(client).submit(ask())
    assert "secret" not in str(caught.value)
    assert "127.0.0.1:1" in str(caught.value)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("redis://127.0.0.1:1/0", "redis://127.0.0.1:1/0"),
        ("rediss://user:secret@hub.example:1/0", "rediss://hub.example:1/0"),
        ("redis://hub.example/0?password=sec@ret", "redis://hub.example/0"),
        ("redis+socket:///run/x.sock?db=3&username=u&password=secret", "redis+socket:///run/x.sock?db=3"),
        ("unix://:secret@/run/x.sock?pass%77ord=secret", "unix:///run/x.sock"),
        ("rediss://hub.example/0?ssl_password=secret", "rediss://hub.example/0"),
    ],
)
def test_the_place_of_a_broker_is_told_without_its_password(url: str, told: str) -> None:
    assert without_password(url) == told


@pytest.mark.parametrize("url", ["redis+socket:///no/x.sock?password=secret", "redis://127.0.0.1:1/0?password=secret"])
def test_no_error_of_a_broker_holds_a_password_of_its_query(url: str) -> None:
    with pytest.raises(BrokerUnavailable) as caught, JobStore.at(url) as store:
        store.submit(ask())
    assert "secret" not in json.dumps(caught.value.to_dict())


@pytest.mark.parametrize("command", ["get", "script", "info"])
def test_a_broker_without_such_a_database_is_unsupported(broker: Broker, command: str) -> None:
    with (
        pytest.raises(BrokerUnsupported, match="/99 .* DB index") as caught,
        JobStore.at(broker.url[:-1] + "99") as store,
    ):
        {"get": store.recent, "script": lambda: store.submit(ask()), "info": store.check_server}[command]()
    assert "RESHARD_BROKER_URL" in caught.value.next_step


def test_what_is_no_redis_is_unsupported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listens, ThreadPoolExecutor(1) as beside:

        def greet() -> None:
            with listens.accept()[0] as caller:
                caller.recv(1000)
                caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                caller.recv(1000)

        beside.submit(greet)
        url = f"redis://127.0.0.1:{listens.getsockname()[1]}/0"
        with pytest.raises(BrokerUnsupported, match="HTTP/1.1 400 Bad Request"), JobStore.at(url) as store:
            store.check_server()


def test_the_hints_of_a_broker_name_the_settings_that_may_be_wrong(broker: Broker) -> None:
    with pytest.raises(BrokerUnavailable) as away, JobStore.at("redis://127.0.0.1:1/0") as store:
        store.recent()
    assert "RESHARD_BROKER_URL" in away.value.next_step
    with pytest.raises(BrokerRefused) as refused, JobStore.at(without_password(broker.url)) as store:
        store.recent()
    assert "RESHARD_BROKER_PASSWORD" in refused.value.next_step


def test_a_client_imports_neither_celery_nor_torch_nor_the_hub() -> None:
    code = (
        "import sys; import reshard.worker.queue.jobs, reshard.worker.broker, reshard.worker.settings;"
        "print([m for m in ('celery', 'kombu', 'torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def in_state(store: JobStore, leases: Leases, plan: Plan, state: str) -> Job:
    """A job brought into ``state`` by the steps that lead there."""
    if state == "queued":
        job = store.submit(ask()).id
    elif state == "planning":
        job = store.submit(ask()).id
        claimed(leases, job, "plan")
    elif state == "copying":
        job = planned(store, leases, plan)
    else:
        job = copied(store, leases, plan)
        lease = claimed(leases, job, "publish")
        if state == "failed":
            leases.fail(lease, NOT_FOUND)
        elif state != "publishing":
            leases.begin(lease)
            if state == "published_unverified":
                leases.fail(lease, NOT_FOUND, unsure=True)
            elif state != "committing":
                leases.done(lease, {"commit": "abc", "ref": "main", "found": False})
                if state == "done":
                    leases.done(claimed(another(store), job, "confirm"), [])
    found = store.get(job)
    assert found.state == state
    return found


def test_a_job_in_a_state_of_a_newer_release_is_not_cancelled(store: JobStore) -> None:
    job = store.submit(ask()).id
    store.redis.hset(job_key(job), "state", "auditing")
    with pytest.raises(WrongState, match="is auditing: this state is from a newer release"):
        store.cancel(job)
    assert store.get(job).state == "auditing"


def test_jobs_that_ended_are_found_by_state_and_age(store: JobStore) -> None:
    new, old, failed = (store.submit(ask(name=name)).id for name in ("new", "old", "failed"))
    for job in (new, old):
        store.cancel(job)
    store.redis.zincrby(f"{PREFIX}jobs:cancelled", -3_600_000, old)
    store.redis.zadd(f"{PREFIX}jobs:failed", {failed: 0})
    assert ended(store.redis, [JobState.cancelled], 3600) == [old]
    assert ended(store.redis, [JobState.cancelled], 0) == [old, new]
    assert ended(store.redis, [JobState.failed, JobState.cancelled], 60) == [old, failed]
    assert ended(store.redis, ENDED, 0, most=2) == [old, new]
    assert ended(store.redis, [JobState.done], 0) == []


def test_more_jobs_than_one_exchange_takes_are_deleted(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reshard.worker.queue.scripts.BATCH", 2)
    jobs = [store.submit(ask(name=name)).id for name in "abcde"]
    for job in jobs:
        store.cancel(job)
    assert store.delete(jobs) == jobs
    assert store.recent() == []


def test_a_search_looks_at_so_many_jobs_and_says_where_it_goes_on(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "SEARCHED", 4)
    ids = [store.submit(ask(f"{'odd' if number % 2 else 'even'}-{number}")).id for number in range(10)]
    for key in (f"{PREFIX}jobs", f"{PREFIX}jobs:queued"):  # jobs of one millisecond are listed by their ids
        last = store.redis.zscore(key, ids[-1])
        store.redis.zadd(key, {job: last - number for number, job in enumerate(reversed(ids))})
    takes = lambda job: "odd" in str(job.request.target)  # noqa: E731 -- of one line
    found, after, looks = list[str](), None, 0
    while looks == 0 or after:
        page = store.listed([], 3, after, takes=takes)
        found, after, looks = found + [job.id for job in page.jobs], page.next, looks + 1
        assert len(page.jobs) <= 2, "of four jobs"
    assert found == ids[::-2] and looks == 3
    assert [job.id for job in store.listed([], 1, takes=takes).jobs] == ids[-1:]
    assert store.chosen([JobState.queued], 0, 0, takes, 10) == ids[::-2]
    assert store.chosen([JobState.queued], 0, 0, None, 3) == ids[:-4:-1]
    assert store.chosen([JobState.queued], 0, 3600, None, 3) == store.chosen([], 1e10, 0, takes, 3) == []


def test_what_is_left_are_jobs_that_have_not_ended_and_do_not_wait_for_the_window(
    store: JobStore, leases: Leases
) -> None:
    assert store.left() == 0
    queued, ended, held = (store.submit(ask(name)).id for name in ("queued", "ended", "held"))
    store.cancel(ended)
    store.redis.zadd(f"{PREFIX}held", {held: 0})
    assert store.left() == 1
    claimed(leases, queued, "plan")
    assert store.left() == 1
    assert store.left(["reshard:bulk"]) == 0
    waits = store.submit(ask("waits", priority="bulk")).id
    store.redis.zadd(f"{PREFIX}held", {waits: 0})  # and is due as well
    assert store.left(["reshard:interactive"]) == 1
