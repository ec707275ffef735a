"""The two kinds of files of a DeepSpeed ZeRO checkpoint, read as data: what an optimizer holds, what the model is.

Sources: `state_dict` of `deepspeed/runtime/zero/stage_1_and_2.py` and `stage3.py`, and of
`deepspeed/runtime/bf16_optimizer.py`; `_common_checkpoint_state` of `deepspeed/runtime/engine.py`;
`deepspeed/checkpoint/ds_to_universal.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from reshard.pipeline.checkpoint.formats.nesting import label
from reshard.pipeline.checkpoint.formats.pickles import Made
from reshard.pipeline.checkpoint.formats.ranged import Read, read_bytes
from reshard.pipeline.checkpoint.formats.torch_names import ALLOWED
from reshard.pipeline.checkpoint.formats.torch_state import (
    count_of,
    counts_of,
    describe,
    is_tensor,
    named,
    pairs_of,
    view_of,
)
from reshard.pipeline.checkpoint.formats.torch_zip import TorchZip, open_zip
from reshard.pipeline.errors import BadPickle, DuplicateTensor, NotRead
from reshard.pipeline.limits import ATTRIBUTES_MAX, LEFT_OUT_MAX
from reshard.pipeline.tensors import Record, StoredFile, Tensor

_ALLOWED = ALLOWED | {
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    *(f"deepspeed.runtime.fp16.loss_scaler.{name}" for name in ("LossScaler", "DynamicLossScaler")),
    *(f"deepspeed.runtime.fp16.loss_scaler.{name}" for name in ("LossScaleConfig", "LossScaleProfile")),
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
}
_OPTIMIZER, _GROUPS, _GROUPS_3 = "optimizer_state_dict", "single_partition_of_fp32_groups", "fp32_flat_groups"
# Where experts are divided over other ranks than the rest of the model.
_EXPERTS = ("ds_zero_partition_groups", "ds_autoep_layers", "autoep_layers")
_FLOATS = ("F32", "F16", "BF16", "F64")

Shape = tuple[int, ...]


class Partition(NamedTuple):
    """What one rank's optimizer holds: a flat array for each group of parameters."""

    file: str
    stage: int
    ranks: int
    step: object
    groups: tuple[Tensor, ...]
    paddings: tuple[Shape, ...]  # elements behind each parameter of each group; () where there are none
    records: tuple[Record, ...]


class Model(NamedTuple):
    """What one rank says of the model, and what it holds of it beside the optimizer."""

    file: str
    step: int | None
    shapes: tuple[dict[str, Shape], ...]  # the parameters of each group, in the order of its array
    frozen: dict[str, Shape]
    fragments: dict[str, Tensor]  # this rank's share of those that are frozen
    module: dict[str, Tensor]  # the state dict; in stage 3 parameters are empty there
    buffers: frozenset[str]
    shared: dict[str, str]  # a name, and the one under which its bytes are stored
    records: tuple[Record, ...]
    notes: tuple[str, ...]


class Stored(NamedTuple):
    """One parameter of a universal checkpoint."""

    file: str
    tensor: Tensor
    flat: bool  # whether the shape is to be taken from the model
    shortened: bool  # whether it has lost the rows that its vocabulary was padded with
    records: tuple[Record, ...]


def read_partition(read: Read, file: StoredFile, number: int) -> Partition:
    archive = open_zip(read, file, number, _ALLOWED)
    optimizer = named(named(archive.root, "content", file.path).get(_OPTIMIZER), _OPTIMIZER, file.path)
    _refuse_experts(optimizer, file)
    stage = _stage(optimizer, file)
    groups = optimizer.get(_GROUPS_3 if stage == 3 else _GROUPS)
    counts = optimizer.get("partition_count")
    counts = counts if type(counts) is list else [counts]
    ranks = count_of(counts[0]) if counts else None
    if type(groups) is not list or ranks is None or any(type(count) is not int or count != ranks for count in counts):
        raise BadPickle(file=file.path, why="partitions do not belong to one set of ranks")
    found, records = _tensors(archive, {f"group {i}": group for i, group in enumerate(groups)}, file)
    for tensor in found.values():
        if tensor.range is None or len(tensor.shape) != 1 or tensor.dtype not in _FLOATS:
            raise NotRead(file=file.path, what=f"{tensor.name} ({tensor.dtype}{list(tensor.shape)})")
    return Partition(
        file.path,
        stage,
        ranks,
        _step(read, archive, optimizer, file),
        tuple(found.values()),
        _paddings(optimizer.get("param_alignment_paddings"), file),
        records,
    )


def _stage(optimizer: Mapping[str, object], file: StoredFile) -> int:
    stage = optimizer.get("zero_stage")
    if type(stage) is Made and len(stage.args) == 1:  # an enumeration's member
        stage = stage.args[0]
    # BF16_Optimizer names no stage, and divides as stage 1 does; it scales no loss. The optimizers of all stages do, so
    # there a stage that is missing was lost, as DeepSpeed's `zero_to_fp32` takes it too.
    if stage is None:
        if _GROUPS in optimizer and "group_paddings" in optimizer and "loss_scaler" not in optimizer:
            return 1
        raise BadPickle(file=file.path, why="no zero_stage")
    if type(stage) is int and 1 <= stage <= 3:
        return stage
    raise BadPickle(file=file.path, why="not a partition of ZeRO stage 1, 2 or 3")


def _step(read: Read, archive: TorchZip, optimizer: Mapping[str, object], file: StoredFile) -> object:
    """How many steps the optimizer has taken: a number, or the bytes of one; None where it does not say."""
    base = optimizer.get(_OPTIMIZER) or optimizer.get("base_optimizer_state")
    about = dict(pair for pair in pairs_of(base) or () if type(pair[0]) is str)
    groups = about.get("param_groups")
    states = [*(groups if type(groups) is list else ()), *(state for _, state in pairs_of(about.get("state")) or ())]
    for state in states:
        for key, step in pairs_of(state, ATTRIBUTES_MAX) or ():
            if type(key) is not str or key != "step":
                continue
            if is_tensor(step):
                view = view_of(step, "a step", file.path)
                (record,) = archive.storages([view]).values()
                if view.shape or record.stop - record.start > 8:
                    continue
                return read_bytes(read, file, record.start, record.stop)
            if type(step) is int:
                return step
    return None


def _paddings(value: object, file: StoredFile) -> tuple[Shape, ...]:
    groups = [counts_of(group) for group in value] if type(value) is list else []
    if None in groups or (value is not None and type(value) is not list):
        raise BadPickle(file=file.path, why="paddings are malformed")
    return tuple(group for group in groups if group is not None)


def read_model(read: Read, file: StoredFile, number: int) -> Model:
    archive = open_zip(read, file, number, _ALLOWED)
    root = named(archive.root, "content", file.path)
    _refuse_experts(root, file)
    groups, names, step = root.get("param_shapes"), root.get("buffer_names"), root.get("global_steps")
    if type(groups) is not list or type(names) is not list:
        raise BadPickle(file=file.path, why="no list of the parameters in the partitions")
    if step is not None and count_of(step) is None:
        raise BadPickle(file=file.path, why="global_steps is not a count")
    module = _named_or_none(root.get("module"), "module", file)
    fragments = _named_or_none(root.get("frozen_param_fragments"), "frozen_param_fragments", file)
    shared = _named_or_none(root.get("shared_params"), "shared_params", file)
    left_out = [name for name, value in module.items() if not is_tensor(value)]
    notes = [f"{file.path}: skipped {label((name,))} ({describe(module[name])})" for name in left_out[:LEFT_OUT_MAX]]
    if len(left_out) > LEFT_OUT_MAX:
        notes.append(f"{file.path}: skipped {len(left_out) - LEFT_OUT_MAX} more values")
    taken: set[str] = set()
    tensors, records = _tensors(archive, {name: value for name, value in module.items() if is_tensor(value)}, file)
    pieces, more = _tensors(archive, fragments, file)
    return Model(
        file=file.path,
        step=count_of(step),
        shapes=tuple(_shapes(group, "param_shapes", file, taken) for group in groups),
        frozen=_shapes(root.get("frozen_param_shapes"), "frozen_param_shapes", file, set()),
        fragments=pieces,
        module=tensors,
        buffers=frozenset(name for name in names if type(name) is str),
        shared={name: kept for name, kept in shared.items() if type(kept) is str},
        records=records + more,
        notes=tuple(notes),
    )


def _named_or_none(value: object, what: str, file: StoredFile) -> dict[str, object]:
    return {} if value is None else named(value, what, file.path)


def _shapes(value: object, what: str, file: StoredFile, taken: set[str]) -> dict[str, Shape]:
    """Name -> shape; adds the names to those that are ``taken``, as by the groups before this one."""
    found: dict[str, Shape] = {}
    for name, size in pairs_of(value) or ():
        shape = counts_of(size)
        if type(name) is not str or shape is None:
            raise BadPickle(file=file.path, why=f"{what} are malformed")
        if name in taken:
            raise DuplicateTensor(tensor=label((name,)), file=file.path, other=what)
        taken.add(name)
        found[name] = shape
    return found


def read_stored(read: Read, file: StoredFile, number: int) -> Stored:
    """A parameter's `fp32.pt`: the tensor itself and flat (stage 3), or a dictionary with the tensor in its shape."""
    archive = open_zip(read, file, number, _ALLOWED)
    flat = is_tensor(archive.root)
    about = {} if flat else named(archive.root, "content", file.path)
    found, records = _tensors(archive, {"param": archive.root if flat else about.get("param")}, file)
    return Stored(file.path, found["param"], flat, about.get("vocab_tensor") is True, records)


def _tensors(
    archive: TorchZip, values: Mapping[str, object], file: StoredFile
) -> tuple[dict[str, Tensor], tuple[Record, ...]]:
    """Each as a tensor of one piece, and where their storages are."""
    pickled = {}
    for name, value in values.items():
        if not is_tensor(value):
            raise BadPickle(file=file.path, why=f"{label((name,))} is not a tensor")
        pickled[name] = value
    tensors, records = archive.tensors(pickled)
    return dict(zip(pickled, tensors, strict=True)), records


def _refuse_experts(state: Mapping[str, object], file: StoredFile) -> None:
    if any(state.get(key) is not None for key in _EXPERTS):
        raise NotRead(file=file.path, what="a model whose experts are split separately")
