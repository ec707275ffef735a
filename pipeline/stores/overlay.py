"""A source that lacks a config or a tokenizer, and another repository that lends them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from reshard.pipeline.checkpoint.discover import foreign_format, is_weight_index
from reshard.pipeline.places import AnyPlace
from reshard.pipeline.protocols import Source, Visibility, reach
from reshard.pipeline.tensors import Pin, StoredFile


class Borrowing:
    """``own``, plus those files of ``lender`` that are not weights and that ``own`` does not have."""

    def __init__(self, own: Source, lender: Source) -> None:
        self.own = own
        self.lender = lender
        theirs = {path: file for path, file in lender.files().items() if not _is_weights(path)}
        self._lent = {path: file for path, file in theirs.items() if path not in own.files()}

    @property
    def place(self) -> AnyPlace:
        return self.own.place

    @property
    def pin(self) -> Pin:
        return self.own.pin

    @property
    def visibility(self) -> Visibility:
        """As hidden as the more hidden of the two."""
        return min(self.own.visibility, self.lender.visibility, key=reach)

    @property
    def transport(self) -> str:
        return self.own.transport

    def files(self) -> Mapping[str, StoredFile]:
        return {**self._lent, **self.own.files()}

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[memoryview]:
        return (self.lender if file.path in self._lent else self.own).read(file, start, stop)


def _is_weights(path: str) -> bool:
    return path.endswith(".safetensors") or foreign_format(path) is not None or is_weight_index(path)
