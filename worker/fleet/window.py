"""The hours of a day in which bulk work is done, by the wall clock of a time zone.

Both ends are due as cron.py finds them: where the clock is put forward, one that is left out is due right after the
gap; where it is put back, one that the night has twice is due the first time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from reshard.pipeline.errors import BadLimit, BadSchedule
from reshard.worker.cron import next_after

MIDNIGHT = "0 0 * * *"
TWO_DAYS = 2 * 86_400.0  # seconds; whatever is due each day was due in them, also over a change of the clock

_WINDOW = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


@dataclass(frozen=True, slots=True)
class Window:
    """From ``start`` to ``stop``, both as ``22:00``; over midnight where the stop is the earlier one."""

    start: str
    stop: str

    @classmethod
    def parse(cls, text: str) -> Window:
        """Of ``22:00-06:00``; raises BadLimit."""
        match = _WINDOW.fullmatch(text.strip())
        if match is None:
            raise BadLimit(what=f"{text!r} is not a time window; use a format such as 22:00-06:00")
        window = cls(f"{match[1]}:{match[2]}", f"{match[3]}:{match[4]}")
        if window.start == window.stop:
            raise BadLimit(what=f"{text!r} starts and ends at the same time; use `none` to remove the window")
        return window

    def __str__(self) -> str:
        return f"{self.start}-{self.stop}"

    def others(self) -> Window:
        """The rest of the day."""
        return Window(self.stop, self.start)

    def has(self, tz: str, moment: float) -> bool:
        """Whether ``moment``, in seconds since the epoch, is within them."""
        start, stop = next_after(self.begins, tz, moment), next_after(_cron(self.stop), tz, moment)
        # Both are due at once where the clock jumps over the whole of them, or over the whole of the rest.
        return stop < start or (stop == start and self.stop < self.start)

    @property
    def begins(self) -> str:
        """A cron expression."""
        return _cron(self.start)


def last_due(cron: str, tz: str, moment: float) -> float:
    """When ``cron``, which is due each day, was due last, at ``moment`` or before."""
    last = next_after(cron, tz, moment - TWO_DAYS)
    while (following := next_after(cron, tz, last)) <= moment:
        last = following
    return last


def check_zone(tz: str) -> None:
    """Raises BadLimit for a time zone that this machine does not know."""
    try:
        next_after(MIDNIGHT, tz, 0.0)
    except BadSchedule as error:
        raise BadLimit(what=str(error)) from None


def _cron(time: str) -> str:
    hour, minute = time.split(":")
    return f"{int(minute)} {int(hour)} * * *"
