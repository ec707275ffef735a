"""Files of `torch.save` since torch 1.6: a zip archive whose records are one pickle and the storages' raw bytes.

The archive (written by torch's `PyTorchStreamWriter`, caffe2/serialize/inline_container.cc) holds ``NAME/data.pkl``,
``NAME/byteorder`` and one record ``NAME/data/KEY`` per storage, stored without compression. The zip format is
PKWARE's APPNOTE 6.3.10, whose section numbers stand at the parsers below. Only what torch writes is accepted: archives
can be read in more than one way (compressed, overlapping, two names alike, directory and record disagreeing), and each
of those is refused, so that nobody reads other bytes than we do.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from reshard.pipeline.checkpoint.formats.nesting import label
from reshard.pipeline.checkpoint.formats.pickles import Made, load
from reshard.pipeline.checkpoint.formats.ranged import Read, read_spans
from reshard.pipeline.checkpoint.formats.settings import settings_of
from reshard.pipeline.checkpoint.formats.torch_names import ALLOWED
from reshard.pipeline.checkpoint.formats.torch_state import View, piece_of, sizes_of, tensors_of, tied_tensors, views_of
from reshard.pipeline.errors import BadArchive, Unsupported
from reshard.pipeline.limits import PICKLE_MAX, TAIL_READ, ZIP_DIRECTORY_MAX
from reshard.pipeline.tensors import DTYPE_BITS, Contents, Piece, Record, Span, StoredFile, Tensor
from reshard.pipeline.text import counted

Fetch = Callable[[Sequence[Span]], list[bytes]]

MAGIC = b"PK\x03\x04"

_END = struct.Struct("<4s4H2LH")  # 4.3.16
_END_MAGIC = b"PK\x05\x06"
_END64 = struct.Struct("<4sQ2H2L4Q")  # 4.3.14
_END64_MAGIC = b"PK\x06\x06"
_LOCATOR = struct.Struct("<4sLQL")  # 4.3.15
_LOCATOR_MAGIC = b"PK\x06\x07"
_ENTRY = struct.Struct("<4s6H3L5H2L")  # 4.3.12
_ENTRY_MAGIC = b"PK\x01\x02"
_LOCAL = struct.Struct("<4s5H3L2H")  # 4.3.7
_EXTRA = struct.Struct("<2H")  # 4.5.1
_ZIP64_EXTRA = 0x0001  # 4.5.3
_SATURATED_16, _SATURATED_32 = 0xFFFF, 0xFFFFFFFF  # "see the zip64 field"

_SIZES_FOLLOW = 1 << 3  # sizes and CRC stand behind the record, and in the directory
_FLAGS = _SIZES_FOLLOW | 1 << 11 | 0b110  # 4.4.4: and names in UTF-8, and a compressor's options; no encryption
_STORED = 0
# What is read of a record's own header: the fixed part, the name, and as much of the extra fields as zip64 needs.
_LOCAL_EXTRA_READ = 32

_EXTRA_MAX = 0xFFFF

_READ_WHOLE = ("data.pkl", "byteorder")
_BYTE_ORDERS = {b"little": False, b"big": True}
_TORCHSCRIPT = "a TorchScript program"
_PROGRAM = "code/"  # where `torch.jit.save` puts source code, the only records that it compresses


class Entry(NamedTuple):
    """One record, as the directory tells it; offsets are bytes of the file."""

    name: str
    header: int
    size: int
    crc32: int
    flags: int
    limit: int  # where the next record or the directory begins


def read_torch_zip(read: Read, file: StoredFile, number: int) -> Contents:
    """The tensors of a torch zip file, as pieces of source file ``number``.

    Reads the directory, the pickle and the records' headers, never a storage. Raises the CheckpointError family.
    """
    archive = open_zip(read, file, number)
    settings, kept_back = settings_of(archive.root, file.path)
    pickled, notes = tensors_of(archive.root, file.path, settings)
    tensors, records = archive.tensors(pickled)
    return Contents(tensors, (*kept_back, *notes), tied_tensors(tensors), tuple(dict.fromkeys(records)), settings)


def open_zip(read: Read, file: StoredFile, number: int, allowed: frozenset[str] = ALLOWED) -> TorchZip:
    """The archive that is the whole of source file ``number``; ``allowed`` is what its pickle may name."""
    return TorchZip(partial(read_spans, read, file), file, number, Span(0, file.size), TAIL_READ, allowed)


class TorchZip:
    """A torch archive that lies at ``within`` of a file: its unpickled ``root``, and where its storages are.

    ``fetch`` gives the bytes of every span that it is asked for; the first of them are the last ``tail`` bytes.
    """

    def __init__(
        self,
        fetch: Fetch,
        file: StoredFile,
        number: int,
        within: Span,
        tail: int,
        allowed: frozenset[str] = ALLOWED,
    ) -> None:
        self._file = file
        self._number = number
        self._name, self._entries = _without_folder(file, _read_directory(fetch, file, within, tail))
        if "constants.pkl" in self._entries:
            raise Unsupported(file=file.path, what=_TORCHSCRIPT)
        if "data.pkl" not in self._entries:
            raise _bad(file, "not a torch file: this zip archive has no data.pkl")
        # One round of requests: every record's own header, and the two records that are read here whole.
        pickle_size = self._entries["data.pkl"].size
        if pickle_size > PICKLE_MAX:
            raise _bad(file, f"pickle is {pickle_size:,} bytes, and the limit is {PICKLE_MAX:,}")
        spans = []
        for name, entry in self._entries.items():
            # Of the records that are read here the whole, whatever padding lies between.
            more = _EXTRA_MAX + min(entry.size, PICKLE_MAX) if name in _READ_WHOLE else _LOCAL_EXTRA_READ
            stop = entry.header + _LOCAL.size + len(entry.name.encode()) + more
            spans.append(Span(entry.header, min(stop, entry.limit)))
        heads = dict(zip(self._entries, fetch(spans), strict=True))
        self._starts: dict[str, int] = {}
        for name, entry in self._entries.items():
            self._starts[name] = start = entry.header + _data_offset(file, entry, heads[name])
            if start + entry.size > entry.limit:
                raise _bad(file, f"record {label((name,))} overlaps the next record")
        self.root, stop, _ = load(self._content("data.pkl", heads), file=file.path, allowed=allowed)
        if stop != pickle_size:
            raise _bad(file, "data.pkl has data after the end of its pickle")
        self.big_endian = self._byte_order(heads)

    def tensors(self, pickled: Mapping[str, Made]) -> tuple[tuple[Tensor, ...], tuple[Record, ...]]:
        """Each as a tensor of one piece, and the storage of each; raises Unsupported and the rest of the family."""
        views = views_of(pickled, self._file.path)
        records = self.storages(views.values())
        tensors = (
            Tensor(name, view.dtype, view.shape, (self.piece(view, records, label((name,))),))
            for name, view in views.items()
        )
        return tuple(tensors), tuple(records[view.storage.key] for view in views.values())

    def storages(self, views: Iterable[View]) -> dict[str, Record]:
        """Where each storage that ``views`` use lies; raises BadArchive when one is missing or of another length."""
        found = {}
        for key, size in sizes_of((view.storage for view in views), self._file.path).items():
            entry = self._entries.get(f"data/{key}")
            if entry is None:
                raise _bad(self._file, f"no record for storage {label((key,))}")
            if entry.size != size:
                length = f"{entry.size:,} bytes, but its tensors need {size:,}"
                raise _bad(self._file, f"storage {label((key,))} is {length}")
            start = self._starts[f"data/{key}"]
            # Zero is what torch writes when it is told not to compute a checksum, and the checksum of nothing.
            crc32 = entry.crc32 if entry.crc32 or not size else None
            found[key] = Record(f"{self._name}/data/{key}", self._number, start, start + size, crc32)
        return found

    def piece(self, view: View, records: Mapping[str, Record], what: str) -> Piece:
        """The view as a piece of the file; ``records`` are those that ``storages`` found."""
        if self.big_endian and view.storage.dtype is None and DTYPE_BITS[view.dtype] > 8:
            # torch swaps by the class of the storage, and these have none: it would load them wrong itself.
            raise Unsupported(file=self._file.path, what=f"{what} (a big-endian tensor of {view.dtype})")
        return piece_of(view, records[view.storage.key], self.big_endian)

    def _content(self, name: str, heads: Mapping[str, bytes]) -> bytes:
        """A whole record that is among ``heads``, checked against its CRC."""
        entry = self._entries[name]
        start = self._starts[name] - entry.header
        content = heads[name][start : start + entry.size]
        if entry.crc32 and zlib.crc32(content) != entry.crc32:
            raise _bad(self._file, f"record {name} does not match its CRC")
        return content

    def _byte_order(self, heads: Mapping[str, bytes]) -> bool:
        """Whether the storages are big-endian; files without the record come from before torch wrote it."""
        order = self._content("byteorder", heads) if "byteorder" in self._entries else b"little"
        if order not in _BYTE_ORDERS:
            raise _bad(self._file, f"unknown byte order {order[:20]!r}")
        return _BYTE_ORDERS[order]


def _bad(file: StoredFile, why: str) -> BadArchive:
    return BadArchive(file=file.path, why=why)


def _read_directory(fetch: Fetch, file: StoredFile, within: Span, tail_read: int) -> list[Entry]:
    """Every entry in the order of the file; by what the directory says, they share no byte."""
    base, end = within
    tail_start = max(base, end - tail_read)
    (tail,) = fetch([Span(tail_start, end)])
    count, size, offset, stop = _directory_place(file, tail, base, end)
    start = base + offset
    if size > ZIP_DIRECTORY_MAX:
        raise _bad(file, f"zip directory claims {size:,} bytes, and the limit is {ZIP_DIRECTORY_MAX:,}")
    if start + size != stop:
        raise _bad(file, "zip directory does not end at the end record")
    if start >= tail_start:
        data = tail[start - tail_start : start - tail_start + size]
    else:
        (data,) = fetch([Span(start, stop)])
    entries = sorted(_entries(file, data, count, base, start), key=lambda entry: entry.header)
    for number, following in enumerate(entries[1:]):
        entries[number] = entries[number]._replace(limit=following.header)
    for entry in entries:
        if entry.header + _LOCAL.size + entry.size > entry.limit:
            raise _bad(file, f"record {label((entry.name,))} overlaps the next one")
    return entries


def _directory_place(file: StoredFile, tail: bytes, base: int, end: int) -> tuple[int, int, int, int]:
    """(entries, bytes, offset, where it must end) of the directory, from the end record and its zip64 form."""
    if len(tail) < _END.size or tail[-_END.size :][:4] != _END_MAGIC:
        raise _bad(file, "no end record of a torch zip archive; the file could be truncated")
    _, disk, first_disk, here, count, size, offset, comment = _END.unpack_from(tail, len(tail) - _END.size)
    if disk or first_disk or here != count or comment:
        raise _bad(file, "zip end record was not written by torch")
    stop = end - _END.size
    locator_at = len(tail) - _END.size - _LOCATOR.size
    if locator_at < _END64.size or tail[locator_at:][:4] != _LOCATOR_MAGIC:
        if count == _SATURATED_16 or _SATURATED_32 in (size, offset):
            raise _bad(file, "zip end record refers to a missing zip64 record")
        return count, size, offset, stop
    _, disk, end64, disks = _LOCATOR.unpack_from(tail, locator_at)
    end64_at = locator_at - _END64.size
    stop = end - _END.size - _LOCATOR.size - _END64.size
    if disk or disks != 1 or base + end64 != stop or tail[end64_at:][:4] != _END64_MAGIC:
        raise _bad(file, "zip64 end record is not where its locator says")
    _, length, _, _, disk, first_disk, here64, count64, size64, offset64 = _END64.unpack_from(tail, end64_at)
    if disk or first_disk or here64 != count64 or length != _END64.size - 12:
        raise _bad(file, "zip64 end record was not written by torch")
    short = ((count, count64, _SATURATED_16), (size, size64, _SATURATED_32), (offset, offset64, _SATURATED_32))
    if any(narrow not in (wide, saturated) for narrow, wide, saturated in short):
        raise _bad(file, "the two zip end records disagree")
    return count64, size64, offset64, stop


def _entries(file: StoredFile, data: bytes, count: int, base: int, limit: int) -> Iterator[Entry]:
    at = 0
    for _ in range(count):
        if at + _ENTRY.size > len(data):
            raise _bad(file, f"zip directory claims {counted(count, 'record')} but has fewer")
        fields = _ENTRY.unpack_from(data, at)
        magic, _made, _needed, flags, method, _time, _date, crc32, packed, size = fields[:10]
        name_length, extra_length, comment_length, disk, _inside, _outside, offset = fields[10:]
        name_at = at + _ENTRY.size
        extra_at = name_at + name_length
        at = extra_at + extra_length + comment_length
        if magic != _ENTRY_MAGIC or at > len(data):
            raise _bad(file, "zip directory is broken")
        try:
            name = data[name_at:extra_at].decode("utf-8")
        except UnicodeDecodeError:
            raise _bad(file, "a record's name is not UTF-8") from None
        extra = data[extra_at : extra_at + extra_length]
        size, packed, offset = _widened(file, name, extra, (size, packed, offset))
        if flags & ~_FLAGS or disk:
            raise _bad(file, f"record {label((name,))} is encrypted, or has a feature that torch never uses")
        if method != _STORED or packed != size:
            if name.partition("/")[2].startswith(_PROGRAM):
                raise Unsupported(file=file.path, what=_TORCHSCRIPT)
            raise _bad(file, f"record {label((name,))} is compressed")
        yield Entry(name, base + offset, size, crc32, flags, limit)
    if at != len(data):
        raise _bad(file, f"zip directory claims {counted(count, 'record')} but has more")


def _widened(file: StoredFile, name: str, extra: bytes, values: tuple[int, ...]) -> tuple[int, ...]:
    """``values`` with the saturated ones replaced, in order, by those of the zip64 extra field (4.5.3)."""
    wide = b""
    at = 0
    while at + _EXTRA.size <= len(extra):
        kind, length = _EXTRA.unpack_from(extra, at)
        at += _EXTRA.size
        if kind == _ZIP64_EXTRA:
            wide = extra[at : at + length]
        at += length
    found = []
    for value in values:
        if value == _SATURATED_32:
            if len(wide) < 8:
                raise _bad(file, f"record {label((name,))} refers to a missing zip64 field")
            value, wide = int.from_bytes(wide[:8], "little"), wide[8:]
        found.append(value)
    return tuple(found)


def _without_folder(file: StoredFile, entries: Sequence[Entry]) -> tuple[str, dict[str, Entry]]:
    """The one folder that torch puts every record in, and the records by their name below it."""
    folder = entries[0].name.partition("/")[0] if entries else ""
    found: dict[str, Entry] = {}
    for entry in entries:
        above, slash, name = entry.name.partition("/")
        if above != folder or not slash:
            raise _bad(file, f"record {label((entry.name,))} is not in the archive's folder")
        if name in found:
            raise _bad(file, f"two records named {label((entry.name,))}")
        found[name] = entry
    return folder, found


def _data_offset(file: StoredFile, entry: Entry, head: bytes) -> int:
    """Where the data begins, counted from the record's own header, which must agree with the directory."""
    name = entry.name.encode()
    if len(head) < _LOCAL.size + len(name):
        raise _bad(file, f"record {label((entry.name,))} has no local header")
    magic, _needed, flags, method, _time, _date, *fields = _LOCAL.unpack_from(head)
    crc32, packed, size, name_length, extra_length = (int(field) for field in fields)
    own_name = head[_LOCAL.size :][:name_length]
    extra = head[_LOCAL.size + name_length :][:extra_length]
    directory = (entry.size, entry.size, entry.crc32)
    later = bool(flags & _SIZES_FOLLOW) and (size, packed, crc32) == (0, 0, 0)
    if not later and _SATURATED_32 in (size, packed):
        size, packed = _widened(file, entry.name, extra, (size, packed))
    if magic != MAGIC or flags != entry.flags or method != _STORED or own_name != name:
        raise _bad(file, f"record {label((entry.name,))} and the directory disagree")
    if not later and (size, packed, crc32) != directory:
        raise _bad(file, f"record {label((entry.name,))} and the directory disagree on its size or CRC")
    return _LOCAL.size + name_length + extra_length
