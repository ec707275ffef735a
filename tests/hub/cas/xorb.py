"""Xorbs: runs of compressed chunks, and the table that finds a chunk in one.

A chunk is an 8-byte header (version 0, compressed length u24, scheme u8, length u24, little-endian) and its data.
What follows the last chunk is a footer that repeats what the chunks say; it is not read here.
"""

import os
import struct
from array import array
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import lz4.frame  # type: ignore[import-untyped]

from ..errors import bad_request
from .hashes import chunk_hash, xorb_hash

HEADER = struct.Struct("<B3sB3s")
FOOTER_MAGIC = b"XETBLOB"
MAX_RAW = 64 << 20  # the wheel fills a xorb up to here; chunk headers and the footer come on top
MAX_STORED = 65 << 20
MAX_CHUNK = 128 << 10
STORED, LZ4, GROUPED_LZ4 = 0, 1, 2

ROW = struct.Struct("<32sII")  # of a table on disk: chunk hash, stored length with header, length


@dataclass
class ChunkTable:
    """Where each chunk of a xorb begins, in the stored bytes and in the raw ones; both end with the total."""

    hashes: bytes  # 32 bytes per chunk
    stored: "array[int]"
    raw: "array[int]"

    @classmethod
    def of(cls, rows: list[tuple[bytes, int, int]]) -> "ChunkTable":
        stored, raw = array("Q", [0]), array("Q", [0])
        for _, stored_length, length in rows:
            stored.append(stored[-1] + stored_length)
            raw.append(raw[-1] + length)
        return cls(b"".join(row[0] for row in rows), stored, raw)

    @classmethod
    def load(cls, path: Path) -> "ChunkTable":
        return cls.of(list(ROW.iter_unpack(path.read_bytes())))

    def save(self, path: Path) -> None:
        rows = (ROW.pack(self.hash(n), *self._lengths(n)) for n in range(len(self)))
        path.write_bytes(b"".join(rows))

    def __len__(self) -> int:
        return len(self.raw) - 1

    def hash(self, n: int) -> bytes:
        return self.hashes[32 * n : 32 * n + 32]

    def nodes(self, start: int, end: int) -> list[tuple[bytes, int]]:
        """(hash, length) of the chunks from ``start`` to ``end``."""
        return [(self.hash(n), self.raw[n + 1] - self.raw[n]) for n in range(start, end)]

    def chunk_at(self, raw_offset: int) -> int:
        """The chunk that holds this byte of the xorb's raw bytes."""
        return bisect_right(self.raw, raw_offset) - 1

    def _lengths(self, n: int) -> tuple[int, int]:
        return self.stored[n + 1] - self.stored[n], self.raw[n + 1] - self.raw[n]


def checked(path: Path, name: bytes) -> ChunkTable:
    """The table of an uploaded xorb; HubError 400 unless its chunks are whole and hash to ``name``."""
    size = path.stat().st_size
    if size > MAX_STORED:
        raise bad_request(f"a xorb has at most {MAX_STORED} bytes")
    rows: list[tuple[bytes, int, int]] = []
    with path.open("rb") as file:
        while (header := file.read(HEADER.size)) and not header.startswith(FOOTER_MAGIC):
            if len(header) < HEADER.size:
                raise bad_request("the xorb ends inside a chunk header")
            stored_length, scheme, length = parse_header(header)
            data = decompress(file.read(stored_length), stored_length, scheme, length)
            rows.append((chunk_hash(data), HEADER.size + stored_length, length))
    table = ChunkTable.of(rows)
    if table.raw[-1] > MAX_RAW:
        raise bad_request(f"a xorb has at most {MAX_RAW} raw bytes")
    if xorb_hash(table.nodes(0, len(table))) != name:
        raise bad_request("the xorb's chunks do not hash to its name")
    return table


def parse_header(header: bytes) -> tuple[int, int, int]:
    """(stored length, scheme, length)."""
    version, stored_length, scheme, length = HEADER.unpack(header)
    sizes = int.from_bytes(stored_length, "little"), scheme, int.from_bytes(length, "little")
    if version != 0 or not 0 < sizes[2] <= MAX_CHUNK:
        raise bad_request(f"not a chunk header: {header.hex()}")
    return sizes


def packed_header(stored_length: int, scheme: int, length: int) -> bytes:
    return HEADER.pack(0, stored_length.to_bytes(3, "little"), scheme, length.to_bytes(3, "little"))


def decompress(data: bytes, stored_length: int, scheme: int, length: int) -> bytes:
    if len(data) != stored_length:
        raise bad_request("the xorb ends inside a chunk")
    if scheme in (LZ4, GROUPED_LZ4):
        try:
            data = lz4.frame.decompress(data)
        except RuntimeError as error:
            raise bad_request(f"a chunk is not LZ4: {error}") from None
    elif scheme != STORED:
        raise bad_request(f"unknown compression scheme {scheme}")
    if len(data) != length:
        raise bad_request("a chunk's length is not what its header says")
    return ungroup(data) if scheme == GROUPED_LZ4 else data


def ungroup(data: bytes) -> bytes:
    """Undo the grouping by position modulo 4."""
    out = bytearray(len(data))
    start = 0
    for position in range(4):
        count = (len(data) - position + 3) // 4
        out[position::4] = data[start : start + count]
        start += count
    return bytes(out)


def read_chunk(descriptor: int, at: int) -> bytes:
    """The raw bytes of the chunk whose header is at this offset of an open xorb."""
    stored_length, scheme, length = parse_header(os.pread(descriptor, HEADER.size, at))
    return decompress(os.pread(descriptor, stored_length, at + HEADER.size), stored_length, scheme, length)
