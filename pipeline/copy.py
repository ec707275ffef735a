"""The copy loop: bytes move from a source to a sink, and two independent taps say that they arrived.

The first tap cuts what is read into tensors by the offsets of the source; the second cuts what is written by parsing
the written header again. A shard gets a receipt only when both agree and the store has answered for the whole batch.
A third tap follows each source file that is read whole, beside its sha256, so that a tensor which another process
copied, or an earlier life of this one, is held against the attested bytes as well.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import xxhash

from reshard.pipeline.errors import SourceChanged, SourceCorrupt, TapsDiffer
from reshard.pipeline.formats.safetensors import LENGTH_BYTES, parse_header
from reshard.pipeline.limits import BATCH_MAX
from reshard.pipeline.plan import Cut, Group, Plan, Receipt, Shard
from reshard.pipeline.reads import Leg, itinerary, requests
from reshard.pipeline.stores.protocols import Sink, Source, Writer
from reshard.pipeline.tensors import StoredFile

Tick = Callable[[int], None]
Reason = Literal["cancel", "lease", "drain", "yield", "stall"]


class Stopped(Exception):
    """Raised by a tick: the copy ends here, and what was sealed stays sealed."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


class Witness(NamedTuple):
    """The digest of one tensor of shard number ``shard``, taken while its source file passed its sha256."""

    shard: int
    name: str
    digest: str


class Attested(NamedTuple):
    """What a finished group can swear to: the source files that matched their sha256, and what passed in them."""

    files: tuple[str, ...]
    witnesses: tuple[Witness, ...]


class _Cutter:
    """xxh3-128 digests of stretches of a stream, which may arrive in any order but each stretch front to back."""

    def __init__(self, cuts: Iterable[tuple[int, int, str]]) -> None:
        ordered = sorted(cuts)
        self.digests = {key: xxhash.xxh3_128_hexdigest(b"") for start, stop, key in ordered if start == stop}
        self._cuts = [cut for cut in ordered if cut[0] < cut[1]]
        self._starts = [start for start, _, _ in self._cuts]
        self._running: dict[int, tuple[int, xxhash.xxh3_128]] = {}

    def feed(self, at: int, view: memoryview) -> None:
        """``view`` is what the stream holds from byte ``at`` on; what belongs to no stretch is passed over."""
        while view:
            i = bisect_right(self._starts, at) - 1
            if i < 0 or at >= self._cuts[i][1]:
                next_start = self._starts[i + 1] if i + 1 < len(self._starts) else at + len(view)
                step = min(len(view), next_start - at)
            else:
                step = min(len(view), self._cuts[i][1] - at)
                self._update(i, at, view[:step])
            at, view = at + step, view[step:]

    def _update(self, i: int, at: int, view: memoryview) -> None:
        start, stop, key = self._cuts[i]
        expected, digest = self._running.pop(i, (start, None))
        if at != expected:
            return  # the rest of a stretch whose beginning went by elsewhere says nothing
        digest = digest or xxhash.xxh3_128()
        digest.update(view)
        if at + len(view) == stop:
            self.digests[key] = digest.hexdigest()
        else:
            self._running[i] = (at + len(view), digest)


class _Tape:
    """A source file on its way through its sha256."""

    def __init__(self, file: StoredFile, cuts: Iterable[tuple[int, int, str]]) -> None:
        self.file = file
        self.cutter = _Cutter(cuts)
        self._sha256 = hashlib.sha256()
        self._passed = 0

    def feed(self, at: int, view: memoryview, place: object) -> None:
        assert at == self._passed, "an itinerary brings every byte once and in order"
        self._sha256.update(view)
        self.cutter.feed(at, view)
        self._passed += len(view)
        if self._passed == self.file.size and self._sha256.hexdigest() != self.file.sha256:
            raise SourceCorrupt(
                file=self.file.path, place=str(place), expected=self.file.sha256, actual=self._sha256.hexdigest()
            )


class _Written:
    """The second tap: sits between the loop and the writer and re-reads the header that goes by."""

    def __init__(self, shard: Shard, writer: Writer) -> None:
        self._shard = shard
        self._writer = writer
        self._head = bytearray()
        self._cutter: _Cutter | None = None
        self._at = 0

    def write(self, view: memoryview) -> None:
        self._writer.write(view)
        if self._cutter is None:
            view = self._collect_header(view)
        if self._cutter is not None and view:
            self._cutter.feed(self._at, view)
            self._at += len(view)

    def _collect_header(self, view: memoryview) -> memoryview:
        """Takes the header's bytes off the front of ``view``; returns the data that follows it."""
        while view:
            end = LENGTH_BYTES
            if len(self._head) >= LENGTH_BYTES:
                end += int.from_bytes(self._head[:LENGTH_BYTES], "little")
                if len(self._head) == end:
                    break
            step = min(len(view), end - len(self._head))
            self._head += view[:step]
            view = view[step:]
        if len(self._head) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._head[:LENGTH_BYTES], "little")
            if len(self._head) == end:
                header = parse_header(bytes(self._head), file=self._shard.path, file_size=self._shard.size)
                self._cutter = _Cutter((spec.start, spec.stop, name) for name, spec in header.tensors.items())
                self._at = end
        return view

    def digests(self) -> dict[str, str]:
        return self._cutter.digests if self._cutter else {}


def copy(
    plan: Plan,
    group: Group,
    shards: Mapping[int, Shard],
    source: Source,
    sink: Sink,
    receipts: Mapping[str, Receipt],
    sealed: Callable[[list[Receipt]], None],
    tick: Tick,
) -> Attested:
    """Copy those shards of ``group`` that have no receipt, and let the group's files pass their sha256.

    ``shards`` holds at least the group's own, by number. ``sealed`` is called with the receipts of each batch once
    the store has answered for it; ``tick`` with the bytes of each view, and raises Stopped to end the copy.
    Raises SourceCorrupt (what was sealed of this group must then be forgotten), TapsDiffer, and what stores raise.
    """
    todo = [(number, shards[number]) for number in group.shards if shards[number].digest not in receipts]
    attests = [number for number in group.attests if plan.files[number].sha256 is not None]
    legs = itinerary([shard for _, shard in todo], attests, plan.files)
    tapes = _tapes(plan, group, shards, attests)
    stream = _Stream(source, plan.files, legs, tapes, tick)
    for batch in _batches(todo):
        sealed(_copy_batch(plan, [shard for _, shard in batch], source, sink, stream))
    stream.finish()
    files = tuple(plan.files[number].path for number in attests)
    witnesses = tuple(
        Witness(int(number), name, digest)
        for tape in tapes.values()
        for key, digest in tape.cutter.digests.items()
        for number, _, name in [key.partition(":")]
    )
    return Attested(files, witnesses)


def _batches(todo: Sequence[tuple[int, Shard]]) -> Iterator[list[tuple[int, Shard]]]:
    batch: list[tuple[int, Shard]] = []
    size = 0
    for number, shard in todo:
        if batch and size + shard.size > BATCH_MAX:
            yield batch
            batch, size = [], 0
        batch.append((number, shard))
        size += shard.size
    if batch:
        yield batch


def _tapes(plan: Plan, group: Group, shards: Mapping[int, Shard], attests: Iterable[int]) -> dict[int, _Tape]:
    cuts = list(group.witnesses)
    for number in group.shards:
        for entry in shards[number].entries:
            if (place := entry.tensor.range) is not None and not entry.cast:
                cuts.append(Cut(number, entry.name, *place))
    return {
        number: _Tape(plan.files[number], [(c.start, c.stop, f"{c.shard}:{c.name}") for c in cuts if c.file == number])
        for number in attests
    }


def _copy_batch(plan: Plan, shards: Sequence[Shard], source: Source, sink: Sink, stream: _Stream) -> list[Receipt]:
    reads = sorted({piece.file for shard in shards for entry in shard.entries for piece in entry.tensor.pieces})
    batch = sink.batch([plan.files[number] for number in reads])
    try:
        digests = []
        for shard in shards:
            writer = batch.open(shard.path, shard.size)
            written = _Written(shard, writer)
            written.write(memoryview(shard.header))
            read = stream.copy_into(shard, written)
            writer.finish()
            digests.append(_agreed(shard, read, written.digests()))
        stored = batch.seal()
    except BaseException:
        batch.abort()
        raise
    return [
        Receipt(shard.digest, file.size, file.sha256 or "", file.xet, tensors)
        for shard, file, tensors in zip(shards, stored, digests, strict=True)
    ]


def _agreed(shard: Shard, read: Mapping[str, str], written: Mapping[str, str]) -> dict[str, str]:
    for entry in shard.entries:
        before, after = read.get(entry.name, "nothing"), written.get(entry.name, "nothing")
        if before != after:
            raise TapsDiffer(tensor=entry.name, read=before, written=after)
    return dict(read)


class _Stream:
    """Carries out an itinerary: one request at a time, every byte to the tapes, copied bytes to a shard as well."""

    def __init__(
        self,
        source: Source,
        files: Sequence[StoredFile],
        legs: Sequence[Leg],
        tapes: Mapping[int, _Tape],
        tick: Tick,
    ) -> None:
        self._source = source
        self._files = files
        self._tapes = tapes
        self._tick = tick
        self._views = self._walk(legs)

    def _walk(self, legs: Sequence[Leg]) -> Iterator[tuple[Leg, int, memoryview]]:
        """Every view of every leg, with the byte of the file at which it starts."""
        for request in requests(legs):
            file = request[0].file
            views = self._source.read(self._files[file], request[0].start, request[-1].stop)
            at = request[0].start
            view = memoryview(b"")
            for leg in request:
                while at < leg.stop:
                    if not view:
                        view = self._next(views, file, at)
                    part, view = view[: leg.stop - at], view[leg.stop - at :]
                    if leg.fresh < at + len(part) and file in self._tapes:
                        skip = max(0, leg.fresh - at)
                        self._tapes[file].feed(at + skip, part[skip:], self._source.place)
                    yield leg, at, part
                    at += len(part)
            if view or next(views, None) is not None:
                raise SourceChanged(
                    place=str(self._source.place), what=f"{self._files[file].path} gave more bytes than asked for"
                )

    def _next(self, views: Iterator[memoryview], file: int, at: int) -> memoryview:
        view = next(views, None)
        if view is None:
            raise SourceChanged(place=str(self._source.place), what=f"{self._files[file].path} ended at byte {at}")
        self._tick(len(view))
        return view

    def copy_into(self, shard: Shard, written: _Written) -> dict[str, str]:
        """Write the data of ``shard``; returns the first tap's digest of each of its tensors."""
        cutters: dict[int, _Cutter] = {}
        ranges = [(entry.name, place) for entry in shard.entries if (place := entry.tensor.range)]
        for number in {place.file for _, place in ranges}:
            cutters[number] = _Cutter((p.start, p.stop, name) for name, p in ranges if p.file == number)
        left = shard.size - len(shard.header)
        while left:
            leg, at, view = next(self._views)
            if leg.copied:
                cutters[leg.file].feed(at, view)
                written.write(view)
                left -= len(view)
        return {name: digest for cutter in cutters.values() for name, digest in cutter.digests.items()}

    def finish(self) -> None:
        """What is left to be hashed once everything is copied."""
        for _ in self._views:
            pass
