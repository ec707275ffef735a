"""What a folder keeps of the original that was resharded in place, until the next run into it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from reshard.pipeline.check import first
from reshard.pipeline.checkpoint.discover import find_checkpoints
from reshard.pipeline.checkpoint.open import open_checkpoints
from reshard.pipeline.errors import CheckpointError, KeptOriginal, NothingKept, NoWeights
from reshard.pipeline.planning.beside import excluded
from reshard.pipeline.planning.model import Plan
from reshard.pipeline.protocols import Source, Target
from reshard.pipeline.request import Options
from reshard.pipeline.tensors import Tensor

_Key = tuple[str, str]  # checkpoint and name
_Tensors = Mapping[_Key, Tensor]


def refuse_to_drop_the_original(made: Plan, target: Target, now: Source) -> None:
    """Raises KeptOriginal where the kept original has tensors, or tensors in a dtype, that ``now`` has not.

    Nothing else has them, whatever this run excludes. So does an original whose headers cannot be read. Raises
    NothingKept where a store keeps no original at all. None of it is where ``made`` is not in place, or overwrites.
    """
    options = made.options
    if not made.in_place or options.overwrite:
        return
    if not target.place.keeps:
        raise NothingKept(target=str(target.place))
    kept = target.original()
    if kept is None:
        return
    there, _ = _read(now, options)
    try:
        were, ties = _read(kept, options)
    except NoWeights:
        return
    except CheckpointError as error:
        raise KeptOriginal(target=str(target.place), kept=str(kept.place), what=f"not readable: {error}") from error
    if lost := _lost(were, ties, there):
        raise KeptOriginal(target=str(target.place), kept=str(kept.place), what=", ".join(lost))


def _lost(were: _Tensors, ties: list[list[_Key]], there: _Tensors) -> list[str]:
    """Dtypes, then names. Tensors count by name; under other names, as after a rename, by the bytes of their dtype."""
    dtypes = {one.dtype for key, one in were.items() if key in there and there[key].dtype != one.dtype}
    stored = {key for tie in ties for key in (tie if there.keys() & {*tie} else tie[1:])}  # once, by another name
    gone = [one for key, one in were.items() if key not in there and key not in stored]
    fresh, wanted = _by_dtype([one for key, one in there.items() if key not in were]), _by_dtype(gone)
    short = {dtype for dtype in wanted if wanted[dtype] > fresh[dtype]}
    dtypes |= {dtype for dtype in short if fresh.total()}  # which of them were renamed, only the sums tell
    names = [one.name for one in gone if one.dtype in short - dtypes]
    return [*sorted(dtypes), *([first(names)] if names else [])]


def _by_dtype(tensors: list[Tensor]) -> Counter[str]:
    found: Counter[str] = Counter()
    for tensor in tensors:
        found[tensor.dtype] += tensor.size
    return found


def _read(source: Source, options: Options) -> tuple[_Tensors, list[list[_Key]]]:
    """All tensors, and which of them are stored once. Raises CheckpointError.

    What the run excludes counts where it can be read: it would be lost, too.
    """
    try:
        return _tensors(source, options.model_copy(update={"exclude": ()}))
    except CheckpointError:
        return _tensors(source, options)


def _tensors(source: Source, options: Options) -> tuple[_Tensors, list[list[_Key]]]:
    opened = open_checkpoints(source, find_checkpoints(source, lambda path: excluded(options, path))).checkpoints
    found = {(str(one.name), tensor.name): tensor for one in opened for tensor in one.tensors}
    return found, [[(str(one.name), name) for name in tie] for one in opened for tie in one.ties]
