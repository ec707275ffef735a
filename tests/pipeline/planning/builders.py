"""Plans of sources whose headers were never written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from reshard.pipeline.checkpoint.discover import Found
from reshard.pipeline.checkpoint.open import Opened
from reshard.pipeline.places import Hub
from reshard.pipeline.planning.build import Known, make_plan
from reshard.pipeline.planning.existing import NOTHING, Before
from reshard.pipeline.planning.model import Keys, Plan
from reshard.pipeline.request import Options, Request
from reshard.pipeline.tensors import Checkpoint, Name, Piece, Pin, StoredFile, Tensor, size_in_bytes

PIN = Pin("https://hub", "a/b", "c" * 40)
sources = st.lists(st.lists(st.integers(0, 900), min_size=1, max_size=8), min_size=1, max_size=5)


def request(**options: Any) -> Request:
    return Request(source=Hub(repo="a/b"), target=Hub(repo="c/d"), options=Options(**options))


def opened_of(sizes: list[list[int]]) -> Opened:
    """Source files with tensors of these sizes, as if their headers had been read."""
    files, tensors = [], []
    for number, row in enumerate(sizes):
        at = 64
        for i, size in enumerate(row):
            tensors.append(Tensor(f"f{number}.t{i}", "U8", (size,), (Piece(number, at, (0,), (size,)),)))
            at += size
        files.append(StoredFile(f"part{number}.safetensors", at, sha256=f"{number:064x}"))
    checkpoint = Checkpoint(Name("", "model"), tuple(range(len(files))), tuple(tensors))
    return Opened(tuple(files), (checkpoint,), {})


def opened_named(named: Mapping[str, tuple[str, tuple[int, ...]]], file_of: int) -> Opened:
    """Source files of about ``file_of`` bytes with tensors of these dtypes and shapes."""
    files, tensors, at = list[StoredFile](), list[Tensor](), 64
    for name, (dtype, shape) in named.items():
        if at > file_of:
            files.append(StoredFile(f"part{len(files)}.safetensors", at, sha256=f"{len(files):064x}"))
            at = 64
        tensors.append(Tensor(name, dtype, shape, (Piece(len(files), at, (0,) * len(shape), shape),)))
        at += size_in_bytes(dtype, shape)
    files.append(StoredFile(f"part{len(files)}.safetensors", at, sha256=f"{len(files):064x}"))
    checkpoint = Checkpoint(Name("", "model"), tuple(range(len(files))), tuple(tensors))
    return Opened(tuple(files), (checkpoint,), {})


def plan_of(opened: Opened, before: Before = NOTHING, **options: Any) -> Plan:
    listing = {file.path: file for file in opened.files}
    keys = Keys("request", "weights")
    return make_plan(Known(request(**options), PIN, keys, Found((), frozenset()), opened, listing, before))
