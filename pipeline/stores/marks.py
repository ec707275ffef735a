"""Which records in folders were written by this user on this machine: their marks need a key that stays here.

A record lies beside the weights and travels with them, so whoever changes them can write another record as well.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import secrets
import tempfile
from contextlib import suppress

from reshard.pipeline.limits import MARK_KEY
from reshard.pipeline.paths import state_dir

KEY = "record.key"  # in what a user's programs keep as state

log = logging.getLogger(__name__)


def mark(message: str) -> str | None:
    """The mark of a publication with this description; None where no key can be kept, which is logged."""
    try:
        return _mark(_key() or _new_key(), message)
    except OSError as error:
        log.warning("`reshard verify` will not recognize the result of this run as yours: %s", error)
        return None


def is_mark(given: object) -> bool:
    """Whether ``given`` has the form of a mark: whoever made the folder may have written anything."""
    return isinstance(given, str) and re.fullmatch(r"[0-9a-f]{64}", given) is not None


def is_ours(message: str, given: str | None) -> bool:
    """Whether ``given`` is the mark that this machine would put on ``message``."""
    try:
        key = _key()
    except OSError:
        return False  # a key that cannot be read vouches for nothing
    return key is not None and given is not None and hmac.compare_digest(_mark(key, message), given)


def _mark(key: bytes, message: str) -> str:
    return hmac.digest(key, message.encode("utf-8", "surrogatepass"), "sha256").hex()


def _key() -> bytes | None:
    try:
        key = (state_dir() / KEY).read_bytes()
    except FileNotFoundError:
        return None
    return key if len(key) == MARK_KEY else None


def _new_key() -> bytes:
    """It appears whole, and those who make one at the same time all get the first."""
    folder = state_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=KEY) as file:  # only its owner may read it
        file.write(secrets.token_bytes(MARK_KEY))
        file.flush()
        os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(file.name, folder / KEY)
    key = _key()
    if key is None:
        raise OSError(f"{folder / KEY} is not a key of {MARK_KEY} bytes; remove it")
    return key
