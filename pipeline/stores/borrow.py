"""A source that lacks a config or a tokenizer, and another repository that lends them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from reshard.pipeline.find import foreign_format, is_weight_index
from reshard.pipeline.places import Folder, Hub
from reshard.pipeline.stores.protocols import Source, Visibility
from reshard.pipeline.tensors import Pin, StoredFile


class Borrowing:
    """``own`` with those files of ``lender`` that are no weights and that ``own`` does not have itself."""

    def __init__(self, own: Source, lender: Source) -> None:
        self._own = own
        self.lender = lender
        theirs = {path: file for path, file in lender.files().items() if not _is_weights(path)}
        self._lent = {path: file for path, file in theirs.items() if path not in own.files()}

    @property
    def place(self) -> Hub | Folder:
        return self._own.place

    @property
    def pin(self) -> Pin:
        return self._own.pin

    @property
    def visibility(self) -> Visibility:
        """As hidden as the more hidden of the two."""
        order: tuple[Visibility, ...] = ("private", "gated", "public")
        return min(self._own.visibility, self.lender.visibility, key=order.index)

    @property
    def transport(self) -> str:
        return self._own.transport

    def files(self) -> Mapping[str, StoredFile]:
        return {**self._lent, **self._own.files()}

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[memoryview]:
        return (self.lender if file.path in self._lent else self._own).read(file, start, stop)


def _is_weights(path: str) -> bool:
    return path.endswith(".safetensors") or foreign_format(path) is not None or is_weight_index(path)
