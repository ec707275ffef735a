"""Which tensors share a file. Pure: entries in source order go in, lists of entries come out.

Whatever the packing, every entry is in exactly one bin, no bin is empty, and a bin whose file would be larger than
the limit holds one entry alone. What a header says beside its tensors decides its format: the metadata of safetensors,
or the keys of GGUF, all of which the first file of a model has.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from itertools import accumulate, compress, count, groupby, starmap
from operator import add, sub
from typing import NamedTuple

from reshard.pipeline.checkpoint.formats import gguf
from reshard.pipeline.checkpoint.formats.safetensors import build_header, entry_sizes, metadata_size, padded
from reshard.pipeline.errors import BadSize, Oversize, SizeTooSmall
from reshard.pipeline.figures import human_bytes
from reshard.pipeline.limits import ALIGNMENT, METADATA_COPIES_MAX
from reshard.pipeline.planning.blocks import blocks_of, natural
from reshard.pipeline.planning.model import Entry
from reshard.pipeline.tensors import DTYPE_BITS, size_in_bytes
from reshard.pipeline.text import counted

Bin = list[Entry]


class GgufKeys(NamedTuple):
    """The keys of a GGUF file: of a whole model, where it is not said of which part."""

    values: gguf.Keys

    @property
    def alignment(self) -> int:
        return gguf.alignment_of(self.values)

    def part(self, number: int, count: int, tensors: int) -> GgufKeys:
        """Those of part ``number`` (from 0) of ``count``."""
        return GgufKeys(gguf.keys_of_part(self.values, number, count, tensors))


class Heading(NamedTuple):
    """What the header of a safetensors file has beside its tensors."""

    metadata: Mapping[str, str]
    align: int = ALIGNMENT  # bytes; the data begins at a multiple of it, and tensors do whose size is one


About = Heading | GgufKeys

CRUMB = 8  # a last file below this part of the limit shares the load of the one before it
_LARGEST_ELEMENT = 8  # bytes
_RANKS = 255  # of which each is a byte
BALANCE_STEPS = 12  # halvings: files end up equal to within 1/4096 of the limit


def in_source_order(entries: Iterable[Entry]) -> list[Entry]:
    """Entries by source file and byte: the order in which one long read meets them."""
    return sorted(
        entries, key=lambda e: (e.tensor.pieces[0].file, e.tensor.pieces[0].offset) if e.tensor.pieces else (-1, 0)
    )


def aligned(entries: Sequence[Entry], align: int = ALIGNMENT) -> list[Entry]:
    """The order inside one file: as given, unless a tensor would start at no multiple of its element size.

    Loaders map files into memory and read misaligned elements slowly or not at all; larger elements first is always
    aligned, and keeps the given order among equals. With a larger ``align`` the tensors whose size is a multiple of it
    come first, so that they begin at multiples, and only the others change places.
    """
    if align > ALIGNMENT:
        return sorted(entries, key=lambda e: _rank(*_extent(e.as_dtype, e.tensor.shape), align))
    position = 0
    for entry in entries:
        element, size = _extent(entry.as_dtype, entry.tensor.shape)
        if position % element:
            return sorted(entries, key=lambda e: -_extent(e.as_dtype, e.tensor.shape)[0])
        position += size
    return list(entries)


def _rank(element: int, size: int, align: int) -> int:
    """Where a tensor of that many bytes comes in its file: lower ranks first, and equals in the order that is given."""
    return 0 if align > ALIGNMENT and size % align == 0 else _RANKS - element


@lru_cache(maxsize=4096)  # few in a model of 500,000 tensors
def _extent(dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """The bytes of an element, at least 1, and of the tensor."""
    return max(1, DTYPE_BITS.get(dtype, 8) // 8), size_in_bytes(dtype, shape)


def header_of(entries: Sequence[Entry], about: About) -> bytes:
    tensors = ((tensor.name, as_dtype, tensor.shape) for tensor, as_dtype, _ in entries)
    return gguf.build_header(tensors, about.values) if isinstance(about, GgufKeys) else build_header(tensors, *about)


def alignment_of(about: About) -> int:
    """What the bytes of each tensor are padded to."""
    return about.alignment if isinstance(about, GgufKeys) else 1


def file_size(entries: Sequence[Entry], about: About) -> int:
    """The exact bytes of a file with these entries in this order."""
    if isinstance(about, GgufKeys):
        return GgufRow(entries, about).as_it_is()
    return len(header_of(entries, about)) + sum(e.size for e in entries)


def row_of(entries: Sequence[Entry], about: About) -> Row:
    return GgufRow(entries, about) if isinstance(about, GgufKeys) else Row(entries, *about)


def first_first(bins: list[Bin], limit: int, keys: GgufKeys) -> list[Bin]:
    """The bins with one in front that has room for all keys, where there is one; see `GgufRow`."""
    count, tensors = len(bins), sum(map(len, bins))
    about = keys.part(0, count, tensors)
    first = next((i for i, one in enumerate(bins) if file_size(one, about) <= limit), 0)
    return [bins[first], *bins[:first], *bins[first + 1 :]]


class Row:
    """Entries in one order, and the exact size of a file of any stretch of them, in the logarithm of their number.

    Everything in a header but the digits of its offsets adds up, and so do the tensors' bytes: two prefix sums. The
    digits are counted by bisection, because offsets only grow: of those from 1,000 on each has a fourth digit, and so
    on. A file whose order ``aligned`` changes is made of one such stretch for each rank of its tensors.
    """

    def __init__(self, entries: Sequence[Entry], metadata: Mapping[str, str], align: int = ALIGNMENT) -> None:
        self.entries = entries
        self._align = align
        self._metadata = metadata_size(metadata)
        kinds = [(dtype, tensor.shape) for tensor, dtype, _ in entries]
        extents = list(starmap(_extent, kinds))
        sizes, texts = [size for _, size in extents], [*entry_sizes([tensor.name for tensor, _, _ in entries], kinds)]
        self._elements = bytes([element for element, _ in extents])
        self._starts, self._texts = _sums(sizes), _sums(texts)
        self._most = max(map(add, sizes, texts), default=0)  # bytes of an entry and its text
        self._misaligned: dict[int, list[int]] = {}  # by the first offset modulo 8: entries that start misaligned

    @cached_property
    def _columns(self) -> list[_Column]:
        """The entries by their rank, the lowest first."""
        columns = []
        ranks = bytes(_rank(element, self.data(i, i + 1), self._align) for i, element in enumerate(self._elements))
        for rank in sorted(set(ranks)):
            rows = array("q", (i for i, one in enumerate(ranks) if one == rank))
            columns.append(_Column(rows, _sums(self.data(i, i + 1) for i in rows)))
        return columns

    def large(self, limit: int) -> tuple[int, ...]:
        """The numbers of the entries that no file of ``limit`` bytes can hold."""
        # A first look at all: the bytes of an entry and its text, and more than all else takes.
        least = limit - self._metadata - 56 - self._align
        if self._most <= least:
            return ()
        sizes = map(add, *(map(sub, sums[1:], sums) for sums in (self._starts, self._texts)))
        near = compress(count(), map(least.__lt__, sizes))
        return tuple(i for i in near if self.size(i, i + 1) > limit)

    def alone(self, number: int) -> int:
        return self.size(number, number + 1)

    def data(self, start: int, stop: int) -> int:
        """The bytes of the tensors of ``entries[start:stop]``."""
        return self._starts[stop] - self._starts[start]

    def size(self, start: int, stop: int) -> int:
        """``file_size(aligned(entries[start:stop]))``."""
        if stop <= self.in_order(start):
            digits = _offset_digits(self._starts, start, stop, 0)
        else:
            digits, position = 0, 0
            for column in self._columns:
                first, last = bisect_left(column.rows, start), bisect_left(column.rows, stop)
                digits += _offset_digits(column.starts, first, last, position)
                position += column.starts[last] - column.starts[first]
        texts = self._texts[stop] - self._texts[start]
        return padded(self._metadata + texts + digits, self._align) + self.data(start, stop)

    def in_order(self, start: int) -> int:
        """The longest stretch from ``start`` that ``aligned`` leaves as it is ends before this entry.

        With a larger alignment none is looked for: sizes only grow there, whatever the order.
        """
        if self._align > ALIGNMENT:
            return start
        base = self._starts[start] % _LARGEST_ELEMENT
        if base not in self._misaligned:
            alike = len(set(self._elements)) == 1 and base % self._elements[0] == 0  # so none is misaligned
            rest = () if alike else enumerate(self._elements)
            self._misaligned[base] = [i for i, element in rest if (self._starts[i] - base) % element]
        later = self._misaligned[base]
        at = bisect_left(later, start)
        return later[at] if at < len(later) else len(self.entries)

    def full(self, start: int, stop: int, limit: int) -> int:
        """Where a file of ``limit`` bytes that begins at ``start`` is full, or ``stop`` if it is not full there."""
        # Sizes grow with every entry, but for the one place where the order changes and offsets get shorter.
        turn = min(self.in_order(start), stop)
        low, high = (start, turn) if self.size(start, turn) > limit else (turn, stop)
        ends = range(low + 1, high + 1)
        return low + bisect_right(ends, limit, key=lambda end: self.size(start, end))


class GgufRow(Row):
    """The same for GGUF, whose files have their tensors in any order, and padded.

    The first entries share their file with all keys. Those in front that do not fit beside them count as large: each
    gets a file of its own, and a later one becomes the first.
    """

    def __init__(self, entries: Sequence[Entry], keys: GgufKeys) -> None:
        self.entries = entries
        self._alignment = keys.alignment
        self._starts = _sums(padded(entry.size, self._alignment) for entry in entries)
        self._texts = _sums(gguf.entry_size(entry.name, entry.tensor.shape) for entry in entries)
        self._keys = keys
        parts = (keys.part(0, 1, 0), keys.part(0, 2, 0), keys.part(1, 2, 0))
        self._whole, self._first, self._later = (gguf.keys_size(part.values) for part in parts)

    def as_it_is(self) -> int:
        """The size of a file of all entries with the very keys that were given."""
        return self._file(gguf.keys_size(self._keys.values), 0, len(self.entries))

    def _file(self, keys: int, start: int, stop: int) -> int:
        header = keys + self._texts[stop] - self._texts[start]
        return padded(header, self._alignment) + self.data(start, stop)

    def large(self, limit: int) -> tuple[int, ...]:
        numbers = range(len(self.entries))
        if self.size(0, len(numbers)) <= limit:
            return ()
        large = {i for i in numbers if self.alone(i) > limit}
        first = next((i for i in numbers if i not in large and self._file(self._first, i, i + 1) <= limit), 0)
        return tuple(sorted(large.union(range(first))))

    def alone(self, number: int) -> int:
        return self._file(self._later, number, number + 1)

    def size(self, start: int, stop: int) -> int:
        if stop - start == len(self.entries):
            return self._file(self._whole, start, stop)
        return self._file(self._later if start else self._first, start, stop)

    def in_order(self, start: int) -> int:
        return len(self.entries)

    def full(self, start: int, stop: int, limit: int) -> int:
        return max(start + 1, super().full(start, stop, limit))  # where nothing fits beside the keys


class _Column(NamedTuple):
    """The entries of one size of element: their numbers in the row, and the sums of their bytes."""

    rows: array[int]
    starts: array[int]


def _sums(values: Iterable[int]) -> array[int]:
    return array("q", accumulate(values, initial=0))


def _offset_digits(starts: array[int], first: int, last: int, position: int) -> int:
    """The digits of both offsets of entries ``first`` to ``last``, the first of which starts at byte ``position``."""
    count = last - first
    digits, power = 2 * count, 10
    while power <= position + starts[last] - starts[first]:
        if power <= position:
            digits += 2 * count
        else:
            # The first offset with this many digits: every later one has them too, as a start and as a stop.
            at = bisect_left(starts, starts[first] + power - position, first, last + 1)
            digits += 2 * (last - at) + 1
        power *= 10
    return digits


Rows = Callable[[tuple[int, ...]], Row]


def _rows(entries: Sequence[Entry], about: About) -> Rows:
    """What makes a row of all entries in their order, but with those of the given numbers behind all others."""

    @cache
    def row(large: tuple[int, ...]) -> Row:
        if not large:
            return row_of(entries, about)
        last = set(large)
        rest = [entry for number, entry in enumerate(entries) if number not in last]
        return row_of([*rest, *(entries[number] for number in large)], about)

    return row


def _greedy(rows: Rows, limit: int) -> tuple[Row, list[range]]:
    """As ``greedy``: a row, and the files as stretches of it."""
    large = rows(()).large(limit)
    row = rows(large)
    rest = len(row.entries) - len(large)
    alone = [(number - passed, rest + passed) for passed, number in enumerate(large)]
    return row, _fill(row, range(rest), alone, limit)


def _fill(row: Row, entries: range, alone: Iterable[tuple[int, int]], limit: int) -> list[range]:
    """Files of these entries of a row, and of each of those that are ``alone``: (where it comes, its number)."""
    files: list[range] = []
    start = entries.start
    for stop, number in [*alone, (entries.stop, None)]:
        while start < stop and (end := row.full(start, stop, limit)) < stop:
            files.append(range(start, end))
            start = end
        if start < stop and (number is None or row.size(start, stop) >= limit // 2):
            files.append(range(start, stop))
            start = stop
        if number is not None:
            files.append(range(number, number + 1))
    return _without_crumb(row, files, limit)


def _without_crumb(row: Row, files: list[range], limit: int) -> list[range]:
    """The files, the last two divided anew if the last is a crumb and both hold what may be moved."""
    if len(files) < 2 or len(files[-2]) < 2 or row.size(files[-1].start, files[-1].stop) * CRUMB > limit:
        return files
    start, stop = files[-2].start, files[-1].stop
    # The first entry before whose middle half of the bytes lie, or more.
    middle = range(start, stop - 1)
    cut = start + bisect_left(middle, row.data(start, stop), key=lambda i: row.data(start, i) + row.data(start, i + 1))
    if cut == start or row.size(start, cut) > limit or row.size(cut, stop) > limit:
        return files
    return [*files[:-2], range(start, cut), range(cut, stop)]


def greedy(entries: Sequence[Entry], limit: int, about: About) -> list[Bin]:
    """Fill each file before the next is begun.

    An entry that is too large for any file gets one of its own. A file that is less than half full when such an entry
    comes is not closed but goes on behind it, so that no crumb is left; at most half a file is read twice for that.

    >>> from reshard.pipeline.tensors import Piece, Tensor
    >>> def row(name, start, size):
    ...     return Entry(Tensor(name, "U8", (size,), (Piece(0, start, (0,), (size,)),)), "U8")
    >>> rows = [row("a", 0, 300), row("large", 300, 2000), row("b", 2300, 200), row("c", 2500, 700)]
    >>> [[entry.name for entry in file] for file in greedy(rows, 1000, Heading({}))]
    [['large'], ['a', 'b'], ['c']]
    """
    return _bins(*_greedy(_rows(entries, about), limit))


def _bins(row: Row, files: Iterable[range]) -> list[Bin]:
    return [list(row.entries[file.start : file.stop]) for file in files]


def balanced(entries: Sequence[Entry], limit: int, about: About) -> list[Bin]:
    """As many files as ``greedy`` needs, and those as equal as their tensors allow.

    The smallest limit that still gives that number of files is searched for by halving.
    """
    rows = _rows(entries, about)
    best = _greedy(rows, limit)
    low, high = best[0].data(0, len(entries)) // max(1, len(best[1])), limit
    for _ in range(BALANCE_STEPS):
        middle = (low + high) // 2
        row, files = _greedy(rows, middle)
        # Beside tensors that are larger than the limit, a mean may be as well.
        alone = (len(f) == 1 and row.alone(f.start) > limit for f in files)
        if len(files) <= len(best[1]) and all(
            large or row.size(f.start, f.stop) <= limit for large, f in zip(alone, files, strict=True)
        ):
            best, high = (row, files), middle
        else:
            low = middle
    return _bins(*best)


def layers(entries: Sequence[Entry], limit: int, about: About) -> list[Bin]:
    """Files that hold whole blocks, in the natural order of their names (``layers.2`` before ``layers.10``).

    A block that fits into a file is never divided over two; one that does not is cut as ``greedy`` cuts.
    """
    entries = sorted(entries, key=lambda e: natural(e.tensor.name))
    rows = _rows(entries, about)
    large = rows(()).large(limit)
    row, behind = rows(large), len(entries) - len(large)
    files: list[range] = []
    current = range(0)
    passed = 0  # entries that are alone
    number = 0
    for _, members in groupby(blocks_of(tensor.name for tensor, _, _ in entries)):
        number += len([*members])
        alone = []
        while passed < len(large) and large[passed] < number:
            alone.append((large[passed] - passed, behind + passed))
            passed += 1
        block = range(current.stop, number - passed)
        if not alone and row.size(current.start, block.stop) <= limit:
            current = range(current.start, block.stop)
            continue
        if current:
            files.append(current)
        *full, current = _fill(row, block, alone, limit)
        files += full
        if current.stop > behind:
            files.append(current)
            current = range(block.stop, block.stop)
    return _bins(row, [*files, current] if current else files)


Packing = Callable[[Sequence[Entry], int, About], list[Bin]]
PACKINGS: dict[str, Packing] = {"greedy": greedy, "balanced": balanced, "layers": layers}


def check_size(entries: Sequence[Entry], limit: int, about: About, oversize: str) -> list[Entry]:
    """The entries that no file of ``limit`` bytes can hold; raises Oversize or SizeTooSmall where that is refused."""
    # More than its name escaped, its shape and all else takes: most entries need no closer look.
    most = 200 + (
        gguf.keys_size(about.values) + 2 * about.alignment
        if isinstance(about, GgufKeys)
        else metadata_size(about.metadata) + about.align
    )
    longest = max([len(tensor.name) for tensor, _, _ in entries], default=0)

    def may_be(as_dtype: str, shape: tuple[int, ...], name: int) -> bool:
        return _extent(as_dtype, shape)[1] + 6 * name + 21 * len(shape) > limit - most

    kinds = {(as_dtype, tensor.shape) for tensor, as_dtype, _ in entries}
    some = entries if any(may_be(*kind, longest) for kind in kinds) else ()
    large = [entry for entry in some if may_be(entry.as_dtype, entry.tensor.shape, len(entry.name))]
    too_large = [entry for entry in large if file_size([entry], about) > limit]
    for entry in too_large:
        header = len(header_of([entry], about))
        if header >= limit:
            smallest = max(len(header_of([e], about)) for e in entries) + 1
            raise SizeTooSmall(size=limit, tensor=entry.name, header=header, smallest=smallest)
    if too_large and oversize == "fail":
        largest = max(too_large, key=lambda entry: file_size([entry], about))
        raise Oversize(tensor=largest.name, bytes=file_size([largest], about), size=limit)
    return too_large


def check_metadata(about: Heading, files: int, limit: int) -> None:
    """Raises BadSize where so many ``files`` would repeat more of the source's metadata than a plan holds."""
    if (size := files * metadata_size(about.metadata)) > METADATA_COPIES_MAX:
        why = f"{counted(files, 'shard')} would repeat {human_bytes(size)} of metadata"
        most = human_bytes(METADATA_COPIES_MAX)
        raise BadSize(value=human_bytes(limit), why=f"{why} (maximum: {most}); use a larger size")
