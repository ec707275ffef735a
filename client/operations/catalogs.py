"""Operations of catalogs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from reshard.client import PAGE_MAX
from reshard.client.models import catalogs
from reshard.client.operations.table import BODY_MAX, LISTED, Body, InProcess, Session, operation, page_of, pages
from reshard.client.queue import Queue, catalog_left
from reshard.pipeline.errors import CatalogNotFound, NoSuchFailures
from reshard.pipeline.limits import CATALOG_MAX
from reshard.worker.followers.records import (
    AT_ONCE,
    AT_ONCE_MAX,
    COUNT_MAX,
    IN_FILE,
    NAME_MAX,
    CatalogStatus,
    Definition,
    Standing,
    entry_of,
    in_order,
)
from reshard.worker.followers.schedules import ScheduleStatus

if TYPE_CHECKING:
    from reshard.pipeline.catalogs.expand import Wanted
    from reshard.worker.followers.catalogs import Snapshot

CLOSELY = 200  # models of a dry run whose targets are asked one by one; of more that may take an hour
Most = Annotated[int | None, Field(ge=0, le=COUNT_MAX)]


class Submission(Body):
    """A catalog file and its limits."""

    most: ClassVar[int] = BODY_MAX
    text: str = Field(
        max_length=CATALOG_MAX,
        description="the YAML file",
        json_schema_extra={"contentMediaType": "application/yaml", "maxLength": BODY_MAX},  # where it comes as a body
    )
    at_once: int = Field(
        default=AT_ONCE, ge=1, le=AT_ONCE_MAX, description="maximum number of the catalog's jobs to run at once"
    )
    max_failures: Most = Field(default=None, description="stop the catalog after more than this many failures")
    max_bytes: Most = Field(default=None, description="stop the catalog after reading this many bytes of weights")

    def definition(self, asked_by: str, allow: Callable[[Set[str]], None] = lambda hubs: None) -> Definition:
        """Raises BadCatalog, and what ``allow`` does of the Hubs that the file names."""
        from reshard.pipeline.catalogs.definition import hubs, parse

        parsed = parse(self.text, "the catalog")
        allow(hubs(parsed))
        return Definition(name=parsed.name, asked_by=asked_by, **self.model_dump())


class Names(Body):
    """A page of what is listed by name."""

    limit: int = Field(default=LISTED, ge=1, le=PAGE_MAX)
    after: str = Field(default="", max_length=NAME_MAX, description="`next` from the previous page")


class CatalogsQuery(Names):
    failing: bool = Field(default=False, description="only catalogs whose last run did not succeed")


class CatalogQuery(Body):
    after: int = Field(default=-1, ge=-1, le=AT_ONCE_MAX, description="`next` from the previous page")


FIRST = CatalogQuery()


class Only(Body):
    only: str | None = Field(default=None, max_length=NAME_MAX, description="retry only failures with this error code")


@operation("GET", "/catalogs")
def list_catalogs(session: InProcess, query: CatalogsQuery) -> catalogs.Catalogs:
    """List catalogs by name, without their models; if catalogs are large, a page can have fewer than `limit`."""
    of = session.queue.catalogs
    success, failing = of.successes(), of.failing()

    def row(name: str) -> catalogs.CatalogNow | None:
        try:
            return _now(name, of.now(name), success.get(name), failing.get(name))
        except CatalogNotFound:  # removed since
            return None

    names = [name for name in (failing if query.failing else of.names()) if name > query.after]
    rows, more = page_of(names, query.limit, row)
    return catalogs.Catalogs(catalogs=rows, next=more)


def all_catalogs(session: Session, failing: bool = False) -> list[catalogs.CatalogNow]:
    """Every page of them."""
    found = pages(partial(list_catalogs, session), CatalogsQuery(failing=failing))
    return [one for page in found for one in page.catalogs]


def _now(name: str, now: Snapshot, success: float | None, trouble: float | None) -> catalogs.CatalogNow:
    counts = in_order(now.counts)
    moments = {"started": now.started / 1000, "since": now.since / 1000, "success": success, "trouble": trouble}
    return catalogs.CatalogNow.of(
        now, name=name, state=now.shown, counts=counts, empty=json.loads(now.empty), **moments
    )


@operation("POST", "/catalogs")
def submit_catalog(session: InProcess, body: Submission) -> catalogs.CatalogSubmitted:
    """Queue a catalog's new and changed models."""
    definition = body.definition(session.caller, session.allow_hubs)
    started = session.queue.catalogs.submit(definition)
    return catalogs.CatalogSubmitted(
        name=definition.name,
        digest=definition.digest,
        existed=not started,
        waits=session.queue.waits(bulk=True),
        outdated_schedules=[seen.schedule.name for seen in _schedules(session.queue, definition.name) if seen.outdated],
        state=session.queue.catalogs.now(definition.name).shown,
    )


@operation("POST", "/catalogs/check")
def check_catalog(session: InProcess, body: Submission) -> catalogs.CatalogChecked:
    """Show what a catalog would do now, without queueing jobs; uses the service's token."""
    from reshard.client.dry_run import of_catalog
    from reshard.pipeline.catalogs.definition import parse

    parsed = parse(body.text, "the catalog")
    with session.hub() as context:
        return of_catalog(parsed, context, partial(standings, session.queue), CLOSELY, session.allow)


def standings(queue: Queue, name: str, wanted: Sequence[Wanted]) -> Sequence[Standing]:
    return queue.catalogs.standings(name, map(entry_of, wanted))


def _schedules(queue: Queue, catalog: str) -> list[ScheduleStatus]:
    every = queue.schedules.all()
    return [seen for seen in every if seen.schedule.catalog and seen.schedule.catalog.name == catalog]


@operation("GET", "/catalogs/{name}")
def show_catalog(session: InProcess, name: str, query: CatalogQuery = FIRST) -> catalogs.Catalog:
    """Show a catalog and the result of each model, a page at a time."""
    seen, queue = session.queue.catalogs.get(name, query.after), session.queue
    waits = queue.waits(bulk=True) if seen.state in {"expanding", "running"} else None
    return told(seen, catalog_left(queue, seen.state, seen.active.values(), seen.todo, waits), waits)


def whole_catalog(session: Session, name: str) -> catalogs.Catalog:
    """Every page of it as one."""
    found = [*pages(partial(show_catalog, session, name), FIRST)]
    return found[-1].model_copy(update={"ended": [one for page in found for one in page.ended]})


@operation("GET", "/catalogs/{name}/file")
def show_file(session: InProcess, name: str) -> catalogs.CatalogFile:
    """Show a catalog's file as last submitted, with its limits."""
    kept = session.queue.catalogs.definition(name)
    return catalogs.CatalogFile.of(kept, digest=kept.digest)


def told(seen: CatalogStatus, left: float | None = None, waits: str | None = None) -> catalogs.Catalog:
    """A catalog with how each model of a page ended."""
    ended = zip(seen.ended, seen.targets, strict=True)
    return catalogs.Catalog.of(
        seen,
        name=seen.definition.name,
        digest=seen.definition.digest,
        asked_by=seen.definition.asked_by,
        at_once=seen.definition.at_once,
        counts=in_order(seen.outcomes),
        left=left,
        waits=waits,
        ended=[catalogs.Ended.of(one, repo=repo, target=target) for (repo, one), target in ended],
    )


@operation("GET", "/catalogs/{name}/now")
def show_progress(session: InProcess, name: str) -> catalogs.CatalogProgress:
    """Show a catalog's progress without its models, and why it is waiting."""
    of = session.queue.catalogs
    now = _now(name, of.now(name), of.successes().get(name), of.failing().get(name))
    waits = session.queue.waits(bulk=True)
    left = catalog_left(session.queue, now.state, of.at_work(name), now.todo, waits)
    return catalogs.CatalogProgress(**dict(now), waits=waits, left=left)


@operation("GET", "/catalogs/{name}/failures")
def show_failures(session: InProcess, name: str, query: CatalogQuery = FIRST) -> catalogs.CatalogFailures:
    """Show failures by error code; a page can have none although others follow."""
    seen = show_catalog.run(session, name, query)
    told = {
        code: [catalogs.CatalogFailure.of(one.error, repo=one.repo, job=one.job) for one in group]
        for code, group in seen.failures().items()
    }
    return catalogs.CatalogFailures(name=name, failures=told, next=seen.next)


def all_failures(session: Session, name: str) -> catalogs.CatalogFailures:
    """Every page of them as one."""
    found: dict[str, list[catalogs.CatalogFailure]] = {}
    for page in pages(partial(show_failures, session, name), FIRST):
        for code, group in page.failures.items():
            found.setdefault(code, []).extend(group)
    return catalogs.CatalogFailures(name=name, failures=catalogs.by_number(found))


@operation("POST", "/catalogs/{name}/pause")
def pause_catalog(session: InProcess, name: str) -> catalogs.CatalogState:
    """Pause a catalog: running jobs continue, no new ones start."""
    return catalogs.CatalogState(name=name, already=not session.queue.catalogs.pause(name), state="paused")


@operation("POST", "/catalogs/{name}/resume")
def resume_catalog(session: InProcess, name: str) -> catalogs.CatalogState:
    """Resume a catalog that was paused or stopped by a limit."""
    already = not session.queue.catalogs.resume(name)
    state = session.queue.catalogs.now(name).shown
    return catalogs.CatalogState.of(None, name=name, already=already, state=state)


@operation("POST", "/catalogs/{name}/cancel")
def cancel_catalog(session: InProcess, name: str) -> catalogs.CatalogCancelled:
    """Cancel a catalog and its running jobs."""
    return catalogs.CatalogCancelled(name=name, state="cancelled", jobs=session.queue.catalogs.cancel(name))


@operation("POST", "/catalogs/{name}/retry")
def retry_catalog(session: InProcess, name: str, body: Only) -> catalogs.CatalogRetried:
    """Retry failed models, reusing copied files; `left` counts those with errors in the catalog file."""
    counts = session.queue.catalogs.now(name).counts
    failed = {what.partition(":")[2]: number for what, number in counts.most_common() if ":" in what and number}
    if body.only is not None and body.only not in failed:
        raise NoSuchFailures(name=name, only=body.only, there=", ".join(failed) or "none")
    again = session.queue.catalogs.retry(name, body.only)
    left = {code: count for code, count in failed.items() if body.only in {None, code} and code in IN_FILE}
    return catalogs.CatalogRetried(name=name, again=again, left=left, state=session.queue.catalogs.now(name).shown)


@operation("DELETE", "/catalogs/{name}")
def remove_catalog(session: InProcess, name: str) -> catalogs.CatalogRemoved:
    """Remove a catalog that has ended; keep its targets and jobs."""
    session.queue.catalogs.remove(name)
    schedules = [seen.schedule.name for seen in _schedules(session.queue, name)]
    return catalogs.CatalogRemoved(name=name, removed=True, schedules=schedules)
