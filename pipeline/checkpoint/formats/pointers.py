"""What a clone without git-lfs has in a large file's place: a few lines that name the file (git-lfs, docs/spec.md)."""

from __future__ import annotations

from reshard.pipeline.checkpoint.formats.ranged import Read, read_bytes
from reshard.pipeline.errors import LfsPointer
from reshard.pipeline.tensors import StoredFile

_BEGINNING = b"version https://git-lfs.github.com/spec/"
_POINTER_MAX = 1024  # bytes; the specification allows no longer ones


def refuse_pointer(head: bytes | memoryview, file: str) -> None:
    """Raises LfsPointer when a file begins as pointers do."""
    if bytes(head[: len(_BEGINNING)]) == _BEGINNING:
        raise LfsPointer(file=file)


def refuse_pointers(read: Read, *files: StoredFile) -> None:
    """Raises LfsPointer when one of ``files`` is one; reads only those that are short enough."""
    for file in files:
        if len(_BEGINNING) <= file.size <= _POINTER_MAX:
            refuse_pointer(read_bytes(read, file, 0, len(_BEGINNING)), file.path)
