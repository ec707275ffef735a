"""Torch distributed checkpoints (DCP), as FSDP and others write them: `.metadata` and `.distcp` files.

`.metadata` is a pickle that names every tensor, its chunks, and where each chunk is stored; a `.distcp` file is torch
zip archives one behind the other, one per chunk, each at (offset, length). The types are those of
`torch/distributed/checkpoint/metadata.py`, the storage infos of `filesystem.py`. None of torch's code is used: its own
reader runs whatever `.metadata` says.

DCP can also write safetensors files (`hf_storage.py`): each rank's part under the tensor's name, and under
`__metadata__` where in the tensor the part belongs. `merged` puts those together again.
"""

from __future__ import annotations

import posixpath
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from reshard.pipeline.checkpoint.formats.nesting import TRAINING_STATE, Branch, Leaf, Other, label, weights_of
from reshard.pipeline.checkpoint.formats.pickles import Made, load
from reshard.pipeline.checkpoint.formats.ranged import Read, read_bytes, read_spans
from reshard.pipeline.checkpoint.formats.tiling import flaw_in_tiling
from reshard.pipeline.checkpoint.formats.torch_names import ALLOWED
from reshard.pipeline.checkpoint.formats.torch_state import (
    count_of,
    counts_of,
    dtype_of,
    fields,
    is_tensor,
    named,
    pairs_of,
    view_of,
)
from reshard.pipeline.checkpoint.formats.torch_zip import TorchZip
from reshard.pipeline.checkpoint.indexes import load_json
from reshard.pipeline.errors import BadArchive, BadIndex, BadPickle, BadTiling, UnsafePath, Unsupported
from reshard.pipeline.limits import BLOB_EDGE, CHUNKS_HELD, PICKLE_MAX
from reshard.pipeline.tensors import DTYPE_BITS, Box, Contents, Piece, Record, Span, StoredFile, Tensor

SHARDING_INFO = "DCP_SHARDING_INFO"

_METADATA_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed._shard.sharded_tensor.metadata",  # TensorProperties, before torch 2.3
)
_METADATA_NAMES = (
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING"),
    *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
)
ALLOWED_METADATA = ALLOWED | {
    *(f"{module}.{name}" for module in _METADATA_MODULES for name in _METADATA_NAMES),
    *(f"torch.distributed.checkpoint.filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")),
}
_KEYS_MAX = 32  # dictionaries around a tensor; trainers nest two or three

_Stored = dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]  # (name, first index) -> (path, offset, length)


class _Chunk(NamedTuple):
    """A part of a tensor, and the archive that holds it: ``length`` bytes at ``offset`` of a file."""

    tensor: Tensor  # its pieces are yet to be found
    box: Box
    path: str
    offset: int
    length: int


def read_dcp(read: Read, metadata: StoredFile, files: Sequence[StoredFile]) -> Contents:
    """The tensors of the checkpoint that `.metadata` describes, as pieces of ``files``.

    Reads `.metadata` and both ends of every chunk, never a tensor. Names are those of the model's own state dict,
    wrappers included. Raises UnsafePickle, UnsafePath, BadTiling and the rest of the CheckpointError family.
    """
    chunks, notes = _described(read, metadata)
    numbers = {file.path: number for number, file in enumerate(files)}
    wanted: dict[int, list[_Chunk]] = {}
    for chunk in chunks:
        if chunk.path not in numbers:
            raise BadIndex(file=metadata.path, why=f"{label((chunk.path,))} is missing")
        wanted.setdefault(numbers[chunk.path], []).append(chunk)
    pieces: dict[Tensor, list[Piece]] = {chunk.tensor: [] for chunk in chunks}
    records: list[Record] = []
    for number, in_file in sorted(wanted.items()):
        for tensor, piece, record in _read_chunks(read, files[number], number, in_file):
            pieces[tensor].append(piece)
            records.append(record)
    tensors = (tensor._replace(pieces=tuple(found)) for tensor, found in pieces.items())
    return Contents(tuple(tensors), notes, records=tuple(records))


# ------------------------------------------------------------------------------------------------------- .metadata


def _described(read: Read, metadata: StoredFile) -> tuple[list[_Chunk], tuple[str, ...]]:
    """The chunks of each tensor in turn, which tile it, and notes."""
    file = metadata.path
    if metadata.size > PICKLE_MAX:
        raise BadPickle(file=file, why=f"{metadata.size:,} bytes, and the limit is {PICKLE_MAX:,}")
    data = read_bytes(read, metadata, 0, metadata.size)
    root = fields(load(data, file=file, allowed=ALLOWED_METADATA).value, "Metadata", file)
    described = named(root.get("state_dict_metadata"), "state_dict_metadata", file)
    paths = named(root["planner_data"], "planner_data", file) if root.get("planner_data") is not None else {}
    tree: Branch[str] = Branch()
    for name, value in described.items():
        keys = _keys(paths[name], name, file) if name in paths else _flat_keys(name)
        _plant(tree, keys, name, _leaf(value, file), file)
    weights, notes = weights_of(tree, file)
    stored = _stored(root.get("storage_data"), posixpath.dirname(file), file)
    chunks = [_chunks(name, full, described[full], stored, file) for name, full in weights.items()]
    return list(chain.from_iterable(chunks)), notes


def _keys(path: object, name: str, file: str) -> tuple[str, ...]:
    """The keys of the nested dictionaries that led to a value when it was saved."""
    if type(path) is tuple and 0 < len(path) <= _KEYS_MAX and all(type(key) in (str, int) for key in path):
        return tuple(str(key) for key in path)
    raise BadPickle(file=file, why=f"the path of {label((name,))} is malformed")


def _flat_keys(name: str) -> tuple[str, ...]:
    """A name that was saved as it is, as Megatron's are, in which an optimizer's state is told by its beginning."""
    first, dot, rest = name.partition(".")
    return (first, rest) if dot and first in TRAINING_STATE else (name,)


def _leaf(value: object, file: str) -> bool:
    """Whether an entry of the state dict is a tensor."""
    kind = value.kind.name if type(value) is Made else None
    if kind not in ("TensorStorageMetadata", "BytesStorageMetadata"):
        raise BadPickle(file=file, why="an entry is neither a tensor nor bytes")
    return kind == "TensorStorageMetadata"


def _plant(tree: Branch[str], path: tuple[str, ...], name: str, tensor: bool, file: str) -> None:
    """Put ``name`` where ``path`` says; dictionaries with a tensor inside know it."""
    branch = tree
    for key in path[:-1]:
        branch.has_tensors |= tensor
        below = branch.children.setdefault(key, Branch())
        if not isinstance(below, Branch):
            raise BadPickle(file=file, why=f"{label(path)} is not inside a dictionary")
        branch = below
    branch.has_tensors |= tensor
    if path[-1] in branch.children:
        raise BadPickle(file=file, why=f"duplicate entry {label(path)}")
    branch.children[path[-1]] = Leaf(name) if tensor else Other("a value that is not a tensor")


def _stored(value: object, folder: str, file: str) -> _Stored:
    """Where every chunk is stored."""
    found: _Stored = {}
    for key, info in pairs_of(value) or ():
        index = fields(key, "MetadataIndex", file)
        if index.get("offset") is None:
            continue  # bytes, which have no place in a tensor
        name, at = index.get("fqn"), counts_of(index["offset"])
        if type(name) is not str or at is None:
            raise BadPickle(file=file, why="a stored part has a malformed index")
        if (name, at) in found:
            raise BadTiling(file=file, tensor=label((name,)), why=f"the part at {list(at)} is stored twice")
        found[name, at] = _storage_info(fields(info, "_StorageInfo", file), label((name,)), folder, file)
    return found


def _storage_info(info: Mapping[str, object], what: str, folder: str, file: str) -> tuple[str, int, int]:
    path, offset, length = info.get("relative_path"), count_of(info.get("offset")), count_of(info.get("length"))
    if type(path) is not str or offset is None or length is None:
        raise BadPickle(file=file, why=f"the storage location of {what} is malformed")
    if path.startswith("/") or "\\" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise UnsafePath(file=file, path=label((path,)))
    if info.get("transform_descriptors") not in (None, ()):
        raise Unsupported(file=file, what=f"{what} (compressed or encrypted)")
    return posixpath.join(folder, path), offset, length


def _chunks(name: str, full: str, value: object, stored: _Stored, file: str) -> list[_Chunk]:
    what = label((name,))
    about = fields(value, "TensorStorageMetadata", file)
    shape, chunks = counts_of(about.get("size")), about.get("chunks")
    if shape is None or type(chunks) is not list:
        raise BadPickle(file=file, why=f"{what} has no valid size")
    tensor = Tensor(name, _dtype(about.get("properties"), what, file), shape, ())
    found = []
    for chunk in chunks:
        described = fields(chunk, "ChunkStorageMetadata", file)
        at, extent = counts_of(described.get("offsets")), counts_of(described.get("sizes"))
        if at is None or extent is None:
            raise BadPickle(file=file, why=f"{what} has a malformed chunk")
        if (full, at) not in stored:
            raise BadTiling(file=file, tensor=what, why=f"the part at {list(at)} is not stored")
        found.append(_Chunk(tensor, Box(at, extent), *stored[full, at]))
    if not found:
        raise BadTiling(file=file, tensor=what, why="no parts")
    if (flaw := flaw_in_tiling(shape, [chunk.box for chunk in found])) is not None:
        raise BadTiling(file=file, tensor=what, why=flaw)
    if tensor.dtype == "F4":
        raise Unsupported(file=file, what=f"{what} (a sharded tensor of 4-bit elements)")
    # Ranks that hold nothing of a tensor may have a chunk without elements; an empty tensor keeps one.
    return [chunk for chunk in found if 0 not in chunk.box.shape] or found[:1]


def _dtype(properties: object, what: str, file: str) -> str:
    state = properties.state if type(properties) is Made and properties.kind.name == "TensorProperties" else None
    if type(state) is tuple and state:
        return dtype_of(state[0], what, file)
    return dtype_of(fields(properties, "TensorProperties", file).get("dtype"), what, file)


# --------------------------------------------------------------------------------------------------------- .distcp


class _Held:
    """The ends of some of a file's chunks, read together; what else is asked for is read when it is."""

    def __init__(self, read: Read, file: StoredFile, spans: Sequence[Span]) -> None:
        self._read = read
        self._file = file
        self._spans = sorted(set(spans))
        self._contents = read_spans(read, file, self._spans)

    def fetch(self, spans: Sequence[Span]) -> list[bytes]:
        found = [self._held(span) for span in spans]
        missing = [span for span, content in zip(spans, found, strict=True) if content is None]
        rest = iter(read_spans(self._read, self._file, missing))
        return [next(rest) if content is None else content for content in found]

    def _held(self, span: Span) -> bytes | None:
        number = bisect_right(self._spans, span.start, key=lambda held: held.start) - 1
        # Of several that begin here the last is the longest.
        if number < 0 or span.stop > self._spans[number].stop:
            return None
        first = self._spans[number].start
        return self._contents[number][span.start - first : span.stop - first]


def _read_chunks(
    read: Read, file: StoredFile, number: int, chunks: Iterable[_Chunk]
) -> Iterator[tuple[Tensor, Piece, Record]]:
    """(tensor, piece, record) of each chunk of one file, once its archive was held against what `.metadata` says."""
    ordered = sorted(chunks, key=lambda chunk: chunk.offset)
    end = 0
    for chunk in ordered:
        start, stop = chunk.offset, chunk.offset + chunk.length
        if start < end or stop > file.size:
            what = "overlaps another" if start < end else "extends past the end of the file"
            raise BadArchive(file=file.path, why=f"the chunk of {label((chunk.tensor.name,))} at byte {start} {what}")
        end = stop
    for first in range(0, len(ordered), CHUNKS_HELD):
        batch = ordered[first : first + CHUNKS_HELD]
        held = _Held(read, file, [end for chunk in batch for end in _ends(chunk)])
        for chunk in batch:
            yield chunk.tensor, *_piece(held, file, number, chunk)


def _ends(chunk: _Chunk) -> tuple[Span, ...]:
    start, stop = chunk.offset, chunk.offset + chunk.length
    if chunk.length <= 2 * BLOB_EDGE:
        return (Span(start, stop),)
    return Span(start, start + BLOB_EDGE), Span(stop - BLOB_EDGE, stop)


def _piece(held: _Held, file: StoredFile, number: int, chunk: _Chunk) -> tuple[Piece, Record]:
    tensor, what = chunk.tensor, f"{label((chunk.tensor.name,))} at {list(chunk.box.at)}"
    archive = TorchZip(held.fetch, file, number, Span(chunk.offset, chunk.offset + chunk.length), BLOB_EDGE)
    if not is_tensor(archive.root):
        raise BadArchive(file=file.path, why=f"the chunk of {what} is not a tensor")
    view = view_of(archive.root, what, file.path)
    if view.dtype != tensor.dtype or view.shape != chunk.box.shape:
        expected = f"{tensor.dtype}{list(chunk.box.shape)}"
        why = f"the chunk of {what} is {view.dtype}{list(view.shape)}, but .metadata says {expected}"
        raise BadArchive(file=file.path, why=why)
    records = archive.storages([view])
    piece = archive.piece(view, records, what)
    return piece._replace(at=chunk.box.at), records[view.storage.key]


# ----------------------------------------------------------------------------------------------------- safetensors


def is_sharded(metadata: Mapping[str, str]) -> bool:
    """Whether a safetensors file holds parts of tensors, as DCP writes them, and not whole ones."""
    return SHARDING_INFO in metadata


def merged(parts: Iterable[tuple[str, Contents]]) -> tuple[Tensor, ...]:
    """The whole tensors that the parts tile, in the order in which their names first occur; files with their paths.

    No file says how large a tensor is, so it reaches as far as its parts do: a lost last part goes unnoticed where it
    ends a tensor evenly. Raises BadHeader's family: BadIndex for malformed offsets, BadTiling for overlaps and gaps.
    """
    found: dict[str, list[tuple[str, Tensor, tuple[int, ...]]]] = {}
    for path, part in parts:
        offsets = _saved_offsets(path, part.metadata)
        for tensor in part.tensors:
            at = offsets.get(tensor.name)
            if at is None or len(at) != len(tensor.shape):
                raise BadIndex(file=path, why=f"no position for {label((tensor.name,))}")
            found.setdefault(tensor.name, []).append((path, tensor, at))
    return tuple(_merged(name, stored) for name, stored in found.items())


def _saved_offsets(path: str, metadata: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    try:
        info = load_json(metadata.get(SHARDING_INFO, "").encode())
    except ValueError:
        raise BadIndex(file=path, why=f"{SHARDING_INFO} is not JSON") from None
    found = {}
    for name, entry in info.items() if isinstance(info, dict) else ():
        at = counts_of(entry.get("saved_offsets")) if isinstance(entry, dict) else None
        if at is None:
            raise BadIndex(file=path, why=f"{SHARDING_INFO} of {label((name,))} is malformed")
        found[name] = at
    return found


def _merged(name: str, stored: Sequence[tuple[str, Tensor, tuple[int, ...]]]) -> Tensor:
    file, first, _ = stored[0]
    if any(tensor.dtype != first.dtype or len(at) != len(first.shape) for _, tensor, at in stored):
        raise BadTiling(file=file, tensor=label((name,)), why="different dtypes or numbers of dimensions")
    shape = tuple(max(at[axis] + tensor.shape[axis] for _, tensor, at in stored) for axis in range(len(first.shape)))
    if (flaw := flaw_in_tiling(shape, [Box(at, tensor.shape) for _, tensor, at in stored])) is not None:
        raise BadTiling(file=file, tensor=label((name,)), why=flaw)
    if DTYPE_BITS[first.dtype] % 8 and any(tensor.shape[1:] != shape[1:] for _, tensor, _ in stored):
        raise Unsupported(file=file, what=f"{label((name,))} (parts of rows of {first.dtype}, whose bytes are shared)")
    solid = [part for part in stored if 0 not in part[1].shape] or stored[:1]
    pieces = tuple(piece._replace(at=at) for _, tensor, at in solid for piece in tensor.pieces)
    return Tensor(name, first.dtype, shape, pieces)
