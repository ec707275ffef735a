"""`reshard schedule ...`: requests and catalogs that control submits by the clock."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rich.text import Text
from typer import Option, Typer

from reshard.cli.arguments import Limits, argument, commands, read_request_or_catalog, value
from reshard.cli.catalog import read_definition
from reshard.cli.output import Output, lines, succeeded
from reshard.cli.queue import START, Queue, missing, moment, open_queue
from reshard.pipeline.request import Request

if TYPE_CHECKING:
    from reshard.worker.followers.schedules import Run, Schedule
    from reshard.worker.followers.schedules import ScheduleStatus as Seen

RUNS_SHOWN = 10  # times; --json has all that are kept

Name = Annotated[str, argument("NAME", "The schedule's name.")]


schedule = Typer(name="schedule", help="Submit a request or a catalog by a cron expression.", no_args_is_help=True)
command = commands(schedule)


@command("add", submitted=read_request_or_catalog)
def add(
    *,
    name: Name,
    submitted: Request | tuple[Path, Limits],
    cron: Annotated[str, value("CRON", "When: minute hour day month weekday, as in '0 3 * * *'.")],
    tz: Annotated[str, Option(metavar="ZONE", help="Time zone of CRON, as Europe/Berlin.")] = "UTC",
    missed: Annotated[
        Literal["once", "skip"], Option(help="After times at which no control ran: run once, or not at all.")
    ] = "once",
    output: Output,
) -> None:
    """Submit SRC into DST, or a catalog, at regular times.

    SRC is submitted as a bulk job. `reshard control` fires schedules.
    """
    from reshard.worker.followers.schedules import Schedule

    what = {"request": submitted} if isinstance(submitted, Request) else {"catalog": read_definition(*submitted)}
    kept = Schedule.model_validate({"name": name, "cron": cron, "tz": tz, "missed": missed, **what})
    with open_queue() as queue:
        first = queue.schedules.add(kept)
        if "control" in missing(queue.jobs.processes()):
            output.say(Text(f"no control is running, so nothing fires: {START.format('control')}"))
    said = f"schedule {name}: {_what(kept)}, first on {moment(first, tz)}"
    output.result({"schedule": name, "next": first}, Text(said), name)


@command("list")
def list_(output: Output) -> None:
    """List schedules with their next time and last outcome."""
    with open_queue() as queue:
        found = [(seen, _last(queue, seen)) for seen in queue.schedules.all()]
    rows = [(seen.schedule.name, _next(seen), last, succeeded(seen.success)) for seen, last in found]
    output.listing(
        [seen.to_dict() | {"last": last} for seen, last in found],
        lines(rows) if rows else Text("no schedules"),
        [seen.schedule.name for seen, _ in found],
    )


@command("show")
def show(name: Name, output: Output) -> None:
    """Show a schedule and its last runs."""
    with open_queue() as queue:
        seen = queue.schedules.get(name)
        last = _last(queue, seen)
    kept = seen.schedule
    told = [
        ("schedule", kept.name),
        ("when", f"{kept.cron} in {kept.tz}; missed times run {'once' if kept.missed == 'once' else 'never'}"),
        ("next", _next(seen)),
        ("last", last),
        ("success", succeeded(seen.success)),
        ("what", _what(kept)),
        ("asked by", kept.request.asked_by if kept.request else kept.catalog.asked_by if kept.catalog else ""),
        *(("run", f"{moment(run.due, kept.tz)}: {_outcome(run)}") for run in seen.runs[:RUNS_SHOWN]),
    ]
    output.result(seen.to_dict() | {"last": last}, lines(told), _next(seen))


@command("run")
def run(name: Name, output: Output) -> None:
    """Fire a schedule now, in addition to its times."""
    with open_queue() as queue:
        done = queue.schedules.run(name)
        why = queue.warn(output, bulk=True)
    facts = {"schedule": name, "outcome": done.outcome, "job": done.job, "waits": why}
    output.result(facts, Text(f"schedule {name}: {_outcome(done)}"), done.job or "")


@command("pause")
def pause(name: Name, output: Output) -> None:
    """Pause a schedule; a job that it fired continues."""
    with open_queue() as queue:
        queue.schedules.pause(name)
    output.result({"schedule": name, "next": None}, Text(f"schedule {name} is paused"), name)


@command("resume")
def resume(name: Name, output: Output) -> None:
    """Resume a paused schedule.

    Times that passed during the pause are not run.
    """
    with open_queue() as queue:
        first = queue.schedules.resume(name)
        tz = queue.schedules.get(name).schedule.tz
    output.result({"schedule": name, "next": first}, Text(f"schedule {name} resumes on {moment(first, tz)}"), name)


@command("remove")
def remove(name: Name, output: Output) -> None:
    """Remove a schedule; a job that it fired continues."""
    with open_queue() as queue:
        queue.schedules.remove(name)
    output.result({"schedule": name, "removed": True}, Text(f"schedule {name} is removed"), name)


def _what(kept: Schedule) -> str:
    if kept.catalog is not None:
        return f"catalog {kept.catalog.name}, {kept.catalog.digest[:12]}"
    assert kept.request is not None, "a schedule submits something"
    size = kept.request.options.size
    return f"{kept.request.source} -> {kept.request.target}, files of at most {size:,} bytes"


def _next(seen: Seen) -> str:
    return "paused" if seen.next is None else moment(seen.next, seen.schedule.tz)


def _last(queue: Queue, seen: Seen) -> str:
    """The last run, and the state of the job that it fired."""
    from reshard.pipeline.errors import CatalogNotFound, JobNotFound

    if not seen.runs:
        return "never fired"
    run = seen.runs[0]
    if run.outcome == "fired" and seen.schedule.catalog is not None:
        name = seen.schedule.catalog.name
        try:
            return f"catalog {name}, {queue.catalogs.get(name).state}"
        except CatalogNotFound:
            return f"catalog {name}, removed since"
    if run.outcome != "fired" or run.job is None:
        return _outcome(run)
    try:
        return f"job {run.job}, {queue.jobs.get(run.job).state}"
    except JobNotFound:
        return f"job {run.job}, deleted since"


def _outcome(run: Run) -> str:
    said = {
        "fired": f"job {run.job}" if run.job else "its catalog was submitted",
        "missed": "missed: no control was running",
        "overlap": f"left out: {f'its last job {run.job}' if run.job else 'its catalog'} was still at work",
        "busy": f"left out: job {run.job} had the target, with another request",
    }
    return said[run.outcome]
