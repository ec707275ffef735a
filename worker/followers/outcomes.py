"""How schedules and catalogs fare: when each last ended well, whether it is in trouble, and what operators are told.

    reshard:<what>s:success   hash: schedule or catalog -> when it last ended well, in ms
    reshard:<what>s:trouble   hash: the same -> when it last did not, until it ends well again
    reshard:schedules:unmet   hash: schedule -> the first of its times since it last ended well
    reshard:schedules:awaited hash: schedule -> the last job that it fired, of the events that were handled

Only the last job that a schedule fired says how it fares. Whoever cancels a job or a run knows, and is not told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from reshard.worker.followers import catalogs, schedules
from reshard.worker.followers.notices import NOTICES, keep
from reshard.worker.followers.schedules import ALL, AWAITED, UNMET
from reshard.worker.queue.events import Event, Reader
from reshard.worker.queue.scripts import Pipeline
from reshard.worker.queue.states import JobState

Write = Callable[[Pipeline], Any]


SUCCESS = {"schedule": schedules.SUCCESS, "catalog": catalogs.SUCCESS}
TROUBLE = {"schedule": schedules.TROUBLE, "catalog": catalogs.TROUBLE}
WATCHED = (ALL, AWAITED, NOTICES, *TROUBLE.values())


class Outcomes:
    """Notes how what schedules fired and catalogs ran has ended, and leaves a notice where somebody is to be told."""

    group = "outcomes"

    def handle(self, events: Sequence[Event], reader: Reader) -> None:
        for event in events:
            if event.kind in DECIDE:
                reader.once([event], self._effect, *WATCHED)
        reader.acknowledge(*events)

    def _effect(self, pipe: Pipeline, events: Sequence[Event]) -> None:
        (event,) = events
        writes = list(DECIDE[event.kind](pipe, event))
        pipe.multi()
        for write in writes:
            write(pipe)


def _fired(pipe: Pipeline, event: Event) -> Iterator[Write]:
    if pipe.hexists(ALL, event.fields["name"]):
        yield lambda pipe: pipe.hset(AWAITED, event.fields["name"], event.fields["job"])


def _job_ended(pipe: Pipeline, event: Event) -> Iterator[Write]:
    job, state = event.fields["job"], event.fields["state"]
    names = [name.decode() for name, last in pipe.hgetall(AWAITED).items() if last.decode() == job]
    if state == JobState.cancelled:
        return
    for name in names:
        about = {"what": "schedule", "name": name, "job": job}
        if state == JobState.done:
            recovered = pipe.hexists(TROUBLE["schedule"], name)
            yield from _well("schedule", name, event.at)
            if recovered:
                yield keep(event.at, kind="recovered", **about)
        else:
            yield _wrong("schedule", name, event.at)
            yield keep(event.at, kind="failed", error=event.fields["error"], **about)


def _catalog_ended(pipe: Pipeline, event: Event) -> Iterator[Write]:
    """A run ended well when no entry failed; its schedule fares as it does."""
    name, state, counts = event.fields["name"], event.fields["state"], json.loads(event.fields["counts"])
    if state not in {"done", "stopped", "failed"} or not pipe.sismember(catalogs.ALL, name):
        return
    schedule = event.fields["schedule"]
    if schedule and not pipe.hexists(ALL, schedule):
        schedule = ""
    fare = [("catalog", name), *([("schedule", schedule)] if schedule else [])]
    about = {"what": "catalog", "name": name, "schedule": schedule}
    if state == "done" and not counts.get("failed"):
        recovered = any([pipe.hexists(TROUBLE[what], which) for what, which in fare])
        for what, which in fare:
            yield from _well(what, which, event.at)
        if recovered:
            yield keep(event.at, kind="recovered", **about)
        return
    for what, which in fare:
        yield _wrong(what, which, event.at)
    told = {part: event.fields[part] for part in ("state", "note", "entries", "counts")}
    yield keep(event.at, kind="failed", **about, **told)


def _missed(pipe: Pipeline, event: Event) -> Iterator[Write]:
    name = event.fields["name"]
    if pipe.hexists(ALL, name):
        yield _wrong("schedule", name, event.at)
        yield keep(event.at, kind="missed", what="schedule", **event.fields)


def _well(what: str, name: str, at: int) -> Iterator[Write]:
    yield lambda pipe: pipe.hset(SUCCESS[what], name, at)
    yield lambda pipe: pipe.hdel(TROUBLE[what], name)
    if what == "schedule":
        yield lambda pipe: pipe.hdel(UNMET, name)


def _wrong(what: str, name: str, at: int) -> Write:
    return lambda pipe: pipe.hset(TROUBLE[what], name, at)


DECIDE = {"fired": _fired, "ended": _job_ended, "catalog": _catalog_ended, "missed": _missed}
