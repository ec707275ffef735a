"""The copy loop: bytes move from a source to a sink, and independent taps say that they arrived.

The first tap follows what is read, range by range of the source; the second cuts what is written by parsing the
written header again (taps.py). A shard gets a receipt only when both agree and the store has answered for the whole
batch. A third one follows each source file that is read whole, beside its sha256, so that a tensor which another
process copied, or an earlier life of this one, is held against the attested bytes as well.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from reshard.pipeline.casts import Caster
from reshard.pipeline.errors import SourceChanged, TapsDiffer
from reshard.pipeline.gather import assemble, gather, windows
from reshard.pipeline.limits import BATCH_MAX, GATHER_WINDOW
from reshard.pipeline.plan import Cut, Group, Plan, Receipt, Shard
from reshard.pipeline.reads import Leg, Part, cuts_of, itinerary, parts, requests
from reshard.pipeline.stores.protocols import Sink, Source
from reshard.pipeline.taps import Range, Stretch, Tape, Written, tensor_digest
from reshard.pipeline.tensors import ByteRange, StoredFile

Tick = Callable[[int], None]
Reason = Literal["cancel", "lease", "drain", "yield", "stall"]


class Stopped(Exception):
    """Raised by a tick: the copy ends here, and what was sealed stays sealed."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


class Witness(NamedTuple):
    """The digest of one range of a tensor of shard ``shard``, taken while its source file was attested."""

    shard: int
    name: str
    number: int
    digest: str


class Attested(NamedTuple):
    """What a finished group can swear to: source files and how they were attested, and the ranges in them."""

    files: dict[str, str]  # path -> "checked" (the file's sha256) or "crc" (its records')
    witnesses: tuple[Witness, ...]


def copy(
    plan: Plan,
    group: Group,
    shards: Mapping[int, Shard],
    source: Source,
    sink: Sink,
    receipts: Mapping[str, Receipt],
    sealed: Callable[[list[Receipt]], None],
    tick: Tick,
    tmpdir: Path | None = None,
) -> Attested:
    """Copy those shards of ``group`` that have no receipt, and let the files that it attests pass whole.

    ``shards`` holds at least the group's own, by number. ``sealed`` is called with the receipts of each batch once
    the store has answered for it; ``tick`` with the bytes of each view, and raises Stopped to end the copy. In
    ``tmpdir`` lies, while it is put in order, what one strided tensor spans.
    Raises SourceCorrupt (what was sealed of this group must then be forgotten), TapsDiffer, and what stores raise.
    """
    todo = [shards[number] for number in group.shards if shards[number].digest not in receipts]
    cuts = [*group.witnesses, *(cut for number in group.shards for cut in cuts_of(number, shards[number]))]
    tapes = {number: _tape(plan, number, cuts) for number in group.attests}
    stream = _Stream(source, plan.files, itinerary(todo, tapes, plan.files), tapes, tick)
    for batch in _batches(todo):
        sealed(_copy_batch(plan, batch, source, sink, stream, tmpdir))
    stream.finish()
    return Attested(
        {tape.file.path: tape.level for tape in tapes.values()},
        tuple(Witness(*place, digest) for tape in tapes.values() for place, digest in tape.digests.items()),
    )


def _tape(plan: Plan, number: int, cuts: Iterable[Cut]) -> Tape:
    ranges = [Stretch(c.start, c.stop, Range(c.shard, c.name, c.number)) for c in cuts if c.file == number]
    return Tape(plan.files[number], ranges, [record for record in plan.records if record.file == number])


def _batches(todo: Sequence[Shard]) -> Iterator[list[Shard]]:
    batch: list[Shard] = []
    size = 0
    for shard in todo:
        if batch and size + shard.size > BATCH_MAX:
            yield batch
            batch, size = [], 0
        batch.append(shard)
        size += shard.size
    if batch:
        yield batch


def _copy_batch(
    plan: Plan, shards: Sequence[Shard], source: Source, sink: Sink, stream: _Stream, tmpdir: Path | None
) -> list[Receipt]:
    reads = sorted({place.file for shard in shards for part in parts(shard) for place in part.ranges})
    batch = sink.batch([plan.files[number] for number in reads], source)
    try:
        copies = []
        for shard in shards:
            writer = batch.open(shard.path, shard.size)
            one = _Copy(Written(shard, writer), stream, plan.options.strict_dtype, tmpdir)
            one.written.write(memoryview(shard.header))
            for part in parts(shard):
                one.copy(part)
            writer.finish()
            one.check(shard)
            copies.append(one)
        stored = batch.seal()
    except BaseException:
        batch.abort()
        raise
    return [
        Receipt(shard.digest, file.size, file.sha256 or "", file.xet, one.tensors, one.ranges, one.overflows)
        for shard, file, one in zip(shards, stored, copies, strict=True)
    ]


class _Copy:
    """One shard on its way: what its tensors were when they were read, and what became of them."""

    def __init__(self, written: Written, stream: _Stream, strict: bool, tmpdir: Path | None) -> None:
        self.written = written
        self.tensors: dict[str, str] = {}
        self.ranges: dict[str, list[str]] = {}  # of tensors whose ranges are not their bytes as they stand
        self.overflows: dict[str, int] = {}  # of cast tensors: values that became infinite
        self._stream = stream
        self._strict = strict
        self._tmpdir = tmpdir

    def copy(self, part: Part) -> None:
        """Read ``part`` and write it, in order and cast as its entry says."""
        entry = part.entry
        digest = tensor_digest()
        caster = Caster(entry.name, entry.tensor.dtype, entry.as_dtype, strict=self._strict) if entry.cast else None
        views = self._straight(part) if part.straight else self._gathered(part)
        for view in views:
            for made in caster.feed(view) if caster else (view,):
                digest.update(made)
                self.written.write(made)
        if caster is not None:
            caster.finish()
            if caster.overflows:
                self.overflows[entry.name] = caster.overflows
        self.tensors[entry.name] = digest.hexdigest()

    def check(self, shard: Shard) -> None:
        """Raises TapsDiffer unless what was written is, tensor by tensor, what was read."""
        written = self.written.digests()
        for entry in shard.entries:
            if written.get(entry.name) != self.tensors[entry.name]:
                after = written.get(entry.name, "nothing")
                raise TapsDiffer(tensor=entry.name, read=self.tensors[entry.name], written=after)

    def _straight(self, part: Part) -> Iterator[memoryview]:
        plain = len(part.ranges) == 1 and not part.entry.cast
        for place in part.ranges:
            if plain:
                yield from self._stream.take(place)
            else:
                yield from self._noted(part, place)

    def _noted(self, part: Part, place: ByteRange) -> Iterator[memoryview]:
        digest = tensor_digest()
        for view in self._stream.take(place):
            digest.update(view)
            yield view
        self.ranges.setdefault(part.entry.name, []).append(digest.hexdigest())

    def _gathered(self, part: Part) -> Iterator[memoryview]:
        """What the pieces span is laid down on the disk as it passes, so that it is read once and attested."""
        with tempfile.TemporaryFile(dir=self._tmpdir) as spool:
            starts: list[tuple[ByteRange, int]] = []
            for place in part.ranges:
                starts.append((place, spool.tell()))
                for view in self._noted(part, place):
                    spool.write(view)
            spool.flush()
            tensor = part.entry.tensor
            for window in windows(tensor, GATHER_WINDOW):
                made = assemble(gather(tensor, window), lambda *place: _read_spool(spool, starts, ByteRange(*place)))
                yield memoryview(made)


def _read_spool(spool: BinaryIO, starts: Sequence[tuple[ByteRange, int]], wanted: ByteRange) -> Iterator[memoryview]:
    for place, at in starts:
        if place.file == wanted.file and place.start <= wanted.start and wanted.stop <= place.stop:
            yield memoryview(os.pread(spool.fileno(), wanted.stop - wanted.start, at + wanted.start - place.start))
            return
    raise AssertionError(f"{wanted} lies in no range that its tensor spans")


class _Stream:
    """Carries out an itinerary: one request at a time, every byte to the tapes, wanted bytes to whoever takes them."""

    def __init__(
        self,
        source: Source,
        files: Sequence[StoredFile],
        legs: Sequence[Leg],
        tapes: Mapping[int, Tape],
        tick: Tick,
    ) -> None:
        self._place = str(source.place)
        self._source = source
        self._files = files
        self._tapes = tapes
        self._tick = tick
        self._wanted = self._walk(legs)
        self._view = memoryview(b"")

    def take(self, place: ByteRange) -> Iterator[memoryview]:
        """The bytes of ``place``, which must be what the itinerary wants next."""
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
            raise AssertionError("the itinerary brings bytes that no shard wants")

    def _walk(self, legs: Sequence[Leg]) -> Iterator[memoryview]:
        """Every view of every wanted leg; what is not wanted only passes the tapes."""
        for request in requests(legs):
            number = request[0].file
            file, tape, at = self._files[number], self._tapes.get(number), request[0].start
            views = self._source.read(file, at, request[-1].stop)
            view = memoryview(b"")
            for leg in request:
                while at < leg.stop:
                    if not view:
                        view = self._next(views, file, at)
                    some, view = view[: leg.stop - at], view[leg.stop - at :]
                    if tape is not None and leg.fresh < at + len(some):
                        skip = max(0, leg.fresh - at)
                        tape.feed(at + skip, some[skip:], self._place)
                    at += len(some)
                    if leg.wanted:
                        yield some
            if view or next(views, None) is not None:
                raise SourceChanged(place=self._place, what=f"{file.path} gave more bytes than were asked for")

    def _next(self, views: Iterator[memoryview], file: StoredFile, at: int) -> memoryview:
        view = next(views, None)
        if view is None:
            raise SourceChanged(place=self._place, what=f"{file.path} ended at byte {at}")
        self._tick(len(view))
        return view
