"""`reshard schedule ...`: requests and catalogs that control submits by the clock."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from reshard.cli import completion
from reshard.cli.arguments import argument, commands, flag, read_limits, read_request_or_catalog, value
from reshard.cli.catalog import looked_at, read_submission, would_do
from reshard.cli.job_text import options_text
from reshard.cli.output import Output, human_bytes, lines, succeeded
from reshard.cli.output import count as count_of
from reshard.client import PAGE_MAX
from reshard.client.connect import connect
from reshard.client.facts import outcome_text, upcoming
from reshard.client.models.catalogs import Schedule, SchedulePreview, ScheduleRow, ScheduleTimes, Would
from reshard.client.operations import schedules as operations
from reshard.client.operations.jobs import JobRequest, service
from reshard.client.operations.table import Session, pages, read
from reshard.client.queue import START, missing, moment
from reshard.pipeline.request import Request
from reshard.worker.followers.schedules import Schedule as Checked

LIST_HEAD = ("SCHEDULE", "NEXT", "LAST RUN", "LAST SUCCESS")
RUNS_SHOWN = 10  # times; --json has all that are kept

Name = Annotated[str, argument("NAME", "The schedule's name.", autocompletion=completion.schedules)]

schedule, command = commands("schedule", "Submit a job or a catalog on a cron schedule.")


@command("add", submitted=read_request_or_catalog)
def add(
    name: Annotated[str, argument("NAME", "The schedule's name.")],
    submitted: Request | tuple[Path, dict[str, int]],
    cron: Annotated[str, value("CRON", "Cron expression, such as '0 3 * * *' or @daily.")],
    output: Output,
    tz: Annotated[str, Option(metavar="ZONE", help="Time zone for CRON, such as Europe/Berlin.")] = "UTC",
    missed: Annotated[
        Literal["once", "skip"],
        Option(help="What to do about times missed while the control process was down: run once, or skip them."),
    ] = "once",
) -> None:
    """Reshard SRC into DST, or submit a catalog, on a schedule.

    SRC is submitted as a bulk job. Schedules fire only while `reshard control` is running.

    Example: reshard schedule add nightly a/model --to you/model --cron @daily
    """
    typed: dict[str, object] = {"name": name, "cron": cron, "tz": tz, "missed": missed}
    if isinstance(submitted, Request):
        schedule = read(Checked, typed | {"request": submitted})
        sent = typed | {"request": JobRequest.of(submitted)}
    else:
        _, submission = read_submission(*submitted)
        schedule = read(Checked, typed | {"catalog": submission.definition("")})
        sent = typed | {"catalog": submission}
    schedule.check()  # what is wrong is said in a command's words
    with connect() as session:
        done = operations.add_schedule(session, operations.Kept.model_validate(sent))
        if "control" in missing({process.kind for process in service(session).processes}):
            start = START.format("control")
            output.say(f"warning: the control process is not running, so schedules won't fire: {start}")
    output.result(done, f"Added schedule {name}: {_what(schedule)}, first run {_next(done.next, tz)}", name)


@command("set", limits=read_limits)
def set_(
    name: Name,
    file: Annotated[Path, value("FILE", "The catalog to submit on future runs.", "--catalog")],
    limits: dict[str, int],
    session: Session,
    output: Output,
) -> None:
    """Update the catalog that a schedule submits.

    Keeps the schedule's times and past runs, and any limits that you do not set.

    Example: reshard schedule set nightly --catalog models.yaml
    """
    kept = operations.show_schedule(session, name).catalog
    former = kept.model_dump(exclude={"name", "text", "asked_by"}, exclude_defaults=True) if kept else {}
    of, submission = read_submission(file, former | limits)
    done = operations.set_catalog(session, name, submission)
    output.result(done, f"Updated schedule {name}: now submits catalog {of}, {done.digest[:12]}", name)


@command("list")
def list_(session: Session, output: Output) -> None:
    """List schedules with their next run and last result.

    Example: reshard schedule list
    """
    found: list[ScheduleRow] = []
    for page in pages(partial(operations.list_schedules, session), operations.SchedulesQuery(limit=PAGE_MAX)):
        found += page.schedules
        for name, damage in page.unreadable.items():
            output.warn(f"cannot read the record of schedule {name}: {damage}")
    rows = [(seen.name, _next(seen.next, seen.tz), seen.last, _succeeded(seen)) for seen in found]
    old = [f"schedule {seen.name}: {_outdated(seen)}" for seen in found if seen.outdated]
    text = lines([LIST_HEAD, *rows]) if rows else "No schedules"
    output.listing(found, "\n".join([text, *old]), [name for name, *_ in rows])


@command("show")
def show(name: Name, session: Session, output: Output) -> None:
    """Show a schedule and its latest runs.

    Example: reshard schedule show nightly
    """
    seen = operations.show_schedule(session, name)
    submitted = seen.request or seen.catalog
    assert submitted is not None, "a schedule submits something"
    rows = [
        ("schedule", seen.name),
        ("when", f"{seen.cron} ({seen.tz}); missed times {'run once' if seen.missed == 'once' else 'are skipped'}"),
        ("next", _next(seen.next, seen.tz)),
        ("last", seen.last),
        ("last success", _succeeded(seen)),
        ("submits", _what(seen)),
        *([("outdated", _outdated(seen))] if seen.outdated else []),
        ("submitter", submitted.asked_by),
        *(("run", f"{moment(run.due, seen.tz)}: {outcome_text(run)}") for run in seen.runs[:RUNS_SHOWN]),
    ]
    output.result(seen, lines(rows), _next(seen.next, seen.tz))


@command("next")
def next_(
    name: Name,
    session: Session,
    output: Output,
    count: Annotated[int, Option("--count", "-n", metavar="N", min=1, max=1000, help="Number of times to show.")] = 1,
    dry_run: Annotated[
        bool, flag("--dry-run", "Also show what the schedule would submit now, without submitting it.")
    ] = False,
) -> None:
    """Show when a schedule will run next.

    With --dry-run, also shows what it would submit now. This calls the Hub with your own token.

    Example: reshard schedule next nightly -n 5
    """
    seen = operations.show_schedule(session, name)
    preview = operations.preview_schedule(session, name) if dry_run else None
    due = [*upcoming(seen.cron, seen.tz, count, seen.next)] if seen.next else []
    text = "\n".join(moment(at, seen.tz) for at in due) or "paused"
    if preview is None:
        output.result(ScheduleTimes(name=name, next=due), text, text)
        return
    would, rows = _would(seen, preview)
    output.result(ScheduleTimes(name=name, next=due, would=would), f"{text}\n{lines(rows)}", would.outcome)


@command("run")
def run(name: Name, session: Session, output: Output) -> None:
    """Run a schedule now, in addition to its regular times.

    Example: reshard schedule run nightly
    """
    done = operations.run_schedule(session, name)
    output.waits(done.waits)
    output.result(done, f"Schedule {name}: {outcome_text(done)}", done.job or "")


@command("pause")
def pause(name: Name, session: Session, output: Output) -> None:
    """Pause a schedule; jobs it has already started keep running.

    Example: reshard schedule pause nightly
    """
    done = operations.pause_schedule(session, name)
    output.result(done, f"Paused schedule {name}", name)


@command("resume")
def resume(name: Name, session: Session, output: Output) -> None:
    """Resume a paused schedule.

    Times that passed during the pause are skipped.

    Example: reshard schedule resume nightly
    """
    done = operations.resume_schedule(session, name)
    tz = operations.show_schedule(session, name).tz
    output.result(done, f"Resumed schedule {name}: next run {_next(done.next, tz)}", name)


@command("remove")
def remove(name: Name, session: Session, output: Output) -> None:
    """Remove a schedule; jobs it has already started keep running.

    Example: reshard schedule remove nightly
    """
    done = operations.remove_schedule(session, name)
    output.result(done, f"Removed schedule {name}", name)


def _would(kept: Schedule, preview: SchedulePreview) -> tuple[Would, list[tuple[str, str]]]:
    """What it would submit if it fired now, and the same in rows."""
    from reshard.client.dry_run import of_request
    from reshard.pipeline.catalogs.definition import ENTRIES_MAX, parse
    from reshard.pipeline.stores.connect import Context

    outcome, job = preview.outcome, preview.job
    fired = f"job {job} is already doing this" if job else "would be submitted"
    rows = [("now", fired if outcome == "fired" else outcome_text(preview, now=True))]
    if kept.catalog is not None:
        found = looked_at(parse(kept.catalog.text, kept.catalog.name), ENTRIES_MAX)
        return Would(outcome=outcome, job=job, catalog=found), [*rows, *would_do(found)]
    assert kept.request is not None, "a schedule submits something"
    with closing(Context.from_env()) as context:
        one = of_request(kept.request, context)
    if one.published:
        commit = f", commit {one.published[:12]}" if kept.request.target.branch else ""
        rows.append(("unchanged", f"{one.target} is up to date{commit}"))
    else:
        rows.append(("job", f"{one.source} -> {one.target}: {count_of(one.files, 'file')}, {human_bytes(one.bytes)}"))
    return Would(outcome=outcome, job=job, request=one), rows


def _outdated(seen: Schedule | ScheduleRow) -> str:
    assert seen.catalog is not None, "a request is not outdated"
    update = f"reshard schedule set {seen.name} --catalog FILE"
    return f"a newer version of catalog {seen.catalog.name} was submitted; to update the schedule, run `{update}`"


def _what(kept: Schedule | Checked) -> str:
    if kept.catalog is not None:
        return f"catalog {kept.catalog.name}, {kept.catalog.digest[:12]}"
    assert kept.request is not None, "a schedule submits something"
    size, options = f"at most {kept.request.options.size:,} bytes per file", options_text(kept.request)
    return ", ".join(filter(None, (f"{kept.request.source} -> {kept.request.target}", size, options)))


def _succeeded(seen: Schedule | ScheduleRow) -> str:
    return succeeded(seen.success, partial(moment, tz=seen.tz))


def _next(due: float | None, tz: str) -> str:
    return "paused" if due is None else moment(due, tz)
