"""The documentation says what the program does: every command, option and error, and nothing that is not there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from docs.generate import outdated
from reshard.cli.main import app
from reshard.pipeline.errors import by_code

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands() -> dict[str, set[str]]:
    """Each command of `reshard` and the options that it takes."""
    root = typer.main.get_command(app)
    return {
        name: {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
        | {"--help"}
        for name, command in root.commands.items()  # type: ignore[attr-defined]
    }


COMMANDS = commands()


def test_every_command_and_option_says_what_it_is() -> None:
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        assert command.help, f"`reshard {name}` has no help"
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"`reshard {name}`: {parameter.name} has no help"


def test_the_generated_reference_is_up_to_date() -> None:
    assert outdated() == [], "run `make docs`"


def test_every_command_is_in_a_guide_and_not_only_in_the_reference() -> None:
    prose = "".join(page.read_text() for page in PAGES if page.parent.name != "reference")
    missing = [name for name in COMMANDS if not re.search(rf"reshard {name}\b", prose)]
    assert not missing


def typed(text: str) -> Iterator[tuple[str, list[str]]]:
    """The commands that a text tells the reader to type: the word after `reshard`, and the options behind it."""
    code = re.findall(r"```.*?\n(.*?)```", text, re.DOTALL) + re.findall(r"`([^`\n]+)`", text)
    for block in code:
        for line in block.replace("\\\n", " ").splitlines():
            if match := re.match(r"(?:\$ )?reshard ([a-z]+)\b(.*)", line.strip()):
                yield match[1], re.findall(r"(?<!\S)--[a-z-]+", match[2])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_pages_name_only_commands_and_options_that_exist(page: Path) -> None:
    for name, options in typed(page.read_text()):
        assert name in COMMANDS, f"{page.name} names `reshard {name}`"
        assert set(options) <= COMMANDS[name], f"{page.name}: `reshard {name}` takes no {options}"


def test_hints_name_only_commands_that_exist() -> None:
    named = {(code, name) for code, kind in by_code().items() for name, _ in typed(kind.hint)}
    assert {(code, name) for code, name in named if name not in COMMANDS} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
