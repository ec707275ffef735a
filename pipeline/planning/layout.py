"""What a layout costs those who load it: which files each reads, and what lies where loaders copy it. Pure.

A layout is files with the places of their tensors: those of a source as its headers have them, or those of a plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from reshard.pipeline.checkpoint.open import Opened
from reshard.pipeline.errors import BadRanks
from reshard.pipeline.planning.model import Plan
from reshard.pipeline.planning.readers import NO_SHARES, Readers, Reads, reads, shares
from reshard.pipeline.tensors import DTYPE_BITS, Name, size_in_bytes


class Placed(NamedTuple):
    """A tensor, or the part of it that is in one file; ``start`` and ``size`` are bytes, ``element`` too."""

    name: str
    start: int
    size: int
    element: int


class Laid(NamedTuple):
    """One weight file of a model, and its tensors in their order."""

    path: str
    size: int
    model: Name
    tensors: tuple[Placed, ...]


def as_it_is(opened: Opened) -> list[Laid]:
    """The layout of a source, in the order of its files."""
    found = []
    for checkpoint in opened.checkpoints:
        rows: dict[int, list[Placed]] = {number: [] for number in checkpoint.files}
        for name, dtype, shape, pieces in checkpoint.tensors:
            whole = len(pieces) == 1
            for piece in pieces:
                size = size_in_bytes(dtype, shape if whole else piece.shape)
                rows[piece.file].append(Placed(name, piece.offset, size, _element(dtype)))
        for number, row in rows.items():
            file = opened.files[number]
            found.append(Laid(file.path, file.size, checkpoint.name, tuple(sorted(row, key=lambda one: one.start))))
    return found


def to_be(plan: Plan) -> list[Laid]:
    """The layout that ``plan`` makes."""
    found = []
    for output in plan.outputs:
        for shard in (plan.shards[number] for number in output.shards):
            ends = accumulate((e.size + shard.padding(e) for e in shard.entries), initial=len(shard.header))
            row = zip(shard.entries, ends, strict=False)
            tensors = (Placed(entry.name, start, entry.size, _element(entry.as_dtype)) for entry, start in row)
            found.append(Laid(shard.path, shard.size, output.name, tuple(tensors)))
    return found


def _element(dtype: str) -> int:
    return max(1, DTYPE_BITS.get(dtype, 8) // 8)


def read_by(files: Sequence[Laid], readers: Readers, layers: Mapping[Name, int]) -> tuple[list[Reads], list[str]]:
    """What each rank reads of a layout, whoever made it, and notes; ``layers`` are those that configs count.

    A model of several that cannot be divided is read by all; raises BadRanks where there is no other.
    """
    names: dict[Name, list[str]] = defaultdict(list)
    for file in files:
        names[file.model] += (tensor.name for tensor in file.tensors)
    share, notes, refused = {}, list[str](), list[BadRanks]()
    for model, own in names.items():
        try:
            share[model] = shares(own, readers, layers.get(model))
            notes += share[model].notes
        except BadRanks as error:
            share[model] = NO_SHARES
            refused.append(error)
            notes.append(f"{model}: {error}; every rank reads all of it")
    if len(refused) == len(names):
        raise refused[0]
    owned = {f.path: (f.size, [(share[f.model].of.get(t.name), t.size) for t in f.tensors]) for f in files}
    return reads(owned, readers.ranks), notes
