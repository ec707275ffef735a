"""What a wake is for: the first of its queue that has something to claim, begun jobs before others, by submission."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline.errors import DiskFull
from reshard.pipeline.planning.model import Plan
from reshard.worker.fleet.heartbeat import announce
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Lease, Leases
from reshard.worker.queue.scripts import job_key
from reshard.worker.queue.wakes import QUEUES, SHARES
from tests.support.procs import Broker
from tests.worker.conftest import age, another, ask, claimed, planned, process

INTERACTIVE, BULK = QUEUES
ERROR = DiskFull(path="/", needed=2, free=1).to_dict()


@dataclass
class Line:
    """The broker's lists, and a worker and control that send wakes to them."""

    store: JobStore
    sent: dict[str, deque[str]] = field(default_factory=lambda: {queue: deque() for queue in QUEUES})

    def __post_init__(self) -> None:
        self.leases = Leases(self.store, self.send, "worker-a")

    def send(self, queue: str, job: str) -> None:
        self.sent[queue].append(job)
        self.store.redis.lpush(queue, job)  # its length says that no wake is lost

    def take(self, queue: str | None = None) -> Lease | None:
        """What a worker has that takes the next wake, from this queue or as Celery does."""
        for name in [queue] if queue else QUEUES:
            if self.sent[name]:
                self.store.redis.rpop(name)
                return self.leases.claim_first(name, self.sent[name].popleft())
        return None


@pytest.fixture
def line(store: JobStore) -> Line:
    return Line(store)


def test_a_job_that_has_begun_is_carried_on_before_another_is_planned(line: Line, plan: Plan) -> None:
    first, second = (line.store.submit(ask(name)).id for name in "ab")
    line.leases.due()
    lease = line.take()
    assert lease and (lease.job, lease.unit) == (first, "plan")
    assert line.leases.planned(lease, plan) == "ok"
    units = ["check", *(f"group:{number:05d}" for number in range(len(plan.groups)))]
    for unit in units:
        lease = line.take()
        assert lease and (lease.job, lease.unit) == (first, unit), "although the second's wake stood before its own"
    lease = line.take()
    assert lease and (lease.job, lease.unit) == (second, "plan"), "as a free worker does not wait"


def test_of_jobs_that_have_begun_the_one_that_was_submitted_first_goes_first(line: Line, plan: Plan) -> None:
    first, second = (line.store.submit(ask(name)).id for name in "ab")
    line.leases.due()
    leases = [lease for lease in (line.take(), line.take()) if lease]
    for lease in reversed(leases):  # the second is ready before the first
        assert line.leases.planned(lease, plan) == "ok"
    taken = [lease.job for _ in range(2 * (1 + len(plan.groups))) if (lease := line.take())]
    assert taken == [first] * (1 + len(plan.groups)) + [second] * (1 + len(plan.groups))


def test_a_job_that_is_retried_goes_behind_those_that_were_submitted_since(line: Line) -> None:
    failed = line.store.submit(ask("failed")).id
    assert line.leases.fail(claimed(line.leases, failed, "plan"), ERROR) == "ok"
    other = line.store.submit(ask("other")).id
    line.store.retry(failed)
    line.leases.due()
    assert [lease.job for _ in range(2) if (lease := line.take())] == [other, failed]


def test_a_retry_of_what_had_begun_waits_its_turn_and_is_then_carried_on_before_another_is_planned(
    line: Line, plan: Plan
) -> None:
    begun, waits = planned(line.store, line.leases, plan, ask("begun")), line.store.submit(ask("waits")).id
    line.store.cancel(begun)
    line.store.retry(begun)
    later = line.store.submit(ask("later")).id
    line.leases.due()
    jobs = [lease.job for _ in range(10) if (lease := line.take())]
    assert jobs == [waits, *[begun] * (1 + len(plan.groups)), later]


@pytest.mark.parametrize("gone", ["removed", "written over"])
def test_a_job_whose_record_a_client_took_away_is_in_nobody_s_way(line: Line, gone: str) -> None:
    first, *others = (line.store.submit(ask(name)).id for name in "abc")
    line.leases.due()
    line.store.redis.delete(job_key(first))
    if gone == "written over":
        line.store.redis.set(job_key(first), "text")
    assert [lease.job for _ in range(3) if (lease := line.take())] == others
    age(line.store, first, 3600)
    line.leases.due()
    assert line.leases.first(INTERACTIVE) is None, "it is not sent again"


def test_a_worker_for_which_no_job_is_takes_one_out_of_the_line_and_not_all(line: Line) -> None:
    for name in "abc":
        line.store.submit(ask(name))
    line.leases.due()
    announce(line.store.redis, process("worker-a:1"))
    line.leases = Leases(line.store, line.send, "worker-a:1.5")
    line.leases.fleet.drain("worker-a:1")
    assert line.take() is None
    assert line.store.redis.zcard(f"{INTERACTIVE}:order") == 2


def test_turns_of_jobs_that_were_cancelled_are_not_owed(line: Line) -> None:
    for job in submit(line, "ada", 20):
        line.store.cancel(job)
    submit(line, "bob", 5)
    submit(line, "ada", 1)
    assert "ada" in begun(line, 2)


def test_jobs_that_are_retried_in_the_middle_of_their_work_take_turns_too(line: Line, plan: Plan) -> None:
    asked = (ask(f"ada-{number}").model_copy(update={"asked_by": "ada"}) for number in range(6))
    for job in [planned(line.store, line.leases, plan, request) for request in asked]:
        line.store.cancel(job)
        line.store.retry(job)
    line.leases.due()
    bobs = submit(line, "bob", 2)
    taken = [lease.job for _ in range(4) if (lease := line.take()) and line.store.cancel(lease.job)]
    assert {*bobs} <= {*taken}, "and not behind all that ada retried"


def test_interactive_jobs_that_wait_do_not_hide_the_turns_of_bulk_ones(line: Line) -> None:
    submit(line, "ada", 3, "bulk")
    submit(line, "ada", 12)
    later, bobs = submit(line, "ada", 3, "bulk"), submit(line, "bob", 1, "bulk")
    taken = [lease.job for _ in range(4) if (lease := line.take(BULK))]
    assert not {*later} & {*taken} and {*bobs} < {*taken}


def submit(line: Line, who: str, count: int, priority: str = "interactive") -> list[str]:
    names = (f"{who}-{priority}-{number}-{line.store.redis.dbsize()}" for number in range(count))
    asked = (ask(name, priority).model_copy(update={"asked_by": who}) for name in names)
    jobs = [line.store.submit(request).id for request in asked]
    line.leases.due()
    return jobs


def begun(line: Line, count: int) -> list[str]:
    """The next so many jobs that are begun, by their submitters; each is cancelled at once."""
    found = []
    for _ in range(count):
        lease = line.take()
        assert lease and lease.unit == "plan"
        found.append(line.store.get(lease.job).request.asked_by)
        line.store.cancel(lease.job)
    return found


def test_submitters_take_turns_so_that_many_jobs_of_one_do_not_stop_two_of_another(line: Line) -> None:
    submit(line, "ada", 30)
    assert begun(line, 10) == ["ada"] * 10
    submit(line, "bob", 2)
    submit(line, "eve", 1)
    assert begun(line, 6) == ["ada", "bob", "eve", "ada", "bob", "ada"]


def test_who_submits_nothing_for_a_while_saves_no_turns(line: Line) -> None:
    submit(line, "ada", 2)
    submit(line, "bob", 20)
    assert begun(line, 14).count("ada") == 2
    submit(line, "ada", 8)
    assert begun(line, 8).count("ada") == 4


def test_a_share_is_how_often_a_submitter_s_turn_comes(line: Line) -> None:
    line.leases.share({"ada": 2, "eve": 0.5})
    for who in ("ada", "bob", "eve"):
        submit(line, who, 20)
    assert Counter(begun(line, 14)) == {"ada": 8, "bob": 4, "eve": 2}
    line.leases.share({})
    assert not line.store.redis.exists(SHARES)


def test_a_wake_of_a_job_that_is_gone_is_for_another(line: Line) -> None:
    gone, waits = (line.store.submit(ask(name)).id for name in "ab")
    line.leases.due()
    line.store.cancel(gone)
    assert line.store.delete([gone]) == [gone]
    lease = line.take()
    assert lease and lease.job == waits


def test_a_worker_that_dies_before_it_claims_leaves_the_first_in_its_place(line: Line) -> None:
    jobs = [line.store.submit(ask(name)).id for name in "ab"]
    line.leases.due()
    assert line.leases.first(INTERACTIVE) == jobs[0]
    lease = line.take()
    assert lease and lease.job == jobs[0]


def test_what_another_worker_has_claimed_meanwhile_costs_no_wake(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [line.store.submit(ask(name)).id for name in "ab"]
    line.leases.due()
    looked = Leases.first

    def overtaken(self: Leases, queue: str) -> str | None:
        monkeypatch.setattr(Leases, "first", looked)
        first = self.first(queue)
        assert first and another(line.store).claim(first)
        return first

    monkeypatch.setattr(Leases, "first", overtaken)
    lease = line.take()
    assert lease and lease.job == jobs[1]


def test_a_job_that_waits_for_another_worker_is_not_in_the_way_of_the_next(line: Line) -> None:
    store = line.store
    for name in ("worker-a:1", "worker-b:2"):
        announce(store.redis, process(name))
    line.leases = Leases(store, line.send, "worker-a:1.5")
    spoilt, fine = (store.submit(ask(name)).id for name in "ab")
    line.leases.due()
    lease = line.take()
    assert lease and lease.job == spoilt
    assert line.leases.hand_over(lease, ERROR) == "ok"
    lease = line.take()
    assert lease and lease.job == fine


def test_a_class_s_wake_is_for_jobs_of_that_class(line: Line) -> None:
    bulk, quick = line.store.submit(ask("b", "bulk")).id, line.store.submit(ask("q")).id
    line.leases.due()
    for queue, job in ((BULK, bulk), (INTERACTIVE, quick)):
        lease = line.take(queue)
        assert lease and lease.job == job


# ------------------------------------------------------------------------------------------- whatever else happens

Act = tuple[str, int]
ACTS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit bulk", "take", "take", "take", "finish", "finish", "hand back", "trouble",
                         "fail", "cancel", "retry", "lose a wake"]),
        st.integers(0, 99),
    ),
    max_size=60,
)  # fmt: skip


@given(acts=ACTS, random=st.randoms(use_true_random=False))
def test_each_wake_is_for_the_first_that_has_something_to_claim(
    acts: list[Act], random: Random, broker: Broker, plan: Plan
) -> None:
    with JobStore.at(broker.url) as store:
        store.redis.flushall()
        _carry_out(acts, random, Line(store), replace(plan, groups=plan.groups[:2]))


def _carry_out(acts: list[Act], random: Random, line: Line, plan: Plan) -> None:
    store, held = line.store, list[Lease]()
    submitted = list[str]()  # in the order of their turns
    for act, number in acts:
        line.leases.due()
        match act:
            case "submit" | "submit bulk":
                submitted.append(store.submit(ask(f"m{len(submitted)}", "bulk" if "bulk" in act else "interactive")).id)
            case "lose a wake":
                queue = QUEUES[number % 2]
                if line.sent[queue]:
                    line.sent[queue].popleft()  # and its length in the broker says that it is there
            case "take":
                queue = QUEUES[number % 2]
                expected, wakes = _first(store, submitted, queue), bool(line.sent[queue])
                random.shuffle(line.sent[queue])
                lease = line.take(queue)
                if wakes:
                    assert (lease.job if lease else None) == expected
                held += [lease] if lease else []
            case "cancel" | "retry" if submitted:
                job = submitted[number % len(submitted)]
                state = store.get(job).state
                if act == "cancel" and not state.ended and state not in {"committing", "confirming"}:
                    store.cancel(job)
                elif act == "retry" and state in {"failed", "cancelled"}:
                    store.retry(job)
                    submitted.remove(job)
                    submitted.append(job)
            case _ if held:
                _end(line.leases, held.pop(number % len(held)), act, plan)


def _first(store: JobStore, submitted: list[str], queue: str) -> str | None:
    """The rule in other words, from what is kept of each job."""
    waiting = []
    for turn, id in enumerate(submitted):
        job = store.get(id)
        todo = store.redis.zrange(f"reshard:job:{id}:todo", 0, -1, withscores=True)
        claimable = not job.state.ended and any(score == 0 for _, score in todo)
        if claimable and queue.endswith(job.request.priority):
            waiting.append((not store.redis.hexists(job_key(id), "started"), turn, id))
    return min(waiting)[2] if waiting else None


def _end(leases: Leases, lease: Lease, how: str, plan: Plan) -> None:
    match how:
        case "hand back":
            leases.release(lease, "yield")
        case "trouble":
            leases.again(lease, ERROR, 3600)
        case "fail":
            leases.fail(lease, ERROR)
        case _ if lease.kind == "plan":
            leases.planned(lease, plan)
        case _:
            if lease.kind == "publish":
                leases.begin(lease)
            leases.done(lease, {"commit": "abc", "ref": "main", "found": False} if lease.kind == "publish" else [])
