"""What stores share of batches, and whole files through one, each held against what its source lists of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from reshard.pipeline.errors import OTHER_BYTES, ReshardError, SourceCorrupt
from reshard.pipeline.protocols import Batch, Source
from reshard.pipeline.tensors import StoredFile, git_blob


class SinkOf:
    """A Sink whose batches need not know what their shards are made of."""

    def __init__(self, new: Callable[[], Batch]) -> None:
        self._new = new

    def batch(self, reads: Sequence[StoredFile], source: Source | None = None) -> Batch:
        return self._new()


def send_whole(batch: Batch, files: Sequence[tuple[StoredFile, bytes | None]], source: Source) -> list[StoredFile]:
    """The stored ``files``, in order; bytes that are given are not read again.

    Raises SourceCorrupt where the git blob id or the sha256 that the source lists is another.
    """
    try:
        for file, content in files:
            writer = batch.open(file.path, file.size)
            blob = git_blob(file.size)
            for view in [memoryview(content)] if content is not None else source.read(file, 0, file.size):
                if file.oid:
                    blob.update(view)
                writer.write(view)
            writer.finish()
            compare_hash(file, file.oid, blob.hexdigest(), source)
        stored = batch.seal()
    finally:
        batch.abort()
    for (file, _), sent in zip(files, stored, strict=True):
        compare_hash(file, file.sha256, sent.sha256, source)
    return stored


def send_own(batch: Batch, contents: Mapping[str, bytes]) -> list[StoredFile]:
    """The stored files of our own, in order."""
    try:
        for path, content in contents.items():
            writer = batch.open(path, len(content))
            writer.write(memoryview(content))
            writer.finish()
        return batch.seal()
    finally:
        batch.abort()


def read_whole(file: StoredFile, source: Source) -> bytes:
    """A small file; raises SourceCorrupt where the git blob id that the source lists is another."""
    content = b"".join(source.read(file, 0, file.size))
    blob = git_blob(len(content))
    blob.update(content)
    compare_hash(file, file.oid, blob.hexdigest(), source)
    return content


def check_written(path: str, written: int, size: int) -> None:
    """Raises ReshardError unless a writer was handed all of the file that was announced."""
    if written != size:
        raise ReshardError(what=f"{path}: {written:,} of {size:,} bytes were written")


def compare_hash(file: StoredFile, expected: str | None, actual: str | None, source: Source) -> None:
    if expected and expected != actual:
        raise SourceCorrupt(file=file.path, place=str(source.place), expected=expected, actual=OTHER_BYTES)
