"""A publication held against its own manifest: what can be checked when the source is gone.

It shows that the files are those that were published, with the bytes that were read from the source then. That the
source held them at that commit rests on the word of who published.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cache, partial
from posixpath import dirname, join
from typing import NamedTuple

from reshard.pipeline.check import Check, Result, some
from reshard.pipeline.checkpoint.discover import is_numbered, is_weight_index
from reshard.pipeline.checkpoint.formats.safetensors import SUFFIX
from reshard.pipeline.checkpoint.indexes import Index
from reshard.pipeline.checkpoint.kinds import foreign_format
from reshard.pipeline.checkpoint.small_files import read_file
from reshard.pipeline.checkpoint.tool_files import is_tool_file
from reshard.pipeline.errors import CheckpointError
from reshard.pipeline.limits import MANIFEST_MAX
from reshard.pipeline.planning.model import MANIFEST, ROOT_KEY
from reshard.pipeline.protocols import Source, Target
from reshard.pipeline.publishing.history import Publication, publications
from reshard.pipeline.publishing.manifest import Manifest, parse, sha256_of
from reshard.pipeline.verifying.compare import Read
from reshard.pipeline.verifying.index_rules import read_indexes
from reshard.pipeline.verifying.opened import OpenedSide
from reshard.pipeline.verifying.published import Expected, differences

# How the bytes of a source file were checked, by what the manifest says of it.
_HELD_AGAINST = {"checked": "source hash verified", "crc": "source CRC verified", "as delivered": "no upstream hash"}
_LEVEL = "published files against their manifest"


class Recorded(NamedTuple):
    """What came of looking for a manifest: a check, unless nothing speaks of one; and itself, where it is readable."""

    check: Check | None
    manifest: Manifest | None


def check_manifest(output: Source, described: Publication | None = None) -> Recorded:
    """Whether the files are those of the manifest, and index and commit say the same as it does.

    Reads headers and indexes. ``described`` is the commit that published it, where the history is known.
    """
    paths = [path for path in output.files() if is_weight_index(path)]
    # Of those that are none, the index rules say why.
    indexes = {path: one for path, one in read_indexes(output, paths).items() if isinstance(one, Index)}
    file = output.files().get(MANIFEST)
    if file is None:
        named = {path: root for path, index in indexes.items() if (root := _root(index))}
        components = _components(output, named)
        named = {path: root for path, root in named.items() if path not in components}
        named |= {"the commit": described.manifest} if described and described.manifest else {}
        findings = [f"{who} refers to manifest {root}, but {MANIFEST} is missing" for who, root in named.items()]
        return Recorded(Check("manifest", "failed", _LEVEL, "", {}, some(findings)) if findings else None, None)
    try:
        content = read_file(output, file, MANIFEST_MAX)
        manifest = parse(content)
    except CheckpointError as error:
        return Recorded(Check("manifest", "failed", _LEVEL, "", {}, (str(error),)), None)
    contradicted = list(_commit_findings(manifest, sha256_of(content), described)) if described else []
    components = _components(output, {path: _root(index) for path, index in indexes.items()})
    findings = [*_own_findings(manifest), *_index_findings(manifest, indexes, components), *contradicted]
    findings += differences(output, Expected(manifest.files))
    weights, others = _beside(output, manifest, indexes)
    figures = {
        "files": len(manifest.files),
        "tensors": sum(len(file.tensors) for file in manifest.files.values()),
        "weight_files_beside_it": len(weights),
        "other_files_beside_it": len(others),
        "differences": len(findings),
        "root_in_the_commit": described is not None and described.manifest == manifest.root,
    }
    reason = f"{_origin(manifest)}; {_attested(described, contradicted)}"
    if unknown := [_example(paths, kind) for paths, kind in ((weights, "weight"), (others, "other")) if paths]:
        reason += f"; not in the manifest: {' and '.join(unknown)}"
    check = Check("manifest", "failed" if findings else "passed", _LEVEL, reason, figures, some(findings))
    return Recorded(check, manifest)


def _origin(manifest: Manifest) -> str:
    levels = " and ".join(_HELD_AGAINST[level] for level in sorted(set(manifest.source.files.values())))
    source = f"{manifest.source.repo or 'a folder or an object store'} at {manifest.source.commit[:12]}"
    return f"published by {manifest.made.by} from {source} ({levels})"


def _attested(described: Publication | None, contradicted: Sequence[str]) -> str:
    """Who else says so: of the files the index does, of all the rest only a commit."""
    if described is None:
        return "not confirmed by a commit: the one that published it is not available"
    if contradicted:
        return "the commit that published it differs"
    if described.manifest_sha256 is None:
        return "the commit confirms the source, but not the program, the options and how source bytes were checked"
    return "the manifest's hash matches the commit"


def described_by(target: Target, commit: str) -> Publication | None:
    """Our last publication before ``commit`` that brought weights, if it brought a manifest of them.

    A later publication that moved no weights brings none, and leaves the manifest as it is.
    """
    last = None
    for ours in publications(target, commit, None):
        last = last or ours
        if ours.weights != last.weights:
            return None
        if ours.manifest or ours.weights is None:
            return ours if ours.manifest else None
    return None


def _root(index: Index) -> str | None:
    """That of the manifest, as the index names it."""
    root = (index.metadata or {}).get(ROOT_KEY)
    return root if isinstance(root, str) else None


def root_of(side: Source, folder: str = "") -> str | None:
    """What the manifest in ``folder`` has as its root; None without one that can be read."""
    file = side.files().get(join(folder, MANIFEST))
    try:
        return parse(read_file(side, file, MANIFEST_MAX)).root if file else None
    except CheckpointError:
        return None


def _own_findings(manifest: Manifest) -> Iterator[str]:
    if manifest.root != manifest.actual_root:
        yield f"{MANIFEST} was changed: its root is {manifest.root}, but its files give {manifest.actual_root}"
    if not manifest.files:
        yield f"{MANIFEST} lists no files; reshard never publishes an empty one"


def _components(output: Source, roots: Mapping[str, str | None]) -> set[str]:
    """The indexes of whose ``roots`` the manifest in the nearest folder around them has: it was published by itself."""
    root_in = cache(partial(root_of, output))  # of many indexes, and a manifest may have 100 MB
    found = set()
    for index, root in roots.items():
        folder = dirname(index)
        while folder and join(folder, MANIFEST) not in output.files():
            folder = dirname(folder)
        if folder and root_in(folder) == root:
            found.add(index)
    return found


def _index_findings(manifest: Manifest, indexes: Mapping[str, Index], components: Set[str]) -> Iterator[str]:
    """An index is the publication's if it says so, or names a file of it; then it names the root and nothing else.

    What else stands beside a publication, such as ``components`` with manifests of their own, is its owner's business.
    """
    named: set[str] = set()
    for path, index in indexes.items():
        root, names = _root(index), {*index.files.values()}
        another = root is None or (path in components and root != manifest.root)
        if another and not names & manifest.files.keys():
            continue
        named |= names
        if root != manifest.root:
            yield f"{path} has manifest root {root or 'none'}, not {manifest.root}"
        if others := names - manifest.files.keys():
            yield f"{path} lists {_example(others)}, but {MANIFEST} does not"
    if unnamed := {path for path in manifest.files if is_numbered(path) and path.endswith(SUFFIX)} - named:
        yield f"no index lists {_example(unnamed)}, which was published with an index"


def _commit_findings(manifest: Manifest, sha256: str, described: Publication) -> Iterator[str]:
    """What the commit says otherwise; its sha256 covers every byte, the rest says what was changed."""
    source, made = manifest.source, manifest.made
    pairs = {
        "root": (described.manifest, manifest.root),
        "source endpoint": (described.endpoint, source.endpoint),
        "source": (described.pin.named, source.repo),
        "source commit": (described.source_commit, source.commit),
        "plan": (described.plan, made.plan),
        "layout": (described.layout, made.layout),
    }
    if described.manifest_sha256 is not None:
        pairs["sha256"] = (described.manifest_sha256, sha256)
    for what, (theirs, ours) in pairs.items():
        if theirs != ours:
            yield f"the commit that published it has {what} {theirs or 'none'}, but {MANIFEST} has {ours or 'none'}"


def _beside(output: Source, manifest: Manifest, indexes: Mapping[str, Index]) -> tuple[set[str], set[str]]:
    """The weights (adapters, or what its owner added) and the other files of which the manifest says nothing."""
    named = {path for index in indexes.values() for path in index.files.values()}
    beside = {path for path in output.files() if not (is_tool_file(path) or is_weight_index(path))}
    beside -= {*manifest.files, MANIFEST}
    weights = {path for path in beside if path.endswith(SUFFIX) or foreign_format(path) or path in named}
    return weights, beside - weights


def _example(paths: set[str], kind: str = "weight") -> str:
    return min(paths) if len(paths) == 1 else f"{len(paths):,} {kind} files, such as {min(paths)}"


def attested_by(side: OpenedSide, manifest: Manifest) -> OpenedSide:
    """``side`` with the manifest's sha256 for files whose store lists none: reading them whole then checks them."""
    files = tuple(
        replace(file, sha256=file.sha256 or manifest.files[file.path].sha256)
        if file.path in manifest.files and file.size == manifest.files[file.path].size
        else file
        for file in side.opened.files
    )
    return replace(side, opened=replace(side.opened, files=files))


def check_manifest_bytes(side: OpenedSide, was_read: Read, manifest: Manifest) -> Check:
    """Whether every tensor still has the bytes that were read from the source when it was published."""
    read = {
        side.opened.files[number].path: was_read.tensors[checkpoint.name]
        for checkpoint in side.opened.checkpoints
        for number in checkpoint.files
    }
    published = [(path, *item) for path, file in manifest.files.items() for item in file.tensors.items()]
    compared = [item for item in published if item[1] in read.get(item[0], {})]
    findings = [
        f"{name} in {path} has different bytes than published"
        for path, name, digest in compared
        if read[path][name].xxh3 != digest
    ]
    absent = len(published) - len(compared)
    reason = f"not compared: {absent:,} of {len(published):,} published tensors are missing"
    if not absent:
        reason = "" if published else "the manifest lists no tensors"
    result: Result = "failed" if findings else "passed" if compared and not absent else "inconclusive"
    level = "xxh3-128 of every tensor, against the manifest"
    figures = {"tensors": len(compared), "differ": len(findings)}
    return Check("published bytes", result, level, reason, figures, some(findings))
