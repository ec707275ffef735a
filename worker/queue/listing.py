"""Pages of the list of jobs, newest first, however many there are; and those that have ended."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple, cast

import redis

from reshard.worker.queue.scripts import PREFIX, for_each, job_key, ms, server_ms, texts
from reshard.worker.queue.states import JobState


class Page(NamedTuple):
    """Some jobs: when each came into its list, in ms, and its id."""

    rows: list[tuple[float, str]]
    more: bool  # whether others follow them

    @property
    def ids(self) -> list[str]:
        return [id for _, id in self.rows]

    def after(self, count: int) -> str | None:
        """Where a page begins that follows the first ``count`` of them; None after the last."""
        if not count or (count == len(self.rows) and not self.more):
            return None
        score, id = self.rows[count - 1]
        return f"{score:.0f}-{id}"


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
    return Page(found[:limit], len(found) > limit)


def ended(client: redis.Redis, states: Iterable[JobState], age: float, most: int | None = None) -> list[str]:
    """The ids of jobs that came into one of these states at least ``age`` seconds ago, ``most`` of them at most."""
    horizon, found = server_ms(client) - ms(age), list[str]()
    for state in sorted(states):
        room = -1 if most is None else most - len(found)
        found += texts(client.zrangebyscore(f"{PREFIX}jobs:{state}", "-inf", horizon, 0, room))
    return found


class Latest:
    """Of jobs that come newest first, the first of each request, unless another job carries it out by now."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._seen = set[bytes]()  # keys of requests

    def of(self, ids: Iterable[str]) -> list[str]:
        """Those of ``ids``, which come after all that were given before."""
        ids = list(ids)
        rows = for_each(self._client, ids, lambda pipe, id: pipe.hmget(job_key(id), "key", "target"))
        first: dict[bytes, tuple[str, bytes]] = {}
        for id, (key, target) in zip(ids, rows, strict=True):
            if key not in self._seen:
                first.setdefault(key, (id, target or b""))
        self._seen |= first.keys()
        active = for_each(self._client, first.values(), lambda pipe, one: pipe.hget(f"{PREFIX}active", one[1]))
        asked = for_each(self._client, active, lambda pipe, id: pipe.hget(job_key((id or b"").decode()), "key"))
        return [id for (key, (id, _)), same in zip(first.items(), asked, strict=True) if key != same]


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
        raise ValueError(f"{after[:100]!r} does not start with a time")
    return float(score), id
