"""Operations of catalogs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from reshard.client.models import catalogs
from reshard.client.operations.table import BODY_MAX, Body, InProcess, operation
from reshard.client.queue import Queue
from reshard.pipeline.errors import NoSuchFailures
from reshard.pipeline.limits import CATALOG_MAX
from reshard.worker.followers.records import AT_ONCE, AT_ONCE_MAX, COUNT_MAX, NAME_MAX, CatalogStatus, Definition
from reshard.worker.followers.schedules import ScheduleStatus

if TYPE_CHECKING:
    from reshard.worker.followers.catalogs import Now


class Submission(Body):
    """A catalog's file, with its limits."""

    most: ClassVar[int] = BODY_MAX
    text: str = Field(
        max_length=CATALOG_MAX,
        description="the YAML file",
        json_schema_extra={"contentMediaType": "application/yaml", "maxLength": BODY_MAX},  # where it comes as a body
    )
    at_once: int = Field(default=AT_ONCE, ge=1, le=AT_ONCE_MAX, description="how many of its jobs run at a time")
    max_failures: int | None = Field(default=None, ge=0, le=COUNT_MAX, description="stop after more failures than this")
    max_bytes: int | None = Field(
        default=None, ge=0, le=COUNT_MAX, description="stop after reading so many bytes of weights"
    )

    def definition(self, asked_by: str) -> Definition:
        """Raises BadCatalog."""
        from reshard.pipeline.catalogs.definition import parse

        parsed = parse(self.text, "the catalog")
        return Definition(name=parsed.name, asked_by=asked_by, **self.model_dump())


class Only(Body):
    only: str | None = Field(default=None, max_length=NAME_MAX, description="only failures with this error code")


@operation("GET", "/catalogs")
def list_catalogs(session: InProcess) -> catalogs.Catalogs:
    """List catalogs by name, each without its models."""
    of = session.queue.catalogs
    success = of.successes()
    return catalogs.Catalogs(catalogs=[_now(name, of.now(name), success.get(name)) for name in of.names()])


def _now(name: str, now: Now, success: float | None) -> catalogs.CatalogNow:
    counts = {what: number for what, number in now.counts.items() if number}
    moments = {"started": now.started / 1000, "since": now.since / 1000, "success": success}
    return catalogs.CatalogNow.of(
        now, name=name, state=now.shown, counts=counts, empty=json.loads(now.empty), **moments
    )


@operation("POST", "/catalogs")
def submit_catalog(session: InProcess, body: Submission) -> catalogs.CatalogSubmitted:
    """Queue the models of a catalog that changed."""
    definition = body.definition(session.caller)
    started = session.queue.catalogs.submit(definition)
    return catalogs.CatalogSubmitted(
        name=definition.name,
        digest=definition.digest,
        existed=not started,
        waits=session.queue.waits(bulk=True),
        outdated_schedules=[seen.schedule.name for seen in _schedules(session.queue, definition.name) if seen.outdated],
    )


def _schedules(queue: Queue, catalog: str) -> list[ScheduleStatus]:
    every = queue.schedules.all()
    return [seen for seen in every if seen.schedule.catalog and seen.schedule.catalog.name == catalog]


@operation("GET", "/catalogs/{name}")
def show_catalog(session: InProcess, name: str) -> catalogs.Catalog:
    """Show a catalog's progress."""
    return told(session.queue.catalogs.get(name))


def told(seen: CatalogStatus) -> catalogs.Catalog:
    """A catalog with how each of its models ended."""
    ended = zip(seen.ended, seen.targets, strict=True)
    return catalogs.Catalog.of(
        seen,
        name=seen.definition.name,
        digest=seen.definition.digest,
        asked_by=seen.definition.asked_by,
        at_once=seen.definition.at_once,
        counts=seen.counts(),
        read=sum(one.read for _, one in seen.ended),
        uploaded=sum(one.uploaded for _, one in seen.ended),
        ended=[catalogs.Ended.of(one, repo=repo, target=target) for (repo, one), target in ended],
    )


@operation("GET", "/catalogs/{name}/now")
def show_progress(session: InProcess, name: str) -> catalogs.CatalogProgress:
    """Show a catalog's progress without its models, and why nothing of it moves."""
    of = session.queue.catalogs
    now = _now(name, of.now(name), of.successes().get(name))
    return catalogs.CatalogProgress(**dict(now), waits=session.queue.waits(bulk=True))


@operation("GET", "/catalogs/{name}/failures")
def show_failures(session: InProcess, name: str) -> catalogs.CatalogFailures:
    """Show failures by error code."""
    groups = show_catalog.run(session, name).failures()
    told = {
        code: [catalogs.CatalogFailure.of(one.error, repo=one.repo, job=one.job) for one in group]
        for code, group in groups.items()
    }
    return catalogs.CatalogFailures(name=name, failures=told)


@operation("POST", "/catalogs/{name}/pause")
def pause_catalog(session: InProcess, name: str) -> catalogs.CatalogState:
    """Start no more models; those at work continue."""
    session.queue.catalogs.pause(name)
    return catalogs.CatalogState(name=name, state="paused")


@operation("POST", "/catalogs/{name}/resume")
def resume_catalog(session: InProcess, name: str) -> catalogs.CatalogState:
    """Resume a catalog that was paused or stopped by a limit."""
    session.queue.catalogs.resume(name)
    return catalogs.CatalogState.of(None, name=name, state=session.queue.catalogs.now(name).shown)


@operation("POST", "/catalogs/{name}/cancel")
def cancel_catalog(session: InProcess, name: str) -> catalogs.CatalogCancelled:
    """Start no more models, and cancel those at work."""
    return catalogs.CatalogCancelled(name=name, state="cancelled", jobs=session.queue.catalogs.cancel(name))


@operation("POST", "/catalogs/{name}/retry")
def retry_catalog(session: InProcess, name: str, body: Only) -> catalogs.CatalogRetried:
    """Retry failed models with what they had copied; `left` are those that only the file can correct."""
    failed = session.queue.catalogs.get(name).failures()
    if body.only is not None and body.only not in failed:
        raise NoSuchFailures(name=name, only=body.only, there=", ".join(failed) or "none")
    again = session.queue.catalogs.retry(name, body.only)
    left = {code: len(group) for code, group in failed.items() if body.only in {None, code} and group[0][1].in_file}
    return catalogs.CatalogRetried(name=name, again=again, left=left)


@operation("DELETE", "/catalogs/{name}")
def remove_catalog(session: InProcess, name: str) -> catalogs.CatalogRemoved:
    """Remove a catalog that has ended; its targets and jobs stay."""
    session.queue.catalogs.remove(name)
    schedules = [seen.schedule.name for seen in _schedules(session.queue, name)]
    return catalogs.CatalogRemoved(name=name, removed=True, schedules=schedules)
