"""`reshard schedule ...`: submissions that control makes again and again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.text import Text
from typer import Argument, Option, Typer

from reshard.cli.arguments import Limits, read_output, read_request_or_catalog, takes
from reshard.cli.catalog import read_definition
from reshard.cli.jobs import missing, open_store
from reshard.cli.output import Output, lines, succeeded
from reshard.cli.waits import moment, waits
from reshard.pipeline.request import Request

if TYPE_CHECKING:
    from reshard.worker.followers.schedules import Run, Schedule, Schedules
    from reshard.worker.followers.schedules import ScheduleStatus as Seen
    from reshard.worker.queue.jobs import JobStore

RUNS_SHOWN = 10  # times; --json has all that are kept

Name = Annotated[str, Argument(metavar="NAME", help="The schedule's name.", show_default=False)]


class Missed(StrEnum):
    once = "once"
    skip = "skip"


schedule = Typer(
    name="schedule",
    help="Submit a request or a catalog again and again, when a cron expression is due; control does it.",
    no_args_is_help=True,
)


@contextmanager
def _open() -> Iterator[tuple[JobStore, Schedules]]:
    from reshard.worker.followers.schedules import Schedules

    with open_store() as store:
        yield store, Schedules(store)


@schedule.command("add")
@takes(submitted=read_request_or_catalog, output=read_output)
def add(
    *,
    name: Name,
    submitted: Request | tuple[Path, Limits],
    cron: Annotated[
        str, Option(metavar="CRON", help="When: minute hour day month weekday, as in '0 3 * * *'.", show_default=False)
    ],
    tz: Annotated[str, Option(metavar="ZONE", help="By whose clock: a name as Europe/Berlin.")] = "UTC",
    missed: Annotated[
        Missed, Option(help="What becomes of times at which no control ran: one run when it is back, or none.")
    ] = Missed.once,
    output: Output,
) -> None:
    """Keep a schedule that submits SRC into DST as a bulk job, or a catalog."""
    from reshard.worker.followers.schedules import Schedule

    what = {"request": submitted} if isinstance(submitted, Request) else {"catalog": read_definition(*submitted)}
    kept = Schedule.model_validate({"name": name, "cron": cron, "tz": tz, "missed": missed.value, **what})
    with _open() as (store, schedules):
        first = schedules.add(kept)
        if "control" in missing(store.processes()):
            output.say(Text("no control is running, and nothing fires without one: start one with `reshard control`"))
    said = f"schedule {name}: {_what(kept)}, first on {moment(first, tz)}"
    output.result({"schedule": name, "next": first}, Text(said), name)


@schedule.command("list")
@takes(output=read_output)
def list_(output: Output) -> None:
    """List schedules: when each fires next, what became of its last time, and when it last ended well."""
    with _open() as (store, schedules):
        found = [(seen, _last(store, seen)) for seen in schedules.all()]
    if output.json:
        for seen, last in found:
            output.document(seen.to_dict() | {"last": last})
    else:
        rows = [(seen.schedule.name, _next(seen), last, succeeded(seen.success)) for seen, last in found]
        output.text(lines(rows) if rows else Text("no schedules"), "\n".join(seen.schedule.name for seen, _ in found))


@schedule.command("show")
@takes(output=read_output)
def show(name: Name, output: Output) -> None:
    """Show a schedule and what became of its last times."""
    with _open() as (store, schedules):
        seen = schedules.get(name)
        last = _last(store, seen)
    kept = seen.schedule
    told = [
        ("schedule", kept.name),
        ("when", f"{kept.cron} in {kept.tz}; a missed time is run {'once' if kept.missed == 'once' else 'never'}"),
        ("next", _next(seen)),
        ("last", last),
        ("success", succeeded(seen.success)),
        ("what", _what(kept)),
        ("asked by", kept.request.asked_by if kept.request else kept.catalog.asked_by if kept.catalog else ""),
        *(("run", f"{moment(run.due, kept.tz)}: {_outcome(run)}") for run in seen.runs[:RUNS_SHOWN]),
    ]
    output.result(seen.to_dict() | {"last": last}, lines(told), _next(seen))


@schedule.command("run")
@takes(output=read_output)
def run(name: Name, output: Output) -> None:
    """Fire a schedule now, beside its times."""
    with _open() as (store, schedules):
        done = schedules.run(name)
        if why := waits(store, bulk=True):
            output.say(Text(why))
    facts = {"schedule": name, "outcome": done.outcome, "job": done.job, "waits": why}
    output.result(facts, Text(f"schedule {name}: {_outcome(done)}"), done.job or "")


@schedule.command("pause")
@takes(output=read_output)
def pause(name: Name, output: Output) -> None:
    """Let a schedule rest; a job that it fired goes on."""
    with _open() as (_, schedules):
        schedules.pause(name)
    output.result({"schedule": name, "next": None}, Text(f"schedule {name} is paused"), name)


@schedule.command("resume")
@takes(output=read_output)
def resume(name: Name, output: Output) -> None:
    """Let a paused schedule go on; times that passed in the pause are not run."""
    with _open() as (_, schedules):
        first = schedules.resume(name)
        tz = schedules.get(name).schedule.tz
    output.result({"schedule": name, "next": first}, Text(f"schedule {name} goes on, on {moment(first, tz)}"), name)


@schedule.command("remove")
@takes(output=read_output)
def remove(name: Name, output: Output) -> None:
    """Forget a schedule; a job that it fired goes on."""
    with _open() as (_, schedules):
        schedules.remove(name)
    output.result({"schedule": name, "removed": True}, Text(f"schedule {name} is removed"), name)


def _what(kept: Schedule) -> str:
    if kept.catalog is not None:
        return f"catalog {kept.catalog.name}, {kept.catalog.digest[:12]}"
    assert kept.request is not None, "a schedule submits something"
    size = kept.request.options.size
    return f"{kept.request.source} -> {kept.request.target}, files of at most {size:,} bytes"


def _next(seen: Seen) -> str:
    return "paused" if seen.next is None else moment(seen.next, seen.schedule.tz)


def _last(store: JobStore, seen: Seen) -> str:
    """What became of the last time, and of the job that it fired."""
    from reshard.pipeline.errors import CatalogNotFound, JobNotFound
    from reshard.worker.followers.catalogs import Catalogs

    if not seen.runs:
        return "never fired"
    run = seen.runs[0]
    if run.outcome == "fired" and seen.schedule.catalog is not None:
        name = seen.schedule.catalog.name
        try:
            return f"catalog {name}, {Catalogs(store).get(name).state}"
        except CatalogNotFound:
            return f"catalog {name}, removed since"
    if run.outcome != "fired" or run.job is None:
        return _outcome(run)
    try:
        return f"job {run.job}, {store.get(run.job).state}"
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
