"""Cursor on a real broker: what the cursor admits, and how a run ends whatever stops it on the way."""

from __future__ import annotations

import threading
from dataclasses import asdict

import pytest

from reshard.client.operations.catalogs import told
from reshard.pipeline.errors import (
    BadCatalog,
    CatalogNotFound,
    CatalogState,
    HubUnreachable,
    NoWeights,
    ReshardError,
    SourceNotFound,
    UsageError,
)
from reshard.pipeline.planning.model import Plan
from reshard.pipeline.publishing.commit import Published
from reshard.worker.followers import catalogs as kept
from reshard.worker.followers import cursor
from reshard.worker.followers.catalogs import key
from reshard.worker.followers.cursor import Cursor
from reshard.worker.followers.expander import EXPAND_AGAIN, Expander
from reshard.worker.followers.records import Definition
from reshard.worker.followers.schedules import Schedule, Schedules
from reshard.worker.followers.spending import DAY, spent
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.scripts import PREFIX, server_ms
from reshard.worker.queue.states import JobState
from tests.support.procs import Broker, wait_for
from tests.worker.conftest import ask, claimed, copied, followed
from tests.worker.followers.builders import Rows, begin, counts, definition, fail, finish, jobs, rows


@pytest.fixture
def catalogs(store: JobStore) -> Cursor:
    return Cursor(store)


def test_no_more_than_so_many_are_at_work_and_all_get_their_turn(
    store: JobStore, catalogs: Cursor, leases: Leases
) -> None:
    begin(catalogs, definition(5, at_once=2))
    seen: list[str] = []
    while (active := jobs(catalogs)) and len(seen) < 10:
        assert len(active) <= 2
        assert sum(store.counts()[state] for state in JobState if not state.ended) <= 2
        seen.append(active[0])
        finish(leases, active[0])
    assert len(set(seen)) == 5
    ended = catalogs.get("mirror")
    assert (ended.state, counts(ended), ended.todo) == ("done", {"same": 5}, 0)
    assert store.redis.smembers(f"{PREFIX}catalogs:looked_at") == set()
    [request] = {job.request.priority for job in store.recent()}
    assert request == "bulk"


def test_jobs_of_a_catalog_say_that_they_recur_where_that_matters(catalogs: Cursor, store: JobStore) -> None:
    wanted = definition(2)
    text = wanted.text.replace("- repo: them/m1", "- {repo: them/m1, overwrite: true}")
    begin(catalogs, wanted.model_copy(update={"text": text}))
    requests = [store.get(job).request for job in jobs(catalogs)]
    assert {(request.options.overwrite, request.recurring) for request in requests} == {(False, False), (True, True)}


def test_what_did_not_change_needs_no_job(catalogs: Cursor, leases: Leases, store: JobStore) -> None:
    wanted = definition(3)
    begin(catalogs, wanted)
    made, *_ = active = jobs(catalogs)
    for job in active:
        finish(leases, job, found=True)
    assert jobs(catalogs) == []

    begin(catalogs, wanted)  # the next night
    assert counts(catalogs.get("mirror")) == {"unchanged": 3}
    assert catalogs.get("mirror").state == "done"
    assert len(store.recent()) == 3

    assert catalogs.standings("mirror", [entry for entry, _ in rows(wanted)]) == ["unchanged"] * 3
    assert catalogs.standings("mirror", [rows(wanted, source="s2")[0][0]]) == ["source"]
    assert catalogs.standings("mirror", [rows(wanted, target="t2")[0][0]]) == ["target"]
    assert catalogs.standings("other", [rows(wanted)[0][0]]) == ["unknown"]

    # a new commit of one source, and somebody else's in another one's target
    new_source, new_target = rows(wanted, source="s2"), rows(wanted, target="t2")
    begin(catalogs, wanted, [new_source[0], new_target[1], rows(wanted)[2]])
    assert len(jobs(catalogs)) == 2
    assert counts(catalogs.get("mirror")) == {"unchanged": 1}
    assert made in {job.id for job in store.recent()}


def test_what_a_run_no_longer_asks_for_is_not_remembered(catalogs: Cursor, leases: Leases, store: JobStore) -> None:
    for count in (3, 1, 3):
        begin(catalogs, definition(count))
        for job in jobs(catalogs):
            finish(leases, job)
        assert jobs(catalogs) == []
        assert store.redis.hlen(key("mirror", "record")) == count


def test_of_a_large_catalog_only_what_was_not_unchanged_is_remembered(
    catalogs: Cursor, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = definition(3)
    begin(catalogs, wanted)
    for job in jobs(catalogs):
        finish(leases, job)
    assert jobs(catalogs) == []
    begin(catalogs, wanted)
    monkeypatch.setattr(kept, "NIGHT_WHOLE", 2)
    broken: Rows = [(rows(wanted)[0][0], NoWeights(place="them/m0", found=""))]
    begin(catalogs, wanted, [*broken, *rows(wanted)[1:]])
    nights = [sorted(night.values()) for _, night in catalogs.nights("mirror")]
    assert nights == [[("failed", NoWeights.code)], [("unchanged", "")] * 3, [("same", "")] * 3]


@pytest.mark.parametrize("by", ["hand", "schedule"])
def test_of_runs_before_the_last_nothing_is_kept(catalogs: Cursor, store: JobStore, by: str) -> None:
    wanted, schedules = definition(1), Schedules(store)
    schedules.add(Schedule(name="nightly", cron="@daily", catalog=wanted))
    failed: Rows = [(rows(wanted)[0][0], NoWeights(place="them/m0", found=""))]
    for number in range(kept.NIGHTS + 2):
        if by == "hand":
            assert catalogs.submit(wanted)
        else:
            assert schedules.run("nightly").outcome == "fired"
        run = catalogs.claim("mirror", f"control {number}")
        assert catalogs.fill("mirror", run, f"control {number}", failed)
    listed = {f"{key('mirror')}:night:{round(began * 1000)}".encode() for began, _ in catalogs.nights("mirror")}
    assert len(catalogs.nights("mirror")) == kept.NIGHTS
    assert {*store.redis.scan_iter(f"{key('mirror')}:night:*")} == listed
    catalogs.remove("mirror")
    assert [*store.redis.scan_iter(f"{key('mirror')}*")] == []


def test_a_commit_of_ours_is_what_the_target_must_still_be_at(catalogs: Cursor, leases: Leases) -> None:
    wanted = definition(1)
    begin(catalogs, wanted)
    (job,) = jobs(catalogs)
    lease = claimed(leases, job, "plan")
    assert leases.done(lease, {**asdict(Published("ours", "main", False)), "source": "s1"}) == "ok"
    assert jobs(catalogs) == []
    begin(catalogs, wanted, rows(wanted, target="t1"))
    assert len(jobs(catalogs)) == 1  # the list shows what it was before, so it is asked
    (job,) = jobs(catalogs)
    finish(leases, job)
    assert jobs(catalogs) == []
    begin(catalogs, wanted, rows(wanted, target="t1"))
    assert counts(catalogs.get("mirror")) == {"unchanged": 1}


def test_a_job_that_read_an_older_source_is_no_reason_to_leave_the_newer_one_out(
    catalogs: Cursor, leases: Leases
) -> None:
    wanted = definition(1)
    begin(catalogs, wanted)
    (job,) = jobs(catalogs)
    finish(leases, job, source="s0")  # somebody's job of the same request, planned before the source moved
    assert jobs(catalogs) == []
    begin(catalogs, wanted)
    assert len(jobs(catalogs)) == 1
    finish(leases, jobs(catalogs)[0])
    assert jobs(catalogs) == []
    begin(catalogs, wanted)
    assert counts(catalogs.get("mirror")) == {"unchanged": 1}


def test_a_commit_whose_maker_died_is_the_jobs_own(
    store: JobStore, catalogs: Cursor, leases: Leases, plan: Plan
) -> None:
    wanted = definition(1)
    begin(catalogs, wanted)
    (job,) = jobs(catalogs)
    assert copied(store, leases, plan, rows(wanted)[0][0].request) == job
    # by the next worker, in the target's history
    found = {**asdict(Published("ours", "main", found=True)), "source": "s1"}
    publish = claimed(leases, job, "publish")
    assert leases.begin(publish) == "ok"
    assert leases.done(publish, found) == "ok"
    assert leases.done(claimed(leases, job, "confirm"), [{"name": "read back"}]) == "ok"
    assert jobs(catalogs) == []
    assert counts(catalogs.get("mirror")) == {"published": 1}
    begin(catalogs, wanted, rows(wanted, target="ours"))
    assert counts(catalogs.get("mirror")) == {"unchanged": 1}


@pytest.mark.parametrize("option", ["pr: true", "branch: cut", "size: 1MB"])
def test_other_options_branches_and_pull_requests_are_always_asked(
    catalogs: Cursor, leases: Leases, option: str
) -> None:
    begin(catalogs, definition(1))
    (job,) = jobs(catalogs)
    finish(leases, job)
    assert jobs(catalogs) == []
    other = definition(1)
    other = other.model_copy(update={"text": other.text.replace("defaults: {", f"defaults: {{{option}, ")})
    for _ in range(2 if "size" not in option else 1):
        begin(catalogs, other)
        (job,) = jobs(catalogs)
        finish(leases, job)
        assert jobs(catalogs) == []


def test_failures_are_grouped_by_code_and_retried_by_code(catalogs: Cursor, leases: Leases, store: JobStore) -> None:
    found = rows(definition(4))
    found[0] = (found[0][0], SourceNotFound(repo="them/m0", endpoint="https://hub"))
    begin(catalogs, definition(4), found)
    first, second, third = jobs(catalogs)
    fail(leases, first)
    fail(leases, second)
    finish(leases, third)
    assert jobs(catalogs) == []
    seen = catalogs.get("mirror")
    assert (seen.state, seen.note) == ("failed", "3 of 4 models failed")
    assert {code: len(group) for code, group in told(seen).failures().items()} == {
        "source.no_weights": 2,
        "source.not_found": 1,
    }

    assert catalogs.retry("mirror", only="target.conflict") == 0
    assert catalogs.get("mirror").state == "failed"
    assert catalogs.retry("mirror", only="source.no_weights") == 2
    assert jobs(catalogs) == [first, second]  # they go on, with what they had copied
    assert store.get(first).state == JobState.queued
    finish(leases, first)
    finish(leases, second)
    assert jobs(catalogs) == []
    assert counts(catalogs.get("mirror")) == {"failed": 1, "same": 3}
    assert catalogs.retry("mirror") == 1
    assert len(jobs(catalogs)) == 1


def test_a_run_with_failures_is_not_done_and_an_older_release_finds_it_as_it_knows_it(
    catalogs: Cursor, leases: Leases, store: JobStore
) -> None:
    begin(catalogs, definition(2))
    first, second = jobs(catalogs)
    finish(leases, first)
    fail(leases, second)
    assert jobs(catalogs) == []
    assert store.redis.hget(f"{PREFIX}catalog:mirror", "state") == b"done"
    assert catalogs.get("mirror").state == "failed"
    assert catalogs.get("mirror").note == "1 of 2 models failed"
    with pytest.raises(CatalogState, match="catalog mirror is failed: only a running catalog can be paused"):
        catalogs.pause("mirror")
    assert catalogs.retry("mirror") == 1
    assert catalogs.get("mirror").note is None
    (job,) = jobs(catalogs)
    finish(leases, job)
    assert jobs(catalogs) == []
    assert (catalogs.get("mirror").state, catalogs.get("mirror").note) == ("done", None)


def test_a_retry_whose_admission_was_lost_is_admitted(catalogs: Cursor, leases: Leases, store: JobStore) -> None:
    begin(catalogs, definition(1))
    (job,) = jobs(catalogs)
    fail(leases, job)
    assert jobs(catalogs) == []
    assert catalogs.retry("mirror") == 1
    store.retry(job)  # and here a control died
    assert jobs(catalogs) == [job]


def test_too_many_failures_stop_it_and_resume_forgives_them(catalogs: Cursor, leases: Leases) -> None:
    begin(catalogs, definition(5, at_once=1, max_failures=1))
    for _ in range(2):
        (job,) = jobs(catalogs)
        fail(leases, job)
    assert jobs(catalogs) == []
    seen = catalogs.get("mirror")
    assert (seen.state, seen.todo, seen.note) == ("stopped", 3, "more than 1 model failed")
    catalogs.resume("mirror")
    assert len(jobs(catalogs)) == 1


@pytest.mark.parametrize("most", [1, 2])
def test_models_that_fail_before_they_have_a_job_count_among_too_many_failures(
    catalogs: Cursor, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(cursor, "FILL", 2)
    absent = SourceNotFound(repo="them/m", endpoint="https://hub")
    wanted = definition(5, max_failures=most)
    found = [(entry, absent if number in {0, 4} else None) for number, (entry, _) in enumerate(rows(wanted))]
    assert catalogs.submit(wanted)
    run = catalogs.claim("mirror", "one")

    def died(*_: object) -> None:
        raise ConnectionError("an expander that died after its first rows")

    with monkeypatch.context() as patched, pytest.raises(ConnectionError):
        steps = iter([kept.transact, died])
        patched.setattr(kept, "transact", lambda *step: next(steps)(*step))
        catalogs.fill("mirror", run, "one", found)
    assert catalogs.fill("mirror", run, "one", found)
    assert len(jobs(catalogs)) == (0 if most == 1 else 3)
    if most == 1:
        seen = catalogs.get("mirror")
        assert (seen.state, seen.todo, seen.note) == ("stopped", 3, "more than 1 model failed")
        catalogs.resume("mirror")
        assert len(jobs(catalogs)) == 3


def test_bytes_that_were_read_stop_it(catalogs: Cursor, leases: Leases, store: JobStore) -> None:
    begin(catalogs, definition(3, at_once=1, max_bytes=1000))
    (job,) = jobs(catalogs)
    store.redis.hset(f"{PREFIX}job:{job}", "read", 1000)
    finish(leases, job)
    assert jobs(catalogs) == []
    seen = catalogs.get("mirror")
    assert (seen.state, seen.todo, seen.note) == ("stopped", 2, "read limit of 1.0 kB reached")


def test_paused_it_admits_nothing_and_notes_what_ends(catalogs: Cursor, leases: Leases) -> None:
    begin(catalogs, definition(3, at_once=1))
    (job,) = jobs(catalogs)
    assert catalogs.pause("mirror")
    finish(leases, job)
    assert jobs(catalogs) == []
    assert (catalogs.get("mirror").state, catalogs.get("mirror").todo) == ("paused", 2)
    assert not catalogs.pause("mirror")
    assert catalogs.resume("mirror") and not catalogs.resume("mirror")
    assert len(jobs(catalogs)) == 1


def test_a_limit_that_is_reached_in_a_pause_stops_it_once_it_is_resumed(catalogs: Cursor, leases: Leases) -> None:
    begin(catalogs, definition(3, at_once=1, max_failures=0))
    (job,) = jobs(catalogs)
    catalogs.pause("mirror")
    fail(leases, job)
    catalogs.reconcile()
    catalogs.resume("mirror")
    catalogs.reconcile()
    assert jobs(catalogs) == []
    seen = catalogs.get("mirror")
    assert (seen.state, seen.todo, seen.note) == ("stopped", 2, "more than 0 models failed")
    catalogs.resume("mirror")
    assert len(jobs(catalogs)) == 1


def test_what_was_read_in_a_pause_counts_and_is_forgiven_by_a_retry(
    store: JobStore, catalogs: Cursor, leases: Leases
) -> None:
    begin(catalogs, definition(3, at_once=1, max_bytes=1000))
    (job,) = jobs(catalogs)
    catalogs.pause("mirror")
    store.redis.hset(f"{PREFIX}job:{job}", "read", 1000)
    fail(leases, job)
    catalogs.reconcile()
    catalogs.resume("mirror")
    assert jobs(catalogs) == []
    assert catalogs.get("mirror").note == "read limit of 1.0 kB reached"
    assert catalogs.retry("mirror") == 1
    assert jobs(catalogs) == [job]


def test_paused_while_it_is_expanded_it_is_expanded_once_it_is_resumed(catalogs: Cursor) -> None:
    wanted = definition(3, at_once=1)
    catalogs.submit(wanted)
    run = catalogs.claim("mirror", "here")
    catalogs.pause("mirror")
    assert (catalogs.expanding(), catalogs.claim("mirror", "here")) == ([], "")
    assert not catalogs.fill("mirror", run, "here", rows(wanted)), "what was asked meanwhile is dropped"
    with pytest.raises(CatalogState, match="catalog mirror is paused: it has not been expanded yet"):
        catalogs.retry("mirror")
    assert jobs(catalogs) == [] and catalogs.get("mirror").state == "paused"

    catalogs.resume("mirror")
    assert catalogs.expanding() == ["mirror"]
    assert catalogs.fill("mirror", catalogs.claim("mirror", "here"), "here", rows(wanted))
    assert len(jobs(catalogs)) == 1
    catalogs.pause("mirror")
    catalogs.resume("mirror")
    assert catalogs.get("mirror").state == "running", "it is expanded once"


def test_what_was_paused_while_it_was_expanded_can_be_cancelled_and_submitted_again(catalogs: Cursor) -> None:
    catalogs.submit(definition(1))
    catalogs.pause("mirror")
    assert catalogs.cancel("mirror") == 0
    begin(catalogs, definition(1))
    assert len(jobs(catalogs)) == 1


@pytest.mark.parametrize("well", [True, False])
def test_resumed_after_its_last_job_it_is_done(catalogs: Cursor, leases: Leases, store: JobStore, well: bool) -> None:
    begin(catalogs, definition(1))
    (job,) = jobs(catalogs)
    catalogs.pause("mirror")
    (finish if well else fail)(leases, job)
    assert jobs(catalogs) == []
    assert catalogs.get("mirror").state == "paused"
    catalogs.resume("mirror")
    followed(store)
    seen = catalogs.get("mirror")
    assert (seen.state, seen.success is not None) == ("done" if well else "failed", well)
    assert store.redis.hexists(f"{PREFIX}catalogs:trouble", "mirror") != well
    assert store.redis.smembers(f"{PREFIX}catalogs:looked_at") == set()
    assert catalogs.submit(definition(2))


def test_cancelled_its_jobs_are_too_and_the_next_submission_begins_anew(catalogs: Cursor, store: JobStore) -> None:
    begin(catalogs, definition(5, at_once=2))
    assert len(jobs(catalogs)) == 2
    assert catalogs.cancel("mirror") == 2
    assert jobs(catalogs) == []
    assert counts(catalogs.get("mirror")) == {"cancelled": 2}
    assert store.redis.smembers(f"{PREFIX}catalogs:looked_at") == set()
    with pytest.raises(CatalogState):
        catalogs.cancel("mirror")
    begin(catalogs, definition(1))
    assert catalogs.get("mirror").entries == 1


def test_a_job_that_somebody_else_asked_for_outlives_a_cancel(
    catalogs: Cursor, leases: Leases, store: JobStore
) -> None:
    wanted = definition(2)
    request = rows(wanted)[0][0].request
    assert request is not None
    mine = store.submit(request.model_copy(update={"asked_by": "ada", "priority": "interactive"})).id
    begin(catalogs, wanted)
    first, other = jobs(catalogs)
    assert first == mine
    assert catalogs.cancel("mirror") == 1
    assert jobs(catalogs) == [mine] and store.get(other).state == JobState.cancelled
    finish(leases, mine)
    assert jobs(catalogs) == []
    assert counts(catalogs.get("mirror")) == {"same": 1, "cancelled": 1}


def test_under_way_the_same_file_is_the_same_run_and_another_is_refused(catalogs: Cursor) -> None:
    assert catalogs.submit(definition(2))
    assert not catalogs.submit(definition(2))
    for state in ("expanding", "paused"):
        another = f"catalog mirror is {state}: its current run uses another version of the file"
        with pytest.raises(CatalogState, match=another) as refused:
            catalogs.submit(definition(3))
        assert refused.value.to_dict()["hint"].startswith("cancel it with `reshard catalog cancel mirror`, or see")
        if state == "expanding":
            catalogs.pause("mirror")
    with pytest.raises(BadCatalog):
        catalogs.submit(Definition(name="bad", text="name: ["))
    for unknown in (catalogs.get, catalogs.pause, catalogs.resume, catalogs.cancel, catalogs.retry):
        with pytest.raises(CatalogNotFound):
            unknown("nobody")


def test_under_way_the_same_file_with_other_limits_goes_on_by_those(catalogs: Cursor, leases: Leases) -> None:
    begin(catalogs, definition(4, at_once=1, asked_by="ada"))
    (first,) = jobs(catalogs)
    since = catalogs.get("mirror").since
    assert not catalogs.submit(definition(4, at_once=3, max_failures=0, asked_by="bob"))
    assert len(jobs(catalogs)) == 3
    seen = catalogs.get("mirror")
    assert (seen.since, seen.definition) == (since, definition(4, at_once=3, max_failures=0, asked_by="ada"))
    fail(leases, first)
    jobs(catalogs)
    assert catalogs.get("mirror").state == "stopped"


def test_no_step_of_a_run_reads_the_file_of_its_catalog(store: JobStore, catalogs: Cursor, leases: Leases) -> None:
    """It may have megabytes, and what handles an event must not take longer for them."""
    begin(catalogs, definition(3, at_once=1, max_failures=1, asked_by="ada"))
    file = store.redis.hget(key("mirror"), "definition") or b""
    store.redis.hset(key("mirror"), "definition", "what nobody reads")
    seen = list[str]()
    for _ in range(2):
        followed(store)
        catalogs.reconcile()
        seen += catalogs.at_work("mirror")
        fail(leases, seen[-1])
    followed(store)
    store.redis.hset(key("mirror"), "definition", file)
    assert len(set(seen)) == 2
    assert (catalogs.get("mirror").state, catalogs.get("mirror").todo) == ("stopped", 1)
    days = [server_ms(store.redis) // 1000 // DAY - back for back in (0, 1)]
    assert {(one.submitter, one.catalog) for one in spent(store.redis, days)} == {("ada", "mirror")}


def test_removed_it_leaves_nothing_but_its_jobs(catalogs: Cursor, leases: Leases, store: JobStore) -> None:
    before = set(store.redis.scan_iter(f"{PREFIX}catalog*"))
    begin(catalogs, definition(2, at_once=1))
    (job,) = jobs(catalogs)
    for state in ("running", "paused"):
        with pytest.raises(
            CatalogState, match=f"mirror is {state}: only a catalog that has ended can be removed"
        ) as refused:
            catalogs.remove("mirror")
        assert refused.value.to_dict()["hint"].startswith("cancel it with `reshard catalog cancel mirror`, or see")
        if state == "running":
            catalogs.pause("mirror")
    assert catalogs.cancel("mirror") == 1
    with pytest.raises(
        CatalogState, match="is cancelled: remove it when all of its jobs have ended"
    ) as at_work:  # it is not noted yet how it ended
        catalogs.remove("mirror")
    assert at_work.value.to_dict()["hint"].startswith("see "), "it was cancelled, so it needs only time"
    with pytest.raises(CatalogState, match="is cancelled: some of its jobs have not ended"):
        catalogs.submit(definition(3))
    assert jobs(catalogs) == []
    catalogs.remove("mirror")
    assert set(store.redis.scan_iter(f"{PREFIX}catalog*")) == before
    assert store.get(job).state == JobState.cancelled
    with pytest.raises(CatalogNotFound):
        catalogs.remove("mirror")


def test_a_removed_one_knows_nothing_of_its_targets(catalogs: Cursor, leases: Leases) -> None:
    wanted = definition(1)
    for _ in range(2):
        begin(catalogs, wanted)
        (job,) = jobs(catalogs)
        finish(leases, job)
        assert jobs(catalogs) == []
        assert catalogs.standings("mirror", [entry for entry, _ in rows(wanted)]) == ["unchanged"]
        catalogs.remove("mirror")


def test_control_goes_on_when_one_is_removed_under_its_hands(catalogs: Cursor, store: JobStore, leases: Leases) -> None:
    begin(catalogs, definition(1))
    (job,) = jobs(catalogs)
    finish(leases, job)
    store.redis.sadd(f"{PREFIX}catalogs:looked_at", "gone")  # as a control sees it that asked just before
    store.redis.delete(f"{PREFIX}catalog:mirror:entries")
    followed(store)
    catalogs.reconcile()


def test_a_target_that_another_request_has_is_a_failure(catalogs: Cursor, store: JobStore) -> None:
    other = store.submit(ask("m0", size=12345)).id
    begin(catalogs, definition(1))
    assert jobs(catalogs) == []
    [(code, [ended])] = told(catalogs.get("mirror")).failures().items()
    assert (code, ended.repo) == ("job.target_busy", "them/m0")
    assert ended.error is not None and other in ended.error.message


def test_targets_that_others_have_keep_no_room_empty(catalogs: Cursor, store: JobStore) -> None:
    for number in (0, 1, 2, 4):
        store.submit(ask(f"m{number}", size=12345))
    begin(catalogs, definition(8, at_once=2))
    jobs(catalogs)
    seen = catalogs.get("mirror")
    assert list(seen.active) == ["them/m3", "them/m5"]
    assert (counts(seen), seen.todo) == ({"failed": 4}, 2)


def test_a_job_is_awaited_until_its_end_is_noted(catalogs: Cursor, store: JobStore, leases: Leases) -> None:
    begin(catalogs, definition(1))
    (job,) = jobs(catalogs)
    other = store.submit(ask("other")).id
    finish(leases, job)
    assert catalogs.awaited() == {job}
    followed(store)
    assert catalogs.awaited() == set()
    for one in (job, other):
        if one == other:
            store.cancel(one)
        store.delete([one])
    catalogs.reconcile()
    assert catalogs.get("mirror").state == "done"
    assert told(catalogs.get("mirror")).failures() == {}


def test_a_job_that_was_deleted_is_a_failure(catalogs: Cursor, store: JobStore) -> None:
    begin(catalogs, definition(1))
    (job,) = jobs(catalogs)
    store.cancel(job)
    store.delete([job])
    assert jobs(catalogs) == []
    assert list(told(catalogs.get("mirror")).failures()) == ["job.not_found"]


def test_two_controls_admit_each_entry_once(broker: Broker, store: JobStore, catalogs: Cursor) -> None:
    begin(catalogs, definition(40, at_once=25))
    together = threading.Barrier(4)

    def control() -> None:
        with JobStore.at(broker.url) as own:
            together.wait()
            Cursor(own).reconcile()

    threads = [threading.Thread(target=control) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    active = catalogs.get("mirror").active
    assert len(active) == len(set(active.values())) == 25
    assert store.counts()[JobState.queued] == 25


def test_a_control_that_looked_before_another_one_acted_changes_nothing(
    catalogs: Cursor, leases: Leases, store: JobStore
) -> None:
    def act_on(command: str, seen: object) -> None:
        """Another control, of which one command was answered before we acted."""
        with JobStore.at(store.url) as own:
            ask, answers = getattr(own.redis, command), [seen]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(own.redis, command, lambda *what, **how: answers.pop() if answers else ask(*what, **how))
                Cursor(own).reconcile()
            assert not answers, "checked with the names from --rename"

    begin(catalogs, definition(5, at_once=2, max_failures=9))
    first, _ = jobs(catalogs)
    act_on("hgetall", {})  # it saw room where there is none any more
    assert len(catalogs.get("mirror").active) == 2
    fail(leases, first)
    jobs(catalogs)
    act_on("hgetall", {b"0": first.encode()})  # the same end, noted twice
    assert store.redis.hget(f"{PREFIX}catalog:mirror", "failures") == b"1"
    catalogs.pause("mirror")
    for job in catalogs.get("mirror").active.values():
        finish(leases, job)
    assert jobs(catalogs) == []
    catalogs.resume("mirror")
    act_on("zrangebyscore", [b"0"])  # its turn is over, and its target is free
    assert set(catalogs.get("mirror").active) == {"them/m3", "them/m4"}


def test_another_control_expands_what_a_dead_one_began(catalogs: Cursor, store: JobStore) -> None:
    wanted = definition(3)
    catalogs.submit(wanted)
    run = catalogs.claim("mirror", "dead")
    assert catalogs.claim("mirror", "alive") == ""
    store.redis.hset(f"{PREFIX}catalog:mirror", "expander_until", 0)
    assert catalogs.claim("mirror", "alive") == run
    assert not catalogs.fill("mirror", run, "dead", rows(wanted))
    assert catalogs.fill("mirror", run, "alive", rows(wanted))
    assert catalogs.get("mirror").state == "running"


def test_an_entry_that_finds_no_model_is_kept_with_the_run(catalogs: Cursor) -> None:
    catalogs.submit(definition(1))
    assert catalogs.get("mirror").empty == ()
    Expander(catalogs, lambda wanted: ([], [0, 2])).look(catalogs.expanding())
    wait_for(lambda: catalogs.get("mirror").state == "done", "its end")
    assert catalogs.get("mirror").empty == (0, 2)
    begin(catalogs, definition(1))
    assert catalogs.get("mirror").empty == ()


def test_a_hub_that_is_away_is_asked_again_and_another_error_ends_it(catalogs: Cursor) -> None:
    raised: list[ReshardError] = [HubUnreachable(endpoint="https://hub", what="down")]
    asked: list[str] = []

    def away(wanted: Definition) -> tuple[Rows, list[int]]:
        asked.append(wanted.name)
        raise raised[0]

    now = [0.0]
    expander = Expander(catalogs, away, clock=lambda: now[0])
    catalogs.submit(definition(1))
    expander.look(catalogs.expanding())
    wait_for(lambda: not expander.busy, "the failure")
    now[0] = EXPAND_AGAIN - 1
    expander.look(catalogs.expanding())
    assert (catalogs.get("mirror").state, expander.busy, len(asked)) == ("expanding", False, 1)
    raised[0] = UsageError(what="no")
    now[0] = EXPAND_AGAIN
    expander.look(catalogs.expanding())
    wait_for(lambda: catalogs.get("mirror").state == "failed", "its end")
    assert "no (see" in (catalogs.get("mirror").note or "")


def test_what_nobody_foresaw_ends_the_expanding_and_is_said(catalogs: Cursor) -> None:
    def broken(wanted: Definition) -> tuple[Rows, list[int]]:
        raise ZeroDivisionError("in the expanding")

    catalogs.submit(definition(1))
    Expander(catalogs, broken).look(catalogs.expanding())
    wait_for(lambda: catalogs.get("mirror").state == "failed", "its end")
    assert "ZeroDivisionError: in the expanding" in (catalogs.get("mirror").note or "")
