"""Quantised weights to plain ones, window by window: values times scales in float32, which then are cast as all are.

For every value that is not a NaN the result is what transformers makes of it on a CPU, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import prod
from typing import Any

import numpy as np

from reshard.pipeline.checkpoint.formats.torch_names import DTYPES
from reshard.pipeline.copying.casts import Caster
from reshard.pipeline.copying.gather import gather
from reshard.pipeline.copying.stream import Scales
from reshard.pipeline.errors import CastOverflow
from reshard.pipeline.limits import DEQUANTIZE_BLOCK, SCALES_HELD
from reshard.pipeline.planning.model import Entry, Scale
from reshard.pipeline.tensors import DTYPE_BITS, Box

_Array = np.ndarray[Any, Any]
# The exponent of two that a byte of 0 stands for. With fp8 the last, 128, is infinite, as for transformers; not with
# mxfp4: as float32 has no such number, its values are doubled above, and its exponents are one less.
_FIRST_EXPONENT = {"F8_E4M3": -127, "F8_E5M2": -127, "F4": -128}


@cache
def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """One of torch's dtypes, by the format's name, as numpy or ml_dtypes has it, little-endian."""
    import ml_dtypes  # 4 MB that copies without scales do without

    name = next(name for name, ours in DTYPES.items() if ours == dtype).removesuffix("_x2")
    return np.dtype(getattr(ml_dtypes, name, name)).newbyteorder("<")


@cache
def _meanings(dtype: str) -> _Array:
    """What each byte of a weight stands for, or each half of one."""
    codes = np.arange(16 if dtype == "F4" else 256, dtype=np.uint8)
    meanings: _Array = codes.view(numpy_dtype(dtype)).astype(np.float32)
    return meanings * 2 if dtype == "F4" else meanings


def _values(dtype: str, codes: _Array, row: int) -> _Array:
    """What ``codes`` stand for, whose first is of that row: each is a value, or has one in the half for its row."""
    if dtype == "F4":
        halves = (np.arange(row, row + len(codes)) % 2 * 4).astype(np.uint8)
        codes = codes >> halves[:, None] & 0xF
    return _meanings(dtype)[codes]


class Dequantizer:
    """Dequantises one tensor as its bytes pass, whatever the views that they come in."""

    def __init__(self, entry: Entry, scale: Scale, scales: Scales, *, strict: bool) -> None:
        shape = entry.tensor.shape
        self._entry, self._scale, self._scales, self._strict = entry, scale, scales, strict
        self._caster = Caster(entry.name, "F32", entry.as_dtype, strict=strict)
        self._columns = shape[-1] if shape else 1
        self._matrices = scale.tensor.shape[:-2]
        self._rows = prod(shape[:-1]) // max(1, prod(self._matrices))  # of a matrix
        self._at = 0  # the next element
        self._infinite = 0
        self._held: tuple[int, _Array] | None = None  # the matrix whose scales these are

    @property
    def overflows(self) -> int:
        return self._infinite + self._caster.overflows

    def feed(self, view: bytes | bytearray | memoryview) -> Iterator[memoryview]:
        """The plain values of ``view``; raises CastOverflow as casts do."""
        codes: _Array = np.frombuffer(view, np.uint8)
        while len(codes):
            row, column = divmod(self._at, self._columns)
            some = codes[:DEQUANTIZE_BLOCK]
            if column or len(some) < self._columns:
                rows, width = 1, min(len(some), self._columns - column)
            else:
                rows, width = min(len(some) // self._columns, self._rows - row % self._rows), self._columns
            made = _values(self._entry.tensor.dtype, some[: rows * width].reshape(rows, width), row)
            yield from self._caster.feed(self._times_scale(made, row, column))
            self._at += rows * width
            codes = codes[rows * width :]

    def finish(self) -> None:
        """Raises ValueError when the tensor ended early."""
        if self._at != prod(self._entry.tensor.shape):
            raise ValueError(f"{self._entry.name} ended after {self._at} values")

    def _times_scale(self, values: _Array, row: int, column: int) -> memoryview:
        """The bytes of ``values``, which begin at ``row`` and ``column`` of the tensor, after it was done to them."""
        (rows, width), (height, length) = values.shape, self._scale.block
        matrix, row = divmod(row, self._rows)
        left = column // length
        scale = self._box(matrix, row // height, (row + rows - 1) // height, left, (column + width - 1) // length)
        scale = scale[np.arange(row, row + rows) // height - row // height]
        if scale.shape[1] > 1:
            scale = scale.take(np.arange(column, column + width) // length - left, axis=1)
        with np.errstate(over="ignore", invalid="ignore"):
            made: _Array = values * scale
        if np.isinf(made).any():
            overflows = int(np.count_nonzero(np.isinf(made) & np.isfinite(values) & np.isfinite(scale)))
            self._infinite += overflows
            if overflows and self._strict:
                raise CastOverflow(tensor=self._entry.name, count=overflows, dtype="F32")
        return made.reshape(-1).view(np.uint8).data

    def _box(self, matrix: int, top: int, bottom: int, left: int, right: int) -> _Array:
        """The scales from ``top`` and ``left`` to ``bottom`` and ``right`` of one matrix."""
        height, width = self._scale.tensor.shape[-2:]
        if height * width > SCALES_HELD:
            return self._read(matrix, top, left, (bottom - top + 1, right - left + 1))
        if self._held is None or self._held[0] != matrix:
            self._held = (matrix, self._read(matrix, 0, 0, (height, width)))
        return self._held[1][top : bottom + 1, left : right + 1]

    def _read(self, matrix: int, top: int, left: int, box: tuple[int, int]) -> _Array:
        """So many scales of one matrix from ``top`` and ``left`` on, as float32."""
        tensor, scratch = self._scales.kept[self._scale.tensor.name]
        at = (*(int(i) for i in np.unravel_index(matrix, self._matrices)), top, left) if self._matrices else (top, left)
        window = Box(at, (*(1 for _ in self._matrices), *box))
        into = bytearray(prod(box) * DTYPE_BITS[tensor.dtype] // 8)
        packed = np.frombuffer(gather(tensor, window, scratch.read_into, into), numpy_dtype(tensor.dtype)).reshape(box)
        if tensor.dtype == "U8":
            with np.errstate(over="ignore"):
                return np.ldexp(np.float32(1), packed.astype(np.int32) + _FIRST_EXPONENT[self._entry.tensor.dtype])
        return packed.astype(np.float32)
