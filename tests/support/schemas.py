"""Values that a JSON Schema calls valid, for the parts of it that the API's document has."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from jsonschema import Draft202012Validator

# What a schema can only name.
FORMATS: dict[str, st.SearchStrategy[str]] = {
    "cron": st.sampled_from(["@daily", "0 3 * * *", "*/5 0-4 1,15 * mon"]),
    "timezone": st.sampled_from(["UTC", "Europe/Berlin", "Etc/GMT+1"]),
    "regex": st.from_regex(r"[a-z]{1,9}[.](\[ab\])?", fullmatch=True),
    "replacement": st.from_regex("[a-z.]{0,9}", fullmatch=True),
}
CATALOG = st.sampled_from(["name: n\nentries: [{repo: them/m, to: us/m}]\n"])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def valid(schema: dict[str, Any], defs: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values of ``schema``, whose references lead into ``defs``."""
    if "$ref" in schema:
        return valid(defs[schema["$ref"].rpartition("/")[2]], defs)
    for one_of in ("anyOf", "oneOf"):
        if one_of in schema and "type" not in schema:
            return st.one_of([valid(choice, defs) for choice in schema[one_of]])
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema["enum"] if "enum" in schema else [schema["const"]])
    match schema["type"]:
        case "object":
            return _objects(schema, defs)
        case "array":
            return _arrays(schema, defs)
        case "string":
            return _strings(schema)
        case "integer":
            least, most = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1), schema["maximum"]
            return st.integers(least, most) | st.sampled_from([least, most])
        case "number":
            least = schema.get("minimum", schema.get("exclusiveMinimum"))
            return st.floats(least, schema["maximum"], exclude_min="exclusiveMinimum" in schema)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
    raise AssertionError(f"no values are known of {schema}")


def _strings(schema: dict[str, Any]) -> st.SearchStrategy[str]:
    if "contentMediaType" in schema:
        return CATALOG
    if "format" in schema:
        return FORMATS[schema["format"]]
    if "pattern" in schema:
        most = schema.get("maxLength", 10**6)
        # Texts have no half characters anyway, and a class that excludes them is too much for hypothesis 6.150.
        pattern = schema["pattern"].removesuffix("$").replace(r"\ud800-\udfff", "")
        return st.from_regex(pattern + r"\Z").filter(lambda text: len(text) <= most)
    longest = st.just("a" * schema["maxLength"])
    return TEXT.filter(lambda text: len(text) >= schema.get("minLength", 0)) | longest


def _arrays(schema: dict[str, Any], defs: dict[str, Any]) -> st.SearchStrategy[list[Any]]:
    if "prefixItems" in schema:
        return st.tuples(*(valid(item, defs) for item in schema["prefixItems"])).map(list)
    return st.lists(valid(schema["items"], defs), min_size=schema.get("minItems", 0), max_size=3)


def _objects(schema: dict[str, Any], defs: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    if "propertyNames" in schema:
        sizes = {"min_size": schema["minProperties"], "max_size": schema["maxProperties"]}
        return st.dictionaries(
            valid(schema["propertyNames"], defs), valid(schema["additionalProperties"], defs), **sizes
        )
    fields = {name: valid(kind, defs) for name, kind in schema.get("properties", {}).items()}
    needed = {name: kind for name, kind in fields.items() if name in schema.get("required", ())}
    found = st.fixed_dictionaries(needed, optional={name: fields[name] for name in fields.keys() - needed.keys()})
    if "not" in schema:
        never = Draft202012Validator(schema["not"])
        found = found.filter(lambda value: not never.is_valid(value))
    if "oneOf" not in schema:
        return found
    # Those of which exactly one may be there, as an object.
    ones = [choice["required"][0] for choice in schema["oneOf"]]
    objects = [
        valid(_object(schema["properties"][name], defs), defs).map(lambda one, n=name: {n: one}) for name in ones
    ]
    return st.tuples(found, st.one_of(objects)).map(
        lambda pair: {name: value for name, value in pair[0].items() if name not in ones} | pair[1]
    )


def _object(schema: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    """The choice of ``schema`` that is no null."""
    return next(choice for choice in schema["anyOf"] if choice.get("type") != "null")
