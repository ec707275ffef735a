"""The copy loop: bytes move from a source to a sink, and independent digests prove that they arrived.

Each tensor is digested as it is read, and again as it is written, cut out of the stream by the header that was written
(hashing.py). A shard gets a receipt only when both agree and the store has answered for the whole batch. Source files
that are read whole are also hashed range by range, so that a tensor which another process copied, or this one before a
crash, is compared with the attested bytes. This thread reads; a lane behind it hashes and writes (stores/lane.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from reshard.pipeline.copying.hashing import (
    Compared,
    FileHasher,
    HashedRange,
    HashingWriter,
    Range,
    digests_differ,
    tensor_digest,
)
from reshard.pipeline.copying.stream import Scales, Stream, Tick, packed
from reshard.pipeline.limits import BATCH_MAX, SETTLE
from reshard.pipeline.planning.model import Cut, Entry, Group, Plan, Receipt, Shard
from reshard.pipeline.planning.ranges import Part, cuts_of, parts
from reshard.pipeline.protocols import Batch, Sink, Source
from reshard.pipeline.request import Options
from reshard.pipeline.stores.lane import Lane
from reshard.pipeline.stores.scratch import ScratchSpace
from reshard.pipeline.tensors import Attestation, ByteRange, Record, StoredFile

if TYPE_CHECKING:
    from reshard.pipeline.copying.casts import Caster
    from reshard.pipeline.copying.dequantize import Dequantizer

Reason = Literal["cancel", "lease", "drain", "yield", "stall"]


class Stopped(Exception):
    """Raised by a tick: the copy ends here, and what was stored stays stored."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


class Witness(NamedTuple):
    """The digest of one range of a tensor of shard ``shard``, taken while its source file was attested."""

    shard: int
    name: str
    number: int
    digest: str


class Moved(NamedTuple):
    """Bytes that moved: read from the source, sent to the target's store, and found there already."""

    read: int = 0
    uploaded: int = 0
    deduplicated: int = 0

    def plus(self, other: Moved) -> Moved:
        return Moved(*(a + b for a, b in zip(self, other, strict=True)))


class Attested(NamedTuple):
    """What a finished group can swear to: source files and how they were attested, and the ranges in them."""

    files: dict[str, Attestation]  # by path
    witnesses: tuple[Witness, ...]
    records: Compared = Compared()

    @staticmethod
    def from_json(files: dict[str, Attestation], witnesses: list[Any], records: Sequence[int]) -> Attested:
        """The same from what `json` made of the tuple."""
        return Attested(files, tuple(Witness(*witness) for witness in witnesses), Compared(*records))


def copy(
    plan: Plan,
    group: Group,
    shards: Mapping[int, Shard],
    source: Source,
    sink: Sink,
    receipts: Mapping[str, Receipt],
    stored: Callable[[list[Receipt], Moved], None],
    tick: Tick,
    disk: ScratchSpace | None = None,
    should_yield: Callable[[], bool] = lambda: False,
) -> Attested:
    """Copy those shards of ``group`` that have no receipt, and let the files that it attests pass whole.

    ``shards`` holds at least the group's own, by number. ``stored`` is called with the receipts of some shards and what
    moved for them once the store has answered for them, and with none for what was read after the last; ``tick`` with
    the bytes of each view, and raises Stopped to end the copy. On ``disk`` lies, while it is put in order, what one
    strided tensor spans. ``should_yield`` says after each shard whether the batch is to be stored as it is.
    Raises SourceCorrupt (what was stored of this group must then be forgotten), DigestsDiffer, and what stores raise.
    """
    todo = [shards[number] for number in group.shards if shards[number].digest not in receipts]
    cuts = chain(group.witnesses, *(cuts_of(number, shards[number]) for number in group.shards))
    hashers = file_hashers(plan.files, group.attests, plan.records, cuts)
    places = (place for shard in todo for part in parts(shard.entries) for place in part.places)
    with closing(Stream(source, plan.files, places, hashers, tick)) as stream:
        while todo:
            with closing(Lane("write")) as lane:
                copier = _Copier(plan, source, sink, stream, disk or ScratchSpace(), stored, should_yield, lane)
                todo = todo[copier.batch(_batch(todo)) :]
        stream.finish()
    if rest := stream.taken():
        stored([], Moved(read=rest))
    return Attested(
        {hasher.file.path: hasher.level for hasher in hashers.values()},
        tuple(Witness(*place, digest) for hasher in hashers.values() for place, digest in hasher.digests.items()),
        Compared.total(hasher.records for hasher in hashers.values()),
    )


def caster_of(entry: Entry, scales: Scales, *, strict: bool = False) -> Caster | Dequantizer | None:
    """What makes of the entry's bytes those that it wants; None where they are. ``scales`` has its own by then.

    Only what casts loads numpy.
    """
    if entry.scale is not None:
        from reshard.pipeline.copying.dequantize import Dequantizer

        return Dequantizer(entry, entry.scale, scales, strict=strict)
    if entry.cast:
        from reshard.pipeline.copying.casts import Caster

        return Caster(entry.name, entry.tensor.dtype, entry.as_dtype, strict=strict)
    return None


def file_hashers(
    files: Sequence[StoredFile], numbers: Iterable[int], records: Iterable[Record], cuts: Iterable[Cut] = ()
) -> dict[int, FileHasher]:
    """One for each of ``files`` that ``numbers`` names, with those of ``records`` and ``cuts`` that lie in it."""
    ranges: dict[int, list[HashedRange[Range]]] = {number: [] for number in numbers}
    own: dict[int, list[Record]] = {number: [] for number in ranges}
    for cut in cuts:
        if cut.file in ranges:
            ranges[cut.file].append(HashedRange(cut.start, cut.stop, (cut.shard, cut.name, cut.number)))
    for record in records:
        if record.file in own:
            own[record.file].append(record)
    return {number: FileHasher(files[number], ranges[number], own[number]) for number in ranges}


def _batch(todo: Sequence[Shard]) -> Sequence[Shard]:
    """The first shards of ``todo`` that are stored together, at least one."""
    fit = sum(size <= BATCH_MAX for size in accumulate(shard.size for shard in todo))
    return todo[: max(1, fit)]


@dataclass(frozen=True)
class _Copier:
    """Copies batch after batch of one group."""

    plan: Plan
    source: Source
    sink: Sink
    stream: Stream
    disk: ScratchSpace
    stored: Callable[[list[Receipt], Moved], None]
    should_yield: Callable[[], bool]
    lane: Lane

    def batch(self, shards: Sequence[Shard]) -> int:
        """Copy ``shards``, or the first of them where it should yield; returns how many."""
        reads = sorted({place.file for shard in shards for part in parts(shard.entries) for place in part.places})
        batch = self.sink.batch([self.plan.files[number] for number in reads], self.source)
        try:
            waiting: list[tuple[Shard, Copy]] = []
            done = 0
            for shard in shards:
                waiting.append((shard, self._shard(shard, batch)))
                done += 1
                if self.should_yield():
                    break
                if sum(one.size for one, _ in waiting) >= SETTLE:
                    waiting = self._receive(waiting, batch.settle(), batch)
            if self._receive(waiting, batch.seal(), batch):
                raise ValueError("a store confirmed fewer shards than it was given")
        except BaseException:
            self.lane.close()
            batch.abort()
            raise
        return done

    def _receive(
        self, waiting: list[tuple[Shard, Copy]], stored: Sequence[StoredFile], batch: Batch
    ) -> list[tuple[Shard, Copy]]:
        """Hand on the receipts of the first of those that wait for the store's answer; returns the rest."""
        receipts = [
            Receipt(
                shard.digest, file.size, file.sha256 or "", file.xet, one.tensors, one.ranges, one.overflows, one.hashes
            )
            for (shard, one), file in zip(waiting[: len(stored)], stored, strict=True)
        ]
        if receipts:
            self.stored(receipts, Moved(self.stream.taken(), batch.traffic.uploaded, batch.traffic.deduplicated))
        return waiting[len(stored) :]

    def _shard(self, shard: Shard, batch: Batch) -> Copy:
        written = HashingWriter(shard, batch.open(shard.path, shard.size), self.lane)
        one = Copy(written, self.stream, self.disk, self.plan.options)
        one.written.write(memoryview(shard.header))
        with closing(Scales(self.disk, parts(shard.entries))) as scales:
            for part in parts(shard.entries):
                one.copy(part, scales)
                if padding := shard.padding(part.entry):
                    one.written.write(memoryview(bytes(padding)))
        one.written.finish()
        one.check(shard)
        return one


@dataclass
class Copy:
    """One shard on its way: what its tensors were when they were read, and what became of them."""

    written: HashingWriter
    stream: Stream
    disk: ScratchSpace
    options: Options
    tensors: dict[str, str] = field(default_factory=dict)
    ranges: dict[str, list[str]] = field(default_factory=dict)  # of those that are not their bytes as they stand
    overflows: dict[str, int] = field(default_factory=dict)  # of those that are cast: values that became infinite
    hashes: dict[str, list[str]] = field(default_factory=dict)  # sha256 as written, and of a cast one as read

    def copy(self, part: Part, scales: Scales) -> None:
        """Read ``part`` and write it, in order and cast as its entry says; or keep it among ``scales``."""
        entry = part.entry
        plain = part.contiguous and len(part.places) == 1 and not (entry.cast or part.kept)
        take = self.stream.take if plain else partial(self._noted, entry.name)
        if part.kept:
            scales.keep(part, take)
            return
        digest = tensor_digest()
        caster = caster_of(entry, scales, strict=self.options.strict_dtype)
        as_written = hashlib.sha256() if self.options.tensor_hashes else None
        as_read = hashlib.sha256() if as_written and entry.cast and part.as_stored else None
        for view in packed(part, take, self.disk, scales, self.stream.tick):
            if as_read:
                as_read.update(view)
            for made in caster.feed(view) if caster else (view,):
                digest.update(made)
                if as_written:
                    as_written.update(made)
                self.written.write(made)
        if caster is not None:
            caster.finish()
            if caster.overflows:
                self.overflows[entry.name] = caster.overflows
        self.tensors[entry.name] = digest.hexdigest()
        if as_written:
            self.hashes[entry.name] = [total.hexdigest() for total in (as_written, as_read) if total]

    def check(self, shard: Shard) -> None:
        """Raises DigestsDiffer unless what was written is, tensor by tensor, what was read."""
        written = self.written.digests()
        differ = [entry.name for entry in shard.entries if written.get(entry.name) != self.tensors[entry.name]]
        if differ:
            raise digests_differ(shard, {name: (self.tensors[name], written.get(name, "nothing")) for name in differ})
        for name in self.tensors:  # equal, and 81 bytes each
            self.tensors[name] = written[name]

    def _noted(self, name: str, place: ByteRange) -> Iterator[memoryview]:
        digest = tensor_digest()
        for view in self.stream.take(place):
            digest.update(view)
            yield view
        self.ranges.setdefault(name, []).append(digest.hexdigest())
