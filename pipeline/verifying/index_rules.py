"""The index rules held against any repository or folder: listings, indexes and headers are read.

Where the pipeline stops at the first thing that it will not reshard, this goes on and names all of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from posixpath import basename, dirname, join
from typing import NamedTuple, TypeVar

from reshard.pipeline.check import Check
from reshard.pipeline.checkpoint.discover import index_name, is_weight_index, set_name
from reshard.pipeline.checkpoint.formats import dcp, gguf
from reshard.pipeline.checkpoint.formats.ranged import each
from reshard.pipeline.checkpoint.formats.safetensors import SUFFIX, Header, Spec
from reshard.pipeline.checkpoint.formats.torch_files import read_torch
from reshard.pipeline.checkpoint.indexes import Index, named_weights, parse_index
from reshard.pipeline.checkpoint.open import read_header
from reshard.pipeline.checkpoint.parts import NUMBERED, WHOLE
from reshard.pipeline.checkpoint.small_files import read_file
from reshard.pipeline.checkpoint.tool_files import leftover
from reshard.pipeline.errors import CheckpointError, NotRead
from reshard.pipeline.limits import CONFIG_MAX, INDEX_MAX
from reshard.pipeline.protocols import Source
from reshard.pipeline.tensors import Record, StoredFile, Tensor
from reshard.pipeline.verifying.opened import OpenedSide
from reshard.pipeline.verifying.structure import (
    FORMATS,
    REMARKS,
    Finding,
    Headers,
    Total,
    check_index,
    check_weight_files,
)

T = TypeVar("T")


class Ruled(NamedTuple):
    """What the rules say of one side, remarks included, and the indexes and headers that they were held against."""

    findings: list[Finding]
    indexes: Mapping[str, Index | CheckpointError]
    headers: Headers


def check_rules(side: OpenedSide, formats: Set[str] = FORMATS) -> Check:
    """``ruled`` as a check, with the weights that configs name."""
    found = ruled(side, formats)
    listing, named = side.source.files(), list[Finding]()
    for path, file in listing.items():
        if basename(path) == "config.json" and file.size <= CONFIG_MAX and not side.error:
            text = read_file(side.source, file, CONFIG_MAX)
            if (weights := named_weights(path, text)) and weights not in listing:
                told = f"{path} has transformers_weights, which names a missing file: {weights}"
                named.append(Finding("absent_file", told, weights))
    return as_check(side, found._replace(findings=[*found.findings, *named]))


def as_check(side: OpenedSide, rules: Ruled) -> Check:
    found, indexes, headers = rules
    # What files of parts make up has no index, and is judged where it is opened.
    parts = {part.name for part in side.found.sets if part.format not in WHOLE}
    distributed = [checkpoint for checkpoint in side.opened.checkpoints if checkpoint.name in parts]
    read = (len(header.tensors) for header in headers.values() if isinstance(header, Header))
    figures = {
        "files": len(headers) + sum(len(checkpoint.files) for checkpoint in distributed),
        "tensors": sum(read) + sum(len(checkpoint.tensors) for checkpoint in distributed),
        "indexes": len(indexes),
    }
    findings = tuple(dict.fromkeys(str(finding) for finding in found if finding.rule not in REMARKS))
    remarks = "; ".join(dict.fromkeys(str(finding) for finding in found if finding.rule in REMARKS))
    level = "headers, sizes, indexes in both directions, file list"
    return Check("index rules", "failed" if findings else "passed", level, remarks, figures, findings)


def _indexes(source: Source) -> dict[str, Index | CheckpointError]:
    """Every index that loaders go by: of torch files where the same checkpoint has no safetensors."""
    listing = source.files()
    indexes = sorted(path for path in listing if is_weight_index(path) and not leftover(path))
    safe = {set_name(path) for path in listing if path.endswith(SUFFIX)}
    safe |= {index_name(path) for path in indexes if _is_safe(path)}
    return read_indexes(source, [path for path in indexes if _is_safe(path) or index_name(path) not in safe])


def read_indexes(source: Source, paths: Collection[str]) -> dict[str, Index | CheckpointError]:
    return _each(lambda path: parse_index(read_file(source, source.files()[path], INDEX_MAX), path), paths)


def _is_safe(index: str) -> bool:
    return f"{SUFFIX}.index" in basename(index)


def ruled(side: OpenedSide, formats: Set[str] = FORMATS) -> Ruled:
    """Whether listing, indexes and headers of all weights agree, also where the side could not be opened.

    ``formats`` are those that their `__metadata__` may have.
    """
    indexes = _indexes(side.source)
    headers, totals = _headers(side, [index for index in indexes.values() if isinstance(index, Index)])
    findings: list[Finding] = []
    named: set[str] = set()
    below, in_folder = sorted(headers), defaultdict[str, list[str]](list)
    for file in side.source.files():
        in_folder[dirname(file)].append(file)
    for path, index in indexes.items():
        if isinstance(index, CheckpointError):
            findings.append(Finding("index_json", str(index), path))
            continue
        under = join(dirname(path), "")
        of_it = below[bisect_left(below, under) : bisect_left(below, f"{under}\U0010ffff")] if under else below
        beside = {file: headers[file] for file in of_it if file.endswith(SUFFIX) == _is_safe(path)}
        found = check_index(index, beside, side.source.files(), totals, formats, in_folder[dirname(path)])
        findings += (one for one in found if not (one.rule == "format" and path in side.found.uncut))
        named |= {*index.files.values()}
    stale = {finding.file for finding in findings if finding.rule == "stale_file"}
    unread = {dirname(finding.file) for finding in findings if finding.rule == "index_json" and finding.file}
    free = {path: header for path, header in headers.items() if path not in named | stale}
    in_parts = {path for path, h in free.items() if isinstance(h, Header) and dcp.is_sharded(h.metadata)}
    # Read by their names, or in parts that another reader puts together: only the files themselves can be judged.
    alone = (free.keys() & side.found.uncut) | in_parts
    findings += [f for path in sorted(alone) for f in check_weight_files({path: free[path]}) if f.rule != "format"]
    for paths in _sets(path for path in free if path not in alone):
        findings += check_weight_files({path: free[path] for path in paths}, formats)
        if dirname(paths[0]) not in unread:  # else it may well name them
            findings += _unindexed(paths)
    # What else the pipeline would stop at has no rule here.
    if side.error and all(finding.rule in REMARKS for finding in findings):
        findings.append(Finding("unreadable", str(side.error)))
    return Ruled(findings, indexes, headers)


def _sets(paths: Iterable[str]) -> Iterator[list[str]]:
    """What no index names: numbered files by stem and count, any other file alone."""
    sets: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for path in sorted(paths):
        match = NUMBERED.fullmatch(basename(path))
        sets[(dirname(path), match["stem"], match["count"], match["suffix"]) if match else (path,)].append(path)
    yield from sets.values()


def _unindexed(paths: list[str]) -> Iterator[Finding]:
    match = NUMBERED.fullmatch(basename(paths[0]))
    if match is None:
        return
    stem = join(dirname(paths[0]), match["stem"])
    index = f"{stem}{match['suffix']}.index.json"
    if match["suffix"] != gguf.SUFFIX:
        yield Finding("no_index", f"{stem} is in numbered files, but its index {index} is missing", paths[0])
    numbers = {int(found["number"]) for path in paths if (found := NUMBERED.fullmatch(basename(path)))}
    for number in sorted(set(range(1, int(match["count"]) + 1)) - numbers):
        text = f"file {number} of {int(match['count'])} of {stem} is missing"
        yield Finding("absent_file", text, paths[0])


# ----------------------------------------------------------------------------------------------------- the headers


def _headers(side: OpenedSide, indexes: Iterable[Index]) -> tuple[Headers, Mapping[str, Total]]:
    """Of safetensors files, and of torch's that are opened or that ``indexes`` name; and the latter's totals."""
    source, listing = side.source, side.source.files()
    safe = sorted(path for path in listing if path.endswith(SUFFIX) and not leftover(path))
    headers: dict[str, Header | CheckpointError] = {}
    headers |= _each(lambda path: read_header(source, listing[path]), safe)
    # The weights are GGUF files, or, where they cannot be opened, may be.
    if not safe if side.error else any(part.format == "gguf" for part in side.found.sets):
        files = sorted(path for path in listing if path.endswith(gguf.SUFFIX))
        found = _each(lambda path: gguf.read_header(source.read, listing[path]), files).items()
        # What is carried as it is may be of a kind that other tools read.
        headers |= {path: one for path, one in found if not (path in side.found.uncut and isinstance(one, NotRead))}
    totals: dict[str, Total] = {}
    known = _opened_torch(side)
    named = {path for index in indexes for path in index.files.values()}
    unread = sorted(path for path in named - known.keys() if path in listing and not path.endswith(SUFFIX))

    def read(path: str) -> _TorchFile:
        contents = read_torch(source.read, listing[path], 0)
        return _TorchFile(listing[path], contents.tensors, contents.records)

    known |= _each(read, unread)
    for path, content in known.items():
        if isinstance(content, CheckpointError):
            headers[path] = content
        else:
            headers[path], totals[path] = content.header(), content.total()
    return headers, totals


def _each(read: Callable[[str], T], paths: Collection[str]) -> dict[str, T | CheckpointError]:
    """``read`` of every path, several at a time, or why it cannot be."""

    def attempt(path: str) -> T | CheckpointError:
        try:
            return read(path)
        except CheckpointError as error:
            return error

    return dict(zip(paths, each(attempt, paths), strict=True))


@dataclass(frozen=True, slots=True)
class _TorchFile:
    """What a file of `torch.save` holds, and the storages that it lies in."""

    file: StoredFile
    tensors: Sequence[Tensor]
    storages: Sequence[Record]

    def header(self) -> Header:
        """The names, dtypes and shapes as a header has them, each tensor where it would be if they were packed."""
        tensors: dict[str, Spec] = {}
        at = 0
        for tensor in self.tensors:
            tensors[tensor.name] = Spec(tensor.dtype, tensor.shape, at, at + tensor.size)
            at += tensor.size
        return Header(self.file.path, {"format": "pt"}, tensors, 0, self.file.size)

    def total(self) -> Total:
        """What the writers of indexes make of it.

        transformers' `shard_checkpoint` counted every tensor, later each storage by its first tensor, and of a bool an
        eighth of a byte; huggingface_hub's `split_torch_state_dict_into_shards` counts the storages.
        """
        storages = sorted(self.storages, key=lambda record: record.start)
        starts = [record.start for record in storages]
        held: defaultdict[int, list[Tensor]] = defaultdict(list)
        for tensor in self.tensors:
            if tensor.size:
                held[bisect_right(starts, tensor.pieces[0].offset) - 1].append(tensor)
        least = most = 0
        for number, tensors in held.items():
            least += min(tensor.size // 8 if tensor.dtype == "BOOL" else tensor.size for tensor in tensors)
            most += max(sum(tensor.size for tensor in tensors), storages[number].stop - storages[number].start)
        return Total(least, most)


def _opened_torch(side: OpenedSide) -> dict[str, _TorchFile | CheckpointError]:
    """Those torch files that the pipeline has opened already."""
    files = side.opened.files
    torch = {file.path for part in side.found.sets if part.format == "torch" for file in part.files}
    found: dict[str, _TorchFile | CheckpointError] = {}
    for checkpoint in side.opened.checkpoints:
        tensors: defaultdict[int, list[Tensor]] = defaultdict(list)
        for tensor in checkpoint.tensors:
            tensors[tensor.pieces[0].file].append(tensor)
        storages: defaultdict[int, list[Record]] = defaultdict(list)
        for record in checkpoint.records:
            storages[record.file].append(record)
        for number in (number for number in checkpoint.files if files[number].path in torch):
            found[files[number].path] = _TorchFile(files[number], tensors[number], storages[number])
    return found
