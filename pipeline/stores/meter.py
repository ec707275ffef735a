"""What a piece of work takes of others: calls to Hubs, and bytes of its sources, whichever step reads them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

from reshard.pipeline.protocols import Source
from reshard.pipeline.tensors import StoredFile


class Meter:
    """Counts, from any thread."""

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
        """``source``, whose reads count."""
        return Metered(source, self)


class Metered:
    """A Source that counts what is read of another."""

    def __init__(self, source: Source, meter: Meter) -> None:
        self.place, self.pin = source.place, source.pin
        self.transport, self.visibility = source.transport, source.visibility
        self._source, self._meter = source, meter

    def files(self) -> Mapping[str, StoredFile]:
        return self._source.files()

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[memoryview]:
        for view in self._source.read(file, start, stop):
            self._meter.came(len(view))
            yield view
