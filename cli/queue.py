"""The queue's processes for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.cli.output import count, dated
from reshard.client.queue import state_text, worker_state

if TYPE_CHECKING:
    from reshard.client.models.jobs import ProcessNow
    from reshard.client.models.records import Fault


def process_text(process: ProcessNow) -> str:
    """A process by its name, with a worker's state, and since when it runs."""
    text = f"version {process.version}, started {dated(process.started)}"
    if process.kind == "worker":
        state = state_text(worker_state(process, process.drained, process.resting))
        text = f"{state}, up to {count(process.concurrency, 'copy')} at a time, {text}"
    return f"{process.name}: {text}"


def fault_text(fault: Fault) -> str:
    """Why a worker paused itself, and what to do."""
    return f"paused itself on {dated(fault.since)}: {fault.message} ({fault.hint})"
