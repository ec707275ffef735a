"""What became of things since the broker began, for metrics: ``reshard:totals``, a hash of counters."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from reshard.worker.logs import job_ended
from reshard.worker.queue.events import Event, Reader
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.scripts import PREFIX, Pipeline
from reshard.worker.queue.states import JobState

TOTALS = f"{PREFIX}totals"


def counted(events: Sequence[Event]) -> Counter[str]:
    """What the events add to which counter: bytes that moved, jobs by state, failures and retries by error code."""
    found: Counter[str] = Counter()
    for event in events:
        match event.kind:
            case "moved":
                found.update({what: int(event.fields[what]) for what in ("read", "uploaded", "deduplicated")})
            case "ended":
                found[f"ended:{event.fields['state']}"] += 1
            case "failed":
                found[f"failed:{json.loads(event.fields['error'])['code']}"] += 1
            case "trouble":
                found[f"retried:{json.loads(event.fields['error'])['code']}"] += 1
    return found


class Counters:
    """Adds up events, and logs the end of a job that no worker knows of because a client made it, by a cancel."""

    group = "counters"

    def __init__(self, store: JobStore) -> None:
        self._store = store

    def handle(self, events: Sequence[Event], reader: Reader) -> None:
        def effect(pipe: Pipeline, left: Sequence[Event]) -> None:
            pipe.multi()
            for name, number in counted(left).items():
                pipe.hincrby(TOTALS, name, number)

        reader.once(events, effect, TOTALS)
        for event in events:
            if event.kind == "ended" and event.fields["state"] == JobState.cancelled:
                job_ended(self._store, event.fields["job"])
