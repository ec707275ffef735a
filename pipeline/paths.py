"""Paths of this machine: made absolute, with their links followed, and where programs of this user keep state."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from reshard.pipeline.errors import BadPlace

_LAST = re.compile(r"\..+\.reshard\.last")  # beside a folder of that name: what it was before the last run
ENTER = 'type cd "$PWD" to enter the new folder'


def absolute(path: Path) -> Path:
    """``path`` from the root; raises BadPlace in a folder that is not what its shell takes it for.

    Whoever runs into the folder that they are in stays in what was there before, by another name or by none.
    """
    if path.is_absolute():
        return path
    try:
        here = Path.cwd()
    except FileNotFoundError:
        why = "the current folder was replaced or deleted"
    else:
        if is_there() or not any(map(_LAST.fullmatch, here.parts)):
            return here / path
        why = "a run replaced the current folder, and this is the old one"
    raise BadPlace(value=str(path), why=why, cure=f"{ENTER}, then run the same command again")


def is_there() -> bool:
    """Whether what the shell calls the current folder is that folder."""
    try:
        return Path(os.environ.get("PWD", ".")).samefile(".")
    except OSError:
        return False


def resolved(path: str) -> Path:
    """``path`` with its links followed, whether or not something is there.

    Raises BadPlace for a path that no system call takes: too long, a link that leads back to itself, a NUL in it.
    """
    try:
        real = Path(os.path.realpath(path))
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            real.stat()
    except OSError as error:
        raise BadPlace(value=path, why=error.strerror or str(error)) from error
    except ValueError as error:
        raise BadPlace(value=path, why=str(error)) from error
    return real


def state_dir() -> Path:
    """Where programs of this user keep state (XDG Base Directory Specification)."""
    folder = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(os.path.expanduser(folder), "reshard")  # noqa: PTH111 -- Path's raises where there is no home
