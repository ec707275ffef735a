"""The hashes of the Xet protocol: keyed BLAKE3 over chunks, and over the tree that they are the leaves of."""

import struct
from collections.abc import Iterable

from blake3 import blake3

# The protocol's domain-separation keys.
CHUNK_KEY = bytes.fromhex("6697f5775b9550de3135cbaca597181c9de421109beb2b58b4d0b04b93adf229")
NODE_KEY = bytes.fromhex("017ec5c7a5472996fd946666b48a02e65ddd536f37c76dd2f86352e64a53713f")
RANGE_KEY = bytes.fromhex("7f1857d6ce56ed66127ff913e7a5c3f3a4cd26d5b5db49e64124987f28fb94c3")
FILE_KEY = bytes(32)

FANOUT = 4  # children of a node on average
MAX_CHILDREN = 2 * FANOUT + 1
DEDUP_ONE_IN = 1024  # one chunk in so many may be asked for in a global deduplication query

Node = tuple[bytes, int]  # hash, and the number of bytes below


def to_hex(value: bytes) -> str:
    """The text form: four little-endian 64-bit words, each printed as a number."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", value))


def from_hex(text: str) -> bytes:
    return struct.pack("<4Q", *(int(text[at : at + 16], 16) for at in range(0, 64, 16)))


def chunk_hash(data: bytes) -> bytes:
    return blake3(data, key=CHUNK_KEY).digest()


def keyed(value: bytes, key: bytes) -> bytes:
    """A hash under a key: how the store's answers hide chunk hashes from those who do not have the chunk."""
    return blake3(value, key=key).digest()


def range_hash(chunk_hashes: bytes) -> bytes:
    """Shows that whoever uploads a file's description has its chunks: over their concatenated hashes."""
    return blake3(chunk_hashes, key=RANGE_KEY).digest()


def xorb_hash(chunks: Iterable[Node]) -> bytes:
    """The root of the tree over the chunks."""
    nodes = list(chunks)
    while len(nodes) > 1:
        level: list[Node] = []
        start = 0
        while start < len(nodes):
            end = _group_end(nodes, start)
            level.append(_parent(nodes[start:end]))
            start = end
        nodes = level
    return nodes[0][0] if nodes else bytes(32)


def file_hash(chunks: Iterable[Node]) -> bytes:
    """As for a xorb, under one more key, so that a file and a xorb of the same chunks differ."""
    return blake3(xorb_hash(chunks), key=FILE_KEY).digest()


def is_queried(chunk: bytes) -> bool:
    """Whether clients ask for this chunk wherever it is in a file."""
    return _last_word(chunk) % DEDUP_ONE_IN == 0


def _group_end(nodes: list[Node], start: int) -> int:
    """A group has three to nine nodes and ends with the first, from its third on, whose hash says so."""
    if len(nodes) - start <= 2:
        return len(nodes)
    longest = min(start + MAX_CHILDREN, len(nodes))
    for at in range(start + 2, longest):
        if _last_word(nodes[at][0]) % FANOUT == 0:
            return at + 1
    return longest


def _parent(children: list[Node]) -> Node:
    lines = "".join(f"{to_hex(value)} : {size}\n" for value, size in children)
    return blake3(lines.encode(), key=NODE_KEY).digest(), sum(size for _, size in children)


def _last_word(value: bytes) -> int:
    return int.from_bytes(value[24:], "little")
