"""What pydantic found wrong with data from outside, in words for whoever wrote that."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from reshard.pipeline.errors import shortened

_WORDS = {"missing": "is missing", "extra_forbidden": "unknown name"}


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
        why = _WORDS.get(kind) or _plain(first["msg"])
    return Problem(loc, why, first["input"], kind == "extra_forbidden")


def unknown_names(error: ValidationError) -> str:
    """What a newer release wrote, as ``error`` tells it: ``options.crop``; empty where it is not data at all."""
    problems = [problem for problem in error.errors() if problem["type"] != "json_invalid"]
    return ", ".join(".".join(map(str, problem["loc"])) for problem in problems)


def _plain(message: str) -> str:
    """
    >>> _plain("Value error, a size of 0 bytes")
    'a size of 0 bytes'
    >>> _plain("Input should be a valid boolean, unable to interpret input")
    'must be a valid boolean'
    >>> _plain("Input should be a valid dictionary or instance of Entry")
    'must be a mapping'
    >>> _plain("Input should be a valid tuple")
    'must be a list'
    """
    if message.startswith("Value error, "):  # what pydantic puts before our own words
        return message.removeprefix("Value error, ")
    plain = message.replace("Input should be", "must be").partition(", unable to")[0].replace("a valid tuple", "a list")
    return re.sub(r"a valid dictionary( or instance of \w+)?", "a mapping", plain)
