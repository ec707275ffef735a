"""Ask what would come out, and submit it. The form's fields are those of ``Options``, as for every command."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from reshard.client.operations.jobs import Drafted
from reshard.client.operations.jobs import submit as submit_job
from reshard.client.operations.table import read
from reshard.client.plan import look
from reshard.pipeline.errors import BadBody, ReshardError
from reshard.pipeline.places import NOWHERE
from reshard.pipeline.renaming import parse_rules
from reshard.pipeline.request import Options
from reshard.web.documents import status_of
from reshard.web.pages.picture import drawing, picture
from reshard.web.pages.site import Call, Fields, Page, Reply, page

PLAIN = ("source", "target", "priority")
FILES_SHOWN = 200


class Input(NamedTuple):
    """A field of the form; ``choices`` of a select, none of a text."""

    name: str
    kind: Literal["select", "checkbox", "text", "words"]  # the last are several, with spaces between
    choices: tuple[str, ...]
    default: str  # of a checkbox "on" or nothing
    about: str


def inputs() -> list[Input]:
    """One for each option but the size, which the form asks for first."""
    found = []
    for name, field in Options.model_fields.items():
        kinds = get_args(field.annotation) if get_origin(field.annotation) in {Union, UnionType} else [field.annotation]
        kind = next(one for one in kinds if one is not NoneType)
        about = field.description or ""
        if name == "size":
            continue
        if get_origin(kind) is Literal:
            found.append(Input(name, "select", get_args(kind), str(field.default), about))
        elif kind is bool:
            found.append(Input(name, "checkbox", (), "on" if field.default else "", about))
        else:
            words = get_origin(kind) is tuple and name != "rename"
            found.append(Input(name, "words" if words else "text", (), "", about))
    return found


@page("GET", "/plan")
def form(call: Call) -> Reply:
    """The empty form, or one that is filled in from the address."""
    defaults = {one.name: one.default for one in inputs()} | {"size": "5GB", "priority": "interactive"}
    return _page(defaults | call.query.given(*PLAIN, "size", *Options.model_fields))


@page("POST", "/plan")
def preview(call: Call) -> Reply:
    """What would come out; nothing is changed."""
    try:
        asked = _asked(call.body)
        request = asked.request(call.caller.name)
        call.session.allow(request, has_target=request.target != NOWHERE)
        with call.session.hub() as context:
            looked = look(request, context)
    except ReshardError as error:
        return _page(_typed(call.body), error)
    return _page(_typed(call.body), None, looked.document, drawing(picture(looked.plan)))


@page("POST", "/jobs")
def submit(call: Call) -> Reply:
    """Queue it, or find the job that already carries it out."""
    try:
        asked = _asked(call.body)
        if asked.target == NOWHERE:
            raise BadBody(where="target", why="the target is missing")
        made = submit_job(call.session, asked)
    except ReshardError as error:
        return _page(_typed(call.body), error)
    return f"/jobs/{made.id}"


def _asked(body: Fields) -> Drafted:
    """Raises BadBody and BadPlace."""
    options: dict[str, Any] = body.given("size")
    for one in inputs():
        value = body.one(one.name)
        if one.kind == "checkbox":
            options[one.name] = one.name in body
        elif one.kind == "words":
            options[one.name] = tuple(value.split())
        elif one.name == "rename" and value:
            options[one.name] = parse_rules(value, "of the form")
        elif value:
            options[one.name] = value
    given = body.given(*PLAIN)
    if "source" not in given:
        raise BadBody(where="source", why="the model is missing")
    return read(Drafted, given | {"options": options}, "the form")


def _typed(body: Fields) -> dict[str, str]:
    """What the form shows again; a box without its tick sends nothing."""
    boxes = {one.name: "on" if one.name in body else "" for one in inputs() if one.kind == "checkbox"}
    return {name: body.one(name) for name in body} | boxes


def _page(typed: dict[str, str], error: ReshardError | None = None, facts: Any = None, drawn: Any = None) -> Page:
    changed = any(typed.get(one.name, "") != one.default for one in inputs())
    shown = {
        "typed": dict.fromkeys([*PLAIN, "size", *Options.model_fields], "") | typed,
        "inputs": inputs(),
        "changed": changed,
        "error": error.to_dict() if error else None,
        "facts": facts,
        "drawing": drawn,
        "most": FILES_SHOWN,
    }
    return Page("plan.html", shown, status_of(error) if error else 200)
