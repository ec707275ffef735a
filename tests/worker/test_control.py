"""The control process: it hears the bell, sends what is due, and puts away what is too old."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest

from reshard.pipeline.errors import JobNotFound, NoWeights, QueueError
from reshard.worker.control import LAYOUT, LAYOUT_KEY, Control
from reshard.worker.fleet.heartbeat import REMEMBERED, SEEN, announce
from reshard.worker.followers.cursor import Cursor
from reshard.worker.followers.records import Definition
from reshard.worker.queue.events import EVENTS, Reader
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.scripts import PREFIX
from reshard.worker.queue.states import JobState
from reshard.worker.settings import PRESUMED_DEAD, Settings
from tests.support.procs import Broker, Machine, wait_for
from tests.worker.conftest import Wakes, ask, claimed, process


@pytest.fixture
def control(store: JobStore, leases: Leases) -> Control:
    return Control(store, leases, Settings(keep_days=30))


def test_the_bell_is_heard_at_once(store: JobStore, control: Control, wakes: Wakes, broker: Broker) -> None:
    def submit() -> None:
        with JobStore.at(broker.url) as client:
            client.submit(ask())

    thread = threading.Timer(0.2, submit)
    thread.start()
    assert control.look(listen=0) == 1  # which returns at the bell, and without one never
    assert wakes.take() == ["interactive"]
    thread.join()


def test_what_is_due_is_sent_without_a_bell(store: JobStore, control: Control, wakes: Wakes) -> None:
    store.submit(ask())
    store.redis.delete(f"{PREFIX}bell")
    assert control.look(listen=1) == 1


def test_it_gives_signs_of_life_that_end_with_it(store: JobStore, control: Control) -> None:
    control.look(listen=1)
    [seen] = store.processes()
    assert seen.kind == "control"
    assert 0 < store.redis.pttl(f"{PREFIX}process:{seen.name}") <= PRESUMED_DEAD * 1000
    control.stop()
    control.run()
    assert store.processes() == []


def test_it_leaves_no_place_in_the_stream_but_one_whose_events_others_have_to_take_over(
    store: JobStore, control: Control
) -> None:
    def consumers() -> dict[str, int]:
        groups = [group["name"].decode() for group in store.redis.xinfo_groups(EVENTS)]
        return {group: len(store.redis.xinfo_consumers(EVENTS, group)) for group in groups}

    store.cancel(store.submit(ask()).id)
    dead = Reader(store.redis, "counters")
    assert dead.take() and set(consumers().values()) == {1}
    control.look(listen=0.01)
    assert len(consumers()) > 1 and max(consumers().values()) == 2
    dead.leave()
    control.stop()
    control.run()
    assert {group for group, left in consumers().items() if left} == {"counters"}


def test_a_newer_layout_is_refused_with_what_to_do(store: JobStore, control: Control, wakes: Wakes) -> None:
    store.submit(ask())
    store.redis.set(LAYOUT_KEY, LAYOUT + 1)
    for _ in range(2):
        with pytest.raises(QueueError, match=rf"layout {LAYOUT + 1}.*install the newer release here"):
            control.look(listen=0)
    assert wakes.take() == []
    store.redis.set(LAYOUT_KEY, LAYOUT)
    assert control.look(listen=1) == 1


def test_a_dead_process_is_forgotten(store: JobStore, control: Control) -> None:
    control.look(listen=1)
    [seen] = store.processes()
    store.redis.delete(f"{PREFIX}process:{seen.name}")  # its key ran out
    assert store.processes() == []
    assert store.redis.smembers(f"{PREFIX}processes") == set()


def test_who_died_is_forgotten_though_nobody_asks_for_processes(
    store: JobStore, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reshard.worker.control.RECONCILE", 0.0)  # as a minute later
    control.look(listen=0.01)
    for number in range(3):
        announce(store.redis, process(pod := f"pod-{number}:7"))
        store.redis.delete(f"{PREFIX}process:{pod}")  # its key ran out
    control.look(listen=0.01)
    assert store.redis.scard(f"{PREFIX}processes") == 1


def test_who_died_elsewhere_long_ago_is_remembered_no_more(store: JobStore, control: Control) -> None:
    dead = process("elsewhere:9")
    announce(store.redis, replace(dead, host="elsewhere"))
    store.redis.delete(f"{PREFIX}process:{dead.name}")
    said = json.loads(store.redis.hget(SEEN, dead.name) or b"")
    store.redis.hset(SEEN, dead.name, json.dumps(said | {"told": said["told"] - 2 * REMEMBERED}))
    control.look(listen=1)
    assert not store.redis.hexists(SEEN, dead.name)


def test_old_jobs_are_deleted_and_running_ones_never(store: JobStore, control: Control) -> None:
    running, new, old = (store.submit(ask(name=name)).id for name in ("running", "new", "old"))
    store.cancel(new)
    store.cancel(old)
    for job, state in ((old, "cancelled"), (running, "queued")):
        store.redis.zincrby(f"{PREFIX}jobs:{state}", -31 * 86_400_000, job)
    assert control.clean() == 1
    with pytest.raises(JobNotFound):
        store.get(old)
    assert store.get(new).state == JobState.cancelled
    assert store.get(running).state == JobState.queued


def test_more_old_jobs_than_a_look_may_delete_go_with_the_next_looks(
    store: JobStore, leases: Leases, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reshard.worker.control.JANITOR_BATCH", 2)
    running = store.submit(ask(name="running")).id
    store.redis.zincrby(f"{PREFIX}jobs:queued", -31 * 86_400_000, running)
    for name in "abcde":
        old = store.submit(ask(name=name)).id
        if failed := name in "ab":
            assert leases.fail(claimed(leases, old, "plan"), NoWeights(place="them/m", found="").to_dict()) == "ok"
        else:
            store.cancel(old)
        state = JobState.failed if failed else JobState.cancelled
        store.redis.zincrby(f"{PREFIX}jobs:{state}", -31 * 86_400_000, old)
    left = []
    for _ in range(4):
        control.look(listen=0.01)
        left.append(len(store.recent()))
    assert left == [4, 2, 1, 1]
    assert store.get(running).state == JobState.queued


def test_a_control_process_outlives_its_broker(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("control")
    with Broker(folder) as broker, Machine(folder, broker.url) as machine:
        control = machine.control()
        broker.kill()
        wait_for(lambda: "the broker is unavailable" in control.said(), "its noticing")
        broker.start()
        with JobStore.at(broker.url) as store:
            store.submit(ask())
            wait_for(lambda: store.waiting()["interactive"] == 1, "the wake")
        control.terminate()
        assert control.wait(10) == 0


def test_a_catalog_calls_only_the_hubs_that_the_operator_names(store: JobStore, control: Control) -> None:
    text = "name: mine\ndefaults: {to: 'us/{name}', size: 5MB, endpoint: 'http://127.0.0.2:1'}\nentries:\n"
    catalogs = Cursor(store)
    catalogs.submit(Definition(name="mine", text=f"{text}- query: {{author: them}}\n"))
    wait_for(lambda: (control.look(listen=0.01), catalogs.get("mine").state == "failed")[1], "the expanding")
    assert "jobs are not allowed to call http://127.0.0.2:1" in (catalogs.get("mine").note or "")
