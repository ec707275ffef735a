"""How a command fails: one line that says what and where, one that says what to type next, and the exit code."""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from typer import Abort, TyperException

from reshard.cli.help import COMMON
from reshard.cli.output import Output, console
from reshard.cli.streams import OutputLost
from reshard.pipeline.errors import BadBody, BadPlace, BadSize, NoTarget, NoWriteAccess, ReshardError, UsageError
from reshard.pipeline.text import printable, printable_lines

INTERRUPTED = 130  # exit code; 128 + SIGINT, as shells count it
# The long commands that change nothing; others say what is left.
LOOKING = {"reshard doctor", "reshard plan", "reshard verify", "reshard audit"}
# Whose `--help` shows only some options.
SHORT_HELP = {"reshard plan", "reshard run", "reshard submit", "reshard schedule add"}
SERVICES = {"reshard worker", "reshard control", "reshard web"}
PIPE_CLOSED = 141  # exit code; 128 + SIGPIPE


def guarded(command: Callable[[], Any], as_json: bool, name: str = "reshard") -> int:
    """Runs ``command``, as it is typed the ``name``, and returns the exit code.

    An error is reported in one line and its hint.
    """
    try:
        code = _run(command, as_json, name)
        if code == INTERRUPTED and name in LOOKING:
            Output(as_json).say("Interrupted; nothing changed")
        sys.stdout.flush()
        return code
    except OutputLost as lost:
        os.dup2(os.open(os.devnull, os.O_WRONLY), lost.stream)  # Python writes there at its end what is left
        if isinstance(lost.why, BrokenPipeError):  # the reader of our output has read enough
            return PIPE_CLOSED
        return guarded(lost.told, False, name)


def _run(command: Callable[[], Any], as_json: bool, name: str) -> int:
    try:
        code = command()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, Abort):
        return INTERRUPTED
    except ReshardError as known:
        # A request is known to who sends it, not to who types options.
        error = UsageError(what=str(known)) if type(known) is BadBody else known
        error.told = None  # who types has options
        if type(error) is UsageError:
            error.facts.setdefault("command", name)
    except TyperException as typed:
        from reshard.pipeline.validation import plain  # with pydantic, which not every command loads

        what, context = typed.format_message(), getattr(typed, "ctx", None)
        if context and what == context.get_help():  # typed without anything behind it
            sys.stderr.write(f"{what}\n")
            return UsageError.exit_code
        path = context.command_path if context else name
        # typer has pydantic check what is typed, numbers and our own parsers alike, and passes its words on.
        what = re.sub("(?<=: )(?:Input should|Value error,) .*", lambda theirs: plain(theirs[0]), what, flags=re.DOTALL)
        what = what.removesuffix(".")
        error = _known(typed, path, sys.argv[1:]) or UsageError(what=what, command=path)
    except OutputLost:
        raise
    except Exception as unknown:  # noqa: BLE001 -- the last line of defence: no traceback on a person's terminal
        from reshard.pipeline.errors.machine import of_the_machine

        what = f"{type(unknown).__name__}: {unknown}"
        error = of_the_machine(unknown, None) or ReshardError(what=f"{what} (traceback {_kept(unknown, name)})")
    if type(error) is UsageError and _is_hidden(str(error), str(error.facts["command"])):
        error.facts["help"] = "--help-all"
    hint = error.next_step + _meant(error, sys.argv[1:])
    if as_json:
        Output(json=True).document({"error": error.to_dict() | {"hint": hint}})
    else:
        message, hint = (printable(re.sub(r"\s*\n\s*", " ", text.strip())) for text in (str(error), hint))
        shown = console(sys.stderr)
        for line in (f"error[{error.code}]: {message}", f"hint: {hint}"):
            shown.print(line)
    return error.exit_code


def _is_hidden(message: str, command: str) -> bool:
    """Whether ``message`` is about an option that the short help of ``command`` may not show."""
    named = {name.replace("-", "_") for name in re.findall(r"--([a-z][a-z-]*)", message)}
    return command in SHORT_HELP and not named <= {*COMMON}


def _kept(unknown: Exception, name: str) -> str:
    """Where the traceback is: a person gets a file, a service has a log, and its temporary folder may go with it."""
    lines = traceback.format_exception(unknown)
    if name not in SERVICES:
        with (
            suppress(OSError),  # nowhere to write, which may be why
            tempfile.NamedTemporaryFile("w", prefix="reshard-", suffix=".traceback", delete=False) as file,
        ):
            file.writelines(lines)
            return f"in {file.name}"
    sys.stderr.write(printable_lines("".join(lines)))
    return "above"


def _known(typed: TyperException, command: str, words: Sequence[str]) -> UsageError | None:
    """The error that has a hint of its own for this mistake, if one does."""
    if getattr(getattr(typed, "param", None), "name", None) == "to":
        return NoTarget()
    if command == "reshard rollback" and getattr(typed, "option_name", None) == "--pr":
        return UsageError(
            what=f"--pr: name the pull request in the argument instead: `{command} user/repo@refs/pr/N`",
            command=command,
        )
    size = re.search(r"(--[\w-]+)[= ]([\d.]+ [kMGT]?i?B(?:/s)?)(?!\S)", " ".join(words))
    if size and "unexpected extra argument" in typed.format_message():
        why = f"your shell split this into two arguments; remove the space ({size[2].replace(' ', '')})"
        return BadSize(option=size[1], value=size[2], why=why)
    return None


def _meant(error: ReshardError, typed: Sequence[str]) -> str:
    """That a folder has the name that no repository has, or may have, if so."""
    if error.code == BadPlace.code:
        typed = [str(error.facts["value"])]
    elif not error.code.startswith(("source.not_found", "target.not_found", "hub.unreachable", NoWriteAccess.code)):
        return ""
    # os.path, as Path raises for a name that is too long. Without a slash, it is a command, or told of already.
    here = next((text for text in typed if re.match(r"[^-./~].*/", text) and os.path.isdir(text)), None)  # noqa: PTH112
    return f"; to use the folder with that name, type {shlex.quote(f'./{here}')}" if here else ""
