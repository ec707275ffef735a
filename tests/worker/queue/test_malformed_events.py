"""Whoever reaches the broker may write to the stream: what is malformed is dropped, and everything else is followed."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard.worker.control import Control
from reshard.worker.followers.catalogs import LOOKED_AT
from reshard.worker.followers.counters import Counters
from reshard.worker.followers.cursor import Cursor
from reshard.worker.followers.metrics import registry
from reshard.worker.followers.outcomes import Outcomes
from reshard.worker.followers.pushes import WAITING, Pushes
from reshard.worker.followers.schedules import AWAITED, DUE
from reshard.worker.followers.spending import Spending
from reshard.worker.queue.events import EVENT_MAX, EVENTS, KINDS, TOLD, TOTALS
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from reshard.worker.settings import Settings
from tests.support.examples import examples
from tests.worker.conftest import Wakes, ask
from tests.worker.followers.builders import begin, definition, fail, jobs

GROUPS = [follower.group for follower in (Cursor, Pushes, Outcomes, Counters, Spending)]
ERROR = json.dumps({"code": "x", "message": "x"})

# Each is a good event but for one thing.
NOT_TEXT = "\udcff"  # byte 0xff, as `raw` writes it
MALFORMED: dict[str, Mapping[str, str]] = {
    "another program's": {"foo": "bar"},
    "no kind": {"at": "1", "job": "x"},
    "an unknown kind": {"kind": "audited", "at": "1", "job": "x"},
    "no time": {"kind": "state", "job": "x", "state": "queued"},
    "a time that is no number": {"kind": "state", "at": "never", "job": "x", "state": "queued"},
    "a time of ten thousand digits": {"kind": "state", "at": "9" * 10_000, "job": "x", "state": "queued"},
    "ended, no job": {"kind": "ended", "at": "1", "state": "done", "error": ""},
    "ended, no state": {"kind": "ended", "at": "1", "job": "x", "error": ""},
    "ended, no error": {"kind": "ended", "at": "1", "job": "x", "state": "failed"},
    "ended, a time that is no number": {
        "kind": "ended", "at": "1", "job": "x", "state": "done", "error": "", "took": "long",
    },
    "ended, a state that is not a word": {"kind": "ended", "at": "1", "job": "x", "state": "x" * 301, "error": ""},
    "ended, an error that is a list": {"kind": "ended", "at": "1", "job": "x", "state": "failed", "error": "[]"},
    "ended, facts that are none": {
        "kind": "ended", "at": "1", "job": "x", "state": "failed",
        "error": json.dumps({"code": "x", "message": "x", "facts": 1}),
    },
    "failed, not JSON": {"kind": "failed", "at": "1", "job": "x", "unit": "plan", "error": "{"},
    "failed, no code": {"kind": "failed", "at": "1", "job": "x", "unit": "plan", "error": '{"message": "x"}'},
    "failed, a code that is a list": {
        "kind": "failed", "at": "1", "job": "x", "unit": "plan", "error": '{"code": [], "message": ""}',
    },
    "failed, too deep": {"kind": "failed", "at": "1", "job": "x", "unit": "plan", "error": "[" * 100_000},
    "trouble, no error": {"kind": "trouble", "at": "1", "job": "x", "unit": "plan"},
    "finished, no unit": {"kind": "finished", "at": "1", "job": "x", "took": "1"},
    "moved, nothing read": {"kind": "moved", "at": "1", "job": "x", "uploaded": "1", "deduplicated": "1"},
    "moved, more than the broker can add": {
        "kind": "moved", "at": "1", "job": "x", "read": "9" * 30, "uploaded": "1", "deduplicated": "1",
    },
    "spent, no time": {
        "kind": "spent", "at": "1", "job": "x", "unit": "plan", "by": "x", "calls": "1", "read": "1", "uploaded": "1",
        "deduplicated": "1",
    },
    "catalog, no state": {"kind": "catalog", "at": "1", "name": "mirror"},
    "catalog, counts that are text": {
        "kind": "catalog", "at": "1", "name": "mirror", "state": "done", "schedule": "", "note": "", "entries": "1",
        "counts": '{"failed": "many"}',
    },
    "fired, no job": {"kind": "fired", "at": "1", "name": "nightly"},
    "missed, due at no time": {
        "kind": "missed", "at": "1", "name": "nightly", "job": "", "due": "soon", "outcome": "x",
    },
    "not UTF-8": {"kind": "state", "at": "1", "job": "x", "state": NOT_TEXT},
    "a field that is not UTF-8": {"kind": "state", "at": "1", "job": "x", "state": "queued", NOT_TEXT: "x"},
    "of many fields": {"kind": "retried", "at": "1", "job": "x", **{f"f{number}": "x" for number in range(5000)}},
    "huge": {"kind": "state", "at": "1", "job": "x", "state": "queued", "more": "x" * EVENT_MAX},
}  # fmt: skip

WELL_FORMED: dict[str, Mapping[str, str]] = {  # and yet nothing that it names is there
    "a job that does not exist": {"kind": "ended", "at": "1", "job": "nowhere", "state": "done", "error": ""},
    "an error of a job that does not exist": {
        "kind": "ended", "at": "1", "job": "nowhere", "state": "failed", "error": ERROR,
    },
    "a catalog that does not exist": {
        "kind": "catalog", "at": "1", "name": "nowhere", "state": "running", "schedule": "none", "note": "",
        "entries": "1", "counts": "{}",
    },
    "a schedule that does not exist": {"kind": "fired", "at": "1", "name": "nowhere", "job": "nowhere"},
}  # fmt: skip


@pytest.fixture
def control(store: JobStore, leases: Leases) -> Control:
    return Control(store, leases, Settings())


def write(store: JobStore, event: Mapping[str, str | bytes], stream: str = EVENTS) -> None:
    parts = [part for field in event.items() for part in field]
    raw = [part if isinstance(part, bytes) else part.encode(errors="surrogateescape") for part in parts]
    store.redis.execute_command("XADD", stream, "*", *raw)


def dropped(store: JobStore) -> dict[str, int]:
    """By follower."""
    totals = {name.decode(): int(number) for name, number in store.redis.hgetall(TOTALS).items()}
    return {name.removeprefix("dropped:"): n for name, n in totals.items() if name.startswith("dropped:")}


def all_follow(store: JobStore, leases: Leases, control: Control, *events: Mapping[str, str | bytes]) -> None:
    """Each follower does what it has to with the events behind these."""
    before = int(store.redis.hget(TOTALS, "ended:failed") or 0)
    begin(Cursor(store), definition(2, at_once=1))
    (first,) = jobs(Cursor(store))
    fail(leases, first)
    for event in events:
        write(store, event)
    control.look(listen=0.01)
    second = store.submit(ask("by-hand")).id
    fail(leases, second)
    control.look(listen=0.01)
    assert first not in Cursor(store).get("mirror").active.values(), "the catalog went on"
    assert int(store.redis.hget(TOTALS, "ended:failed") or 0) >= before + 2, "the ends were counted"
    groups = {group["name"].decode(): group for group in store.redis.xinfo_groups(EVENTS)}
    assert {name: (group["pending"], group["lag"]) for name, group in groups.items()} == dict.fromkeys(GROUPS, (0, 0))


@pytest.mark.parametrize("event", MALFORMED.values(), ids=list(MALFORMED))
def test_a_malformed_event_is_dropped_counted_and_logged_and_all_followers_go_on(
    store: JobStore, leases: Leases, control: Control, event: Mapping[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    all_follow(store, leases, control, event)
    assert dropped(store) == dict.fromkeys(GROUPS, 1)
    logged = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert len(logged) == len(GROUPS) and all(len(line) < 200 for line in logged), "nothing of the event is repeated"
    rows = {tuple(s.labels.values()): s.value for family in registry(store.redis).collect() for s in family.samples
            if s.name == "reshard_events_dropped_total"}  # fmt: skip
    assert rows == {(group,): 1.0 for group in GROUPS}


@pytest.mark.parametrize("event", WELL_FORMED.values(), ids=list(WELL_FORMED))
def test_an_event_of_what_is_not_there_stops_no_follower(
    store: JobStore, leases: Leases, control: Control, event: Mapping[str, str]
) -> None:
    all_follow(store, leases, control, event)
    assert dropped(store) == {}


_VALUES = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=20).map(lambda text: text.encode(errors="replace")),
    st.integers().map(lambda number: str(number).encode()),
    st.sampled_from([b"", b"x", b"1", b"{}", b"[]", b"running", b"mirror", b"done", ERROR.encode(), b'{"failed": 1}']),
)
_NAMES = sorted({field.removesuffix("?") for fields in KINDS.values() for field in fields} | {"kind", "at"})
_EVENTS = st.builds(
    lambda kind, at, rest: {**kind, **at, **rest},
    st.sampled_from([{}, *({"kind": kind.encode()} for kind in KINDS)]),
    st.sampled_from([{}, {"at": b"1"}]),
    st.dictionaries(st.sampled_from(_NAMES) | st.text("abc", min_size=1, max_size=3), _VALUES, max_size=8),
).filter(bool)


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(_EVENTS, min_size=1, max_size=12))
def test_no_event_of_any_form_stops_a_follower(
    store: JobStore, wakes: Wakes, events: list[Mapping[str, str | bytes]]
) -> None:
    store.redis.flushall()
    leases = Leases(store, wakes, "worker-a")
    all_follow(store, leases, Control(store, leases, Settings()), *events)


def test_an_event_that_a_follower_fails_over_is_dropped_by_that_one_alone(
    store: JobStore, leases: Leases, control: Control, caplog: pytest.LogCaptureFixture
) -> None:
    """Here over what somebody put where that follower keeps its own."""
    store.redis.set(AWAITED, "what is not a hash")
    all_follow(store, leases, control)
    assert dropped(store) == {"outcomes": 2}
    assert "ResponseError over kind ended" in caplog.text


def test_only_what_a_client_does_is_followed_of_what_it_told(
    store: JobStore, leases: Leases, control: Control, caplog: pytest.LogCaptureFixture
) -> None:
    write(store, {"kind": "ended", "at": "1", "job": "x", "state": "cancelled", "error": ""}, TOLD)
    write(store, {"kind": "moved", "at": "1", "job": "x", "read": "1", "uploaded": "1", "deduplicated": "1"}, TOLD)
    write(store, {"foo": "bar"}, TOLD)
    all_follow(store, leases, control)
    assert store.redis.hget(TOTALS, "ended:cancelled") == b"1" and store.redis.hget(TOTALS, "read") is None
    assert dropped(store) == {"relay": 2} and store.redis.xlen(TOLD) == 0
    assert "clients do not send moved events" in caplog.text


def test_an_event_of_too_many_fields_that_a_client_told_is_dropped(
    store: JobStore, leases: Leases, control: Control
) -> None:
    write(store, MALFORMED["of many fields"], TOLD)
    all_follow(store, leases, control)
    assert dropped(store) == {"relay": 1} and store.redis.xlen(TOLD) == 0


def test_what_clients_told_is_a_stream_again_when_one_wrote_over_it(
    store: JobStore, leases: Leases, control: Control
) -> None:
    store.redis.set(TOLD, "x")
    control.look(listen=0.01)
    assert dropped(store) == {"relay": 1}
    write(store, {"kind": "retried", "at": "1", "job": "x"}, TOLD)
    all_follow(store, leases, control)
    assert store.redis.xlen(TOLD) == 0


@pytest.mark.parametrize("key", (WAITING, DUE, LOOKED_AT, "reshard:processes"))
def test_wakes_are_sent_whatever_a_client_wrote_over(
    store: JobStore, control: Control, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.submit(ask("by-hand"))
    store.redis.set(key, "x")
    assert control.look(listen=0.01) == 1 and control.look(listen=0.01) == 0
    said = [record.message for record in caplog.records if record.message.startswith("the control process's work on")]
    assert said and len(said) == len(set(said)), "once, until it goes well"


def test_a_push_that_is_not_text_stops_no_other(store: JobStore, control: Control) -> None:
    store.redis.hset(WAITING, b"\xff", "x")
    store.submit(ask("by-hand"))
    assert control.look(listen=0.01) == 1
    assert store.redis.hkeys(WAITING) == [b"\xff"]
