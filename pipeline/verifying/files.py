"""What a model has beside its weights, held against the source's: configs, code, tokenizers, and weights never cut."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import zip_longest
from pathlib import Path
from posixpath import basename, dirname, join
from typing import Any

from reshard.pipeline.check import Check, Result, some
from reshard.pipeline.checkpoint.discover import load_json
from reshard.pipeline.copying.stream import Tick
from reshard.pipeline.limits import CONFIG_MAX, TOKENIZER_MAX
from reshard.pipeline.planning.build import sort_out
from reshard.pipeline.planning.select import retyped_config
from reshard.pipeline.protocols import Source
from reshard.pipeline.request import Options
from reshard.pipeline.stores.scratch import full_disk_errors
from reshard.pipeline.tensors import StoredFile, same_by_hash
from reshard.pipeline.verifying.meta_load import Reload
from reshard.pipeline.verifying.side import Side
from reshard.pipeline.verifying.tokenizer import check_tokenizer, tokenizer_files

# What a config says of the program that wrote it and of the place that it was loaded from.
_VOLATILE = {"transformers_version", "_name_or_path", "_diffusers_version", "_commit_hash"}
_CONFIGS = ("*config*.json", "model_index.json")
_ABSENT = object()
_Keys = tuple[str, ...]
# For people: that one is missing or another is worth a word, and breaks no model.
_DOCUMENTS = (
    "*.md", "*.rst", "*.pdf", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "LICEN[CS]E*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
# What loaders take up by itself where it lies at the root or beside weights: settings of transformers, diffusers and
# sentence-transformers, of quantisers, adapters, which transformers attaches, and code.
_TAKEN_UP = (
    "config.json", "generation_config.json", "model_index.json", "modules.json", "sentence_*_config.json",
    "config_sentence_transformers.json", "*processor_config.json", "chat_template.*",
    "quant*_config.json", "hf_quant_config.json", "adapter_config.json", "adapter_model.*", "*.py",
)  # fmt: skip
# A folder without any of these is no model that loaders know, and what completes it takes nothing away.
_ROOTS = ("config.json", "model_index.json", "modules.json", "adapter_config.json")
# Names of which one at least makes up a tokenizer that loads; the others configure it.
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.*", "*-vocab.json", "*.model", "*.spm")
# What loaders read that take no `tokenizer.json`; who takes that one, reads none of these.
_VOCABULARIES = ("vocab.*", "*-vocab.json", "merges.txt", "*.model", "*.spm", "tekken.json")


def check_files(source: Side, output: Side, changes: Options, deep: bool, tick: Tick) -> Check:
    """Whether the files that loaders read beside weights are the source's, none lost and none added; JSON by meaning.

    A config follows a cast in ``changes``. Files that only people read are counted, and large ones without a hash are
    compared where ``deep``. What the check of tokenizers proves is left to it.
    """
    theirs, ours = source.source.files(), output.source.files()
    proven = _proven(theirs, ours)
    findings: list[str] = []
    figures = {"files": 0, "documents_that_differ": 0, "not_compared": 0}
    for file in _carried(source):
        if file.path in proven:
            continue
        figures["files"] += 1
        there = ours.get(file.path)
        if there is not None and not deep and _too_large(file, there):
            figures["not_compared"] += 1
            continue
        trouble = (
            "is not there" if there is None else _difference(source.source, file, output.source, there, changes, tick)
        )
        if trouble is None:
            continue
        if _matches(file.path, _DOCUMENTS):
            figures["documents_that_differ"] += 1
        else:
            findings.append(f"{file.path} {trouble}")
    added = [file.path for file in _carried(output) if file.path not in theirs and file.path not in proven]
    folders = _read_folders(source, output)
    findings += [
        f"{path} is there, and the source has none; loaders take it up"
        for path in added
        if dirname(path) in folders and _matches(path, _TAKEN_UP)
    ]
    figures["not_in_the_source"] = len(added)
    level = "configs by their meaning, the rest byte for byte"
    return Check("other files", "failed" if findings else "passed", level, "", figures, some(findings))


def _carried(side: Side) -> tuple[StoredFile, ...]:
    return sort_out(side.source.files(), side.found, side.opened, Options())[0]


def _proven(theirs: Mapping[str, StoredFile], ours: Mapping[str, StoredFile]) -> set[str]:
    """The files that make up the behaviour which `check_tokenizers` compares."""
    before, after = _tokenizers(theirs), _tokenizers(ours)
    paths = {path for folder, some in before.items() for path in (*some, *after.get(folder, ()))}
    return {path for path in paths if not any(_is_unread(path, listing) for listing in (theirs, ours))}


def _is_unread(path: str, listing: Mapping[str, StoredFile]) -> bool:
    return path in listing and _matches(path, _VOCABULARIES) and join(dirname(path), "tokenizer.json") in listing


def _read_folders(source: Side, output: Side) -> set[str]:
    """The root and the folders of weights, where the source is a model there: `--config-from` completes others."""
    folders = {"", *(checkpoint.name.folder for checkpoint in output.opened.checkpoints)}
    return {folder for folder in folders if any(join(folder, root) in source.source.files() for root in _ROOTS)}


def _matches(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(basename(path), pattern) for pattern in patterns)


def _too_large(one: StoredFile, other: StoredFile) -> bool:
    return one.size == other.size > CONFIG_MAX and same_by_hash(one, other) is None


def _difference(
    source: Source, was: StoredFile, output: Source, is_: StoredFile, changes: Options, tick: Tick
) -> str | None:
    """What is different about a file that both sides have; None when nothing is."""
    if same_by_hash(was, is_):
        return None
    if was.path.endswith(".json") and max(was.size, is_.size) <= CONFIG_MAX:
        before, after = (b"".join(side.read(file, 0, file.size)) for side, file in ((source, was), (output, is_)))
        if basename(was.path) == "config.json" and changes.dtype != "keep":
            before = retyped_config(before.decode("utf-8", "replace"), changes.dtype).encode()
        config = _matches(was.path, _CONFIGS)
        return None if before == after else _json_difference(before, after, config)
    if was.size != is_.size:
        return f"has {is_.size:,} bytes, and the source's has {was.size:,}"
    at = _first_difference(source.read(was, 0, was.size), output.read(is_, 0, is_.size), tick)
    return None if at is None else f"differs from byte {at} on"


def _json_difference(before: bytes, after: bytes, config: bool) -> str | None:
    """What is different about two JSON documents, of which a ``config`` also has keys that mean the same or nothing."""
    try:
        was, is_ = (_leaves(load_json(text), config) for text in (before, after))
        keys = sorted(key for key in was.keys() | is_.keys() if not _same(was.get(key, _ABSENT), is_.get(key, _ABSENT)))
    except (ValueError, RecursionError):
        return "is another text, and one of the two is no JSON that loaders read"
    if not keys:
        return None
    said = "; ".join(f"{'.'.join(key) or 'it'} was {_brief(was, key)} and is {_brief(is_, key)}" for key in keys[:3])
    return f"says something else: {said}" + (f"; and {len(keys) - 3} more" if len(keys) > 3 else "")


def _leaves(value: Any, config: bool, at: _Keys = ()) -> dict[_Keys, Any]:
    """Keys that lead there -> what is no object, or an empty one below the root."""
    if not isinstance(value, dict):
        return {at: value}
    if config:
        value = _without_dialect(value)
    if at and not value:
        return {at: {}}
    return {keys: leaf for key, inner in value.items() for keys, leaf in _leaves(inner, config, (*at, key)).items()}


def _without_dialect(config: dict[str, Any]) -> dict[str, Any]:
    """What a config says to every version: `torch_dtype` is an old name of `dtype`, which counts where both are set."""
    said = {key: value for key, value in config.items() if key not in {*_VOLATILE, "dtype", "torch_dtype"}}
    dtype = config.get("torch_dtype") if config.get("dtype") is None else config["dtype"]
    return said if dtype is None else said | {"dtype": dtype}


def _same(one: Any, other: Any) -> bool:
    """Equal as JSON: 1 is 1.0, true is not 1, and NaN is itself."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other) or (one != one and other != other)


def _brief(leaves: Mapping[_Keys, Any], keys: _Keys) -> str:
    return f"{json.dumps(leaves[keys]):.60}" if keys in leaves else "not there"


def _first_difference(one: Iterable[memoryview], other: Iterable[memoryview], tick: Tick) -> int | None:
    at = 0
    for first, second in zip_longest(_chunks(one), _chunks(other), fillvalue=b""):
        tick(len(first))
        if first != second:
            return at + next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
        at += len(first)
    return None


def _chunks(views: Iterable[memoryview]) -> Iterator[bytes]:
    """The same stretches of 64 kB whatever the store's views are."""
    held = bytearray()
    for view in views:
        held += view
        while len(held) >= 1 << 16:
            yield bytes(held[: 1 << 16])
            del held[: 1 << 16]
    if held:
        yield bytes(held)


# --------------------------------------------------------------------------------------------------- tokenizers


def check_tokenizers(output: Source, source: Source | None, reload: Reload, tmpdir: Path | None) -> list[Check]:
    """Of every folder with a tokenizer: whether it is the source's, by its files or what it does, or that it loads."""
    folders = sorted({*_tokenizers(output.files()), *(_tokenizers(source.files()) if source else ())})
    return [_check_folder(folder, output, source, reload, tmpdir) for folder in folders]


def _tokenizers(paths: Iterable[str]) -> dict[str, list[str]]:
    """Folder -> the files of its tokenizer, if it has one."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in tokenizer_files(paths):
        found[dirname(path)].append(path)
    return {folder: files for folder, files in found.items() if any(_matches(path, _TOKENIZERS) for path in files)}


def _check_folder(folder: str, output: Source, source: Source | None, reload: Reload, tmpdir: Path | None) -> Check:
    name = f"tokenizer {folder}" if folder else "tokenizer"
    level = "the same files, or the same behaviour" if source else "loads without remote code"
    sides = [side for side in (output, source) if side is not None]
    files = [{path: side.files()[path] for path in _tokenizers(side.files()).get(folder, [])} for side in sides]
    ours, theirs = files[0], files[-1]
    figures = {"files": len(ours)}
    if not theirs:
        return Check(name, "inconclusive", level, "the source has none to compare it with", figures)
    if source and ours.keys() == theirs.keys() and all(same_by_hash(ours[path], theirs[path]) for path in ours):
        return Check(name, "passed", level, "every file has the source's hash", figures)
    if any(file.size > TOKENIZER_MAX for some in files for file in some.values()):
        return Check(name, "skipped", level, f"a file of it is larger than {TOKENIZER_MAX:,} bytes", figures)
    with tempfile.TemporaryDirectory(prefix="reshard-tokenizer-", dir=tmpdir) as scratch:
        folders = [Path(scratch, str(number)) for number in range(len(sides))]
        for side, paths, to in zip(sides, files, folders, strict=True):
            _fetch(side, [*paths, join(folder, "config.json")], to)
        found = check_tokenizer(reload, folders[0], folders[1] if source else None)
    result: Result = "inconclusive"
    if found.result in {"equal_files", "equal_behaviour", "loads"}:
        result = "passed"
    elif found.result == "failed" or found.result == "skipped":
        result = found.result
    differing = ", ".join(join(folder, path) for path in found.differing)
    findings = (f"{differing or name}: {found.reason}",) if result == "failed" else ()
    reason = found.reason + (f"; not the same: {differing}" if differing and result != "failed" else "")
    return Check(name, result, level, reason, figures, findings)


def _fetch(source: Source, paths: Iterable[str], to: Path) -> None:
    to.mkdir()
    for path in paths:
        file = source.files().get(path)
        if file is None:
            continue
        with full_disk_errors(to, file.size), (to / basename(path)).open("wb") as handle:
            for view in source.read(file, 0, file.size):
                handle.write(view)
