"""`reshard fleet ...`: all workers at once, or one of them; `reshard usage`: what they were used for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option, Typer

from reshard.cli import completion
from reshard.cli.arguments import argument, commands, read_output, takes, value
from reshard.cli.help import SectionedGroup
from reshard.cli.output import Output, count, human_bytes, lines, when
from reshard.cli.queue import fault_text
from reshard.client.connect import connect
from reshard.client.operations import fleet as operations
from reshard.client.operations.table import read
from reshard.client.queue import START, bulk_text, moment, pause_text
from reshard.client.text import lasted

WORKERS_HEAD = ("WORKER", "STATE", "STARTED", "COPIES", "VERSION", "NOW")
USED_HEAD = ("JOBS", "FAILED", "READ", "SENT", "DEDUPLICATED", "HUB CALLS", "WORKER TIME")

if TYPE_CHECKING:
    from reshard.client.models.fleet import FleetLimits, Used

Worker = Annotated[
    str,
    argument("WORKER", "Its name in `reshard fleet status`, or the start of it.", autocompletion=completion.workers),
]

fleet = Typer(
    name="fleet", cls=SectionedGroup, help="Pause all workers, drain one, or set shared limits.", no_args_is_help=True
)
command = commands(fleet)


@command("status")
def status(output: Output) -> None:
    """Show the limits in force and the state of each worker.

    Example: reshard fleet status
    """
    with connect() as session:
        seen = operations.show_fleet(session)
    rows = [("service", pause_text(seen.paused) if seen.paused else "takes work"), *_limits(seen)]
    table = list[Sequence[str]]()
    for worker in seen.workers:
        faults = [fault_text(seen.resting[worker.name])] if worker.name in seen.resting else []
        now, copies = "; ".join((*faults, *worker.at)), f"{worker.concurrency:,}"
        table.append((worker.name, worker.state, when(worker.started), copies, worker.version, now))
    if not table:
        rows.append(("worker", f"none is running: {START.format('worker')}"))
    text = "\n".join([lines(rows), *(["", lines([WORKERS_HEAD, *table])] if table else [])])
    output.result(seen, text, "paused" if seen.paused else "takes work")


@command("pause")
def pause(
    *,
    reason: Annotated[str | None, value("TEXT", "The reason, shown to everyone who waits.")] = None,
    output: Output,
) -> None:
    """Stop all workers from starting anything, until resume.

    Copies are handed back at their next file; other steps run to their end.

    Example: reshard fleet pause --reason "the Hub is down"
    """
    with connect() as session:
        done = operations.pause_fleet(session, read(operations.Why, {"reason": reason}, "--reason"))
    text = f"{'paused already: ' if done.was_paused else ''}{pause_text(done.paused)}"
    output.result(done, f"{text}\n`reshard fleet resume` continues it", "paused")


@command("resume")
def resume(output: Output) -> None:
    """Let a paused service continue.

    Example: reshard fleet resume
    """
    with connect() as session:
        done = operations.resume_fleet(session)
    output.result(done, "resumed" if done.was_paused else "it was not paused", "resumed")


@command("drain")
def drain(worker: Worker, output: Output) -> None:
    """Make one worker hand back its work and take no more.

    It stays drained until `reshard fleet undrain`, or until it ends.

    Example: reshard fleet drain gpu-7
    """
    with connect() as session:
        done = operations.drain(session, worker)
    then = "stop it once `reshard fleet status` shows it without work, or `undrain` it"
    output.result(done, f"worker {done.name} is drained; {then}", done.name)


@command("undrain")
def undrain(worker: Worker, output: Output) -> None:
    """Let a drained worker take work again.

    Example: reshard fleet undrain gpu-7
    """
    with connect() as session:
        done = operations.undrain(session, worker)
    text = "takes work again" if done.was_drained else "was not drained"
    output.result(done, f"worker {done.name} {text}", done.name)


@takes(output=read_output)
def usage(
    *,
    by: Annotated[Literal["submitter", "catalog", "day"], Option(help="What each row is of.")] = "submitter",
    days: Annotated[
        int, Option(min=1, max=operations.USAGE_DAYS_MAX, help="How many days back, whole days of UTC.")
    ] = operations.USAGE_DAYS,
    output: Output,
) -> None:
    """Show what jobs took, by submitter, catalog or day.

    Example: reshard usage --by catalog --days 7
    """
    with connect() as session:
        seen = operations.usage(session, operations.UsageQuery(by=by, days=days))
    rows = [(one.name or "(none)", *_used(one)) for one in seen.rows]
    if len(rows) > 1:
        rows.append(("total", *_used(seen.total)))
    table = lines([(by.upper(), *USED_HEAD), *rows], right=range(1, len(USED_HEAD) + 1))
    output.result(seen, table if rows else f"no job ended in the last {count(days, 'day')}")


def _used(used: Used) -> tuple[str, ...]:
    moved = map(human_bytes, (used.read, used.uploaded, used.deduplicated))
    return f"{used.jobs:,}", f"{used.failed:,}", *moved, f"{used.calls:,}", lasted(used.worker_seconds)


def _limit(metavar: str, help: str) -> Any:
    return Option(metavar=metavar, help=f"{help}; `none` removes it.", show_default=False)


@command("limit")
def limit(
    *,
    bandwidth: Annotated[str | None, _limit("RATE", "Bandwidth limit of all copies together, as 200MB/s")] = None,
    night_bytes: Annotated[str | None, _limit("SIZE", "Limit of bytes that bulk jobs read in a night, as 2TB")] = None,
    window: Annotated[str | None, _limit("HOURS", "Run bulk work only in these hours, as 22:00-06:00")] = None,
    closed: Annotated[str | None, _limit("HOURS", "Run bulk work outside these hours, as 08:00-18:00")] = None,
    tz: Annotated[str | None, _limit("ZONE", "Time zone of hours and nights, as Europe/Berlin")] = None,
    output: Output,
) -> None:
    """Set limits for all workers together.

    Limits that are not given stay as they are.

    Example: reshard fleet limit --bandwidth 200MB/s --window 22:00-06:00
    """
    typed = {"bandwidth": bandwidth, "night_bytes": night_bytes, "window": window, "closed": closed, "tz": tz}
    with connect() as session:
        done = operations.limit_fleet(session, read(operations.Limiting, typed, "the limits"))
    output.result(done, lines(_limits(done)))


def _limits(seen: FleetLimits) -> list[tuple[str, str]]:
    limits, tz = seen.limits, seen.limits.tz
    held = f"; waiting for it: {count(seen.held, 'job')}" if seen.held else ""
    read = f"{human_bytes(seen.read_in_the_night)} of bulk work read since {moment(seen.night, tz)}"
    return [
        ("bulk work", bulk_text(seen.bulk_rests, tz) + held),
        ("bandwidth", f"{human_bytes(seen.bytes_a_second)}/s read now, {_most(limits.bandwidth, '/s')}"),
        ("night", f"{read}, {_most(limits.night_bytes)}"),
        ("window", f"{limits.window} in {tz}" if limits.window else f"any hour; nights begin at midnight in {tz}"),
    ]


def _most(limit: int | None, per: str = "") -> str:
    return "without a limit" if limit is None else f"at most {human_bytes(limit)}{per}"
