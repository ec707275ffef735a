"""The stored xorbs, the files that are made of them, and which chunks are already there."""

import hashlib
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

from ..errors import HubError, bad_request
from ..objects import FileStore
from . import shard as shards
from .hashes import file_hash, from_hex, is_queried, keyed, range_hash, to_hex
from .shard import Shard, Term
from .xorb import STORED, ChunkTable, checked, packed_header, read_chunk


@dataclass(frozen=True)
class StoredFile:
    """A file's terms and where each begins in it; ``starts`` ends with the size."""

    terms: list[Term]
    starts: list[int]

    @property
    def size(self) -> int:
        return self.starts[-1]


@dataclass(frozen=True)
class Slice:
    """Part of a term: chunks ``start`` to ``end`` of a xorb, the first of which begins at ``offset`` in the file."""

    xorb: bytes
    start: int
    end: int
    offset: int
    length: int


class XetStore:
    """``xorbs/`` and their ``tables/`` by hash, ``shards/`` by sha256; the rest is rebuilt from the shards."""

    def __init__(self, root: Path, temporary: Path, key: bytes) -> None:
        """``key`` hides chunk hashes in deduplication answers."""
        self.xorbs = FileStore(root / "xorbs", temporary)
        self.tables = FileStore(root / "tables", temporary)
        self.shards = FileStore(root / "shards", temporary)
        self._key = key
        self._lock = threading.Lock()
        self._tables: dict[bytes, ChunkTable] = {}
        self._files: dict[bytes, StoredFile] = {}
        self._described: dict[bytes, str] = {}  # xorb -> the shard that lists its chunks
        self._queried: dict[bytes, bytes] = {}  # chunk -> a xorb that has it
        for path in sorted((root / "shards").glob("*/*")):
            self._learn(path.name, shards.parse(path.read_bytes()))

    # Writing

    def add_xorb(self, name: str, chunks: Iterable[memoryview]) -> bool:
        """Store a xorb whose chunks hash to its name; False if it was there."""
        file = self.xorbs.new_file()
        try:
            with file.open("wb", buffering=0) as out:
                for chunk in chunks:
                    while chunk:
                        chunk = chunk[out.write(chunk) :]
            table = checked(file, from_hex(name))
            if self.xorbs.has(name):
                return False
            self._put_table(name, table)
            self.xorbs.adopt(file, name)
            return True
        finally:
            file.unlink(missing_ok=True)

    def add_shard(self, data: bytes) -> list[tuple[str, str | None, int]]:
        """Store a shard whose files can be made from stored xorbs; (hash, sha256, size) of each file."""
        shard = shards.parse(data)
        for block in shard.files:
            self._check_file(block)
        for xorb in shard.xorbs:
            if not self.xorbs.has(to_hex(xorb.hash)):
                raise bad_request(f"the shard lists xorb {to_hex(xorb.hash)}, which was never uploaded")
        name = hashlib.sha256(data).hexdigest()
        file = self.shards.new_file()
        file.write_bytes(data)
        self.shards.adopt(file, name)
        self._learn(name, shard)
        return [(to_hex(f.hash), to_hex(f.sha256) if f.sha256 else None, self._files[f.hash].size) for f in shard.files]

    def _check_file(self, block: shards.FileBlock) -> None:
        """The file's chunks exist, its uploader has their hashes, and they hash to its name."""
        if len(block.range_hashes) != len(block.terms):
            raise bad_request("a file without verification hashes")
        nodes: list[tuple[bytes, int]] = []
        for term, expected in zip(block.terms, block.range_hashes, strict=True):
            table = self.table(term.xorb)
            if not term.start < term.end <= len(table):
                raise bad_request("a term names chunks that its xorb does not have")
            if table.raw[term.end] - table.raw[term.start] != term.length:
                raise bad_request("a term's length is not that of its chunks")
            if range_hash(table.hashes[32 * term.start : 32 * term.end]) != expected:
                raise bad_request("a term's verification hash is wrong")
            nodes += table.nodes(term.start, term.end)
        if not nodes and block.hash == bytes(32):  # of an empty file
            return
        if file_hash(nodes) != block.hash:
            raise bad_request(f"the terms of {to_hex(block.hash)} hash to {to_hex(file_hash(nodes))}")

    def _learn(self, name: str, shard: Shard) -> None:
        with self._lock:
            for xorb in shard.xorbs:
                self._described.setdefault(xorb.hash, name)
                for at in range(0, len(xorb.chunks), shards.ENTRY):
                    if is_queried(chunk := xorb.chunks[at : at + 32]):
                        self._queried.setdefault(chunk, xorb.hash)
            for block in shard.files:
                starts = list(accumulate((term.length for term in block.terms), initial=0))
                self._files[block.hash] = StoredFile(block.terms, starts)
        for block in shard.files:
            if block.terms and self.xorbs.has(to_hex(block.terms[0].xorb)):
                first = block.terms[0]
                with self._lock:
                    self._queried.setdefault(self._load(first.xorb).hash(first.start), first.xorb)

    # Reading

    def has_file(self, name: str) -> bool:
        """Whether all xorbs of the file are there."""
        file = self._files.get(from_hex(name))
        return file is not None and all(self.xorbs.has(to_hex(xorb)) for xorb in {t.xorb for t in file.terms})

    def file(self, name: str) -> StoredFile:
        file = self._files.get(from_hex(name))
        if file is None:
            raise HubError(404, f"no file {name} in the content store")
        return file

    def table(self, xorb: bytes) -> ChunkTable:
        with self._lock:
            return self._load(xorb)

    def _load(self, xorb: bytes) -> ChunkTable:
        if xorb not in self._tables:
            name = to_hex(xorb)
            if not self.xorbs.has(name):
                raise bad_request(f"no xorb {name} in the content store")
            self._tables[xorb] = ChunkTable.load(self.tables.path(name))
        return self._tables[xorb]

    def slices(self, name: str, start: int, stop: int) -> list[Slice]:
        """The chunks that hold the file's bytes from ``start`` to ``stop``, in order."""
        file = self.file(name)
        found = []
        at = bisect_right(file.starts, start) - 1
        while at < len(file.terms) and file.starts[at] < stop:
            term, begins = file.terms[at], file.starts[at]
            table = self.table(term.xorb)
            base = table.raw[term.start]
            first = max(term.start, table.chunk_at(base + max(0, start - begins)))
            last = min(term.end - 1, table.chunk_at(base + min(term.length, stop - begins) - 1))
            length = table.raw[last + 1] - table.raw[first]
            found.append(Slice(term.xorb, first, last + 1, begins + table.raw[first] - base, length))
            at += 1
        return found

    def read(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        """The file's bytes from ``start`` to ``stop``, chunk by chunk; HubError 404 now if a xorb is gone."""
        slices = self.slices(name, start, stop)
        if lost := next((s for s in slices if not self.xorbs.has(to_hex(s.xorb))), None):
            raise HubError(404, f"NoSuchKey: the stored xorb {to_hex(lost.xorb)} is gone")
        return self._read(slices, start, stop)

    def _read(self, slices: list[Slice], start: int, stop: int) -> Iterator[bytes]:
        for piece in slices:
            table = self.table(piece.xorb)
            at = piece.offset
            with self.xorbs.path(to_hex(piece.xorb)).open("rb") as xorb:
                for n in range(piece.start, piece.end):
                    data = read_chunk(xorb.fileno(), table.stored[n])
                    yield data[max(0, start - at) : stop - at]
                    at += len(data)

    def dedup(self, chunk: str) -> bytes | None:
        """The answer to a deduplication query: all xorbs of the shard that has this chunk."""
        with self._lock:
            xorb = self._queried.get(from_hex(chunk))
            name = self._described.get(xorb) if xorb else None
        if xorb is None or name is None or not self.xorbs.has(to_hex(xorb)):
            return None
        shard = shards.parse(self.shards.path(name).read_bytes())
        return shards.dedup_answer(shard, self._key, partial(keyed, key=self._key))

    # Damage

    def corrupt(self, name: str, offset: int) -> None:
        """Invert a byte of a file where it is stored; every file that shares the chunk changes."""
        (piece,) = self.slices(name, offset, offset + 1)
        xorb = to_hex(piece.xorb)
        table = self.table(piece.xorb)
        stored = self.xorbs.path(xorb).read_bytes()
        with self.xorbs.path(xorb).open("rb") as file:
            data = bytearray(read_chunk(file.fileno(), table.stored[piece.start]))
        data[offset - piece.offset] ^= 0xFF
        chunk = packed_header(len(data), STORED, len(data)) + data
        rest = stored[table.stored[piece.start + 1] :]
        changed = self.xorbs.new_file()
        changed.write_bytes(stored[: table.stored[piece.start]] + chunk + rest)
        rows = [
            (table.hash(n), len(chunk) if n == piece.start else table.stored[n + 1] - table.stored[n], size)
            for n, (_, size) in enumerate(table.nodes(0, len(table)))
        ]
        self._put_table(xorb, ChunkTable.of(rows))
        self.xorbs.adopt(changed, xorb)

    def _put_table(self, name: str, table: ChunkTable) -> None:
        file = self.tables.new_file()
        table.save(file)
        self.tables.adopt(file, name)
        with self._lock:
            self._tables[from_hex(name)] = table
