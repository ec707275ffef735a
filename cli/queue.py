"""The queue's processes for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.cli.output import count, dated
from reshard.client.queue import worker_state

if TYPE_CHECKING:
    from reshard.client.models.jobs import ProcessNow
    from reshard.client.models.records import Fault


def process_text(process: ProcessNow) -> str:
    """A process by its name, with a worker's state, and since when it runs."""
    text = f"{process.version}, started {dated(process.started)}"
    if process.kind == "worker":
        state = worker_state(process, process.drained, process.resting)
        text = f"{state}, {text}, {count(process.concurrency, 'copy')} at once"
    return f"{process.name}: {text}"


def fault_text(fault: Fault) -> str:
    """Why a worker rests, and what to do."""
    return f"began to rest on {dated(fault.since)}: {fault.message} ({fault.hint})"
