"""Indexes, configs and manifests: files that are read whole, and therefore have a limit."""

from __future__ import annotations

from reshard.pipeline.errors import BadIndex
from reshard.pipeline.protocols import Source
from reshard.pipeline.tensors import StoredFile


def read_file(source: Source, file: StoredFile, most: int) -> bytes:
    """The whole of a small file; raises BadIndex when it is larger than ``most`` bytes."""
    if file.size > most:
        raise BadIndex(file=file.path, why=f"{file.size:,} bytes, and the limit for such a file is {most:,}")
    return b"".join(source.read(file, 0, file.size))
