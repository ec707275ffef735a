"""The queue for people: its processes in words, and why a new job waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reshard.cli.output import Output, count, dated
from reshard.client.queue import Queue, worker_state

if TYPE_CHECKING:
    from reshard.worker.fleet.fleet import Fault


def warn(queue: Queue, output: Output, bulk: bool) -> str | None:
    """Warns a person who submits; returns ``queue.waits``, which is the warning."""
    if why := queue.waits(bulk):
        output.say(why)
    return why


def process_text(process: Mapping[str, Any]) -> str:
    """A process by its name, with a worker's state, and since when it runs."""
    text = f"{process['version']}, started {dated(process['started'])}"
    if process["kind"] == "worker":
        state = worker_state(process["draining"], process["drained"], process["resting"])
        text = f"{state}, {text}, {count(process['concurrency'], 'copy')} at once"
    return f"{process['name']}: {text}"


def fault_text(fault: Fault) -> str:
    """Why a worker rests, and what to do."""
    return f"began to rest on {dated(fault.since)}: {fault.message} ({fault.hint})"
