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

from reshard.pipeline.limits import CONFIG_MAX, TOKENIZER_MAX
from reshard.pipeline.planner import sort_out
from reshard.pipeline.request import Options
from reshard.pipeline.stores.protocols import Source
from reshard.pipeline.stream import Tick
from reshard.pipeline.tensors import StoredFile, same_by_hash
from reshard.pipeline.verify.checks import Check, Result
from reshard.pipeline.verify.compare import Side, some
from reshard.pipeline.verify.reload import Reload
from reshard.pipeline.verify.tokenizer import check_tokenizer, tokenizer_files
from reshard.pipeline.wanted import retyped_config

# What a config says of the program that wrote it and of the place that it was loaded from.
_VOLATILE = {"transformers_version", "_name_or_path", "_diffusers_version", "_commit_hash"}
# For people: that one is missing or another is worth a word, and breaks no model.
_DOCUMENTS = (
    "*.md", "*.rst", "*.pdf", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "LICEN[CS]E*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
# Names of which one at least makes up a tokenizer that loads; the others configure it, or a processor.
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.*", "*-vocab.json", "*.model", "*.spm")


def check_files(source: Side, output: Side, changes: Options, deep: bool, tick: Tick) -> Check:
    """Whether every file that loaders read beside weights is there with the source's content; JSON by its meaning.

    A config follows a cast in ``changes``. Files that only people read are counted, and large ones without a hash are
    compared where ``deep``.
    """
    carried, _ = sort_out(source.source.files(), source.found, source.opened, Options())
    tokenizers = set(tokenizer_files(file.path for file in carried))
    ours = output.source.files()
    findings: list[str] = []
    figures = {"files": 0, "documents_that_differ": 0, "not_compared": 0}
    for file in carried:
        if file.path in tokenizers:
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
        if any(fnmatchcase(basename(file.path), pattern) for pattern in _DOCUMENTS):
            figures["documents_that_differ"] += 1
        else:
            findings.append(f"{file.path} {trouble}")
    level = "configs by their meaning, the rest byte for byte"
    return Check("other files", "failed" if findings else "passed", level, "", figures, some(findings))


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
        if basename(was.path) == "config.json":
            before = retyped_config(before.decode("utf-8", "replace"), changes.dtype).encode()
        return None if before == after else _json_difference(before, after)
    if was.size != is_.size:
        return f"has {is_.size:,} bytes, and the source's has {was.size:,}"
    at = _first_difference(source.read(was, 0, was.size), output.read(is_, 0, is_.size), tick)
    return None if at is None else f"differs from byte {at} on"


def _json_difference(before: bytes, after: bytes) -> str | None:
    try:
        was, is_ = json.loads(before), json.loads(after)
    except (ValueError, RecursionError):
        return "is another text, and one of the two is no JSON"
    if not isinstance(was, dict) or not isinstance(is_, dict):
        return None if was == is_ else "says something else"
    keys = sorted(key for key in was.keys() | is_.keys() if key not in _VOLATILE and was.get(key) != is_.get(key))
    if not keys:
        return None
    said = "; ".join(f"{key} was {_brief(was, key)} and is {_brief(is_, key)}" for key in keys[:3])
    return f"says something else: {said}" + (f"; and {len(keys) - 3} more" if len(keys) > 3 else "")


def _brief(document: Mapping[str, Any], key: str) -> str:
    return f"{json.dumps(document[key]):.60}" if key in document else "not there"


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
    folders = sorted({*_folders(output), *(_folders(source) if source else ())})
    return [_check_folder(folder, output, source, reload, tmpdir) for folder in folders]


def _folders(source: Source) -> dict[str, list[str]]:
    """Folder -> the files of its tokenizer; folders that only configure a processor have none."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in tokenizer_files(source.files()):
        found[dirname(path)].append(path)
    return {
        folder: paths
        for folder, paths in found.items()
        if any(fnmatchcase(basename(path), pattern) for path in paths for pattern in _TOKENIZERS)
    }


def _check_folder(folder: str, output: Source, source: Source | None, reload: Reload, tmpdir: Path | None) -> Check:
    name = f"tokenizer {folder}" if folder else "tokenizer"
    level = "the same files, or the same behaviour" if source else "loads without remote code"
    sides = [side for side in (output, source) if side is not None]
    files = [{path: side.files()[path] for path in _folders(side).get(folder, [])} for side in sides]
    ours, theirs = files[0], files[-1]
    figures = {"files": len(ours)}
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
        with (to / basename(path)).open("wb") as handle:
            for view in source.read(file, 0, file.size):
                handle.write(view)
