"""Jobs that another Celery app submits, by its own client: what comes of each message, once, and what it is told."""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from typing import Any

import pytest
from celery import Celery, chain, signature

from reshard.pipeline.errors import NoWeights
from reshard.pipeline.publishing.commit import Published
from reshard.worker.control import Control
from reshard.worker.followers.counters import Counters
from reshard.worker.followers.submissions import ARGUMENTS_MAX, CALLBACKS_MAX, KEY_MAX, MESSAGE_MAX, Submissions
from reshard.worker.queue.events import TOTALS, Reader, follow
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.messages import SUBMIT, TAKEN, Message
from reshard.worker.queue.scripts import PREFIX, job_key
from reshard.worker.settings import Settings
from tests.support.procs import Broker, in_a_process, kill_this_process_at
from tests.worker.conftest import ask, claimed, followed
from tests.worker.followers.builders import fail

QUEUE, TOLD = "reshard:submit", "reshard:callbacks"
REQUEST = {"source": "them/model", "target": "us/model", "options": {"size": 200_000_000}}
DONE = {"task": "acme.done"}


@pytest.fixture
def app(broker: Broker) -> Iterator[Celery]:
    with Celery("acme", broker=broker.url) as app:
        yield app


def send(app: Celery, *args: object, at: dict[str, Any] | None = None, **kwargs: object) -> str:
    """The id of the task that is sent; ``at`` are Celery's own options."""
    fields = {**REQUEST, "key": "a", "callback": DONE, **kwargs}
    return str(app.send_task("reshard.submit", args, fields, queue=QUEUE, **at or {}).id)


def take(store: JobStore) -> int:
    return Submissions(store).take()


def jobs(store: JobStore) -> list[str]:
    return [job.id for job in store.recent()]


def told(store: JobStore, queue: str = TOLD) -> list[tuple[str, list[Any], dict[str, Any]]]:
    """What was sent to the app since the last look: task, arguments, and those by name."""
    found = list[tuple[str, list[Any], dict[str, Any]]]()
    while (text := store.redis.rpop(queue)) is not None:
        message = Message.read(json.loads(text))
        found.append((message.task, list(message.args), dict(message.kwargs)))
    return found


def end(store: JobStore, leases: Leases, job: str) -> None:
    made = asdict(Published("c0ffee", "main", False))
    assert leases.done(claimed(leases, job, "plan"), made) == "ok"
    followed(store)


def refusals(store: JobStore) -> list[str]:
    """The codes of those that were told since the last look."""
    answers = [args[0] for _, args, _ in told(store)]
    assert {answer["state"] for answer in answers} <= {"refused"}
    return [answer["error"]["code"] for answer in answers]


# -------------------------------------------------------------------------------------------------------- submitted


def test_a_task_of_another_app_queues_a_job_and_its_callback_is_told_of_the_end(
    store: JobStore, leases: Leases, app: Celery
) -> None:
    link = signature("acme.queued", kwargs={"model": 7}, queue=TOLD)
    send(app, callback=signature("acme.done", args=("mine",)), priority="bulk", at={"link": link})
    assert take(store) == 1
    (job,) = store.recent()
    assert (str(job.request.source), str(job.request.target)) == ("them/model", "us/model")
    assert (job.request.options.size, job.request.priority, job.request.asked_by) == (200_000_000, "bulk", "celery")
    assert told(store) == [("acme.queued", [{"id": job.id, "existed": False}], {"model": 7})]
    assert take(store) == 0
    end(store, leases, job.id)
    answer = {"id": job.id, "key": "a", "state": "done", "commit": "c0ffee", "ref": "main", "error": None}
    assert told(store) == [("acme.done", [answer, "mine"], {})]
    followed(store)
    assert told(store) == []


def test_a_message_over_a_record_that_a_client_wrote_over_holds_up_none_behind_it(store: JobStore, app: Celery) -> None:
    send(app, key="kept")
    take(store)
    (first,) = jobs(store)
    store.redis.delete(f"{PREFIX}key:broken")
    store.redis.rpush(f"{PREFIX}key:broken", "x")
    store.redis.delete(job_key(first))
    store.redis.set(job_key(first), "x")
    for key in ("broken", "kept", "another"):
        send(app, key=key)
    for _ in range(3):
        take(store)
    assert store.redis.llen(TAKEN) == store.redis.llen(SUBMIT[0]) == 0
    assert len(store.recent()) == 1, "the last of them, as nobody has the target"


def test_a_failure_a_cancel_and_each_end_after_a_retry_are_told(store: JobStore, leases: Leases, app: Celery) -> None:
    send(app)
    take(store)
    (job,) = jobs(store)
    fail(leases, job)
    followed(store)
    store.retry(job)
    store.cancel(job)
    followed(store)
    store.retry(job)
    end(store, leases, job)
    answers = [args[0] for _, args, _ in told(store)]
    assert [answer["state"] for answer in answers] == ["failed", "cancelled", "done"]
    assert [answer["error"] and answer["error"]["code"] for answer in answers] == [NoWeights.code, None, None]


def test_the_end_of_a_job_that_was_deleted_before_control_followed_it_is_told_once(
    store: JobStore, leases: Leases, app: Celery
) -> None:
    send(app)
    take(store)
    (job,) = jobs(store)
    assert leases.done(claimed(leases, job, "plan"), asdict(Published("c0ffee", "main", False))) == "ok"
    assert store.delete([job]) == [job]
    followed(store)
    answer = {"id": job, "key": "a", "state": "done", "commit": "c0ffee", "ref": "main", "error": None}
    assert told(store) == [("acme.done", [answer], {})]
    followed(store)
    assert told(store) == []
    (left,) = store.redis.scan_iter(job_key(job, "*"))
    assert store.redis.ttl(left) > 0


def test_one_key_is_one_job_which_a_sender_who_is_not_sure_is_told_of_again(
    store: JobStore, leases: Leases, app: Celery
) -> None:
    queued = signature("acme.queued", queue=TOLD)
    for _ in range(3):
        send(app, at={"link": queued})
    assert take(store) == 3
    (job,) = jobs(store)
    assert [args[0] for _, args, _ in told(store)] == [
        {"id": job, "existed": existed} for existed in (False, True, True)
    ]
    end(store, leases, job)
    assert [task for task, _, _ in told(store)] == ["acme.done"], "of three that gave one key"
    send(app, at={"link": queued})
    take(store)
    assert jobs(store) == [job], "it has ended, and is still that of the key"
    again = told(store)
    assert [task for task, _, _ in again] == ["acme.done", "acme.queued"]
    assert (again[0][1][0]["id"], again[0][1][0]["state"]) == (job, "done")
    send(app, key="b")
    take(store)
    assert len(jobs(store)) == 2


def test_who_asks_between_an_end_and_its_event_is_told_of_it_once(store: JobStore, leases: Leases, app: Celery) -> None:
    send(app)
    take(store)
    (job,) = jobs(store)
    send(app)
    fail(leases, job)
    take(store)
    assert [args[0]["state"] for _, args, _ in told(store)] == ["failed"]
    followed(store)
    assert told(store) == []
    store.retry(job)
    end(store, leases, job)
    assert [args[0]["state"] for _, args, _ in told(store)] == ["done"]


def test_a_message_that_comes_twice_is_one_job_without_a_key(store: JobStore, leases: Leases, app: Celery) -> None:
    send(app, key="")
    text = store.redis.lindex(QUEUE, 0)
    take(store)
    (job,) = jobs(store)
    end(store, leases, job)
    store.redis.lpush(QUEUE, text)
    take(store)
    assert jobs(store) == [job]


def test_several_who_ask_for_the_same_are_each_told_of_its_end(store: JobStore, leases: Leases, app: Celery) -> None:
    by_hand = store.submit(ask().model_copy(update={"options": ask(size=200_000_000).options})).id
    for key in ("a", "b"):
        send(app, key=key)
    take(store)
    assert jobs(store) == [by_hand]
    end(store, leases, by_hand)
    assert {args[0]["key"] for _, args, _ in told(store)} == {"a", "b"}


@pytest.mark.parametrize("priority", [None, 0, 3, 5, 9])
def test_messages_of_each_of_celerys_priorities_are_carried_out(
    store: JobStore, app: Celery, priority: int | None
) -> None:
    send(app, at={"priority": priority})
    assert take(store) == 1 and len(jobs(store)) == 1


# ---------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("kwargs", "code", "says"),
    [
        ({"sourc": "them/model"}, "usage.body", "sourc: unknown name"),
        ({"source": None}, "usage.body", "source"),
        ({"source": "not a/place/at all"}, "usage.place", ""),
        ({"options": {"size": "huge"}}, "usage.size", "huge"),
        ({"options": {"include": ["x" * 200] * 400}}, "usage.body", "options.include"),
        ({"key": "k" * (KEY_MAX + 1)}, "usage.body", "key"),
        ({"recurring": True}, "usage.body", "recurring"),
        ({"target": "you/model@x"}, "usage.body", "target: a target cannot have a revision"),
        ({"options": {"branch": "x", "pr": True}}, "usage.body", "options.branch: branch and pr cannot be used"),
    ],
    ids=str,
)
def test_bad_input_is_refused_by_one_line_and_told_to_the_callback_and_to_link_error(
    store: JobStore, app: Celery, caplog: pytest.LogCaptureFixture, kwargs: dict[str, Any], code: str, says: str
) -> None:
    sent = send(app, **kwargs, at={"link_error": signature("acme.failed", queue=TOLD)})
    with caplog.at_level(logging.INFO):
        assert take(store) == 1
    assert jobs(store) == []
    (_, (answer,), _), failed = told(store)
    assert (answer["id"], answer["state"], answer["error"]["code"]) == (None, "refused", code)
    assert says in answer["error"]["message"] and answer["key"] == kwargs.get("key", "a")[:KEY_MAX]
    assert failed == ("acme.failed", [sent], {}), "as workers tell it whose app does not know the task"
    (line,) = caplog.records
    assert f"error[{code}]" in line.getMessage() and line.exc_info is None and len(line.getMessage()) < 600
    assert take(store) == 0, "it is not tried again"


def test_what_is_in_the_way_of_a_job_is_told(store: JobStore, app: Celery) -> None:
    send(app)
    send(app, options={"size": 1_000_000_000})
    send(app, key="b", options={"size": 1_000_000_000})
    store.most = 1
    send(app, key="c", target="us/other")
    Submissions(store).take()
    assert refusals(store) == ["usage.key_reused", "job.target_busy", "queue.too_many_queued"]
    (job,) = jobs(store)
    store.cancel(job)
    assert store.delete([job]) == [job]
    send(app)
    take(store)
    assert refusals(store) == ["job.not_found"], "and not a second job for the key"


@pytest.mark.parametrize("what", ["args", "eta", "expires", "chain"])
def test_what_celery_has_and_is_not_carried_out_here_is_refused(store: JobStore, app: Celery, what: str) -> None:
    if what == "chain":
        task = app.signature("reshard.submit", kwargs={**REQUEST, "callback": DONE}, queue=QUEUE)
        chain(task, app.signature("acme.next")).apply_async()
    else:
        options = {"eta": {"countdown": 60}, "expires": {"expires": 60}}.get(what, {})
        send(app, *(["them/model"] if what == "args" else []), at=options)
    take(store)
    ((_, (answer,), _),) = told(store)
    assert answer["error"]["message"].startswith(f"{what}: ") and jobs(store) == []


HOSTILE = {
    "another app's queue": {"task": "billing.refund", "options": {"queue": "celery"}},
    "a queue of ours": {"task": "acme.done", "options": {"queue": "reshard:interactive"}},
    "a queue that begins as theirs": {"task": "acme.done", "options": {"queue": "reshard:callbacks-and-more"}},
    "a queue with a line break": {"task": "acme.done", "options": {"queue": "reshard:callbacks\n"}},
    "a long queue": {"task": "acme.done", "options": {"queue": "reshard:callbacks:" + "x" * 101}},
    "an exchange": {"task": "acme.done", "options": {"exchange": "celery", "routing_key": "celery"}},
    "a link of its own": {"task": "acme.done", "options": {"link": [DONE]}},
    "no name": {"task": ""},
    "a name with a line break": {"task": "acme.done\n"},
    "a name with an escape": {"task": "acme.\x1b[31m"},
    "a long name": {"task": "x" * 201},
    "a group": {"task": "celery.group", "subtask_type": "group", "kwargs": {"tasks": [DONE]}},
    "long arguments": {"task": "acme.done", "args": ["x" * ARGUMENTS_MAX]},
    "a list": [DONE],
}


@pytest.mark.parametrize("where", ["callback", "link", "link_error"])
@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=list(HOSTILE))
def test_nothing_is_sent_to_a_queue_or_a_task_that_is_not_plain(
    store: JobStore, app: Celery, where: str, hostile: Any
) -> None:
    keys = {*store.redis.keys("reshard:*")} | {b"reshard:totals"}
    if where == "callback":
        send(app, callback=hostile)
    else:
        send(app, callback=None, at={where: [hostile]}, **({"sourc": "x"} if where == "link_error" else {}))
    assert take(store) == 1
    assert {*store.redis.keys("reshard:*")} <= keys and jobs(store) == []
    assert not store.redis.exists("celery")


def test_a_job_keeps_some_callbacks_and_refuses_more(store: JobStore, leases: Leases, app: Celery) -> None:
    for number in range(CALLBACKS_MAX + 1):
        send(app, key=f"k{number}")
    take(store)
    assert refusals(store) == ["usage.body"]
    (job,) = jobs(store)
    end(store, leases, job)
    assert len(told(store)) == CALLBACKS_MAX


@pytest.mark.parametrize(
    "text",
    [b"not json", b"\xff", b"7", b"[]", b"{}", b"[" * 5000, b'{"headers": {}, "properties": {}, "body": ""}',
     b'{"headers": {"task": "reshard.submit", "id": 7}, "properties": {}, "body": "[[], {}, {}]"}',
     b'{"headers": {"task": "reshard.submit", "id": "x"}, "properties": {}, "body": "[[], {}, null]"}',
     b'{"headers": {"task": "reshard.submit", "id": "a b"}, "properties": {}, "body": "[[], {}, {}]"}',
     b'{"headers": {"task": "reshard.wake", "id": "x"}, "properties": {}, "body": "[[], {}, {}]"}',
     b'{"headers": {"task": "reshard.submit", "id": "x"}, "properties": {"body_encoding": "base64"}, "body": "?"}',
     b'{"headers": {"task": "reshard.submit", "id": "x"}, "properties":{},"body":"[[],{},{}]"}' + b" " * MESSAGE_MAX],
    ids=lambda text: text[:20].decode(errors="replace"),
)  # fmt: skip
def test_what_is_no_message_is_dropped_counted_and_holds_up_none(
    store: JobStore, app: Celery, caplog: pytest.LogCaptureFixture, text: bytes
) -> None:
    store.redis.lpush(QUEUE, text)
    send(app)
    assert take(store) == 2
    assert len(jobs(store)) == 1
    assert store.redis.hget(TOTALS, "dropped:submit") == b"1"
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(line.getMessage()) < 350 and line.exc_info is None


def test_a_record_that_a_client_wrote_over_stops_no_end_from_being_followed(
    store: JobStore, leases: Leases, app: Celery
) -> None:
    for key, target in (("a", "us/a"), ("b", "us/b"), ("c", "us/c")):
        send(app, key=key, target=target)
    take(store)
    over, spoiled, well = sorted(jobs(store), key=lambda job: str(store.get(job).request.target))
    for job in (over, spoiled, well):
        fail(leases, job)
    store.redis.hset(job_key(spoiled), "callbacks", '{"a": {"task": "no plain name"}}')
    store.redis.delete(job_key(over))
    store.redis.set(job_key(over), "no hash")
    followed(store)
    assert [args[0]["id"] for _, args, _ in told(store)] == [well]
    assert store.redis.hget(TOTALS, "ended:failed") == b"3"


# ----------------------------------------------------------------------------------------------- whatever is killed


def test_each_message_and_each_end_has_its_effect_once_whoever_is_killed(
    store: JobStore, leases: Leases, app: Celery, broker: Broker
) -> None:
    """Controls die at their first command, their second and so on, until one carries out all of it."""
    send(app, at={"link": signature("acme.queued", queue=TOLD)})
    numbers = count()

    def work(own: JobStore) -> None:
        kill_this_process_at(next(numbers))
        Submissions(own).take()
        follow(Counters(own), Reader(own.redis, Counters.group, take_over=0))

    def killed_until_it_is_done() -> int:
        died = 0
        while in_a_process(broker.url, work) == signal.SIGKILL:
            next(numbers)
            died += 1
        return died

    assert killed_until_it_is_done() > 10
    (job,) = jobs(store)
    assert leases.done(claimed(leases, job, "plan"), asdict(Published("c0ffee", "main", False))) == "ok"
    numbers = count()
    assert killed_until_it_is_done() > 5
    assert [task for task, _, _ in told(store)] == ["acme.queued", "acme.done"]
    assert not store.redis.exists(QUEUE, "reshard:taken")


def test_two_controls_carry_out_each_message_and_tell_each_end_once(
    store: JobStore, leases: Leases, app: Celery, broker: Broker
) -> None:
    for number in range(60):  # of three, two find the job of the first
        send(app, target=f"us/m{number // 3}", key=f"k{number // 3}", at={"link": signature("acme.queued", queue=TOLD)})
    controls = [Control(store, leases, Settings()), Control(store, leases, Settings())]
    gate = threading.Barrier(2)

    def take_at_once() -> None:
        with JobStore.at(broker.url) as own:
            own.redis.ping()
            gate.wait()
            Submissions(own).take()

    threads = [threading.Thread(target=take_at_once) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(jobs(store)) == 20
    for job in jobs(store):
        store.cancel(job)
    for control in controls:
        control.look(listen=0.01)
    assert sorted(task for task, _, _ in told(store)) == ["acme.done"] * 20 + ["acme.queued"] * 60
