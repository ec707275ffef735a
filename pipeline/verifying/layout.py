"""Whether loaders find a checkpoint of the output where, and under the name, that they find the source's."""

from __future__ import annotations

from dataclasses import replace
from posixpath import basename, join

from reshard.pipeline.checkpoint.discover import (
    FOREIGN,
    SOUGHT_STEMS,
    foreign_format,
    index_name,
    is_weight_index,
    set_name,
)
from reshard.pipeline.checkpoint.formats.safetensors import SUFFIX
from reshard.pipeline.tensors import Checkpoint, Name
from reshard.pipeline.verifying.opened import OpenedSide, Pair


def moved(pair: Pair, theirs: OpenedSide, ours: OpenedSide) -> str | None:
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
    named = was.stem == is_.stem or (was.stem not in SOUGHT_STEMS and is_.stem in SOUGHT_STEMS)
    if not mapped and (str(was) == str(is_) or (found and named and was.variant == is_.variant)):
        return None
    return f"{entry(ours, pair.output)}: the source has this as {was}, and loaders that look for that do not find it"


def _called(side: OpenedSide, checkpoint: Checkpoint) -> Name:
    """What the files are called, where ``checkpoint.name`` is what they are to be called in safetensors."""
    path, first = entry(side, checkpoint), _first_file(side, checkpoint)
    if _is_distributed(side, checkpoint):
        return checkpoint.name
    if first.endswith(SUFFIX):
        torch_name = checkpoint.name.stem == "model" and basename(path).startswith("pytorch_model")
        return replace(checkpoint.name, stem="pytorch_model") if torch_name else checkpoint.name
    return index_name(path) if path == checkpoint.index_path else set_name(path)


def _has_bare_map(checkpoint: Checkpoint) -> bool:
    """As accelerate's `index.json`, which accelerate alone looks for."""
    return checkpoint.index_path is not None and not is_weight_index(checkpoint.index_path)


def entry(side: OpenedSide, checkpoint: Checkpoint) -> str:
    """Where loaders begin: the index, or the file itself."""
    return checkpoint.index_path or _first_file(side, checkpoint)


def _first_file(side: OpenedSide, checkpoint: Checkpoint) -> str:
    return side.opened.files[checkpoint.files[0]].path


def _is_distributed(side: OpenedSide, checkpoint: Checkpoint) -> bool:
    return foreign_format(_first_file(side, checkpoint)) == FOREIGN[".distcp"]


def _has_config(side: OpenedSide, name: Name) -> bool:
    return join(name.folder, "config.json") in side.source.files()
