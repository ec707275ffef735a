"""From sets of weight files to checkpoints: every tensor, where its bytes lie, and nothing of the bytes themselves."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from posixpath import basename

from reshard.pipeline.checkpoint.discover import Found, beside_a_model, is_numbered
from reshard.pipeline.checkpoint.formats import dcp, gguf
from reshard.pipeline.checkpoint.formats.pointers import refuse_pointers
from reshard.pipeline.checkpoint.formats.ranged import each
from reshard.pipeline.checkpoint.formats.rank_files import read_ranks
from reshard.pipeline.checkpoint.formats.safetensors import LENGTH_BYTES, SUFFIX, Header, header_length, parse_header
from reshard.pipeline.checkpoint.formats.torch_files import read_torch
from reshard.pipeline.checkpoint.formats.zero import read_zero
from reshard.pipeline.checkpoint.kinds import suffix_of
from reshard.pipeline.checkpoint.parts import FileSet, Format
from reshard.pipeline.errors import AmbiguousWeights, BadIndex, DuplicateTensor, NoWeights
from reshard.pipeline.limits import HEADER_READ
from reshard.pipeline.protocols import Source
from reshard.pipeline.tensors import Checkpoint, Contents, Name, StoredFile
from reshard.pipeline.text import counted


@dataclass(frozen=True, slots=True)
class Opened:
    """The checkpoints of one repository, and the weight files that their tensors lie in."""

    files: tuple[StoredFile, ...]
    checkpoints: tuple[Checkpoint, ...]
    duplicates: dict[str, str]  # weight files that are left out, and why
    uncut: frozenset[str] = frozenset()  # those whose headers say that they are no models, and go whole beside one


def open_checkpoints(source: Source, found: Found) -> Opened:
    """The checkpoints that ``found`` makes up, read from headers, directories and pickles that are never run.

    Raises the CheckpointError family for whatever is broken, before any tensor byte is read.
    """
    checkpoints: list[Checkpoint] = []
    files: tuple[StoredFile, ...] = ()
    uncut: frozenset[str] = frozenset()
    for part in found.sets:
        checkpoint = _OPENERS[part.format](source, part, len(files))
        if gguf.goes_beside(checkpoint.keys):
            uncut |= {file.path for file in part.files}
        else:
            checkpoints.append(checkpoint)
            files += part.files
    if not files:
        raise NoWeights(place=str(source.place), **beside_a_model(min(uncut), "keys"))
    full = [checkpoint for checkpoint in checkpoints if checkpoint.tensors]
    if not full:
        raise NoWeights(place=str(source.place), found=f" ({files[0].path} has no tensors)")
    empty = {files[i].path: "it has no tensors" for c in checkpoints if not c.tensors for i in c.files}
    chosen, duplicates = _without_twins(full, files)
    return Opened(files, tuple(chosen), duplicates | empty, uncut)


def read_header(source: Source, file: StoredFile) -> Header:
    """The header of one safetensors file, by one read or, for a very long one, two."""
    data = bytearray()  # which grows without a copy: a header may have 100 MB

    def read_to(stop: int) -> None:
        for view in source.read(file, len(data), stop):
            data.extend(view)

    read_to(min(HEADER_READ, file.size))
    end = LENGTH_BYTES + header_length(memoryview(data), file=file.path, file_size=file.size)
    if end > len(data):
        read_to(end)
    return parse_header(memoryview(data), file=file.path, file_size=file.size)


def _open_safetensors(source: Source, part: FileSet, first: int) -> Checkpoint:
    def read(file: StoredFile, number: int) -> Contents:
        header = read_header(source, file)
        return Contents(tuple(header.as_tensors(number)), metadata=header.metadata)

    files = each(read, part.files, count(first))
    if any(dcp.is_sharded(file.metadata) for file in files):
        whole = dcp.merged(zip((file.path for file in part.files), files, strict=True))
        parts = counted(len(files), "file")
        owner = {tensor.name: (part.weight_map or {}).get(tensor.name, "") for tensor in whole}
        notes = (
            f"merged the parts in {parts} of a torch distributed checkpoint",
            "no file says how large a tensor is, so parts that are missing at its end go unnoticed",
            *_index_notes(part, owner),
        )
        kept, metadata = {"format": "pt"}, dict(part.index_metadata or {})
        numbers = tuple(range(first, first + len(files)))
        unsought = part.index_path is None and is_numbered(part.files[0].path)
        in_parts = unsought or any(tensor.pieces[1:] for tensor in whole)
        return Checkpoint(part.name, numbers, whole, kept, metadata, part.index_path, in_parts=in_parts, notes=notes)
    return _checkpoint(part, first, files)


def _open_torch(source: Source, part: FileSet, first: int) -> Checkpoint:
    return _checkpoint(part, first, each(partial(read_torch, source.read), part.files, count(first)))


def _open_gguf(source: Source, part: FileSet, first: int) -> Checkpoint:
    headers = each(partial(gguf.read_header, source.read), part.files)
    for path, why in gguf.split_faults(headers):
        raise BadIndex(file=path, why=why)
    keys = headers[0].keys
    files = [Contents(tuple(h.as_tensors(n)), tuple(_own_keys(h, keys))) for n, h in enumerate(headers, first)]
    return replace(_checkpoint(part, first, files), keys=keys)


def _own_keys(header: gguf.GgufHeader, first: gguf.Keys) -> Iterator[str]:
    """What readers, who take the keys of a model from its first file, do not see."""
    for key, value in header.keys.items():
        if key not in gguf.SPLIT_KEYS and first.get(key) != value:
            yield f"{header.file}: skipped its key {key!r}, as readers use the keys of the first file"


def _open_parts(source: Source, part: FileSet, first: int) -> Checkpoint:
    """What several processes left; its readers number the files from 0."""
    refuse_pointers(source.read, *filter(None, [part.metadata]), *part.files)
    if part.format == "distributed":
        assert part.metadata is not None, "a distributed checkpoint is found by its metadata"
        found = dcp.read_dcp(source.read, part.metadata, part.files)
    else:
        found = (read_ranks if part.format == "ranks" else read_zero)(source.read, part.files)
    tensors = (t._replace(pieces=tuple(p._replace(file=p.file + first) for p in t.pieces)) for t in found.tensors)
    records = (replace(record, file=record.file + first) for record in found.records)
    made = _checkpoint(part, first, [found._replace(tensors=tuple(tensors), records=tuple(records))])
    return replace(made, in_parts=True)


_OPENERS: dict[Format, Callable[[Source, FileSet, int], Checkpoint]] = {
    "safetensors": _open_safetensors,
    "torch": _open_torch,
    "distributed": _open_parts,
    "ranks": _open_parts,
    "zero": _open_parts,
    "gguf": _open_gguf,
}


def _checkpoint(part: FileSet, first: int, contents: Sequence[Contents]) -> Checkpoint:
    """``contents`` of each of the set's files, or of all in one."""
    owner: dict[str, str] = {}
    metadata: dict[str, str] = {}
    settings: dict[str, object] = {}
    notes = []
    for path, file in zip((stored.path for stored in part.files), contents, strict=False):
        names = [tensor.name for tensor in file.tensors]
        own = dict.fromkeys(names, path)
        if len(own) < len(names) or not owner.keys().isdisjoint(own):
            for name in names:
                if name in owner:
                    raise DuplicateTensor(tensor=name, file=owner[name], other=path)
                owner[name] = path
        owner |= own
        for key, value in file.metadata.items():
            if metadata.setdefault(key, value) != value:
                notes.append(f"{path}: ignored its metadata {key!r}; the first file has a different value")
        for key, values in file.settings.items():
            if settings.setdefault(key, values) != values:
                notes.append(f"{path}: ignored its settings in {key!r}; the first file has different ones")
        notes += file.notes
    notes += _index_notes(part, owner)
    return Checkpoint(
        name=part.name,
        files=tuple(range(first, first + len(part.files))),
        tensors=tuple(chain.from_iterable(file.tensors for file in contents)),
        file_metadata=metadata,
        varying=_varying(contents),
        index_metadata=dict(part.index_metadata or {}),
        index_path=part.index_path,
        notes=tuple(notes),
        ties=tuple(tie for file in contents for tie in file.ties),
        records=tuple(record for file in contents for record in file.records),
        settings=settings,
    )


def _varying(contents: Sequence[Contents]) -> dict[str, frozenset[str | None]]:
    """``Checkpoint.varying``; that a file without tensors lacks a key does not count."""
    values: defaultdict[str, set[str | None]] = defaultdict(set)
    having = Counter(key for file in contents if file.tensors for key in file.metadata)
    for key, value in chain.from_iterable(file.metadata.items() for file in contents):
        values[key].add(value)
    with_tensors = sum(1 for file in contents if file.tensors)
    lacking = {key for key in values if having[key] < with_tensors}
    return {
        key: frozenset(found | {None}) if key in lacking else frozenset(found)
        for key, found in values.items()
        if len(found) > 1 or key in lacking
    }


def _index_notes(part: FileSet, owner: Mapping[str, str]) -> Iterator[str]:
    if part.weight_map is None:
        return
    for name, file in part.weight_map.items():
        if owner.get(name) != file:
            where = f"but it is in {owner[name]}" if name in owner else "but no file has it"
            raise BadIndex(file=part.index_path, why=f"says that {name} is in {file}, {where}")
    if unnamed := [name for name in owner if name not in part.weight_map]:
        yield f"{part.index_path} does not list {counted(len(unnamed), 'tensor')}, such as {unnamed[0]}"


def _without_twins(
    checkpoints: list[Checkpoint], files: tuple[StoredFile, ...]
) -> tuple[list[Checkpoint], dict[str, str]]:
    """One checkpoint a name: that which loaders take."""
    chosen: dict[Name, Checkpoint] = {}
    left_out: dict[str, str] = {}
    order = partial(_order, files)
    for twin in sorted(checkpoints, key=order, reverse=True):
        if (checkpoint := chosen.setdefault(twin.name, twin)) is not twin:
            taken = checkpoint.index_path or files[checkpoint.files[0]].path
            beside = twin.index_path or files[twin.files[0]].path
            if why := _conflict(twin, checkpoint, order(twin) == order(checkpoint)):
                raise AmbiguousWeights(file=beside, other=taken, why=f"in the same folder {why}")
            others = {files[i].path for i in twin.files} - {files[i].path for i in checkpoint.files}
            paths = [*sorted(others), *([twin.index_path] if twin.index_path else [])]
            left_out |= dict.fromkeys(paths, f"loaders use {taken} instead, with the same names and shapes")
    return sorted(chosen.values(), key=lambda c: c.files), left_out


def _order(files: Sequence[StoredFile], checkpoint: Checkpoint) -> int:
    """The higher, the sooner loaders look for it: first for a single file of its name, then for its index."""
    first = files[checkpoint.files[0]].path
    name, suffix = checkpoint.name, suffix_of(first)
    if suffix not in {SUFFIX, gguf.SUFFIX} and name.stem == "model":
        name = replace(name, stem="pytorch_model")
    if checkpoint.index_path is None:
        return 2 if first == name.path + suffix else 0
    return 1 if basename(checkpoint.index_path).startswith(f"{name.stem}{suffix}.index") else 0


def _conflict(twin: Checkpoint, other: Checkpoint, alike: bool) -> str | None:
    """Why it is not the same whichever of two sets counts; ``alike``: nothing says which one loaders take."""
    is_gguf = other.name.suffix == gguf.SUFFIX
    if alike:
        return "belongs to another set with the same name"
    if _signature(twin) != _signature(other):
        return "has different tensors" + ("" if is_gguf else ", and loaders use that file")
    for key in sorted((twin.keys.keys() | other.keys.keys()) - {*gguf.SPLIT_KEYS}):
        if twin.keys.get(key) != other.keys.get(key):
            return f"has the same tensors, but a different key {key!r}"
    return None


def _signature(checkpoint: Checkpoint) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {tensor.name: (tensor.dtype, tensor.shape) for tensor in checkpoint.tensors}
