"""A publication held against its own manifest: what can be checked when the source is gone.

It shows that the files are those that were published, with the bytes that were read from the source then. That the
source held them at that commit rests on the word of who published.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from reshard.pipeline.errors import CheckpointError
from reshard.pipeline.find import is_weight_index, read_file
from reshard.pipeline.formats.safetensors import LENGTH_BYTES, header_length, parse_header
from reshard.pipeline.limits import INDEX_MAX, MANIFEST_MAX
from reshard.pipeline.manifest import MANIFEST, ROOT_KEY, Manifest, header_sha256, parse
from reshard.pipeline.publication import publications
from reshard.pipeline.stores.protocols import Source, Target
from reshard.pipeline.tensors import StoredFile
from reshard.pipeline.verify.checks import Check
from reshard.pipeline.verify.compare import Read, Side, some
from reshard.pipeline.verify.structure import named_files

_LEVEL = "what was published, by its own record"


@dataclass(frozen=True, slots=True)
class Recorded:
    """What came of looking for a manifest: a check, unless nothing speaks of one; and itself, where it is readable."""

    check: Check | None
    manifest: Manifest | None


def check_manifest(output: Source, described: str | None = None) -> Recorded:
    """Whether the files are those of the manifest, and its root is what indexes and commit say.

    Reads headers and indexes. ``described`` is the root in the description of the commit that published it.
    """
    indexes = _indexes(output)
    file = output.files().get(MANIFEST)
    if file is None:
        said = {path: index.root for path, index in indexes.items() if index.root} | (
            {"the commit": described} if described else {}
        )
        findings = [f"{who} names the manifest {root}, and {MANIFEST} is not there" for who, root in said.items()]
        return Recorded(Check("manifest", "failed", _LEVEL, "", {}, some(findings)) if findings else None, None)
    try:
        manifest = parse(read_file(output, file, MANIFEST_MAX))
    except CheckpointError as error:
        return Recorded(Check("manifest", "failed", _LEVEL, "", {}, (str(error),)), None)
    findings = _root_findings(manifest, indexes, described)
    for path in manifest.files:
        findings += _file_findings(output, path, manifest)
    levels = sorted(set(manifest.source.files.values()))
    source = f"{manifest.source.repo or 'a folder'} at {manifest.source.commit[:12]}"
    reason = f"published by {manifest.made.by} from {source}, whose bytes were {' and '.join(levels)}"
    figures = {
        "files": len(manifest.files),
        "tensors": sum(len(file.tensors) for file in manifest.files.values()),
        "root_in_the_commit": described is not None,
    }
    return Recorded(
        Check("manifest", "failed" if findings else "passed", _LEVEL, reason, figures, some(findings)), manifest
    )


def described_root(target: Target, commit: str) -> str | None:
    """The root that our last publication before ``commit`` names; None where none of ours brought a manifest.

    A later publication that moved no weights names none, and leaves the manifest as it is.
    """
    last = None
    for ours in publications(target, commit, None):
        last = last or ours
        if ours.weights != last.weights:
            return None
        if ours.manifest or ours.weights is None:
            return ours.manifest
    return None


class _Index(NamedTuple):
    root: str | None
    names: set[str]


def _indexes(output: Source) -> dict[str, _Index]:
    """Of every index that can be read: which manifest it names, and which files."""
    found: dict[str, _Index] = {}
    for path, file in output.files().items():
        if not is_weight_index(path) or file.size > INDEX_MAX:
            continue
        content = read_file(output, file, INDEX_MAX)
        try:
            root = json.loads(content)["metadata"].get(ROOT_KEY)
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
            root = None  # the index rules say what is wrong with it
        found[path] = _Index(root if isinstance(root, str) else None, named_files(path, content))
    return found


def _root_findings(manifest: Manifest, indexes: Mapping[str, _Index], described: str | None) -> list[str]:
    found = []
    if manifest.root != manifest.actual_root:
        why = f"its root is {manifest.root}, and its files make {manifest.actual_root}"
        found.append(f"{MANIFEST} was changed: {why}")
    for path, index in indexes.items():
        if index.names & manifest.files.keys() and index.root != manifest.root:
            found.append(f"{path} says {index.root or 'nothing'} of the manifest, whose root is {manifest.root}")
    if described not in (None, manifest.root):
        found.append(f"the commit that published it says {described}, and {MANIFEST} has the root {manifest.root}")
    return found


def _file_findings(output: Source, path: str, manifest: Manifest) -> list[str]:
    recorded, file = manifest.files[path], output.files().get(path)
    if file is None:
        return [f"{path} was published and is not there"]
    if file.size != recorded.size:
        return [f"{path} has {file.size:,} bytes, and {recorded.size:,} were published"]
    if file.sha256 is not None and file.sha256 != recorded.sha256:
        return [f"{path} has the sha256 {file.sha256}, and {recorded.sha256} was published"]
    try:
        header = _header(output, file)
        names = parse_header(header, file=path, file_size=file.size).tensors.keys()
    except CheckpointError as error:
        return [str(error)]
    if header_sha256(header) != recorded.header:
        changed = sorted(names ^ recorded.tensors.keys())
        return [f"{path} has another header than was published" + (f": {changed[0]} is new or gone" if changed else "")]
    return []


def _header(output: Source, file: StoredFile) -> bytes:
    prefix = b"".join(output.read(file, 0, min(LENGTH_BYTES, file.size)))
    length = header_length(prefix, file=file.path, file_size=file.size)
    return b"".join(output.read(file, 0, LENGTH_BYTES + length))


def attested_by(side: Side, manifest: Manifest) -> Side:
    """``side`` with the manifest's sha256 for files whose store lists none: reading them whole then checks them."""
    files = tuple(
        replace(file, sha256=file.sha256 or manifest.files[file.path].sha256)
        if file.path in manifest.files and file.size == manifest.files[file.path].size
        else file
        for file in side.opened.files
    )
    return replace(side, opened=replace(side.opened, files=files))


def check_manifest_bytes(side: Side, was_read: Read, manifest: Manifest) -> Check:
    """Whether every tensor still has the bytes that were read from the source when it was published."""
    findings = []
    tensors = 0
    for checkpoint in side.opened.checkpoints:
        sums = was_read.tensors[checkpoint.name]
        for path in sorted(side.opened.files[number].path for number in checkpoint.files):
            recorded = manifest.files[path].tensors if path in manifest.files else {}
            for name, digest in recorded.items():
                tensors += 1
                if name in sums and sums[name].xxh3 != digest:
                    findings.append(f"{name} in {path} has other bytes than were published")
    level = "xxh3-128 of every tensor, against the manifest"
    return Check("published bytes", "failed" if findings else "passed", level, "", {"tensors": tensors}, some(findings))
