"""A weight file by itself as a checkpoint: which may be one, and which is a part of several."""

from __future__ import annotations

from posixpath import basename, dirname

from reshard.pipeline.checkpoint.discover import (
    DISTRIBUTED_SAFETENSORS,
    INDEX,
    NUMBERED,
    SCRIPT,
    TORCH,
    index_of,
    suffix_of,
)
from reshard.pipeline.checkpoint.formats.gguf import SUFFIX as GGUF
from reshard.pipeline.checkpoint.formats.safetensors import SUFFIX
from reshard.pipeline.checkpoint.parts import RANK_FILE, ZERO_FILE
from reshard.pipeline.protocols import Source


def is_index(path: str) -> bool:
    """Whether a file may be an index, by its name: of weights, or of anything."""
    return INDEX.fullmatch(basename(path)) is not None


def is_weights(path: str) -> bool:
    """Whether a file of this name alone may be a checkpoint, or would say why it is none."""
    return suffix_of(path) in {SUFFIX, GGUF, *TORCH, SCRIPT}


def part_by(source: Source, path: str) -> str | None:
    """What makes a file of ``source`` one of several: its name, or an index beside it. Raises BadIndex, UnsafePath."""
    if any(part.fullmatch(basename(path)) for part in (NUMBERED, DISTRIBUTED_SAFETENSORS, RANK_FILE, ZERO_FILE)):
        return "its name"
    for other, file in source.files().items():
        if is_index(other) and dirname(other) == dirname(path):
            index = index_of(source, file, {suffix_of(path)})
            if index is not None and path in index.by_tensor().values():
                return other
    return None
