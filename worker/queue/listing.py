"""Pages of the list of jobs, newest first, however many there are."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple, cast

import redis

from reshard.worker.queue.scripts import PREFIX, ms
from reshard.worker.queue.states import JobState


class Page(NamedTuple):
    """The ids of some jobs, and where the next page begins; None after the last."""

    ids: list[str]
    next: str | None


def page(
    client: redis.Redis, states: Collection[JobState], limit: int, after: str | None = None, since: float = 0.0
) -> Page:
    """The newest ``limit`` jobs of these states or of all, ``after`` an earlier page.

    They are ordered by when they came into one of ``states``, or by their submit where all are asked for; none from
    before ``since``, in seconds since the epoch. Raises ValueError for an ``after`` that no page ended with.
    """
    place = _parsed(after) if after else (float("inf"), "")
    names = [f"jobs:{state}" for state in states] or ["jobs"]
    found = sorted({one for name in names for one in _of(client, name, limit + 1, place, ms(since))}, reverse=True)
    shown = found[:limit]
    return Page([id for _, id in shown], f"{shown[-1][0]:.0f}-{shown[-1][1]}" if len(found) > limit else None)


def _of(client: redis.Redis, name: str, count: int, place: tuple[float, str], least: int) -> list[tuple[float, str]]:
    """Up to ``count`` of one list before ``place``; several jobs may have come in the same millisecond."""
    asked = count
    while True:
        rows: Any = client.zrevrangebyscore(PREFIX + name, place[0], least, start=0, num=asked, withscores=True)
        found = [(score, id.decode()) for id, score in cast("list[tuple[bytes, float]]", rows)]
        before = [one for one in found if one < place]
        if len(before) >= count or len(found) < asked:
            return before[:count]
        asked *= 2


def _parsed(after: str) -> tuple[float, str]:
    score, _, id = after.partition("-")
    if not score.isascii() or not score.isdecimal() or len(score) > len(str(2**53)):
        raise ValueError(f"{after[:100]!r} begins with no time")
    return float(score), id
