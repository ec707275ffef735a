"""What a folder keeps of the original that was resharded in place, until the next run into it."""

from __future__ import annotations

from reshard.pipeline.checkpoint.discover import find_checkpoints
from reshard.pipeline.checkpoint.open import open_checkpoints
from reshard.pipeline.errors import CheckpointError, KeptOriginal, NoWeights
from reshard.pipeline.protocols import Source, Target


def refuse_to_drop_the_original(target: Target, now: Source) -> None:
    """Raises KeptOriginal where the kept original has dtypes that ``now`` has no more: nothing else has its values."""
    kept = target.original()
    if kept is None:
        return
    try:
        lost = _dtypes(kept) - _dtypes(now)
    except (NoWeights, CheckpointError):
        return  # not what a run was made from
    if lost:
        raise KeptOriginal(target=str(target.place), kept=str(kept.place), dtypes=", ".join(sorted(lost)))


def _dtypes(source: Source) -> set[str]:
    opened = open_checkpoints(source, find_checkpoints(source))
    return {tensor.dtype for checkpoint in opened.checkpoints for tensor in checkpoint.tensors}
