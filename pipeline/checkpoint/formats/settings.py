"""Settings that a torch file has beside its weights, as values of JSON: ``{"model": {...}, "config": {...}}``. Pure."""

from __future__ import annotations

import re
from math import isfinite

from reshard.pipeline.checkpoint.formats.torch_state import pairs_of
from reshard.pipeline.limits import NESTING_MAX, SETTINGS_MAX

# What training scripts call what the model was made with. Other values (an epoch, arguments of the script, which
# Lightning calls hyper_parameters, paths) are not the model's, and may hold what nobody means to publish.
NAMES = ("config", "model_config", "model_args", "model_kwargs")

_SECRET = re.compile(
    r"secret|passw|passphrase|pwd|(api|access|private)[-_ ]?key|credential|bearer"
    r"|(?<![a-z])auth(?!or)|(?<![a-z])dsn(?![a-z])",
    re.IGNORECASE,
)
# Tokens of Hubs and of other services, and URLs with a password.
_SECRET_VALUE = re.compile(r"\bhf_\w{20,}|\bsk-[\w-]{16,}|://[^/\s:@]*:[^/\s@]+@")
_TOKEN = re.compile("token(?!i[sz])", re.IGNORECASE)  # no secret where the value is a number: an id or a count


class _NotPlain(Exception):
    """A value that JSON has no word for, or too many of them."""


class _Secret(Exception):
    """What may be a secret, in words that do not tell it."""


def settings_of(root: object, file: str) -> tuple[dict[str, object], tuple[str, ...]]:
    """The dictionaries under NAMES at the top of a pickled value, if all that they hold is plain, by their names.

    What may hold a secret is left out whole, which a note says.
    """
    found: dict[str, object] = {}
    notes = []
    named = {key: value for key, value in pairs_of(root) or () if type(key) is str and key in NAMES}
    for key, value in named.items():
        if pairs_of(value):
            try:
                found[key] = _plain(value, [SETTINGS_MAX])
            except _Secret as secret:
                notes.append(f"{file}: skipped the settings in {key}, as {secret} could be a secret")
            except _NotPlain:
                continue
    return found, tuple(notes)


def _plain(value: object, left: list[int], depth: int = 0) -> object:
    """``value`` without a pickle's types; ``left`` is how many characters and values may still follow."""
    left[0] -= 1 + (len(value) if type(value) is str else 0)
    if left[0] < 0 or depth > NESTING_MAX:
        raise _NotPlain
    if type(value) is str and _SECRET_VALUE.search(value):
        raise _Secret("one of its values")
    if value is None or type(value) in (bool, int, str) or (type(value) is float and isfinite(value)):
        return value
    if type(value) is list or type(value) is tuple:
        return [_plain(item, left, depth + 1) for item in value]
    pairs = pairs_of(value, left[0])
    if pairs is None or len({key for key, _ in pairs if type(key) is str}) != len(pairs):
        raise _NotPlain
    return {_key(key, inner, left): _plain(inner, left, depth + 1) for key, inner in pairs}


def _key(key: object, value: object, left: list[int]) -> str:
    """``key``, counted; raises _Secret for one of a secret."""
    text = str(key)
    left[0] -= len(text)
    if left[0] < 0:
        raise _NotPlain
    if _SECRET.search(text) or (_TOKEN.search(text) and type(value) not in (int, float, bool, type(None))):
        raise _Secret(f"its {text[:40]!a}")
    return text
