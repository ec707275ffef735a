"""Workers and controls that give no sign of life any more and did not end in order: stopped, hanging, or lost."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Literal, NamedTuple

import redis

from reshard.worker.fleet.usage import PROC
from reshard.worker.queue.jobs import Process
from reshard.worker.queue.scripts import PREFIX, decoded, known_fields

SEEN = f"{PREFIX}seen"  # hash: name -> a process, with when it was heard last; until it ends in order
REMEMBERED = 3600.0  # seconds in which a process of another machine may come back

Why = Literal["stopped", "hangs", "unknown"]


class Silent(NamedTuple):
    """A process that was heard last at ``told``, in seconds since the epoch; ``unknown``: it is another machine's."""

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
        return f"{name} has not been heard from for {time.time() - self.told:.0f} s: check the machine it runs on"


def noted(process: Process) -> str:
    """What ``SEEN`` keeps of a process that lives now."""
    return json.dumps({**asdict(process), "told": time.time()})


def silent(client: redis.Redis) -> list[Silent]:
    """Those that are still there as far as can be told; who died is forgotten."""
    kept = decoded(client.hgetall(SEEN))
    alive = client.mget([f"{PREFIX}process:{name}" for name in kept]) if kept else []
    found = dict(_judged({name: said for (name, said), lives in zip(kept.items(), alive, strict=True) if not lives}))
    if gone := [name for name, one in found.items() if one is None]:
        client.hdel(SEEN, *gone)
    return [one for one in found.values() if one is not None]


def _judged(kept: dict[str, str]) -> Iterator[tuple[str, Silent | None]]:
    for name, said in kept.items():
        process, told = known_fields(Process, said), float(json.loads(said)["told"])
        why = _why(process)
        lost = why is None or (why == "unknown" and time.time() - told > REMEMBERED)
        yield name, None if lost or why is None else Silent(process, told, why)


def _why(process: Process) -> Why | None:
    """Why it gives no sign of life; None if it died."""
    if process.host != socket.gethostname():
        return "unknown"
    with suppress(OSError):
        if b"reshard" in (PROC / f"{process.pid}/cmdline").read_bytes():
            state = (PROC / f"{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            return "stopped" if state in "Tt" else None if state in "ZX" else "hangs"
    return None
