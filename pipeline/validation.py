"""Data from outside: models that take nothing else, and what pydantic found wrong, in words for whoever wrote that."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from reshard.pipeline.errors import shortened

_WORDS = {"missing": "is missing", "extra_forbidden": "unknown name"}


class Strict(BaseModel):
    """What people and jobs write: nothing that is not known, and no error about it repeats what may be a token."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    @classmethod
    def known(cls, text: str | bytes) -> tuple[Self, tuple[str, ...]]:
        """What this release knows of ``text``, to be shown, and the names of the rest, which a newer one wrote.

        A place of a kind that is not known is shown as a folder of that name. Nothing may be carried out from it.
        """
        data, unknown = json.loads(text), list[str]()
        while True:
            try:
                return cls.model_validate(data), tuple(unknown)
            except ValidationError as error:
                found = [_taken_out(data, problem["loc"]) for problem in error.errors()]
                if not any(found):
                    raise
                unknown += filter(None, found)


def _taken_out(data: Any, where: Sequence[str | int]) -> str:
    """Take what pydantic found at ``where`` out of ``data``; returns its name, or nothing if it is not there."""
    names: list[str] = []
    for part, following in zip(where, [*where[1:], ""], strict=True):
        if not isinstance(data, dict) or part not in data:
            continue  # the kind of a place, which pydantic puts between
        names.append(str(part))
        below = data[part]
        if following == "" or not isinstance(below, dict):
            data.pop(part)
            if isinstance(below, dict) and "kind" in below:
                data[part] = {"kind": "folder", "path": " ".join(str(value) for value in below.values())}
            return ".".join(names)
        data = below
    return ""


@dataclass(frozen=True, slots=True)
class Matching:
    """In ``Annotated[str, ...]``: a pattern of the whole text, and what to do about another text."""

    pattern: str
    cure: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(schema) | {"pattern": f"^{self.pattern}$"}

    def checked(self, value: str) -> str:
        """``value`` if it matches, else a ValueError that does not repeat it."""
        if not re.fullmatch(self.pattern, value):
            raise PydanticCustomError(Matching.__name__, "{cure}", {"cure": self.cure})
        return value


@dataclass(frozen=True, slots=True)
class Problem:
    """Where something is wrong, why, and what stood there, which may be a secret."""

    loc: tuple[str | int, ...]
    why: str
    given: Any = field(repr=False)
    unknown: bool = False

    @property
    def where(self) -> str:
        return ".".join(map(str, self.loc))


def first_problem(error: ValidationError) -> Problem:
    """The first of all that ``error`` tells."""
    first = error.errors(include_url=False)[0]
    kind, loc = first["type"], tuple(shortened(part) if isinstance(part, str) else part for part in first["loc"])
    if kind == "union_tag_invalid":  # whose message repeats what stood there
        why = f"{first['ctx']['discriminator']} must be one of {first['ctx']['expected_tags']}"
    else:
        why = _WORDS.get(kind) or plain(first["msg"])
    return Problem(loc, why, first["input"], kind == "extra_forbidden")


def unknown_names(error: ValidationError) -> str:
    """What a newer release wrote, as ``error`` tells it: ``options.crop``; empty where it is not data at all."""
    problems = [problem for problem in error.errors() if problem["type"] != "json_invalid"]
    return ", ".join(".".join(map(str, problem["loc"])) for problem in problems)


def plain(message: str) -> str:
    """What pydantic says, in our words.

    >>> plain("Value error, a size of 0 bytes")
    'a size of 0 bytes'
    >>> plain("Input should be a valid boolean, unable to interpret input")
    'must be a valid boolean'
    >>> plain("String should have at most 500 characters")
    'must have at most 500 characters'
    >>> plain("Tuple should have at most 100 items after validation, not 101")
    'must have at most 100 items'
    >>> plain("Input should be a valid dictionary or instance of Entry")
    'must be a mapping'
    >>> plain("Input should be a valid tuple")
    'must be a list'
    >>> plain("Input should be less than or equal to 400")
    'must be at most 400'
    """
    if message.startswith("Value error, "):  # what pydantic puts before our own words
        return message.removeprefix("Value error, ")
    words = re.sub(r"^\w+ should ", "must ", message).partition(", unable to")[0].replace("a valid tuple", "a list")
    words = words.replace("less than or equal to", "at most").replace("greater than or equal to", "at least")
    words = re.sub(r" after validation, not \d+$", "", words)
    return re.sub(r"a valid dictionary( or instance of \w+)?", "a mapping", words)
