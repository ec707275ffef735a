"""How much waits for a worker and for how long, how fast bytes come, and who goes before a job that waits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import exp
from typing import NamedTuple

import redis

from reshard.worker.queue.scripts import (
    FADES,
    NOT_BEGUN,
    PREFIX,
    Pipeline,
    at_once,
    decoded,
    for_each,
    job_key,
    server_ms,
)
from reshard.worker.queue.states import ENDED, JobState
from reshard.worker.queue.wakes import QUEUES

PACE = f"{PREFIX}pace"
LEAST = 10_000  # ms of copying before a rate is known
SEEN = 100  # jobs of a queue whose units are counted; a look costs no more with more of them
LEFT_MAX = 365 * 86400.0  # seconds; a time beyond tells nobody anything, and pages write no date after the year 9999
COUNTED = 100  # jobs at work, of each state, whose bytes are counted; with more no time is told


class Lane(NamedTuple):
    """Of one queue: the units that a worker could claim now, and how long the oldest of them waits, in seconds."""

    units: int
    oldest: float


class Place(NamedTuple):
    """Of a job that waits to begin: the 37th of 412, and the bytes that are copied before it, where they are known."""

    number: int
    of: int
    ahead: float | None


def lanes(client: redis.Redis) -> dict[str, Lane]:
    """By queue; of more than SEEN jobs in one, those that come first are counted, and of the others a unit each."""
    now = server_ms(client)

    def ask(pipe: Pipeline) -> None:
        for queue in QUEUES:
            pipe.zrange(f"{queue}:order", 0, SEEN - 1)
            pipe.zrangebyscore(f"{queue}:due", "-inf", now, 0, SEEN)
            for line, last in ((f"{queue}:waked", "+inf"), (f"{queue}:due", now)):
                pipe.zcount(line, "-inf", last)
                pipe.zrangebyscore(line, "-inf", last, 0, 1, withscores=True)
            pipe.zrange(f"{queue}:left", 0, 0, withscores=True)  # or its age would be that of the last look

    answers, found = at_once(client, ask), {}
    for number, queue in enumerate(QUEUES):
        first, then, waked, longest, due, longest_due, left = answers[7 * number : 7 * number + 7]
        seen = [*first, *then]
        todo = for_each(client, seen, lambda pipe, job: pipe.zcount(job_key(job.decode(), "todo"), "-inf", now))
        units = waked + due - len(seen) + sum(todo)
        oldest = max([0.0, *(now - since for _, since in [*longest, *longest_due, *left])]) / 1000
        found[queue.removeprefix(PREFIX)] = Lane(units, oldest)
    return found


def rate(fields: Mapping[str, str], now: int, of: str = "") -> float | None:
    """Bytes a second of a hash that `paced` of common.lua keeps, ``now`` in ms; None where nothing came lately.

    ``of`` is what its fields begin with.
    """
    left, at, begun = (_number(fields, f"{of}{name}") for name in ("paced", "paced_at", "paced_from"))
    if left is None or at is None or begun is None:
        return None
    since = now - begun
    if abs(now - at) > 2 * FADES or since < LEAST or not left > 0:
        return None
    return left * exp((at - now) / FADES) / (FADES / 1000 * (1 - exp(-since / FADES)))


def places(client: redis.Redis, jobs: Iterable[tuple[str, bool]]) -> tuple[dict[str, Place], float | None]:
    """Of these ids, and whether they are bulk, those that are in line; and the rate of all copies."""
    waiting = list(jobs)
    orders = [f"{queue}:order" for queue in QUEUES]

    def ask(pipe: redis.client.Pipeline) -> None:
        for order in orders:
            pipe.zcount(order, f"({NOT_BEGUN}", "+inf")
            pipe.zcount(order, "-inf", NOT_BEGUN)
        for id, bulk in waiting:
            pipe.zrank(orders[bulk], id)
        pipe.hgetall(PACE)
        for state in JobState:
            if state not in {*ENDED, JobState.queued}:
                pipe.zrange(f"{PREFIX}jobs:{state}", 0, COUNTED - 1)

    quick, quick_begun, bulky, bulky_begun, *answers = at_once(client, ask)
    ranks, pace, active = answers[: len(waiting)], decoded(answers[len(waiting)]), answers[len(waiting) + 1 :]
    left = {False: 0.0, True: 0.0}
    for bytes_, is_bulk in _left(client, [id.decode() for ids in active for id in ids]):
        left[is_bulk] += bytes_ or 0
    cut = any(len(ids) == COUNTED for ids in active)
    mean = _number(pace, "mean")
    found = {}
    for (id, bulk), rank in zip(waiting, ranks, strict=True):
        begun = bulky_begun if bulk else quick_begun
        if rank is not None and rank >= begun:
            before = rank - begun + (quick if bulk else 0)
            ahead = left[False] + left[True] * bulk + before * (mean or 0.0)  # interactive ones wait for no others
            known = not cut and (mean is not None or not before)
            found[id] = Place(before + 1, quick + bulky if bulk else quick, ahead if known else None)
    return found, rate(pace, server_ms(client))


def remaining(client: redis.Redis, jobs: Collection[str], more: int) -> float | None:
    """Seconds until these jobs and so many others have copied all, by the rate of all copies; None where unknown."""
    if len(jobs) > COUNTED:
        return None
    pace, left = decoded(client.hgetall(PACE)), [bytes_ for bytes_, _ in _left(client, jobs)]
    unplanned, speed, mean = more + left.count(None), rate(pace, server_ms(client)), _number(pace, "mean")
    if not speed or (unplanned and mean is None):
        return None
    return until(sum(filter(None, left)) + unplanned * (mean or 0), speed)


def until(bytes_: float, speed: float) -> float | None:
    """Seconds until so many bytes are copied; None where that is no time to wait for."""
    return left if (left := bytes_ / speed) <= LEFT_MAX else None


def _number(fields: Mapping[str, str], name: str) -> float | None:
    """As `number` of common.lua reads it; None where none is there, or a client wrote what nobody can count with."""
    try:
        found = float(fields[name])
    except (KeyError, ValueError):
        return None
    return found if abs(found) < 2**53 else None


def _left(client: redis.Redis, jobs: Collection[str]) -> list[tuple[int | None, bool]]:
    """Bytes that each has still to copy, None before its plan; and whether it is bulk."""
    fields = "bytes", "bytes_sealed", "priority"
    answers = at_once(client, lambda pipe: [pipe.hmget(job_key(id), *fields) for id in jobs])
    return [
        (max(0, int(all_) - int(done or 0)) if all_ else None, priority == b"bulk") for all_, done, priority in answers
    ]
