"""What a folder keeps of the original that was resharded in place, until the next run into it."""

from __future__ import annotations

from reshard.pipeline.checkpoint.discover import find_checkpoints
from reshard.pipeline.checkpoint.open import open_checkpoints
from reshard.pipeline.errors import CheckpointError, KeptOriginal, NothingKept, NoWeights
from reshard.pipeline.planning.beside import excluded
from reshard.pipeline.protocols import Source, Target
from reshard.pipeline.request import Options


def refuse_to_drop_the_original(target: Target, now: Source, options: Options) -> None:
    """Raises KeptOriginal where the kept original has tensors in a dtype that ``now`` has not: nothing else has them.

    Raises NothingKept where a store keeps no original at all.

    So does one whose headers cannot be read. Tensors count by name, those of other names by the dtypes that are there.
    """
    if not target.place.keeps:
        raise NothingKept(target=str(target.place))
    kept = target.original()
    if kept is None:
        return
    there = _dtypes(now, options)
    try:
        were = _dtypes(kept, options)
    except NoWeights:
        return
    except CheckpointError as error:
        raise KeptOriginal(target=str(target.place), kept=str(kept.place), what=f"not readable: {error}") from error
    cast = {dtype for name, dtype in were.items() if there.get(name, dtype) != dtype}
    if lost := cast | ({*were.values()} - {*there.values()}):
        raise KeptOriginal(target=str(target.place), kept=str(kept.place), what=", ".join(sorted(lost)))


def _dtypes(source: Source, options: Options) -> dict[tuple[str, str], str]:
    """By checkpoint and name."""
    opened = open_checkpoints(source, find_checkpoints(source, lambda path: excluded(options, path)))
    return {(str(one.name), tensor.name): tensor.dtype for one in opened.checkpoints for tensor in one.tensors}
