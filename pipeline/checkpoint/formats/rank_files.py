"""Rank files: the model as each process of a training holds it, saved by itself, as verl does.

`model_world_size_4_rank_2.pt` is a state dict of DTensors: each is this rank's part, with the mesh of ranks and how the
tensor is divided over it (`torch/distributed/tensor/_dtensor_spec.py`, `placement_types.py`,
`torch/distributed/device_mesh.py`). What is no DTensor has to be the same in every rank. Both are read as data: no
class of torch is ever made.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count
from math import prod
from typing import NamedTuple

from reshard.pipeline.checkpoint.formats.nesting import label
from reshard.pipeline.checkpoint.formats.pickles import Made
from reshard.pipeline.checkpoint.formats.ranged import Read, each
from reshard.pipeline.checkpoint.formats.tiling import flaw_in_tiling
from reshard.pipeline.checkpoint.formats.torch_names import DTENSOR, FROM_TYPE
from reshard.pipeline.checkpoint.formats.torch_state import (
    counts_of,
    dtype_of,
    fields,
    pairs_of,
    tensors_of,
    tied_tensors,
)
from reshard.pipeline.checkpoint.formats.torch_zip import open_zip
from reshard.pipeline.errors import BadIndex, BadPickle, BadTiling, NotRead
from reshard.pipeline.limits import ATTRIBUTES_MAX
from reshard.pipeline.tensors import Contents, Piece, Record, StoredFile, Tensor, packed_strides
from reshard.pipeline.text import counted


class _Whole(NamedTuple):
    """A tensor as every rank must describe it. ``divided``: for each dimension of the mesh, which one of the tensor's
    is divided over it; None where it is repeated. A tensor that is no DTensor has no mesh."""

    dtype: str
    shape: tuple[int, ...]
    divided: tuple[int | None, ...]


class _Part(NamedTuple):
    """What one rank holds of it, and where in the mesh the rank stands."""

    whole: _Whole
    at: tuple[int, ...]
    piece: Piece
    record: Record


class _Rank(NamedTuple):
    parts: dict[str, _Part]
    notes: tuple[str, ...]


def read_ranks(read: Read, files: Sequence[StoredFile]) -> Contents:
    """The tensors that the ranks' files make up together, as pieces of ``files``, which are in the order of ranks.

    Reads no storage. Raises UnsafePickle, NotRead, BadTiling and the rest of the CheckpointError family.
    """
    ranks = each(partial(_rank, read), files, count())
    for rank, file in zip(ranks, files, strict=True):
        if odd := rank.parts.keys() ^ ranks[0].parts.keys():
            why = f"{label((min(odd),))} is in this file or in {files[0].path}, but not in both"
            raise BadIndex(file=file.path, why=why)
    tensors: list[Tensor] = []
    records: dict[Record, None] = {}
    for name in ranks[0].parts:
        parts = _used(name, [rank.parts[name] for rank in ranks], files)
        tensors.append(_tensor(name, parts, files))
        records |= dict.fromkeys(part.record for part in parts)
    notes = [f"merged the files of {counted(len(files), 'rank')}", *ranks[0].notes]
    repeated = [name for name, part in ranks[0].parts.items() if not any(dim is not None for dim in part.whole.divided)]
    if repeated and len(files) > 1:
        notes.append(f"{files[0].path}: used for {counted(len(repeated), 'tensor')} that every rank has in full")
    return Contents(tuple(tensors), tuple(notes), tied_tensors(tensors), tuple(records))


def _rank(read: Read, file: StoredFile, number: int) -> _Rank:
    archive = open_zip(read, file, number)
    tensors, notes = tensors_of(archive.root, file.path)
    described = {name: _described(made, label((name,)), file.path) for name, made in tensors.items()}
    parts = {}
    locals_ = {name: local for name, (local, _, _) in described.items()}
    for (name, dtype, shape, (piece,)), record in zip(*archive.tensors(locals_), strict=True):
        _, whole, at = described[name]
        whole = whole or _Whole(dtype, shape, ())
        if whole.dtype != dtype:
            raise BadPickle(file=file.path, why=f"{label((name,))} is {whole.dtype}, but its part is {dtype}")
        parts[name] = _Part(whole, at, piece, record)
    return _Rank(parts, notes)


def _described(made: Made, what: str, file: str) -> tuple[Made, _Whole | None, tuple[int, ...]]:
    """(this rank's own tensor, the whole, where in the mesh the rank stands) of a pickled tensor."""
    if str(made.kind) not in FROM_TYPE or len(made.args) != 4 or str(made.args[1]).rpartition(".")[2] != DTENSOR:
        return made, None, ()
    function, _, arguments, state = made.args
    # The state of an object with slots is (its dictionary, its slots).
    pairs = pairs_of(state[1] if type(state) is tuple and len(state) == 2 else state, ATTRIBUTES_MAX)
    slots = {key: value for key, value in pairs or () if type(key) is str}
    local = slots.get("_local_tensor")
    if str(function) != "torch._utils._rebuild_wrapper_subclass" or type(arguments) is not tuple or len(arguments) < 3:
        raise BadPickle(file=file, why=f"{what} is not a well-formed DTensor")
    if type(local) is not Made or (shape := counts_of(arguments[2])) is None:
        raise BadPickle(file=file, why=f"{what} is not a well-formed DTensor")
    spec = fields(slots.get("_spec"), "DTensorSpec", file)
    at = counts_of(fields(spec.get("mesh"), "DeviceMesh", file).get("_coordinate_on_dim"))
    placements = spec.get("placements")
    if at is None or type(placements) is not tuple or len(placements) != len(at):
        raise BadPickle(file=file, why=f"{what} is not placed on a mesh of ranks")
    divided = tuple(_divided(placement, len(shape), what, file) for placement in placements)
    return local, _Whole(dtype_of(arguments[1], what, file), shape, divided), at


def _divided(placement: object, dimensions: int, what: str, file: str) -> int | None:
    """The dimension that a placement divides, None where it repeats the tensor."""
    name = placement.kind.name if type(placement) is Made else ""
    if name == "Replicate":
        return None
    if name == "Shard":
        dim = fields(placement, name, file).get("dim")
        if type(dim) is int and 0 <= dim < dimensions:
            return dim
    elif name in ("Partial", "_Partial", "_StridedShard"):
        raise NotRead(file=file, what=f"{what} (placement {name})")
    raise BadPickle(file=file, why=f"{what} has a malformed placement")


def _used(name: str, parts: Sequence[_Part], files: Sequence[StoredFile]) -> list[_Part]:
    """Of each part of the tensor one, in order; raises BadTiling unless the ranks stand where their files say."""
    whole = parts[0].whole
    if not whole.divided:
        agree = all(part.whole == whole for part in parts)
    else:
        mesh = [1 + max(part.at[axis] for part in parts if len(part.at) > axis) for axis in range(len(whole.divided))]
        places = [
            tuple(rank // step % n for step, n in zip(packed_strides(mesh), mesh, strict=True))
            for rank in range(len(parts))
        ]
        agree = prod(mesh) == len(parts)
        agree &= all(part.whole == whole and part.at == at for part, at in zip(parts, places, strict=True))
    if not agree:
        odd = next((file for part, file in zip(parts, files, strict=True) if part.whole != whole), files[0])
        raise BadTiling(file=odd.path, tensor=label((name,)), why="the ranks do not describe one tensor on one mesh")
    used: dict[tuple[int, ...], _Part] = {}
    for part in parts:
        place = tuple(at for at, dim in zip(part.at, whole.divided, strict=True) if dim is not None)
        first = used.setdefault(place, part)
        if _content(part) != _content(first):
            why = f"{files[first.piece.file].path} has different values for the same part"
            raise BadTiling(file=files[part.piece.file].path, tensor=label((name,)), why=why)
    return list(used.values())


def _content(part: _Part) -> tuple[object, ...]:
    """Equal for two ranks' copies of one part; by the checksums that their archives keep, so nothing is read."""
    piece, record = part.piece, part.record
    return record.crc32, record.stop - record.start, piece.offset - record.start, piece.strides


def _tensor(name: str, parts: Sequence[_Part], files: Sequence[StoredFile]) -> Tensor:
    """The whole of ``parts``; rows are dealt out as `torch.chunk` does, so many to each rank until none is left."""
    dtype, shape, divided = parts[0].whole
    dims = [dim for dim in divided if dim is not None]
    if len(dims) > 1:
        what = f"{label((name,))} (split along several mesh dimensions)"
        raise NotRead(file=files[parts[0].piece.file].path, what=what)
    pieces = []
    for number, part in enumerate(parts if dims else parts[:1]):
        at = [0] * len(shape)
        for dim in dims:
            at[dim] = min(number * -(-shape[dim] // len(parts)), shape[dim])
        pieces.append(part.piece._replace(at=tuple(at)))
    if (flaw := flaw_in_tiling(shape, pieces)) is not None:
        raise BadTiling(file=files[pieces[0].file].path, tensor=label((name,)), why=flaw)
    return Tensor(name, dtype, shape, tuple(piece for piece in pieces if 0 not in piece.shape) or (pieces[0],))
