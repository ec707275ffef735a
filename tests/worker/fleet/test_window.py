"""The hours of bulk work: by the wall, over midnight, and over both changes of the clocks in three zones."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline.errors import BadLimit
from reshard.worker.cron import next_after
from reshard.worker.fleet.window import MIDNIGHT, Window, check_zone, last_due

DAY = 86_400


def utc(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def said(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%m-%d %H:%M")


def stretches(hours: str, tz: str, after: str, length: int = DAY) -> list[str]:
    """From when to when bulk work is done, minute by minute, in UTC."""
    found, was, window = [], False, Window.parse(hours)
    for moment in range(int(utc(after)), int(utc(after)) + length, 60):
        if (now := window.has(tz, moment)) != was:
            found.append(said(moment))
            was = now
    return [f"{start} to {stop}" for start, stop in zip(found[::2], found[1::2], strict=True)]


@pytest.mark.parametrize(
    "tz, hours, after, expected",
    [
        ("UTC", "22:00-06:00", "2026-06-01T12:00", ["06-01 22:00 to 06-02 06:00"]),
        ("UTC", "09:00-17:30", "2026-06-01T00:00", ["06-01 09:00 to 06-01 17:30"]),
        # Berlin has no 02:00 to 03:00 on 29 March: the night is an hour shorter ...
        ("Europe/Berlin", "22:00-06:00", "2026-03-28T12:00", ["03-28 21:00 to 03-29 04:00"]),
        # ... what begins or ends in the gap does so behind it, and what lies in it is left out ...
        ("Europe/Berlin", "02:30-04:00", "2026-03-28T12:00", ["03-29 01:00 to 03-29 02:00"]),
        ("Europe/Berlin", "00:00-02:30", "2026-03-28T12:00", ["03-28 23:00 to 03-29 01:00"]),
        ("Europe/Berlin", "02:10-02:50", "2026-03-28T12:00", []),
        # It has them twice on 25 October: the night is an hour longer, and the first 02:30 counts
        ("Europe/Berlin", "22:00-06:00", "2026-10-24T12:00", ["10-24 20:00 to 10-25 05:00"]),
        ("Europe/Berlin", "02:30-03:30", "2026-10-24T12:00", ["10-25 00:30 to 10-25 02:30"]),
        ("Europe/Berlin", "01:00-02:30", "2026-10-24T12:00", ["10-24 23:00 to 10-25 00:30"]),
        ("America/New_York", "01:30-02:30", "2026-03-08T00:00", ["03-08 06:30 to 03-08 07:00"]),
        ("America/New_York", "01:30-02:30", "2026-11-01T00:00", ["11-01 05:30 to 11-01 07:30"]),
    ],
)
def test_bulk_work_is_done_at_these_hours_by_the_wall(tz: str, hours: str, after: str, expected: list[str]) -> None:
    assert stretches(hours, tz, after) == expected


def test_a_rest_that_lies_in_the_gap_of_a_spring_night_is_left_out() -> None:
    assert stretches("02:50-02:10", "Europe/Berlin", "2026-03-28T01:20", 47 * 3600) == ["03-28 01:50 to 03-30 00:10"]


times = st.tuples(st.integers(0, 23), st.integers(0, 59)).map(lambda t: f"{t[0]:02}:{t[1]:02}")
windows = st.tuples(times, times).filter(lambda t: t[0] != t[1]).map(lambda t: Window(*t))
zones = st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Santiago"])
moments = st.integers(int(utc("2026-01-01T00:00")), int(utc("2027-12-31T00:00")))


@given(windows, zones, moments)
def test_they_change_when_they_are_said_to_and_not_before(hours: Window, tz: str, moment: int) -> None:
    rest = hours.others()
    start, stop = next_after(hours.begins, tz, moment), next_after(rest.begins, tz, moment)
    assert hours.has(tz, moment) == hours.has(tz, min(start, stop) - 1)
    if start != stop:
        assert hours.has(tz, start) or next_after(rest.begins, tz, start) == next_after(hours.begins, tz, start)
        assert hours.has(tz, min(start, stop)) == (start < stop)


@given(windows, zones, moments)
def test_what_is_not_within_them_is_within_the_others(hours: Window, tz: str, moment: int) -> None:
    assert hours.has(tz, moment) != hours.others().has(tz, moment)


@given(windows, zones, moments)
def test_away_from_a_change_they_are_what_the_wall_says(hours: Window, tz: str, moment: int) -> None:
    zone = ZoneInfo(tz)
    offsets = {datetime.fromtimestamp(moment + hour * 3600, zone).utcoffset() for hour in range(-30, 31)}
    if len(offsets) > 1:
        return
    wall = datetime.fromtimestamp(moment, zone).strftime("%H:%M")
    inside = hours.start <= wall < hours.stop if hours.start < hours.stop else not hours.stop <= wall < hours.start
    assert hours.has(tz, moment) == inside


@given(windows, zones, moments)
def test_a_night_began_before_now_and_the_next_one_begins_after(hours: Window, tz: str, moment: int) -> None:
    for began, following in (
        (last_due(hours.begins, tz, moment), next_after(hours.begins, tz, moment)),
        (last_due(MIDNIGHT, tz, moment), last_due(MIDNIGHT, tz, moment + 2 * DAY)),
    ):
        assert began <= moment < following
    assert next_after(hours.begins, tz, last_due(hours.begins, tz, moment)) == next_after(hours.begins, tz, moment)


@pytest.mark.parametrize("text", ["22-6", "22:00", "22:00-24:00", "9:00-17:00", "22:00-06:00-07:00", "", "22:00-22:00"])
def test_what_is_not_a_window_is_refused_by_name(text: str) -> None:
    with pytest.raises(BadLimit, match="is not a time window|starts and ends at the same time"):
        Window.parse(text)


def test_an_unknown_zone_is_refused_by_name() -> None:
    with pytest.raises(BadLimit, match="--tz 'Mars/Base' is not a time zone"):
        check_zone("Mars/Base")
