"""The documentation says what the program does: every command, option and error, and nothing that is not there."""

from __future__ import annotations

import ast
import inspect
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import typer.main
from redis.backoff import ConstantBackoff
from redis.retry import Retry
from safetensors.numpy import save_file

from docs.answers import ANSWERS
from docs.generate import outdated
from reshard.cli.arguments import read_request
from reshard.cli.main import app
from reshard.pipeline import LoadOptions, run, verify
from reshard.pipeline.arguments import as_option
from reshard.pipeline.catalogs.definition import LEVELS
from reshard.pipeline.errors import GO_ON, by_code
from reshard.pipeline.request import Options
from reshard.pipeline.reshard import Watcher
from reshard.pipeline.sizes import SINGLE, parse_size
from reshard.pipeline.stores.connect import ConnectSettings as StoreSettings
from reshard.web.settings import WebSettings
from reshard.worker.broker import find_server
from reshard.worker.settings import Settings, secrets_of

ROOT = Path(__file__).parents[1]
OURS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = [*OURS, *sorted((ROOT / "docs").rglob("*.md"))]


def leaves(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each command that does something, by all of its words: `list`, `schedule list`."""
    if not hasattr(command, "commands"):
        yield name, command
    else:
        for word, child in command.commands.items():
            yield from leaves(child, f"{name} {word}".strip())


def commands() -> dict[str, set[str]]:
    """Each command of `reshard` and the options that it takes."""
    return {
        name: {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
        | {"--help"}
        for name, command in leaves(typer.main.get_command(app))
    }


COMMANDS = commands()
GROUPS = {name.partition(" ")[0] for name in COMMANDS if " " in name}


def test_every_command_and_option_says_what_it_is() -> None:
    for name, command in leaves(typer.main.get_command(app)):
        assert command.help, f"`reshard {name}` has no help"
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"`reshard {name}`: {parameter.name} has no help"


def test_the_generated_reference_is_up_to_date() -> None:
    assert outdated() == [], "run `make docs`"


def test_the_answers_of_every_command_are_documented() -> None:
    assert {name for name, options in COMMANDS.items() if "--json" in options} == ANSWERS.keys()


def test_every_command_is_in_a_guide_and_not_only_in_the_reference() -> None:
    prose = "".join(page.read_text() for page in PAGES if page.parent.name != "reference")
    missing = [name for name in COMMANDS if not re.search(rf"reshard {name}\b", prose)]
    assert not missing


def typed(text: str) -> Iterator[tuple[str, list[str]]]:
    """The commands that a text tells the reader to type: the word after `reshard`, and the options behind it."""
    code = re.findall(r"```.*?\n(.*?)```", text, re.DOTALL) + re.findall(r"`([^`\n]+)`", text)
    for block in code:
        for line in block.replace("\\\n", " ").splitlines():
            if match := re.match(rf"(?:\$ )?reshard ((?:(?:{'|'.join(GROUPS)}) )?[a-z]+)\b(.*)", line.strip()):
                yield match[1], re.findall(r"(?<!\S)--[a-z-]+", match[2])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_pages_name_only_commands_and_options_that_exist(page: Path) -> None:
    for name, options in typed(page.read_text()):
        assert name in COMMANDS.keys() | GROUPS, f"{page.name} names `reshard {name}`"
        assert set(options) <= COMMANDS.get(name, {"--help"}), f"{page.name}: `reshard {name}` takes no {options}"


def test_hints_name_only_commands_that_exist() -> None:
    named = {(code, name) for code, kind in by_code().items() for name, _ in typed(kind.hint)}
    named |= {("job", name) for hints in GO_ON.values() for hint in hints for name, _ in typed(hint)}
    assert {(code, name) for code, name in named if name not in COMMANDS} == set()


def modules(folder: str) -> list[str]:
    """Each module of a folder that has code as docs/architecture.md names it: its file, `child/` before the child's."""
    found = (path for path in (ROOT / folder).rglob("*.py") if len(ast.parse(path.read_bytes()).body) > 1)
    paths = sorted(path.relative_to(ROOT / folder) for path in found)
    return [f"child/{path.name}" if "child" in path.parts else path.name for path in paths]


@pytest.mark.parametrize("folder", ["pipeline", "worker", "client", "web", "cli"])
def test_the_architecture_names_every_module(folder: str) -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    section = re.split(r"^## ", text, flags=re.MULTILINE)
    (told,) = [part for part in section if part.startswith(f"{folder}/\n")]
    assert [name for name in modules(folder) if f"`{name}`" not in told] == []


def test_the_examples_of_the_library_run_in_their_order_and_the_first_has_ten_lines(tmp_path: Path) -> None:
    first, *others = re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), re.DOTALL)
    assert len([line for line in first.splitlines() if line]) == 10 and others
    code = "\n".join([first, *others])
    (tmp_path / "model").mkdir()
    save_file({"weight": np.zeros(100, np.float32)}, tmp_path / "model" / "model.safetensors")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "model.safetensors" in done.stdout and "passed" in done.stdout
    assert done.stdout.endswith("\nplan\ncopy\ncheck\npublish\nconfirm\n"), "what the watcher prints"


def test_the_library_lists_the_functions_of_a_watcher() -> None:
    page = (ROOT / "docs/library.md").read_text()
    (table,) = re.findall(r"^\| function \|.*\n\| --- .*\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [field.name for field in fields(Watcher)]


def test_the_library_lists_every_option_with_its_default_and_its_name_in_commands() -> None:
    page = (ROOT / "docs/library.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \| (.+) \|$", page.partition("## Options")[2], re.MULTILINE)
    assert [name for name, _, _ in rows] == [*Options.model_fields]
    other = {"visibility": "`--private`", "manifest": "`--no-manifest`"}
    for name, default, told in rows:
        assert Options.of(**{name: ast.literal_eval(default)}) == Options(), name
        assert other.get(name, f"`{as_option(name)}`") in told
    for typed in set(inspect.signature(read_request).parameters) - {"source", "to", "help_all", "options"}:
        assert f"`--{typed.strip('_').replace('_', '-')}" in page, typed
    (exponent,) = re.findall(r"`size=2\*\*(\d+)`", page)
    assert 2 ** int(exponent) == SINGLE


def test_the_library_lists_what_run_and_verify_accept() -> None:
    page = (ROOT / "docs/library.md").read_text()
    table = page.partition("`verify` also accepts")[2]
    told = {"output", "against", "deep", *re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)}
    assert told == {*inspect.signature(verify).parameters}
    untold = {name for name in inspect.signature(run).parameters if not re.search(rf"\b{name}\b", page)}
    assert untold == {"meta_loader"}, "which is kept warm from job to job"
    assert [field.name for field in fields(LoadOptions) if f"`{field.name}`" not in table] == []


def test_the_library_names_every_setting_that_a_context_has() -> None:
    (named,) = re.findall(r"pass a `Context`: its (.*?) are", (ROOT / "docs/library.md").read_text(), re.DOTALL)
    assert re.findall(r"`(\w+)`", named) == [*StoreSettings.model_fields]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def settings_table() -> dict[str, str]:
    """Each variable of the settings page, and the default that it states."""
    text = (ROOT / "docs/reference/settings.md").read_text()
    return dict(re.findall(r"^\| `(RESHARD_\w+)` \| (.+?) \|", text, re.MULTILINE))


def test_every_setting_is_documented_with_its_default() -> None:
    stated = settings_table()
    fields = {
        *Settings.model_fields,
        *StoreSettings.model_fields,
        *(f"web_{name}" for name in WebSettings.model_fields),
    }
    assert stated.keys() - {"RESHARD_CREDENTIALS"} == {f"RESHARD_{name.upper()}" for name in fields}
    for name, field in Settings.model_fields.items():
        if isinstance(field.default, int | float):
            assert float(stated[f"RESHARD_{name.upper()}"]) == field.default
    for name, field in WebSettings.model_fields.items():
        if not field.is_required():  # that of tokens is in the data folder
            default = "none" if field.default in (None, ()) else str(field.default)
            assert stated[f"RESHARD_WEB_{name.upper()}"].strip("`") == default
    assert parse_size(stated["RESHARD_MEMORY_LIMIT"].strip("`")) == StoreSettings.model_fields["memory_limit"].default


def test_the_guide_to_catalogs_names_every_key() -> None:
    guide = (ROOT / "docs/guides/catalogs.md").read_text()
    keys = {key for level in LEVELS for key in level.model_fields}
    assert {key for key in keys if not re.search(rf"`{key}`|^[ -]*{key}:", guide, re.MULTILINE)} == set()


SET_BY_OTHERS = {"HF_TOKEN", "HF_TOKEN_PATH", "HF_ENDPOINT", "HF_HOME", "PYTHONUNBUFFERED"}


def deployed_names() -> set[str]:
    """Every environment variable that the files in deploy/ set or speak of."""
    texts = [p.read_text() for p in (ROOT / "deploy").rglob("*") if p.is_file()]
    return {name for text in texts for name in re.findall(r"\b(?:RESHARD|HF)_[A-Z_]+\b", text)}


def test_deployments_set_only_what_exists() -> None:
    files = {f"{name}_FILE" for kind in (Settings, WebSettings) for _, name in secrets_of(kind)}
    assert deployed_names() - SET_BY_OTHERS - files <= settings_table().keys()


def test_every_secret_that_a_file_may_hold_is_documented() -> None:
    page = (ROOT / "docs/reference/settings.md").read_text()
    (told,) = re.findall(r"^Each secret below .*?\n\n", page, re.MULTILINE | re.DOTALL)
    named = {name.removesuffix("_FILE") for name in re.findall(r"`(RESHARD_\w+)", told)}
    assert named == {name for kind in (Settings, WebSettings) for _, name in secrets_of(kind)}


def test_the_commands_of_deployments_exist() -> None:
    units = [p.read_text() for p in (ROOT / "deploy/systemd").glob("*.service")]
    named = {match for unit in units for match in re.findall(r"^ExecStart=/opt/reshard/bin/reshard (\w+)", unit, re.M)}
    assert named == {"worker", "control", "web"}
    assert named <= COMMANDS.keys()


def test_the_redis_configuration_starts_a_server_that_keeps_what_it_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [str(find_server()), str(ROOT / "deploy/redis.conf"), "--port", str(port), "--dir", str(tmp_path)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        client = redis.Redis(port=port, retry=Retry(ConstantBackoff(0.05), 200), retry_on_error=[redis.ConnectionError])
        wanted = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction", "save": ""}
        assert {name: client.config_get(name)[name] for name in wanted} == wanted
    finally:
        server.terminate()
        server.wait()


@pytest.mark.slow
def test_what_docs_show_of_the_terminal_is_what_the_command_says_today() -> None:
    done = subprocess.run([sys.executable, "docs/record.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
