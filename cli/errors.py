"""How a command fails: one line that says what and where, one that says what to type next, and the exit code."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

from typer import Abort, TyperException

from reshard.cli.output import json_line
from reshard.pipeline.errors import ReshardError, UsageError
from reshard.pipeline.text import printable

INTERRUPTED = 130  # exit code; 128 + SIGINT, as shells count it
PIPE_CLOSED = 141  # exit code; 128 + SIGPIPE


def guarded(command: Callable[[], Any], as_json: bool, name: str = "reshard") -> int:
    """Runs ``command``, as it is typed the ``name``, and returns the exit code.

    Whatever goes wrong is said in one line and its hint.
    """
    try:
        code = _told(command, as_json, name)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read our output has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED


def _told(command: Callable[[], Any], as_json: bool, name: str) -> int:
    try:
        code = command()
    except ReshardError as error:
        if type(error) is UsageError:
            error.facts.setdefault("command", name)
        return _tell(error, as_json)
    except TyperException as error:
        what, context = error.format_message(), getattr(error, "ctx", None)
        if context and what == context.get_help():  # typed without anything behind it
            sys.stderr.write(f"{what}\n")
            return UsageError.exit_code
        path = context.command_path if context else name
        return _tell(UsageError(what=what.removesuffix("."), command=path), as_json)
    except (KeyboardInterrupt, Abort):
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 -- the last line of defence: no traceback on a person's terminal
        return _tell(_unexpected(error), as_json)
    return code if isinstance(code, int) else 0


def _tell(error: ReshardError, as_json: bool) -> int:
    if as_json:
        sys.stdout.write(json_line({"error": error.to_dict()}) + "\n")
    else:
        sys.stderr.write(f"error[{error.code}]: {_line(str(error))}\nhint: {_line(error.next_step)}\n")
    return error.exit_code


def _line(text: str) -> str:
    return printable(" ".join(text.split()))


def _unexpected(error: Exception) -> ReshardError:
    with tempfile.NamedTemporaryFile("w", prefix="reshard-", suffix=".traceback", delete=False) as file:
        file.writelines(traceback.format_exception(error))
    what = f"{type(error).__name__}: {error} (traceback in {file.name})"
    return ReshardError(what=what)
