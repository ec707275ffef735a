"""Bytes on their way from a source: a read plan carried out, and the packed bytes of a tensor however it is stored."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import NamedTuple

from reshard.pipeline.copying.hashing import FileHasher
from reshard.pipeline.errors import SourceChanged
from reshard.pipeline.limits import CHUNK, GATHER_WINDOW, SCALED_WINDOW
from reshard.pipeline.planning.ranges import Part, adjoining, read_segments
from reshard.pipeline.protocols import Source
from reshard.pipeline.stores.scratch import ScratchFile, ScratchSpace
from reshard.pipeline.tensors import ByteRange, Piece, StoredFile, Tensor

Tick = Callable[[int], None]
Take = Callable[[ByteRange], Iterator[memoryview]]


class LaidDown(NamedTuple):
    """A tensor whose pieces lie in a temporary file."""

    tensor: Tensor
    scratch: ScratchFile


class Scales:
    """The scales of some weights on ``disk``, by name, from when they pass until their weights do."""

    def __init__(self, disk: ScratchSpace, parts: Iterable[Part]) -> None:
        self._disk = disk
        self._size = sum(part.span for part in parts if part.kept)
        self._scratch: ScratchFile | None = None
        self._end = 0
        self.kept: dict[str, LaidDown] = {}

    def keep(self, part: Part, take: Take) -> None:
        """Lay down what ``take`` gives of ``part``; raises DiskFull."""
        if self._scratch is None:
            self._scratch = self._disk.open(self._size)
        self.kept[part.entry.name] = laid_down(part, take, self._scratch, self._end)
        self._end += part.span

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.close()


def laid_down(part: Part, take: Take, scratch: ScratchFile, at: int) -> LaidDown:
    """What ``take`` gives of ``part``, written to ``scratch``, which ends at byte ``at``."""
    tensor, pieces = part.entry.stored, []
    if part.contiguous:
        pieces.append(Piece(0, at, (0,) * len(tensor.shape), tensor.shape))
    for number, place in enumerate(part.ranges):
        if not part.contiguous:
            pieces.append(tensor.pieces[number]._replace(offset=at))
        at += place.stop - place.start
        for view in take(place):
            scratch.write(view)
    return LaidDown(tensor._replace(pieces=tuple(pieces)), scratch)


def packed(part: Part, take: Take, disk: ScratchSpace, scales: Scales, tick: Tick) -> Iterator[memoryview]:
    """The tensor's bytes, packed, little-endian and in C order; ``take`` gives each of the part's places in turn.

    What the pieces of a strided tensor span is laid down on ``disk`` as it passes, so that it is read once; and so is a
    tensor whose scale comes after it, which is then among ``scales``. Raises DiskFull, and what ``take`` does.
    """
    if part.contiguous and not part.after:
        for place in part.ranges:
            yield from take(place)
        return
    from reshard.pipeline.copying.gather import gather, windows  # with numpy, which others do without

    with closing(disk.open(part.span)) as scratch:
        tensor = laid_down(part, take, scratch, 0).tensor
        if part.after:
            scales.kept[part.after.entry.name] = laid_down(part.after, take, scratch, part.span - part.after.span)
        # One window for all, handed on in small copies: a view must not change behind those that still hash or write
        # it, and a window beside the one before it would double what is held.
        most = SCALED_WINDOW if part.entry.scale else GATHER_WINDOW
        buffer = bytearray(min(most, tensor.size))
        for window in windows(tensor, most):
            made = gather(tensor, window, scratch.read_into, buffer)
            tick(0)  # nothing was read of the source, and it may have taken a while
            for at in range(0, len(made), CHUNK):
                yield memoryview(bytes(made[at : at + CHUNK]))


class Stream:
    """Reads ``places`` in their order: one request at a time, every byte to the hashers, wanted bytes to the caller."""

    def __init__(
        self,
        source: Source,
        files: Sequence[StoredFile],
        places: Iterable[ByteRange],
        hashers: Mapping[int, FileHasher],
        tick: Tick,
    ) -> None:
        self._place = str(source.place)
        self._source = source
        self._files = files
        self._hashers = hashers
        self.tick = tick
        self._wanted = self._walk(places)
        self._view = memoryview(b"")
        self._read = 0

    def taken(self) -> int:
        """Bytes that were read since this was last asked."""
        read, self._read = self._read, 0
        return read

    def take(self, place: ByteRange) -> Iterator[memoryview]:
        """The bytes of ``place``, which must be what the read plan wants next."""
        left = place.stop - place.start
        while left:
            if not self._view:
                self._view = next(self._wanted)
            view, self._view = self._view[:left], self._view[left:]
            left -= len(view)
            yield view

    def finish(self) -> None:
        """What is left to be attested once everything is copied."""
        for _ in self._wanted:
            raise AssertionError("the read plan brings bytes that no shard wants")

    def close(self) -> None:
        """Give up what is open of the source, wherever the copy ended."""
        self._wanted.close()

    def _walk(self, places: Iterable[ByteRange]) -> Generator[memoryview, None, None]:
        """Every view of every wanted segment; what is not wanted only passes the hashers."""
        passing = {number: hasher.passes for number, hasher in self._hashers.items()}
        for request in adjoining(read_segments(places, passing)):
            number = request[0].file
            file, hasher, at = self._files[number], self._hashers.get(number), request[0].start
            with _ended(self._source.read(file, at, request[-1].stop)) as views:
                view = memoryview(b"")
                for segment in request:
                    while at < segment.stop:
                        if not view:
                            view = self._next(views, file, at)
                        some, view = view[: segment.stop - at], view[segment.stop - at :]
                        if hasher is not None and segment.fresh < at + len(some):
                            skip = max(0, segment.fresh - at)
                            hasher.feed(at + skip, some[skip:], self._place)
                        at += len(some)
                        if segment.wanted:
                            yield some
                if view or next(views, None) is not None:
                    raise SourceChanged(place=self._place, what=f"{file.path} returned more bytes than requested")

    def _next(self, views: Iterator[memoryview], file: StoredFile, at: int) -> memoryview:
        view = next(views, None)
        if view is None:
            raise SourceChanged(place=self._place, what=f"{file.path} ended at byte {at}")
        self._read += len(view)
        self.tick(len(view))
        return view


@contextmanager
def _ended(views: Iterator[memoryview]) -> Iterator[Iterator[memoryview]]:
    """``views``, closed after the body: what an error's traceback refers to would stay open as long as the error."""
    try:
        yield views
    finally:
        if isinstance(views, Generator):
            views.close()
