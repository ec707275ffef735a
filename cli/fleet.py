"""`reshard fleet ...`: what is said to all workers at once, or to one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text
from typer import Argument, Option, Typer

from reshard.cli.arguments import asked_by, read_output, takes
from reshard.cli.jobs import missing, open_store, process_text, worker_state
from reshard.cli.output import Output, count, human_bytes, lines
from reshard.cli.waits import moment, pause_text, rest_text

if TYPE_CHECKING:
    from reshard.worker.fleet.fleet import Fleet, Limits
    from reshard.worker.fleet.fleet import FleetStatus as Seen
    from reshard.worker.queue.jobs import JobStore

Worker = Annotated[
    str,
    Argument(metavar="WORKER", help="Its name in `reshard fleet status`, or the start of it.", show_default=False),
]

fleet = Typer(name="fleet", help="Pause all workers, drain one, or limit what they do together.", no_args_is_help=True)


@contextmanager
def _open() -> Iterator[tuple[JobStore, Fleet]]:
    from reshard.worker.fleet.fleet import Fleet

    with open_store() as store:
        yield store, Fleet(store)


@fleet.command("status")
@takes(output=read_output)
def status(output: Output) -> None:
    """Show the limits in force, what rests and why, and what each worker is at."""
    with _open() as (store, fleet):
        seen, held, processes = fleet.seen(), fleet.claims_by_worker(), store.processes()
    workers = [process for process in processes if process.kind == "worker"]
    told = [
        ("service", pause_text(seen.paused) if seen.paused else "takes work"),
        ("bulk work", _bulk(seen)),
        ("bandwidth", f"{_rate(round(seen.rate))} read now, {_most(seen.limits.bandwidth, _rate)}"),
        ("night", f"{human_bytes(seen.read)} of bulk work read since {moment(seen.night, seen.limits.tz)}, "
         f"{_most(seen.limits.night_bytes, human_bytes)}"),
        ("window", _window(seen.limits)),
    ]  # fmt: skip
    for process in workers:
        told.append(("worker", process_text(process, process.name in seen.drained)))
        told += [("", f"has {what}") for what in held.get(process.name, ())]
    if "worker" in missing(processes):
        told.append(("worker", "none is running: start one with `reshard worker`, or all of it with `reshard up`"))
    facts = seen.to_dict() | {
        "workers": [
            {
                "name": process.name,
                "state": worker_state(process, process.name in seen.drained),
                "concurrency": process.concurrency,
                "at": held.get(process.name, []),
            }
            for process in workers
        ]
    }
    output.result(facts, lines(told), "paused" if seen.paused else "takes work")


@fleet.command("pause")
@takes(output=read_output)
def pause(
    *,
    reason: Annotated[
        str | None, Option(metavar="TEXT", help="Why, for whoever sees that it is paused.", show_default=False)
    ] = None,
    output: Output,
) -> None:
    """Let no worker begin anything, until resume. Copies are handed back at their next file, other steps end."""
    with _open() as (_, fleet):
        was = fleet.paused() is not None
        paused = fleet.pause(asked_by(), reason)
    said = f"{'paused already: ' if was else ''}{pause_text(paused)}\n`reshard fleet resume` lets it go on"
    output.result({"paused": asdict(paused), "was_paused": was}, Text(said), "paused")


@fleet.command("resume")
@takes(output=read_output)
def resume(output: Output) -> None:
    """Let a paused service go on where it was."""
    with _open() as (_, fleet):
        was = fleet.resume()
    output.result({"paused": None, "was_paused": was}, Text("it goes on" if was else "it was not paused"), "resumed")


@fleet.command("drain")
@takes(output=read_output)
def drain(worker: Worker, output: Output) -> None:
    """Have one worker hand back what it holds and take nothing more, until undrain or its end."""
    with _open() as (_, fleet):
        name = fleet.drain(worker)
    said = f"worker {name} is drained; stop it when `reshard fleet status` shows nothing at it, or `undrain` it"
    output.result({"worker": name, "drained": True}, Text(said), name)


@fleet.command("undrain")
@takes(output=read_output)
def undrain(worker: Worker, output: Output) -> None:
    """Have a drained worker take work again."""
    with _open() as (_, fleet):
        name, was = fleet.undrain(worker)
    said = f"worker {name} takes work again" if was else f"worker {name} was not drained"
    output.result({"worker": name, "drained": False, "was_drained": was}, Text(said), name)


def _limit(metavar: str, help: str) -> Any:
    return Option(metavar=metavar, help=f"{help}; none takes it off.", show_default=False)


@fleet.command("limit")
@takes(output=read_output)
def limit(
    *,
    bandwidth: Annotated[
        str | None, _limit("RATE", "At most so many bytes a second for all copies together, as 200MB/s")
    ] = None,
    night_bytes: Annotated[
        str | None, _limit("SIZE", "At most so many bytes of weights read by bulk jobs in a night, as 2TB")
    ] = None,
    window: Annotated[str | None, _limit("HOURS", "Bulk work only at these hours, as 22:00-06:00")] = None,
    closed: Annotated[str | None, _limit("HOURS", "Bulk work at all hours but these, as 08:00-18:00")] = None,
    tz: Annotated[str | None, _limit("ZONE", "By whose clock hours and nights are, as Europe/Berlin")] = None,
    output: Output,
) -> None:
    """Set limits for all workers together; those that are not named stay as they are."""
    typed = {"bandwidth": bandwidth, "night_bytes": night_bytes, "window": window, "closed": closed, "tz": tz}
    with _open() as (_, fleet):
        fleet.limit({name: value for name, value in typed.items() if value is not None})
        seen = fleet.seen()
    limits = seen.limits
    told = [
        ("bandwidth", _most(limits.bandwidth, _rate)),
        ("night", _most(limits.night_bytes, human_bytes)),
        ("window", _window(limits)),
        ("bulk work", _bulk(seen)),
    ]
    output.result(seen.to_dict(), lines(told))


def _bulk(seen: Seen) -> str:
    return rest_text(seen) + (f"; waiting for it: {count(seen.deferred, 'job')}" if seen.deferred else "")


def _window(limits: Limits) -> str:
    return f"{limits.window} in {limits.tz}" if limits.window else f"any hour; nights begin at midnight in {limits.tz}"


def _most(limit: int | None, say: Callable[[int], str]) -> str:
    return "without a limit" if limit is None else f"at most {say(limit)}"


def _rate(bytes_a_second: int) -> str:
    return f"{human_bytes(bytes_a_second)}/s"
