"""Sets of files that hold parts of tensors, as the processes of a training leave them: found by their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from posixpath import basename, dirname, join
from typing import Literal

from reshard.pipeline.errors import BadIndex
from reshard.pipeline.tensors import Name, StoredFile

Format = Literal["safetensors", "torch", "distributed", "ranks"]
WHOLE: frozenset[Format] = frozenset({"safetensors", "torch"})  # the others hold parts
Listing = Mapping[str, StoredFile]

DISTRIBUTED_METADATA = ".metadata"
# accelerate's folder for a model that it saved with FSDP's SHARDED_STATE_DICT; what it makes belongs one level up.
_FSDP_FOLDER = re.compile(r"pytorch_model_fsdp_\d+")
_RANK_FILE = re.compile(r"model_world_size_(?P<count>\d{1,6})_rank_(?P<rank>\d{1,6})\.pt")
# Where verl puts config and tokenizer, and itself the weights where it is told to save them whole.
_RANK_HOME = "huggingface"


@dataclass(frozen=True, slots=True)
class FileSet:
    """The files of one checkpoint, before they are looked into."""

    name: Name
    format: Format
    files: tuple[StoredFile, ...]
    index_path: str | None = None
    index_metadata: Mapping[str, object] | None = None
    weight_map: Mapping[str, str] | None = None  # tensor -> path from the root of the repository
    metadata: StoredFile | None = None  # of a distributed checkpoint: what says where its chunks lie


def find_parts(listing: Listing, wanted: Callable[[Name], bool]) -> Iterator[FileSet]:
    """Every such set of ``listing`` whose name is ``wanted``; raises BadIndex where one of them is not complete."""
    yield from (part for part in _distributed(listing) if wanted(part.name))
    for folder in sorted({dirname(path) for path in listing if _RANK_FILE.fullmatch(basename(path))}):
        home = join(folder, _RANK_HOME)
        name = Name(home if join(home, "config.json") in listing else folder, "model")
        if wanted(name):
            yield FileSet(name, "ranks", _ranks([file for path, file in listing.items() if dirname(path) == folder]))


def _distributed(listing: Listing) -> Iterator[FileSet]:
    for path in sorted(listing):
        folder = dirname(path)
        if basename(path) != DISTRIBUTED_METADATA or basename(folder).startswith("optimizer"):
            continue
        chunks = [file for p, file in sorted(listing.items()) if dirname(p) == folder and p.endswith(".distcp")]
        if chunks:
            home = dirname(folder) if _FSDP_FOLDER.fullmatch(basename(folder)) else folder
            yield FileSet(Name(home, "model"), "distributed", tuple(chunks), metadata=listing[path])


def _ranks(beside: Iterable[StoredFile]) -> tuple[StoredFile, ...]:
    """The files of the ranks among these, in order; raises BadIndex unless each is there once."""
    found: dict[int, StoredFile] = {}
    count = None
    for file in sorted(beside, key=lambda file: file.path):
        match = _RANK_FILE.fullmatch(basename(file.path))
        if match is None:
            continue
        rank, ranks = int(match["rank"]), int(match["count"])
        count = count or ranks
        if ranks != count:
            raise BadIndex(file=file.path, why=f"it is one of {ranks} ranks, and beside it lie files of {count}")
        if rank >= count or rank in found:
            raise BadIndex(file=file.path, why=f"of {count} ranks there is no such rank, or another file of it")
        found[rank] = file
    for rank in range(count or 0):
        if rank not in found:
            first = found[min(found)].path
            raise BadIndex(file=first, why=f"it is one of {count} ranks, and the file of rank {rank} is missing")
    return tuple(found[rank] for rank in sorted(found))
