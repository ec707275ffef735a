"""Two checkpoints held against each other: names, dtypes and shapes from headers, and the bytes from one read each.

Neither side needs to be ours, to have the same files, or the same format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from posixpath import basename, join
from typing import NamedTuple

from blake3 import blake3

from reshard.pipeline.errors import BadIndex, CheckpointError, NoWeights, SourceCorrupt
from reshard.pipeline.find import (
    FOREIGN,
    Found,
    find_checkpoints,
    find_uncut,
    foreign_format,
    index_name,
    is_weight_index,
    set_name,
)
from reshard.pipeline.formats.safetensors import SUFFIX
from reshard.pipeline.limits import READ_AGAIN_MAX, REPORT_NAMES_MAX
from reshard.pipeline.open import Opened, open_checkpoints
from reshard.pipeline.request import Options
from reshard.pipeline.stores.protocols import Source
from reshard.pipeline.stream import Tick
from reshard.pipeline.taps import Tape, tensor_digest
from reshard.pipeline.tensors import Checkpoint, Name, Tensor
from reshard.pipeline.verify.check import Check, Result
from reshard.pipeline.verify.digests import NO_CASTS, Stored, digests, first_difference
from reshard.pipeline.verify.structure import Finding, compare
from reshard.pipeline.wanted import select

UNCHANGED = Options()


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two, opened."""

    source: Source
    found: Found
    opened: Opened
    casts: Mapping[Name, Mapping[str, str]] = field(default_factory=dict)  # tensors that are compared as another dtype

    @classmethod
    def open(cls, source: Source, changes: Options = UNCHANGED) -> Side:
        """The side as it is, or as ``changes`` (dtype, strip_prefix) would have it.

        Where all weights are of a kind that is never cut, as an adapter's, each file of them is a checkpoint. Raises
        the CheckpointError family, NoWeights, and what stores raise.
        """
        try:
            found = find_checkpoints(source)
        except NoWeights:
            found = find_uncut(source)
        opened = open_checkpoints(source, found)
        if changes == UNCHANGED:
            return cls(source, found, opened)
        chosen = {checkpoint.name: select(checkpoint, changes, {}).entries for checkpoint in opened.checkpoints}
        changed = [replace(c, tensors=tuple(entry.tensor for entry in chosen[c.name])) for c in opened.checkpoints]
        casts = {name: {e.name: e.as_dtype for e in entries if e.cast} for name, entries in chosen.items()}
        return cls(source, found, replace(opened, checkpoints=tuple(changed)), casts)

    @classmethod
    def attempt(cls, source: Source) -> Side | CheckpointError:
        """The side, or why the pipeline would not take it; raises NoWeights only where there is nothing of any."""
        try:
            return cls.open(source)
        except CheckpointError as error:
            return error
        except NoWeights as error:
            if any(is_weight_index(path) or path.endswith(SUFFIX) for path in source.files()):
                return BadIndex(file=source.place, why=f"no weights that reshard reads{error.facts['found']}")
            raise

    def signature(self, checkpoint: Checkpoint) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Tensor -> (dtype, shape), as compared."""
        casts = self.casts.get(checkpoint.name, {})
        return {tensor.name: (casts.get(tensor.name, tensor.dtype), tensor.shape) for tensor in checkpoint.tensors}


@dataclass(frozen=True, slots=True)
class Pair:
    """One checkpoint on both sides."""

    source: Checkpoint
    output: Checkpoint


@dataclass(frozen=True, slots=True)
class Paired:
    """Which checkpoint of the output is which one of the source; the rest is on one side only."""

    pairs: tuple[Pair, ...]
    lost: tuple[Checkpoint, ...]
    added: tuple[Checkpoint, ...]


def paired(source: Side, output: Side) -> Paired:
    """By name; where each side has a single checkpoint, they are the pair whatever they are called.

    `check_headers` says where the output has it under a name that loaders do not look for.
    """
    if len(source.opened.checkpoints) == len(output.opened.checkpoints) == 1:
        return Paired((Pair(source.opened.checkpoints[0], output.opened.checkpoints[0]),), (), ())
    ours = {checkpoint.name: checkpoint for checkpoint in output.opened.checkpoints}
    theirs = {checkpoint.name: checkpoint for checkpoint in source.opened.checkpoints}
    return Paired(
        tuple(Pair(checkpoint, ours[name]) for name, checkpoint in theirs.items() if name in ours),
        tuple(checkpoint for name, checkpoint in theirs.items() if name not in ours),
        tuple(checkpoint for name, checkpoint in ours.items() if name not in theirs),
    )


# ------------------------------------------------------------------------------------------------------ headers


def check_headers(theirs: Side, ours: Side, matched: Paired) -> Check:
    """Whether both sides have the same tensors by name, dtype and shape, in files that loaders find."""
    findings = [moved for pair in matched.pairs if (moved := _moved(pair, theirs, ours))]
    findings += [f"{_entry(theirs, c)}: none of its {len(c.tensors)} tensors is in the output" for c in matched.lost]
    findings += [
        f"{_entry(ours, c)}: its {len(c.tensors)} tensors are in no checkpoint of the source" for c in matched.added
    ]
    casts: Counter[tuple[str, str]] = Counter()
    for pair in matched.pairs:
        source, output = theirs.signature(pair.source), ours.signature(pair.output)
        findings += [str(d) for d in compare(source, output) if not (d.rule == "lost" and _is_tied(d, pair))]
        both = source.keys() & output.keys()
        casts.update((source[name][0], output[name][0]) for name in both if source[name][0] != output[name][0])
    figures = {
        "tensors": sum(len(pair.output.tensors) for pair in matched.pairs),
        "in_the_source": sum(len(c.tensors) for c in (*(p.source for p in matched.pairs), *matched.lost)),
        "differences": len(findings),
    }
    reason = "; ".join(
        f"{count:,} tensors are {was} in the source and {is_} in the output"
        for (was, is_), count in sorted(casts.items())
    )
    level = "every name, dtype and shape, from headers"
    return Check("same tensors", "failed" if findings else "passed", level, reason, figures, some(findings))


# What loaders look for by themselves: transformers, diffusers, mistral-inference, open_clip, peft. `pytorch_model` is
# `model`, but not in safetensors: no loader looks for that.
_SOUGHT = {"model", "diffusion_pytorch_model", "consolidated", "open_clip_model", "adapter_model"}


def _moved(pair: Pair, theirs: Side, ours: Side) -> str | None:
    """Where a loader that finds the source's files does not find the output's; None where it does.

    A name that only the source's owner knows may give way to one that loaders look for, and a folder without a config
    to one that has it.
    """
    if _is_distributed(ours, pair.output):
        return None
    was, is_ = _called(theirs, pair.source), _called(ours, pair.output)
    mapped = _has_bare_map(pair.output) and not _has_bare_map(pair.source)
    freed = not _has_config(theirs, was) and (_has_config(ours, is_) or not is_.folder)
    found = was.folder == is_.folder or freed
    named = was.stem == is_.stem or (was.stem not in _SOUGHT and is_.stem in _SOUGHT)
    if not mapped and (str(was) == str(is_) or (found and named and was.variant == is_.variant)):
        return None
    return f"{_entry(ours, pair.output)}: the source has this as {was}, and loaders that look for that do not find it"


def _called(side: Side, checkpoint: Checkpoint) -> Name:
    """What the files are called, where ``checkpoint.name`` is what they are to be called in safetensors."""
    path, first = _entry(side, checkpoint), _first_file(side, checkpoint)
    if _is_distributed(side, checkpoint):
        return checkpoint.name
    if first.endswith(SUFFIX):
        torch_name = checkpoint.name.stem == "model" and basename(path).startswith("pytorch_model")
        return replace(checkpoint.name, stem="pytorch_model") if torch_name else checkpoint.name
    return index_name(path) if path == checkpoint.index_path else set_name(path)


def _has_bare_map(checkpoint: Checkpoint) -> bool:
    """As accelerate's `index.json`, which accelerate alone looks for."""
    return checkpoint.index_path is not None and not is_weight_index(checkpoint.index_path)


def _entry(side: Side, checkpoint: Checkpoint) -> str:
    """Where loaders begin: the index, or the file itself."""
    return checkpoint.index_path or _first_file(side, checkpoint)


def _first_file(side: Side, checkpoint: Checkpoint) -> str:
    return side.opened.files[checkpoint.files[0]].path


def _is_distributed(side: Side, checkpoint: Checkpoint) -> bool:
    return foreign_format(_first_file(side, checkpoint)) == FOREIGN[".distcp"]


def _has_config(side: Side, name: Name) -> bool:
    return join(name.folder, "config.json") in side.source.files()


def _is_tied(lost: Finding, pair: Pair) -> bool:
    """Whether the output says of a name that it shares the bytes of one that is there, and the source shows it."""
    kept = (pair.output.file_metadata | pair.output.index_metadata).get(lost.tensor or "")
    places = {tensor.name: (tensor.dtype, tensor.shape, tensor.pieces) for tensor in pair.source.tensors}
    return (
        isinstance(kept, str)
        and kept in {tensor.name for tensor in pair.output.tensors}
        and places.get(kept) == places.get(lost.tensor or "")
    )


def some(findings: Sequence[str]) -> tuple[str, ...]:
    """As many as a report holds; the rest is counted."""
    more = len(findings) - REPORT_NAMES_MAX
    return (*findings[:REPORT_NAMES_MAX], *([f"and {more:,} more"] if more > 0 else []))


# -------------------------------------------------------------------------------------------------------- bytes


class Sums(NamedTuple):
    """Two digests of one tensor: one that nobody can forge, and the one that manifests hold."""

    blake3: str
    xxh3: str


class _BothSums:
    """Takes both in one pass."""

    def __init__(self) -> None:
        self._blake3, self._xxh3 = blake3(), tensor_digest()

    def update(self, view: memoryview, /) -> None:
        self._blake3.update(view)
        self._xxh3.update(view)

    def hexdigest(self) -> str:
        return f"{self._blake3.hexdigest()} {self._xxh3.hexdigest()}"


@dataclass(frozen=True, slots=True)
class Read:
    """A side that was read once: every tensor's sums by checkpoint, and files that are not what they claim to be."""

    tensors: Mapping[Name, Mapping[str, Sums]]
    corrupt: tuple[str, ...]
    bytes: int


def read(side: Side, tick: Tick, tmpdir: Path | None) -> Read:
    """Read all of ``side`` once, and hold each file against what its store says of it.

    A checkpoint with a corrupt file is read once more, to tell its tensors all the same.
    """
    try:
        return Read(_sums(side, tick, tmpdir, attest=True), (), _size(side))
    except SourceCorrupt:
        return Read(_sums(side, tick, tmpdir, attest=False), tuple(_corrupt(side, _files(side), tick)), _size(side))


def read_both(source: Side, output: Side, tick: Tick, tmpdir: Path | None) -> tuple[Read, Read]:
    """Both sides at the same time: they are different disks, or different ends of a line.

    Their files' sha256s are not taken, which would double the time: equal tensors attest each other, and where they
    differ, `check_bytes` asks whose file is not what its store says.
    """

    def one(side: Side) -> Read:
        return Read(_sums(side, tick, tmpdir, attest=False), (), _size(side))

    with ThreadPoolExecutor(2, thread_name_prefix="verify") as pool:
        theirs, ours = pool.map(one, (source, output))
        return theirs, ours


def _sums(side: Side, tick: Tick, tmpdir: Path | None, *, attest: bool) -> dict[Name, Mapping[str, Sums]]:
    taken: dict[Name, Mapping[str, Sums]] = {}
    for checkpoint in side.opened.checkpoints:
        casts = side.casts.get(checkpoint.name, NO_CASTS)
        found = digests(checkpoint, side.opened.files, side.source, _BothSums, tick, tmpdir, attest=attest, casts=casts)
        taken[checkpoint.name] = {name: Sums(*sums.split()) for name, sums in found.items()}
    return taken


def _files(side: Side) -> list[int]:
    return sorted({number for checkpoint in side.opened.checkpoints for number in checkpoint.files})


def _size(side: Side) -> int:
    return sum(side.opened.files[number].size for number in _files(side))


def _corrupt(side: Side, numbers: Iterable[int], tick: Tick) -> Iterator[str]:
    """Those of the files that are not what their store, or their archive's own sums, say that they are."""
    records = [record for checkpoint in side.opened.checkpoints for record in checkpoint.records]
    for number in numbers:
        file = side.opened.files[number]
        tape, at = Tape(file, (), [record for record in records if record.file == number]), 0
        try:
            for view in side.source.read(file, 0, file.size):
                tape.feed(at, view, str(side.source.place))
                at += len(view)
                tick(len(view))
        except SourceCorrupt as error:
            yield str(error)


def check_stored(output: Side, was_read: Read) -> Check:
    """Whether what was read is what the store attests: a file's sha256, or the sums that an archive keeps."""
    files = {number for checkpoint in output.opened.checkpoints for number in checkpoint.files}
    summed = {r.file for checkpoint in output.opened.checkpoints for r in checkpoint.records if r.crc32 is not None}
    attested = [number for number in files if output.opened.files[number].sha256 or number in summed]
    figures = {"files": len(files), "attested": len(attested), "bytes": was_read.bytes}
    reason = "" if attested else "nothing here says what its bytes should be"
    result: Result = "failed" if was_read.corrupt else "passed" if attested else "skipped"
    return Check("stored bytes", result, "each file's sha256, or its archive's sums", reason, figures, was_read.corrupt)


def check_bytes(
    source: Side, output: Side, matched: Paired, theirs: Read, ours: Read, tick: Tick, tmpdir: Path | None
) -> Check:
    """Whether every tensor has the source's bytes.

    Only what differs is read again, to name the first difference, and the files that it lies in, to say whether one
    of them is not what its store says.
    """
    compared = incomparable = 0
    differing: list[tuple[Tensor, Tensor]] = []
    for pair in matched.pairs:
        before, after = theirs.tensors[pair.source.name], ours.tensors[pair.output.name]
        were = {tensor.name: tensor for tensor in pair.source.tensors}
        kinds = source.signature(pair.source)
        for tensor in pair.output.tensors:
            if kinds.get(tensor.name) != (tensor.dtype, tensor.shape):
                incomparable += 1
                continue
            compared += 1
            if before[tensor.name].blake3 != after[tensor.name].blake3:
                differing.append((were[tensor.name], tensor))
    again, rest = differing[:READ_AGAIN_MAX], differing[READ_AGAIN_MAX:]
    findings = [f"{is_.name} has other bytes{_where(was, source, is_, output, tmpdir)}" for was, is_ in again]
    findings += [f"{is_.name} has other bytes" for _, is_ in rest]
    findings += _corrupt(source, sorted({p.file for was, _ in again for p in was.pieces}), tick)
    findings += _corrupt(output, sorted({p.file for _, is_ in again for p in is_.pieces}), tick)
    figures = {
        "tensors": compared,
        "not_comparable": incomparable,
        "differ": len(differing),
        "bytes": theirs.bytes + ours.bytes,
    }
    reason = "" if compared else "no tensor has the same name, dtype and shape on both sides"
    result: Result = "failed" if findings else "passed" if compared else "inconclusive"
    return Check("same bytes", result, "BLAKE3 of every tensor, one read of each side", reason, figures, some(findings))


def _where(was: Tensor, source: Side, is_: Tensor, output: Side, tmpdir: Path | None) -> str:
    first = Stored(was, source.opened.files, source.source, is_.dtype)
    second = Stored(is_, output.opened.files, output.source, is_.dtype)
    found = first_difference(first, second, tmpdir)
    if found is None:
        return ", though not when it was read again: a disk or a line gives different bytes each time"
    return f": element {list(found.element)} is {found.first} in the source and {found.second} in the output"
