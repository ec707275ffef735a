"""How help looks: options and commands in sections, those that most people need first.

A section is what Typer calls a ``rich_help_panel``. It is drawn without boxes, which leave half of 80 columns for text.
A command that takes a request has some forty options: `--help` shows the ``COMMON`` ones, `--help-all` all of them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from typer import Context, Exit, Option, echo
from typer.core import TyperCommand, TyperGroup

from reshard.pipeline.arguments import ACCESS, FILES, PUBLISHING, WEIGHTS

# Sections of the commands and of options, in this order, then a command's own and OUTPUT; an option without one is
# among the first, "Options".
RESHARD, JOBS, CATALOGS, SERVICE = "Reshard", "Jobs", "Catalogs and schedules", "Service"
OUTPUT = "Output"
_ORDER = (
    *("Commands", RESHARD, JOBS, CATALOGS, SERVICE),
    *("Arguments", "Options", WEIGHTS, FILES, PUBLISHING, ACCESS),
)


# Options of a request that `--help` shows, in this order, beside those that a command has of its own.
COMMON = ("to", "size", "dtype", "revision", "private", "pr", "overwrite", "jobs", "verbose", "json")
SHOWS_ALL = "reshard.help_all"  # of a context's `meta`: its help has all options


# Its commands as help and messages name them: in backticks, as a usage, an example or what is next, or alone.
_NAMED = re.compile(r"(`|\b(?:Usage|Example): |\bnext:? +)reshard(?= )|^reshard(?= run )")


def as_typed(text: str) -> str:
    """``text``, which names commands of `reshard`, as they are typed here: as an extension of `hf`, `hf reshard`."""
    return _NAMED.sub(r"\g<1>hf reshard", text) if PurePath(sys.argv[0]).name == "hf-reshard" else text


def _show_all(context: Context, wanted: bool) -> None:
    if wanted:
        context.meta[SHOWS_ALL] = True
        echo(context.get_help())
        raise Exit


HELP_ALL = Option("--help-all", callback=_show_all, is_eager=True, help="Show all options and exit.")


class SectionedCommand(TyperCommand):
    """A command whose options stand in sections; one that takes ``HELP_ALL`` shows only some of them at first."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def get_help(self, ctx: Any) -> str:
        return as_typed(super().get_help(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write(_options(self, ctx, self._is_short(ctx)), formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self._is_short(ctx):
            formatter.write_paragraph()
            formatter.write_text("Run with --help-all for all options.")

    def _is_short(self, ctx: Any) -> bool:
        return SHOWS_ALL not in ctx.meta and _takes_all(self)


class SectionedGroup(TyperGroup):
    def get_help(self, ctx: Any) -> str:
        return as_typed(super().get_help(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write(self.listed(), formatter)
        _write(_options(self, ctx), formatter)

    def listed(self) -> list[tuple[str, tuple[str, str]]]:
        shown = {name: child for name, child in self.commands.items() if not child.hidden}
        return [(_section(child) or "Commands", (name, child.get_short_help_str(80))) for name, child in shown.items()]


def _section(shown: Any) -> str | None:
    return getattr(shown, "rich_help_panel", None)


def _options(command: Any, ctx: Any, short: bool = False) -> list[tuple[str, tuple[str, str]]]:
    """Each parameter's section, name and text; of a request, the ``COMMON`` ones first.

    ``short``: only these and those without a section, in one section but for those of the output.
    """
    params = command.get_params(ctx)
    if _takes_all(command):
        place = {name: number for number, name in enumerate([*COMMON, None, "help", "help_all"])}
        params = sorted(params, key=lambda param: place.get(param.name, place[None]))
    shown = []
    for param in params:
        row, section, usual = param.get_help_record(ctx), _section(param), "Options"
        if not row or (short and section and param.name not in COMMON):
            continue
        if param.param_type_name == "argument":  # its type is left out, and, as the usage line says it, "required"
            row, usual = (row[0].partition(" <")[0], row[1].removesuffix("  [required]")), "Arguments"
        shown.append((usual if short and section != OUTPUT else section or usual, row))
    return shown


def _takes_all(command: Any) -> bool:
    return any(param.name == "help_all" for param in command.params)


def _place(section: str) -> int:
    return _ORDER.index(section) if section in _ORDER else len(_ORDER) + (section == OUTPUT)


def _write(rows: Iterable[tuple[str, tuple[Any, str]]], formatter: Any) -> None:
    sections: dict[str, list[tuple[Any, str]]] = {}
    for section, row in sorted(rows, key=lambda row: _place(row[0])):
        sections.setdefault(section, []).append(row)
    for section, listed in sections.items():
        with formatter.section(section):
            formatter.write_dl(listed)
