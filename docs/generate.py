"""Writes the generated parts of the reference: the commands, the errors, the schema of catalogs.

python docs/generate.py           writes docs/reference
python docs/generate.py --check   fails when one of them is out of date
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from typer.main import get_command

from reshard.cli.main import app
from reshard.pipeline.catalogs.definition import schema
from reshard.pipeline.errors import GO_ON, ReshardError, by_code

REFERENCE = Path(__file__).parent / "reference"
NOTE = "<!-- Written by `make docs`; tests/test_docs.py fails when it is out of date. -->\n\n"


def commands() -> str:
    """Every command with its help, as it is on a terminal of 80 columns."""
    pages = [f"## `{typed}`\n\n```console\n{shown}\n```\n" for typed, shown in _screens(get_command(app), None)]
    return NOTE + "# Commands\n\n" + "\n".join(pages)


def _screens(command: Any, above: Any) -> Iterator[tuple[str, str]]:
    with command.make_context(command.name, [], above, resilient_parsing=True, terminal_width=80) as context:
        yield context.command_path, context.get_help()
        for child in getattr(command, "commands", {}).values():
            yield from _screens(child, context)


def errors() -> str:
    """Every error by family: exit code, code, what it says and what to do next."""
    lines = [
        "# Errors and exit codes",
        "",
        "A command that fails says so in one line, `error[code]: what and where`, with a hint below it: the next",
        "command to type, or what else is to be done. With `--json` the same is a JSON document. The exit code belongs",
        "to the family; 0 is success, 130 an interrupt (ctrl-C). A retryable error is tried again by workers without",
        "being asked. Some words of a hint depend on who reads it:",
        "",
        "| in a hint | of a command | of a job on the queue |",
        "| --- | --- | --- |",
        *(f"| `{{{name}}}` | {typed.strip()} | {of_a_job.strip()} |" for name, (typed, of_a_job) in GO_ON.items()),
    ]
    kinds = sorted(by_code().values(), key=lambda kind: (kind.exit_code, kind.code))
    for exit_code, family in groupby(kinds, key=lambda kind: kind.exit_code):
        members = list(family)
        lines += ["", f"## {exit_code}: {members[0].code.partition('.')[0]}", ""]
        lines += ["| code | retryable | says | hint |", "| --- | --- | --- | --- |"]
        lines += [_row(kind) for kind in members]
    return NOTE + "\n".join(lines) + "\n"


def _row(kind: type[ReshardError]) -> str:
    says, hint = kind.message.replace("|", r"\|"), kind.hint.replace("|", r"\|")
    return f"| `{kind.code}` | {'yes' if kind.retryable else 'no'} | {says} | {hint} |"


def catalog() -> str:
    """The JSON Schema of a catalog, which editors use to complete and check one."""
    return json.dumps(schema(), indent=2) + "\n"


PAGES: dict[str, Callable[[], str]] = {"cli.md": commands, "errors.md": errors, "catalog.schema.json": catalog}


def outdated() -> list[str]:
    """The names of the pages that are not what the code says."""
    return [name for name, write in PAGES.items() if not _same(REFERENCE / name, write())]


def _same(path: Path, content: str) -> bool:
    return path.exists() and path.read_text() == content


if __name__ == "__main__":
    if "--check" in sys.argv:
        if stale := outdated():
            sys.exit(f"out of date: {', '.join(stale)}; run `make docs`")
    else:
        for name, write in PAGES.items():
            (REFERENCE / name).write_text(write())
