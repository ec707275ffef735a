"""When a cron expression is due next, by the wall clock of a time zone.

Five fields, or a name such as ``@daily``, as Debian's cron reads them (crontab(5)). Clocks may change: a time that a
spring night leaves out is due right after the gap, and one that an autumn night has twice is due once. Where the
minute or the hour begins with ``*``, the times follow the clock instead: none is due in the gap, and what the night has
twice is due twice, so what runs every hour goes on every hour.
"""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from reshard.pipeline.errors import BadSchedule

FIELDS = 5  # minute, hour, day of month, month, day of week
# crontab(5); @reboot is none of a schedule's times.
NAMED = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}


def next_after(cron: str, tz: str, moment: float) -> float:
    """The first time after ``moment`` at which ``cron`` is due in ``tz``; both in seconds since the epoch.

    Raises BadSchedule for an invalid expression, an unknown zone, and a time that never comes.
    """
    if cron.startswith("@") and cron not in NAMED:
        raise BadSchedule(what=f"--cron {cron!r} is not one of {', '.join(NAMED)}")
    fields = NAMED.get(cron, cron)
    if len(fields.split()) != FIELDS:
        raise BadSchedule(what=f"--cron {cron!r} needs {FIELDS} fields, not {len(cron.split())}")
    local = datetime.fromtimestamp(moment, UTC).astimezone(_zone(tz))
    try:
        # In the second pass through an autumn hour cronsim may name the first one, which is over.
        due = next(at.timestamp() for at in CronSim(fields, local) if at.timestamp() > moment)
    except (CronSimError, AssertionError) as error:  # it asserts that steps start at a number
        raise BadSchedule(what=f"--cron {cron!r}: {str(error) or 'a step must start at a number'}") from None
    except (StopIteration, OverflowError):
        raise BadSchedule(what=f"--cron {cron!r} never matches a date") from None
    return due


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError):  # an unknown name, a path that leaves the database, a folder of it
        cure = "use a name such as Europe/Berlin, or UTC"
        raise BadSchedule(what=f"--tz {name!r} is not a time zone on this machine", cure=cure) from None
