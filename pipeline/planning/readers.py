"""Which ranks read which tensors, and so which files: of experts in parallel, or of a pipeline. Pure.

``ep8``: eight ranks, each with an equal range of every layer's experts, and all of them with the rest. The ranges are
those of vLLM's linear placement (``determine_expert_map`` in vllm/model_executor/layers/fused_moe/layer.py).
``pp4``: four stages, each with a range of the layers, the last layers first, and all of them with the tensors of no
layer, as mlx-lm splits a model and chooses files (``PipelineMixin.pipeline``, ``sharded_load``, mlx-lm 0.32).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from math import gcd
from operator import contains
from pathlib import PurePosixPath
from typing import Literal, NamedTuple

from reshard.pipeline.errors import BadRanks
from reshard.pipeline.planning.experts import FUSED, ONE
from reshard.pipeline.request import RANKS
from reshard.pipeline.tensors import Name
from reshard.pipeline.text import counted

# A tensor's layer, by what the models of mlx-lm 0.32 and of transformers call the list of them: the first pattern that
# any name matches. Beside `layers`, others are of another model inside, as of one for images, which all ranks read.
_LAYER = tuple(re.compile(rf"(?:^|\.)(?:{lists})\.(\d{{1,6}})\.") for lists in ("layers", "h|blocks|block|layer"))


class Readers(NamedTuple):
    kind: Literal["ep", "pp"]
    ranks: int

    @classmethod
    def of(cls, typed: str) -> Readers:
        """From ``ep8`` or ``pp4``; raises BadRanks."""
        match = re.fullmatch(RANKS, typed)
        if match is None:
            raise BadRanks(value=typed, why="expected ep or pp and a number of ranks from 2 to 9999")
        return cls("ep" if match[1] == "ep" else "pp", int(match[2]))


class Shares(NamedTuple):
    """Who reads what: by name the one rank that reads a tensor, where not all do."""

    of: Mapping[str, int]
    notes: tuple[str, ...] = ()
    refused: BadRanks | None = None  # why all read everything


NO_SHARES = Shares({})  # all read everything
NO_RANK = -1  # of tensors that no stage of a pipeline reads: of layers behind the last, as those for speculation


def shares(names: Sequence[str], readers: Readers, layers: int | None = None) -> Shares:
    """The share of each rank; raises BadRanks where all would read everything.

    ``layers`` is how many the model has by its config; layers of ``pp`` from that number on are read by no rank.
    """
    return _experts(names, readers.ranks) if readers.kind == "ep" else _stages(names, readers.ranks, layers)


def shares_of(model: Name, names: Sequence[str], readers: Readers, layers: int | None) -> Shares:
    """As ``shares``, of one model of several: one that cannot be divided is read by all; see ``refuse_undivided``."""
    try:
        return shares(names, readers, layers)
    except BadRanks as error:
        return Shares({}, (f"{model}: {error}; every rank reads all of it",), error)


def refuse_undivided(found: Iterable[Shares]) -> None:
    """Raises BadRanks where none of several models can be divided."""
    refused = [share.refused for share in found]
    if refused and refused[0] and all(refused):
        raise refused[0]


def _experts(names: Sequence[str], ranks: int) -> Shares:
    found: dict[str, dict[str, int]] = defaultdict(dict)  # layer -> name -> number of the expert
    for name in names:
        if match := ONE.fullmatch(name):
            found[match["layer"]][name] = int(match["number"])
    of: dict[str, int] = {}
    undivided: dict[int, list[str]] = defaultdict(list)
    for layer, members in found.items():
        count = max(members.values()) + 1
        if count % ranks:
            undivided[count].append(layer)
        else:
            of |= {name: number * ranks // count for name, number in members.items()}
    notes = []
    for count, layers in undivided.items():
        where = layers[0] + (f" and {counted(len(layers) - 1, 'more layer')}" if layers[1:] else "")
        why = f"{counted(count, 'expert')} in {where} cannot be divided evenly among {ranks} ranks"
        notes.append(f"{why}: every rank reads all of them")
    if not of:
        fused = next((name for name in names if FUSED.fullmatch(name)), None)
        if not notes and not fused:
            cure = "do not set ranks, or use ppN for pipeline parallelism, for example pp4; see docs/layouts.md"
            raise BadRanks(value=f"ep{ranks}", why="no experts to divide", cure=cure)
        if notes:
            most = gcd(*undivided)
            fitting = [number for number in range(2, min(most, ranks) + 1) if most % number == 0]
            cure = f"use a number that divides them, such as ep{fitting[-1]}" if fitting else "do not set ranks"
            raise BadRanks(value=f"ep{ranks}", why=notes[0].removesuffix(": every rank reads all of them"), cure=cure)
        why = f"{fused} holds all experts of its layer; add --experts separate"
        raise BadRanks(value=f"ep{ranks}", why=why)
    return Shares(of, tuple(notes))


def _stages(names: Sequence[str], ranks: int, layers: int | None) -> Shares:
    found = ({name: int(match[1]) for name in names if (match := layer.search(name))} for layer in _LAYER)
    numbers = next(filter(None, found), {})
    if not numbers:
        why = "no name of a tensor has the number of its layer, as in layers.0 or h.0"
        raise BadRanks(value=f"pp{ranks}", why=why)
    count = layers or max(numbers.values()) + 1
    if count < ranks:
        cure = f"use pp{count} at most" if count > 1 else "do not set ranks"
        raise BadRanks(value=f"pp{ranks}", why=f"the model has {counted(count, 'layer')}", cure=cure)
    base, extra = divmod(count, ranks)
    short = (ranks - extra) * base  # the first layers, which ranks have that have no extra one: the highest of them

    def stage(number: int) -> int:
        if number >= count:
            return NO_RANK
        return ranks - 1 - (number // base if number < short else ranks - extra + (number - short) // (base + 1))

    return Shares({name: stage(number) for name, number in numbers.items()})


class Reads(NamedTuple):
    rank: int
    files: tuple[str, ...]  # every file that holds a tensor of it
    bytes: int  # of these files
    needed: int  # bytes of its tensors


def reads(files: Mapping[str, tuple[int, Iterable[tuple[int | None, int]]]], ranks: int) -> list[Reads]:
    """Of each rank. ``files``: by path, a file's bytes, and of each tensor in it the one rank that reads it, and bytes.

    A tensor whose rank is None is read by all.
    """
    holds: list[set[int | None]] = []
    needed: dict[int | None, int] = defaultdict(int)
    for _, tensors in files.values():
        holds.append(owners := set())
        for owner, size in tensors:
            owners.add(owner)
            needed[owner] += size
    found = []
    for rank in range(ranks):
        own = [path for path, owners in zip(files, holds, strict=True) if owners & {None, rank}]
        found.append(Reads(rank, tuple(own), sum(files[path][0] for path in own), needed[None] + needed[rank]))
    return found


def patterns(wanted: Iterable[str], others: Iterable[str]) -> list[str]:
    """Few globs that match all of ``wanted`` and none of ``others``, for ``hf download --include`` and the like.

    Names that differ in one number share globs of its digits. A name without a number stands for itself.

    >>> patterns(["m-09-of-12", "m-10-of-12", "m-11-of-12"], ["m-01-of-12", "m-12-of-12"])
    ['m-09-of-12', 'm-1[0-1]-of-12']
    """
    ours, globs = _numbered(wanted)
    theirs, _ = _numbered(others)
    for (before, width, behind), numbers in ours.items():
        found = _digits(numbers, theirs.get((before, width, behind), set()))
        globs += [f"{before}{digits}{behind}" for digits in found]
    return sorted(globs)


def suffixes(wanted: Iterable[str], others: Iterable[str]) -> list[str]:
    """Globs that match all of ``wanted`` and none of ``others``, by the ends of names where those tell them apart.

    >>> suffixes(["config.json", "sub/tokenizer.json", "LICENSE"], ["model.safetensors"])
    ['*.json', 'LICENSE']
    """
    taken = {PurePosixPath(path).suffix for path in others}
    return sorted({f"*{end}" if (end := PurePosixPath(p).suffix) and end not in taken else p for p in wanted})


_NUMBERED = re.compile(r"(.*?)(\d+)((?:-of-\d+)?\D*)")
_SPECIAL = re.compile(r"[*?\[]")


def _numbered(paths: Iterable[str]) -> tuple[dict[tuple[str, int, str], set[str]], list[str]]:
    """The digits by what is around them and their count; and as globs the paths that are not like that."""
    numbered: dict[tuple[str, int, str], set[str]] = defaultdict(set)
    globs = []
    for path in paths:
        if (match := _NUMBERED.fullmatch(path)) and not _SPECIAL.search(path):
            numbered[match[1], len(match[2]), match[3]].add(match[2])
        else:
            globs.append(_SPECIAL.sub(r"[\g<0>]", path))
    return numbered, globs


def _digits(wanted: Set[str], others: Set[str]) -> list[str]:
    """Globs for all of ``wanted`` and none of ``others``, all of which have as many digits."""
    columns = [sorted(set(column)) for column in zip(*wanted, strict=True)]
    if not any(all(map(contains, columns, other)) for other in others):
        return ["".join(map(_one_of, columns))]
    same = next(place for place, digits in enumerate(columns) if digits[1:])  # so many digits are those of all
    prefix = "".join(digits[0] for digits in columns[:same])
    ends: dict[str, list[str]] = defaultdict(list)  # behind which next digits each glob stands
    for digit in columns[same]:
        start = prefix + digit
        below = ({number[same + 1 :] for number in side if number.startswith(start)} for side in (wanted, others))
        for glob in _digits(*below):
            ends[glob].append(digit)
    return [prefix + _one_of(digits) + glob for glob, digits in ends.items()]


def _one_of(digits: Sequence[str]) -> str:
    """A glob of one digit, of these in order.

    >>> _one_of("7"), _one_of("0123"), _one_of("135")
    ('7', '[0-3]', '[135]')
    """
    if not digits[1:]:
        return digits[0]
    in_a_row = int(digits[-1]) - int(digits[0]) == len(digits) - 1
    return f"[{digits[0]}-{digits[-1]}]" if in_a_row else f"[{''.join(digits)}]"
