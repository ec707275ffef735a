"""Everything that happens on a queue, as it happens."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import redis

from reshard.client.facts import happened
from reshard.client.models.jobs import BEGUN, Happened, Progress
from reshard.client.queue import Queue
from reshard.pipeline.errors import BrokerUnavailable
from reshard.worker.logs import Outage
from reshard.worker.queue import events
from reshard.worker.queue.jobs import JobStore, broker_errors, open_redis, without_password

log = logging.getLogger(__name__)

BATCH = 500  # events that are read at once

Id = tuple[int, int]  # of the queue's stream; later events have greater ones
Row = tuple[bytes, Mapping[bytes, bytes]]


class News(NamedTuple):
    """One thing that happened, to a job or to something else."""

    id: Id
    job: str | None
    event: Happened


def since(queue: Queue, after: Id) -> Iterator[list[News]]:
    """What the queue still knows of events after that one, in batches."""
    last, more = f"{after[0]}-{after[1]}", True
    while more:
        rows = _rows(queue.jobs.redis, last)
        yield _readable(rows)
        last, more = _last(rows, last), len(rows) == BATCH


class Followed:
    """The events of a queue from the first look on, read by a connection of its own: its looks wait.

    Each raises BrokerUnavailable and BrokerRefused; the next one goes on where the last one ended. Who looks again and
    again logs by ``outage`` what they raise.
    """

    def __init__(self, queue: Queue) -> None:
        self._client = open_redis(queue.jobs.url)
        self._store = JobStore(self._client, queue.jobs.url)
        self._after = ""
        self.outage = Outage(log)

    def look(self, wait: float) -> list[News]:
        """What came since the last look; waits up to ``wait`` seconds for it."""
        client: Any = self._client
        with self._asking():
            if not self._after:  # each event after this one, also while nothing is read
                self._after = _last(client.xrevrange(events.EVENTS, count=1), "0-0")
            rows = _rows(client, self._after, round(wait * 1000))
        self._after = _last(rows, self._after)
        return _readable(rows)

    def progress(self, most: int) -> list[Progress]:
        """How far jobs are that have begun and not ended, the newest of them."""
        with self._asking():
            return [Progress.of(job) for job in self._store.recent(BEGUN, most)]

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            with broker_errors(self._store.url):
                yield
        except redis.RedisError as error:  # UNBLOCKED, of a server whose role changes
            raise BrokerUnavailable(url=without_password(self._store.url), why=str(error)) from error


def parsed(id: str) -> Id:
    """An id as it is written: ``1700000000000-0``."""
    first, _, second = id.partition("-")
    return int(first), int(second)


def _rows(client: Any, after: str, block: int | None = None) -> list[Row]:
    answer = client.xread({events.EVENTS: after}, count=BATCH, block=block) or []
    return [row for _, found in answer for row in found]


def _last(rows: list[Row], default: str) -> str:
    return rows[-1][0].decode() if rows else default


def _readable(rows: list[Row]) -> list[News]:
    """All but those of a newer release, or of anybody's who reaches the broker."""
    found = []
    for id, data in rows:
        try:
            event = events.Event.read(id, data)
            told = happened({"kind": event.kind, "at": str(event.at), **event.fields})
            found.append(News(parsed(event.id), event.fields.get("job"), told))
        except (LookupError, ValueError, RecursionError) as error:
            log.error("cannot read event %s here; skipping it: %s", id.decode(), type(error).__name__)
    return found
