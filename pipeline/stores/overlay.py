"""A source that lacks a config or a tokenizer, and another repository that lends them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from reshard.pipeline.checkpoint.discover import foreign_format, is_weight_index
from reshard.pipeline.protocols import Source, Visibility, reach
from reshard.pipeline.tensors import StoredFile


class Borrowing:
    """``own``, plus those files of ``lender`` that are not weights and that ``own`` does not have."""

    def __init__(self, own: Source, lender: Source) -> None:
        self.own = own
        self.lender = lender
        self.place, self.pin, self.transport = own.place, own.pin, own.transport
        # As hidden as the more hidden of the two.
        self.visibility: Visibility = min(own.visibility, lender.visibility, key=reach)
        theirs = {path: file for path, file in lender.files().items() if not _is_weights(path)}
        self._lent = {path: file for path, file in theirs.items() if path not in own.files()}

    def files(self) -> Mapping[str, StoredFile]:
        return {**self._lent, **self.own.files()}

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[memoryview]:
        return (self.lender if file.path in self._lent else self.own).read(file, start, stop)


def _is_weights(path: str) -> bool:
    return path.endswith(".safetensors") or foreign_format(path) is not None or is_weight_index(path)
