"""What an event has to say to be one. Whoever reaches the broker may have written it, so it is looked at before it is
followed; fields that are not named here are a newer release's, and pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

EVENT_MAX = 1_000_000  # bytes of one event; the longest that steps write hold an error with its facts, some kB
FIELDS_MAX = 100  # of one event; steps write ten, and what Lua unpacks into one call is bounded
WORD_MAX = 300  # characters of a name, an id or a state; a process has its host, of up to 255, in its name
NUMBER = re.compile(r"-?[0-9]{1,15}")  # a petabyte, or ms since the epoch; totals of these stay below 2**63

Field = Callable[[str], bool]


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
_MOVED = dict.fromkeys(("read", "uploaded", "deduplicated"), _number)
# What each kind has; a `?` behind a name: if it is there.
KINDS: Mapping[str, Mapping[str, Field]] = {
    "state": {"job": _word, "state": _word},
    "claimed": {**_STEP, "waited?": _or_nothing(_number)},
    "finished": {**_STEP, "took?": _or_nothing(_number)},
    **{kind: _STEP for kind in ("sealed", "released", "lost")},
    **{kind: {**_STEP, "error": _error} for kind in ("trouble", "voided", "failed")},
    "retried": {"job": _word},
    "moved": {"job": _word, "by?": _any, "worker?": _or_nothing(_word)} | _MOVED,
    "spent": {**_STEP, "by": _any, "took": _number, "calls": _number} | _MOVED,
    "ended": {"job": _word, "by?": _any, "state": _word, "error": _or_nothing(_error)}
    | dict.fromkeys(("took?", "asked?"), _or_nothing(_number)),
    "catalog": {"name": _word, "state": _word, "schedule": _or_nothing(_word), "note": _any}
    | {"entries": _number, "counts": _counts},
    "fired": {"name": _word, "job": _word},
    "missed": {"name": _word, "job": _or_nothing(_word), "due": _number, "outcome": _word},
}


def check(size: int, fields: Mapping[str, str]) -> None:
    """Raises Malformed. ``size`` is that of all of it, in bytes."""
    if size > EVENT_MAX:
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
