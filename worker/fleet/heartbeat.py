"""Signs of life: each worker and control process writes a key that dies without it.

Those that give none any more and did not end in order are told apart: stopped, hanging, or lost. A broker that is
away, or refuses writes, silences all of them, so that one hangs is said only while others are heard.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from math import inf
from typing import Any, Literal, NamedTuple

import redis

from reshard.worker.fleet.usage import PROC
from reshard.worker.queue.jobs import Process
from reshard.worker.queue.scripts import PREFIX, decoded, known_fields, ms
from reshard.worker.settings import HEARTBEAT, PRESUMED_DEAD

log = logging.getLogger(__name__)

SEEN = f"{PREFIX}seen"  # hash: name -> a process, with when it was heard last; until it ends in order
HEARD = f"{PREFIX}heard"  # string: since when somebody was heard all the time, in seconds since the epoch
GAP = 2 * HEARTBEAT  # seconds in which nobody is heard; shorter than any outage that outlasts somebody's key
REMEMBERED = 3600.0  # seconds in which a process of another machine may come back

Why = Literal["stopped", "hangs", "unknown"]


def this_process(kind: Literal["worker", "control"], concurrency: int, queues: list[str]) -> Process:
    """The one that asks, as it tells of itself."""
    host, pid = socket.gethostname(), os.getpid()
    return Process(
        name=f"{'' if kind == 'worker' else f'{kind}@'}{host}:{pid}",
        kind=kind,
        version=version("reshard"),
        host=host,
        pid=pid,
        concurrency=concurrency,
        started=time.time(),
        draining=False,
        queues=queues,
    )


def announce(client: redis.Redis, process: Process) -> None:
    """Record that ``process`` lives, for the next PRESUMED_DEAD seconds."""
    known = asdict(process)
    with client.pipeline() as pipeline:  # a broker that refuses one of them, as its memory is full, refuses all
        pipeline.set(HEARD, time.time(), px=ms(GAP), nx=True)
        pipeline.pexpire(HEARD, ms(GAP))
        pipeline.sadd(f"{PREFIX}processes", process.name)
        pipeline.hset(SEEN, process.name, json.dumps({**known, "told": time.time()}))
        pipeline.set(f"{PREFIX}process:{process.name}", json.dumps(known), px=ms(PRESUMED_DEAD))
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


class Silent(NamedTuple):
    """A process that was heard last at ``told``, in seconds since the epoch.

    ``unknown``: it is another machine's, or the broker heard nobody for a while.
    """

    process: Process
    told: float
    why: Why

    def __str__(self) -> str:
        pid, name = self.process.pid, self.process.name
        match self.why:
            case "stopped":
                return f"{name} is stopped: resume it with `kill -CONT {pid}` or replace it with `reshard up --restart`"
            case "hangs":
                return f"{name} hangs (see its log): replace it with `reshard up --restart` or run `kill -KILL {pid}`"
        silence = f"{name} has not been heard from for {time.time() - self.told:.0f} s"
        if self.process.host != socket.gethostname():
            return f"{silence}: check the machine it runs on"
        return f"{silence}: see its log (after an outage of the broker, it reconnects within {PRESUMED_DEAD:.0f} s)"


def silent(client: redis.Redis) -> list[Silent]:
    """Those that are still there as far as can be told; who died is forgotten."""
    kept = decoded(client.hgetall(SEEN))
    alive = client.mget([f"{PREFIX}process:{name}" for name in kept]) if kept else []
    heard = _number(client.get(HEARD)) < time.time() - PRESUMED_DEAD
    found, gone = list[Silent](), list[str]()
    for (name, said), lives in zip(kept.items(), alive, strict=True):
        if not lives:
            process, told = known_fields(Process, said), float(json.loads(said)["told"])
            why = _why(process)
            if why is None or (why == "unknown" and time.time() - told > REMEMBERED):
                gone.append(name)
            else:
                found.append(Silent(process, told, "unknown" if why == "hangs" and not heard else why))
    if gone:
        client.hdel(SEEN, *gone)
    return found


def _number(data: Any) -> float:
    """Later than any time where there is none, or what another program put there."""
    try:
        return float(data or "inf")
    except ValueError:
        return inf


def _why(process: Process) -> Why | None:
    """Why it gives no sign of life; None if it died."""
    if process.host != socket.gethostname():
        return "unknown"
    with suppress(OSError):
        if b"reshard" in (PROC / f"{process.pid}/cmdline").read_bytes():
            state = (PROC / f"{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            return "stopped" if state in "Tt" else None if state in "ZX" else "hangs"
    return None
