"""Which tensors belong together, and in which order, by their names alone. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

# The parts of a name up to the first that is a number, ``head`` or ``...embeddings`` and not the last.
_BLOCK = re.compile(r"(?:[^.]*\.)*?(?:\d+|head|[^.]*embeddings)(?=\.)")


def block_of(name: str) -> str:
    """The block that a tensor belongs to: its name up to the first number, ``model.layers.12``, or ``embeddings``.

    Names, and not the class, decide, so that a plan does not depend on what is installed. Every module of a class's
    no-split list is one such block for 682 of the 727 classes in transformers 5.23 that have a list; the others, mostly
    detectors and speech codecs, keep some module together that holds several. A name with neither is its own block.

    >>> block_of("model.layers.12.mlp.up_proj.weight"), block_of("lm_head.weight")
    ('model.layers.12', 'lm_head')
    """
    block = _BLOCK.match(name)
    return block[0] if block else name.rpartition(".")[0] or name


def blocks_of(names: Iterable[str]) -> Iterator[str]:
    """The block of each, as ``block_of``: in order, most have the one of the name before, and begin with it."""
    block, begins = "", "\0"
    for name in names:
        if not name.startswith(begins):
            block, begins = block_of(name), f"{block_of(name)}." if _BLOCK.match(name) else "\0"
        yield block


def natural(name: str) -> str:
    """A sort key in which numbers count as numbers, and come before words.

    >>> sorted(["layers.10", "layers.2"], key=natural)
    ['layers.2', 'layers.10']
    """
    front, _, last = name.rpartition(".")
    head, dot, middle = front.rpartition(".")
    if dot:  # nearly always, and half a million experts share the names of their layers
        return f"{_natural_head(head)}\0{_natural_part(middle)}\0{_natural_part(last)}"
    return _natural_head(name)


@lru_cache(maxsize=65536)
def _natural_head(name: str) -> str:
    return "\0".join(map(_natural_part, name.split(".")))


@lru_cache(maxsize=65536)  # the words and numbers of a model: one text each, however many names have them
def _natural_part(part: str) -> str:
    # Not by int, which refuses more than 4,300 digits; a name may have as many as a header has bytes, 100 million.
    digits = part.lstrip("0") if part.isascii() and part.isdecimal() else None
    return f"\2{part}" if digits is None else f"\1{len(digits):09}{digits}"
