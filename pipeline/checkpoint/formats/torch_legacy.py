"""Files of `torch.save` before torch 1.6 (and of `_use_new_zipfile_serialization=False` since).

Five pickles in a row, then the storages: the magic number, the protocol version, facts about the machine, the value,
the list of storage keys; then for each key its number of elements (8 bytes, little-endian) and its bytes
(`torch/serialization.py`, `_legacy_load`). The writer converts to little-endian on every machine
(torch/csrc/serialization.cpp, `THPStorage_writeFileRaw`), so the facts about the machine change nothing.
"""

from __future__ import annotations

import re

from reshard.pipeline.checkpoint.formats.nesting import label
from reshard.pipeline.checkpoint.formats.pickles import Loaded, load
from reshard.pipeline.checkpoint.formats.ranged import Read, read_bytes, read_spans
from reshard.pipeline.checkpoint.formats.settings import settings_of
from reshard.pipeline.checkpoint.formats.torch_names import ALLOWED
from reshard.pipeline.checkpoint.formats.torch_state import (
    piece_of,
    sizes_of,
    storage_of,
    tensors_of,
    tied_tensors,
    views_of,
)
from reshard.pipeline.errors import BadArchive, BadLength, BadPickle, PickleCutShort
from reshard.pipeline.limits import HEADER_READ, PICKLE_MAX
from reshard.pipeline.tensors import Contents, Record, Span, StoredFile, Tensor

_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_PROTOCOL_VERSION = 1001
# How every such file begins: a protocol, from 4 on a frame of 13 bytes, then the magic number as a LONG1 of ten bytes.
_MAGIC = re.compile(
    rb"\x80(?:[\x02\x03]|[\x04\x05]\x95\x0d\0{7})\x8a\n" + re.escape(_MAGIC_NUMBER.to_bytes(10, "little")), re.DOTALL
)
_COUNT_BYTES = 8


def is_legacy(head: bytes) -> bool:
    """Whether a file that begins so was written by `torch.save` before torch 1.6, or as then."""
    return _MAGIC.match(head) is not None


class _Stream:
    """The pickles at the front of a file, read as far as they turn out to reach."""

    def __init__(self, read: Read, file: StoredFile) -> None:
        self._read = read
        self._file = file
        self._data = read_bytes(read, file, 0, min(HEADER_READ, file.size))
        self.at = 0

    def next(self) -> Loaded:
        while True:
            try:
                loaded = load(self._data, file=self._file.path, allowed=ALLOWED, start=self.at)
            except PickleCutShort:
                if len(self._data) == self._file.size or len(self._data) - self.at >= PICKLE_MAX:
                    raise
                more = min(4 * len(self._data), self.at + PICKLE_MAX, self._file.size)
                self._data += read_bytes(self._read, self._file, len(self._data), more)
            else:
                self.at = loaded.stop
                return loaded


def read_torch_legacy(read: Read, file: StoredFile, number: int) -> Contents:
    """The tensors of a pre-zip torch file, as pieces of source file ``number``; reads no storage.

    Raises the CheckpointError family.
    """
    stream = _Stream(read, file)
    magic, protocol, _machine = (stream.next().value for _ in range(3))
    if type(magic) is not int or magic != _MAGIC_NUMBER or type(protocol) is not int or protocol != _PROTOCOL_VERSION:
        raise BadArchive(file=file.path, why="starts like a torch file, but is invalid")
    state = stream.next()
    starts = _starts(read, file, state, stream.next().value, stream.at)
    settings, kept_back = settings_of(state.value, file.path)
    tensors, notes = tensors_of(state.value, file.path, settings)
    views = views_of(tensors, file.path)
    records = {
        storage.key: Record(f"storage {label((storage.key,))}", number, start, start + storage.whole, None)
        for storage in (view.storage for view in views.values())
        for start in (starts[storage.key],)
    }
    found = tuple(Tensor(n, v.dtype, v.shape, (piece_of(v, records[v.storage.key]),)) for n, v in views.items())
    return Contents(found, (*kept_back, *notes), tied_tensors(found), tuple(records.values()), settings)


def _starts(read: Read, file: StoredFile, state: Loaded, keys: object, at: int) -> dict[str, int]:
    """Where the bytes of each storage begin; the first storage's count stands at byte ``at``.

    Every storage's length follows from the pickle, so all counts can be read at once and held against it.
    """
    if type(keys) is not list:
        raise BadPickle(file=file.path, why="list of storages is malformed")
    storages = [storage_of(found, "a value", file.path) for found in state.persistent]
    sizes = sizes_of(storages, file.path)
    widths = {storage.key: storage.width for storage in storages}
    if not all(type(key) is str for key in keys) or sorted(keys) != sorted(sizes):
        raise BadPickle(file=file.path, why="list of storages does not match the tensors")
    starts: dict[str, int] = {}
    for key in keys:
        starts[key] = at + _COUNT_BYTES
        at += _COUNT_BYTES + sizes[key]
    if at != file.size:
        raise BadLength(file=file.path, actual=file.size, expected=at)
    counts = read_spans(read, file, [Span(start - _COUNT_BYTES, start) for start in starts.values()])
    for key, count in zip(starts, counts, strict=True):
        if int.from_bytes(count, "little") * widths[key] != sizes[key]:
            raise BadArchive(file=file.path, why=f"storage {label((key,))} is not the size its tensors need")
    return starts
