"""Whether two repositories have the same tokenizer: the same files, or else files that behave the same.

Equal bytes prove it. Where they differ (a re-save writes other files with the same meaning), the child process loads
both without remote code and compares what they are and do over difficult text. That is an argument and no proof.
"""

from __future__ import annotations

import filecmp
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from posixpath import basename, dirname, join
from typing import Literal

from reshard.pipeline.check import Check, Result, some
from reshard.pipeline.checkpoint.kinds import named_like
from reshard.pipeline.copying.stream import Tick
from reshard.pipeline.errors import DiskFull
from reshard.pipeline.limits import JSON_PARTS_MAX, TOKENIZER_MAX
from reshard.pipeline.protocols import Source
from reshard.pipeline.stores.scratch import full_disk_errors
from reshard.pipeline.tensors import StoredFile, same_by_hash
from reshard.pipeline.verifying.json_difference import json_difference
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.tokenizer_files import tokenizer_files

# Names of which one at least makes up a tokenizer that loads; the others configure it.
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.*", "*-vocab.json", "*.model", "*.spm")
# Read only by loaders that take no `tokenizer.json`; those that take it read none of these.
_VOCABULARIES = ("vocab.*", "*-vocab.json", "merges.txt", "*.model", "*.spm", "tekken.json")


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What the child says: one ``loads``; two have ``equal_behaviour``, which is the same ids, decoding, specials and
    template; or it ``failed``, because they differ, or the second one does not load and the first one does.
    """

    result: Literal["loads", "equal_behaviour", "failed", "inconclusive", "skipped"]
    reason: str


def check_tokenizers(
    output: Source,
    source: Source | None,
    meta_loader: MetaLoader,
    tmpdir: Path | None,
    excluded: Callable[[str], bool] = lambda path: False,
) -> list[Check]:
    """Of every folder with a tokenizer: whether it is the source's, but for ``excluded`` files, or alone, if it loads.

    Equal bytes pass. Other bytes that behave the same are inconclusive, with the keys that differ, and so are those
    whose behaviour could not be looked at.
    """
    sides = [(output, _tokenizers(output.files()))]
    if source:
        sides.append((source, _tokenizers(path for path in source.files() if not excluded(path))))
    folders = sorted({folder for _, found in sides for folder in found})
    return [_check_folder(folder, sides, meta_loader, tmpdir) for folder in folders]


def compared_by_behaviour(theirs: Mapping[str, StoredFile], ours: Mapping[str, StoredFile]) -> set[str]:
    """The paths of both sides that `check_tokenizers` judges, where the source has a tokenizer.

    Those of a tokenizer that is too large to be loaded are compared as any other file.
    """
    before, after = _tokenizers(theirs), _tokenizers(ours)
    judged = {folder: {*files, *after.get(folder, ())} for folder, files in before.items()}
    paths = {path for files in judged.values() if not _too_large(files, theirs, ours) for path in files}
    unread = {path for path in paths if named_like(path, _VOCABULARIES)}
    for listing in (theirs, ours):
        paths -= {path for path in unread & listing.keys() if join(dirname(path), "tokenizer.json") in listing}
    return paths


def _too_large(paths: Iterable[str], *listings: Mapping[str, StoredFile]) -> bool:
    return any(path in listing and listing[path].size > TOKENIZER_MAX for path in paths for listing in listings)


def _tokenizers(paths: Iterable[str]) -> dict[str, list[str]]:
    """Folder -> the files of its tokenizer, if it has one."""
    found = tokenizer_files(paths).items()
    return {folder: files for folder, files in found if any(named_like(path, _TOKENIZERS) for path in files)}


def _check_folder(
    folder: str, sides: Sequence[tuple[Source, Mapping[str, list[str]]]], meta_loader: MetaLoader, tmpdir: Path | None
) -> Check:
    """Of the output, and of the source where there is one: each with the files of its tokenizers, by folder."""
    name = f"tokenizer {folder}" if folder else "tokenizer"
    source = len(sides) > 1
    level = "same files, or same behavior" if source else "loads without remote code"
    files = [{path: side.files()[path] for path in found.get(folder, [])} for side, found in sides]
    ours, theirs = files[0], files[-1]
    figures = {"files": len(ours)}
    if not theirs:
        return Check(name, "inconclusive", level, "the source has no tokenizer to compare with", figures)
    if source and ours.keys() == theirs.keys() and all(same_by_hash(ours[path], theirs[path]) for path in ours):
        return Check(name, "passed", level, "all files have the source's hashes", figures)
    if source and not ours:
        return Check(name, "failed", level, "", figures, (f"{name}: all of its files are missing",))
    if _too_large({*ours, *theirs}, *files):
        reason = f"not loaded: a file is larger than {TOKENIZER_MAX:,} bytes"
        return Check(name, "skipped", level, reason, figures)
    with ExitStack() as stack:
        folders = []
        for (side, _), own in zip(sides, files, strict=True):
            wanted = (side.files().get(path) for path in (*own, join(folder, "config.json")))
            copies = fetched(side, [file for file in wanted if file], lambda count: None, tmpdir)
            folders.append(stack.enter_context(copies))
        paths = sorted({*ours, *theirs}) if source else []
        differences = [f"{path} {how}" for path in paths if (how := _difference(basename(path), folders))]
        if source and not differences:
            return Check(name, "passed", level, f"all files are identical ({len(ours)})", figures)
        question = {"folders": [str(side) for side in reversed(folders)]}
        found = meta_loader.ask("tokenizers", Behaviour, json.dumps(question))
    reasons = "; ".join([found.reason, *some(differences)])
    if found.result == "failed":
        return Check(name, "failed", level, "", figures, (f"{name}: {reasons}",))
    alone: dict[str, Result] = {"loads": "passed", "skipped": "skipped"}
    result: Result = "inconclusive" if source else alone.get(found.result, "inconclusive")
    return Check(name, result, level, reasons, figures)


def _difference(name: str, folders: list[Path]) -> str:
    """How the file differs in two folders, the output's and the source's; empty where it does not."""
    after, before = (folder / name for folder in folders)
    if not (before.exists() and after.exists()):
        return "is on one side only"
    if filecmp.cmp(before, after, shallow=False):
        return ""
    texts = [path.read_bytes() for path in (before, after)] if name.endswith(".json") else []
    if not texts or any(text.count(b"[") + text.count(b"{") > JSON_PARTS_MAX for text in texts):
        return "has different bytes"
    return json_difference(texts[0], texts[1], config=False).text


@contextmanager
def fetched(source: Source, files: Sequence[StoredFile], tick: Tick, tmpdir: Path | None) -> Iterator[Path]:
    """A temporary folder in ``tmpdir`` with these files, by their own names; raises DiskFull where they do not fit."""
    with tempfile.TemporaryDirectory(prefix="reshard-fetched-", dir=tmpdir) as scratch:
        folder = Path(scratch).resolve()
        needed, free = sum(file.size for file in files), shutil.disk_usage(folder).free
        if needed > free:
            raise DiskFull(path=scratch, needed=needed, free=free)
        for file in files:
            with full_disk_errors(folder, file.size), (folder / basename(file.path)).open("wb") as handle:
                for view in source.read(file, 0, file.size):
                    handle.write(view)
                    tick(len(view))
        yield folder
