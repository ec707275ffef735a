"""What two JSON texts say differently, by the keys that lead there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from reshard.pipeline.check import some
from reshard.pipeline.checkpoint.indexes import load_json

# Keys that say which program wrote a config and where it was loaded from.
_VOLATILE = {"transformers_version", "_name_or_path", "_diffusers_version", "_commit_hash"}
_ABSENT = object()
_SHOWN = 3  # keys
_Keys = tuple[str, ...]


class Difference(NamedTuple):
    """How two files differ, and whether they are argued to mean the same all the same."""

    same_meaning: bool
    text: str


def json_difference(before: bytes, after: bytes, *, config: bool) -> Difference:
    """What two different JSON texts say differently; a ``config`` also has keys that mean the same or nothing.

    >>> json_difference(b'{"a": 1}', b'{"a": 2}', config=False).text
    'differs: a was 1 and is 2'
    >>> json_difference(b'{"dtype": "float16"}', b'{"torch_dtype":"float16"}', config=True)[0]
    True
    """
    try:
        was, is_ = load_json(before), load_json(after)
        changed, meant = (_changed(_leaves(was, c), _leaves(is_, c), c) for c in (False, config))
    except (ValueError, RecursionError):
        return Difference(False, "differs, and one of the two is not JSON that loaders can read")
    if meant:
        return Difference(False, f"differs: {'; '.join(some(meant, _SHOWN))}")
    how = "; ".join(some(changed, _SHOWN)) or "spacing, key order or number format"
    return Difference(True, f"differs only in form: {how}")


def _changed(was: Mapping[_Keys, Any], is_: Mapping[_Keys, Any], config: bool) -> list[str]:
    both = {key: (was.get(key, _ABSENT), is_.get(key, _ABSENT)) for key in was.keys() | is_.keys()}
    keys = sorted(key for key, (one, other) in both.items() if not _same(one, other, config))
    return [f"{'.'.join(key) or 'it'} was {_brief(was, key)} and is {_brief(is_, key)}" for key in keys]


def _leaves(value: Any, config: bool, at: _Keys = ()) -> dict[_Keys, Any]:
    """Keys that lead there -> anything but an object, or an empty object below the root."""
    if not isinstance(value, dict):
        return {at: value}
    if config:
        value = _without_dialect(value)
    if at and not value:
        return {at: {}}
    return {keys: leaf for key, inner in value.items() for keys, leaf in _leaves(inner, config, (*at, key)).items()}


def _without_dialect(config: dict[str, Any]) -> dict[str, Any]:
    """What a config says to every version: `torch_dtype` is an old name of `dtype`.

    Where both are set to different values, each counts for some version.
    """
    kept = {key: value for key, value in config.items() if key not in {*_VOLATILE, "dtype", "torch_dtype"}}
    told = [dtype for key in ("dtype", "torch_dtype") if (dtype := config.get(key)) is not None]
    if len(told) == 2 and told[0] != told[1]:
        return kept | {"dtype": told[0], "torch_dtype": told[1]}
    return kept | {"dtype": told[0]} if told else kept


def _same(one: Any, other: Any, config: bool) -> bool:
    """Equal as JSON: 1 is 1.0, true is not 1, and NaN is itself. In a ``config`` 1 is not 1.0: none has 32.0 rows."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_same(*both, config) for both in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key], config) for key in one)
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if config and isinstance(one, float) is not isinstance(other, float):
        return False
    return bool(one == other) or (one != one and other != other)


def _brief(leaves: Mapping[_Keys, Any], keys: _Keys) -> str:
    leaf = leaves.get(keys, _ABSENT)
    if isinstance(leaf, list | str):
        leaf = leaf[:60]  # of which no more is shown
    return f"{json.dumps(leaf):.60}" if leaf is not _ABSENT else "missing"
