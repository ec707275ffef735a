"""The OpenAPI document, made of the operations and their models: https://spec.openapis.org/oas/v3.1.0"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import version
from operator import attrgetter
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from reshard.client import SCHEMA
from reshard.client.models.jobs import Failed
from reshard.client.operations.table import Operation

REF = "#/components/schemas/{model}"


class Schemas(GenerateJsonSchema):
    """Of answers as they are written: open, because fields may be added, and with the fields of places."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        made = super().model_schema(schema)
        if self.mode == "serialization":
            made.pop("additionalProperties", None)
        return made

    def ser_schema(self, schema: Any) -> JsonSchemaValue | None:
        """A wrapping serializer writes the fields of its model, and leaves out some that are not set."""
        return None if schema["type"] == "function-wrap" else super().ser_schema(schema)


def openapi(root: str, operations: Iterable[Operation[..., Any]]) -> dict[str, Any]:
    """The document of all ``operations`` below the path ``root``."""
    known, by_name = list(operations), attrgetter("__name__")
    answers = {one.answer for one in known} | {Failed}
    taken = {model for one in known for model in (one.body, one.query) if model}
    modes: list[tuple[Any, Any]] = [(model, "serialization") for model in sorted(answers, key=by_name)]
    modes += [(model, "validation") for model in sorted(taken, key=by_name)]
    refs, schemas = models_json_schema(modes, ref_template=REF, schema_generator=Schemas)
    paths: dict[str, dict[str, Any]] = {}
    for one in known:
        names = re.findall(r"{(\w+)}", one.path)
        in_query = schemas["$defs"][one.query.__name__]["properties"] if one.query else {}
        answer = _content({"allOf": [refs[one.answer, "serialization"], _SCHEMA]})
        error = _content({"allOf": [refs[Failed, "serialization"], _SCHEMA]})
        said: dict[str, Any] = {
            "summary": one.summary,
            # One for each: clients that are generated name their functions by it.
            "operationId": "_".join([one.method.lower(), *re.findall(r"\w+", one.path)]),
            "security": [{"token": []}],
            "x-scope": one.scope,
            "parameters": [
                *({"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names),
                *({"name": name, "in": "query", "schema": kind} for name, kind in in_query.items()),
            ],
            "responses": {
                "200": {"description": one.summary, **answer},
                "default": {"description": "The error.", **error},
            },
        }
        if one.body:
            said["requestBody"] = {
                "required": any(field.is_required() for field in one.body.model_fields.values()),
                **_content(refs[one.body, "validation"]),
            }
        paths.setdefault(root + one.path, {})[one.method.lower()] = said
    return {
        "openapi": "3.1.0",
        "info": {"title": "reshard", "version": version("reshard")},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


_SCHEMA = {"type": "object", "properties": {"schema": {"const": SCHEMA}}, "required": ["schema"]}


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}
