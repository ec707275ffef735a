"""An index of weights, as strictly as any of its readers needs it: opening refuses what `reshard verify` reports.

The only parser of indexes. It reads nothing but the text; whether its files are there, and hold what it says, is for
those who read them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from posixpath import dirname, join, normpath
from sys import intern
from typing import Any

from reshard.pipeline.checkpoint.formats.pointers import refuse_pointer
from reshard.pipeline.checkpoint.formats.safetensors import refuse_unpaired
from reshard.pipeline.errors import BadIndex, UnsafePath


@dataclass(frozen=True, slots=True)
class Index:
    """What an index says, whose files may be anywhere."""

    path: str
    weight_map: Mapping[str, str]  # tensor -> file as written; never empty
    metadata: Mapping[str, Any] | None  # None: a bare map, or left out
    files: Mapping[str, str]  # file as written -> path from the root; those outside the index's folder have none

    def by_tensor(self) -> dict[str, str]:
        """{tensor: path from the root}; raises UnsafePath where a file is outside the index's folder."""
        if outside := {*self.weight_map.values()} - self.files.keys():
            raise UnsafePath(file=self.path, path=min(outside))
        return {intern(tensor): self.files[file] for tensor, file in self.weight_map.items()}


def named_weights(config: str, text: bytes) -> str:
    """The file of weights that the ``text`` of a config names, where transformers looks for it; empty for none."""
    try:
        named = load_json(text).get("transformers_weights")
    except (ValueError, AttributeError):
        return ""
    return normpath(join(dirname(config), named)) if isinstance(named, str) and named else ""


def parse_index(content: bytes, path: str) -> Index:
    """The index that ``content`` is; raises BadIndex, and LfsPointer for what stands in its place.

    Both shapes that loaders read are known: ``{"metadata", "weight_map"}``, and the bare map {tensor: file}.
    """
    refuse_pointer(content, path)
    try:
        data = load_json(content, _no_repeats)
        if b"\\u" in content:  # nearly never, and an index may have 40 MB to decode again
            refuse_unpaired(content.decode())
    except ValueError as error:
        raise BadIndex(file=path, why=f"not JSON ({str(error).splitlines()[0][:200]})") from None
    if not isinstance(data, dict):
        raise BadIndex(file=path, why="not a JSON object")
    bare = data.keys().isdisjoint({"weight_map", "metadata"})
    weight_map, metadata = (data, None) if bare else (data.get("weight_map"), data.get("metadata", None))
    if not isinstance(weight_map, dict) or {*map(type, weight_map.values())} - {str}:
        raise BadIndex(file=path, why="weight_map is not a map from tensors to files")
    if not weight_map:
        raise BadIndex(file=path, why="weight_map is empty")
    if "metadata" in data and not isinstance(metadata, dict):
        raise BadIndex(file=path, why="metadata is not a JSON object")
    inside = [file for file in {*weight_map.values()} if not leaves_folder(file)]
    # Loaders join the text as it is, and find no file behind `model.safetensors/`.
    if folders := [file for file in inside if file.endswith(("/", "/."))]:
        raise BadIndex(file=path, why=f"weight_map has {min(folders)!r}, which is not the path of a file")
    return Index(path, weight_map, metadata, {file: normpath(join(dirname(path), file)) for file in inside})


def leaves_folder(written: str) -> bool:
    """Whether a file name of an index points outside the index's folder, on any system; links are not followed."""
    return (
        not written.strip("./")
        or "\0" in written
        or any(
            path.is_absolute() or path.drive or ".." in path.parts
            for path in (PurePosixPath(written), PureWindowsPath(written))
        )
    )


def load_json(content: bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """``content`` as transformers' loaders read JSON: UTF-8, and nothing before it; ``pairs`` makes the objects.

    Raises ValueError, also for what is nested too deeply.
    """
    text = content.decode("utf-8")
    if text.startswith("\ufeff"):
        raise ValueError("starts with a byte order mark, which loaders reject")
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"duplicate key {key!r}")
    return document
