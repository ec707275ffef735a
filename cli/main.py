"""The command `reshard`. Each command lives in the file named after its noun, which is loaded when it is typed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from pkgutil import resolve_name
from typing import Annotated, Any, NamedTuple

from typer import Exit, Option, Typer, echo
from typer.main import get_group

from reshard.cli.errors import guarded
from reshard.cli.help import CATALOGS, JOBS, RESHARD, SERVICE, SectionedCommand, SectionedGroup
from reshard.pipeline.text import guard_logs


class CommandListing(NamedTuple):
    """A command, or a group of them, as help lists it: that takes no time."""

    section: str
    home: str  # where it is found below `reshard.cli`
    summary: str  # the first line of its own help


COMMANDS = {
    "plan": CommandListing(RESHARD, "plan:plan", "Show what a job would write and delete, without doing it."),
    "run": CommandListing(RESHARD, "run:run", "Reshard SRC into DST on this machine, without a queue."),
    "verify": CommandListing(RESHARD, "verify:verify", "Check a checkpoint, optionally against its source."),
    "audit": CommandListing(RESHARD, "audit:audit", "Check many models and list their problems, worst first."),
    "provenance": CommandListing(RESHARD, "provenance:provenance", "Show what a published checkpoint was made from."),
    "doctor": CommandListing(RESHARD, "doctor:doctor", "Check this installation or a repository for problems."),
    "layout": CommandListing(RESHARD, "layout:layout", "Show which files each rank of a model reads."),
    "advise": CommandListing(RESHARD, "layout:advise", "Compare layouts of a model and recommend one."),
    "submit": CommandListing(JOBS, "jobs:submit", "Queue a job that reshards SRC into DST."),
    "status": CommandListing(JOBS, "jobs:status", "Show a job, or the queue and its workers."),
    "list": CommandListing(JOBS, "jobs:list_", "List jobs, newest first."),
    "watch": CommandListing(JOBS, "jobs:watch", "Follow a job until it ends; exit with its exit code."),
    "logs": CommandListing(JOBS, "jobs:logs", "Print log lines from a job's workers."),
    "cancel": CommandListing(JOBS, "jobs:cancel", "Cancel jobs before they publish."),
    "retry": CommandListing(JOBS, "jobs:retry", "Retry failed or cancelled jobs, reusing copied files."),
    "rollback": CommandListing(JOBS, "jobs:rollback", "Undo the commit of a job, or reshard's last commit to DST."),
    "delete": CommandListing(JOBS, "jobs:delete", "Delete jobs that have ended."),
    "catalog": CommandListing(CATALOGS, "catalog:catalog", "Reshard many models from one YAML file."),
    "schedule": CommandListing(CATALOGS, "schedule:schedule", "Submit a job or a catalog on a cron schedule."),
    "up": CommandListing(SERVICE, "service:up", "Start the broker, worker, control process and web page."),
    "down": CommandListing(SERVICE, "service:down", "Stop everything that `reshard up` started."),
    "worker": CommandListing(SERVICE, "service:worker", "Run a worker in the foreground."),
    "control": CommandListing(SERVICE, "service:control", "Run the control process in the foreground."),
    "web": CommandListing(SERVICE, "web:web", "Serve the web page and the API."),
    "ping": CommandListing(SERVICE, "ping:ping", "Check if a local worker, control process or web page is up."),
    "token": CommandListing(SERVICE, "web:token", "Create a token for the web page and the API."),
    "usage": CommandListing(SERVICE, "fleet:usage", "Show resource usage by submitter, catalog or day."),
    "fleet": CommandListing(SERVICE, "fleet:fleet", "Pause or drain workers, and set shared limits."),
}
GROUPS = {"catalog", "schedule", "fleet"}


class _Commands(Mapping[str, Any]):
    """What Typer makes of each command, made when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        listed = COMMANDS[name]
        found = resolve_name(f"reshard.cli.{listed.home}")
        gc.freeze()
        gc.enable()  # start.py says why it was not
        alone = Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
        if name in GROUPS:
            alone.add_typer(found, rich_help_panel=listed.section)
        else:
            alone.command(name, cls=SectionedCommand, rich_help_panel=listed.section)(found)
        return get_group(alone).commands[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _Reshard(SectionedGroup):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = _Commands()

    def listed(self) -> list[tuple[str, tuple[str, str]]]:
        return [(one.section, (name, one.summary)) for name, one in COMMANDS.items()]


app = Typer(
    name="reshard",
    cls=_Reshard,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        echo(f"reshard {version('reshard')}")
        raise Exit


@app.callback()
def reshard(
    version: Annotated[
        bool, Option("--version", "-V", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Change how a model's weights are split into files, and nothing else."""


def main() -> None:
    guard_logs()
    arguments = sys.argv[1:]
    if arguments[:1] == ["help"]:  # `reshard help run` is another way to say `reshard run --help`
        arguments = [*arguments[1:], "--help"]
    words = arguments[: 2 if arguments and arguments[0] in GROUPS else 1]  # `run`, `fleet drain`
    name = " ".join(["reshard", *(word for word in words if not word.startswith("-"))])
    sys.exit(guarded(lambda: app(arguments, prog_name="reshard", standalone_mode=False), "--json" in arguments, name))
