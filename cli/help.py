"""How help looks: options and commands in sections, those that most people need first.

A section is what Typer calls a ``rich_help_panel``. It is drawn without boxes, which leave half of 80 columns for text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

from reshard.pipeline.arguments import ACCESS, FILES, PUBLISHING, WEIGHTS

# Sections of the commands and of options, in this order; an option without one is among the first, "Options".
RESHARD, JOBS, CATALOGS, SERVICE = "Reshard", "Jobs", "Catalogs and schedules", "Service"
OUTPUT = "Output"
_ORDER = (
    *("Commands", RESHARD, JOBS, CATALOGS, SERVICE),
    *("Arguments", "Options", WEIGHTS, FILES, PUBLISHING, ACCESS),
)


class SectionedCommand(TyperCommand):
    """A command whose options stand in sections."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write(_options(self, ctx), formatter)


class SectionedGroup(TyperGroup):
    """A group whose commands stand in sections."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write(self.listed(), formatter)
        _write(_options(self, ctx), formatter)

    def listed(self) -> list[tuple[str, tuple[str, str]]]:
        """Each command's section, name and summary."""
        shown = {name: child for name, child in self.commands.items() if not child.hidden}
        return [(_section(child, "Commands"), (name, child.get_short_help_str(80))) for name, child in shown.items()]


def _options(command: Any, ctx: Any) -> list[tuple[str, tuple[str, str]]]:
    found = [(param, param.get_help_record(ctx)) for param in command.get_params(ctx)]
    usual = {"argument": "Arguments", "option": "Options"}
    return [(_section(param, usual[param.param_type_name]), record) for param, record in found if record]


def _section(shown: Any, usual: str) -> str:
    return getattr(shown, "rich_help_panel", None) or usual


def _write(rows: Iterable[tuple[str, tuple[Any, str]]], formatter: Any) -> None:
    sections: dict[str, list[tuple[Any, str]]] = {}
    for section, row in sorted(rows, key=lambda row: _ORDER.index(row[0]) if row[0] in _ORDER else len(_ORDER)):
        sections.setdefault(section, []).append(row)
    for section, listed in sections.items():
        with formatter.section(section):
            formatter.write_dl(listed)
