"""What jobs took, by day, submitter and catalog: ``reshard:spent:<day>``, a hash, until it is KEEP old.

Its fields are JSON: what is counted, who submitted, and the catalog or "". A catalog's jobs are those of whoever
submitted it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import redis

from reshard.pipeline.limits import ASKED_BY_MAX
from reshard.worker.followers.catalogs import catalog_of, key
from reshard.worker.followers.counters import MOVED
from reshard.worker.followers.records import Limits
from reshard.worker.queue.events import Event, Reader
from reshard.worker.queue.scripts import PREFIX, Pipeline, at_once, decoded

DAY = 86_400  # seconds; days are those of UTC
KEEP = 400 * DAY  # a year, and the month in which somebody asks for it
FIELDS_MAX = 20_000  # of a day, some 2 MB; what further names took counts for OTHERS
OTHERS = "(others)"

COUNTED = ("jobs", "failed", *MOVED, "calls", "took")


class Spent(NamedTuple):
    """What one submitter's jobs of one catalog, or of none, took in one day."""

    day: int  # since the epoch
    submitter: str
    catalog: str
    counts: Mapping[str, int]  # by COUNTED; took in ms


class Spending:
    """Adds up what jobs took, and how many ended."""

    group = "spending"

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def handle(self, events: Sequence[Event], reader: Reader) -> None:
        def effect(pipe: Pipeline, left: Sequence[Event]) -> None:
            days: dict[str, Counter[str]] = {}
            for event in left:
                if fields := self._fields(event):
                    days.setdefault(_key_at(event), Counter()).update(fields)
            room = {day: FIELDS_MAX - pipe.hlen(day) for day in days}
            known = {day: pipe.hmget(day, list(fields)) for day, fields in days.items()}
            pipe.multi()
            for day, fields in days.items():
                for (field, count), was in zip(fields.items(), known[day], strict=True):
                    room[day] -= was is None
                    if was is None and room[day] < 0:
                        field = json.dumps([json.loads(field)[0], OTHERS, ""])
                    pipe.hincrby(day, field, count)
                pipe.expire(day, KEEP)

        reader.once(events, effect, *sorted(set(map(_key_at, events))))

    def _fields(self, event: Event) -> dict[str, int]:
        by = event.fields.get("by", "")[:ASKED_BY_MAX]
        catalog = catalog_of(by)
        submitter = self._owner(catalog) or by if catalog else by
        return {json.dumps([what, submitter, catalog]): count for what, count in _counted(event).items() if count}

    def _owner(self, catalog: str) -> str:
        """Who submitted a catalog; "" where it is gone."""
        limits = cast("bytes | None", self._redis.hget(key(catalog), "limits"))
        try:
            return Limits.known(limits or b"")[0].asked_by
        except ValueError:
            return ""


def _counted(event: Event) -> dict[str, int]:
    fields = event.fields
    match event.kind:
        case "ended":
            return {"jobs": 1, "failed": int(fields["state"] == "failed")}
        case "moved":
            return {what: int(fields[what]) for what in MOVED}
        case "spent":
            return {what: int(fields[what]) for what in (*MOVED, "calls", "took")}
    return {}


def spent_key(day: int) -> str:
    """Of the ``day``-th since the epoch."""
    return f"{PREFIX}spent:{day}"


def _key_at(event: Event) -> str:
    return spent_key(event.at // (DAY * 1000))


def spent(client: redis.Redis, days: Iterable[int]) -> Iterator[Spent]:
    """What was taken on these days since the epoch, each day's by submitter and catalog."""
    days = list(days)
    told = map(decoded, at_once(client, lambda pipe: [pipe.hgetall(spent_key(day)) for day in days]))
    for day, fields in zip(days, told, strict=True):
        rows: dict[tuple[str, str], dict[str, int]] = {}
        for field, count in fields.items():
            what, submitter, catalog = json.loads(field)
            rows.setdefault((submitter, catalog), dict.fromkeys(COUNTED, 0))[what] = int(count)
        for (submitter, catalog), counts in sorted(rows.items()):
            yield Spent(day, submitter, catalog, counts)
