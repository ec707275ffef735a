"""The command `reshard`. Each command lives in the file named after its noun and imports what it needs when it runs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Annotated

from typer import Exit, Option, Typer, echo

from reshard.cli import catalog, doctor, fleet, jobs, plan, run, schedule, service, verify, web
from reshard.cli.errors import guarded
from reshard.cli.help import CATALOGS, JOBS, RESHARD, SERVICE, SectionedCommand, SectionedGroup
from reshard.pipeline.text import escape_logs

app = Typer(
    name="reshard",
    cls=SectionedGroup,
    help="Change how a model's weights are cut into files, and nothing else.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    RESHARD: (plan.plan, run.run, verify.verify, doctor.doctor),
    JOBS: (jobs.submit, jobs.status, jobs.list_, jobs.watch, jobs.cancel, jobs.retry, jobs.rollback, jobs.delete),
    SERVICE: (service.up, service.down, service.worker, service.control, web.web, web.token),
}
GROUPS = {CATALOGS: (catalog.catalog, schedule.schedule), SERVICE: (fleet.fleet,)}
for section, functions in COMMANDS.items():
    for function in functions:
        app.command(function.__name__.rstrip("_"), cls=SectionedCommand, rich_help_panel=section)(function)
for section, groups in GROUPS.items():
    for group in groups:
        app.add_typer(group, rich_help_panel=section)


def _show_version(wanted: bool) -> None:
    if wanted:
        echo(f"reshard {version('reshard')}")
        raise Exit


@app.callback()
def reshard(
    version: Annotated[
        bool, Option("--version", "-V", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Change how a model's weights are cut into files, and nothing else."""


def main() -> None:
    """Run what was typed, and exit."""
    escape_logs()
    gc.freeze()  # modules are not garbage; scanning them takes a short command a sixth of its time
    arguments = sys.argv[1:]
    name = _typed(arguments)
    sys.exit(guarded(lambda: app(arguments, prog_name="reshard", standalone_mode=False), "--json" in arguments, name))


def _typed(arguments: Sequence[str]) -> str:
    """The command of a command line: `reshard run`, `reshard fleet drain`."""
    groups = {group.typer_instance.info.name for group in app.registered_groups if group.typer_instance}
    words = arguments[: 2 if arguments and arguments[0] in groups else 1]
    return " ".join(["reshard", *(word for word in words if not word.startswith("-"))])
