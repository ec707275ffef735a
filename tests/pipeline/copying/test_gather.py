"""Gathered windows are what their pieces say, element by element, within the bytes and memory that were stated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline.copying.gather import Window, assemble, gather, windows
from reshard.pipeline.limits import GATHER_READ
from reshard.pipeline.planning.ranges import runs
from reshard.pipeline.tensors import DTYPE_BITS, ByteRange, Piece, Tensor

NUMPY = {"U8": "u1", "I16": "u2", "F32": "u4", "F64": "u8", "C64": "u8"}


@dataclass(frozen=True)
class Cost:
    """What gathering a whole tensor takes."""

    reads: int
    bytes_read: int
    bytes_made: int
    memory: int

    @property
    def amplification(self) -> float:
        """Bytes read per byte made; 1.0 for an empty tensor. Below 1 where a storage is repeated."""
        return self.bytes_read / self.bytes_made if self.bytes_made else 1.0


def cost(tensor: Tensor, limit: int, read_max: int = GATHER_READ) -> Cost:
    """What gathering all of ``tensor`` in windows of ``limit`` bytes takes, without reading anything."""
    gathered = [gather(tensor, window, read_max=read_max) for window in windows(tensor, limit)]
    return Cost(
        sum(gathering.reads for gathering in gathered),
        sum(gathering.bytes_read for gathering in gathered),
        tensor.size,
        max((gathering.memory for gathering in gathered), default=0),
    )


@dataclass
class Files:
    """Source files in memory, which count what is read of them."""

    contents: list[bytes]
    bytes_read: int = 0
    reads: int = 0
    longest: int = 0

    def read(self, file: int, start: int, stop: int) -> Iterator[memoryview]:
        assert 0 <= start < stop <= len(self.contents[file]), "reads outside of the file"
        self.bytes_read += stop - start
        self.reads += 1
        self.longest = max(self.longest, stop - start)
        middle = (start + stop) // 2
        yield memoryview(self.contents[file])[start:middle]
        yield memoryview(self.contents[file])[middle:stop]


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


@given(tensors(), st.data())
def test_any_window_of_any_tiling_is_what_its_pieces_say(case: tuple[Tensor, list[bytes]], data: st.DataObject) -> None:
    tensor, contents = case
    width = DTYPE_BITS[tensor.dtype] // 8
    elements = tensor.size // width
    start = data.draw(st.integers(0, elements)) * width
    stop = data.draw(st.integers(start // width, elements)) * width
    read_max = data.draw(st.sampled_from([1, 24, 1000]))
    gathering = gather(tensor, Window(start, stop), read_max=read_max)
    files = Files(contents)
    assert bytes(assemble(gathering, files.read)) == expected_bytes(tensor, contents)[start:stop]
    assert files.bytes_read == gathering.bytes_read
    assert files.reads == gathering.reads
    assert files.longest <= max(read_max, width)
    steps = [step.size for step in gathering.steps()]
    assert gathering.memory == stop - start + max(steps, default=0)
    assert all(size <= max(read_max, width) for size in steps)


@given(tensors(), st.integers(8, 400))
def test_windows_cover_the_tensor_in_order_and_within_the_limit(case: tuple[Tensor, list[bytes]], limit: int) -> None:
    tensor, contents = case
    cut = list(windows(tensor, limit))
    assert [cut[0].start, *(window.stop for window in cut)] == [*(window.start for window in cut), tensor.size]
    assert all(0 < stop - start <= limit for start, stop in cut)
    files = Files(contents)
    made = b"".join(assemble(gather(tensor, window), files.read) for window in cut)
    assert made == expected_bytes(tensor, contents)
    told = cost(tensor, limit)
    assert (told.bytes_read, told.reads, told.bytes_made) == (files.bytes_read, files.reads, tensor.size)


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


def test_row_shards_gathered_all_the_same_read_every_byte_once() -> None:
    tensor = sharded("BF16", (28672, 8192), 0, [9558, 9558, 9556])
    told = cost(tensor, 64 << 20, read_max=8 << 20)
    assert told.amplification == 1.0
    assert told.bytes_read / told.reads > 7 << 20


def test_column_shards_read_every_byte_once() -> None:
    tensor = sharded("F32", (4096, 4097), 1, [2049, 2048])
    assert runs(tensor) is None
    told = cost(tensor, 4 << 20)
    assert told.amplification == 1.0
    assert told.memory <= 12 << 20


def test_a_transposed_matrix_of_many_gigabytes_is_planned_within_its_memory_before_a_byte_moves() -> None:
    rows, columns, limit = 65536, 40960, 64 << 20  # 10.7 GB of F32, stored by columns
    tensor = Tensor("w", "F32", (rows, columns), (Piece(0, 64, (0, 0), (rows, columns), (4, 4 * rows)),))
    told = cost(tensor, limit)
    assert told.amplification == 1.0
    assert told.memory <= limit + (8 << 20)


def test_a_transposed_matrix_is_gathered_in_bounded_memory() -> None:
    rows, columns = 512, 768
    stored = np.arange(rows * columns, dtype="<u4").reshape(columns, rows)
    tensor = Tensor("w", "F32", (rows, columns), (Piece(0, 0, (0, 0), (rows, columns), (4, 4 * rows)),))
    files = Files([stored.tobytes()])
    made = b""
    for window in windows(tensor, 64 << 10):
        gathering = gather(tensor, window, read_max=16 << 10)
        assert gathering.memory <= 80 << 10
        made += assemble(gathering, files.read)
    assert made == stored.T.tobytes()
    assert files.bytes_read == stored.nbytes


def test_the_bytes_of_an_expanded_row_are_read_once_per_window() -> None:
    tensor = Tensor("w", "F32", (1000, 8), (Piece(0, 0, (0, 0), (1000, 8), (0, 4)),))
    files = Files([noise(32)])
    assert bytes(assemble(gather(tensor, Window(0, 32000)), files.read)) == files.contents[0] * 1000
    assert files.bytes_read == 32


def test_big_endian_complex_numbers_are_swapped_part_by_part() -> None:
    values = np.array([1 + 2j, -3.5 + 0.25j], ">c8")
    tensor = Tensor("w", "C64", (2,), (Piece(0, 0, (0,), (2,), None, "big"),))
    made = assemble(gather(tensor, Window(0, 16)), Files([values.tobytes()]).read)
    assert np.frombuffer(made, "<c8").tolist() == values.tolist()


def test_empty_tensors_have_nothing_to_gather() -> None:
    tensor = Tensor("w", "F32", (0, 3), (Piece(0, 0, (0, 0), (0, 3)),))
    assert list(windows(tensor, 4)) == []
    assert runs(tensor) == ()
    assert cost(tensor, 4).amplification == 1.0
    assert assemble(gather(tensor, Window(0, 0)), Files([b""]).read) == b""


def test_a_scalar_is_one_window() -> None:
    tensor = Tensor("w", "F64", (), (Piece(0, 3, (), (), None, "big"),))
    assert list(windows(tensor, 8)) == [Window(0, 8)]
    assert assemble(gather(tensor, Window(0, 8)), Files([b"xyz" + bytes(range(8))]).read) == bytes(range(8))[::-1]


@pytest.mark.parametrize("window", [Window(2, 8), Window(0, 6), Window(8, 4), Window(0, 20)])
def test_a_window_between_no_elements_is_refused(window: Window) -> None:
    tensor = Tensor("w", "F32", (4,), (Piece(0, 0, (0,), (4,), (8,)),))
    with pytest.raises(ValueError, match="is no window"):
        gather(tensor, window)


def test_packed_sub_byte_elements_and_windows_below_an_element_are_refused() -> None:
    with pytest.raises(ValueError, match="F4 is packed"):
        gather(Tensor("w", "F4", (4,), (Piece(0, 0, (0,), (4,), (1,)),)), Window(0, 2))
    with pytest.raises(ValueError, match="holds no element"):
        list(windows(Tensor("w", "F32", (4,), (Piece(0, 0, (0,), (4,), (8,)),)), 3))
