"""Signs of life: each worker and control process writes a key that dies without it."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict

import redis

from reshard.worker.fleet.silent import SEEN, noted
from reshard.worker.queue.jobs import Process
from reshard.worker.queue.scripts import PREFIX
from reshard.worker.settings import PRESUMED_DEAD

log = logging.getLogger(__name__)


def announce(client: redis.Redis, process: Process) -> None:
    """Record that ``process`` lives, for the next PRESUMED_DEAD seconds."""
    with client.pipeline(transaction=False) as pipeline:
        pipeline.sadd(f"{PREFIX}processes", process.name)
        pipeline.hset(SEEN, process.name, noted(process))
        pipeline.set(f"{PREFIX}process:{process.name}", json.dumps(asdict(process)), px=round(PRESUMED_DEAD * 1000))
        pipeline.execute()


def withdraw(client: redis.Redis, process: Process) -> None:
    """Record that ``process`` has ended in order."""
    try:
        with client.pipeline(transaction=False) as pipeline:
            pipeline.srem(f"{PREFIX}processes", process.name)
            pipeline.hdel(SEEN, process.name)
            pipeline.delete(f"{PREFIX}process:{process.name}")
            pipeline.execute()
    except redis.RedisError as error:
        log.warning("the broker is unavailable at shutdown: %s", error)
