"""When an expression is due: both changes of the clocks in two zones, and every text either a time or a clear no."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline.errors import BadSchedule
from reshard.worker.cron import next_after


def utc(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def times(cron: str, tz: str, after: str, count: int) -> list[str]:
    """The next ``count`` times, each found from the one before, in UTC."""
    moment, found = utc(after), []
    for _ in range(count):
        moment = next_after(cron, tz, moment)
        found.append(datetime.fromtimestamp(moment, UTC).strftime("%m-%d %H:%M"))
    return found


def test_a_night_keeps_its_hour_by_the_wall_over_a_year() -> None:
    found = times("0 3 * * *", "Europe/Berlin", "2026-01-01T12:00", 365)
    assert len(set(found)) == 365
    assert {text.split()[1] for text in found} == {"01:00", "02:00"}


@pytest.mark.parametrize(
    "tz, cron, after, expected",
    [
        # Berlin has no 02:00 to 03:00 on 29 March, and has it twice on 25 October
        ("Europe/Berlin", "30 2 * * *", "2026-03-27T12:00", ["03-28 01:30", "03-29 01:00", "03-30 00:30"]),
        ("Europe/Berlin", "30 2 * * *", "2026-10-23T12:00", ["10-24 00:30", "10-25 00:30", "10-26 01:30"]),
        # New York on 8 March, and on 1 November from 01:00 to 02:00
        ("America/New_York", "30 2 * * *", "2026-03-06T12:00", ["03-07 07:30", "03-08 07:00", "03-09 06:30"]),
        ("America/New_York", "30 1 * * *", "2026-10-30T12:00", ["10-31 05:30", "11-01 05:30", "11-02 06:30"]),
        # what runs every hour goes on through both
        ("Europe/Berlin", "0 * * * *", "2026-03-28T23:30", ["03-29 00:00", "03-29 01:00", "03-29 02:00"]),
        ("America/New_York", "0 * * * *", "2026-11-01T04:30", ["11-01 05:00", "11-01 06:00", "11-01 07:00"]),
    ],
)
def test_changes_of_the_clock_neither_lose_nor_double_a_time(
    tz: str, cron: str, after: str, expected: list[str]
) -> None:
    assert times(cron, tz, after, 3) == expected


@pytest.mark.parametrize(
    "cron, after, expected",
    [
        # 29 March has none of these, and 25 October has each of them twice
        ("*/15 2 * * *", "2026-03-28T01:30", ["03-28 01:45", "03-30 00:00"]),
        ("*/30 2 * * *", "2026-10-24T12:00", ["10-25 00:00", "10-25 00:30", "10-25 01:00", "10-25 01:30"]),
        ("*/30 2 * * *", "2026-10-25T01:30", ["10-26 01:00"]),
        ("30 */2 * * *", "2026-03-28T23:30", ["03-29 02:30"]),
        ("30 */2 * * *", "2026-10-24T22:30", ["10-25 00:30", "10-25 01:30", "10-25 03:30"]),
    ],
)
def test_a_star_in_minute_or_hour_follows_the_clock_through_both_changes(
    cron: str, after: str, expected: list[str]
) -> None:
    assert times(cron, "Europe/Berlin", after, len(expected)) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("@hourly", ["12-30 13:00", "12-30 14:00"]),
        ("@daily", ["12-30 23:00", "12-31 23:00"]),
        ("@midnight", ["12-30 23:00", "12-31 23:00"]),
        ("@weekly", ["01-02 23:00", "01-09 23:00"]),
        ("@monthly", ["12-31 23:00", "01-31 23:00"]),
        ("@yearly", ["12-31 23:00", "12-31 23:00"]),
        ("@annually", ["12-31 23:00", "12-31 23:00"]),
    ],
)
def test_a_name_stands_for_its_fields(name: str, expected: list[str]) -> None:
    assert times(name, "Europe/Berlin", "2026-12-30T12:00", 2) == expected


def test_in_the_second_pass_through_an_hour_its_times_are_over() -> None:
    assert times("30 2 * * *", "Europe/Berlin", "2026-10-25T01:10", 1) == ["10-26 01:30"]


@pytest.mark.parametrize(
    "cron, tz, said",
    [
        ("0 3 * *", "UTC", "not 4"),
        ("@reboot", "UTC", "is not one of @yearly"),
        ("@Daily", "UTC", "is not one of @yearly"),
        ("0 0 3 * * *", "UTC", "not 6"),
        ("0 25 * * *", "UTC", "Bad hour"),
        ("0 3 30 2 *", "UTC", "day-of-month"),
        ("0 3 * * *", "Europe/Bielefeld", "not a time zone"),
        ("0 3 * * *", "../passwd", "not a time zone"),
        ("0 3 * * *", "", "not a time zone"),
    ],
)
def test_what_makes_no_sense_is_refused_and_said(cron: str, tz: str, said: str) -> None:
    with pytest.raises(BadSchedule, match=said):
        next_after(cron, tz, 0.0)


@given(st.lists(st.text("0123456789*/-,L#W", min_size=1, max_size=5), min_size=5, max_size=5), st.integers(0, 2**31))
def test_any_text_is_a_later_time_or_refused(fields: list[str], moment: int) -> None:
    try:
        due = next_after(" ".join(fields), "Europe/Berlin", moment)
    except BadSchedule:
        return
    assert due > moment
    assert datetime.fromtimestamp(due, ZoneInfo("Europe/Berlin")).second == 0
