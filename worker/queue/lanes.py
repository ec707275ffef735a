"""How much waits in each queue for a worker, and for how long."""

from __future__ import annotations

from typing import NamedTuple

import redis

from reshard.worker.queue.scripts import PREFIX, job_key, server_ms
from reshard.worker.queue.wakes import QUEUES

SEEN = 100  # jobs of a queue whose units are counted; a look costs no more with more of them


class Lane(NamedTuple):
    """Of one queue: the units that a worker could claim now, and how long the oldest of them waits, in seconds."""

    units: int
    oldest: float


def lanes(client: redis.Redis) -> dict[str, Lane]:
    """By queue; of more than SEEN jobs in one, those that come first are counted, and of the others a unit each."""
    now = server_ms(client)
    with client.pipeline(transaction=False) as pipeline:
        for queue in QUEUES:
            pipeline.zrange(f"{queue}:order", 0, SEEN - 1)
            pipeline.zrangebyscore(f"{queue}:due", "-inf", now, 0, SEEN)
            for line, last in ((f"{queue}:waked", "+inf"), (f"{queue}:due", now)):
                pipeline.zcount(line, "-inf", last)
                pipeline.zrangebyscore(line, "-inf", last, 0, 1, withscores=True)
        answers = pipeline.execute()
    found = {}
    for number, queue in enumerate(QUEUES):
        first, then, waked, longest, due, longest_due = answers[6 * number : 6 * number + 6]
        seen = [*first, *then]
        with client.pipeline(transaction=False) as pipeline:
            for job in seen:
                pipeline.zcount(job_key(job.decode(), "todo"), "-inf", now)
            units = waked + due - len(seen) + sum(pipeline.execute())
        oldest = max([0.0, *(now - since for _, since in [*longest, *longest_due])]) / 1000
        found[queue.removeprefix(PREFIX)] = Lane(units, oldest)
    return found
