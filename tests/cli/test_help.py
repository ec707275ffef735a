"""Help as a person sees it on a terminal of 80 columns."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from docs.generate import commands
from reshard.cli.errors import SHORT_HELP
from reshard.cli.help import as_typed
from reshard.cli.main import app, main
from reshard.pipeline.places import parse_place

SUMMARY = 60  # characters; the list of commands cuts off what is longer
COLUMNS = 80
UNIDIOMATIC = r"\bis no\b|\bwhoever\b|\bwhat is\b|\bbe the process\b|\bamiss\b|\bmend"


def screens(command: Any, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group by its words."""
    yield words, command
    for word, child in getattr(command, "commands", {}).items():
        yield from screens(child, *words, word)


SCREENS = dict(screens(typer.main.get_command(app)))


def takes_all(command: Any) -> bool:
    """Whether its help shows only some options at first."""
    return any("--help-all" in param.opts for param in command.params)


def test_errors_know_which_commands_show_only_some_options() -> None:
    assert {" ".join(["reshard", *words]) for words, command in SCREENS.items() if takes_all(command)} == SHORT_HELP


def options(shown: str) -> list[str]:
    """Those of a help screen, in its order."""
    return re.findall(r"^  (?:-\w, )?--(\S+)", shown, re.MULTILINE)


@pytest.mark.parametrize("words", [words for words in SCREENS if words], ids=" ".join)
def test_a_summary_is_one_short_imperative_sentence(words: tuple[str, ...]) -> None:
    summary = SCREENS[words].help.split("\n\n")[0]
    assert len(summary) <= SUMMARY
    assert re.fullmatch(r"[A-Z][a-z]+ [^\n]+\.", summary)


@pytest.mark.parametrize("words", SCREENS, ids=lambda words: " ".join(words) or "reshard")
def test_a_help_screen_cuts_nothing_off(words: tuple[str, ...]) -> None:
    asked = "--help-all" if takes_all(SCREENS[words]) else "--help"
    shown = CliRunner().invoke(app, [*words, asked], terminal_width=COLUMNS)
    assert shown.exit_code == 0
    assert max(map(len, shown.output.splitlines())) <= COLUMNS
    _, _, rest = shown.output.partition("\n\n")
    assert not re.search(r"\.\.\.$|…", rest, re.MULTILINE)
    for child in getattr(SCREENS[words], "commands", {}).values():
        assert child.help.split("\n\n")[0] in rest
    assert not re.search(UNIDIOMATIC, " ".join(rest.split()), re.IGNORECASE)


@pytest.mark.parametrize(
    "words", [words for words, command in SCREENS.items() if not hasattr(command, "commands")], ids=" ".join
)
def test_a_command_has_an_example_that_can_be_typed(words: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*words, "--help"], terminal_width=COLUMNS).output
    (example,) = re.findall(r"^  Example: (reshard .+)\n$", shown, re.MULTILINE)
    name, *typed = shlex.split(example)
    assert (name, *typed[: len(words)]) == ("reshard", *words)
    with SCREENS[words].make_context(words[-1], typed[len(words) :]) as parsed:
        assert parsed.args == []
        for place in ("source", "place", "to", "against"):
            if parsed.params.get(place):
                parse_place(parsed.params[place])


def test_commands_and_options_stand_in_sections_the_common_ones_first() -> None:
    def headings(*words: str) -> list[str]:
        shown = CliRunner().invoke(app, words, terminal_width=COLUMNS).output
        return re.findall(r"^(\S.+):$", shown, re.MULTILINE)

    assert headings("--help") == ["Reshard", "Jobs", "Catalogs and schedules", "Service", "Options"]
    sections = ["Weights", "Other files", "Publishing", "Access and transfer", "Output"]
    assert headings("run", "--help-all") == ["Arguments", "Options", *sections]
    assert headings("plan", "--help-all") == ["Arguments", "Options", *sections[:-1], "Devices", "Output"]
    assert headings("run", "--help") == ["Arguments", "Options", "Output"]


@pytest.mark.parametrize(("word", "own"), [("run", ["jobs"]), ("submit", ["watch"])])
def test_help_shows_the_ten_options_that_most_people_use_and_says_how_to_see_the_others(
    word: str, own: list[str]
) -> None:
    shown = CliRunner().invoke(app, [word, "-h"], terminal_width=COLUMNS).output
    common = ["to", "size", "dtype", "revision", "private", "pr", "overwrite", *own]
    assert options(shown) == [*common, "help", "help-all", "verbose", "json"]
    assert shown.endswith("\n\nRun with --help-all for all options.\n")


@pytest.mark.parametrize("words", [words for words, command in SCREENS.items() if takes_all(command)], ids=" ".join)
def test_all_help_and_the_reference_show_every_option(words: tuple[str, ...]) -> None:
    taken = {name.removeprefix("--") for param in SCREENS[words].params for name in param.opts if name[:2] == "--"}
    shown = CliRunner().invoke(app, [*words, "--help-all"], terminal_width=COLUMNS)
    assert shown.exit_code == 0 and "Run with --help-all" not in shown.output
    assert {*options(shown.output)} == taken | {"help"}
    (page,) = [part for part in commands().split("\n## ") if part.startswith(f"`reshard {' '.join(words)}`")]
    assert options(page) == options(shown.output)


@pytest.mark.parametrize("words", [[], ["run"], ["fleet"], ["fleet", "drain"]], ids=" ".join)
def test_help_is_a_word_too(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    for typed in (["help", *words], [*words, "--help"]):
        monkeypatch.setattr(sys, "argv", ["reshard", *typed])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] and told[0].startswith(f"Usage: {' '.join(['reshard', *words])} ")


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_the_version_is_told(flag: str) -> None:
    done = CliRunner().invoke(app, [flag])
    assert (done.exit_code, done.output) == (0, f"reshard {version('reshard')}\n")


def test_as_an_extension_it_is_called_what_is_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`hf reshard WORDS` runs `hf-reshard WORDS`, with nothing that says so but its own name."""

    def typed(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["/anywhere/hf-reshard", *words])
        with pytest.raises(SystemExit):
            main()
        out, err = capsys.readouterr()
        return out + err

    assert typed("plan", "--help").startswith("Usage: hf reshard plan ")
    assert "\n  Example: hf reshard plan " in typed("plan", "--help")
    assert typed().startswith("Usage: hf reshard ")
    assert "hint: see `hf reshard plan --help-all`" in typed("plan", "a/b", "--nothing")
    assert typed("--version") == f"reshard {version('reshard')}\n"


def test_as_an_extension_the_next_command_is_called_what_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = ["next: reshard run a --to b", "next    reshard run a --to b", "reshard run a --to b"]
    assert [as_typed(text) for text in commands] == commands
    monkeypatch.setattr(sys, "argv", ["/anywhere/hf-reshard"])
    assert [as_typed(text) for text in commands] == [text.replace("reshard", "hf reshard") for text in commands]
    assert as_typed("reshard 0.2.0") == "reshard 0.2.0"
