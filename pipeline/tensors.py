"""What a checkpoint is made of: files, tensors, and the bytes that a tensor is tiled by.

Everything here is immutable data without I/O, and everything else in the pipeline is written in these words.
Shapes count elements, offsets and sizes count bytes, ranges are half open: ``start <= byte < stop``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import prod
from posixpath import join
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

# Bits per element of every dtype of the safetensors format, by the format's own names
# (https://github.com/huggingface/safetensors, README "Format", and the `Dtype` enum of its Rust crate).
# The sub-byte kinds are packed, so only a whole tensor of them has a whole number of bytes.
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

# Kinds that only GGUF has: the elements of a row that make up one block, and the block's bytes (llama.cpp,
# ggml/src/ggml-common.h). Its plain kinds are those above, by the same names.
BLOCKS: dict[str, tuple[int, int]] = {
    "Q1_0": (128, 18),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q4_K": (256, 144),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "Q8_0": (32, 34),
    "Q8_1": (32, 40),
    "Q8_K": (256, 292),
    "IQ1_M": (256, 56),
    "IQ1_S": (256, 50),
    "IQ2_S": (256, 82),
    "IQ2_XS": (256, 74),
    "IQ2_XXS": (256, 66),
    "IQ3_S": (256, 110),
    "IQ3_XXS": (256, 98),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
    "NVFP4": (64, 36),
}


@lru_cache(maxsize=4096)  # a model has tens of kinds of tensors, and up to 500,000 tensors
def size_in_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """The bytes that a packed tensor occupies; raises ValueError when they, or its blocks, are not a whole number."""
    if dtype in BLOCKS:
        elements, size = BLOCKS[dtype]
        if (row := shape[-1] if shape else 1) % elements:
            raise ValueError(f"a row of {dtype}{list(shape)} has {row} elements, and a block has {elements}")
        return prod(shape) // elements * size
    bits = DTYPE_BITS[dtype] * prod(shape)
    if bits % 8:
        raise ValueError(f"{dtype}{list(shape)} is {bits} bits, which is not a whole number of bytes")
    return bits // 8


# What a source file's bytes were held against: its sha256, its archive's own sums, or nothing but the transport.
Attestation = Literal["checked", "crc", "as delivered"]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a repository or folder at one commit, as its store lists it."""

    path: str  # POSIX, relative to the root of the repository
    size: int  # bytes
    oid: str | None = None  # git blob sha1 of a regular file
    sha256: str | None = None  # of the whole content, where the store attests one
    xet: str | None = None  # Xet hash, where the file is stored in chunks


def git_blob(size: int) -> hashlib._Hash:
    """The running hash of ``size`` bytes whose hexdigest is the ``oid`` that git gives to them."""
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


def is_content_of(file: StoredFile, views: Iterable[bytes | memoryview]) -> bool:
    """Whether these bytes are those of ``file``, by the hash that its store lists; False where it lists none."""
    total = hashlib.sha256() if file.sha256 else git_blob(file.size)
    for view in views:
        total.update(view)
    return total.hexdigest() == (file.sha256 or file.oid)


def same_by_hash(one: StoredFile, other: StoredFile) -> bool | None:
    """Whether two files are the same, as their stores say; None where they do not."""
    if one.size != other.size:
        return False
    if one.sha256 and other.sha256:
        return one.sha256 == other.sha256
    if one.oid and other.oid:
        return one.oid == other.oid
    return None


class Span(NamedTuple):
    """``start <= byte < stop`` of the file at hand."""

    start: int
    stop: int


class ByteRange(NamedTuple):
    """``start <= byte < stop`` of one file; ``file`` counts in the weight files of the repository (``Plan.files``)."""

    file: int
    start: int
    stop: int


T = TypeVar("T", bound=tuple[Any, ...])


def rows_as(kind: type[T], rows: Iterable[tuple[Any, ...]]) -> Iterator[T]:
    """``kind(*row)`` of each row, which has a value for every field, without its Python code: there may be 500,000."""
    return map(partial(tuple.__new__, kind), rows)


def packed_strides(shape: Sequence[int], width: int = 1) -> tuple[int, ...]:
    """The strides of C order, of elements of ``width`` bytes.

    >>> packed_strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(width * prod(shape[axis + 1 :]) for axis in range(len(shape)))


class Box(NamedTuple):
    """The elements ``at <= index < at + shape`` of an array."""

    at: tuple[int, ...]
    shape: tuple[int, ...]


class Piece(NamedTuple):
    """A box of a tensor, and where its elements lie in one file.

    Element ``i`` of the box (``i`` a multi-index below ``shape``) is element ``at + i`` of the tensor and starts
    at byte ``offset + sum(i * strides)`` of the file. ``strides`` is None for a box stored packed in C order.
    """

    file: int
    offset: int
    at: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None  # bytes, never negative
    order: Literal["little", "big"] = "little"

    def steps(self, width: int) -> tuple[int, ...]:
        """Its strides, for elements of ``width`` bytes."""
        return packed_strides(self.shape, width) if self.strides is None else self.strides


@dataclass(frozen=True, slots=True)
class Record:
    """``start <= byte < stop`` of a file, and the CRC-32 that its archive keeps of them, where it keeps one."""

    name: str
    file: int
    start: int
    stop: int
    crc32: int | None


class Tensor(NamedTuple):
    """A named array; its pieces tile it exactly."""

    name: str
    dtype: str  # a key of DTYPE_BITS or BLOCKS
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Bytes when packed."""
        return size_in_bytes(self.dtype, self.shape)

    @property
    def range(self) -> ByteRange | None:
        """The one stretch of one file that holds the tensor packed, little-endian, in C order; else None."""
        if len(self.pieces) != 1:
            return None
        piece = self.pieces[0]
        if piece.strides is not None or piece.order != "little" or piece.shape != self.shape:
            return None
        return ByteRange(piece.file, piece.offset, piece.offset + self.size)


class Contents(NamedTuple):
    """What a reader finds in one file, or in files whose tensors are put together."""

    tensors: tuple[Tensor, ...]  # in the order of the file
    notes: tuple[str, ...] = ()  # where the weights were found, and what else was there
    ties: tuple[tuple[str, ...], ...] = ()  # names that are made of the same bytes; tensors that overlap are not ties
    records: tuple[Record, ...] = ()  # every stretch that tensors are read from, with what attests it
    settings: Mapping[str, object] = MappingProxyType({})  # those beside the weights, as values of JSON
    metadata: Mapping[str, str] = MappingProxyType({})  # `__metadata__`


_SAFETENSORS = ".safetensors"


@dataclass(frozen=True, slots=True)
class Name:
    """What tells the checkpoints of one repository apart: ``unet/`` + ``diffusion_pytorch_model`` + ``fp16``."""

    folder: str  # "" or a path without a trailing slash
    stem: str
    variant: str | None = None
    suffix: str = _SAFETENSORS  # of its files as they are written

    @property
    def path(self) -> str:
        """How the paths of its files begin."""
        return join(self.folder, f"{self.stem}.{self.variant}" if self.variant else self.stem)

    def __str__(self) -> str:
        return self.path if self.suffix == _SAFETENSORS else self.path + self.suffix


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One set of weights in a repository: every file, every tensor, and what its index and headers said."""

    name: Name
    files: tuple[int, ...]  # which weight files of the repository
    tensors: tuple[Tensor, ...]
    file_metadata: dict[str, str] = field(default_factory=dict)  # `__metadata__`, merged over the files
    index_metadata: dict[str, object] = field(default_factory=dict)
    index_path: str | None = None
    in_parts: bool = False  # whether several processes left its files: no loader of whole ones finds them
    notes: tuple[str, ...] = ()  # what a person should know: tensors that no index names, non-tensors left out
    ties: tuple[tuple[str, ...], ...] = ()  # names that are stored once: the same view of the same storage
    records: tuple[Record, ...] = ()  # what an archive keeps CRCs of
    settings: Mapping[str, object] = field(default_factory=dict)  # beside a torch file's weights, as values of JSON
    # Of GGUF: each value as it stands, its type before it.
    keys: Mapping[str, memoryview | bytes] = field(default_factory=dict)
    # Keys of `__metadata__` that are not the same in all files -> their values; None is that of one without the key.
    varying: Mapping[str, frozenset[str | None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pin:
    """Exactly which bytes a source is: a repository at one commit, or a folder or an object store at one state."""

    endpoint: str | None  # None for all but a Hub
    repo: str  # `user/name`, the folder's absolute path, or the object store's URL
    commit: str  # 40 hex digits, or a digest of the listing

    @property
    def origin(self) -> tuple[str | None, str]:
        """Where it is, at whatever state."""
        return self.endpoint, self.repo

    @property
    def named(self) -> str | None:
        """Its name on a Hub; None for what has a path or a URL, which others are not told."""
        return self.repo if self.endpoint else None

    def linked(self) -> str:
        """What a card says of it, in Markdown."""
        if self.endpoint:
            return f"[{self.repo}]({self.endpoint}/{self.repo}/tree/{self.commit}) at `{self.commit[:12]}`"
        return "a checkpoint in an object store" if "://" in self.repo else "a local checkpoint"

    def __str__(self) -> str:
        return f"{self.repo}@{self.commit[:12]}"
