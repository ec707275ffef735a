"""How schedules and catalogs fare: when each last ended well, whether it is in trouble, and the notices of it.

    reshard:<what>s:success   hash: schedule or catalog -> when it last ended well, in ms
    reshard:<what>s:trouble   hash: the same -> when it last did not, until it ends well again
    reshard:schedules:unmet   hash: schedule -> the first of its times since it last ended well
    reshard:schedules:awaited hash: schedule -> the last job that it fired, of the events that were handled

An end counts once, by its time: where a client fired the job, its end may come before the event of that (events.py).
Only the last job that a schedule fired counts. A cancelled job or run leaves no notice: its operator knows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from reshard.worker.followers import catalogs, schedules
from reshard.worker.followers.notices import NOTICES, NOTIFY_FOR, keep
from reshard.worker.followers.schedules import ALL, AWAITED, UNMET
from reshard.worker.queue.events import Event, Reader
from reshard.worker.queue.scripts import Pipeline, decoded, job_key, ms, server_ms
from reshard.worker.queue.states import ENDED, JobState

Write = Callable[[Pipeline], Any]
Subjects = Sequence[tuple[str, str]]  # schedule or catalog, and its name

SUCCESS = {"schedule": schedules.SUCCESS, "catalog": catalogs.SUCCESS}
TROUBLE = {"schedule": schedules.TROUBLE, "catalog": catalogs.TROUBLE}
WATCHED = (ALL, AWAITED, NOTICES, *TROUBLE.values())


class Outcomes:
    """Notes how what schedules fired and catalogs ran has ended, and leaves a notice where operators should know."""

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
    name, job = event.fields["name"], event.fields["job"]
    if pipe.hexists(ALL, name):
        yield lambda pipe: pipe.hset(AWAITED, name, job)
        seen = decoded(pipe.hgetall(job_key(job)))
        if seen.get("state") in ENDED:
            yield from _awaited_ended(pipe, name, job, int(seen["since"]), seen["state"], seen.get("error", ""))


def _job_ended(pipe: Pipeline, event: Event) -> Iterator[Write]:
    job, state, error = (event.fields[part] for part in ("job", "state", "error"))
    for name, last in decoded(pipe.hgetall(AWAITED)).items():
        if last == job:
            yield from _awaited_ended(pipe, name, job, event.at, state, error)


def _awaited_ended(pipe: Pipeline, name: str, job: str, at: int, state: str, error: str) -> Iterator[Write]:
    well = state == JobState.done
    noted = pipe.hget((SUCCESS if well else TROUBLE)["schedule"], name)
    if state != JobState.cancelled and noted != b"%d" % at:
        about = {"what": "schedule", "name": name, "job": job}
        yield from _ended(pipe, at, well, [("schedule", name)], about, {"error": error})


def _catalog_ended(pipe: Pipeline, event: Event) -> Iterator[Write]:
    """A run ended well when no entry failed; its schedule fares as it does."""
    name, state, schedule = event.fields["name"], event.fields["state"], event.fields["schedule"]
    if state not in {"done", "stopped", "failed"} or not pipe.sismember(catalogs.ALL, name):
        return
    if schedule and not pipe.hexists(ALL, schedule):
        schedule = ""
    well = state == "done" and not json.loads(event.fields["counts"]).get("failed")
    subjects = [("catalog", name), *([("schedule", schedule)] if schedule else [])]
    about = {"what": "catalog", "name": name, "schedule": schedule}
    failure = {part: event.fields[part] for part in ("state", "note", "entries", "counts")}
    yield from _ended(pipe, event.at, well, subjects, about, failure)


def _missed(pipe: Pipeline, event: Event) -> Iterator[Write]:
    name = event.fields["name"]
    if pipe.hexists(ALL, name):
        yield _note(event.at, False, [("schedule", name)])
        yield from _told(pipe, event.at, kind="missed", what="schedule", **event.fields)


def _ended(
    pipe: Pipeline, at: int, well: bool, subjects: Subjects, about: dict[str, str], failure: dict[str, str]
) -> Iterator[Write]:
    """Notes how these fare; a notice tells a failure, and the first success after one."""
    recovered = well and any([pipe.hexists(TROUBLE[what], name) for what, name in subjects])
    yield _note(at, well, subjects)
    if recovered:
        yield from _told(pipe, at, kind="recovered", **about)
    if not well:
        yield from _told(pipe, at, kind="failed", **about, **failure)


def _told(pipe: Pipeline, at: int, **fields: str) -> Iterator[Write]:
    """A notice, unless the event is as old as notices are that nobody took: control was away for long."""
    if server_ms(pipe) - at <= ms(NOTIFY_FOR):
        yield keep(at, **fields)


def _note(at: int, well: bool, subjects: Subjects) -> Write:
    def write(pipe: Pipeline) -> None:
        for what, name in subjects:
            pipe.hset((SUCCESS if well else TROUBLE)[what], name, at)
            if well:
                pipe.hdel(TROUBLE[what], name)
            if well and what == "schedule":
                pipe.hdel(UNMET, name)

    return write


DECIDE = {"fired": _fired, "ended": _job_ended, "catalog": _catalog_ended, "missed": _missed}
