"""How options are named: in sections of help, and in errors as Python and pages tell them, who have none."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from reshard.pipeline.errors import ReshardError

# Sections of help.
WEIGHTS, FILES, PUBLISHING, ACCESS = "Weights", "Other files", "Publishing", "Access and transfer"
# Options that take no value, and those with another name here; request.py adds the flags that `Options` declares.
FLAGS = {"--no-manifest": "manifest=False", "--public": 'visibility="public"', "--private": 'visibility="private"'}
NAMES = {"--to": "target=", "--catalog": "--catalog", "--help": "--help"}
# What may follow an option as its value in a sentence, and is not the sentence's next word.
_VALUE = r"bfloat16|float16|float32|auto|fail|own-shard|fused|separate[\w-]*|xet|http|user/repo|\./\w+|\d[\w.,]*"
_OPTION = re.compile(rf"`[^`]*`|(?<![\w./-])(--[a-z][a-z-]*)(?: ({_VALUE})(?![\w]))?")
_SENTENCES = {
    "run the same command again": "call it again",
    "run the same command with": "call it again with",
    "see `reshard --help`": "docs/library.md lists the arguments",
}


def as_arguments(text: str) -> str:
    """``text`` with the arguments of `Request.of` in place of options; commands stay as they are typed.

    >>> as_arguments("--size 5G: unknown unit 'G'; leave out --strict-dtype")
    "size=5G: unknown unit 'G'; leave out strict_dtype=True"
    """
    return retold(text, _SENTENCES, _argument)


def retold(text: str, sentences: Mapping[str, str], name: Callable[[str, str | None], str]) -> str:
    """``text`` with other sentences, by patterns, and options as ``name(option, value)`` calls them; not in code."""
    for pattern, theirs in sentences.items():
        text = re.sub(pattern, theirs, text)
    return _OPTION.sub(lambda found: found[0] if found[1] is None else name(found[1], found[2]), text)


def _argument(option: str, value: str | None) -> str:
    if option in FLAGS:
        return FLAGS[option] + (f" {value}" if value else "")
    name = NAMES.get(option, f"{option[2:].replace('-', '_')}=")
    if value is None:
        return name
    return f"{name}{value}" if value[0].isdigit() else f'{name}"{value}"'


@contextmanager
def in_python() -> Iterator[None]:
    """What is raised from inside names arguments; `cli` tells it by options again."""
    try:
        yield
    except ReshardError as error:
        error.told = as_arguments
        raise
