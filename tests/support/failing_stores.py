"""Stores that spoil what passes through them, view by view, as a map of letters says.

    r  right: unchanged            f  flipped: one bit of the view is another
    E  error: HubUnreachable       s  shifted: the view without its first byte, and one byte more at its end
    d  dropped: the view is lost   D  doubled: the view comes twice

``"rrEr"`` spoils the third view; what follows the map is right. The letters of one map are used up across reads and
files, so a second attempt goes on where the first one stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from reshard.pipeline.errors import HubUnreachable
from reshard.pipeline.places import Folder, Hub
from reshard.pipeline.protocols import Batch, Sink, Source, Traffic, Visibility, Writer
from reshard.pipeline.tensors import Pin, StoredFile

LETTERS = "rEdDfs"


@dataclass
class Spoiler:
    """One map, and how far it is used up."""

    letters: str
    used: int = 0

    def __post_init__(self) -> None:
        if unknown := set(self.letters) - set(LETTERS):
            raise ValueError(f"no such letters: {unknown}")

    def views(self, view: memoryview) -> Iterator[memoryview]:
        """What becomes of the next view; an empty view uses up no letter."""
        if not view:
            return
        letter = self.letters[self.used] if self.used < len(self.letters) else "r"
        self.used += 1
        match letter:
            case "E":
                raise HubUnreachable(endpoint="a failing store", what="as its map says")
            case "d":
                return
            case "D":
                yield view
            case "f":
                changed = bytearray(view)
                changed[len(changed) // 2] ^= 1
                view = memoryview(changed)
            case "s":
                view = memoryview(bytes(view[1:]) + bytes([view[-1] ^ 0xFF]))
        yield view


class FailingSource:
    """A Source whose reads are spoiled."""

    def __init__(self, source: Source, letters: str) -> None:
        self._source = source
        self.spoiler = Spoiler(letters)

    @property
    def place(self) -> Hub | Folder:
        return self._source.place

    @property
    def pin(self) -> Pin:
        return self._source.pin

    @property
    def visibility(self) -> Visibility:
        return self._source.visibility

    @property
    def transport(self) -> str:
        return self._source.transport

    def files(self) -> Mapping[str, StoredFile]:
        return self._source.files()

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[memoryview]:
        for view in self._source.read(file, start, stop):
            yield from self.spoiler.views(view)


class FailingSink:
    """A Sink whose writes are spoiled; its shards keep their lengths where the map lets them."""

    def __init__(self, sink: Sink, letters: str) -> None:
        self._sink = sink
        self.spoiler = Spoiler(letters)

    def batch(self, reads: Sequence[StoredFile], source: Source | None = None) -> Batch:
        return _FailingBatch(self._sink.batch(reads, source), self.spoiler)


class _FailingBatch:
    def __init__(self, batch: Batch, spoiler: Spoiler) -> None:
        self._batch = batch
        self._spoiler = spoiler

    @property
    def traffic(self) -> Traffic:
        return self._batch.traffic

    def open(self, path: str, size: int) -> Writer:
        return _FailingWriter(self._batch.open(path, size), self._spoiler)

    def settle(self) -> list[StoredFile]:
        return self._batch.settle()

    def seal(self) -> list[StoredFile]:
        return self._batch.seal()

    def abort(self) -> None:
        self._batch.abort()


class _FailingWriter:
    def __init__(self, writer: Writer, spoiler: Spoiler) -> None:
        self._writer = writer
        self._spoiler = spoiler

    def write(self, view: memoryview) -> None:
        for spoiled in self._spoiler.views(view):
            self._writer.write(spoiled)

    def finish(self) -> str:
        return self._writer.finish()
