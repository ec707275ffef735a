"""Casts of floating-point tensors to narrower ones, window by window, in numpy: no torch, and the same bits as torch.

For every value that is not a NaN the result is torch's own, `tensor.to(dtype)`, bit for bit: rounding to nearest,
ties to even, subnormals kept, too large values to infinity, and everything by way of float32 as c10's conversions go.
What torch makes of a NaN depends on the processor. Here the rule is: a NaN stays a NaN, quiet, with its sign and
without its payload.

It is whole-number arithmetic on the bits, a block that fits a core's cache at a time: numpy does that several values at
once, where it converts to float16 one by one. Of 16 bits, what takes more than a shift is looked up.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from reshard.pipeline.errors import CastOverflow
from reshard.pipeline.limits import CAST_BLOCK, LOOKUP_BLOCK
from reshard.pipeline.tensors import DTYPE_BITS

_Array = np.ndarray[Any, Any]
# numpy has no bfloat16, which is the upper half of a float32.
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
# An infinity's bits without the sign, and those of each target's quiet NaN without payload.
_INFINITE = {"F64": 0x7FF << 52, "F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}
_QUIET_NAN = {"F32": 0x7FC00000, "F16": 0x7E00, "BF16": 0x7FC0}
# Of float32, without the sign, which compares as numbers do:
_HALF_MAX = 0x47800000  # 2**16: the first power of two that float16 has no number for
_HALF_INFINITE = 0x477FF000  # 65,520: the least that float16 rounds to infinity, and the other dtypes later
_HALF_NORMAL = 0x38800000  # 2**-14: below it float16 is subnormal
# Of bfloat16, likewise, and what its bits lack once they are three places up: 2**-14 is 0x0400 in float16.
_BFLOAT_MAX, _BFLOAT_NORMAL = _HALF_MAX >> 16, _HALF_NORMAL >> 16
_SHIFTED = 64  # one other value in so many at most, or a lookup of all is faster
_BIAS = (0x0400 - 8 * _BFLOAT_NORMAL) & 0xFFFF
_NORMALS: _Array = np.full(CAST_BLOCK, _HALF_NORMAL, np.uint32)  # numpy compares with a single number four times slower


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
    values: _Array = np.frombuffer(window, f"<u{DTYPE_BITS[source] // 8}")
    made: _Array = np.empty(len(values), f"<u{DTYPE_BITS[target] // 8}")
    overflows = 0
    looked_up = DTYPE_BITS[source] == 16
    block = LOOKUP_BLOCK if looked_up else CAST_BLOCK
    for start in range(0, len(values), block):
        before, after = values[start : start + block], made[start : start + block]
        if looked_up:
            before, after = _look_up(before, after, source, target)
        elif _convert(before.view(_NUMPY[source]), after, target) < _HALF_INFINITE:
            continue
        if not _all_finite(after, target):
            overflows += _infinities(after, target) - _infinities(before, source)
    return Cast(made.view(np.uint8).data, overflows)


def _look_up(values: _Array, made: _Array, source: str, target: str) -> tuple[_Array, _Array]:
    """Fill ``made``; returns those that had to be looked up, and what was made of them.

    A bfloat16 that float16 has as a normal number is its bits three places up, with another bias of the exponent. It
    takes half as long to do so with all, and to look up the others, where these are few: of most weights, one in some
    hundreds.
    """
    table = _table(source, target)
    if target == "F16":
        sizes = values * 2
        sizes -= 2 * _BFLOAT_NORMAL
        unlike = sizes >= 2 * (_BFLOAT_MAX - _BFLOAT_NORMAL)
        if np.count_nonzero(unlike) <= len(values) // _SHIFTED:
            np.multiply(values, 8, out=made)
            made += _BIAS
            np.bitwise_and(values, 0x8000, out=sizes)
            made |= sizes
            others = np.flatnonzero(unlike)
            values = values[others]
            made[others] = found = table[values]
            return values, found
    np.take(table, values, out=made, mode="clip")
    return values, made


@cache
def _table(source: str, target: str) -> _Array:
    """What becomes of each value of 16 bits."""
    bits: _Array = np.arange(1 << 16, dtype="<u2")
    values = bits.view("<f2") if source == "F16" else (bits.astype("<u4") << 16).view("<f4")
    made = np.empty_like(bits)
    _convert(values, made, target)
    return made


def _convert(values: _Array, made: _Array, target: str) -> int:
    """Fill ``made`` with the bits of ``values``; returns the largest size among them."""
    with np.errstate(all="ignore"):
        single = values.astype(np.float32, copy=False)
    bits = single.view(np.uint32)
    sizes = bits & 0x7FFFFFFF
    largest = sizes.max()
    if target == "F16":
        made[:] = _half(bits, sizes if largest <= _HALF_MAX else np.minimum(sizes, _HALF_MAX))
    else:
        made[:] = _bfloat(bits) if target == "BF16" else bits
    if largest > _INFINITE["F32"]:
        nans = sizes > _INFINITE["F32"]
        # The sign from the source, because processors differ in what a conversion makes of it.
        signs = np.signbit(values[nans]).astype(made.dtype) << (8 * made.itemsize - 1)
        made[nans] = signs | made.dtype.type(_QUIET_NAN[target])
    return int(largest)


def _bfloat(single: _Array) -> _Array:
    """The upper half of each, one more if the lower half is more than a half of its last bit, or that and it is odd."""
    bits = single >> 16
    bits &= 1
    bits += 0x7FFF
    bits += single
    bits >>= 16
    return bits


def _half(single: _Array, sizes: _Array) -> _Array:
    """Bits of float16; ``sizes`` are at most 2**16. What a size has above 2**-14 is rounded as in ``_bfloat``.

    What it has below is added to a half, whose last bit is float16's smallest number, so that the processor rounds it;
    the half itself has no bit among the lower 16. numpy's own conversion takes twice as long.
    """
    normals = _NORMALS[: len(single)]
    bits = np.maximum(sizes, normals)
    bits -= _HALF_NORMAL - 0xFFF
    odd = single >> 13
    odd &= 1
    bits += odd
    bits >>= 13
    small = np.minimum(sizes, normals, out=sizes).view(np.float32)
    small += np.float32(0.5)
    bits += small.view(np.uint32)
    signs = single >> 16
    signs &= 0x8000
    bits |= signs
    return bits


def _all_finite(bits: _Array, dtype: str) -> bool:
    """A third of what it takes to count infinities, of which nearly no window has one.

    The largest without a sign is, of those with the sign bit, the lowest of all; as signed numbers, of the others.
    """
    sign, signed = 1 << DTYPE_BITS[dtype] - 1, bits.view(f"<i{DTYPE_BITS[dtype] // 8}")
    return int(signed.max(initial=0)) < _INFINITE[dtype] and int(bits.max(initial=0)) < sign | _INFINITE[dtype]


def _infinities(bits: _Array, dtype: str) -> int:
    return int(np.count_nonzero(bits & ((1 << DTYPE_BITS[dtype] - 1) - 1) == _INFINITE[dtype]))


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
