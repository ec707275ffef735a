"""Which files beside the weights are carried, and why the others are left out. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from glob import escape
from pathlib import PurePosixPath
from posixpath import basename, dirname, join

from reshard.pipeline.checkpoint.discover import Found, is_weight_index, may_be_other, set_name
from reshard.pipeline.checkpoint.kinds import FOREIGN, TRAINERS, foreign_format, named_like
from reshard.pipeline.checkpoint.names import settings_path
from reshard.pipeline.checkpoint.open import Opened
from reshard.pipeline.checkpoint.parts import NUMBERED
from reshard.pipeline.checkpoint.tool_files import is_tool_file, leftover
from reshard.pipeline.planning.model import CARD, MANIFEST, STATEMENTS, Edit, LeftOut
from reshard.pipeline.planning.scales import MODELOPT
from reshard.pipeline.request import Options
from reshard.pipeline.tensors import StoredFile
from reshard.pipeline.text import counted


def settings_files(opened: Opened) -> dict[str, str]:
    """path -> text of the settings that lie beside weights in files of torch's."""
    found = (checkpoint for checkpoint in opened.checkpoints if checkpoint.settings)
    return {settings_path(one.name): json.dumps(one.settings, indent=2) + "\n" for one in found}


def settings_paths(found: Found, listing: Mapping[str, StoredFile], options: Options) -> dict[str, bool]:
    """Where settings beside weights may go, and whether they do: not if the source has the path, or it is excluded."""
    paths = {settings_path(part.name) for part in found.sets if part.format == "torch"}
    return {path: path not in listing and not excluded(options, path) for path in paths}


def settings_edits(opened: Opened, written: Mapping[str, bool]) -> tuple[list[Edit], list[str]]:
    """The files of settings that lie beside weights, as far as they are ``written``, and what is said of them."""
    texts, edits, notes = settings_files(opened), [], []
    for one in (checkpoint for checkpoint in opened.checkpoints if checkpoint.settings):
        path, names = settings_path(one.name), ", ".join(one.settings)
        if written[path]:
            edits.append(Edit(path, texts[path]))
            notes.append(f"settings stored with the weights ({names}) are written to {path}; skip them with --exclude")
        else:
            notes.append(f"settings stored with the weights ({names}) are skipped: {path} exists or is excluded")
    return edits, notes


def excluded(options: Options, path: str) -> bool:
    """Whether a source file is not even looked at."""
    return _unwanted(path, options) is not None


def _unwanted(path: str, options: Options) -> str | None:
    """Why ``path`` is left out whatever it holds; None for what its kind decides on."""
    if is_tool_file(path):
        return "part of the repository, not of the model"
    if any(fnmatchcase(path, pattern) for pattern in options.exclude):
        return "excluded"
    if path in STATEMENTS:
        return "it is about the source's files"
    if options.dequantize and basename(path) == MODELOPT:
        return "the weights are no longer quantized"
    why = None if _included(options, path) else leftover(path)
    return why and f"{why}; {_by_include(path)}"


def _included(options: Options, path: str) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in options.include)


def _by_include(path: str) -> str:
    return f"copy it with --include {escape(path)!r}"


def describes(path: str, folders: Iterable[str]) -> bool:
    """Whether ``path`` is a manifest or a signed statement, whose folder is, or is around, one of ``folders``."""
    around = join(dirname(path), "")
    return basename(path) in {MANIFEST, *STATEMENTS} and any(join(one, "").startswith(around) for one in folders)


def sort_out(
    listing: Mapping[str, StoredFile],
    found: Found,
    opened: Opened,
    options: Options,
    written: Set[str] = frozenset(),
    published: Set[str] = frozenset(),
) -> tuple[tuple[StoredFile, ...], tuple[LeftOut, ...]]:
    """(carried files, files left out) among everything that is neither read nor rewritten; each sorted by path.

    ``written`` are paths that the result has for other files. Which weights are not read shows once they are opened;
    of those that are not, because the target has them, ``published`` says which --include brought there.
    """
    weights = {file.path for file in found.files} | {*found.indexes}
    weights -= opened.duplicates.keys() | {path for path in published & weights if _included(options, path)}
    rewritten = weights | {MANIFEST} | (set() if excluded(options, CARD) else {CARD})
    other_steps = {
        step: f"another step; {part.metadata.path} selects {dirname(part.files[-1].path)}"
        for part in found.sets
        if part.metadata
        for step in part.other_steps
    }
    carried, left_out = [], []
    for path in sorted(listing.keys() - rewritten):
        why = _why_not(path, found, other_steps, opened.duplicates, options)
        if why is None and path in written:
            why = "the result has its own file at this path"
        if why is None:
            carried.append(listing[path])
        else:
            left_out.append(LeftOut(path, why))
    return tuple(carried), tuple(left_out)


def _why_not(
    path: str, found: Found, other_steps: Mapping[str, str], duplicates: Mapping[str, str], options: Options
) -> str | None:
    """Why it is left out; ``other_steps`` are folders and ``duplicates`` files that are, with the reason of each."""
    if why := _unwanted(path, options):
        return why
    if describes(path, (dirname(file.path) for file in found.files if file.path not in found.uncut)):
        return "it is about the source's files"
    if path in found.uncut or _included(options, path):
        return None
    if path in duplicates:
        return duplicates[path]
    kind = foreign_format(path)
    if kind is not None:
        inside = (other_steps[folder] for folder in map(str, PurePosixPath(path).parents) if folder in other_steps)
        return next(inside, None) or f"weights or data in another format ({kind}); {_by_include(path)}"
    if is_weight_index(path):
        return "not an index of the copied weights"
    return None


def other_weights(left_out: Sequence[LeftOut], found: Found, options: Options) -> list[str]:
    """Notes of pickles, and of the torch files that are left out although nothing that is read has their names."""
    names = {part.name for part in found.sets} | {set_name(path) for path in found.uncut}
    paths = [one.path for one in left_out if may_be_other(one.path, names) and not excluded(options, one.path)]
    kept = (one.path for one in left_out if not named_like(one.path, TRAINERS) and not excluded(options, one.path))
    pickles = [path for path in kept if foreign_format(path) == FOREIGN[".pkl"]]
    return [
        *_skipped(paths, "PyTorch file", "hold other weights"),
        *_skipped(pickles, "pickle", "be needed to load the model"),
    ]


def _skipped(paths: Sequence[str], noun: str, may: str) -> list[str]:
    if not paths:
        return []
    it, such = ("it", f": {paths[0]}") if len(paths) == 1 else ("them", f", such as {paths[0]}")
    return [f"skipped {counted(len(paths), noun)} that may {may}{such}; copy {it} with --include"]


def strays(found: Found) -> list[str]:
    """A note of each numbered file that is a set by itself, as the index beside it lists others."""
    alone = [part.files[0].path for part in found.sets if part.index_path is None and len(part.files) == 1]
    left = [path for path in alone if (match := NUMBERED.fullmatch(basename(path))) and int(match["count"]) > 1]
    return [f"{path} is left over: no index lists it; skip it with --exclude" for path in left]


def idle_indexes(found: Found) -> list[str]:
    """A note of each index that lists only files that are not there."""
    return [f"{path} is not used: none of the files it lists is in the source" for path in found.idle]


def idle_globs(options: Options, listing: Mapping[str, StoredFile]) -> list[str]:
    """A note of each glob that matches no file of the source."""
    return [
        f"{option} {glob!r} matches no file"
        for option, globs in (("--include", options.include), ("--exclude", options.exclude))
        for glob in globs
        if not any(fnmatchcase(path, glob) for path in listing)
    ]
