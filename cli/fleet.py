"""`reshard fleet ...`: all workers at once, or one of them; `reshard usage`: what they were used for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from typer import Option

from reshard.cli import completion
from reshard.cli.arguments import argument, commands, takes, value
from reshard.cli.output import Output, count, dated, human_bytes, lines, when
from reshard.client.models.fleet import FleetLimits, Used
from reshard.client.operations import fleet as operations
from reshard.client.operations.table import Session, read
from reshard.client.queue import START, bulk_text, moment, pause_text, state_text
from reshard.client.text import human_rate, lasted

WORKERS_HEAD = ("WORKER", "STATE", "STARTED", "COPIES", "VERSION", "NOW")
USED_HEAD = ("JOBS", "FAILED", "READ", "UPLOADED", "DEDUPLICATED", "HUB CALLS", "WORKER TIME")

Worker = Annotated[
    str,
    argument(
        "WORKER",
        "A worker's name from `reshard fleet status`, or a unique prefix.",
        autocompletion=completion.workers,
    ),
]

fleet, command = commands("fleet", "Pause or drain workers, and set shared limits.")


@command("status")
def status(session: Session, output: Output) -> None:
    """Show the current limits and the state of each worker.

    Example: reshard fleet status
    """
    seen = operations.show_fleet(session)
    rows = [("service", pause_text(seen.paused) if seen.paused else "running"), *_limits(seen)]
    rows += [(one.kind, one.says) for one in seen.silent]
    table = list[Sequence[str]]()
    for worker in seen.workers:
        now, copies = [*worker.at], f"{worker.concurrency:,}"
        if fault := seen.resting.get(worker.name):
            now.insert(0, f"paused itself on {dated(fault.since)}: {fault.message} ({fault.hint})")
        row = worker.name, state_text(worker.state), when(worker.started), copies, worker.version, "; ".join(now)
        table.append(row)
    if not table and "worker" not in {one.kind for one in seen.silent}:
        rows.append(("worker", f"not running: {START.format('worker')}"))
    text = "\n".join([lines(rows), *(["", lines([WORKERS_HEAD, *table])] if table else [])])
    output.result(seen, text, "paused" if seen.paused else "takes work")


@command("pause")
def pause(
    session: Session,
    output: Output,
    reason: Annotated[str | None, value("TEXT", "Reason to show next to waiting jobs.")] = None,
) -> None:
    """Pause all workers until `reshard fleet resume`.

    Copies stop after the current file and go back to the queue. Other tasks run to completion, but planning and
    checking stop while they wait for the Hub.

    Example: reshard fleet pause --reason "the Hub is down"
    """
    done = operations.pause_fleet(session, read(operations.Why, {"reason": reason}, "--reason"))
    text = f"Already paused: {pause_text(done.paused)}" if done.was_paused else "Paused the service"
    output.result(done, f"{text}\nResume it with `reshard fleet resume`", "paused")


@command("resume")
def resume(session: Session, output: Output) -> None:
    """Resume a paused service.

    Example: reshard fleet resume
    """
    done = operations.resume_fleet(session)
    output.result(done, "Resumed the service" if done.was_paused else "The service was not paused", "resumed")


@command("drain")
def drain(worker: Worker, session: Session, output: Output) -> None:
    """Drain a worker: it requeues its tasks and accepts no more.

    It stays drained until it exits or you run `reshard fleet undrain`.

    Example: reshard fleet drain gpu-7
    """
    done = operations.drain(session, worker)
    undo = f"to undo this, run `reshard fleet undrain {done.name}`"
    then = f"Stop it once `reshard fleet status` shows no tasks for it; {undo}"
    output.result(done, f"Drained worker {done.name}\n{then}", done.name)


@command("undrain")
def undrain(worker: Worker, session: Session, output: Output) -> None:
    """Let a drained worker accept tasks again.

    Example: reshard fleet undrain gpu-7
    """
    done = operations.undrain(session, worker)
    text = "accepts work again" if done.was_drained else "was not drained"
    output.result(done, f"Worker {done.name} {text}", done.name)


@takes()
def usage(
    session: Session,
    output: Output,
    by: Annotated[
        Literal["submitter", "catalog", "day"], Option(help="Group usage by submitter, catalog or day.")
    ] = "submitter",
    days: Annotated[
        int,
        Option(metavar="N", min=1, max=operations.USAGE_DAYS_MAX, help="Number of days to show, ending today (UTC)."),
    ] = operations.USAGE_DAYS,
) -> None:
    """Show resource usage by submitter, catalog or day.

    Example: reshard usage --by catalog --days 7
    """
    seen = operations.usage(session, operations.UsageQuery(by=by, days=days))
    rows = [(one.name or "(none)", *_used(one)) for one in seen.rows]
    if len(rows) > 1:
        rows.append(("total", *_used(seen.total)))
    table = lines([(by.upper(), *USED_HEAD), *rows], right=range(1, len(USED_HEAD) + 1))
    output.result(seen, table if rows else f"No jobs ended in the last {count(days, 'day')}")


def _used(used: Used) -> tuple[str, ...]:
    moved = map(human_bytes, (used.read, used.uploaded, used.deduplicated))
    return f"{used.jobs:,}", f"{used.failed:,}", *moved, f"{used.calls:,}", lasted(used.worker_seconds)


@command("limit")
def limit(
    session: Session,
    output: Output,
    bandwidth: Annotated[
        str | None, value("RATE", "Total bandwidth limit for all copies, such as 200MB/s, or `none`.")
    ] = None,
    night_bytes: Annotated[
        str | None, value("SIZE", "Limit on data that bulk jobs can read per day, such as 2TB, or `none`.")
    ] = None,
    window: Annotated[
        str | None, value("HOURS", "Hours when bulk jobs can run, such as 22:00-06:00, or `none` for any time.")
    ] = None,
    closed: Annotated[
        str | None, value("HOURS", "Hours when bulk jobs cannot run, such as 08:00-18:00, or `none`.")
    ] = None,
    tz: Annotated[
        str | None, value("ZONE", "Time zone for the hours and days, such as Europe/Berlin, or `none` for UTC.")
    ] = None,
) -> None:
    """Set limits shared by all workers.

    Limits that you do not set are unchanged. A day begins when --window begins, or at midnight if it is not set.

    Example: reshard fleet limit --bandwidth 200MB/s --window 22:00-06:00
    """
    typed = {"bandwidth": bandwidth, "night_bytes": night_bytes, "window": window, "closed": closed, "tz": tz}
    done = operations.limit_fleet(session, read(operations.Limiting, typed, "the limits"))
    output.result(done, lines(_limits(done)))


def _limits(seen: FleetLimits) -> list[tuple[str, str]]:
    limits, tz = seen.limits, seen.limits.tz
    held = f"; {count(seen.held, 'job')} waiting" if seen.held else ""
    read = f"{human_bytes(seen.read_in_the_night)} read since {moment(seen.night, tz)}"
    return [
        ("bulk jobs", bulk_text(seen.bulk_rests, tz) + held),
        ("allowed hours", f"{limits.window} ({tz})" if limits.window else f"all day ({tz})"),
        ("bulk reads", f"{read}, {_most(limits.night_bytes, ' per day')}"),
        ("bandwidth", f"{human_rate(seen.bytes_a_second)} now, {_most(limits.bandwidth, '/s')}"),
    ]


def _most(limit: int | None, per: str = "") -> str:
    return "no limit" if limit is None else f"limit {human_bytes(limit)}{per}"
