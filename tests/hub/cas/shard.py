"""Shards: descriptions of files and xorbs in entries of 48 bytes, little-endian."""

import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..errors import bad_request

MAGIC = b"HFRepoMetaData\0"
HEADER = struct.Struct("<32sQQ")  # tag, version, footer length
HASH_AND_FOUR = struct.Struct("<32s4I")
HASH_AND_REST = struct.Struct("<32s16x")
FOOTER = struct.Struct("<9Q32sQQ48x4Q")
ENTRY = 48
END = b"\xff" * 32 + bytes(16)
WITH_RANGE_HASHES, WITH_SHA256 = 1 << 31, 1 << 30
ANSWER_LIFETIME = 14 * 86400  # seconds for which a client may use a deduplication answer


@dataclass(frozen=True)
class Term:
    """A run of chunks of one xorb; ``length`` is in raw bytes."""

    xorb: bytes
    length: int
    start: int
    end: int


@dataclass(frozen=True)
class FileBlock:
    """A file as the chunks that it consists of. ``range_hashes``: one per term, or none."""

    hash: bytes
    terms: list[Term]
    range_hashes: list[bytes]
    sha256: bytes | None


@dataclass(frozen=True)
class XorbBlock:
    """A xorb's header entry and its chunks' entries, as they were sent."""

    hash: bytes
    raw_length: int
    stored_length: int
    chunks: bytes


@dataclass(frozen=True)
class Shard:
    tag: bytes
    files: list[FileBlock]
    xorbs: list[XorbBlock]


def parse(data: bytes) -> Shard:
    """An uploaded shard (no footer); HubError 400 if it is anything else."""
    try:
        tag, version, _ = HEADER.unpack_from(data)
        if not tag.startswith(MAGIC) or version != 2:
            raise bad_request("not a shard of version 2")
        entries = _entries(data)
        return Shard(tag, list(_files(entries)), list(_xorbs(entries)))
    except (struct.error, StopIteration, RuntimeError):
        raise bad_request("the shard ends too early") from None


def _entries(data: bytes) -> Iterator[bytes]:
    for at in range(HEADER.size, len(data) - ENTRY + 1, ENTRY):
        yield data[at : at + ENTRY]


def _blocks(entries: Iterator[bytes]) -> Iterator[tuple[bytes, int, int, int, int]]:
    """The first entry of every block of a section."""
    while not (entry := next(entries)).startswith(END[:32]):
        yield HASH_AND_FOUR.unpack(entry)


def _files(entries: Iterator[bytes]) -> Iterator[FileBlock]:
    for name, flags, count, _, _ in _blocks(entries):
        terms = []
        for _ in range(count):
            xorb, _, length, start, end = HASH_AND_FOUR.unpack(next(entries))
            terms.append(Term(xorb, length, start, end))
        ranges = [HASH_AND_REST.unpack(next(entries))[0] for _ in range(count)] if flags & WITH_RANGE_HASHES else []
        sha256 = HASH_AND_REST.unpack(next(entries))[0] if flags & WITH_SHA256 else None
        yield FileBlock(name, terms, ranges, sha256)


def _xorbs(entries: Iterator[bytes]) -> Iterator[XorbBlock]:
    for name, _, count, raw_length, stored_length in _blocks(entries):
        yield XorbBlock(name, raw_length, stored_length, b"".join(next(entries) for _ in range(count)))


def dedup_answer(shard: Shard, key: bytes, hidden: Callable[[bytes], bytes]) -> bytes:
    """The answer to a deduplication query: the shard's xorbs, their chunk hashes hidden under ``key``."""
    parts = [HEADER.pack(shard.tag, 2, FOOTER.size), END]
    raw_length = stored_length = 0
    for xorb in shard.xorbs:
        count = len(xorb.chunks) // ENTRY
        parts.append(HASH_AND_FOUR.pack(xorb.hash, 0, count, xorb.raw_length, xorb.stored_length))
        for at in range(0, len(xorb.chunks), ENTRY):
            parts.append(hidden(xorb.chunks[at : at + 32]) + xorb.chunks[at + 32 : at + ENTRY])
        raw_length += xorb.raw_length
        stored_length += xorb.stored_length
    parts.append(END)
    end = sum(map(len, parts))
    now = int(time.time())
    xorbs_at = HEADER.size + ENTRY
    offsets = (1, HEADER.size, xorbs_at, end, 0, end, 0, end, 0)  # the three lookup tables are empty
    parts.append(FOOTER.pack(*offsets, key, now, now + ANSWER_LIFETIME, stored_length, 0, raw_length, end))
    return b"".join(parts)
