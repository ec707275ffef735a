"""Gathered windows are what their pieces say, element by element, without reading a byte twice or holding many."""

from __future__ import annotations

import hashlib
import tracemalloc
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline.copying.gather import gather, windows
from reshard.pipeline.limits import GATHER_READ
from reshard.pipeline.planning.ranges import runs
from reshard.pipeline.tensors import DTYPE_BITS, Box, ByteRange, Piece, Tensor

NUMPY = {"U8": "u1", "I16": "u2", "F32": "u4", "F64": "u8", "C64": "u8"}


@dataclass
class File:
    """A file in memory, which counts what is read of it."""

    content: bytes
    bytes_read: int = 0
    reads: int = 0
    held: int = 0  # bytes of the largest buffer that was read into

    def read(self, into: memoryview, start: int) -> None:
        assert 0 <= start < start + len(into) <= len(self.content), "reads outside of the file"
        self.bytes_read += len(into)
        self.reads += 1
        self.held = max(self.held, len(memoryview(into.obj)))
        into[:] = self.content[start : start + len(into)]


def made_of(tensor: Tensor, file: File, limit: int, read_max: int = GATHER_READ) -> bytes:
    """The tensor's packed bytes, in windows of ``limit`` bytes that are made in one buffer."""
    buffer = bytearray(limit)
    return b"".join(bytes(gather(tensor, w, file.read, buffer, read_max=read_max)) for w in windows(tensor, limit))


def noise(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()


def expected_bytes(tensor: Tensor, files: list[bytes]) -> bytes:
    """The tensor's packed little-endian bytes, element by element, contiguous from the definition of a piece."""
    width = DTYPE_BITS[tensor.dtype] // 8
    part = 4 if tensor.dtype == "C64" else width
    made = bytearray(tensor.size)
    for piece in tensor.pieces:
        strides = piece.strides or tuple(width * prod(piece.shape[axis + 1 :]) for axis in range(len(piece.shape)))
        for index in product(*map(range, piece.shape)):
            at = piece.offset + sum(i * s for i, s in zip(index, strides, strict=True))
            element = files[piece.file][at : at + width]
            if piece.order == "big":
                element = b"".join(element[i : i + part][::-1] for i in range(0, width, part))
            place = 0
            for i, first, extent in zip(index, piece.at, tensor.shape, strict=True):
                place = place * extent + first + i
            made[place * width : (place + 1) * width] = element
    return bytes(made)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Tensor, list[bytes]]:
    """A tensor cut along every axis into a grid of pieces, each stored in its own way in one of two files."""
    dtype = draw(st.sampled_from(sorted(NUMPY)))
    width = DTYPE_BITS[dtype] // 8
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    cuts = [sorted({0, extent, *draw(st.lists(st.integers(0, extent), max_size=1))}) for extent in shape]
    pieces = []
    ends = [draw(st.integers(0, 20)), draw(st.integers(0, 20))]
    for box in product(*(list(pairwise(cut)) for cut in cuts)):
        at, extents = tuple(a for a, _ in box), tuple(b - a for a, b in box)
        file = draw(st.integers(0, 1))
        strides: tuple[int, ...] | None = None
        stored = width * prod(extents)
        if draw(st.booleans()):
            # Any order of the axes, holes between their steps, and now and then an axis that is only repeated.
            strides_by_axis, step = {}, width
            for axis in draw(st.permutations(range(len(shape)))):
                strides_by_axis[axis] = 0 if draw(st.integers(0, 5)) == 0 else step
                step = max(step, strides_by_axis[axis] * extents[axis] + width * draw(st.integers(0, 3)))
            strides = tuple(strides_by_axis[axis] for axis in range(len(shape)))
            stored = sum((n - 1) * s for n, s in zip(extents, strides, strict=True)) + width
        order = draw(st.sampled_from(["little", "big"]))
        pieces.append(Piece(file, ends[file], at, extents, strides, order))  # type: ignore[arg-type]
        ends[file] += stored + draw(st.integers(0, 9))
    return Tensor("w", dtype, shape, tuple(pieces)), [noise(end, seed) for seed, end in enumerate(ends)]


def in_one_file(tensor: Tensor, contents: list[bytes]) -> tuple[Tensor, File]:
    """The same tensor where its files follow each other in one."""
    shifts = [0, len(contents[0])]
    pieces = tuple(piece._replace(offset=piece.offset + shifts[piece.file]) for piece in tensor.pieces)
    return tensor._replace(pieces=pieces), File(b"".join(contents))


@given(tensors(), st.integers(8, 400), st.sampled_from([1, 24, 1000]))
def test_windows_of_any_tiling_are_in_order_what_its_pieces_say_and_within_the_limits(
    case: tuple[Tensor, list[bytes]], limit: int, read_max: int
) -> None:
    tensor, file = in_one_file(*case)
    width = DTYPE_BITS[tensor.dtype] // 8
    assert all(0 < width * prod(window.shape) <= limit for window in windows(tensor, limit))
    assert made_of(tensor, file, limit, read_max) == expected_bytes(*case)
    assert file.held <= max(read_max, width)


@given(tensors())
def test_runs_are_the_bytes_as_they_stand_or_nothing(case: tuple[Tensor, list[bytes]]) -> None:
    tensor, contents = case
    found = runs(tensor)
    if found is not None:
        made = b"".join(contents[run.file][run.start : run.stop] for run in found)
        assert made == expected_bytes(tensor, contents)


def sharded(dtype: str, shape: tuple[int, ...], axis: int, parts: list[int]) -> Tensor:
    """Pieces as FSDP writes them: each rank's part of one axis, packed, in its own file."""
    pieces, first = [], 0
    for file, extent in enumerate(parts):
        at = tuple(first if i == axis else 0 for i in range(len(shape)))
        pieces.append(Piece(file, 100, at, tuple(extent if i == axis else n for i, n in enumerate(shape))))
        first += extent
    return Tensor("w", dtype, shape, tuple(pieces))


def test_row_shards_are_runs_one_long_read_each() -> None:
    tensor = sharded("BF16", (28672, 8192), 0, [9558, 9558, 9556, 0])
    assert runs(tensor) == tuple(ByteRange(file, 100, 100 + 2 * 8192 * n) for file, n in enumerate([9558, 9558, 9556]))


def test_row_shards_gathered_all_the_same_read_every_byte_once_in_long_reads() -> None:
    tensor, file = in_one_file(sharded("BF16", (2867, 819), 0, [1433, 1434]), [noise(100 + 2 * 819 * 1434)] * 2)
    tensor = tensor._replace(pieces=tuple(piece._replace(file=0) for piece in tensor.pieces))
    made_of(tensor, file, 512 << 10, read_max=64 << 10)
    assert file.bytes_read == tensor.size
    assert file.bytes_read / file.reads > 56 << 10


def test_column_shards_read_every_byte_once() -> None:
    tensor = sharded("F32", (409, 410), 1, [205, 205])
    assert runs(tensor) is None
    tensor, file = in_one_file(tensor, [noise(100 + 4 * 409 * 205)] * 2)
    made_of(tensor, file, 40 << 10)
    assert file.bytes_read == tensor.size


def test_a_transposed_matrix_is_gathered_in_bounded_memory() -> None:
    rows, columns = 2048, 96
    stored = np.arange(rows * columns, dtype="<u4").reshape(columns, rows)
    tensor = Tensor("w", "F32", (rows, columns), (Piece(0, 0, (0, 0), (rows, columns), (4, 4 * rows)),))
    file = File(stored.tobytes())
    buffer, made = bytearray(64 << 10), hashlib.sha256()
    tracemalloc.start()
    try:
        for window in windows(tensor, len(buffer)):
            made.update(gather(tensor, window, file.read, buffer, read_max=16 << 10))
        assert tracemalloc.get_traced_memory()[1] < 64 << 10
    finally:
        tracemalloc.stop()
    assert made.digest() == hashlib.sha256(stored.T.tobytes()).digest()
    assert file.bytes_read == stored.nbytes


def test_holes_smaller_than_a_page_are_read_through() -> None:
    stored = np.frombuffer(noise(4 * 1000 * 100), "<u4").reshape(1000, 100)
    tensor = Tensor("w", "F32", (1000, 50), (Piece(0, 0, (0, 0), (1000, 50), (400, 8)),))
    file = File(stored.tobytes())
    assert made_of(tensor, file, 64 << 10) == stored[:, ::2].tobytes()
    assert file.reads == len(list(windows(tensor, 64 << 10)))
    assert file.bytes_read <= stored.nbytes


def test_many_elements_far_apart_are_walked_in_bounded_memory() -> None:
    piece = Piece(0, 0, (0, 0), (20_000, 2), (20_000, 10_000))
    tensor = Tensor("w", "U8", (20_000, 2), (piece,))
    places: list[int] = []
    (window,) = windows(tensor, 40_000)
    buffer = bytearray(40_000)
    tracemalloc.start()
    try:
        gather(tensor, window, lambda into, at: places.append(at) if at < 20_000 else None, buffer)
        assert tracemalloc.get_traced_memory()[1] < 384 << 10
    finally:
        tracemalloc.stop()
    assert places == [0, 10_000]


def test_the_bytes_of_an_expanded_row_are_read_once_per_window() -> None:
    tensor = Tensor("w", "F32", (1000, 8), (Piece(0, 0, (0, 0), (1000, 8), (0, 4)),))
    file = File(noise(32))
    assert made_of(tensor, file, 32000) == file.content * 1000
    assert file.bytes_read == 32


def test_big_endian_complex_numbers_are_swapped_part_by_part() -> None:
    values = np.array([1 + 2j, -3.5 + 0.25j], ">c8")
    tensor = Tensor("w", "C64", (2,), (Piece(0, 0, (0,), (2,), None, "big"),))
    assert np.frombuffer(made_of(tensor, File(values.tobytes()), 16), "<c8").tolist() == values.tolist()


def test_empty_tensors_have_nothing_to_gather() -> None:
    tensor = Tensor("w", "F32", (0, 3), (Piece(0, 0, (0, 0), (0, 3)),))
    assert list(windows(tensor, 4)) == []
    assert runs(tensor) == ()


def test_a_scalar_is_one_window() -> None:
    tensor = Tensor("w", "F64", (), (Piece(0, 3, (), (), None, "big"),))
    assert list(windows(tensor, 8)) == [Box((), ())]
    assert made_of(tensor, File(b"xyz" + bytes(range(8))), 8) == bytes(range(8))[::-1]


def test_packed_sub_byte_elements_and_windows_below_an_element_are_refused() -> None:
    with pytest.raises(ValueError, match="F4 is packed"):
        gather(Tensor("w", "F4", (4,), (Piece(0, 0, (0,), (4,), (1,)),)), Box((0,), (4,)), File(b"").read, bytearray(2))
    with pytest.raises(ValueError, match="holds no element"):
        list(windows(Tensor("w", "F32", (4,), (Piece(0, 0, (0,), (4,), (8,)),)), 3))
