"""Schedules with their times and results, and the form of one."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from urllib.parse import quote, urlencode

from reshard.client.facts import outcome_text, upcoming
from reshard.client.models.catalogs import CatalogFile, Schedule, ScheduleRow, ScheduleTimes
from reshard.client.models.records import Run
from reshard.client.operations import schedules as operations
from reshard.client.operations.catalogs import CLOSELY
from reshard.client.operations.table import read
from reshard.client.queue import Queue
from reshard.client.text import count, human_bytes
from reshard.pipeline.errors import BadSchedule
from reshard.web.pages import forms
from reshard.web.pages.catalogs import by_repo, file_of, submission, text_of
from reshard.web.pages.forms import Button, Form, shown, submits
from reshard.web.pages.site import Call, Page, Reply, act, page

UPCOMING = 5  # times of a schedule
RESULTS = 14  # of a schedule that are shown


@page("GET", "/schedules")
def schedules(call: Call) -> Reply:
    after, name = call.query.one("after"), call.query.one("name")
    query = read(operations.SchedulesQuery, {"after": after, "name": name}, "the address")
    found = operations.list_schedules(call.session, query)
    more = urlencode({"after": found.next}) if found.next else ""
    rows = [(row, _times(row), _results(call.queue, row)) for row in found.schedules]
    known = {"after": after, "more": more, "name": name}
    return Page("schedules.html", {"schedules": rows, "unreadable": found.unreadable} | known)


def _times(row: ScheduleRow) -> list[float]:
    found = list[float]()
    with suppress(BadSchedule):  # only another machine knows its time zone
        for at in upcoming(row.cron, row.tz, UPCOMING, row.next):
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


act(operations.run_schedule, "/schedules?name={name}")
act(operations.pause_schedule, "/schedules?name={name}")
act(operations.resume_schedule, "/schedules?name={name}")
act(operations.remove_schedule, "/schedules", path="/schedules/{name}/remove")


def _form(of_catalog: bool, name: str = "") -> Form:
    """Of a new one, or of the one of that ``name``, which stays."""
    times = [one for one in forms.TIMES if not (name and one.name == "name")]
    what = [times, forms.TEXT, forms.LIMITS] if of_catalog else [times, [*forms.PLACES, *forms.SIZE]]
    at = f"/schedules/{quote(name)}" if name else ""
    title = f"Schedule {name}" if name else f"Schedule a {'catalog' if of_catalog else 'job'}"
    tries, does = Button("Preview", f"{at}/edit" if name else "/new/schedules"), Button("Save", at or "/schedules")
    return Form("schedule_form.html", title, what, [] if of_catalog else forms.OPTIONS, tries, does)


@page("GET", "/new/schedules")
def new(call: Call) -> Reply:
    """That of a job, or of the catalog that the address names, ``catalog=`` for another one."""
    form = _form("catalog" in call.query)
    return shown(form, forms.defaults(form) | file_of(call))


@page("GET", "/schedules/{name}/edit")
def edit(call: Call) -> Reply:
    """As it is kept, with the text of the catalog that the address names."""
    kept = operations.show_schedule(call.session, call.path["name"])
    times = {"cron": kept.cron, "tz": kept.tz, "missed": kept.missed}
    what = forms.typed_of(kept.request) if kept.request else text_of(CatalogFile.of(kept.catalog, digest=kept.digest))
    return shown(_form(kept.request is None, kept.name), times | what | file_of(call))


def _sent_form(call: Call) -> Form:
    return _form("text" in call.body, call.path.get("name", ""))


@submits("/new/schedules", _sent_form)
@submits("/schedules/{name}/edit", _sent_form)
def dry_run(call: Call) -> Reply:
    """When it would be due, and what it would submit now; nothing is kept."""
    sent = _sent(call) | {"name": call.path.get("name") or call.body.one("name")}
    found = operations.check_schedule(call.session, read(operations.Kept, sent, "the form"))
    would = found.would and found.would.catalog
    wrong = by_repo(would) if would else {}
    now = _now(found)
    return shown(_sent_form(call), forms.as_typed(call.body), found=found, now=now, wrong=wrong, closely=CLOSELY)


@submits("/schedules", _sent_form)
def add(call: Call) -> Reply:
    sent = _sent(call) | call.body.given("name")
    operations.add_schedule(call.session, read(operations.Kept, sent, "the form"))
    return "/schedules"


@submits("/schedules/{name}", _sent_form)
def save(call: Call) -> Reply:
    operations.edit_schedule(call.session, call.path["name"], read(operations.Edited, _sent(call), "the form"))
    return f"/schedules?{urlencode({'name': call.path['name']})}"


def _sent(call: Call) -> dict[str, Any]:
    """The form, without its name; what stands as it was kept is the same. Raises BadBody and BadRename."""
    name, times = call.path.get("name"), call.body.given("cron", "tz", "missed")
    if "text" in call.body:
        return times | {"catalog": submission(call.body)}
    kept: Schedule | None = operations.show_schedule(call.session, name) if name else None
    return times | {"request": forms.request_fields(call.body, kept.request if kept else None)}


def _now(found: ScheduleTimes) -> str:
    """What would become of it now, in a sentence."""
    would = found.would
    assert would is not None, "it was asked for"
    if would.outcome != "fired":
        return f"Nothing would be submitted ({outcome_text(would, now=True)})."
    if would.job:
        return f"Job {would.job} is already doing this."
    if (one := would.request) is None:
        return "The catalog would be submitted."
    if one.published:
        return f"Nothing to do: {one.target} is up to date."
    return f"A job would be queued: {one.source} to {one.target}, {count(one.files, 'file')}, {human_bytes(one.bytes)}."
