"""What the files of a checkpoint are called, where loaders look for them. Pure."""

from __future__ import annotations

import re
from posixpath import join

from reshard.pipeline.checkpoint.formats.safetensors import INDEX_SUFFIX, SUFFIX
from reshard.pipeline.tensors import Name

SETTINGS_SUFFIX = ".settings.json"


def index_path(name: Name) -> str | None:
    """Where loaders look for the index: ``unet/model.safetensors.index.fp16.json``; None where none looks for any."""
    if name.suffix != SUFFIX:
        return None
    index = f"{name.stem}{INDEX_SUFFIX}"
    if name.variant:
        index = f"{index.removesuffix('.json')}.{name.variant}.json"
    return join(name.folder, index)


def shard_path(name: Name, number: int, count: int) -> str:
    """The path of shard ``number`` (from 1) of ``count``; one alone has no number, as loaders expect."""
    numbered = f"-{number:05d}-of-{count:05d}" if count > 1 else ""
    return name.path + numbered + name.suffix


def settings_path(name: Name) -> str:
    """Where settings go that lie beside the weights in one file of torch's: ``model.settings.json``."""
    return name.path + SETTINGS_SUFFIX


def is_path_of(path: str, name: Name) -> bool:
    """Whether ``path`` is that of an index or a shard of ``name``, whatever the number of its shards."""
    begin, suffix = re.escape(name.path), re.escape(name.suffix)
    return path == index_path(name) or re.fullmatch(rf"{begin}(-\d{{5}}-of-\d{{5}})?{suffix}", path) is not None
