"""What became of things since the broker began, for metrics: ``reshard:totals``, a hash of counters.

Beside it ``reshard:totals:<hour>``, the same but times for the hours of the last day, and
``reshard:process:<name>:moved``, the bytes of one worker, until it has moved none for KEEP_MOVED.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from math import inf

import redis

from reshard.worker import tracing
from reshard.worker.followers import submissions
from reshard.worker.logs import job_ended
from reshard.worker.queue.events import TOTALS, Event, Reader
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.scripts import PREFIX, Pipeline, at_once, decoded

MOVED = ("read", "uploaded", "deduplicated")
HOUR = 3_600_000  # ms
HOURS = 24  # that are shown
KEEP_HOUR = (HOURS + 2) * 3600  # seconds; the first and the last of them are parts of hours
KEEP_MOVED = 86_400  # seconds; longer than a copy may pause, and not for ever: workers come and go

BUCKETS = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0)  # seconds: a tiny step to a night


def counted(events: Iterable[Event]) -> Counter[str]:
    """What the events add to which counter: bytes that moved, jobs by state, failures and retries by error code, times.

    A time counts in the first of BUCKETS that it fits into, and in a sum of ms.
    """
    found: Counter[str] = Counter()
    for event in events:
        fields = event.fields
        match event.kind:
            case "moved":
                found.update({what: int(fields[what]) for what in MOVED})
            case "claimed":
                found.update(_time("queued", fields.get("waited")))
            case "finished":
                found.update(_time(f"step:{fields['unit'].partition(':')[0]}", fields.get("took")))
            case "ended":
                found.update(_time(f"job:{fields['state']}", fields.get("took")))
                found[f"ended:{fields['state']}"] += 1
            case "failed":
                found[f"failed:{json.loads(fields['error'])['code']}"] += 1
            case "trouble":
                found[f"retried:{json.loads(fields['error'])['code']}"] += 1
    return found


def _time(what: str, ms: str | None) -> Counter[str]:
    """Nothing without a time, as that of a job that no worker took up."""
    if not ms:
        return Counter()
    took = max(0, int(ms))  # the broker's clock may have been put back
    bucket = next((most for most in BUCKETS if took <= most * 1000), inf)
    return Counter({f"times:{what}:{bucket}": 1, f"times:{what}:sum": took})


def moved_key(worker: str) -> str:
    return f"{PREFIX}process:{worker}:moved"


def hour_key(hour: int) -> str:
    """Of the ``hour``-th since the epoch."""
    return f"{TOTALS}:{hour}"


def by_hour(client: redis.Redis, now: int) -> list[tuple[float, dict[str, int]]]:
    """When each of the last HOURS began, in seconds since the epoch, with its counters; ``now`` in ms."""
    hours = range(now // HOUR - HOURS + 1, now // HOUR + 1)
    found = map(decoded, at_once(client, lambda pipe: [pipe.hgetall(hour_key(hour)) for hour in hours]))
    return [(hour * 3600.0, {name: int(n) for name, n in one.items()}) for hour, one in zip(hours, found, strict=True)]


class Counters:
    """Adds up events, and logs and traces each end of a job: before it is acknowledged, so that none is left out by
    who dies. Tells it to the Celery apps that submitted the job as well, once.
    """

    group = "counters"

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._logged: set[str] = set()  # ids of the events at hand, for an effect that has to be written again

    def handle(self, events: Sequence[Event], reader: Reader) -> None:
        self._logged &= {event.id for event in events}

        def effect(pipe: Pipeline, left: Sequence[Event]) -> None:
            sends = [send for event in left if event.kind == "ended" for send in submissions.ended(pipe, event)]
            for event in left:
                if event.kind == "ended" and event.id not in self._logged:
                    tracing.job_ended(event, job_ended(self._store, event))
                    self._logged.add(event.id)
            pipe.multi()
            for send in sends:
                send(pipe)
            for hour, events in groupby(left, lambda event: event.at // HOUR):
                for name, number in counted(events).items():
                    pipe.hincrby(TOTALS, name, number)
                    if not name.startswith("times:"):
                        pipe.hincrby(hour_key(hour), name, number)
                pipe.expire(hour_key(hour), KEEP_HOUR)
            for event in left:
                if event.kind == "moved" and (worker := event.fields.get("worker")):
                    for what in MOVED:
                        pipe.hincrby(moved_key(worker), what, int(event.fields[what]))
                    pipe.expire(moved_key(worker), KEEP_MOVED)

        reader.once(events, effect, TOTALS)
