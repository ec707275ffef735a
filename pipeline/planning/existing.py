"""What the target holds when we plan, and what becomes of it: deleted, replaced, changed by others. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from posixpath import basename, dirname, join

from reshard.pipeline.checkpoint.discover import is_weight_index
from reshard.pipeline.checkpoint.formats.safetensors import SUFFIX
from reshard.pipeline.checkpoint.indexes import parse_index
from reshard.pipeline.checkpoint.kinds import foreign_format
from reshard.pipeline.checkpoint.names import PathsOf
from reshard.pipeline.checkpoint.tool_files import is_tool_file
from reshard.pipeline.errors import CheckpointError
from reshard.pipeline.planning.beside import describes
from reshard.pipeline.planning.model import CARD, MANIFEST, Output
from reshard.pipeline.planning.scales import MODELOPT
from reshard.pipeline.request import Options
from reshard.pipeline.tensors import Pin, StoredFile, same_by_hash


@dataclass(frozen=True, slots=True)
class Before:
    """What the target holds when we plan.

    ``published`` is what our last publication there put and left, by path; empty when there is none. ``source`` is the
    endpoint and repository, or None and folder, that it came from.
    """

    head: str
    files: Mapping[str, StoredFile]
    indexes: Mapping[str, bytes]  # the content of every weight index
    published: Mapping[str, StoredFile]
    source: tuple[str | None, str] | None = None


NOTHING = Before("", {}, {}, {})


def deletes_of(
    outputs: Iterable[Output],
    before: Before,
    stays: Set[str],
    theirs: Set[str],
    idle: Set[str],
    options: Options,
) -> tuple[tuple[str, ...], set[str]]:
    """What our commit removes, and of it what --prune alone does: neither superseded weights nor what was ours.

    ``theirs`` is what a publication in place left of its own source: no longer to publish that is not to delete it.
    ``idle`` are indexes that are to go.
    """
    names = {output.name for output in outputs}
    ours = PathsOf(names)
    doomed = {path for path in before.files if path in ours or path == MANIFEST}
    folders = {name.folder for name in names}  # a component that was published by itself has its own manifest ...
    doomed |= {path for path in before.files if dirname(path) and describes(path, folders)}
    doomed |= ((before.published.keys() - theirs) | idle) & before.files.keys()
    for index, content in before.indexes.items():
        if index in ours:
            doomed |= _named_by(index, content) & before.files.keys()  # it may name what is gone
    if options.dequantize:  # of what these weights were, or those that they take the place of
        doomed |= {join(name.folder, MODELOPT) for name in names} & before.files.keys()
    doomed -= stays
    doomed |= {path for path, content in before.indexes.items() if _named_by(path, content) & doomed} - stays
    pruned = {path for path in before.files if not is_tool_file(path)} - stays - doomed if options.prune else set()
    return tuple(sorted(doomed | pruned)), pruned


def missing(files: Iterable[StoredFile], there: Mapping[str, StoredFile]) -> list[StoredFile]:
    """Those of ``files`` that are not ``there``, as far as hashes tell."""
    return [file for file in files if file.path not in there or not same_by_hash(file, there[file.path])]


def differ(one: StoredFile | None, other: StoredFile | None) -> bool:
    """Whether two listed files, or a file and none, have other content."""
    if one is None or other is None:
        return one is not other
    return (one.size, one.sha256 or one.oid) != (other.size, other.sha256 or other.oid)


def _named_by(index: str, content: bytes) -> set[str]:
    try:
        return set(parse_index(content, index).by_tensor().values())
    except CheckpointError:
        return set()  # it is replaced, and what it named in vain stays where it is


def replaced(
    before: Before, written: Set[str], carried: Iterable[StoredFile], deletes: Iterable[str]
) -> tuple[StoredFile, ...]:
    """The target's files, as they are now, that our commit deletes or overwrites with other bytes.

    The card is not among them: what its owner wrote in it stays.
    """
    there = before.files
    others = {file.path for file in missing(carried, there)} & there.keys()
    return tuple(there[path] for path in sorted((written & there.keys()) | others | {*deletes}))


def occupied(before: Before, pin: Pin, changes: Iterable[StoredFile], pruned: Set[str]) -> tuple[str, ...]:
    """The paths of the target that make it somebody else's: it takes an explicit yes to write there.

    Where our last publication came from the same source, these are the files among ``changes`` that it did not put
    there. Everywhere else they are also the weights, configs and card of whatever model is there. Files that ``pruned``
    deletes alone are not among them: that is what --prune asks for.
    """
    if before.source == pin.origin:
        ours = {*before.published, *pruned}
        return tuple(file.path for file in changes if file.path not in ours)
    models = {path for path in before.files if _is_of_a_model(path)}
    return tuple(sorted(models | {file.path for file in changes} - pruned))


def _is_of_a_model(path: str) -> bool:
    file = basename(path)
    named = file.endswith(("config.json", SUFFIX)) or file == "model_index.json" or path == CARD
    return named or is_weight_index(path) or foreign_format(path) is not None


def drift(before: Before) -> list[str]:
    """What others did to paths that we published, a line for each; the card belongs to its owner."""
    changed = []
    for path, ours in before.published.items():
        now = before.files.get(path)
        if path != CARD and differ(now, ours):
            changed.append(f"{path} {'was deleted' if now is None else 'was replaced'}")
    return changed
