"""Figures as people read them, wherever that is."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from reshard.pipeline.figures import human_bytes
from reshard.pipeline.text import counted as count

if TYPE_CHECKING:
    from reshard.client.models.jobs import JobNow

__all__ = [
    "clock", "count", "expected", "figure", "finds_none", "human_bytes", "human_rate", "lasted", "long",
    "remaining",
]  # fmt: skip


def human_rate(bytes_a_second: float) -> str:
    """``47.2 MB/s``, ``0 B/s``."""
    size = human_bytes(bytes_a_second)
    return f"{size.replace(' bytes', ' B').replace(' byte', ' B')}/s"


def lasted(seconds: float) -> str:
    """``48 s``, ``7 min 20 s``, ``3 h 12 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, left = divmod(whole, 60)
    return f"{minutes} min {left} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def long(seconds: int) -> str:
    """``48 s``, ``7 min``, ``3 h``, ``2 d``: about how long."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def remaining(seconds: float | None) -> str:
    """``about 6 min left``; empty where that is unknown or no time."""
    return f"about {long(round(seconds))} left" if seconds and round(seconds) else ""


def expected(job: JobNow) -> str:
    """``37th of 412, starts in about 6 min``, ``about 6 min left``: when it begins, or has copied all."""
    if job.place is None:
        return remaining(job.left)
    starts = f"starts in {about.removesuffix(' left')}" if (about := remaining(job.left)) else ""
    return ", ".join(filter(None, (f"{_ordinal(job.place)} of {job.waiting:,}", starts)))


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in {11, 12, 13} else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{suffix}"


def clock(moment: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """``2026-06-01 22:00:07``, by UTC; ``moment`` is in seconds since the epoch."""
    return datetime.fromtimestamp(moment, UTC).strftime(form)


def figure(value: object) -> str:
    """One figure of a check."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:.1f}" if isinstance(value, float) else str(value)


def finds_none(number: int) -> str:
    """Of an entry of a catalog's file, by its number, as errors about the file name it."""
    return f"entries[{number}] matches no models"
