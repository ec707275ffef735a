"""Catalogs with their nights and failures, and schedules with their times and results."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from urllib.parse import urlencode

from reshard.client.catalog_report import markdown
from reshard.client.facts import outcome_text, upcoming
from reshard.client.models.catalogs import Catalog, ScheduleRow
from reshard.client.models.records import Run
from reshard.client.operations import catalogs as operations
from reshard.client.operations import schedules as of_schedules
from reshard.client.operations.table import read
from reshard.client.queue import Queue
from reshard.client.served import Served
from reshard.pipeline.errors import BadSchedule, ReshardError
from reshard.web.documents import status_of
from reshard.web.pages.site import Call, Page, Reply, Text, act, page

TIMES = 5  # of a schedule that come next
RESULTS = 14  # of a schedule that are shown
GRID_MAX = 1000  # models of a grid; those that failed come first


@page("GET", "/catalogs")
def catalogs(call: Call) -> Reply:
    return _catalogs(call.session)


def _catalogs(session: Served, text: str = "", error: ReshardError | None = None) -> Page:
    listed = operations.list_catalogs(session).catalogs
    shown = {"catalogs": listed, "text": text, "error": error.to_dict() if error else None}
    return Page("catalogs.html", shown, status_of(error) if error else 200)


@page("POST", "/catalogs")
def submit(call: Call) -> Reply:
    given = call.body.given("text", "at_once", "max_failures", "max_bytes")
    try:
        done = operations.submit_catalog(call.session, read(operations.Submission, given, "the form"))
        return f"/catalogs/{done.name}"
    except ReshardError as error:
        return _catalogs(call.session, call.body.one("text"), error)


@page("GET", "/catalogs/{name}")
def catalog(call: Call) -> Reply:
    seen = operations.show_catalog(call.session, call.path["name"])
    grid = _grid(seen, call.queue.catalogs.nights(seen.name))
    return Page("catalog.html", {"seen": seen, "grid": grid, "may": seen.may()})


def _grid(seen: Catalog, nights: list[tuple[float, Any]]) -> dict[str, Any]:
    """A row for each model: what became of it in each night, the oldest first; those with trouble lately come first."""
    models = {repo for _, night in nights for repo in night} | {ended.repo for ended in seen.ended} | seen.active.keys()
    kept = [*reversed(nights)]
    rows = [(repo, [night.get(repo, ("", "")) for _, night in kept]) for repo in sorted(models)]
    rows.sort(key=lambda row: row[1][-1][0] not in {"failed", "cancelled"} if row[1] else True)
    return {"began": [began for began, _ in kept], "rows": rows[:GRID_MAX], "more": max(0, len(rows) - GRID_MAX)}


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
def report(call: Call) -> Reply:
    """For an issue, a mail, or who keeps them."""
    return Text(markdown(operations.show_catalog(call.session, call.path["name"])), f"{call.path['name']}.md")


@page("GET", "/schedules")
def schedules(call: Call) -> Reply:
    after = call.query.one("after")
    query = read(of_schedules.SchedulesQuery, {"after": after}, "the address")
    found = of_schedules.list_schedules(call.session, query)
    more = urlencode({"after": found.next}) if found.next else ""
    rows = [(row, _times(row), _results(call.queue, row)) for row in found.schedules]
    return Page("schedules.html", {"schedules": rows, "after": after, "more": more})


def _times(row: ScheduleRow) -> list[float]:
    found = list[float]()
    with suppress(BadSchedule):  # only another machine knows its time zone
        for at in upcoming(row, TIMES):
            found.append(at)
    return found


def _results(queue: Queue, row: ScheduleRow) -> list[dict[str, Any]]:
    """Of each time that has passed: how what it fired ended, or why it fired nothing."""
    runs = [*reversed(row.runs[:RESULTS])]
    states = {job.id: str(job.state) for job in queue.jobs.load([run.job for run in runs if run.job])}
    return [_result(run, states) for run in runs]


def _result(run: Run, states: dict[str, str]) -> dict[str, Any]:
    there = run.job in states
    how = states.get(run.job or "", "fired") if run.outcome == "fired" else run.outcome
    return {"at": run.due, "how": how, "text": outcome_text(run), "job": run.job if there else None}


act("/schedules/{name}/run", of_schedules.run_schedule, "/schedules")
act("/schedules/{name}/pause", of_schedules.pause_schedule, "/schedules")
act("/schedules/{name}/resume", of_schedules.resume_schedule, "/schedules")
act("/schedules/{name}/remove", of_schedules.remove_schedule, "/schedules")
