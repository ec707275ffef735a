"""A queue as the release before the event stream left it, taken over with jobs, a catalog and a notice under way."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from reshard.pipeline.errors import NoWeights, QueueError
from reshard.worker.control import Control
from reshard.worker.followers.cursor import Cursor
from reshard.worker.followers.migration import LAYOUT, LAYOUT_KEY, migrate
from reshard.worker.followers.notices import Notice, Notifier
from reshard.worker.followers.schedules import Schedules
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from reshard.worker.settings import LEASE, Settings
from tests.worker.conftest import age, followed
from tests.worker.test_catalogs import fail, finish

# Written by 0.1.0 at dab912f: a job that waits, three that schedules fired, one of them failed, a catalog with two of
# its three models at work, and a notice that its hook has not taken.
DATA = json.loads((Path(__file__).parent / "data" / "layout_1.json").read_text())


def restore(store: JobStore) -> None:
    tomorrow = (time.time() + 86400) * 1000  # when its schedules were due next is over
    for key, kept in DATA.items():
        value: Any = dict.fromkeys(kept["value"], tomorrow) if key == "reshard:schedules:due" else kept["value"]
        match kept["type"]:
            case "hash":
                store.redis.hset(key, mapping=value)
            case "zset":
                store.redis.zadd(key, value)
            case "set":
                store.redis.sadd(key, *value)
            case "list":
                store.redis.rpush(key, *value)
            case "string":
                store.redis.set(key, value)
            case "stream":
                for id, fields in value:
                    store.redis.xadd(key, fields, id=id)


class Heard:
    """A hook that takes everything."""

    name = "url"

    def __init__(self) -> None:
        self.notices: list[Notice] = []

    def tell(self, notice: Notice) -> None:
        self.notices.append(notice)


def test_a_running_queue_goes_on(store: JobStore, leases: Leases) -> None:
    restore(store)
    (notice,) = [value["value"] for key, value in DATA.items() if key.startswith("reshard:notice:")]
    catalogs, schedules, heard = Cursor(store), Schedules(store), Heard()
    control = Control(store, leases, Settings())
    control.look(listen=0.01)

    notifier = Notifier(store, [heard])
    notifier.listen()
    while notifier.tell(heard):
        pass
    assert [(told.id, told.kind, told.name) for told in heard.notices] == [(notice["id"], "failed", "told")]
    assert [
        key for key in store.redis.keys("reshard:*") if key.startswith((b"reshard:outbox", b"reshard:notice:"))
    ] == []

    # The job that a schedule had fired fails, and the one that had failed is done after all.
    alone, told = (schedules.get(name).runs[0].job or "" for name in ("alone", "told"))
    fail(leases, alone)
    store.retry(told)
    finish(leases, told)
    # The models of the catalog go on where they were; a worker had one of them.
    while active := list(catalogs.get("mirror").active.values()):
        for job in active:
            age(store, job, LEASE + 1)
            finish(leases, job)
        followed(store)
    assert (catalogs.get("mirror").state, catalogs.get("mirror").counts()) == ("done", {"same": 3})
    followed(store)
    heard.notices.clear()
    while notifier.tell(heard):
        pass
    assert [(told.kind, told.name, told.codes) for told in heard.notices] == [
        ("failed", "alone", {NoWeights.code: 1}),
        ("recovered", "told", None),
    ]
    assert schedules.get("nightly").success is not None
    assert int(store.redis.get(LAYOUT_KEY) or 0) == LAYOUT


def test_it_is_taken_over_once(store: JobStore) -> None:
    restore(store)
    for _ in range(2):
        migrate(store.redis)
        before = {key: store.redis.dump(key) for key in store.redis.keys("*")}
    migrate(store.redis)
    assert {key: store.redis.dump(key) for key in store.redis.keys("*")} == before


def test_what_workers_of_an_earlier_release_left_unacknowledged_goes(store: JobStore) -> None:
    store.redis.hset("reshard:unacked", "tag", "a wake that a dead worker had")
    store.redis.zadd("reshard:unacked_index", {"tag": 1})
    migrate(store.redis)
    assert store.redis.keys("*unacked*") == []


def test_a_newer_layout_is_refused_with_what_to_do(store: JobStore, leases: Leases) -> None:
    store.redis.set(LAYOUT_KEY, LAYOUT + 1)
    with pytest.raises(QueueError, match=rf"layout {LAYOUT + 1}.*install the newer release here"):
        Control(store, leases, Settings()).look(listen=0.01)
