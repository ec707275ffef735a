"""Catalogs with their nights and failures, and schedules with their times and results."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from typing import Any
from urllib.parse import urlencode

from reshard.client.catalog_report import markdown
from reshard.client.facts import last_run, outcome_text
from reshard.client.operations import catalogs as operations
from reshard.client.operations import schedules as of_schedules
from reshard.client.operations.table import LISTED, read
from reshard.client.queue import Queue
from reshard.pipeline.errors import BadSchedule, ReshardError
from reshard.web.documents import status_of
from reshard.web.pages.site import Answer, Call, Page, Text, act, page
from reshard.worker.followers.records import TURNS, UNDER_WAY, CatalogStatus
from reshard.worker.followers.schedules import Run, ScheduleStatus

TIMES = 5  # of a schedule that come next
RESULTS = 14  # of a schedule that are shown
GRID_MAX = 1000  # models of a grid; those that failed come first


@page("GET", "/catalogs")
def catalogs(call: Call) -> Answer:
    return _catalogs(call.queue)


def _catalogs(queue: Queue, text: str = "", error: ReshardError | None = None) -> Page:
    catalogs = [(name, queue.catalogs.now(name)) for name in queue.catalogs.names()]  # without their models
    shown = {
        "catalogs": catalogs,
        "success": queue.catalogs.successes(),
        "text": text,
        "error": error.to_dict() if error else None,
    }
    return Page("catalogs.html", shown, status_of(error) if error else 200)


@page("POST", "/catalogs")
def submit(call: Call) -> Answer:
    given = call.body.given("text", "at_once", "max_failures", "max_bytes")
    try:
        done = operations.submit_catalog(call.session, read(operations.Submission, given, "the form"))
        return f"/catalogs/{done.name}"
    except ReshardError as error:
        return _catalogs(call.queue, call.body.one("text"), error)


@page("GET", "/catalogs/{name}")
def catalog(call: Call) -> Answer:
    seen = call.queue.catalogs.get(call.path["name"])
    nights = call.queue.catalogs.nights(call.path["name"])
    shown = {"seen": seen, "nights": nights, "grid": _grid(seen, nights), "may": _may(seen)}
    return Page("catalog.html", shown)


def _grid(seen: CatalogStatus, nights: list[tuple[float, Any]]) -> dict[str, Any]:
    """A row for each model: what became of it in each night, the oldest first; those with trouble lately come first."""
    models = {repo for _, night in nights for repo in night} | {repo for repo, _ in seen.ended} | seen.active.keys()
    kept = [*reversed(nights)]
    rows = [(repo, [night.get(repo, ("", "")) for _, night in kept]) for repo in sorted(models)]
    rows.sort(key=lambda row: row[1][-1][0] not in {"failed", "cancelled"} if row[1] else True)
    return {"began": [began for began, _ in kept], "rows": rows[:GRID_MAX], "more": max(0, len(rows) - GRID_MAX)}


def _may(seen: CatalogStatus) -> set[str]:
    ways = {
        "pause": seen.state in TURNS["paused"],
        "resume": seen.state in TURNS["running"],
        "cancel": seen.state in TURNS["cancelled"],
        "retry": seen.state != "expanding" and any(not ended.in_file for _, ended in seen.ended if ended.error),
        "remove": seen.state not in UNDER_WAY and not seen.active,
    }
    return {way for way, sense in ways.items() if sense}


act("/catalogs/{name}/pause", operations.pause_catalog, "/catalogs/{name}")
act("/catalogs/{name}/resume", operations.resume_catalog, "/catalogs/{name}")
act("/catalogs/{name}/cancel", operations.cancel_catalog, "/catalogs/{name}")
act(
    "/catalogs/{name}/retry",
    operations.retry_catalog,
    "/catalogs/{name}",
    lambda f: operations.Only(only=f.one("only") or None),
)
act("/catalogs/{name}/remove", operations.remove_catalog, "/catalogs")


@page("GET", "/catalogs/{name}/report")
def report(call: Call) -> Answer:
    """For an issue, a mail, or who keeps them."""
    return Text(markdown(operations.show_catalog(call.session, call.path["name"])), f"{call.path['name']}.md")


@page("GET", "/schedules")
def schedules(call: Call) -> Answer:
    after = call.query.one("after")
    found = [_schedule(call.queue, seen) for seen in islice(call.queue.schedules.each(after), LISTED + 1)]
    more = urlencode({"after": found[LISTED - 1]["name"]}) if len(found) > LISTED else ""
    return Page("schedules.html", {"schedules": found[:LISTED], "after": after, "more": more})


def _schedule(queue: Queue, seen: ScheduleStatus) -> dict[str, Any]:
    """What is shown of it, which is not its catalog's text."""
    kept = seen.schedule
    times = [] if seen.next is None else [seen.next]
    with suppress(BadSchedule):  # only another machine knows its time zone
        while 0 < len(times) < TIMES:
            times.append(kept.next_after(times[-1]))
    runs = [*reversed(seen.runs[:RESULTS])]
    states = {job.id: str(job.state) for job in queue.jobs.load([run.job for run in runs if run.job])}
    return {
        "name": kept.name,
        "cron": kept.cron,
        "tz": kept.tz,
        "request": kept.request,
        "catalog": kept.catalog.name if kept.catalog else None,
        "paused": seen.next is None,
        "outdated": seen.outdated,
        "last": last_run(queue, seen),
        "times": times,
        "runs": [_result(run, states) for run in runs],
    }


def _result(run: Run, states: dict[str, str]) -> dict[str, Any]:
    """One time that has passed: how what it fired ended, or why it fired nothing."""
    there = run.job in states
    how = states.get(run.job or "", "fired") if run.outcome == "fired" else run.outcome
    return {"at": run.due, "how": how, "text": outcome_text(run), "job": run.job if there else None}


act("/schedules/{name}/run", of_schedules.run_schedule, "/schedules")
act("/schedules/{name}/pause", of_schedules.pause_schedule, "/schedules")
act("/schedules/{name}/resume", of_schedules.resume_schedule, "/schedules")
act("/schedules/{name}/remove", of_schedules.remove_schedule, "/schedules")
