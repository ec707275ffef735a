"""The two that are held against each other, opened, and which checkpoint of one is which of the other.

Neither needs to be ours, to have the same files, or the same format.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from posixpath import join
from typing import NamedTuple

from reshard.pipeline.checkpoint.discover import Found, find_checkpoints, find_uncut, is_weight_index
from reshard.pipeline.checkpoint.formats.safetensors import SUFFIX
from reshard.pipeline.checkpoint.open import Opened, open_checkpoints
from reshard.pipeline.checkpoint.small_files import read_file
from reshard.pipeline.errors import BadIndex, CheckpointError, NoWeights
from reshard.pipeline.limits import CONFIG_MAX
from reshard.pipeline.planning.beside import excluded
from reshard.pipeline.planning.model import Entry
from reshard.pipeline.planning.scales import MODELOPT
from reshard.pipeline.planning.select import select
from reshard.pipeline.protocols import Source
from reshard.pipeline.request import Options
from reshard.pipeline.tensors import Checkpoint, Name, StoredFile, Tensor
from reshard.pipeline.verifying.meta_load import Own

UNCHANGED = Options()


@dataclass(frozen=True, slots=True)
class OpenedSide:
    source: Source
    found: Found
    opened: Opened
    changed: Mapping[Name, Mapping[str, Entry]] = field(default_factory=dict)  # what is compared as another dtype
    exchanged: Mapping[str, str] = field(default_factory=dict)  # name of one tensor -> whose bytes it is to stand for
    own: Mapping[Name, Checkpoint] = field(default_factory=dict)  # before names or layout were changed, if they were
    error: CheckpointError | None = None  # why the pipeline would not take it; then nothing of it is opened

    @classmethod
    def open(cls, source: Source, changes: Options = UNCHANGED) -> OpenedSide:
        """The side as it is, or as ``changes`` (dtype, dequantize, strip_prefix, rename) would have it.

        Where all weights are of a kind that is never cut, as an adapter's, each file of them is a checkpoint. Raises
        the CheckpointError family, NoWeights, and what stores raise.
        """
        try:
            found = find_checkpoints(source, lambda path: excluded(changes, path))
        except NoWeights:
            found = find_uncut(source)
        opened = open_checkpoints(source, found)
        found = found.carrying(opened.uncut)
        if changes == UNCHANGED:
            return cls(source, found, opened)
        chosen = {
            c.name: select(c, changes, {}, _settings(source, c.name, changes)).entries for c in opened.checkpoints
        }
        changed = [replace(c, tensors=tuple(entry.tensor for entry in chosen[c.name])) for c in opened.checkpoints]
        casts = {name: {e.name: e for e in entries if e.cast} for name, entries in chosen.items()}
        exchanged = {new: old for pair in zip(opened.checkpoints, changed, strict=True) for new, old in _taken(*pair)}
        own = {c.name: c for c in opened.checkpoints} if changes.altering("names", "set") else {}
        return cls(source, found, replace(opened, checkpoints=tuple(changed)), casts, exchanged, own)

    def altered(self) -> set[str]:
        """What the changes that it was opened with really alter, of what an option declares that it may."""
        values = {"values"} if any(self.changed.values()) else set()
        return {"names", "set"} | values if any(map(self.names_altered, self.opened.checkpoints)) else values

    def names_altered(self, checkpoint: Checkpoint) -> bool:
        """Whether a tensor of it has another name than before, or other bytes."""
        own = self.own.get(checkpoint.name)
        return own is not None and _by_name(own) != _by_name(checkpoint)

    @classmethod
    def attempt(cls, source: Source) -> OpenedSide:
        """The side, or none of it and its ``error``; raises NoWeights only where there is nothing of any."""
        try:
            return cls.open(source)
        except CheckpointError as error:
            why = error
        except NoWeights as error:
            if not any(is_weight_index(path) or path.endswith(SUFFIX) for path in source.files()):
                raise
            why = BadIndex(file=source.place, why=f"no weights that reshard can read{error.facts['found']}")
        return cls(source, Found((), frozenset()), Opened((), (), {}), error=why)

    @property
    def numbers(self) -> list[int]:
        """Those of the weight files that were opened."""
        return sorted({number for checkpoint in self.opened.checkpoints for number in checkpoint.files})

    @property
    def files(self) -> list[StoredFile]:
        """The weight files that were opened."""
        return [self.opened.files[number] for number in self.numbers]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    def signature(self, checkpoint: Checkpoint) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Tensor -> (dtype, shape), as compared."""
        changed = self.changed.get(checkpoint.name, {})
        kinds = {tensor.name: (tensor.dtype, tensor.shape) for tensor in checkpoint.tensors}
        return kinds | {name: (entry.as_dtype, entry.tensor.shape) for name, entry in changed.items()}


def own_of(config: bytes, before: Sequence[Tensor], after: Iterable[Tensor]) -> Own:
    """The source as it is, for what became of it by options."""
    after = [*after]
    kinds = {tensor.name: (tensor.dtype, tensor.shape) for tensor in before}
    return Own(config, kinds, _origins(before, after), _stored_once(before, after))


def _stored_once(before: Iterable[Tensor], after: Iterable[Tensor]) -> list[tuple[set[str], set[str]]]:
    """The names before, and after, of each tensor that has several before."""
    were, became = defaultdict[object, set[str]](set), defaultdict[object, set[str]](set)
    for tensor in before:
        were[tensor.pieces].add(tensor.name)
    several = {pieces: names for pieces, names in were.items() if pieces and len(names) > 1}
    for tensor in after if several else ():
        became[tensor.pieces].add(tensor.name)
    return [(names, became[pieces]) for pieces, names in several.items()]


def _origins(before: Iterable[Tensor], after: Iterable[Tensor]) -> dict[str, str]:
    """Each tensor after options changed names or layout -> the one before that it begins in, unless that is itself."""
    were = {tensor.name: tensor.pieces for tensor in before}
    starts = sorted((piece.file, piece.offset, name) for name, pieces in were.items() for piece in pieces)
    places = [start[:2] for start in starts]
    new = [t for t in after if t.pieces and were.get(t.name) != t.pieces]
    first = {t.name: bisect_right(places, (t.pieces[0].file, t.pieces[0].offset)) for t in new}
    return {name: starts[number - 1][2] for name, number in first.items() if number}


def _taken(before: Checkpoint, after: Checkpoint) -> Iterator[tuple[str, str]]:
    """Each name that was one tensor's and is another one's, which had the second name."""
    were = {tensor.name: tensor.pieces for tensor in before.tensors}
    moved = [tensor for tensor in after.tensors if were.get(tensor.name, tensor.pieces) != tensor.pieces]
    names = {pieces: name for name, pieces in were.items()} if moved else {}
    for tensor in moved:
        if tensor.pieces in names:  # not in those that are stacked or cut, or whose bytes are computed
            yield tensor.name, names[tensor.pieces]


def _by_name(checkpoint: Checkpoint) -> dict[str, object]:
    return {tensor.name: tensor.pieces for tensor in checkpoint.tensors}


def _settings(source: Source, name: Name, changes: Options) -> dict[str, str]:
    """The texts that say how the weights are quantised, where they are to be compared as plain ones."""
    paths = [join(name.folder, file) for file in ("config.json", MODELOPT)] if changes.dequantize else []
    found = [file for path in paths if (file := source.files().get(path))]
    return {file.path: read_file(source, file, CONFIG_MAX).decode("utf-8", "replace") for file in found}


class Pair(NamedTuple):
    source: Checkpoint
    output: Checkpoint


class Paired(NamedTuple):
    """Both sides, and which checkpoint of the output is which one of the source; the rest is on one side only."""

    source: OpenedSide
    output: OpenedSide
    pairs: tuple[Pair, ...]
    lost: tuple[Checkpoint, ...]
    added: tuple[Checkpoint, ...]


def paired(source: OpenedSide, output: OpenedSide) -> Paired:
    """By name; where each side has a single checkpoint, they are the pair whatever they are called.

    `compare.check_headers` says where the output has it under a name that loaders do not look for.
    """
    if len(source.opened.checkpoints) == len(output.opened.checkpoints) == 1:
        return Paired(source, output, (Pair(source.opened.checkpoints[0], output.opened.checkpoints[0]),), (), ())
    ours = {checkpoint.name: checkpoint for checkpoint in output.opened.checkpoints}
    theirs = {checkpoint.name: checkpoint for checkpoint in source.opened.checkpoints}
    pairs = tuple(Pair(checkpoint, ours[name]) for name, checkpoint in theirs.items() if name in ours)
    lost = tuple(checkpoint for name, checkpoint in theirs.items() if name not in ours)
    added = tuple(checkpoint for name, checkpoint in ours.items() if name not in theirs)
    return Paired(source, output, pairs, lost, added)
