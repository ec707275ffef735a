"""Jobs that have ended: found by state and age, and deleted, each in one step with all that is kept of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress

import redis

from reshard.worker.queue.scripts import PREFIX, Scripts, ms, server_ms, texts
from reshard.worker.queue.states import JobState

BATCH = 1000  # jobs that are deleted in one exchange with the broker


def ended(client: redis.Redis, states: Iterable[JobState], age: float, most: int | None = None) -> list[str]:
    """The ids of jobs that came into one of these states at least ``age`` seconds ago, ``most`` of them at most."""
    horizon, found = server_ms(client) - ms(age), list[str]()
    for state in sorted(states):
        room = -1 if most is None else most - len(found)
        found += texts(client.zrangebyscore(f"{PREFIX}jobs:{state}", "-inf", horizon, 0, room))
    return found


def delete(client: redis.Redis, jobs: Sequence[str]) -> list[str]:
    """Delete those that are there and have not been retried meanwhile; returns which. What they published stays."""
    deleted = list[str]()
    for first in range(0, len(jobs), BATCH):
        with client.pipeline(transaction=False) as pipeline:
            step = Scripts(pipeline)
            for id in (batch := jobs[first : first + BATCH]):
                step("delete", id)
            deleted += compress(batch, pipeline.execute())
    return deleted
