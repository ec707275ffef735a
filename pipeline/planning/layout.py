"""What a layout costs those who load it: which files each reads, and what lies where loaders copy it. Pure.

A layout is files with the places of their tensors: those of a source as its headers have them, or those of a plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from reshard.pipeline.checkpoint.formats.safetensors import SUFFIX
from reshard.pipeline.checkpoint.open import Opened
from reshard.pipeline.limits import SMALL_FILE
from reshard.pipeline.planning.blocks import block_of
from reshard.pipeline.planning.model import Plan
from reshard.pipeline.planning.readers import Readers, Reads, reads, refuse_undivided, shares_of
from reshard.pipeline.tensors import DTYPE_BITS, Name, size_in_bytes


class Placed(NamedTuple):
    """A tensor, or the part of it that is in one file; ``start`` and ``size`` are bytes, ``element`` too."""

    name: str
    start: int
    size: int
    element: int
    dimensions: int


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
                rows[piece.file].append(Placed(name, piece.offset, size, _element(dtype), len(shape)))
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
            tensors = (Placed(e.name, start, e.size, _element(e.as_dtype), len(e.tensor.shape)) for e, start in row)
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
    share = {model: shares_of(model, own, readers, layers.get(model)) for model, own in names.items()}
    refuse_undivided(share.values())
    notes = [note for one in share.values() for note in one.notes]
    owned = {f.path: (f.size, [(share[f.model].of.get(t.name), t.size) for t in f.tensors]) for f in files}
    return reads(owned, readers.ranks), notes


# Whether a tensor of a safetensors file whose data begins at byte ``data`` lies where it is used without a copy.
# fastsafetensors 0.5, common.py, SafeTensorsMetadata: ``aligned = header_length % framework.get_device_ptr_align()``,
#   which is 16; copier/gds.py, wait_io, then moves all bytes of a file that is not.
# Run:ai Model Streamer 0.17, safetensors_pytorch.py, requires_alignment_copy, counted as ``unaligned_copies``: the
#   address modulo the element's size; a buffer has the address of its place in the file, modulo a page.
# Direct reads (O_DIRECT, GPUDirect Storage) begin at blocks of the disk, of 512 or 4,096 bytes: open(2), and ``ALIGN``
#   of fastsafetensors. What does not is read into a buffer, and copied.
# Metal takes pages of a mapped file as a buffer, of 16 KiB on Apple silicon: Apple, MTLDevice,
#   makeBuffer(bytesNoCopy:). MLX itself reads into buffers of its own (0.32, mlx/io/safetensors.cpp): it copies all.
RULES: dict[str, Callable[[int, Placed], bool]] = {
    "fastsafetensors": lambda data, tensor: data % 16 == 0,
    "runai": lambda data, tensor: tensor.start % tensor.element == 0,
    "512": lambda data, tensor: tensor.start % 512 == 0,
    "4096": lambda data, tensor: tensor.start % 4096 == 0,
    "16384": lambda data, tensor: tensor.start % 16384 == 0,
}


class Misaligned(NamedTuple):
    """What loaders copy once more by one of RULES."""

    rule: str
    tensors: int
    bytes: int


def misaligned(files: Iterable[Laid]) -> list[Misaligned]:
    """By each rule; of files that are not safetensors nothing, as these loaders read none."""
    placed = [(f.tensors[0].start, t) for f in files if f.path.endswith(SUFFIX) for t in f.tensors if t.size]
    found = []
    for rule, lies_well in RULES.items():
        sizes = [tensor.size for data, tensor in placed if not lies_well(data, tensor)]
        found.append(Misaligned(rule, len(sizes), sum(sizes)))
    return found


class Spread(NamedTuple):
    """Of the layers of several tensors, those in more than one file, and all."""

    layers: int
    of: int


def spread(files: Iterable[Laid]) -> Spread:
    """By those of ``block_of`` that end in a number: others, such as a final norm, are no layers."""
    tensors: dict[tuple[Name, str], list[str]] = defaultdict(list)
    for file in files:
        for tensor in file.tensors:
            tensors[file.model, block_of(tensor.name)].append(file.path)
    numbered = (paths for (_, block), paths in tensors.items() if block.rpartition(".")[2].isdecimal())
    layers = [{*paths} for paths in numbered if len(paths) > 1]
    return Spread(sum(len(paths) > 1 for paths in layers), len(layers))


def seeks(files: Iterable[Laid], order: Iterable[str]) -> int:
    """How often a reader that goes by ``order``, names as an index lists them, does not go on where it is."""
    places = {t.name: (file.path, t.start, t.start + t.size) for file in files for t in file.tensors}
    found, at = 0, ("", 0)
    for path, start, stop in (places[name] for name in order if name in places):
        found += (path, start) != at
        at = path, stop
    return found


def small_files(files: Iterable[Laid]) -> int:
    return sum(file.size < SMALL_FILE for file in files)


def read_by_all(files: Sequence[Laid], ranks: int = 1) -> Reads:
    """What a reader of every file reads: of tensor parallelism each rank, which needs a slice of each matrix."""
    tensors = [tensor for file in files for tensor in file.tensors]
    needed = sum(tensor.size // ranks if tensor.dimensions > 1 else tensor.size for tensor in tensors)
    return Reads(0, tuple(file.path for file in files), sum(file.size for file in files), needed)
