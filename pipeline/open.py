"""From a repository's listing to its checkpoints: which files belong together, and which tensors they hold.

Only listings, indexes and headers are read. File names decide nothing but where a checkpoint's set is called by a
stem; what belongs to a set is what its index says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from posixpath import basename, dirname, join, normpath
from typing import Any

from reshard.pipeline.errors import BadIndex, DuplicateTensor, NoWeights, UnsafePath
from reshard.pipeline.formats.safetensors import INDEX_SUFFIX, LENGTH_BYTES, SUFFIX, Header, header_length, parse_header
from reshard.pipeline.limits import HEADER_READ, HEADER_READERS, INDEX_MAX
from reshard.pipeline.stores.protocols import Source
from reshard.pipeline.tensors import Checkpoint, Name, StoredFile

# Loaders that look for `<stem>.<variant>.safetensors`; in any other name a dot is just a dot.
_VARIANT_STEMS = {"model", "diffusion_pytorch_model", "pytorch_model"}
_VARIANT = re.compile(r"[A-Za-z_]\w*")
_INDEX = re.compile(r"(?P<stem>.+)\.safetensors\.index(?:\.(?P<variant>[A-Za-z_]\w*))?\.json")
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")

# Their loaders read one file by its name and know no index, so they are carried whole and never cut:
# adapters (peft), LoRA weights and textual inversions (diffusers).
_UNCUT = ("adapter_model*.safetensors", "pytorch_lora_weights*.safetensors", "learned_embeds*.safetensors")

# Weights in formats that are not read, by their suffixes; pickles of anything else are among them.
FOREIGN = {
    ".bin": "PyTorch", ".pt": "PyTorch", ".pth": "PyTorch", ".ckpt": "PyTorch", ".distcp": "PyTorch DCP",
    ".h5": "TensorFlow", ".msgpack": "Flax", ".onnx": "ONNX", ".onnx_data": "ONNX", ".gguf": "GGUF", ".ggml": "GGML",
    ".ot": "Rust", ".tflite": "TFLite", ".mlmodel": "Core ML", ".npz": "NumPy", ".nemo": "NeMo", ".engine": "TensorRT",
    ".pkl": "pickle", ".pickle": "pickle", ".joblib": "pickle",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileSet:
    """The files of one checkpoint, before their headers are read."""

    name: Name
    files: tuple[StoredFile, ...]
    index_path: str | None
    index_metadata: dict[str, object]
    weight_map: dict[str, str] | None  # tensor -> path from the root of the repository


@dataclass(frozen=True, slots=True)
class Found:
    """The weights of one repository, known from its listing and its indexes alone."""

    sets: tuple[FileSet, ...]
    uncut: frozenset[str]  # weights that are carried whole

    @property
    def files(self) -> tuple[StoredFile, ...]:
        return tuple(file for part in self.sets for file in part.files)

    @property
    def indexes(self) -> tuple[str, ...]:
        return tuple(part.index_path for part in self.sets if part.index_path)


@dataclass(frozen=True, slots=True)
class Opened:
    """The checkpoints of one repository, and the weight files that their tensors lie in."""

    files: tuple[StoredFile, ...]
    checkpoints: tuple[Checkpoint, ...]
    duplicates: dict[str, str]  # weight files that are left out, and why


def foreign_format(path: str) -> str | None:
    """The kind of weights in another format that ``path`` holds, by its suffix; None for everything else."""
    name = basename(path)
    dot = name.rfind(".")
    return FOREIGN.get(name[dot:].lower()) if dot >= 0 else None


def is_weight_index(path: str) -> bool:
    """``model.safetensors.index.json``, ``pytorch_model.bin.index.json`` and their variants."""
    name = basename(path)
    return name.endswith(".json") and any(f"{suffix}.index." in name for suffix in (".safetensors", ".bin"))


def read_file(source: Source, file: StoredFile, most: int) -> bytes:
    """The whole of a small file; raises BadIndex when it is larger than ``most`` bytes."""
    if file.size > most:
        raise BadIndex(file=file.path, why=f"{file.size} bytes are more than the {most} that such a file may have")
    return b"".join(source.read(file, 0, file.size))


def find_checkpoints(source: Source, exclude: Callable[[str], bool] = lambda path: False) -> Found:
    """Which weight files of ``source`` belong together, but for those that ``exclude`` names.

    Reads indexes and no weight file. Raises NoWeights, BadIndex and UnsafePath.
    """
    listing = {path: file for path, file in source.files().items() if not exclude(path)}
    weights = {path for path in listing if path.endswith(SUFFIX)}
    uncut = _uncut(source, listing, weights)
    sets = list(_sets(source, listing, weights - uncut))
    if not sets:
        raise NoWeights(place=source.place, found=_what_else(listing, uncut))
    return Found(tuple(sets), frozenset(uncut))


def open_checkpoints(source: Source, found: Found) -> Opened:
    """The checkpoints that ``found`` makes up, read from their headers.

    Raises the CheckpointError family for whatever is broken, before any tensor byte is read.
    """
    files = found.files
    headers = _headers(source, files)
    checkpoints = []
    first = 0
    for part in found.sets:
        count = len(part.files)
        checkpoints.append(_checkpoint(part, headers[first : first + count], first))
        first += count
    chosen, duplicates = _without_twins(checkpoints, files)
    return Opened(files, tuple(chosen), duplicates)


# ------------------------------------------------------------------------------------------------- which files


def _uncut(source: Source, listing: Mapping[str, StoredFile], weights: set[str]) -> set[str]:
    uncut = {path for path in weights if any(fnmatchcase(basename(path), pattern) for pattern in _UNCUT)}
    modules = listing.get("modules.json")
    if modules is not None:
        uncut |= {path for path in weights if dirname(path) in _single_file_modules(source, modules)}
    return uncut


def _single_file_modules(source: Source, modules: StoredFile) -> set[str]:
    """Folders of sentence-transformers modules that are no transformer: their loader reads ``model.safetensors``."""
    try:
        content = json.loads(read_file(source, modules, INDEX_MAX))
        return {m["path"] for m in content if m["path"] and not m["type"].endswith("Transformer")}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadIndex(file=modules.path, why=f"it is no list of modules ({error})") from None


def _sets(source: Source, listing: Mapping[str, StoredFile], weights: set[str]) -> Iterable[FileSet]:
    claimed: set[str] = set()
    indexed: set[tuple[str, str]] = set()
    for path in sorted(listing):
        match = _INDEX.fullmatch(basename(path))
        if match is None:
            continue
        part = _indexed_set(source, listing, path, Name(dirname(path), match["stem"], match["variant"]))
        claimed.update(file.path for file in part.files)
        indexed.add((part.name.folder, part.name.stem))
        yield part
    for (folder, stem, count), paths in _numbered_sets(weights - claimed):
        if (folder, stem) in indexed:
            continue  # shards that no index names any more are looked at one by one below
        numbers = sorted(int(_NUMBERED.fullmatch(basename(path))["number"]) for path in paths)  # type: ignore[index]
        missing = sorted(set(range(1, count + 1)) - set(numbers))
        if missing:
            raise BadIndex(file=paths[0], why=f"it has no index, and number {missing[0]} of {count} is missing")
        claimed.update(paths)
        yield FileSet(Name(folder, stem), tuple(listing[p] for p in paths), None, {}, None)
    for path in sorted(weights - claimed):
        yield FileSet(single_file_name(path), (listing[path],), None, {}, None)


def _numbered_sets(paths: set[str]) -> Iterable[tuple[tuple[str, str, int], list[str]]]:
    def key(path: str) -> tuple[str, str, int]:
        match = _NUMBERED.fullmatch(basename(path))
        assert match is not None
        return dirname(path), match["stem"], int(match["count"])

    numbered = sorted(path for path in paths if _NUMBERED.fullmatch(basename(path)))
    for group, members in groupby(sorted(numbered, key=lambda p: (key(p), p)), key=key):
        yield group, list(members)


def single_file_name(path: str) -> Name:
    """The name of the checkpoint that one file makes up: ``unet/model.fp16.safetensors`` has the variant fp16."""
    stem = basename(path).removesuffix(SUFFIX)
    base, dot, variant = stem.rpartition(".")
    if dot and base in _VARIANT_STEMS and _VARIANT.fullmatch(variant):
        return Name(dirname(path), base, variant)
    return Name(dirname(path), stem)


def _indexed_set(source: Source, listing: Mapping[str, StoredFile], path: str, name: Name) -> FileSet:
    weight_map, metadata = parse_index(read_file(source, listing[path], INDEX_MAX), path)
    files = sorted(set(weight_map.values()))
    for file in files:
        if file not in listing:
            raise BadIndex(file=path, why=f"it names {file}, which is not there")
        if not file.endswith(SUFFIX):
            raise BadIndex(file=path, why=f"it names {file}, which is no safetensors file")
    return FileSet(name, tuple(listing[f] for f in files), path, metadata, weight_map)


def parse_index(content: bytes, path: str) -> tuple[dict[str, str], dict[str, object]]:
    """({tensor: path from the root}, metadata) of an index; raises BadIndex or UnsafePath.

    Both shapes that loaders read are known: ``{"metadata", "weight_map"}``, and the bare map {tensor: file}.
    """
    try:
        data: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadIndex(file=path, why=f"it is not JSON ({str(error).splitlines()[0][:200]})") from None
    if not isinstance(data, dict):
        raise BadIndex(file=path, why="it is no JSON object")
    bare = "weight_map" not in data
    weight_map = data if bare else data["weight_map"]
    metadata = {} if bare else data.get("metadata", {})
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise BadIndex(file=path, why="its weight_map is no map from tensors to files")
    if not weight_map:
        raise BadIndex(file=path, why="its weight_map is empty")
    if not isinstance(metadata, dict):
        raise BadIndex(file=path, why="its metadata is no JSON object")
    inside = {file: _inside(dirname(path), file, path) for file in set(weight_map.values())}
    return {tensor: inside[file] for tensor, file in weight_map.items()}, metadata


def _inside(folder: str, file: str, index: str) -> str:
    """``file`` as a path from the root; raises UnsafePath when it leaves the index's own folder."""
    if file.startswith(("/", "\\")) or "\\" in file or "\0" in file or ":" in file.split("/")[0]:
        raise UnsafePath(file=index, path=file)
    if ".." in file.split("/") or normpath(file) != file:
        raise UnsafePath(file=index, path=file)
    return join(folder, file)


def _what_else(listing: Mapping[str, StoredFile], uncut: set[str]) -> str:
    if uncut:
        return f"; {min(uncut)} is read by its name and never cut"
    kinds = sorted({kind for path in listing if (kind := foreign_format(path))})
    if kinds:
        example = min(path for path in listing if foreign_format(path))
        return f"; it has {', '.join(kinds)} files such as {example}"
    return f" ({len(listing)} files)"


# ------------------------------------------------------------------------------------------------ what they hold


def _headers(source: Source, files: tuple[StoredFile, ...]) -> list[Header]:
    with ThreadPoolExecutor(HEADER_READERS, thread_name_prefix="headers") as pool:
        return list(pool.map(lambda file: read_header(source, file), files))


def read_header(source: Source, file: StoredFile) -> Header:
    """The header of one safetensors file, by one read or, for a very long one, two."""
    data = b"".join(source.read(file, 0, min(HEADER_READ, file.size)))
    end = LENGTH_BYTES + header_length(data, file=file.path, file_size=file.size)
    if end > len(data):
        data += b"".join(source.read(file, len(data), end))
    return parse_header(data, file=file.path, file_size=file.size)


def _checkpoint(part: FileSet, headers: list[Header], first: int) -> Checkpoint:
    owner: dict[str, str] = {}
    metadata: dict[str, str] = {}
    notes = []
    for header in headers:
        for name in header.tensors:
            if name in owner:
                raise DuplicateTensor(tensor=name, file=owner[name], other=header.file)
            owner[name] = header.file
        for key, value in header.metadata.items():
            if metadata.setdefault(key, value) != value:
                notes.append(f"{header.file}: its own {key!r} metadata gives way to the first file's")
    notes += _index_notes(part, owner)
    return Checkpoint(
        name=part.name,
        files=tuple(range(first, first + len(headers))),
        tensors=tuple(tensor for i, header in enumerate(headers) for tensor in header.as_tensors(first + i)),
        file_metadata=metadata,
        index_metadata=part.index_metadata,
        index_path=part.index_path,
        notes=tuple(notes),
    )


def _index_notes(part: FileSet, owner: dict[str, str]) -> list[str]:
    if part.weight_map is None:
        return []
    for name, file in part.weight_map.items():
        if owner.get(name) != file:
            where = f"it is in {owner[name]}" if name in owner else "no file has it"
            raise BadIndex(file=part.index_path, why=f"it says that {name} is in {file}, and {where}")
    unnamed = [name for name in owner if name not in part.weight_map]
    return [f"{part.index_path} does not name {len(unnamed)} tensors, such as {unnamed[0]}"] if unnamed else []


def _without_twins(
    checkpoints: list[Checkpoint], files: tuple[StoredFile, ...]
) -> tuple[list[Checkpoint], dict[str, str]]:
    """One checkpoint a name. Of a single file beside an indexed set, loaders take the single file, and so do we."""
    chosen: dict[Name, Checkpoint] = {}
    left_out: dict[str, str] = {}
    for checkpoint in sorted(checkpoints, key=lambda c: c.index_path is None):
        twin = chosen.get(checkpoint.name)
        if twin is not None:
            if {t.name: (t.dtype, t.shape) for t in twin.tensors} != {
                t.name: (t.dtype, t.shape) for t in checkpoint.tensors
            }:
                single = files[checkpoint.files[0]].path
                why = f"{single} beside it has other tensors, and loaders take that one; --exclude one of the two"
                raise BadIndex(file=twin.index_path, why=why)
            left_out |= {files[i].path: "a single file of the same weights is there" for i in twin.files}
            if twin.index_path:
                left_out[twin.index_path] = "a single file of the same weights is there"
        chosen[checkpoint.name] = checkpoint
    return sorted(chosen.values(), key=lambda c: c.files), left_out


def index_path(name: Name) -> str:
    """Where loaders look for the index of a checkpoint: ``unet/model.safetensors.index.fp16.json``."""
    index = f"{name.stem}{INDEX_SUFFIX}"
    if name.variant:
        index = f"{index.removesuffix('.json')}.{name.variant}.json"
    return join(name.folder, index)


def shard_path(name: Name, number: int, count: int) -> str:
    """The path of shard ``number`` (from 1) of ``count``; one alone has no number, as loaders expect."""
    stem = f"{name.stem}.{name.variant}" if name.variant else name.stem
    if count > 1:
        stem += f"-{number:05d}-of-{count:05d}"
    return join(name.folder, stem + SUFFIX)
