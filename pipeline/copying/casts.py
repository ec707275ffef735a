"""Casts of floating-point tensors to narrower ones, window by window, in numpy: no torch, and the same bits as torch.

For every value that is not a NaN the result is torch's own, `tensor.to(dtype)`, bit for bit: rounding to nearest,
ties to even, subnormals kept, too large values to infinity, and everything by way of float32 as c10's conversions go.
What torch makes of a NaN depends on the processor. Here the rule is: a NaN stays a NaN, quiet, with its sign and
without its payload.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from reshard.pipeline.errors import CastOverflow
from reshard.pipeline.limits import CAST_BLOCK
from reshard.pipeline.tensors import DTYPE_BITS

_Array = np.ndarray[Any, Any]
_NUMPY: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# The quiet NaN without payload, as bits, and the sign bit beside it.
_QUIET_NAN = {"F32": 0x7FC00000, "F16": 0x7E00, "BF16": 0x7FC0}


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
    made: _Array = np.empty(len(values), _NUMPY[target])
    overflows = 0
    # In blocks, so that what numpy makes in between stays small whatever the window.
    step = CAST_BLOCK // values.itemsize
    for start in range(0, len(values), step):
        overflows += _cast_block(values[start : start + step], made[start : start + step], target)
    return Cast(made.view(np.uint8).data, overflows)


def _cast_block(values: _Array, made: _Array, target: str) -> int:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        single = values.astype(np.float32)
        made[:] = single.astype(made.dtype)
        overflows = int(np.count_nonzero(np.isinf(made.astype(np.float32)) & np.isfinite(values)))
        nans = np.isnan(single)
    if nans.any():
        bits = made.view(f"<u{made.itemsize}")
        # From the bits, because processors differ in what a conversion makes of a NaN's sign.
        negative = values.view(f"<u{values.itemsize}")[nans] >> (8 * values.itemsize - 1)
        bits[nans] = negative.astype(bits.dtype) << (8 * made.itemsize - 1) | bits.dtype.type(_QUIET_NAN[target])
    return overflows


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
