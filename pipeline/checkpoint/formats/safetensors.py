"""Safetensors headers: parsed as if an enemy wrote them, and written so that every loader reads them.

The format (https://github.com/huggingface/safetensors, README "Format"): 8 bytes, the header's length as an unsigned
little-endian integer; the header, a JSON object that names each tensor's dtype, shape and ``data_offsets`` (relative
to the end of the header), and may hold string pairs under ``__metadata__``; then the data, without holes or overlaps.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from reshard.pipeline.checkpoint.formats.pointers import refuse_pointer
from reshard.pipeline.errors import BadHeader, BadLength, DuplicateTensor
from reshard.pipeline.limits import ALIGNMENT, HEADER_MAX
from reshard.pipeline.tensors import DTYPE_BITS, Piece, Tensor, size_in_bytes

LENGTH_BYTES = 8
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
# A shape is data from a stranger: numpy itself stops at 64 dimensions.
_DIMENSIONS_MAX = 64
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}


class Spec(NamedTuple):
    """One tensor of a header; ``start`` and ``stop`` are bytes of the file, not of its data section."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """The parsed header of one file; ``tensors`` is in the order of the data."""

    file: str
    metadata: dict[str, str]
    tensors: dict[str, Spec]
    data_start: int  # where the data section begins: 8 + the header's length
    file_size: int

    def specs(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape), which is all that a loader's class can be held against."""
        return {name: (spec.dtype, spec.shape) for name, spec in self.tensors.items()}

    def as_tensors(self, file: int) -> list[Tensor]:
        """The tensors as pieces of source file number ``file``."""
        return [
            Tensor(name, spec.dtype, spec.shape, (Piece(file, spec.start, (0,) * len(spec.shape), spec.shape),))
            for name, spec in self.tensors.items()
        ]


def header_length(prefix: bytes | memoryview, *, file: str, file_size: int) -> int:
    """The length that the first 8 bytes claim; raises BadHeader before anyone allocates it, and LfsPointer."""
    if len(prefix) < LENGTH_BYTES:
        raise BadHeader(file=file, why=f"{len(prefix)} bytes are too few for a safetensors file")
    refuse_pointer(prefix, file)
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > HEADER_MAX:
        raise BadHeader(file=file, why=f"its header claims {length} bytes; the format allows {HEADER_MAX}")
    if LENGTH_BYTES + length > file_size:
        raise BadLength(file=file, actual=file_size, expected=f"{LENGTH_BYTES + length} or more")
    return length


def parse_header(data: bytes | memoryview, *, file: str, file_size: int) -> Header:
    """The header of a file of ``file_size`` bytes, of which ``data`` holds at least 8 + header length.

    Raises BadHeader, BadLength or DuplicateTensor naming ``file``; accepts exactly what the format's own reader does.
    """
    length = header_length(data, file=file, file_size=file_size)
    data_start = LENGTH_BYTES + length
    raw = bytes(data[LENGTH_BYTES:data_start])
    if len(raw) < length:
        raise BadLength(file=file, actual=len(data), expected=data_start)
    content = _json_object(raw, file)
    metadata = _metadata(content.pop("__metadata__", {}), file)
    specs = sorted(
        ((name, _spec(name, entry, data_start, file)) for name, entry in content.items()),
        key=lambda item: (item[1].start, item[1].stop),
    )
    position = data_start
    for name, spec in specs:
        if spec.start != position:
            trouble = "overlaps another tensor" if spec.start < position else "leaves a hole before it"
            raise BadHeader(file=file, why=f"{name} {trouble}")
        position = spec.stop
    if position != file_size:
        raise BadLength(file=file, actual=file_size, expected=position)
    return Header(file, metadata, dict(specs), data_start, file_size)


def _json_object(raw: bytes, file: str) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
            raise DuplicateTensor(tensor=repr(twice)[1:-1], file=file, other="the same header")
        return found

    try:
        content = json.loads(raw.decode("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise BadHeader(file=file, why=f"its header is not JSON ({_first_line(error)})") from None
    if not isinstance(content, dict):
        raise BadHeader(file=file, why="its header is no JSON object")
    return content


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def _metadata(value: Any, file: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise BadHeader(file=file, why="__metadata__ holds something other than strings")
    return value


def _encodable(name: str) -> bool:
    """JSON can spell lone surrogates, and UTF-8 cannot hold them."""
    return not any("\ud800" <= c <= "\udfff" for c in name)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _spec(name: str, entry: Any, data_start: int, file: str) -> Spec:
    if not isinstance(entry, dict) or not entry.keys() >= _ENTRY_KEYS:
        raise BadHeader(file=file, why=f"{name} lacks one of {', '.join(sorted(_ENTRY_KEYS))}")
    if not _encodable(name):
        raise BadHeader(file=file, why=f"{name!a} is no valid name")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise BadHeader(file=file, why=f"{name} has the unknown dtype {str(dtype)[:40]!r}")
    if not isinstance(shape, list) or len(shape) > _DIMENSIONS_MAX or not all(map(_is_count, shape)):
        raise BadHeader(file=file, why=f"{name} has no valid shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise BadHeader(file=file, why=f"{name} has no valid data_offsets")
    try:
        expected = size_in_bytes(dtype, tuple(shape))
    except ValueError as error:
        raise BadHeader(file=file, why=f"{name}: {error}") from None
    if offsets[1] - offsets[0] != expected:
        why = f"{name} has {offsets[1] - offsets[0]} bytes, and {dtype}{shape} needs {expected}"
        raise BadHeader(file=file, why=why)
    return Spec(dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


# -------------------------------------------------------------------------------------------------------- writing


def _fragment(name: str, dtype: str, shape: tuple[int, ...], start: int, stop: int) -> str:
    entry = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
    return f"{json.dumps(name, ensure_ascii=False)}:{json.dumps(entry, separators=(',', ':'))}"


def _metadata_fragment(metadata: Mapping[str, str]) -> str:
    text = json.dumps(dict(sorted(metadata.items())), separators=(",", ":"), ensure_ascii=False)
    return f'"__metadata__":{text}'


def build_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Everything before the data: length, JSON and padding, for (name, dtype, shape) in the order of the data."""
    fragments = [_metadata_fragment(metadata)]
    position = 0
    for name, dtype, shape in tensors:
        stop = position + size_in_bytes(dtype, shape)
        fragments.append(_fragment(name, dtype, shape, position, stop))
        position = stop
    text = ("{" + ",".join(fragments) + "}").encode()
    padded = text + b" " * (-len(text) % ALIGNMENT)
    return len(padded).to_bytes(LENGTH_BYTES, "little") + padded


class HeaderLengths:
    """What a header costs, tensor by tensor, before anyone knows the offsets: an upper bound that is off by digits.

    A packer adds tensors one at a time and asks whether the file still fits; building the header anew each time would
    be quadratic in the number of tensors.
    """

    def __init__(self, metadata: Mapping[str, str], largest_offset: int) -> None:
        self._offset = largest_offset
        self.empty = LENGTH_BYTES + len(_metadata_fragment(metadata).encode()) + len("{}") + ALIGNMENT - 1

    def of(self, name: str, dtype: str, shape: tuple[int, ...]) -> int:
        """At most this many bytes of header for one more tensor."""
        return 1 + len(_fragment(name, dtype, shape, self._offset, self._offset).encode())
