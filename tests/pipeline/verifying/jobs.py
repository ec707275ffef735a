"""Verifications that tests run in a process of their own, to see what they cost; nothing of the tests is imported."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from reshard.pipeline.checkpoint.discover import find_checkpoints
from reshard.pipeline.checkpoint.open import open_checkpoints
from reshard.pipeline.places import Folder, parse_place
from reshard.pipeline.stores.connect import Context, open_source
from reshard.pipeline.stores.folder.source import FolderSource
from reshard.pipeline.verifying.digests import digests
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.verify import verify


def do_digests(folder: str) -> int:
    """How many tensors have a digest."""
    source = FolderSource.open(Folder(path=folder))
    found = open_checkpoints(source, find_checkpoints(source))
    return len(digests(found.checkpoints[0], found.files, source))


def do_verify(output: str, source: str) -> list[dict[str, Any]]:
    """The checks of one repository against another, from headers."""
    context = Context.from_env()
    ours, theirs = (open_source(parse_place(place), context) for place in (output, source))
    with closing(MetaLoader()) as meta_loader:
        return [check.to_dict() for check in verify(ours, theirs, meta_loader)]
