"""What the files of a checkpoint are called, where loaders look for them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from posixpath import join

from reshard.pipeline.checkpoint.formats.safetensors import INDEX_SUFFIX, SUFFIX
from reshard.pipeline.tensors import Name

_NUMBER = re.compile(r"-[0-9]{5}-of-[0-9]{5}(?=\.[^./]+$)")
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


class PathsOf:
    """The paths of the indexes and shards of ``names``, whatever the numbers of their shards."""

    def __init__(self, names: Iterable[Name]) -> None:
        self._paths = {path for name in names for path in (shard_path(name, 1, 1), index_path(name))}

    def __contains__(self, path: str) -> bool:
        return path in self._paths or _NUMBER.sub("", path) in self._paths
