"""Which tensors share a file. Pure: entries in source order go in, lists of entries come out.

Whatever the packing, every entry is in exactly one bin, no bin is empty, and a bin whose file would be larger than
the limit holds one entry alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from reshard.pipeline.checkpoint.formats.safetensors import HeaderLengths, build_header
from reshard.pipeline.errors import Oversize, SizeTooSmall
from reshard.pipeline.limits import ALIGNMENT
from reshard.pipeline.planning.model import Entry
from reshard.pipeline.tensors import DTYPE_BITS

Bin = list[Entry]

CRUMB = 8  # a last file below this part of the limit shares the load of the one before it
BALANCE_STEPS = 12  # halvings: files end up equal to within 1/4096 of the limit


def in_source_order(entries: Iterable[Entry]) -> list[Entry]:
    """Entries by source file and byte: the order in which one long read meets them."""
    return sorted(
        entries, key=lambda e: (e.tensor.pieces[0].file, e.tensor.pieces[0].offset) if e.tensor.pieces else (-1, 0)
    )


def aligned(entries: Sequence[Entry]) -> list[Entry]:
    """The order inside one file: as given, unless a tensor would start at no multiple of its element size.

    Loaders map files into memory and read misaligned elements slowly or not at all; larger elements first is always
    aligned, and keeps the given order among equals.
    """
    position = 0
    for entry in entries:
        if position % _element(entry):
            return sorted(entries, key=lambda e: -_element(e))
        position += entry.size
    return list(entries)


def _element(entry: Entry) -> int:
    return max(1, DTYPE_BITS[entry.as_dtype] // 8)


def header_of(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    return build_header(((e.name, e.as_dtype, e.tensor.shape) for e in entries), metadata)


def file_size(entries: Sequence[Entry], metadata: Mapping[str, str]) -> int:
    """The exact bytes of a file with these entries in this order."""
    return len(header_of(entries, metadata)) + sum(e.size for e in entries)


class _Bins:
    """Counts what a file would weigh while entries are added, without building its header each time."""

    def __init__(self, metadata: Mapping[str, str], limit: int, total: int) -> None:
        self._metadata = metadata
        self._limit = limit
        self._lengths = HeaderLengths(metadata, largest_offset=max(limit, total))
        self.entries: Bin = []
        self.size = self._lengths.empty

    def cost(self, entry: Entry) -> int:
        return entry.size + self._lengths.of(entry.name, entry.as_dtype, entry.tensor.shape)

    def fits(self, entry: Entry) -> bool:
        """Whether the file stays within the limit; counts exactly only where the upper bound says no."""
        if self.size + self.cost(entry) <= self._limit:
            return True
        if sum(e.size for e in self.entries) + entry.size > self._limit:
            return False
        return file_size(aligned([*self.entries, entry]), self._metadata) <= self._limit

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.size += self.cost(entry)

    def take(self) -> Bin:
        entries, self.entries, self.size = self.entries, [], self._lengths.empty
        return entries


def greedy(entries: Sequence[Entry], limit: int, metadata: Mapping[str, str]) -> list[Bin]:
    """Fill each file before the next is begun.

    An entry that is too large for any file gets one of its own. A file that is less than half full when such an entry
    comes is not closed but goes on behind it, so that no crumb is left; at most half a file is read twice for that.
    """
    bins: list[Bin] = []
    current = _Bins(metadata, limit, sum(e.size for e in entries))
    for entry in entries:
        if current.fits(entry):
            current.add(entry)
            continue
        alone = file_size([entry], metadata) > limit
        if current.entries and not (alone and current.size < limit // 2):
            bins.append(current.take())
        if alone:
            bins.append([entry])
        else:
            current.add(entry)
    if current.entries:
        bins.append(current.take())
    return _without_crumb(bins, limit, metadata)


def _without_crumb(bins: list[Bin], limit: int, metadata: Mapping[str, str]) -> list[Bin]:
    """The bins, the last two divided anew if the last is a crumb and both hold what may be moved."""
    if len(bins) < 2 or file_size(bins[-1], metadata) * CRUMB > limit or len(bins[-2]) < 2:
        return bins
    entries = [*bins[-2], *bins[-1]]
    half = sum(entry.size for entry in entries) / 2
    passed, cut = 0.0, 0
    while cut < len(entries) - 1 and passed + entries[cut].size / 2 < half:
        passed += entries[cut].size
        cut += 1
    parts = [entries[:cut], entries[cut:]]
    if not all(parts) or any(file_size(aligned(part), metadata) > limit for part in parts):
        return bins
    return [*bins[:-2], *parts]


def balanced(entries: Sequence[Entry], limit: int, metadata: Mapping[str, str]) -> list[Bin]:
    """As many files as ``greedy`` needs, and those as equal as their tensors allow.

    The smallest limit that still gives that number of files is searched for by halving.
    """
    best = greedy(entries, limit, metadata)
    low, high = sum(entry.size for entry in entries) // max(1, len(best)), limit
    for _ in range(BALANCE_STEPS):
        middle = (low + high) // 2
        tried = greedy(entries, middle, metadata)
        fits = all(len(b) == 1 or file_size(aligned(b), metadata) <= limit for b in tried)
        if len(tried) <= len(best) and fits:
            best, high = tried, middle
        else:
            low = middle
    return best


def layers(entries: Sequence[Entry], limit: int, metadata: Mapping[str, str]) -> list[Bin]:
    """Files that hold whole blocks, in the natural order of their names (``layers.2`` before ``layers.10``).

    A block that fits into a file is never divided over two; one that does not is cut as ``greedy`` cuts.
    """
    bins: list[Bin] = []
    current: Bin = []
    for _, members in groupby(sorted(entries, key=lambda e: natural(e.name)), key=lambda e: block_of(e.name)):
        block = list(members)
        if file_size(aligned([*current, *block]), metadata) <= limit:
            current += block
            continue
        if current:
            bins.append(current)
            current = []
        pieces = greedy(block, limit, metadata)
        bins += pieces[:-1]
        current = pieces[-1]
        if file_size(aligned(current), metadata) > limit:
            bins.append(current)
            current = []
    return [*bins, current] if current else bins


def block_of(name: str) -> str:
    """The block that a tensor belongs to: its name up to the first number, ``model.layers.12``, or ``embeddings``.

    Names, and not the class, decide, so that a plan does not depend on what is installed. Every module of a class's
    no-split list is one such block for 682 of the 727 classes in transformers 5.23 that have a list; the others, mostly
    detectors and speech codecs, keep some module together that holds several. A name with neither is its own block.
    """
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if part.isdecimal() or part == "head" or part.endswith("embeddings"):
            return ".".join(parts[: i + 1])
    return ".".join(parts[:-1]) or name


def natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key in which numbers count as numbers."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]


Packing = Callable[[Sequence[Entry], int, Mapping[str, str]], list[Bin]]
PACKINGS: dict[str, Packing] = {"greedy": greedy, "balanced": balanced, "layers": layers}


def check_size(entries: Sequence[Entry], limit: int, metadata: Mapping[str, str], oversize: str) -> list[Entry]:
    """The entries that no file of ``limit`` bytes can hold; raises Oversize or SizeTooSmall where that is refused."""
    too_large = [e for e in entries if e.size + ALIGNMENT > limit or file_size([e], metadata) > limit]
    for entry in too_large:
        header = len(header_of([entry], metadata))
        if header >= limit:
            smallest = max(len(header_of([e], metadata)) for e in entries) + 1
            raise SizeTooSmall(size=limit, tensor=entry.name, header=header, smallest=smallest)
        if oversize == "fail":
            raise Oversize(tensor=entry.name, bytes=file_size([entry], metadata), size=limit)
    return too_large
