"""Reading tensors through their pieces, by the definition of a piece and nothing of the pipeline."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path

import numpy as np
import torch

from reshard.pipeline.tensors import DTYPE_BITS, StoredFile, Tensor


def stored(root: Path, *paths: str) -> list[StoredFile]:
    """Those files below ``root``, as a store lists them; all of them when none is named."""
    names = paths or sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    return [StoredFile(name, (root / name).stat().st_size) for name in names]


class Disk:
    """Files below a folder, read in ranges as over a network; it remembers what was asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.requests: list[tuple[str, int, int]] = []
        self._lock = threading.Lock()

    def read(self, file: StoredFile, start: int, stop: int, /) -> Iterator[memoryview]:
        assert 0 <= start < stop <= file.size, "asks for bytes outside of the file"
        with self._lock:
            self.requests.append((file.path, start, stop))
        with (self.root / file.path).open("rb") as handle:
            handle.seek(start)
            data = handle.read(stop - start)
        # In views of odd lengths that are overwritten afterwards, as a network client's buffer is.
        for at in range(0, len(data), 1009):
            buffer = bytearray(data[at : at + 1009])
            yield memoryview(buffer)
            buffer[:] = bytes(len(buffer))

    @property
    def bytes_read(self) -> int:
        return sum(stop - start for _, start, stop in self.requests)


def content(tensor: Tensor, files: Sequence[StoredFile], root: Path) -> bytes:
    """The tensor's packed, little-endian bytes; fails when its pieces do not tile it exactly."""
    bits = DTYPE_BITS[tensor.dtype]
    if bits % 8:
        assert tensor.range is not None
        _, start, stop = tensor.range
        return (root / files[tensor.pieces[0].file].path).read_bytes()[start:stop]
    width = bits // 8
    made = np.zeros(tensor.shape, f"V{width}")
    count = np.zeros(tensor.shape, int)
    for piece in tensor.pieces:
        data = (root / files[piece.file].path).read_bytes()
        strides = piece.strides or tuple(width * prod(piece.shape[axis + 1 :]) for axis in range(len(piece.shape)))
        box = np.ndarray(piece.shape, f"V{width}", data, piece.offset if prod(piece.shape) else 0, strides)
        if piece.order == "big":
            part = 4 if tensor.dtype == "C64" else width
            swapped = np.ascontiguousarray(box).reshape(-1).view(f">u{part}").astype(f"<u{part}")
            box = swapped.view(f"V{width}").reshape(piece.shape)
        place = (*(slice(at, at + extent) for at, extent in zip(piece.at, piece.shape, strict=True)), ...)
        made[place] = box
        count[place] += 1
    assert (count == 1).all(), "the pieces do not tile the tensor"
    return made.tobytes()


@contextmanager
def flat_memory(limit: int) -> Iterator[None]:
    """Fails when the block allocates more than ``limit`` bytes at once."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= limit, f"{peak} bytes were held at once, {limit} expected"


def assert_holds(
    tensors: Sequence[Tensor], files: Sequence[StoredFile], folder: Path, expected: Mapping[str, torch.Tensor]
) -> None:
    """``tensors``, pieces of ``files``, are those expected: names, shapes and bytes."""
    assert {t.name: t.shape for t in tensors} == {name: tuple(t.shape) for name, t in expected.items()}
    for tensor in tensors:
        wanted = expected[tensor.name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert content(tensor, files, folder) == wanted, tensor.name
