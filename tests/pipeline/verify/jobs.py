"""Verifications that tests run in a process of their own, to see what they cost; nothing of the tests is imported."""

from __future__ import annotations

from reshard.pipeline.find import find_checkpoints
from reshard.pipeline.open import open_checkpoints
from reshard.pipeline.places import Folder
from reshard.pipeline.stores.folder import FolderSource
from reshard.pipeline.verify.digests import digests


def do_digests(folder: str) -> int:
    """How many tensors have a digest."""
    source = FolderSource.open(Folder(path=folder))
    found = open_checkpoints(source, find_checkpoints(source))
    return len(digests(found.checkpoints[0], found.files, source))
