"""What a file of a result may not be, or is warned of: its path, names, header and size, by format and target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from pathlib import PurePosixPath
from posixpath import dirname

from reshard.pipeline.arguments import as_option
from reshard.pipeline.checkpoint.open import Opened
from reshard.pipeline.errors import (
    BadSize,
    CarriedTooLarge,
    NameTooLong,
    NotRead,
    PathTaken,
    TooLargeForHub,
    UnsafeName,
    UnsafePath,
)
from reshard.pipeline.figures import human_bytes
from reshard.pipeline.limits import COMPONENT_MAX, HEADER_MAX, HUB_FILE_MAX, HUB_FOLDER_FILES_MAX, HUB_HTTP_MAX
from reshard.pipeline.places import NOWHERE, Place
from reshard.pipeline.planning.model import TORCHAO_NAMES, Entry, Shard
from reshard.pipeline.request import Options
from reshard.pipeline.tensors import Checkpoint, StoredFile
from reshard.pipeline.text import counted, printable, unsafe_path


def check_names(opened: Opened) -> None:
    """Raises UnsafePath, UnsafeName for names of the source that nobody should be shown from an index on the Hub."""
    for file in opened.files:
        if why := unsafe_path(file.path):
            raise UnsafePath(file="the source", path=repr(file.path), why=why)
    for checkpoint in opened.checkpoints:
        names = [tensor.name for tensor in checkpoint.tensors]
        if printable(together := "".join(names)) != together:  # all at once: there may be 500,000
            bad = next(tensor for tensor in checkpoint.tensors if printable(tensor.name) != tensor.name)
            where = next((piece.file for piece in bad.pieces), 0)
            raise UnsafeName(file=opened.files[where].path, tensor=repr(bad.name)[:300])


def check_torchao(checkpoint: Checkpoint, entries: Sequence[Entry], options: Options) -> None:
    """Raises NotRead for other names of tensors where torchao's metadata, by which loaders find them, has the old ones.

    A name there begins those of several tensors, so its new one does not follow from theirs.
    """
    if TORCHAO_NAMES not in checkpoint.file_metadata:
        return
    if {e.name: e.tensor.pieces for e in entries} != {t.name: t.pieces for t in checkpoint.tensors}:
        changed = ", ".join(map(as_option, options.altering("names", "set")))
        cure = f"remove {changed}; loaders find the tensors by the names in the files' metadata"
        raise NotRead(file=str(checkpoint.name), what=f"{changed} for a model quantized by torchao", cure=cure)


def check_paths(shards: Sequence[str], written: set[str], kept: Set[str], on_hub: bool) -> None:
    """Raises NameTooLong, PathTaken or, for the Hub, UnsafePath where what is written cannot be beside what is kept."""
    for path, times in Counter(shards).items():
        if times > 1:
            raise PathTaken(file=path, other="a shard of another checkpoint", why="they have the same path")
    for path in sorted(written):
        longest = max(len(part.encode()) for part in path.split("/"))
        if longest > COMPONENT_MAX:
            raise NameTooLong(file=path, bytes=longest, most=COMPONENT_MAX)
        if on_hub and (why := unsafe_path(path)):
            raise UnsafePath(file="the source", path=repr(path), why=why)
    for path in sorted(together := written | kept):
        for folder in PurePosixPath(path).parents:
            if (taken := folder.as_posix()) in together:
                raise PathTaken(file=path, other=taken, why="one is a file where the other needs a folder")


def check_headers(shards: Sequence[Shard], size: int) -> None:
    """Raises BadSize where readers of the format would refuse a file for the length of its header."""
    if (longest := max((len(shard.header) for shard in shards), default=0)) > HEADER_MAX:
        why = f"a file would have a header of {longest:,} bytes, and the format's limit is {HEADER_MAX:,}"
        raise BadSize(value=human_bytes(size), why=f"{why}; use a smaller size")


def check_sizes(shards: Sequence[Shard], carried: Sequence[StoredFile]) -> None:
    """Raises BadSize, TooLargeForHub, CarriedTooLarge for files that the Hub does not take."""
    for shard in shards:
        if shard.size > HUB_FILE_MAX:
            if len(shard.entries) > 1:
                most = f"the Hub accepts files of at most {HUB_FILE_MAX:,} bytes"
                raise BadSize(value=f"{shard.size:,} bytes", why=most)
            raise TooLargeForHub(tensor=shard.entries[0].name, bytes=shard.size, most=HUB_FILE_MAX)
    for file in carried:
        if file.size > HUB_FILE_MAX:
            raise CarriedTooLarge(file=file.path, bytes=file.size, most=HUB_FILE_MAX)


def warnings_of(shards: Sequence[Shard], carried: Sequence[StoredFile], target: Place) -> list[str]:
    """What the Hub makes of the files; elsewhere it does not matter, and without a target it may."""
    if not target.hub_noun and target != NOWHERE:
        return []
    notes = []
    for path, size in [*((s.path, s.size) for s in shards), *((f.path, f.size) for f in carried)]:
        if size > HUB_FILE_MAX:
            notes.append(f"{path} is {size:,} bytes, but the Hub accepts at most {HUB_FILE_MAX:,}")
        elif size > HUB_HTTP_MAX:
            notes.append(f"{path} is {size:,} bytes: clients without hf_xet can download at most {HUB_HTTP_MAX:,}")
    folders = Counter(dirname(shard.path) for shard in shards)
    return notes + [
        f"{folder or 'the root'} gets {counted(count, 'file')}, but the Hub accepts at most {HUB_FOLDER_FILES_MAX:,}"
        for folder, count in folders.items()
        if count > HUB_FOLDER_FILES_MAX
    ]
