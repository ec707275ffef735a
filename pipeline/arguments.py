"""How options are named: in sections of help, in commands to type, and in errors as Python and pages tell them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from reshard.pipeline.errors import ReshardError
from reshard.pipeline.limits import MB
from reshard.pipeline.sizes import SINGLE

# Sections of help.
WEIGHTS, FILES, PUBLISHING, ACCESS = "Weights", "Other files", "Publishing", "Access and transfer"
# Options that take no value, and those with another name here; request.py adds the flags that `Options` declares.
FLAGS = {"--no-manifest": "manifest=False", "--public": 'visibility="public"', "--private": 'visibility="private"'}
NAMES = {"--to": "target=", "--for": "ranks=", "--catalog": "--catalog", "--help": "--help"}
# What may follow an option as its value in a sentence, and is not the sentence's next word.
_VALUE = r"bfloat16|float16|float32|auto|fail|own-shard|fused|separate[\w-]*|xet|http|user/repo|\./\w+|\d[\w.,]*"
_OPTION = re.compile(rf"`[^`]*`|(?<![\w./-])(--[a-z][a-z-]*)(?: ({_VALUE})(?![\w]))?")
_SENTENCES = {
    "run the same command again": "call it again",
    "run the same command with": "call it again with",
    "see `reshard --help`": "docs/library.md lists the arguments",
}


def typed_options(given: Iterable[tuple[str, object]]) -> list[str]:
    """Fields of ``Options`` as commands take them; of rules for names, which are in a file, that there are some."""
    words: list[str] = []
    for name, value in given:
        option = as_option(name)
        match name, value:
            case "size", int(size):
                text = f"{size // MB}MB" if size % MB == 0 else f"{size}B"
                words += ["--single"] if size == SINGLE else [option, text]
            case "rename", _:
                words += [option, "RULES"]
            case "visibility", _:
                words.append(f"--{value}")
            case _, tuple():
                words += [word for one in value for word in (option, str(one))]
            case _, bool():
                words.append(option if value else f"--no-{option[2:]}")
            case _:
                words += [option, str(getattr(value, "spelled", value))]  # a place with its Hub
    return words


def as_option(name: str) -> str:
    """What commands call this field of ``Options``."""
    return "--for" if name == "ranks" else f"--{name.replace('_', '-')}"


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
