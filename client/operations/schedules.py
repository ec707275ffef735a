"""Operations of schedules."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from reshard.client.facts import last_run, upcoming
from reshard.client.models import catalogs
from reshard.client.operations.catalogs import Names, Submission, check_catalog
from reshard.client.operations.jobs import JobRequest
from reshard.client.operations.table import BODY_MAX, Body, InProcess, operation, page_of
from reshard.client.queue import Queue
from reshard.pipeline.catalogs.definition import NAME
from reshard.pipeline.errors import ScheduleNotFound, ScheduleUnreadable
from reshard.worker.followers.records import NAME_MAX
from reshard.worker.followers.schedules import CRON_MAX, PRIORITY, ZONE_MAX, Schedule, ScheduleStatus

TIMES = 5  # that are shown of a schedule which is not kept


def _only(name: str) -> dict[str, Any]:
    return {"required": [name], "properties": {name: {"type": "object"}}}


class SchedulesQuery(Names):
    failing: bool = Field(
        default=False, description="only schedules that failed or missed a run since their last success"
    )
    name: str = Field(default="", max_length=NAME_MAX, description="only the schedule with this name")


class Edited(Body):
    """A request or a catalog, and when to submit it."""

    most: ClassVar[int] = BODY_MAX
    model_config = ConfigDict(json_schema_extra={"oneOf": [_only("request"), _only("catalog")]})
    cron: str = Field(
        max_length=CRON_MAX,
        json_schema_extra={"format": "cron"},
        description="cron expression (minute hour day month weekday), or @daily",
    )
    tz: str = Field(
        default="UTC",
        max_length=ZONE_MAX,
        json_schema_extra={"format": "timezone"},
        description="time zone of `cron`, such as Europe/Berlin",
    )
    missed: Literal["once", "skip"] = Field(
        default="once",
        description="what to do about times missed while the control process was down: run once, or skip them",
    )
    request: JobRequest | None = None
    catalog: Submission | None = None

    def schedule(self, session: InProcess, name: str) -> Schedule:
        """Raises BadCatalog, and what the service does not let be submitted."""
        request = self.request.request(session.caller) if self.request else None
        if request is not None:
            session.allow(request)
        catalog = self.catalog.definition(session.caller, session.allow_hubs) if self.catalog else None
        return Schedule(name=name, cron=self.cron, tz=self.tz, missed=self.missed, request=request, catalog=catalog)


class Kept(Edited):
    """A schedule and its name."""

    name: Annotated[str, NAME] = Field(max_length=NAME_MAX, description="lowercase letters, digits, dots, - and _")


def _facts(queue: Queue, seen: ScheduleStatus) -> dict[str, Any]:
    """Fields that a schedule has as it is kept, and those that tell how it fares."""
    kept = seen.schedule
    request = kept.request and kept.request.model_copy(update={"priority": PRIORITY})
    digest = kept.catalog.digest if kept.catalog else None
    return {**dict(kept), "request": request, "digest": digest, "last": last_run(queue, seen)}


@operation("GET", "/schedules")
def list_schedules(session: InProcess, query: SchedulesQuery) -> catalogs.Schedules:
    """List schedules by name, without catalog texts; if schedules are large, a page can have fewer than `limit`."""
    unreadable = dict[str, str]()

    def row(name: str) -> catalogs.ScheduleRow | None:
        try:
            return _row(session.queue, session.queue.schedules.get(name))
        except ScheduleNotFound:  # removed since
            return None
        except ScheduleUnreadable as damage:
            unreadable[name] = f"{damage.facts['where']}: {damage.facts['why']}"
            return None

    names = session.queue.schedules.names(query.after, query.failing)
    rows, more = page_of([name for name in names if query.name in {"", name}], query.limit, row)
    return catalogs.Schedules(schedules=rows, next=more, unreadable=unreadable)


def _row(queue: Queue, seen: ScheduleStatus) -> catalogs.ScheduleRow:
    facts = _facts(queue, seen)
    if kept := seen.schedule.catalog:
        facts["catalog"] = catalogs.CatalogKept.of(kept, bytes=len(kept.text.encode()))
    return catalogs.ScheduleRow.of(seen, **facts)


@operation("POST", "/schedules")
def add_schedule(session: InProcess, body: Kept) -> catalogs.ScheduleNext:
    """Submit a request or a catalog on a schedule."""
    return catalogs.ScheduleNext(name=body.name, next=session.queue.schedules.add(body.schedule(session, body.name)))


@operation("POST", "/schedules/check")
def check_schedule(session: InProcess, body: Kept) -> catalogs.ScheduleTimes:
    """Show when a schedule would run and what it would submit now, without saving it; uses the service's token."""
    from reshard.client.dry_run import of_request

    schedule = body.schedule(session, body.name)
    schedule.check()
    outcome, job = session.queue.schedules.preview(body.name, schedule)
    due = [*upcoming(schedule.cron, schedule.tz, TIMES)]
    if body.catalog is not None:
        would = catalogs.Would(outcome=outcome, job=job, catalog=check_catalog(session, body.catalog))
    else:
        assert schedule.request is not None, "a schedule submits something"
        with session.hub() as context:
            would = catalogs.Would(outcome=outcome, job=job, request=of_request(schedule.request, context))
    return catalogs.ScheduleTimes(name=body.name, next=due, would=would)


@operation("POST", "/schedules/{name}/edit")
def edit_schedule(session: InProcess, name: str, body: Edited) -> catalogs.ScheduleNext:
    """Change what a schedule submits and when; keep its past runs."""
    return catalogs.ScheduleNext(name=name, next=session.queue.schedules.edit(body.schedule(session, name)))


@operation("GET", "/schedules/{name}")
def show_schedule(session: InProcess, name: str) -> catalogs.Schedule:
    """Show a schedule and its latest runs."""
    seen = session.queue.schedules.get(name)
    return catalogs.Schedule.of(seen, **_facts(session.queue, seen))


@operation("GET", "/schedules/{name}/preview")
def preview_schedule(session: InProcess, name: str) -> catalogs.SchedulePreview:
    """Show what would happen if a schedule ran now, and which job would block the run."""
    outcome, job = session.queue.schedules.preview(name)
    return catalogs.SchedulePreview(name=name, outcome=outcome, job=job)


@operation("POST", "/schedules/{name}/catalog")
def set_catalog(session: InProcess, name: str, body: Submission) -> catalogs.ScheduleSet:
    """Update the catalog that a schedule submits; keep its times and past runs."""
    definition = body.definition(session.caller, session.allow_hubs)
    session.queue.schedules.set_catalog(name, definition)
    return catalogs.ScheduleSet(name=name, digest=definition.digest)


@operation("POST", "/schedules/{name}/run")
def run_schedule(session: InProcess, name: str) -> catalogs.ScheduleFired:
    """Run a schedule now, in addition to its regular times."""
    done = session.queue.schedules.run(name)
    return catalogs.ScheduleFired.of(done, name=name, waits=session.queue.waits(bulk=True))


@operation("POST", "/schedules/{name}/pause")
def pause_schedule(session: InProcess, name: str) -> catalogs.ScheduleNext:
    """Pause a schedule; jobs it has already started keep running."""
    session.queue.schedules.pause(name)
    return catalogs.ScheduleNext(name=name, next=None)


@operation("POST", "/schedules/{name}/resume")
def resume_schedule(session: InProcess, name: str) -> catalogs.ScheduleNext:
    """Resume a paused schedule."""
    return catalogs.ScheduleNext(name=name, next=session.queue.schedules.resume(name))


@operation("DELETE", "/schedules/{name}")
def remove_schedule(session: InProcess, name: str) -> catalogs.ScheduleRemoved:
    """Remove a schedule; jobs it has already started keep running."""
    session.queue.schedules.remove(name)
    return catalogs.ScheduleRemoved(name=name, removed=True)
