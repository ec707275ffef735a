"""The one stream of what happens to jobs, catalogs and schedules, and how its followers read it.

    reshard:events   stream of the last 100,000 events; each step of Lua appends to it what it did, in the same step
    reshard:told     the same, of clients that may not write to the first; control moves what is in order to it

``KINDS`` says what each kind of event has. Whoever reaches the broker may write one, so it is looked at before it is
followed.

A follower is a consumer group. It gets every event at least once and in the order of the stream: nobody is given new
events while another process may still be at work on older ones, and what a dead process had is given to the next after
``TAKE_OVER``. That is the order in which things happened, but for what control relays: it joins the stream behind what
may have followed from it, so a job's ``ended`` may come before the ``fired`` of a client that fired it. To
have an effect once, a follower writes it and acknowledges the event in one transaction (``once``). An event that is
malformed, or that a follower fails over, is dropped, counted and logged: it never holds up those behind it.

One job's events are also in a stream of its own, for `reshard watch`: whoever watches one job would otherwise read the
events of all, and those of a job that is watched must not be pushed out by others.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast
from uuid import uuid4

import redis

from reshard.worker.queue.scripts import PREFIX, Pipeline, Scripts, decoded, transact

log = logging.getLogger(__name__)

EVENTS = f"{PREFIX}events"
TOTALS = f"{PREFIX}totals"  # what followers count (followers/counters.py)
TOLD = f"{PREFIX}told"  # what clients did that have a user of their own, until control relays it
OF_CLIENTS = frozenset({"state", "ended", "retried", "catalog", "fired", "missed"})  # kinds
TAKE_OVER = 10.0  # seconds; an event is handled in milliseconds, so who has one for so long is dead
BATCH = 100  # events that are read at once
_UNFIT = ("WRONGTYPE", "would overflow", "not an integer")  # what a broker says of a value, and not of itself

EVENT_MAX = 1_000_000  # bytes of one event; the longest that steps write hold an error with its facts, some kB
FIELDS_MAX = 100  # of one event; steps write ten, and what Lua unpacks into one call is bounded
WORD_MAX = 300  # characters of a name, an id or a state; a process has its host, of up to 255, in its name
NUMBER = re.compile(r"-?[0-9]{1,15}")  # a petabyte, or ms since the epoch; totals of these stay below 2**63

Field = Callable[[str], bool]
T = TypeVar("T")


def is_unfit(error: redis.RedisError) -> bool:
    """Whether it is about a value that a client wrote, and not about the broker."""
    return any(unfit in str(error) for unfit in _UNFIT)


class Malformed(ValueError):
    """Nobody can act on it; says why in our own words and repeats nothing of the event."""


def _word(text: str) -> bool:
    return 0 < len(text) <= WORD_MAX and text.isprintable() and " " not in text


def _number(text: str) -> bool:
    return NUMBER.fullmatch(text) is not None


def _error(text: str) -> bool:
    """As ReshardError.to_dict."""
    said = _object(text)
    words = said is not None and all(isinstance(said.get(part), str) for part in ("code", "message"))
    return said is not None and words and _word(said["code"]) and isinstance(said.get("facts", {}), dict)


def _counts(text: str) -> bool:
    said = _object(text)
    return said is not None and all(type(number) is int and _number(str(number)) for number in said.values())


def _object(text: str) -> dict[str, Any] | None:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None


def _or_nothing(form: Field) -> Field:
    return lambda text: text == "" or form(text)


def _any(text: str) -> bool:
    return True


_STEP = {"job": _word, "unit": _word}
_MOVED = dict.fromkeys(("read", "uploaded", "deduplicated"), _number)  # bytes
# A `?` behind a name: if it is there. Fields that are not named here are a newer release's, and pass.
KINDS: Mapping[str, Mapping[str, Field]] = {
    "state": {"job": _word, "state": _word},
    "claimed": {**_STEP, "waited?": _or_nothing(_number)},  # of a job's first claim: the ms since it was asked for
    "finished": {**_STEP, "took?": _or_nothing(_number)},  # the ms since its claim
    **{kind: _STEP for kind in ("sealed", "released", "lost")},
    # tried again, copied again, given up
    **{kind: {**_STEP, "error": _error} for kind in ("trouble", "voided", "failed")},
    "retried": {"job": _word},  # begun again by hand
    "moved": {"job": _word, "by?": _any, "worker?": _or_nothing(_word)} | _MOVED,  # by: its submitter
    # the ms that a claim took, calls to Hubs, and bytes beside those that moved
    "spent": {**_STEP, "by": _any, "took": _number, "calls": _number} | _MOVED,
    # the ms since its first claim (took), if it had one, and when it was asked for, in ms since the epoch (asked)
    "ended": {"job": _word, "by?": _any, "state": _word, "error": _or_nothing(_error)}
    | dict.fromkeys(("took?", "asked?"), _or_nothing(_number)),
    # a run begins, goes on or ends (followers/catalogs.py)
    "catalog": {"name": _word, "state": _word, "schedule": _or_nothing(_word), "note": _any}
    | {"entries": _number, "counts": _counts},
    # a schedule fired it, or did not (followers/schedules.py)
    "fired": {"name": _word, "job": _word},
    "missed": {"name": _word, "job": _or_nothing(_word), "due": _number, "outcome": _word},
}


class Event(NamedTuple):
    id: str  # of the stream; later events have greater ones
    kind: str
    at: int  # ms since the epoch, by the server's clock
    fields: dict[str, str]

    @classmethod
    def read(cls, id: bytes, data: Mapping[bytes, bytes]) -> Event:
        """Raises Malformed."""
        try:
            fields = decoded(data)
        except UnicodeDecodeError:
            raise Malformed("not UTF-8") from None
        if sum(len(name) + len(value) for name, value in data.items()) > EVENT_MAX:
            raise Malformed(f"larger than {EVENT_MAX:,} bytes")
        if len(fields) > FIELDS_MAX:
            raise Malformed(f"more than {FIELDS_MAX} fields")
        if (kind := fields.get("kind", "")) not in KINDS:
            raise Malformed("unknown kind" if kind else "no kind")
        if not _number(fields.get("at", "")):
            raise Malformed("time is not a number")
        for field, fits in KINDS[kind].items():
            name = field.removesuffix("?")
            if name not in fields and name == field:
                raise Malformed(f"a {kind} event without {name}")
            if name in fields and not fits(fields[name]):
                raise Malformed(f"a {kind} event with a malformed {name}")
        return cls(id.decode(), fields.pop("kind"), int(fields.pop("at")), fields)


class Follower(Protocol):
    group: str

    def handle(self, events: Sequence[Event], reader: Reader) -> None:
        """Carry them out in order, and acknowledge each to ``reader``; whatever it raises, it gets the rest again."""


class Reader:
    """One process's place in a consumer group."""

    def __init__(self, client: redis.Redis, group: str, take_over: float = TAKE_OVER) -> None:
        self.group = group
        self.name = uuid4().hex
        self._redis: Any = client
        self._take_over = round(take_over * 1000)

    def take(self) -> list[Event]:
        """The next events; none while another process may be at work on earlier ones."""
        try:
            if self._redis.xpending(EVENTS, self.group)["pending"]:
                forget_jump(self._redis, EVENTS, self.group, self._take_over)
                answer = self._redis.xautoclaim(EVENTS, self.group, self.name, self._take_over, count=BATCH)
                found = answer[1]
            else:
                answer = self._redis.xreadgroup(self.group, self.name, {EVENTS: ">"}, count=BATCH)
                found = [event for _, events in answer for event in events]
        except redis.ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
            create_group(self._redis, EVENTS, self.group, "0")
            return self.take()
        gone = [id for id, data in found if not data]  # older than what the stream keeps; Redis 7 drops these itself
        if gone:
            self._redis.xack(EVENTS, self.group, *gone)
        events: list[Event] = []
        for id, data in found:
            try:
                events += [Event.read(id, data)] if data else []
            except Malformed as error:
                self.drop(id.decode(), str(error))
        return events

    def leave(self) -> None:
        """Give the place up, or each start would leave one; one that still has events is for others to take over."""
        if not self._redis.xpending_range(EVENTS, self.group, "-", "+", 1, self.name):
            self._redis.xgroup_delconsumer(EVENTS, self.group, self.name)

    def drop(self, id: str, why: str) -> None:
        """Have this group never see the event again, and count and log that."""
        if self._redis.xack(EVENTS, self.group, id):
            self._redis.hincrby(TOTALS, f"dropped:{self.group}", 1)
            log.error("event %s dropped: %s cannot process it: %s", id, self.group, why)

    def acknowledge(self, *events: Event) -> None:
        self._redis.xack(EVENTS, self.group, *(event.id for event in events))

    def once(self, events: Sequence[Event], effect: Callable[[Pipeline, Sequence[Event]], None], *watched: str) -> None:
        """Write the ``effect`` of the events that are still this process's, and acknowledge them, in one transaction.

        ``effect`` is a step of ``transact``. What it changes must be ``watched``: so it is called again, with what is
        left, when another process took these events over and handled them meanwhile.
        """

        def carry_out(pipe: Pipeline) -> None:
            mine = pipe.xpending_range(EVENTS, self.group, events[0].id, events[-1].id, len(events), self.name)
            ids = {entry["message_id"].decode() for entry in mine}
            if left := [event for event in events if event.id in ids]:
                effect(pipe, left)
                pipe.xack(EVENTS, self.group, *(event.id for event in left))

        transact(self._redis, carry_out, *watched)


def follow(follower: Follower, reader: Reader, batches: int = 1) -> int:
    """Have the follower handle what is new, as far as so many batches go; returns how many events that was."""
    handled = 0
    for _ in range(batches):
        events = reader.take()
        if events:
            _handle(follower, events, reader)
        handled += len(events)
        if len(events) < BATCH:
            break
    return handled


def _handle(follower: Follower, events: Sequence[Event], reader: Reader) -> None:
    """Have the follower handle them; the one that it fails over is dropped, if that is not for want of the broker.

    What was done before it failed is done again, event by event, as after a death.
    """
    try:
        follower.handle(events, reader)
    except Exception as error:  # whatever it is, the other events are followed
        if isinstance(error, redis.RedisError) and not is_unfit(error):
            raise
        if len(events) > 1:
            for event in events:
                _handle(follower, [event], reader)
        else:
            log.debug("what a follower failed over", exc_info=error)
            reader.drop(events[0].id, f"{type(error).__name__} over kind {events[0].kind}")


def append(pipe: Pipeline, kind: str, at: int, **fields: str) -> None:
    """Append an event, in the transaction that makes it true if there is one."""
    Scripts(pipe)("append", at, kind, *(text for field in fields.items() for text in field))


def relay(client: redis.Redis) -> None:
    """Have followed what clients did that may not write to the stream themselves, as far as a client may do it."""
    if client.type(TOLD) not in {b"stream", b"none"}:  # a client may write anything there
        client.delete(TOLD)
        _lost(client, "dropped the events of clients: their key is not a stream")
    found = cast("list[tuple[bytes, dict[bytes, bytes]]]", client.xrange(TOLD, count=BATCH))
    for id, data in found:
        why = ""
        try:
            if (event := Event.read(id, data)).kind not in OF_CLIENTS:
                why = f"clients do not send {event.kind} events"
        except Malformed as error:
            why = str(error)
        if Scripts(client)("relay", id, int(not why)) and why:
            _lost(client, f"dropped event {id.decode()} of a client: {why}")


def _lost(client: redis.Redis, what: str) -> None:
    client.hincrby(TOTALS, "dropped:relay", 1)
    log.error(what)


def forget_jump(client: redis.Redis, stream: str, group: str, age: int) -> None:
    """Have what was delivered before the server's clock jumped back be ``age`` ms old, and so free to take over."""
    if found := Scripts(client)("forget_jump", stream, group, age):
        log.warning("the broker's clock jumped back: taking over %s deliveries of %s to %s", found, stream, group)


def create_group(client: redis.Redis, stream: str, group: str, start: str) -> None:
    """Have ``group`` follow ``stream`` from event ``start`` on, unless it does."""
    try:
        client.xgroup_create(stream, group, start, mkstream=True)
    except redis.ResponseError as error:
        if not str(error).startswith("BUSYGROUP"):
            raise
