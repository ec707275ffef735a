"""`reshard schedule ...`: requests and catalogs that control submits by the clock."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option, Typer

from reshard.cli import completion
from reshard.cli.arguments import argument, commands, read_limits, read_request_or_catalog, value
from reshard.cli.catalog import looked_at, read_definition, would_do
from reshard.cli.help import SectionedGroup
from reshard.cli.output import Output, human_bytes, lines, succeeded
from reshard.cli.output import count as count_of
from reshard.cli.queue import warn
from reshard.client.facts import outcome_text, schedule_facts, schedule_row
from reshard.client.queue import START, missing, moment, open_queue
from reshard.pipeline.request import Request

if TYPE_CHECKING:
    from reshard.worker.followers.schedules import Outcome, Schedule
    from reshard.worker.followers.schedules import ScheduleStatus as Seen

LIST_HEAD = ("SCHEDULE", "NEXT", "LAST RUN", "LAST SUCCESS")
RUNS_SHOWN = 10  # times; --json has all that are kept

Name = Annotated[str, argument("NAME", "The schedule's name.", autocompletion=completion.schedules)]


schedule = Typer(
    name="schedule",
    cls=SectionedGroup,
    help="Submit a request or a catalog by a cron expression.",
    no_args_is_help=True,
)
command = commands(schedule)


@command("add", submitted=read_request_or_catalog)
def add(
    *,
    name: Annotated[str, argument("NAME", "The schedule's name.")],
    submitted: Request | tuple[Path, dict[str, int]],
    cron: Annotated[str, value("CRON", "When: minute hour day month weekday, as in '0 3 * * *', or @daily.")],
    tz: Annotated[str, Option(metavar="ZONE", help="Time zone of CRON, as Europe/Berlin.")] = "UTC",
    missed: Annotated[
        Literal["once", "skip"], Option(help="After times at which no control ran: run once, or not at all.")
    ] = "once",
    output: Output,
) -> None:
    """Submit SRC into DST, or a catalog, at regular times.

    SRC is submitted as a bulk job. `reshard control` fires schedules.

    Example: reshard schedule add nightly a/model --to you/model --cron @daily
    """
    from reshard.worker.followers.schedules import Schedule

    what = {"request": submitted} if isinstance(submitted, Request) else {"catalog": read_definition(*submitted)}
    kept = Schedule.model_validate({"name": name, "cron": cron, "tz": tz, "missed": missed, **what})
    with open_queue() as queue:
        first = queue.schedules.add(kept)
        if "control" in missing({process.kind for process in queue.jobs.processes()}):
            output.say(f"no control is running, so nothing fires: {START.format('control')}")
    text = f"schedule {name}: {_what(kept)}, first on {moment(first, tz)}"
    output.result({"name": name, "next": first}, text, name)


@command("set", limits=read_limits)
def set_(
    *,
    name: Name,
    file: Annotated[Path, value("FILE", "The catalog as it is to be submitted from now on.", "--catalog")],
    limits: dict[str, int],
    output: Output,
) -> None:
    """Have a schedule submit a catalog as it is now.

    Its times and its past runs stay, and so do limits that are not given.

    Example: reshard schedule set nightly --catalog models.yaml
    """
    with open_queue() as queue:
        kept = queue.schedules.get(name).schedule.catalog
        former = kept.model_dump(exclude={"name", "text", "asked_by"}, exclude_defaults=True) if kept else {}
        definition = read_definition(file, former | limits)
        queue.schedules.set_catalog(name, definition)
    text = f"schedule {name} submits catalog {definition.name}, {definition.digest[:12]} from now on"
    output.result({"name": name, "digest": definition.digest}, text, name)


@command("list")
def list_(output: Output) -> None:
    """List schedules with their next time and last outcome.

    Example: reshard schedule list
    """
    with open_queue() as queue:
        found = [(seen, schedule_row(queue, seen)) for seen in queue.schedules.all()]
    rows = [(seen.schedule.name, _next(seen), facts["last"], succeeded(seen.success)) for seen, facts in found]
    old = [f"schedule {seen.schedule.name}: {_outdated(seen)}" for seen, _ in found if seen.outdated]
    text = lines([LIST_HEAD, *rows]) if rows else "no schedules"
    output.listing([facts for _, facts in found], "\n".join([text, *old]), [name for name, *_ in rows])


@command("show")
def show(name: Name, output: Output) -> None:
    """Show a schedule and its last runs.

    Example: reshard schedule show nightly
    """
    with open_queue() as queue:
        seen = queue.schedules.get(name)
        facts = schedule_facts(queue, seen)
    kept = seen.schedule
    rows = [
        ("schedule", kept.name),
        ("when", f"{kept.cron} in {kept.tz}; missed times run {'once' if kept.missed == 'once' else 'never'}"),
        ("next", _next(seen)),
        ("last", facts["last"]),
        ("last success", succeeded(seen.success)),
        ("what", _what(kept)),
        *([("outdated", _outdated(seen))] if seen.outdated else []),
        ("asked by", next(submitted.asked_by for submitted in (kept.request, kept.catalog) if submitted)),
        *(("run", f"{moment(run.due, kept.tz)}: {outcome_text(run)}") for run in seen.runs[:RUNS_SHOWN]),
    ]
    output.result(facts, lines(rows), _next(seen))


@command("next")
def next_(
    *,
    name: Name,
    count: Annotated[int, Option("--count", "-n", min=1, max=1000, help="How many times to show.")] = 1,
    dry_run: Annotated[bool, Option("--dry-run", help="Also show what it would submit now; submit nothing.")] = False,
    output: Output,
) -> None:
    """Show when a schedule is due next, and what it would do.

    With --dry-run it asks the Hub with your own token.

    Example: reshard schedule next nightly -n 5
    """
    with open_queue() as queue:
        seen = queue.schedules.get(name)
        outcome = queue.schedules.preview(name) if dry_run else None
    kept, due = seen.schedule, [] if seen.next is None else [seen.next]
    while due and len(due) < count:
        due.append(kept.next_after(due[-1]))
    text = "\n".join(moment(at, kept.tz) for at in due) or "paused"
    if outcome is None:
        output.result({"name": name, "next": due}, text, text)
        return
    facts, rows = _would(seen, *outcome)
    output.result({"name": name, "next": due, "would": facts}, f"{text}\n{lines(rows)}", facts["outcome"])


@command("run")
def run(name: Name, output: Output) -> None:
    """Fire a schedule now, in addition to its times.

    Example: reshard schedule run nightly
    """
    with open_queue() as queue:
        done = queue.schedules.run(name)
        why = warn(queue, output, bulk=True)
    facts = {"name": name, "outcome": done.outcome, "job": done.job, "waits": why}
    output.result(facts, f"schedule {name}: {outcome_text(done)}", done.job or "")


@command("pause")
def pause(name: Name, output: Output) -> None:
    """Pause a schedule; a job that it fired continues.

    Example: reshard schedule pause nightly
    """
    with open_queue() as queue:
        queue.schedules.pause(name)
    output.result({"name": name, "next": None}, f"schedule {name} is paused", name)


@command("resume")
def resume(name: Name, output: Output) -> None:
    """Resume a paused schedule.

    Times that passed during the pause are not run.

    Example: reshard schedule resume nightly
    """
    with open_queue() as queue:
        first = queue.schedules.resume(name)
        tz = queue.schedules.get(name).schedule.tz
    output.result({"name": name, "next": first}, f"schedule {name} resumes on {moment(first, tz)}", name)


@command("remove")
def remove(name: Name, output: Output) -> None:
    """Remove a schedule; a job that it fired continues.

    Example: reshard schedule remove nightly
    """
    with open_queue() as queue:
        queue.schedules.remove(name)
    output.result({"name": name, "removed": True}, f"schedule {name} is removed", name)


def _would(seen: Seen, outcome: Outcome, job: str | None) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """What it would submit if it fired now, JSON-able and in rows."""
    from reshard.pipeline.api import plan
    from reshard.pipeline.catalogs.definition import parse
    from reshard.pipeline.planning.model import weight_files

    kept = seen.schedule
    says = {
        "fired": f"job {job} is at work on this already" if job else "it would be submitted",
        "overlap": f"left out: {f'its last job {job}' if job else 'its catalog'} is still at work",
        "full": "left out: it has as many jobs queued as one submitter may",
        "busy": f"left out: job {job} has the target, with another request",
    }[outcome]
    rows = [("now", says)]
    if kept.catalog is not None:
        found = looked_at(parse(kept.catalog.text, kept.catalog.name), closely=True)
        return {"outcome": outcome, "job": job, "catalog": found}, [*rows, *would_do(found)]
    assert kept.request is not None, "a schedule submits something"
    made, request = plan(kept.request), kept.request
    size, files = sum(shard.size for shard in made.shards), weight_files(made)
    if made.published:
        commit = f", commit {made.published[:12]}" if request.target.branch else ""
        rows.append(("unchanged", f"{request.target} has it already{commit}"))
    else:
        rows.append(("job", f"{request.source} -> {request.target}: {count_of(files, 'file')}, {human_bytes(size)}"))
    planned = {"source": str(request.source), "target": str(request.target), "published": made.published}
    return {"outcome": outcome, "job": job, "request": planned | {"files": files, "bytes": size}}, rows


def _outdated(seen: Seen) -> str:
    assert seen.schedule.catalog is not None, "a request is not outdated"
    update = f"reshard schedule set {seen.schedule.name} --catalog FILE"
    return f"its text is older than the last submission of catalog {seen.schedule.catalog.name}; `{update}` updates it"


def _what(kept: Schedule) -> str:
    if kept.catalog is not None:
        return f"catalog {kept.catalog.name}, {kept.catalog.digest[:12]}"
    assert kept.request is not None, "a schedule submits something"
    size = kept.request.options.size
    return f"{kept.request.source} -> {kept.request.target}, files of at most {size:,} bytes"


def _next(seen: Seen) -> str:
    return "paused" if seen.next is None else moment(seen.next, seen.schedule.tz)
