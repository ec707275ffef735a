"""Casts of floating-point tensors to narrower ones, window by window, in numpy: no torch, and the same bits as torch.

For every value that is not a NaN the result is torch's own, `tensor.to(dtype)`, bit for bit: rounding to nearest,
ties to even, subnormals kept, too large values to infinity, and everything by way of float32 as c10's conversions go.
What torch makes of a NaN depends on the processor. Here the rule is: a NaN stays a NaN, quiet, with its sign and
without its payload.

Almost all of it is whole-number arithmetic on the bits, a block that fits a core's cache at a time: numpy does that
several values at once and without the interpreter's lock, where it converts to float16 one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from reshard.pipeline.errors import CastOverflow
from reshard.pipeline.limits import CAST_BLOCK
from reshard.pipeline.tensors import DTYPE_BITS

_Array = np.ndarray[Any, Any]
# What a window is read as: numpy has no bfloat16, which is the upper half of a float32.
_NUMPY: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}

# Sizes are bits without the sign, which compare as numbers do. Of float32, but for those of bfloat16:
_SIZE = 0x7FFFFFFF
_INFINITE = 0x7F800000  # above it are NaNs
# The least size that each target rounds to infinity, and the quiet NaN without payload in the target's own bits.
_TOO_LARGE = {"F32": _INFINITE, "F16": 0x477FF000, "BF16": 0x7F7F8000}
_QUIET_NAN = {"F32": 0x7FC00000, "F16": 0x7E00, "BF16": 0x7FC0}
_HALF_MAX = 0x47800000  # 2**16: the first power of two that float16 has no number for
_HALF_NORMAL = 0x38800000  # 2**-14: below it float16 is subnormal
# Blocks of it, of float32 and of bfloat16: numpy compares with a single number four times as slowly.
_NORMALS: _Array = np.full(CAST_BLOCK, _HALF_NORMAL, np.uint32)
_BFLOAT_NORMALS: _Array = (_NORMALS >> 16).astype(np.uint16)


class Cast(NamedTuple):
    """A window after its cast; ``overflows`` finite values became infinite."""

    data: memoryview
    overflows: int


def cast(window: bytes | bytearray | memoryview, source: str, target: str) -> Cast:
    """The elements of ``window`` (little-endian ``source``) as little-endian ``target``.

    Raises ValueError when the window has a part of an element, or ``cast_dtype`` does not give the cast.
    """
    if source not in _NUMPY or target not in _QUIET_NAN or DTYPE_BITS[target] > DTYPE_BITS[source]:
        raise ValueError(f"{source} is not cast to {target}")
    if source == target:
        return Cast(memoryview(window), 0)
    values: _Array = np.frombuffer(window, _NUMPY[source])
    made: _Array = np.empty(len(values), f"<u{DTYPE_BITS[target] // 8}")
    overflows = 0
    for start in range(0, len(values), CAST_BLOCK):
        block = slice(start, start + CAST_BLOCK)
        overflows += _cast_block(values[block], made[block], target)
    return Cast(made.view(np.uint8).data, overflows)


def _cast_block(values: _Array, made: _Array, target: str) -> int:
    """Fill ``made`` with the bits; returns how many finite values became infinite."""
    if target == "F16" and values.dtype == _NUMPY["BF16"]:
        sizes = values & 0x7FFF
        if sizes.max() < _HALF_MAX >> 16:
            made[:] = _half_of_bfloat(values, sizes)
            return 0
    single = _single(values)
    sizes = single & _SIZE
    some_special = sizes.max() >= _TOO_LARGE[target]
    if target == "F16":
        made[:] = _half(single, np.minimum(sizes, _HALF_MAX) if some_special else sizes)
    elif target == "BF16":
        made[:] = _bfloat(single)
    else:
        made[:] = single
    return _settle(values, sizes, made, target) if some_special else 0


def _single(values: _Array) -> _Array:
    """The values as bits of float32."""
    if values.dtype == _NUMPY["BF16"]:
        bits = values.astype(np.uint32)
        bits <<= 16
        return bits
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return values.astype(np.float32, copy=False).view(np.uint32)


def _bfloat(single: _Array) -> _Array:
    """The upper half of each, one more if the lower half is more than a half of its last bit, or that and it is odd."""
    bits = single >> 16
    bits &= 1
    bits += 0x7FFF
    bits += single
    bits >>= 16
    return bits


def _half(single: _Array, sizes: _Array) -> _Array:
    """Bits of float16; ``sizes`` are at most 2**16.

    What a size has above 2**-14 is rounded as in ``_bfloat``. What it has below is added to a half, whose last bit is
    float16's smallest number, so that the processor rounds it; the half itself has no bit among the lower 16.
    """
    normals = _NORMALS[: len(sizes)]
    bits = np.maximum(sizes, normals)
    bits -= _HALF_NORMAL - 0xFFF
    odd = single >> 13
    odd &= 1
    bits += odd
    bits >>= 13
    small = np.minimum(sizes, normals).view(np.float32)
    small += np.float32(0.5)
    bits += small.view(np.uint32)
    signs = single >> 16
    signs &= 0x8000
    bits |= signs
    return bits


def _half_of_bfloat(values: _Array, sizes: _Array) -> _Array:
    """The same of bfloat16's bits, whose ``sizes`` are below 2**16: what is above 2**-14 needs no rounding.

    Arithmetic on 16 bits takes half as long.
    """
    normals = _BFLOAT_NORMALS[: len(sizes)]
    small = np.minimum(sizes, normals).astype(np.uint32)
    small <<= 16
    half = small.view(np.float32)
    half += np.float32(0.5)
    bits = np.maximum(sizes, normals)
    bits -= _HALF_NORMAL >> 16
    bits <<= 3
    bits += small.astype(np.uint16)
    bits |= values & 0x8000
    return bits


def _settle(values: _Array, sizes: _Array, made: _Array, target: str) -> int:
    """Make quiet NaNs of the NaNs; returns how many finite values became infinite."""
    nans = sizes > _INFINITE
    # From the bits, because processors differ in what a conversion makes of a NaN's sign.
    negative = values.view(f"<u{values.itemsize}")[nans] >> (8 * values.itemsize - 1)
    made[nans] = negative.astype(made.dtype) << (8 * made.itemsize - 1) | made.dtype.type(_QUIET_NAN[target])
    infinite = np.isinf(values) if values.dtype == _NUMPY["F64"] else sizes == _INFINITE
    return int(np.count_nonzero((sizes >= _TOO_LARGE[target]) & ~nans & ~infinite))


class Caster:
    """Casts one tensor as its bytes pass, whatever the views that they come in."""

    def __init__(self, tensor: str, source: str, target: str, *, strict: bool = False) -> None:
        self._tensor = tensor
        self._source = source
        self._target = target
        self._strict = strict
        self._rest = b""
        self.overflows = 0

    def feed(self, view: bytes | bytearray | memoryview) -> Iterator[memoryview]:
        """The cast of every element that is now complete.

        Raises CastOverflow at the first window with a value that becomes infinite, when that was asked for.
        """
        width = DTYPE_BITS[self._source] // 8
        view = memoryview(view)
        if self._rest:
            missing = width - len(self._rest)
            self._rest += view[:missing]
            view = view[missing:]
            if len(self._rest) < width:
                return
            yield self._cast(memoryview(self._rest))
        whole = len(view) - len(view) % width
        self._rest = bytes(view[whole:])
        if whole:
            yield self._cast(view[:whole])

    def finish(self) -> None:
        """Raises ValueError when the tensor ended in the middle of an element."""
        if self._rest:
            raise ValueError(f"{self._tensor} ended {len(self._rest)} bytes into an element")

    def _cast(self, window: memoryview) -> memoryview:
        data, overflows = cast(window, self._source, self._target)
        self.overflows += overflows
        if overflows and self._strict:
            raise CastOverflow(tensor=self._tensor, count=overflows, dtype=self._target)
        return data
