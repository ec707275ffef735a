"""Forms: their fields are those of what is sent, and one that is refused comes back as it was typed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel

from reshard.client.operations.catalogs import Submission
from reshard.client.operations.jobs import JobRequest
from reshard.client.operations.schedules import Kept
from reshard.pipeline.errors import BadBody, BadCatalog, ReshardError, ScheduleExists
from reshard.pipeline.places import AnyPlace, parse_place
from reshard.pipeline.renaming import parse_rules
from reshard.pipeline.request import Options, Request
from reshard.web.documents import status_of
from reshard.web.pages.site import Call, Fields, Page, Reply, page
from reshard.web.pages.wording import label

Typed = Mapping[str, str]  # what stands in each field; of a box that is ticked "on"


class Input(NamedTuple):
    """A field of the form; ``choices`` of a select, none of a text."""

    name: str
    kind: Literal["select", "checkbox", "area", "number", "text", "words"]  # the last are several, with spaces between
    choices: tuple[str, ...]
    default: str  # of a checkbox "on" or nothing
    about: str
    required: bool = False

    @property
    def label(self) -> str:
        return label(self.name)


class Button(NamedTuple):
    label: str
    path: str


class Form(NamedTuple):
    """``tries`` shows what ``does`` would do; ``rows`` are seen at once, ``more`` is folded."""

    template: str
    title: str
    rows: list[list[Input]]
    more: list[Input]
    tries: Button
    does: Button


def size_text(size: int) -> str:
    """``5GB`` for 5,000,000,000 bytes: exactly, and as short as that can be.

    >>> size_text(5_000_000_000), size_text(209_715_200), size_text(1001)
    ('5GB', '200MiB', '1001B')
    """
    units = (("TB", 10**12), ("GB", 10**9), ("GiB", 2**30), ("MB", 10**6), ("MiB", 2**20), ("kB", 1000))
    return next((f"{size // factor}{unit}" for unit, factor in units if size % factor == 0), f"{size}B")


def inputs(model: type[BaseModel], *names: str) -> list[Input]:
    return [_input(model, name) for name in names or model.model_fields]


def _input(model: type[BaseModel], name: str) -> Input:
    field = model.model_fields[name]
    kinds = get_args(field.annotation) if get_origin(field.annotation) in {Union, UnionType} else [field.annotation]
    kind = next(one for one in kinds if one is not NoneType)
    about, required = field.description or "", field.is_required()
    for typed, ours in (("SRC", "the source"), ("SIZE", "“Maximum file size”")):
        about = about.replace(typed, ours)
    default = "" if required or field.default in (None, ()) else str(field.default)
    if get_origin(kind) is Literal:
        return Input(name, "select", tuple(map(str, get_args(kind))), default, about)
    if kind is bool:
        return Input(name, "checkbox", (), "on" if field.default else "", about)
    if name == "size":
        return Input(name, "text", (), size_text(int(default)), about, required=True)
    if kind is int:
        return Input(name, "number", (), default, about)
    words = get_origin(kind) is tuple and name != "rename"
    return Input(name, "area" if name == "text" else "words" if words else "text", (), default, about, required)


OPTIONS = [one for one in inputs(Options) if one.name != "size"]
SIZE, TEXT = inputs(Options, "size"), inputs(Submission, "text")
PLACES = [
    Input("source", "text", (), "", "user/model, user/model@revision or /folder", required=True),
    Input("target", "text", (), "", "user/model-200MB or /folder", required=True),
]
LIMITS = inputs(Submission, "at_once", "max_failures", "max_bytes")
TIMES = inputs(Kept, "name", "cron", "tz", "missed")


def defaults(form: Form) -> dict[str, str]:
    return {one.name: one.default for row in (*form.rows, form.more) for one in row}


def submits(path: str, form: Callable[[Call], Form]) -> Callable[[Callable[[Call], Reply]], Callable[[Call], Reply]]:
    """Adds what a form does; where that is refused, the form comes back as it was typed."""

    def add(run: Callable[[Call], Reply]) -> Callable[[Call], Reply]:
        @page("POST", path)
        def carry_out(call: Call) -> Reply:
            try:
                return run(call)
            except ReshardError as error:
                return shown(form(call), as_typed(call.body), error)

        return run

    return add


def shown(form: Form, typed: Typed, error: ReshardError | None = None, **more: Any) -> Page:
    """The form as it was ``typed``, with what was ``found`` below it, or what is wrong beside its field."""
    typed = dict.fromkeys(defaults(form), "") | dict(typed)
    wrong = _field(error, typed) if error else ""
    changed = any(typed[one.name] != one.default or one.name == wrong for one in form.more)
    told = error.to_dict() if error else None
    known = {"form": form, "typed": typed, "wrong": wrong, "error": told, "changed": changed, "found": None}
    return Page(form.template, known | more, status_of(error) if error else 200)


def _field(error: ReshardError, typed: Typed) -> str:
    """The field that an error is about: by its kind, the option it names, or what was typed; empty if not known."""
    match error:
        case BadBody():
            found = re.search(r"([a-z_]+)(?:\.\d+)*$", str(error.facts["where"]))
        case BadCatalog():
            return "text"
        case ScheduleExists():
            return "name"
        case _:
            found = re.search(r"--([a-z-]+)", str(error))
    name = found[1].replace("-", "_") if found else ""
    facts = [*error.facts.values()]
    said = (name for name in ("source", "target", "config_from") if typed.get(name) and typed[name] in facts)
    return name if name in typed else next(said, "")


def as_typed(body: Fields) -> dict[str, str]:
    """What the form shows again; a box without its tick sends nothing."""
    boxes = {one.name: "on" if one.name in body else "" for one in OPTIONS if one.kind == "checkbox"}
    texts = {name: body.text(name) if name == "text" else body.text(name).strip() for name in body}
    if "KEY-----" in texts.get("sign", ""):  # the key itself, in place of its name
        texts["sign"] = ""
    return boxes | texts


def request_fields(body: Fields, kept: JobRequest | Request | None = None) -> dict[str, Any]:
    """The fields of ``JobRequest`` that a form sent; those that stand as they were ``kept`` are the same.

    What is typed says less than a place or a glob may hold. Raises BadRename, and BadBody without a source.
    """
    before = typed_of(kept) if kept else {}
    sent: dict[str, Any] = dict(body.given("source", "target", "priority"))
    options: dict[str, Any] = body.given("size")
    for one in OPTIONS:
        value = body.one(one.name)
        if one.kind == "checkbox":
            options[one.name] = one.name in body
        elif kept and body.text(one.name) == before[one.name]:
            options[one.name] = getattr(kept.options, one.name)
        elif one.kind == "words":
            options[one.name] = tuple(value.split())
        elif one.name == "rename" and value:
            options[one.name] = parse_rules(value, "of the form")
        elif value and one.name == "config_from" and kept:
            options[one.name] = _place(value, kept.options.config_from)
        elif value:
            options[one.name] = value
    if "source" not in sent:
        raise BadBody(where="source", why="the model is missing")
    for name in ("source", "target"):
        if kept and name in sent:
            same = sent[name] == before[name]
            sent[name] = getattr(kept, name) if same else _place(sent[name], getattr(kept, name))
    return sent | {"options": options}


def _place(typed: str, kept: AnyPlace | None) -> AnyPlace:
    """What was ``typed``, with the credential of what was ``kept``, which no form shows, if only the revision changed.

    Raises BadPlace.
    """
    place = parse_place(typed)
    if kept is None or (name := getattr(kept, "credential", None)) is None:
        return place
    named = place.model_copy(update={"credential": name})
    return named if named.at(None) == kept.at(None) else place


def typed_of(kept: JobRequest | Request) -> dict[str, str]:
    options = {one.name: _typed(one, getattr(kept.options, one.name)) for one in OPTIONS}
    places = {"source": kept.source.spelled, "target": kept.target.spelled}
    return places | options | {"size": size_text(kept.options.size), "priority": kept.priority}


def _typed(one: Input, value: Any) -> str:
    if one.kind == "checkbox":
        return "on" if value else ""
    if one.name == "rename" and value:
        return json.dumps([{pattern: replacement} for pattern, replacement in value], ensure_ascii=False)
    return " ".join(value or ()) if one.kind == "words" or not value else str(getattr(value, "spelled", value))
