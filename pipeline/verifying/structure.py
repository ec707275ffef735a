"""Whether an index, the headers of its files and the folder they lie in say the same thing: pure, over data.

A loader takes only the set of files from ``weight_map``, so an index may be wrong in most entries and the model still
loads, until a loader that believes the index (disk offload) reads the wrong file. These rules are ours, after the index
format that ``save_pretrained`` writes: ``{"metadata": {"total_size": bytes}, "weight_map": {tensor: file}}``.

Nothing here raises for a broken checkpoint: every fault is a ``Finding``, and all of them are reported.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import chain, tee
from operator import attrgetter, eq
from posixpath import normpath
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from reshard.pipeline.checkpoint.formats.gguf import SPLIT_KEYS, GgufHeader, Keys, split_faults
from reshard.pipeline.checkpoint.formats.safetensors import Header
from reshard.pipeline.checkpoint.indexes import Index
from reshard.pipeline.errors import BadLength, CheckpointError
from reshard.pipeline.planning.model import TOTAL_PARAMETERS
from reshard.pipeline.tensors import DTYPE_BITS
from reshard.pipeline.text import counted

Rule = Literal[
    "index_json",  # the index is not JSON, or not an object of the right form
    "index_metadata",  # no "metadata" object: transformers stops with a KeyError
    "escape",  # a file name that leaves the folder
    "absent_file",  # the index names a file that is not there
    "wrong_file",  # the tensor is in another file than the index says, or the file's path is written with `./`
    "ghost",  # the index names a tensor that no file has
    "missing",  # a file has a tensor that the index does not name
    "duplicate",  # two files have a tensor of the same name
    "stale_file",  # a file of this checkpoint's name that the index does not name
    "no_index",  # several files that belong together, and no index that names them
    "total_size",  # the sum of the tensors' bytes differs from the index's
    "no_total_size",  # the index has no sum
    "total_parameters",  # the index counts parameters, and not with a whole number
    "other_parameters",  # it counts far more or fewer than the tensors have elements; a copy keeps what its source says
    "header",  # a file's header cannot be read, or breaks the format
    "length",  # a file does not end where its header says
    "split",  # GGUF: the split keys are not those of the parts
    "keys",  # GGUF: a key or its value differs from the source's
    "metadata",  # the files' `__metadata__` lacks or changes what torchao has in the source's
    "other_metadata",  # the same of all else, which transformers and accelerate do not read
    "format",  # in the file's `__metadata__`, none or one that transformers or accelerate refuse
    "unreadable",  # a file or index of another format that cannot be read, or is not safe to
    "lost",  # in the source, not in the output
    "added",  # in the output, not in the source
    "dtype",  # differs from the source's
    "shape",  # differs from the source's
    "moved",  # under a name or in a folder where loaders that find the source's do not look
    "file_missing",  # of those beside the weights: in the source, not in the output
    "file_added",  # in the output, not in the source, and loaders read it
    "file_changed",  # has other bytes, or another meaning, than the source's
]


# These break no loader that we know of, and are reported as remarks.
REMARKS: frozenset[Rule] = frozenset({"no_total_size", "total_parameters", "other_parameters"})

# The libraries whose tensors transformers and accelerate know, as a file's `__metadata__` names them.
FORMATS = frozenset({"pt", "tf", "flax", "mlx"})

_PLAIN = frozenset({"F64", "F32", "F16", "BF16", "I64", "BOOL"})  # of quantized ones the elements are no parameters

Headers = Mapping[str, Header | CheckpointError]
"""``{path: its header, or why it cannot be read}``; paths are POSIX and relative to the repository's root."""

Kind = tuple[str, tuple[int, ...]]  # dtype and shape
Signature = Mapping[str, Kind]
"""``{tensor: (dtype, shape)}``; dtypes by the safetensors format's names."""


_INDEX = re.compile(r"(?P<stem>.*)(?P<suffix>\.safetensors|\.bin|\.pt|\.pth)\.index(?P<variant>\.[^.]+)?\.json")


class Total(NamedTuple):
    """The bytes of one file's tensors, by the writer that counts the fewest and by the one that counts the most."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Finding:
    rule: Rule
    text: str
    file: str | None = None
    tensor: str | None = None

    def __str__(self) -> str:
        return self.text


def signature(headers: Mapping[str, Header]) -> dict[str, Kind]:
    """Every tensor of every file by name; of duplicates the last file's counts, as it does for a loader."""
    tensors = [headers[path].tensors for path in sorted(headers)]
    specs = chain.from_iterable(one.values() for one in tensors)
    return signature_of(chain.from_iterable(tensors), map(attrgetter("dtype", "shape"), specs))


def signature_of(names: Iterable[str], kinds: Iterable[Kind]) -> dict[str, Kind]:
    """That of tensors by name and (dtype, shape), in C: there may be 500,000.

    One pair stands for all that are equal: nearly every tensor is like another.
    """
    shared: dict[Kind, Kind] = {}
    return dict(zip(names, map(shared.setdefault, *tee(kinds)), strict=True))


def are_of(headers: Mapping[str, Header], wanted: Signature) -> bool:
    """Whether the files hold the tensors of ``wanted``, each once; ``compare`` tells what differs."""
    held = [header.tensors for header in headers.values()]
    kinds = attrgetter("dtype", "shape")
    return len(wanted) == sum(map(len, held)) == len(set().union(*held)) and all(
        all(map(eq, map(wanted.get, tensors), map(kinds, tensors.values()))) for tensors in held
    )


def compare(source: Signature, output: Signature, called: str = "the source") -> Iterator[Finding]:
    """What the output lacks, adds or changes, tensor by tensor; the loader itself notices only part of it.

    What the user asked to change (names, dtypes) must already be applied to ``source``, which is then ``called`` so.
    """
    for name in sorted(source.keys() | output.keys()) if source != output else ():
        if name not in output:
            yield Finding("lost", f"{name} is in the source but not in the output", tensor=name)
        elif name not in source:
            yield Finding("added", f"{name} is in the output but not in the source", tensor=name)
        else:
            (dtype, shape), (new_dtype, new_shape) = source[name], output[name]
            if dtype != new_dtype:
                text = f"{name} is {dtype} in {called} and {new_dtype} in the output"
                yield Finding("dtype", text, tensor=name)
            if tuple(shape) != tuple(new_shape):
                text = f"{name} is {list(shape)} in the source and {list(new_shape)} in the output"
                yield Finding("shape", text, tensor=name)


def compare_keys(source: Keys, output: Keys) -> Iterator[Finding]:
    """What became of the keys of a GGUF model, but for those that say how it is split."""
    for key in sorted((source.keys() | output.keys()) - {*SPLIT_KEYS}):
        if source.get(key) != output.get(key):
            where = (
                "not in the output" if key not in output else "not in the source" if key not in source else "changed"
            )
            yield Finding("keys", f"the key {key!r} is {where}")


def check_weight_files(headers: Headers, formats: Set[str] | None = None) -> Iterator[Finding]:
    """The rules of the files themselves, with or without an index; any of ``formats`` will do, or without them any."""
    for name, paths in _owners(headers).items() if _repeat_names(headers) else ():
        if len(paths) > 1:
            text = f"{name} is in {' and '.join(paths)}; loaders use the one they read last"
            yield Finding("duplicate", text, paths[-1], name)
    for path, header in sorted(headers.items()):
        if isinstance(header, CheckpointError):
            yield Finding("length" if isinstance(header, BadLength) else "header", str(header), path)
        elif isinstance(header, GgufHeader):
            continue
        elif not (one := header.metadata.get("format")):
            yield Finding("format", f'{path} has no "format" in its metadata, which transformers requires', path)
        elif formats and one not in formats:
            text = f"{path} has the format {one!r:.60} in its metadata, which loaders refuse; use 'pt'"
            yield Finding("format", text, path)
    parts = [header for _, header in sorted(headers.items()) if isinstance(header, GgufHeader)]
    if len(parts) == len(headers):
        for path, why in split_faults(parts):
            yield Finding("split", f"{path}: {why}", path)


def check_index(
    index: Index,
    headers: Headers,
    listing: Collection[str],
    totals: Mapping[str, Total] = MappingProxyType({}),
    formats: Set[str] | None = None,
    in_folder: Iterable[str] | None = None,
) -> Iterator[Finding]:
    """The rules of an index against the headers of all files that belong to it, and ``check_weight_files`` of those.

    ``headers`` has every weight file of the checkpoint's folder, named by the index or not; ``listing`` the paths of
    every file in the repository, and ``in_folder`` those in the index's own, where they are known; ``totals`` those
    files whose bytes writers count in several ways.
    """
    named = set(index.files.values())
    if index.metadata is None:
        text = f'{index.path} has no "metadata" object, which transformers requires'
        yield Finding("index_metadata", text, index.path)
    for written in sorted(set(index.weight_map.values())):
        if (path := index.files.get(written)) is None:
            yield Finding("escape", f"{index.path} refers to {written!r}, outside its folder", index.path)
        elif path not in listing:
            yield Finding("absent_file", f"{index.path} refers to a missing file: {written}", path)
        elif written != (plain := normpath(written)):  # transformers downloads the files of these very names
            text = f"{index.path} refers to {written!r:.80}, which loaders do not find on a Hub; write {plain!r:.80}"
            yield Finding("wrong_file", text, path)
    yield from _check_names(index, headers)
    for path, effect in _stale(index.path, {*(listing if in_folder is None else in_folder)} - named):
        yield Finding("stale_file", f"{path} is left over: {index.path} does not list it{effect}", path)
    own = {path: header for path, header in headers.items() if path in named}
    if index.metadata is not None and len(_readable(own)) == len(named):
        yield from _check_total(index.path, index.metadata, _readable(own), totals)
    yield from check_weight_files(own, formats)


def _check_names(index: Index, headers: Headers) -> Iterator[Finding]:
    readable, named = _readable(headers), set(index.files.values())
    if _names_each(index, readable):
        return
    owners = _owners(headers)
    for name, written in index.weight_map.items():
        path, paths = index.files.get(written), owners.get(name, ())
        if paths and path not in paths:
            text = f"{name} is in {' and '.join(paths)}, but {index.path} says {written}"
            yield Finding("wrong_file", text, path, name)
        # That a file is absent or unreadable is one finding already; its tensors are unknown.
        elif not paths and (path is None or path in readable):
            yield Finding("ghost", f"{index.path} lists {name}, but no file has it", path, name)
    for name, paths in owners.items():
        if name not in index.weight_map and not named.isdisjoint(paths):
            text = f"{name} is in {' and '.join(paths)}, but {index.path} does not list it"
            yield Finding("missing", text, paths[0], name)


def _names_each(index: Index, headers: Mapping[str, Header]) -> bool:
    """Whether each tensor is in the file that the index says, and no other; nearly always, of 500,000 at times."""
    return len(index.weight_map) == sum(len(header.tensors) for header in headers.values()) and all(
        {written and index.files.get(written) for written in set(map(index.weight_map.get, header.tensors))} <= {path}
        for path, header in headers.items()
    )


def _check_total(
    index_path: str, metadata: Mapping[str, Any], headers: Mapping[str, Header], totals: Mapping[str, Total]
) -> Iterator[Finding]:
    parameters = metadata.get(TOTAL_PARAMETERS, 0)
    if type(parameters) is not int or parameters < 0:
        text = f"{index_path} has {TOTAL_PARAMETERS} {str(parameters)[:40]!r}, which is not a count"
        yield Finding("total_parameters", text, index_path)
    elif parameters and (elements := _elements(headers)) and not elements / 2 < parameters < elements * 2:
        held = counted(elements, "element")
        text = f"{index_path} has {TOTAL_PARAMETERS} {parameters:,}, but the tensors have {held}"
        yield Finding("other_parameters", text, index_path)
    if "total_size" not in metadata:
        yield Finding("no_total_size", f"{index_path} has no total_size (loaders do not need it)", index_path)
        return
    stated = metadata["total_size"]
    sums = [
        totals.get(path) or (header.file_size - header.data_start,) * 2  # tensors fill a file: none is parsed else
        for path, header in headers.items()
    ]
    least, most = (sum(counts) for counts in zip(*sums, strict=True)) if sums else (0, 0)
    # save_pretrained of some versions wrote it as a float; 2.0 == 2 is what a reader needs.
    if isinstance(stated, bool) or not isinstance(stated, int | float) or not least <= stated <= most:
        bytes_ = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        says = f"{stated:,}" if type(stated) in {int, float} else stated
        says = f"{says!r:.60} as text" if isinstance(stated, str) else says
        text = f"{index_path} has total_size {says}, but the tensors have {bytes_} bytes"
        yield Finding("total_size", text, index_path)


def _elements(headers: Mapping[str, Header]) -> int:
    """How many all tensors have; 0 unless all are plain numbers. Writers count about as many parameters.

    Not just as many: models have buffers, tied copies, tensors that their class ignores, and parameters in no file.
    """
    count = 0
    for header in headers.values():
        for dtype, _, start, stop in header.tensors.values():
            if dtype not in _PLAIN:
                return 0
            count += (stop - start) * 8 // DTYPE_BITS[dtype]
    return count


def _stale(index_path: str, others: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Files beside the index that bear this checkpoint's own name; others are checkpoints of their own."""
    match = _INDEX.fullmatch(index_path)
    if match is None:
        return
    stem, tail, suffix = re.escape(match["stem"]), re.escape(match["variant"] or ""), re.escape(match["suffix"])
    single = re.compile(f"{stem}{tail}{suffix}")
    # Both orders of variant and number are in use: `model.fp16-00001-of-00002` and `model-00001-of-00002.fp16`.
    number = r"-\d+-of-\d+"
    shard = re.compile(f"{stem}({tail}{number}|{number}{tail}){suffix}")
    for path in sorted(others):
        if single.fullmatch(path):
            yield path, ", and loaders use it instead of the index"
        elif shard.fullmatch(path):
            yield path, ""


def _readable(headers: Headers) -> dict[str, Header]:
    return {path: header for path, header in headers.items() if isinstance(header, Header)}


def _repeat_names(headers: Headers) -> bool:
    readable = _readable(headers).values()
    return len(set().union(*(header.tensors for header in readable))) < sum(len(header.tensors) for header in readable)


def _owners(headers: Headers) -> dict[str, tuple[str, ...]]:
    owners: dict[str, tuple[str, ...]] = {}
    for path, header in sorted(_readable(headers).items()):
        alone = (path,)  # one for all: there may be 500,000 names
        for name in header.tensors:
            owners[name] = (*owners[name], path) if name in owners else alone
    return owners
