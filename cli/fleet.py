"""`reshard fleet ...`: all workers at once, or one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option, Typer

from reshard.cli import completion
from reshard.cli.arguments import argument, asked_by, commands, value
from reshard.cli.help import SectionedGroup
from reshard.cli.output import Output, count, human_bytes, lines, when
from reshard.cli.queue import fault_text
from reshard.client.facts import fleet_facts
from reshard.client.queue import START, bulk_text, moment, open_queue, pause_text

WORKERS_HEAD = ("WORKER", "STATE", "STARTED", "COPIES", "VERSION", "NOW")

if TYPE_CHECKING:
    from reshard.worker.fleet.fleet import FleetStatus as Seen

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
    with open_queue() as queue:
        seen, claims, processes = queue.fleet.seen(), queue.fleet.claims_by_worker(), queue.jobs.processes()
    facts = fleet_facts(seen, processes, claims)
    rows = [("service", pause_text(seen.paused) if seen.paused else "takes work"), *_limits(seen)]
    workers, table = {worker["name"]: worker for worker in facts["workers"]}, list[Sequence[str]]()
    for process in processes:
        if (worker := workers.get(process.name)) is not None:
            faults = [fault_text(seen.resting[process.name])] if process.name in seen.resting else []
            now = "; ".join((*faults, *worker["at"]))
            copies = f"{process.concurrency:,}"
            table.append((process.name, worker["state"], when(process.started), copies, process.version, now))
    if not workers:
        rows.append(("worker", f"none is running: {START.format('worker')}"))
    text = "\n".join([lines(rows), *(["", lines([WORKERS_HEAD, *table])] if workers else [])])
    output.result(facts, text, "paused" if seen.paused else "takes work")


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
    with open_queue() as queue:
        was = queue.fleet.paused() is not None
        paused = queue.fleet.pause(asked_by(), reason)
    text = f"{'paused already: ' if was else ''}{pause_text(paused)}\n`reshard fleet resume` continues it"
    output.result({"paused": asdict(paused), "was_paused": was}, text, "paused")


@command("resume")
def resume(output: Output) -> None:
    """Let a paused service continue.

    Example: reshard fleet resume
    """
    with open_queue() as queue:
        was = queue.fleet.resume()
    output.result({"paused": None, "was_paused": was}, "resumed" if was else "it was not paused", "resumed")


@command("drain")
def drain(worker: Worker, output: Output) -> None:
    """Make one worker hand back its work and take no more.

    It stays drained until `reshard fleet undrain`, or until it ends.

    Example: reshard fleet drain gpu-7
    """
    with open_queue() as queue:
        name = queue.fleet.drain(worker)
    text = f"worker {name} is drained; stop it once `reshard fleet status` shows it without work, or `undrain` it"
    output.result({"name": name, "drained": True}, text, name)


@command("undrain")
def undrain(worker: Worker, output: Output) -> None:
    """Let a drained worker take work again.

    Example: reshard fleet undrain gpu-7
    """
    with open_queue() as queue:
        name, was = queue.fleet.undrain(worker)
    text = f"worker {name} takes work again" if was else f"worker {name} was not drained"
    output.result({"name": name, "drained": False, "was_drained": was}, text, name)


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
    with open_queue() as queue:
        queue.fleet.limit({name: value for name, value in typed.items() if value is not None})
        seen = queue.fleet.seen()
    output.result(seen.to_dict(), lines(_limits(seen)))


def _limits(seen: Seen) -> list[tuple[str, str]]:
    limits, tz = seen.limits, seen.limits.tz
    read = f"{human_bytes(seen.read)} of bulk work read since {moment(seen.night, tz)}"
    return [
        ("bulk work", bulk_text(seen) + (f"; waiting for it: {count(seen.deferred, 'job')}" if seen.deferred else "")),
        ("bandwidth", f"{human_bytes(round(seen.rate))}/s read now, {_most(limits.bandwidth, '/s')}"),
        ("night", f"{read}, {_most(limits.night_bytes)}"),
        ("window", f"{limits.window} in {tz}" if limits.window else f"any hour; nights begin at midnight in {tz}"),
    ]


def _most(limit: int | None, per: str = "") -> str:
    return "without a limit" if limit is None else f"at most {human_bytes(limit)}{per}"
