"""Celery's own command on workers: what it starts, what Flower sees, and what its messages cannot do."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import gethostname
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, signature
from celery.worker.state import active_requests

from reshard.client.queue import Queue
from reshard.worker.fleet.fleet import Fleet
from reshard.worker.local import worker_command
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.scripts import PREFIX
from reshard.worker.queue.states import JobState
from tests.support.procs import Broker, Proc, wait_for
from tests.worker.conftest import ask, claimed
from tests.worker.sites import SIZE, Site, site

__all__ = ["site"]

CELERY = [sys.executable, "-m", "celery", "-A", "reshard.worker.app"]


def typed(site: Site, *arguments: str, **environment: str) -> Proc:
    return site.machine.start("worker", [*CELERY, "worker", *arguments], **environment)


@contextmanager
def watched(site: Site) -> Iterator[tuple[list[dict[str, Any]], Any]]:
    """The events of Celery's workers as they come, and what its own state makes of them, as in Flower."""
    seen = list[dict[str, Any]]()
    with Celery(broker=site.broker.url) as app, app.connection() as connection:
        state = app.events.State()

        def on_event(event: dict[str, Any]) -> None:
            state.event(event)
            seen.append(event)

        receiver = app.events.Receiver(connection, handlers={"*": on_event})
        thread = Thread(target=receiver.capture, kwargs={"limit": None, "timeout": None, "wakeup": False})
        thread.start()
        try:
            wait_for(lambda: any(event["type"] == "worker-heartbeat" for event in seen), "a worker's heartbeat")
            yield seen, state
        finally:
            receiver.should_stop = True
            thread.join()


def test_until_idle_waits_for_a_unit_of_a_job_that_is_set_aside(
    store: JobStore, leases: Leases, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One child copies when another asks for more of the job, after the night's bytes."""
    monkeypatch.setenv("RESHARD_BROKER_URL", broker.url)  # the module cannot do without
    from reshard.worker import app

    monkeypatch.setattr(app, "broker_url", lambda settings: broker.url)
    looks, ended = list[Callable[[], None]](), list[object]()
    monkeypatch.setattr(app.os, "kill", lambda *arguments: ended.append(arguments))
    timer = SimpleNamespace(call_repeatedly=lambda seconds, look: looks.append(look))
    app.UntilIdle(None).start(SimpleNamespace(timer=timer))
    job = store.submit(ask(priority="bulk")).id
    claimed(leases, job, "plan")
    store.redis.zadd(f"{PREFIX}held", {job: 0})
    at_work = Thread()  # as Celery keeps them: by weak references
    active_requests.add(at_work)
    for _ in range(5):
        looks[0]()
    assert ended == []
    active_requests.discard(at_work)
    for _ in range(5):
        looks[0]()
    assert len(ended) == 1


def test_a_worker_that_celery_starts_is_the_one_that_reshard_worker_starts(site: Site) -> None:
    by_hand, by_us = typed(site, RESHARD_CONCURRENCY="1"), site.machine.worker(concurrency=1)
    named = typed(site, "-n", "mine@%h", "-c", "1")
    alive = {process.pid: process for process in site.store.processes()}
    ours = [alive[worker.pid] for worker in (by_hand, by_us, named)]
    assert {tuple(process.queues) for process in ours} == {("interactive", "bulk")}
    assert {process.concurrency for process in ours} == {1}
    assert site.client.pubsub_numpat() == 0, "none listens to the others' gossip"
    with watched(site) as (_, state):
        wait_for(lambda: len(state.workers) == 3, "a heartbeat of each")
        assert {*state.workers} == {
            f"{by_hand.pid}@{gethostname()}",
            f"{by_us.pid}@{gethostname()}",
            f"mine@{gethostname()}",
        }
    for worker in (by_us, named):
        worker.terminate()
        assert worker.wait(30) == 0
    site.assert_published_once(site.submit("first"), "first")
    site.assert_published_once(site.submit("second", priority="bulk"), "second")


@pytest.mark.parametrize("queue", ["interactive", pytest.param("reshard:interactive", marks=pytest.mark.slow)])
def test_a_worker_with_the_queue_of_one_class_leaves_the_jobs_of_the_other(site: Site, queue: str) -> None:
    worker = typed(site, "-Q", queue, "-c", "1")
    (name,) = (process.name for process in site.store.processes() if process.pid == worker.pid)
    bulk = site.submit("bulk", priority="bulk")
    wait_for(lambda: site.store.waiting()["bulk"], "the bulk wake")
    site.assert_published_once(site.submit("quick"), "quick")
    fleet = Fleet(site.store)
    fleet.drain(name)
    wait_for(lambda: "this worker is drained" in worker.said(), "its resting")
    fleet.undrain(name)
    wait_for(lambda: "this worker accepts work again" in worker.said(), "its coming back")
    site.assert_published_once(site.submit("after"), "after")
    assert site.store.waiting()["bulk"] == 1 and site.store.get(bulk).state == JobState.queued
    queue_ = Queue(site.store)
    assert queue_.waits(bulk=False) is None and "no worker accepts bulk jobs" in str(queue_.waits(bulk=True))
    told = "ready (interactive jobs only)"
    wait_for(lambda: told in site.machine.run("fleet", "status").stdout, "a sign of life that says so")

    other = site.machine.start("worker", [*CELERY, "worker", "-X", "interactive"])
    site.assert_published_once(bulk, "bulk")
    assert queue_.waits(bulk=True) is None
    assert other.alive()


@pytest.mark.slow
def test_reshard_worker_takes_one_class_of_jobs_and_until_idle_waits_for_that_alone(site: Site) -> None:
    bulk, quick = site.submit("bulk", priority="bulk"), site.submit("quick")
    done = site.machine.run("worker", "--priority", "bulk", "--until-idle")
    assert done.returncode == 0, done.stderr
    assert site.store.get(bulk).state == JobState.done
    assert site.store.get(quick).state == JobState.queued


@pytest.fixture
def shadows(site: Site) -> Iterator[Path]:
    """The machine's folder with modules like those of a worker, as a hostile model has them; what they write there."""
    found = site.machine.folder / "imported"
    files = [site.machine.folder / f"{name}.py" for name in ("celery", "kombu", "redis", "prometheus_client", "xxhash")]
    for file in files:
        file.write_text(f"from pathlib import Path\nPath({str(found)!r}).touch()\nraise SystemExit(99)\n")
    yield found
    for file in files:
        file.unlink()


def test_reshard_worker_imports_nothing_from_the_folder_it_is_started_in(site: Site, shadows: Path) -> None:
    job = site.submit()
    done = site.machine.run("worker", "--until-idle")
    assert (done.returncode, shadows.exists()) == (0, False), done.stderr
    assert site.store.get(job).state == JobState.done


def test_a_queue_that_is_not_there_is_an_error_of_one_line(site: Site) -> None:
    worker = site.machine.launch("worker", [*CELERY, "worker", "-Q", "interactive,typo"])
    assert worker.wait(60) == 1
    assert worker.said() == "error: no queue is called typo; there are interactive and bulk\n"


def test_a_limit_that_no_job_could_keep_to_is_refused_at_the_start(site: Site) -> None:
    small = {"RESHARD_MEMORY_LIMIT": "64MB"}
    worker = site.machine.launch("worker", [*CELERY, "worker"], **small)
    assert worker.wait(60) == 1
    assert worker.said() == "error: RESHARD_MEMORY_LIMIT=64000000: a copy needs at least 128,000,000 bytes\n"
    for command in ("worker", "up"):
        refused = site.machine.run(command, **small)
        assert refused.returncode == 2
        assert "error[usage.setting]: RESHARD_MEMORY_LIMIT=" in refused.stderr


def test_events_say_which_step_of_which_job_runs(site: Site) -> None:
    site.machine.worker(concurrency=1)
    with watched(site) as (seen, state):
        site.hold()
        job = site.submit()
        unit = site.copying(job)

        def running() -> list[Any]:
            return [task for task in state.tasks.values() if task.state == "STARTED"]

        wait_for(lambda: any(task.name == "reshard.wake[copy]" for task in running()), "the copy's being shown")
        (task,) = running()
        assert (task.args, task.kwargs) == (f"('{job}',)", str({"unit": unit, "attempt": 1}))
        site.space.admin.clear_faults()
        site.assert_published_once(job)
        wait_for(lambda: not running(), "the end of the last")
        steps = {task.name for task in state.tasks.values() if task.state == "SUCCESS"}
        assert steps >= {f"reshard.wake[{step}]" for step in ("plan", "check", "copy", "publish", "confirm")}
        assert "task-sent" not in {event["type"] for event in seen}, "which would come after it, and hide it"


# A worker whose broker refuses each event of a step.
REFUSED = """
from celery import Task
from celery.__main__ import main
from kombu.exceptions import OperationalError

def refuse(*_, **__):
    raise OperationalError("no permission to publish")

Task.send_event = refuse
main()
"""


def test_a_step_whose_event_cannot_be_sent_is_carried_out(site: Site) -> None:
    python, module, program, *arguments = worker_command(1)
    assert (module, program) == ("-m", "reshard.worker.program")
    worker = site.machine.start("worker", [python, "-c", REFUSED, *arguments])
    job = site.submit()
    site.assert_published_once(job)
    assert f"events of job {job}: no permission to publish" in worker.said() and "Traceback" not in worker.said()


QUIET = "from reshard.worker.app import app\napp.conf.worker_send_task_events = False\n"


@pytest.mark.slow
def test_a_worker_without_events_sends_none(site: Site) -> None:
    (site.machine.folder / "quiet.py").write_text(QUIET)
    site.machine.start("worker", [sys.executable, "-m", "celery", "-A", "quiet", "worker"])
    with watched(site) as (seen, _):
        site.assert_published_once(site.submit())
    assert not [event for event in seen if event["type"].startswith("task")]


def test_nothing_that_a_message_brings_beside_its_job_is_carried_out(site: Site) -> None:
    """Neither another task on another app's queue, nor a limit that ends a child, nor a time that keeps a slot."""
    worker = site.machine.worker(concurrency=1)
    children = worker.children()
    site.hold()
    job = site.submit()
    with Celery(broker=site.broker.url) as app:
        app.send_task("acme.normal", queue="theirs", ignore_result=True)  # a queue with an exchange of its own
        evil = signature("acme.evil", options={"exchange": "theirs", "routing_key": "theirs"})
        options = {"queue": "reshard:interactive", "link": evil, "link_error": evil, "time_limit": 1}
        app.send_task("reshard.wake", (job,), **options)
        app.send_task("reshard.wake", (job,), **options, countdown=3600)
        app.send_task("reshard.wake", (7,), **options)
        app.send_task("reshard.wake", (job, 7), **options)
        app.send_task("reshard.wake", (), **options)
        app.send_task("acme.evil", **options)
    site.copying(job)
    site.space.admin.clear_faults()
    site.assert_published_once(job)
    wait_for(lambda: worker.said().count("dropped a message that is not a wake") == 4, "the others' being dropped")
    wait_for(lambda: not site.store.waiting()["interactive"], "the last message's being taken")
    site.assert_published_once(site.submit("after"), "after")
    assert site.client.llen("theirs") == 1
    assert worker.children() == children
    assert "Traceback" not in worker.said()


def test_wakes_that_are_purged_are_sent_again(site: Site) -> None:
    job = site.submit()
    wait_for(lambda: site.store.waiting()["interactive"], "its wake")
    purge = site.machine.launch("purge", [*CELERY, "purge", "-f"])
    assert purge.wait(60) == 0
    assert "Purged 1 message from 2 known task queues" in purge.said()
    site.machine.worker()
    site.assert_published_once(job)


@pytest.mark.slow
def test_workers_answer_neither_inspect_nor_control(site: Site) -> None:
    worker = typed(site)
    for command in (("inspect", "active"), ("control", "shutdown"), ("control", "revoke", "x"), ("status",)):
        asked = site.machine.launch("celery", [*CELERY, *command])
        assert asked.wait(60) == 69
        assert "No nodes replied" in asked.said()
    site.assert_published_once(site.submit())
    assert worker.alive()


# ------------------------------------------------------------------------------------------- jobs that others submit

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "celery.md").read_text()
LISTENER = """
import json
import redis
from celery import signals

heard = redis.Redis.from_url(os.environ["ACME_BROKER_URL"])
signals.task_postrun.connect(
    lambda task, args, **_: heard.rpush("acme:heard", json.dumps([task.name, *args])), weak=False
)
"""


def test_another_celery_app_submits_a_job_and_is_told_of_its_end_though_control_is_killed(site: Site) -> None:
    """The app is the guide's own, which sends by the user that the guide gives it."""
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    (rights,) = re.findall(r"^    user acme on >PASSWORD (.*)$", GUIDE, re.MULTILINE)
    site.client.execute_command("ACL", "SETUSER", "acme", "on", ">x", *rights.split())
    (site.machine.folder / "acme.py").write_text(code + LISTENER)
    of_all = {"ACME_BROKER_URL": site.broker.url}
    acme = [sys.executable, "-m", "celery", "-A", "acme", "worker", "-c", "1", "-Q", "celery,reshard:callbacks:acme"]
    site.machine.launch("acme", acme, **of_all)
    site.machine.worker(concurrency=1)

    def publish(name: str, *asked: tuple[str, object]) -> None:
        """By key and size."""
        calls = [f"acme.publish({site.source!r}, {site.space.repo(name)!r}, {size!r}, {key!r})" for key, size in asked]
        command = [sys.executable, "-c", "\n".join(["import acme", *calls])]
        as_acme = re.sub("//.*@", "//acme:x@", site.broker.url)
        sender = site.machine.launch("sender", command, **of_all, RESHARD_BROKER_URL=as_acme)
        assert sender.wait(60) == 0, sender.said()

    def heard(task: str, number: int) -> list[Any]:
        def answers() -> list[Any]:
            texts = [json.loads(text) for text in site.client.lrange("acme:heard", 0, -1)]
            return [args[0] for name, *args in texts if name == task]

        wait_for(lambda: len(answers()) >= number, f"{number} of {task}")
        return answers()

    publish("first", ("nightly-7", SIZE))
    (queued,), (done,) = heard("acme.queued", 1), heard("acme.ended", 1)
    assert queued == {"id": done["id"], "existed": False}
    job = site.store.get(done["id"])
    site.assert_published_once(job.id, "first")
    assert (done["state"], done["key"]) == ("done", "nightly-7")
    assert job.published is not None and done["commit"] == job.published["commit"]
    publish("first", ("nightly-7", SIZE))
    assert heard("acme.ended", 2)[1:] == [done] and heard("acme.queued", 2)[1:] == [queued | {"existed": True}]

    site.machine.processes[0].kill()
    publish("second", ("nightly-8", SIZE), ("nightly-8", SIZE), ("nightly-9", "huge"))
    assert site.client.llen("reshard:submit") == 3
    control = site.machine.control()
    refused, ended = heard("acme.ended", 4)[2:]
    assert (refused["state"], refused["key"], refused["error"]["code"]) == ("refused", "nightly-9", "usage.size")
    site.assert_published_once(ended["id"], "second")
    assert len(site.store.recent()) == 2, "one for each key"
    assert "Traceback" not in control.said()
