"""What is said of catalogs and schedules."""

from __future__ import annotations

from typing import Literal, TypeVar

from pydantic import Field

from reshard.client.models.records import Bytes, Document, Fired, Known, Moment, Outcome, Problem, Run, Seconds, absent
from reshard.worker.followers import records

_LEFT = "seconds until everything is copied; null if unknown or waiting"
_COUNTS = "number of models by outcome; `failed:CODE` counts those with that error code"
_NEXT = "`after` for the next page; null on the last page"
_MORE = "`after` for the next page; absent on the last page"

Of = TypeVar("Of")


def by_number(groups: dict[str, list[Of]]) -> dict[str, list[Of]]:
    """The largest first."""
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


class OfModel(Document):
    repo: str


class CatalogWrong(Problem, OfModel):
    """Why a model cannot be resharded."""


class CatalogEntry(Document):
    repo: str
    target: str | None
    commit: str | None
    bytes: Bytes | None
    exists: bool
    standing: str
    error: str | None


class CatalogChecked(Document):
    name: str
    models: int
    empty: list[int] = Field(description="indexes of the entries that match no models")
    unwritable: list[str]
    ready: int
    new: int
    gated: list[str]
    bytes: Bytes
    growth: Bytes
    calls: int
    unchanged: int | None
    drift: list[str] | None
    wrong: list[CatalogWrong]
    entries: list[CatalogEntry]


class CatalogSubmitted(Document):
    name: str
    digest: str
    existed: bool
    waits: str | None
    outdated_schedules: list[str]
    state: str | None


class CatalogFile(Document):
    """A catalog as last submitted."""

    name: str
    digest: str
    text: str
    at_once: int
    max_failures: int | None
    max_bytes: Bytes | None
    asked_by: str


class Ended(Document):
    outcome: Outcome
    job: str | None
    commit: str | None
    read: Bytes
    uploaded: Bytes
    error: Problem | None
    repo: str
    target: str | None

    @property
    def in_file(self) -> bool:
        """Whether it failed by what only the catalog's file can correct."""
        return self.error is not None and self.error.code in records.IN_FILE


class Catalog(Document):
    name: str
    digest: str
    asked_by: str
    at_once: int = Field(description="maximum number of its jobs to run at once")
    state: str
    note: str | None
    started: Moment
    since: Moment
    success: Moment | None
    entries: int
    todo: int
    active: dict[str, str] = Field(description="job IDs by repository")
    running: int = Field(description="number of its jobs; a repository can have several")
    empty: list[int]
    counts: dict[str, int] = Field(description=_COUNTS)
    left: Seconds | None = Field(default=None, description=_LEFT)
    read: Bytes
    uploaded: Bytes
    ended: list[Ended] = Field(description="a page of the models that ended")
    next: int | None = Field(default=None, exclude_if=absent, description=_MORE)
    waits: str | None = Field(default=None, description="why nothing of it starts now; null if it is not under way")

    def failed(self) -> dict[str, int]:
        """How many failed, by error code; the most frequent first."""
        found = {what.partition(":")[2]: number for what, number in self.counts.items() if ":" in what}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def failures(self) -> dict[str, list[Ended]]:
        """What failed of the page, by error code; the most frequent first."""
        found: dict[str, list[Ended]] = {}
        for one in self.ended:
            if one.error is not None:
                found.setdefault(one.error.code, []).append(one)
        return by_number(found)

    def may(self) -> set[str]:
        """What makes sense to do with it now."""
        ways = {
            "pause": self.state in records.TURNS["paused"],
            "resume": self.state in records.TURNS["running"],
            "cancel": self.state in records.TURNS["cancelled"],
            "retry": self.state != "expanding" and not self.failed().keys() <= records.IN_FILE,
            "remove": self.state not in records.UNDER_WAY and not self.active,
        }
        return {way for way, sense in ways.items() if sense}


class _Failing(OfModel):
    job: str | None


class CatalogFailure(Problem, _Failing):
    """Why a model failed, and in which job."""


class CatalogFailures(Document):
    name: str
    failures: dict[str, list[CatalogFailure]] = Field(description="failed models by error code")
    next: int | None = Field(default=None, exclude_if=absent, description=_MORE)


class CatalogRetried(Document):
    name: str
    again: int
    left: dict[str, int] = Field(description="number of models not retried, by error code")
    state: str | None


class CatalogTurned(Document):
    name: str
    state: str


class CatalogState(CatalogTurned):
    already: bool = Field(default=False, description="true if it was paused, or under way, before")


class CatalogCancelled(CatalogTurned):
    jobs: int


class CatalogRemoved(Document):
    name: str
    removed: Literal[True]
    schedules: list[str]


class ScheduleFacts(Document):
    name: str
    cron: str
    tz: str
    missed: Literal["once", "skip"]
    request: Known | None
    digest: str | None
    next: Moment | None = Field(description="time of the next run; null while paused")
    success: Moment | None
    trouble: Moment | None = Field(default=None, description="last failed or missed run; null after a success")
    outdated: bool
    runs: list[Run]
    last: str


class Schedule(ScheduleFacts):
    catalog: records.Definition | None


class CatalogKept(Document):
    """A catalog without its text."""

    name: str
    bytes: Bytes = Field(description="size of its text in bytes")
    at_once: int
    max_failures: int | None
    max_bytes: Bytes | None
    asked_by: str


class ScheduleRow(ScheduleFacts):
    catalog: CatalogKept | None


class ScheduleNext(Document):
    name: str
    next: Moment | None


class WouldSubmit(Document):
    source: str
    target: str
    published: str | None
    files: int
    bytes: Bytes


class Would(Document):
    outcome: str
    job: str | None
    request: WouldSubmit | None = Field(default=None, exclude_if=absent)
    catalog: CatalogChecked | None = Field(default=None, exclude_if=absent)


class ScheduleTimes(Document):
    name: str
    next: list[Moment]
    would: Would | None = Field(default=None, exclude_if=absent, description="only with --dry-run")


class ScheduleFired(Document):
    name: str
    outcome: str
    job: str | None
    waits: str | None


class SchedulePreview(Document):
    """What would happen if a schedule ran now."""

    name: str
    outcome: Fired
    job: str | None = Field(description="the job that already does this, or that blocks it")


class ScheduleSet(Document):
    name: str
    digest: str


class ScheduleRemoved(Document):
    name: str
    removed: Literal[True]


class CatalogNow(Document):
    """A catalog without its models."""

    name: str
    state: str
    note: str | None
    started: Moment
    since: Moment
    success: Moment | None
    trouble: Moment | None = Field(default=None, description="last run without success; null after a success")
    empty: list[int]
    entries: int
    todo: int
    active: int
    counts: dict[str, int] = Field(description=_COUNTS)


class CatalogProgress(CatalogNow):
    """A catalog without its models, and why it is waiting."""

    waits: str | None
    left: Seconds | None = Field(default=None, description=_LEFT)


class Catalogs(Document):
    """A page of catalogs."""

    catalogs: list[CatalogNow]
    next: str | None = Field(default=None, description=_NEXT)


class Schedules(Document):
    """A page of schedules."""

    schedules: list[ScheduleRow]
    next: str | None = Field(description=_NEXT)
    unreadable: dict[str, str] = Field(description="why a schedule's record cannot be read, by name")


def dropped(seen: Catalog | CatalogNow, active: int) -> int:
    """How many models a cancel dropped before they had a job, beside ``active`` jobs."""
    ended = sum(number for what, number in seen.counts.items() if ":" not in what)
    return max(0, seen.entries - ended - active - seen.todo)


class Carried(Document):
    """The result of a push for a schedule, or for a model in a catalog."""

    schedule: str | None
    catalog: str | None
    source: str
    target: str
    commit: str
    outcome: Literal["submitted", "existed", "waits", "repeat", "own", "refused"]
    job: str | None = Field(description="the job; with outcome `waits`, the job being waited for")
    error: Problem | None


class Pushed(Document):
    """The result of a Hub webhook."""

    repo: str
    carried: list[Carried]
    ignored: str | None = Field(description="why the push was ignored")
