"""The broker's clock goes back by an hour while a dead control holds events, a notice and a catalog's expansion.

No broker's clock can be set here. Streams are left as it would: their dump, with the times in it an hour later, is
restored. What is stored as a number is set.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import pytest

from reshard.worker.followers import notices
from reshard.worker.followers.cursor import EXPAND_LEASE, Cursor
from reshard.worker.followers.notices import NOTICES, Notice, Notifier
from reshard.worker.followers.outcomes import Outcomes
from reshard.worker.queue.events import EVENTS, Reader, follow
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.scripts import PREFIX, server_ms
from tests.worker.conftest import ask
from tests.worker.followers.builders import definition

HOUR = 3_600_000  # ms
POLYNOMIAL = 0x95AC9329AC4BC9B5  # of Redis's CRC-64 (Jones), reflected


@cache
def crc_of(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (POLYNOMIAL if byte & 1 else 0)
    return byte


def crc64(data: bytes) -> int:
    crc = 0
    for byte in data:
        crc = crc_of((crc ^ byte) & 0xFF) ^ crc >> 8
    return crc


def clock_jumps_back(store: JobStore, stream: str) -> None:
    """By an hour: every delivery that is noted in the stream is yet to come."""
    client = cast(Any, store.redis)
    payload = client.dump(stream)[:-8]
    groups = client.execute_command("XINFO", "STREAM", stream, "FULL")
    told = dict(zip(groups[::2], groups[1::2], strict=True))[b"groups"]
    pending = [one for group in told for one in dict(zip(group[::2], group[1::2], strict=True))[b"pending"]]
    for time in {one[2] for one in pending}:
        payload = payload.replace(time.to_bytes(8, "little"), (time + HOUR).to_bytes(8, "little"))
    client.restore(stream, 0, payload + crc64(payload).to_bytes(8, "little"), replace=True)


class Told:
    name = "told"

    def __init__(self) -> None:
        self.took: list[str] = []

    def tell(self, notice: Notice) -> None:
        self.took.append(notice.name)


class Dies(BaseException):
    """As a kill would: nothing that a hook's own failure brings about happens."""


class Dying(Told):
    def tell(self, notice: Notice) -> None:
        raise Dies


def test_events_of_a_dead_control_are_taken_over_and_those_of_a_living_one_are_not(store: JobStore) -> None:
    dead, living = Reader(store.redis, "counters"), Reader(store.redis, "counters")
    store.submit(ask())
    taken = dead.take()
    assert taken and living.take() == []
    clock_jumps_back(store, EVENTS)
    assert living.take() == taken
    assert Reader(store.redis, "counters").take() == [], "one takes them over, and the next waits for that one"
    living.acknowledge(*taken)
    assert dead.take() == []


def test_followers_go_on_behind_what_a_dead_control_had(store: JobStore) -> None:
    store.cancel(store.submit(ask()).id)
    assert Reader(store.redis, Outcomes.group).take()
    clock_jumps_back(store, EVENTS)
    reader = Reader(store.redis, Outcomes.group)
    assert follow(Outcomes(), reader) > 0
    assert cast(Any, store.redis).xpending(EVENTS, Outcomes.group)["pending"] == 0


def test_a_notice_of_a_dead_control_is_told_by_the_next(store: JobStore) -> None:
    hook = Told()
    Notifier(store, [hook]).listen()
    with store.redis.pipeline() as pipe:
        notices.keep(1, kind="recovered", what="schedule", name="nightly", job="x")(pipe)
        pipe.execute()
    with pytest.raises(Dies):
        Notifier(store, [Dying()]).tell(Dying())
    living = Notifier(store, [hook])
    assert living.tell(hook) is None and hook.took == []
    clock_jumps_back(store, NOTICES)
    assert living.tell(hook) == "told" and hook.took == ["nightly"]


@pytest.mark.parametrize(("ahead", "taken"), [(EXPAND_LEASE - 1, False), (3600.0, True)])
def test_an_expansion_is_taken_over_when_its_claim_ends_later_than_any_could(
    store: JobStore, ahead: float, taken: bool
) -> None:
    catalogs = Cursor(store)
    assert catalogs.submit(definition(1))
    run = catalogs.claim("mirror", "dead")
    assert run and catalogs.claim("mirror", "living") == ""
    store.redis.hset(f"{PREFIX}catalog:mirror", "expander_until", server_ms(store.redis) + round(ahead * 1000))
    assert catalogs.claim("mirror", "living") == (run if taken else "")
