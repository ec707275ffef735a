"""Digests of ranges of a stream that goes by: what was read, what was written, what an archive's own sums say."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import xxhash

from reshard.pipeline.check import failed
from reshard.pipeline.checkpoint.formats.headers import parse_header
from reshard.pipeline.errors import OTHER_BYTES, DigestsDiffer, SourceCorrupt
from reshard.pipeline.planning.model import Shard
from reshard.pipeline.planning.ranges import attested
from reshard.pipeline.protocols import Writer
from reshard.pipeline.stores.lane import Lane
from reshard.pipeline.tensors import Attestation, Record, StoredFile

COPY = "copy"  # the check's name
COPY_LEVEL = "the bytes of every tensor, on read and on write"
SOURCE_LEVEL = "each file by its sha256, or by its archive's checksums"

K = TypeVar("K", bound=Hashable)


def tensor_digest() -> xxhash.xxh3_128:
    """The digest of a tensor's bytes that receipts and manifests hold: xxh3-128."""
    return xxhash.xxh3_128()


class Crc32:
    """CRC-32 as zip archives keep it, 8 hexadecimal digits."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, view: memoryview) -> None:
        self._value = zlib.crc32(view, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


Sum = xxhash.xxh3_128 | Crc32  # a running checksum


class HashedRange(NamedTuple, Generic[K]):
    """``start <= byte < stop`` of a stream, and what its digest is filed under."""

    start: int
    stop: int
    key: K


class RangeHasher(Generic[K]):
    """The digest of every range of a stream that comes in order; ranges may overlap, or be the same.

    >>> hasher = RangeHasher([HashedRange(0, 6, "all"), HashedRange(2, 5, "cde")], xxhash.xxh3_128)
    >>> for at, chunk in [(0, b"abc"), (3, b"def")]:
    ...     hasher.feed(at, memoryview(chunk))
    >>> hasher.digests["cde"] == xxhash.xxh3_128(b"cde").hexdigest()
    True
    """

    def __init__(self, ranges: Iterable[HashedRange[K]], new: Callable[[], Sum]) -> None:
        self._new = new
        empty = new().hexdigest()  # once: there may be 500,000
        self.digests: dict[K, str] = {}
        self._waiting: list[HashedRange[K]] = []
        for one in ranges:
            if one.start < one.stop:
                self._waiting.append(one)
            else:
                self.digests[one.key] = empty
        self._waiting.sort(key=lambda one: (one.start, one.stop), reverse=True)  # the next one last
        self._open: list[tuple[HashedRange[K], Sum]] = []

    def feed(self, at: int, view: memoryview) -> None:
        """``view`` is what the stream holds from byte ``at`` on."""
        end = at + len(view)
        while self._waiting and self._waiting[-1].start < end:
            self._open.append((self._waiting.pop(), self._new()))
        still: list[tuple[HashedRange[K], Sum]] = []
        for range_, total in self._open:
            total.update(view[max(0, range_.start - at) : range_.stop - at])
            if range_.stop <= end:
                self.digests[range_.key] = total.hexdigest()
            else:
                still.append((range_, total))
        self._open = still


Range = tuple[int, str, int]  # the number of a shard, a tensor of it, and the number of one of that tensor's ranges


class Compared(NamedTuple):
    """Records of archives that were held against their CRCs, of those there are."""

    compared: int = 0
    there: int = 0

    @staticmethod
    def total(parts: Iterable[Compared]) -> Compared:
        each = list(parts)
        return Compared(sum(part.compared for part in each), sum(part.there for part in each))

    def figures(self) -> dict[str, int]:
        """What a check reports; nothing where no archive is."""
        return {"records": self.there, "records_compared": self.compared} if self.there else {}


class FileHasher:
    """A source file that passes: through its sha256, its records' CRCs, and a digest of each tensor's ranges.

    ``passes`` is what has to pass of it, whole and in order.
    """

    def __init__(self, file: StoredFile, ranges: Iterable[HashedRange[Range]], records: Sequence[Record]) -> None:
        self.file = file
        self._sha256 = hashlib.sha256() if file.sha256 else None
        self._ranges = RangeHasher(ranges, tensor_digest)
        self.digests = self._ranges.digests
        self._records = frozenset() if file.sha256 else frozenset(records)
        # Filed under the record itself: all archives of a `.distcp` file call their only storage by the same name.
        self._sums = RangeHasher((HashedRange(r.start, r.stop, r) for r in self._records if r.crc32 is not None), Crc32)
        self.passes = attested(file, records)
        self._passed = self.passes.start

    @property
    def level(self) -> Attestation:
        """What the file's bytes were held against once it has passed; one record without a sum leaves it open."""
        if self._sha256 is not None:
            return "checked"
        return "crc" if self.records.compared == self.records.there > 0 else "as delivered"

    @property
    def records(self) -> Compared:
        """The records held against their CRCs until now, of those that stand for the file's bytes."""
        return Compared(len(self._sums.digests), len(self._records))

    def feed(self, at: int, view: memoryview, place: str) -> None:
        """The bytes from ``at`` on, which follow what passed before; raises SourceCorrupt, naming file and place.

        What follows ``passes`` is not looked at.
        """
        view = view[: max(0, self.passes.stop - at)]
        if not view:
            return
        if at != self._passed:
            raise AssertionError(f"a read plan brings every byte once and in order, and {self.file.path} skipped one")
        if self._sha256 is not None:
            self._sha256.update(view)
        self._ranges.feed(at, view)
        self._sums.feed(at, view)
        self._passed += len(view)
        if self._passed == self.passes.stop:
            self._finish(place)

    def _finish(self, place: str) -> None:
        if self._sha256 is not None and self._sha256.hexdigest() != self.file.sha256:
            raise self._corrupt(self.file.path, place, self.file.sha256)
        for record, actual in sorted(self._sums.digests.items(), key=lambda item: item[0].start):
            if actual != (expected := f"{record.crc32:08x}"):
                what = f"{self.file.path}, record {record.name} at byte {record.start},"
                raise self._corrupt(what, place, expected)

    def _corrupt(self, what: str, place: str, expected: str | None) -> SourceCorrupt:
        finding = f"{what} does not match: expected {expected}, read {OTHER_BYTES}"
        checks = failed("source bytes", SOURCE_LEVEL, {"bytes": self.file.size}, [finding])
        return SourceCorrupt(file=what, place=place, expected=expected, actual=OTHER_BYTES, checks=checks)


def digests_differ(shard: Shard, differ: Mapping[str, tuple[str, str]]) -> DigestsDiffer:
    """The error for tensors, or a file, whose digests as (read, written) differ, by name."""
    findings = [f"{name}: digest on read is {read}, on write {written}" for name, (read, written) in differ.items()]
    figures = {"file": shard.path, "tensors": len(shard.entries), "bytes": shard.size}
    name, (read, written) = next(iter(differ.items()))
    return DigestsDiffer(tensor=name, read=read, written=written, checks=failed(COPY, COPY_LEVEL, figures, findings))


class HashingWriter:
    """Passes a shard on to its writer, and digests each tensor where the written header says that it lies.

    The header comes first, in one view.
    """

    def __init__(self, shard: Shard, writer: Writer, lane: Lane) -> None:
        self._shard = shard
        self._writer = writer
        self._lane = lane
        self._tensors: RangeHasher[str] | None = None
        self._at = 0
        self._whole = tensor_digest()

    def write(self, view: memoryview) -> None:
        self._lane.put(self._write, view)

    def _write(self, view: memoryview) -> None:
        self._writer.write(view)
        self._whole.update(view)
        if self._tensors is None:
            header = parse_header(view, file=self._shard.path, file_size=self._shard.size)
            ranges = (HashedRange(spec.start, spec.stop, name) for name, spec in header.tensors.items())
            self._tensors = RangeHasher(ranges, tensor_digest)
        else:
            self._tensors.feed(self._at, view)
        self._at += len(view)

    def finish(self) -> None:
        """End the shard; raises DigestsDiffer unless the store was handed the bytes that were passed on."""
        self._lane.flush()
        handed = self._writer.finish()
        if handed != self._whole.hexdigest():
            raise digests_differ(self._shard, {self._shard.path: (self._whole.hexdigest(), handed)})

    def digests(self) -> dict[str, str]:
        """Tensor -> digest of its bytes as they were written."""
        return self._tensors.digests if self._tensors else {}
