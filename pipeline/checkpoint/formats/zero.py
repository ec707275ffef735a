"""DeepSpeed ZeRO checkpoints: a model whose float32 weights are dealt out over the optimizers of all ranks.

In stages 1 and 2 the flat arrays of all ranks, one behind the other, are a group's parameters, one behind the other; in
stage 3 each rank has its share of every single parameter. Frozen parameters and buffers are in the model's own states.
A universal checkpoint has a file for each parameter. What belongs where follows `deepspeed/utils/zero_to_fp32.py` and
`deepspeed/checkpoint/ds_to_universal.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from math import prod
from posixpath import basename, dirname
from typing import NamedTuple

from reshard.pipeline.checkpoint.formats.nesting import label
from reshard.pipeline.checkpoint.formats.ranged import Read, each
from reshard.pipeline.checkpoint.formats.tiling import boxes_of
from reshard.pipeline.checkpoint.formats.torch_state import tied_tensors
from reshard.pipeline.checkpoint.formats.zero_states import (
    Model,
    Partition,
    Shape,
    Stored,
    read_model,
    read_partition,
    read_stored,
)
from reshard.pipeline.errors import BadIndex, BadTiling, DuplicateTensor, LostPart
from reshard.pipeline.tensors import DTYPE_BITS, Contents, Piece, Record, StoredFile, Tensor
from reshard.pipeline.text import counted

PARTITION, MODEL, STORED = "_optim_states.pt", "_model_states.pt", "fp32.pt"  # how the files' names end
_OF_STAGE_3 = "zero_pp_rank_"  # how those of the model's states begin: each rank has one
_ALIGNMENT = 2  # elements for each rank: stages 1 and 2 pad a group to a multiple of them


class _Run(NamedTuple):
    """``elements`` from byte ``offset`` of a file on."""

    file: int
    offset: int
    elements: int


class _Flat:
    """An array whose parts, each packed, lie one behind the other."""

    def __init__(self, parts: Iterable[Tensor]) -> None:
        solid = [part for part in parts if part.size]
        self._pieces = [part.pieces[0] for part in solid]
        self._ends = list(accumulate(prod(part.shape) for part in solid))
        self._width = DTYPE_BITS[solid[0].dtype] // 8 if solid else 0
        self.count = self._ends[-1] if solid else 0

    def cut(self, start: int, stop: int) -> Iterator[_Run]:
        """Elements ``start <= i < stop``, as far as there are any."""
        while start < min(stop, self.count):
            number = bisect_right(self._ends, start)
            piece, end = self._pieces[number], min(self._ends[number], stop)
            skipped = start - (self._ends[number] - prod(piece.shape))
            yield _Run(piece.file, piece.offset + skipped * self._width, end - start)
            start = end


def read_zero(read: Read, files: Sequence[StoredFile]) -> Contents:
    """The model that the files of one step make up, as pieces of ``files``: each kind in the order of its ranks.

    Reads no storage but the optimizers' counts of steps. Raises UnsafePickle, NotRead, BadIndex, BadTiling and the rest
    of the CheckpointError family.
    """
    of = {end: [n for n, file in enumerate(files) if file.path.endswith(end)] for end in (PARTITION, MODEL, STORED)}
    models = each(lambda n: read_model(read, files[n], n), of[MODEL])
    partitions = each(lambda n: read_partition(read, files[n], n), of[PARTITION])
    stored = each(lambda n: read_stored(read, files[n], n), of[STORED])
    model = models[0]
    _check_models(models)
    if partitions:
        _check_partitions(partitions)
        stage_3 = partitions[0].stage == 3
        found = _by_name((_dealt_out if stage_3 else _behind)(model, partitions), partitions[0].file)
        what = f"stage {partitions[0].stage}, {counted(len(partitions), 'rank')}"
    else:
        stage_3 = basename(model.file).startswith(_OF_STAGE_3)
        found = _matched(model, stored)
        what = "universal"
    beside = _frozen(models, stage_3)
    if both := found.keys() & beside.keys():
        raise DuplicateTensor(tensor=label((min(both),)), file=model.file, other="the frozen parameters")
    found |= beside
    for name, kept in model.shared.items():
        if kept in found and name not in found:
            found[name] = found[kept]._replace(name=name)
    where = dirname(model.file) or "."
    notes = [f"{where}: merged the optimizer weights of a DeepSpeed ZeRO checkpoint ({what})"]
    rest = _rest(model, found, stage_3)
    if unheld := [name for name in rest if name not in model.buffers]:
        such = f"such as {label((unheld[0],))}"
        notes.append(f"{model.file}: used for {counted(len(unheld), 'tensor')} that no optimizer has, {such}")
    tensors = (*found.values(), *rest.values())
    records = chain(*(p.records for p in partitions), *(m.records for m in models), *(s.records for s in stored))
    return Contents(tensors, (*notes, *model.notes), tied_tensors(tensors), _used(tensors, records))


def _check_models(models: Sequence[Model]) -> None:
    first = models[0]
    for model in models:
        if (model.step, model.shapes, model.frozen) != (first.step, first.shapes, first.frozen):
            raise BadIndex(file=model.file, why=f"not the same step and model as {first.file}")


def _check_partitions(partitions: Sequence[Partition]) -> None:
    first = partitions[0]
    kinds = [group.dtype for group in first.groups]
    if (ranks := min(partition.ranks for partition in partitions)) > len(partitions):
        why = f"one of {ranks} ranks, but the file of rank {len(partitions)} is missing"
        raise LostPart(file=first.file, why=why)
    for partition in partitions:
        if partition.ranks != len(partitions):
            why = f"one of {partition.ranks} ranks, but there are files from {len(partitions)}"
            raise BadIndex(file=partition.file, why=why)
        if partition.stage != first.stage or [group.dtype for group in partition.groups] != kinds:
            raise BadIndex(file=partition.file, why=f"not the same groups as {first.file}")
        if partition.step != first.step:
            raise BadIndex(file=partition.file, why=f"not the same step as {first.file}")


def _behind(model: Model, partitions: Sequence[Partition]) -> Iterator[Tensor]:
    """Stages 1 and 2: each group is the ranks' arrays one behind the other, padded at its end."""
    file, groups, paddings = partitions[0].file, partitions[0].groups, partitions[0].paddings
    if len(model.shapes) != len(groups) or (paddings and len(paddings) != len(groups)):
        raise BadIndex(file=file, why=f"{counted(len(groups), 'group')}, but the model has {len(model.shapes)}")
    unit = _ALIGNMENT * len(partitions)
    for number, shapes in enumerate(model.shapes):
        flat = _Flat(partition.groups[number] for partition in partitions)
        gaps = paddings[number] if paddings else (0,) * len(shapes)
        ends = list(accumulate(prod(shape) + gap for shape, gap in zip(shapes.values(), gaps, strict=False)))
        needed = ends[-1] if ends else 0
        if (
            len(gaps) != len(shapes)
            or -(-needed // unit) != -(-flat.count // unit)
            or needed - sum(gaps[-1:]) > flat.count
        ):
            why = f"the ranks have {counted(flat.count, 'element')}, but its parameters need {needed:,}"
            raise BadTiling(file=file, tensor=f"group {number}", why=why)
        for (name, shape), end, gap in zip(shapes.items(), ends, gaps, strict=True):
            yield _tensor(name, groups[number].dtype, shape, flat.cut(end - gap - prod(shape), end - gap))


def _dealt_out(model: Model, partitions: Sequence[Partition]) -> Iterator[Tensor]:
    """Stage 3: each rank has an equal share of every parameter, the last ones filled up."""
    ranks = [_Flat(partition.groups) for partition in partitions]
    everything = list(chain.from_iterable(shapes.items() for shapes in model.shapes))
    needed = sum(_share(shape, len(ranks)) for _, shape in everything)
    for flat, partition in zip(ranks, partitions, strict=True):
        if flat.count != needed:
            why = f"{counted(flat.count, 'element')}, but a rank's share of the parameters is {needed:,}"
            raise BadTiling(file=partition.file, tensor="its groups", why=why)
    dtypes = {group.dtype for group in partitions[0].groups} or {"F32"}
    if len(dtypes) > 1:
        why = f"groups have different dtypes ({', '.join(sorted(dtypes))})"
        raise BadIndex(file=partitions[0].file, why=why)
    (dtype,) = dtypes
    at = 0
    for name, shape in everything:
        share, count = _share(shape, len(ranks)), prod(shape)
        runs = (
            run
            for rank, flat in enumerate(ranks)
            for run in flat.cut(at, at + max(0, min(share, count - rank * share)))
        )
        yield _tensor(name, dtype, shape, runs)
        at += share


def _share(shape: Shape, ranks: int) -> int:
    return -(-prod(shape) // ranks)


def _by_name(tensors: Iterable[Tensor], file: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for tensor in tensors:
        if found.setdefault(tensor.name, tensor) is not tensor:
            raise DuplicateTensor(tensor=label((tensor.name,)), file=file, other="another group")
    return found


def _matched(model: Model, stored: Sequence[Stored]) -> dict[str, Tensor]:
    """A universal checkpoint: each parameter is in a file of its own, under its name.

    Of what no optimizer holds there may be float32 copies, which are not taken: the model's states have the originals.
    """
    left = {basename(dirname(one.file)): one for one in stored}
    found: dict[str, Tensor] = {}
    for name, shape in chain.from_iterable(shapes.items() for shapes in model.shapes):
        if name not in left:
            raise BadIndex(file=model.file, why=f"parameter {label((name,))} has no file under `zero`")
        file, tensor, flat, shortened, _ = left.pop(name)
        if flat and tensor.range is not None and prod(tensor.shape) == prod(shape):
            piece = tensor.pieces[0]._replace(at=(0,) * len(shape), shape=shape)
            tensor = tensor._replace(shape=shape, pieces=(piece,))
        elif tensor.shape != shape and not (
            shortened and tensor.shape[1:] == shape[1:] and tensor.shape[:1] <= shape[:1]
        ):
            why = f"the file has {list(tensor.shape)}, but the model has {list(shape)}"
            raise BadTiling(file=file, tensor=label((name,)), why=why)
        found[name] = tensor._replace(name=name)
    if unknown := left.keys() - model.module.keys() - model.frozen.keys() - model.shared.keys():
        raise BadIndex(file=left[min(unknown)].file, why="the model has no such parameter")
    return found


def _frozen(models: Sequence[Model], stage_3: bool) -> dict[str, Tensor]:
    found = {}
    for name, shape in models[0].frozen.items():
        parts = [model.fragments[name] for model in models if name in model.fragments]
        tensor = parts[0] if parts else None
        if (
            stage_3
            and len(parts) == len(models)
            and all(part.range is not None and part.dtype == parts[0].dtype for part in parts)
        ):
            flat = _Flat(parts)
            if flat.count >= prod(shape):
                tensor = _tensor(name, parts[0].dtype, shape, flat.cut(0, prod(shape)))
        if tensor is None or tensor.shape != shape:
            why = "the ranks do not have all of this frozen parameter"
            raise BadTiling(file=models[0].file, tensor=label((name,)), why=why)
        found[name] = tensor._replace(name=name)
    return found


def _rest(model: Model, found: Mapping[str, Tensor], stage_3: bool) -> dict[str, Tensor]:
    """Buffers, and parameters that are given to no optimizer; raises BadTiling where no rank has them."""
    rest = {name: tensor for name, tensor in model.module.items() if name not in found}
    for name, tensor in rest.items():
        if stage_3 and not tensor.size and name not in model.buffers:
            raise BadTiling(file=model.file, tensor=label((name,)), why="no rank has any of it")
    return rest


def _tensor(name: str, dtype: str, shape: Shape, runs: Iterable[_Run]) -> Tensor:
    """The tensor whose packed elements are those of ``runs``, one behind the other."""
    pieces = []
    at = 0
    for run in runs:
        offset = run.offset
        for box in boxes_of(shape, at, at + run.elements):
            pieces.append(Piece(run.file, offset, box.at, box.shape))
            offset += prod(box.shape) * DTYPE_BITS[dtype] // 8
        at += run.elements
    return Tensor(name, dtype, shape, tuple(pieces) or (Piece(0, 0, (0,) * len(shape), shape),))


def _used(tensors: Iterable[Tensor], records: Iterable[Record]) -> tuple[Record, ...]:
    """The records that tensors are read from."""
    ordered = sorted(records, key=lambda record: (record.file, record.start))
    starts = [(record.file, record.start) for record in ordered]
    pieces = (piece for tensor in tensors for piece in tensor.pieces if 0 not in piece.shape)
    used = {bisect_right(starts, (piece.file, piece.offset)) - 1 for piece in pieces}
    return tuple(ordered[number] for number in sorted(used))
