"""What the index rules are held against: the headers of safetensors files, and the same of files of `torch.save`."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from reshard.pipeline.checkpoint.formats.safetensors import SUFFIX, Header, Spec
from reshard.pipeline.checkpoint.formats.torch_files import read_torch
from reshard.pipeline.checkpoint.open import read_header
from reshard.pipeline.errors import CheckpointError
from reshard.pipeline.limits import HEADER_READERS
from reshard.pipeline.protocols import Source
from reshard.pipeline.tensors import Record, StoredFile, Tensor
from reshard.pipeline.verifying.opened import OpenedSide
from reshard.pipeline.verifying.structure import Headers, Total, named_files

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Files:
    """Weight files by path; ``totals`` is what writers of indexes may have counted of torch's."""

    headers: Headers
    totals: Mapping[str, Total]


def read_files(source: Source, indexes: Mapping[str, bytes], opened: OpenedSide | CheckpointError) -> Files:
    """Every safetensors file, and those torch files that are opened or that one of ``indexes`` names."""
    listing = source.files()
    safe = sorted(path for path in listing if path.endswith(SUFFIX))
    headers: dict[str, Header | CheckpointError] = dict(
        zip(safe, _each(lambda path: read_header(source, listing[path]), safe), strict=True)
    )
    totals: dict[str, Total] = {}
    known = _opened_torch(opened)
    named = {path for index, content in indexes.items() for path in named_files(index, content)}
    unread = sorted(path for path in named - known.keys() if path in listing and not path.endswith(SUFFIX))
    known |= zip(unread, _each(lambda path: _read_torch(source, listing[path]), unread), strict=True)
    for path, content in known.items():
        if isinstance(content, CheckpointError):
            headers[path] = content
        else:
            headers[path], totals[path] = content.header(), content.total()
    return Files(headers, totals)


def _each(read: Callable[[str], T], paths: Iterable[str]) -> Iterable[T | CheckpointError]:
    """``read`` of every path, several at a time, or why it cannot be."""

    def attempt(path: str) -> T | CheckpointError:
        try:
            return read(path)
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(HEADER_READERS, thread_name_prefix="headers") as pool:
        return list(pool.map(attempt, paths))


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


def _read_torch(source: Source, file: StoredFile) -> _TorchFile:
    contents = read_torch(source.read, file, 0)
    return _TorchFile(file, contents.tensors, contents.records)


def _opened_torch(opened: OpenedSide | CheckpointError) -> dict[str, _TorchFile | CheckpointError]:
    """Those torch files that the pipeline has opened already."""
    if isinstance(opened, CheckpointError):
        return {}
    files = opened.opened.files
    torch = {file.path for part in opened.found.sets if part.format == "torch" for file in part.files}
    found: dict[str, _TorchFile | CheckpointError] = {}
    for checkpoint in opened.opened.checkpoints:
        tensors: defaultdict[int, list[Tensor]] = defaultdict(list)
        storages: defaultdict[int, list[Record]] = defaultdict(list)
        for tensor in checkpoint.tensors:
            tensors[tensor.pieces[0].file].append(tensor)
        for record in checkpoint.records:
            storages[record.file].append(record)
        for number in checkpoint.files:
            if files[number].path in torch:
                found[files[number].path] = _TorchFile(files[number], tensors[number], storages[number])
    return found
