"""Writes the generated parts of the reference: commands, errors, answers as JSON, the HTTP API, the schema of catalogs.

python docs/generate.py           writes docs/reference
python docs/generate.py --check   fails when one of them is out of date
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from typer.main import get_command

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.answers import ANSWERS
from reshard.cli.help import SHOWS_ALL
from reshard.cli.main import app
from reshard.client import SCHEMA
from reshard.client.models.catalogs import Pushed
from reshard.client.models.jobs import Failed
from reshard.client.operations import operations
from reshard.pipeline.catalogs.definition import schema
from reshard.pipeline.errors import GO_ON, ReshardError, by_code
from reshard.web.app import ROOT
from reshard.web.documents import OWN_STATUS, STATUS

REFERENCE = Path(__file__).parent / "reference"
NOTE = "<!-- Written by `make docs`; tests/test_docs.py fails when it is out of date. -->\n\n"


def commands() -> str:
    """Every command with all of its help, as it is on a terminal of 80 columns."""
    pages = [f"## `{typed}`\n\n```console\n{shown}\n```\n" for typed, shown in _screens(get_command(app), None)]
    return NOTE + "# Commands\n\n" + "\n".join(pages)


def _screens(command: Any, above: Any) -> Iterator[tuple[str, str]]:
    with command.make_context(command.name, [], above, resilient_parsing=True, terminal_width=80) as context:
        context.meta[SHOWS_ALL] = True
        yield context.command_path, context.get_help()
        for child in getattr(command, "commands", {}).values():
            yield from _screens(child, context)


def errors() -> str:
    """Every error by family: exit code, code, what it says and what to do next."""
    lines = [
        "# Errors and exit codes",
        "",
        "A command that fails prints one line, `error[code]: message`, with a hint below it: the next command to run,",
        "or what else to do. With `--json` it prints the same as a JSON document. The exit code is that of the error's",
        "family; 0 is success, 130 an interrupt (Ctrl-C), and 141, without an error line, means that the program that",
        "was reading the output through a pipe has exited. Workers retry a retryable error automatically. Parts of a",
        "hint depend on where it is shown:",
        "",
        "| in a hint | for a command | for a job on the queue |",
        "| --- | --- | --- |",
        *(f"| `{{{name}}}` | {typed.strip()} | {of_a_job.strip()} |" for name, (typed, of_a_job) in GO_ON.items()),
        "",
        "`{install}` says how to add the extra to that installation: from its wheel or clone, or to its image.",
    ]
    kinds = sorted(by_code().values(), key=lambda kind: (kind.exit_code, kind.code))
    for exit_code, family in groupby(kinds, key=lambda kind: kind.exit_code):
        members = list(family)
        lines += ["", f"## {exit_code}: {members[0].code.partition('.')[0]}", ""]
        lines += ["| code | retryable | message | hint |", "| --- | --- | --- | --- |"]
        lines += [_row(kind) for kind in members]
    return NOTE + "\n".join(lines) + "\n"


def _row(kind: type[ReshardError]) -> str:
    usual = kind.hint.replace("{cure}", kind.defaults.get("cure", "{cure}"))
    says, hint = kind.message.replace("|", r"\|"), usual.replace("|", r"\|")
    return f"| `{kind.code}` | {'yes' if kind.retryable else 'no'} | {says} | {hint} |"


def answers() -> str:
    """What each command writes with --json, and the objects in it."""
    models: dict[str, type[BaseModel]] = {}
    rows = []
    for name, kinds in ANSWERS.items():
        models |= {kind.__name__: kind for kind in kinds}
        rows.append(f"| `reshard {name}` | {', '.join(_link(kind.__name__) for kind in kinds)} |")
    page = [
        "# JSON output",
        "With `--json` a command writes JSON documents, one per line: first any events on the way, and its result last;"
        " one that is interrupted (exit code 130) has no result."
        " Every document has `schema`, the version of this page. It increases when a field is removed or changes its"
        " meaning. New fields can be added at any time, so ignore fields that you do not know. `list`, `schedule list`"
        " and `catalog status` without a name write one document per record.",
        f"This is schema **{SCHEMA}**. A record's own name is in `id` (jobs) or `name`; fields that refer to other"
        " records are named after their kind: `job`, `catalog`. Sizes are in bytes, times in seconds since the epoch by"
        " the broker's clock, and durations in seconds. A command that fails writes [Failed](#failed) last, and exits"
        " with [its code](errors.md).",
        "| command | documents |\n| --- | --- |\n" + "\n".join(rows),
    ]
    return NOTE + "\n\n".join([*page, *_objects({**models, "Failed": Failed}).values()]) + "\n"


def api() -> str:
    """Every endpoint of the HTTP API, and the objects that no command writes."""
    rows = []
    for one in operations():
        named = one.query.model_fields if one.query else ()
        takes = _link(one.body.__name__) if one.body else ", ".join(f"`?{name}`" for name in named)
        rows.append(
            f"| `{one.method} {one.path}` | {one.scope} | {takes} | {_link(one.answer.__name__)} | {one.summary} |"
        )
    own = ", ".join(f"{status} `{kind.code}`" for kind, status in OWN_STATUS.items())
    families = ", ".join(f"{exit_code}: {status}" for exit_code, status in STATUS.items())
    page = [
        "# The HTTP API",
        f"Paths are below `{ROOT}`. A request needs a token with the scope ([tokens and"
        " scopes](../guides/web.md#tokens-and-scopes)), and has a JSON body, in which a place is a string, as in"
        " commands (`user/repo@revision`), or an object. Responses are documents with `schema`, the version of the"
        f" [JSON output](json.md); `{ROOT}/openapi.json` describes them for programs.",
        "| request | scope | takes | returns | |\n| --- | --- | --- | --- | --- |\n" + "\n".join(rows),
        "`GET /events` and `GET /jobs/{job}/events` (scope `read`) are streams of server-sent events:"
        " [the stream](../guides/web.md#events-as-they-happen)."
        f" `POST /hooks/hub` is for the Hub and returns {_link('Pushed')}. `GET /healthz` and `GET /readyz`"
        f" need no token; these three are not below `{ROOT}`.",
        f"A request that fails returns {_link('Failed')}. Its status depends on the error's family, by [exit"
        f" code](errors.md) ({families}), except for {own}; a path with another method is"
        " 405, and unexpected errors are 500.",
    ]
    models = {kind.__name__: kind for one in operations() for kind in (one.body, one.answer) if kind} | {
        "Pushed": Pushed
    }
    known = _objects({kind.__name__: kind for kinds in ANSWERS.values() for kind in kinds} | {"Failed": Failed})
    objects = [text for name, text in _objects(models).items() if name not in known]
    text = NOTE + "\n\n".join([*page, *objects]) + "\n"
    return re.sub(
        r"\[(\w+)\]\(#(\w+)\)", lambda link: f"[{link[1]}](json.md#{link[2]})" if link[1] in known else link[0], text
    )


def _objects(models: dict[str, type[BaseModel]]) -> dict[str, str]:
    """By name: each object that these documents have, with its fields."""
    found = {}
    said, taken = _schemas(models, "serialization"), _schemas(models, "validation")
    for name, object in sorted(said.items()):
        if "properties" not in object:
            object = taken.get(name, {})  # its fields are those that it is made of: a serializer of its own hides them
        if "properties" not in object:
            continue
        text = object.get("description", "")
        rows = [
            f"| `{field}` | {_type(kind)} | {kind.get('description', '') if '$ref' not in kind else ''} |"
            for field, kind in object["properties"].items()
        ]
        table = "\n".join(["| field | type | |", "| --- | --- | --- |", *rows])
        found[name] = "\n\n".join(filter(None, [f"## {name}", text, table]))
    return found


def _schemas(models: dict[str, type[BaseModel]], mode: Literal["serialization", "validation"]) -> dict[str, Any]:
    _, schema = models_json_schema([(model, mode) for model in models.values()])
    # What has no fields of its own stands where it is referred to.
    enums = {f"#/$defs/{name}": one for name, one in schema["$defs"].items() if "enum" in one}
    return dict(json.loads(json.dumps(schema["$defs"]), object_hook=lambda one: enums.get(one.get("$ref"), one)))


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _type(kind: dict[str, Any]) -> str:
    """A field's type in a few words."""
    if "$ref" in kind:
        return _link(kind["$ref"].rpartition("/")[2])
    if "anyOf" in kind or "oneOf" in kind:
        return " or ".join(_type(one) for one in kind.get("anyOf", kind.get("oneOf")))
    if "enum" in kind or "const" in kind:
        return ", ".join(f"`{json.dumps(value)}`" for value in kind.get("enum", [kind.get("const")]))
    if kind.get("type") == "array":
        return f"array of {_type(kind.get('items', {}))}"
    if kind.get("type") == "object" and isinstance(kind.get("additionalProperties"), dict):
        return f"object of {_type(kind['additionalProperties'])}"
    return str(kind.get("type", "any"))


def catalog() -> str:
    """The JSON Schema of a catalog, which editors use to complete and check one."""
    return json.dumps(schema(), indent=2) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "cli.md": commands,
    "errors.md": errors,
    "json.md": answers,
    "api.md": api,
    "catalog.schema.json": catalog,
}


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
