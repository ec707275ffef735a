"""How options are named: in sections of help, and in errors as Python tells them, by the names of arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from reshard.pipeline.errors import ReshardError

# Sections of help.
WEIGHTS, FILES, PUBLISHING, ACCESS = "Weights", "Other files", "Publishing", "Access and transfer"
# Options that take no value, and those with another name here; request.py adds the flags that `Options` declares.
FLAGS = {"--no-manifest": "manifest=False", "--public": 'visibility="public"', "--private": 'visibility="private"'}
NAMES = {"--to": "target=", "--catalog": "--catalog", "--help": "--help"}
# What may follow an option as its value in a sentence, and is not the sentence's next word.
_VALUE = r"bfloat16|float16|float32|auto|fail|own-shard|fused|separate[\w-]*|xet|http|user/repo|\./\w+|\d[\w.,]*"
_OPTION = re.compile(rf"`reshard [^`]*`|(--[a-z][a-z-]*)(?: ({_VALUE})(?![\w]))?")
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
    for ours, theirs in _SENTENCES.items():
        text = text.replace(ours, theirs)
    return _OPTION.sub(_argument, text)


def _argument(match: re.Match[str]) -> str:
    option, value = match[1], match[2]
    if option is None:
        return match[0]
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
