"""The OpenAPI document and what the API takes agree: what the one calls valid, the other does not call malformed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from reshard.client import ROOT
from reshard.client.operations import operations
from reshard.client.operations.table import InProcess, Operation, read
from reshard.client.queue import Queue
from reshard.pipeline.catalogs.definition import schema as catalog_schema
from reshard.pipeline.request import Request
from reshard.web.openapi import openapi
from reshard.worker.followers.schedules import Schedule
from reshard.worker.queue.jobs import JobStore
from tests.support.examples import examples
from tests.support.schemas import valid
from tests.web.conftest import Site

# What would ask a Hub, and what is made of its body before that.
ASKING: dict[str, Callable[[Any, InProcess], object]] = {
    "/plan": lambda body, session: body.request("me"),
    "/catalogs/check": lambda body, session: body.definition("me"),
    "/schedules/check": lambda body, session: body.schedule(session, body.name).check(),
}
BODIES = [one for one in operations() if one.body is not None]


@cache
def document() -> dict[str, Any]:
    return openapi(ROOT, operations())


def body_of(one: Operation[..., Any]) -> dict[str, Any]:
    said = document()["paths"][ROOT + one.path][one.method.lower()]["requestBody"]
    return dict(said["content"]["application/json"]["schema"])


@cache
def bodies(one: Operation[..., Any]) -> st.SearchStrategy[Any]:
    return valid(body_of(one), document()["components"]["schemas"])


@pytest.mark.parametrize("one", BODIES, ids=lambda one: f"{one.method} {one.path}")
def test_what_the_document_calls_valid_is_not_called_malformed(
    one: Operation[..., Any], site: Site, store: JobStore
) -> None:
    whole = {**body_of(one), "components": document()["components"]}
    check = Draft202012Validator(whole)
    path = f"{ROOT}{one.path}".replace("{job}", "none").replace("{name}", "none")
    with site.client("act") as client:

        @settings(max_examples=examples(80), deadline=None, suppress_health_check=list(HealthCheck))
        @given(bodies(one))
        def sent(body: Any) -> None:
            check.validate(json.loads(json.dumps(body)))
            if one.path in ASKING and one.body:
                ASKING[one.path](read(one.body, json.dumps(body).encode()), InProcess(Queue(store), "me"))
                return
            answer = client.post(path, json=body)
            assert answer.status_code not in {400, 413, 500}, answer.text

        sent()


def unbounded(schema: Any, where: str = "") -> Iterator[str]:
    """The texts, lists and numbers of a schema that may have any length."""
    if isinstance(schema, list):
        for number, one in enumerate(schema):
            yield from unbounded(one, f"{where}/{number}")
    if not isinstance(schema, dict):
        return
    kind = schema.get("type")
    # A pattern without `*`, `+` and `{n,}` has an end.
    endless = any(sign in schema.get("pattern", "*") for sign in ("*", "+", ",}"))
    if kind == "string" and endless and not schema.keys() & {"maxLength", "enum", "const"}:
        yield where
    if kind == "array" and "maxItems" not in schema:
        yield where
    if kind == "integer" and not schema.keys() & {"maximum", "enum", "const"}:
        yield where
    for name, one in schema.items():
        if name not in {"default", "examples", "not"}:
            yield from unbounded(one, f"{where}/{name}")


@pytest.mark.parametrize(
    "schema",
    [Request.model_json_schema(), catalog_schema(), Schedule.model_json_schema()],
    ids=["request", "catalog", "schedule"],
)
def test_every_field_has_a_length(schema: dict[str, Any]) -> None:
    assert not list(unbounded(schema))


def test_every_field_of_the_api_has_a_length() -> None:
    paths = document()["paths"].values()
    taken = [
        said[part] for path in paths for said in path.values() for part in ("requestBody", "parameters") if part in said
    ]
    named = [one.body.__name__ for one in BODIES if one.body]
    schemas = document()["components"]["schemas"]
    query = [one["schema"] for one in taken if isinstance(one, list) for one in one if one["in"] == "query"]
    assert named and query
    assert not list(unbounded([query, {name: schemas[name] for name in named}]))
