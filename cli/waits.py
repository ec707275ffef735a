"""Why nothing is begun now, in words: the service is paused, its workers are drained, or bulk work rests."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from reshard.pipeline.errors import BadSchedule

if TYPE_CHECKING:
    from reshard.worker.fleet.fleet import FleetStatus as Seen
    from reshard.worker.fleet.fleet import Pause
    from reshard.worker.queue.jobs import JobStore


def waits(store: JobStore, bulk: bool) -> str | None:
    """Why nothing, or no bulk work, is begun now; None when it is."""
    from reshard.worker.fleet.fleet import Fleet

    fleet = Fleet(store)
    if (paused := fleet.paused()) is not None:
        return f"{pause_text(paused)}; `reshard fleet resume` lets it go on"
    workers = [process.name for process in store.processes() if process.kind == "worker"]
    if workers and fleet.all_drained().issuperset(workers):
        return f"every worker is drained; `reshard fleet undrain {workers[0]}` has it take work again"
    if not bulk:
        return None
    try:
        seen = fleet.seen()
    except BadSchedule as error:
        return f"whether bulk work rests is not known here: {error}"
    return f"bulk work {rest_text(seen)}" if seen.rest is not None else None


def pause_text(paused: Pause) -> str:
    reason = f": {paused.reason}" if paused.reason else ""
    return f"the service is paused since {moment(paused.since, 'UTC')}, by {paused.by}{reason}"


def rest_text(seen: Seen) -> str:
    """Of bulk work: until when it rests and why, or that it does not."""
    if seen.rest is None:
        return "is begun when it comes"
    why = {"window": "its window is shut", "night": "it has read what it may in a night"}[seen.rest.why]
    return f"rests until {moment(seen.rest.until, seen.limits.tz)}: {why}"


def moment(seconds: float, tz: str) -> str:
    """``2026-06-01 22:00 CEST``."""
    return datetime.fromtimestamp(seconds, ZoneInfo(tz)).strftime("%Y-%m-%d %H:%M %Z")
