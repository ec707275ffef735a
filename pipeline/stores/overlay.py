"""Sources over another one: what it lacks is lent by a second one, or what is read of it is counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

from reshard.pipeline.checkpoint.discover import is_weight_index
from reshard.pipeline.checkpoint.kinds import foreign_format
from reshard.pipeline.protocols import Source, Visibility, reach
from reshard.pipeline.tensors import StoredFile


class Over:
    """A Source that is ``own``, but for what a subclass says otherwise."""

    def __init__(self, own: Source) -> None:
        self.own = own
        self.place, self.pin, self.transport = own.place, own.pin, own.transport
        self.visibility: Visibility = own.visibility

    def files(self) -> Mapping[str, StoredFile]:
        return self.own.files()

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[memoryview]:
        return self.own.read(file, start, stop)


class Borrowing(Over):
    """``own``, plus those files of ``lender`` that are not weights and that ``own`` does not have."""

    def __init__(self, own: Source, lender: Source) -> None:
        super().__init__(own)
        self.lender = lender
        # As hidden as the more hidden of the two.
        self.visibility = min(own.visibility, lender.visibility, key=reach)
        theirs = {path: file for path, file in lender.files().items() if not _is_weights(path)}
        self._lent = {path: file for path, file in theirs.items() if path not in own.files()}

    def files(self) -> Mapping[str, StoredFile]:
        return {**self._lent, **self.own.files()}

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[memoryview]:
        return (self.lender if file.path in self._lent else self.own).read(file, start, stop)


def is_lent(source: Source, path: str) -> bool:
    """Whether the file there is the lender's, or of neither."""
    return path not in (source.own if isinstance(source, Borrowing) else source).files()


def _is_weights(path: str) -> bool:
    return path.endswith(".safetensors") or foreign_format(path) is not None or is_weight_index(path)


class Meter:
    """What a piece of work takes of others, from any thread and in whichever step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls = 0  # to Hubs, tries included; not those of hf_xet, which connects by itself
        self.read = 0  # bytes of sources

    def called(self) -> None:
        with self._lock:
            self.calls += 1

    def came(self, count: int) -> None:
        with self._lock:
            self.read += count

    def source(self, source: Source) -> Source:
        return Metered(source, self)


class Metered(Over):
    """A Source that counts what is read of another."""

    def __init__(self, own: Source, meter: Meter) -> None:
        super().__init__(own)
        self._meter = meter

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[memoryview]:
        for view in self.own.read(file, start, stop):
            self._meter.came(len(view))
            yield view
