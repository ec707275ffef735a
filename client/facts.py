"""Jobs and the fleet as data: what --json and the HTTP API say of them."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from reshard.client.models.jobs import Happened, Job
from reshard.client.queue import Queue
from reshard.pipeline.errors import CatalogNotFound, JobNotFound, JobUnreadable
from reshard.pipeline.places import AnyPlace
from reshard.pipeline.request import Request
from reshard.pipeline.stores.credentials import default_endpoint

if TYPE_CHECKING:
    from reshard.client.models import records
    from reshard.client.models.catalogs import ScheduleFired, SchedulePreview, Would
    from reshard.worker.followers.schedules import Run, ScheduleStatus

log = logging.getLogger(__name__)

# How the fields of an event are read; others are text.
READERS: dict[str, Callable[[str], Any]] = {
    "error": json.loads,
    **dict.fromkeys(("at", "took", "waited"), lambda ms: int(ms) / 1000),
    **dict.fromkeys(("attempt", "bytes"), int),
}

# How a source file was checked, in words.
HELD = {"checked": "sha256 verified", "crc": "CRC verified", "as delivered": "no upstream hash"}


def happened(fields: Mapping[str, str]) -> Happened:
    """An event of the queue; a figure or an error that it has left empty is null. Raises ValueError."""
    return Happened.model_validate(
        {
            name: text if (read := READERS.get(name)) is None else read(text) if text else None
            for name, text in fields.items()
        }
    )


def readable(events: Iterable[Mapping[str, str]]) -> list[Happened]:
    """All but those that others wrote who reach the broker."""
    found = []
    for fields in events:
        try:
            found.append(happened(fields))
        except (ValueError, RecursionError) as error:
            log.warning("cannot read an event of a job; skipping it: %s", type(error).__name__)
    return found


def into(request: Request) -> str:
    """The target, with the branch or the pull request that was asked for."""
    place = str(request.target.at(request.options.branch) if request.options.branch else request.target)
    return f"{place}, as a pull request" if request.options.pr else place


def chosen(request: Request) -> dict[str, object]:
    """The options that were given, without the size and those of the target."""
    given = request.options.changed().items()
    return {name: value for name, value in given if name not in {"size", "branch", "pr"}}


def undoable(request: Request) -> str | None:
    """The target as `reshard rollback` takes it.

    None for a pull request, which changes nothing by itself, and for a store that keeps nothing.
    """
    target, options = request.target, request.options
    return None if options.pr or not target.keeps else target.at(options.branch or target.branch).spelled


def source_bytes(read: Iterable[str], attested: Mapping[str, str]) -> dict[str, list[str]]:
    """The source files by what their bytes were held against; without ``attested``, nothing but the transport."""
    levels: dict[str, list[str]] = {}
    for path in sorted({*read, *attested}):
        levels.setdefault(attested.get(path, "as delivered"), []).append(path)
    return levels


def page(target: AnyPlace, ref: str = "") -> str:
    """Where people find a result: the folder, or the page of the branch or pull request ``ref`` on its Hub."""
    return target.page(default_endpoint(), ref)


def seconds_of(job: Job) -> float:
    """How long it has been at work, since the submit or the last retry where that is known."""
    end = job.since if job.state.ended else time.time()
    began = job.started if job.created < job.started < end else job.created
    return max(0.0, end - began)


def last_run(queue: Queue, seen: ScheduleStatus) -> str:
    """The last run, and the state of the job that it fired."""
    if not seen.runs:
        return "never"
    run, catalog = seen.runs[0], seen.schedule.catalog
    try:
        if run.outcome == "fired" and catalog is not None:
            return f"catalog {catalog.name}, {queue.catalogs.now(catalog.name).shown}"
        if run.outcome == "fired" and run.job is not None:
            return f"job {run.job}, {queue.jobs.get(run.job).state}"
    except CatalogNotFound as error:
        return f"catalog {error.facts['name']} (since removed)"
    except JobNotFound:
        return f"job {run.job} (since deleted)"
    except JobUnreadable:
        return f"job {run.job} (its record cannot be read)"
    return outcome_text(run)


def upcoming(cron: str, tz: str, count: int, first: float | None = None) -> Iterator[float]:
    """``first``, or the next time of a schedule, and those after it, in seconds since the epoch; raises BadSchedule."""
    from reshard.worker.cron import next_after  # which a client that lists jobs need not wait for

    yield (due := first or next_after(cron, tz, time.time()))
    for _ in range(count - 1):
        yield (due := next_after(cron, tz, due))


def outcome_text(run: Run | records.Run | ScheduleFired | SchedulePreview | Would, now: bool = False) -> str:
    """What became of one time of a schedule, or would become of it ``now``."""
    was = "is" if now else "was"
    return {
        "fired": f"submitted job {run.job}" if run.job else "submitted its catalog",
        "missed": "missed: the control process was not running",
        "overlap": f"skipped: previous {f'job {run.job}' if run.job else 'run'} {was} still in progress",
        "full": "skipped: its submitter already has the maximum number of queued jobs",
        "busy": f"skipped: job {run.job} {was} writing to the same target for another request",
    }.get(run.outcome, run.outcome)  # a newer release's
