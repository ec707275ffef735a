"""The index rules held against any repository or folder: listings, indexes and headers are read.

Where the pipeline stops at the first thing that it will not reshard, this goes on and names all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from posixpath import basename, dirname, join

from reshard.pipeline.check import Check
from reshard.pipeline.checkpoint.discover import NUMBERED, index_name, is_weight_index, read_file, set_name
from reshard.pipeline.checkpoint.formats import dcp
from reshard.pipeline.checkpoint.formats.safetensors import SUFFIX, Header
from reshard.pipeline.errors import CheckpointError
from reshard.pipeline.limits import INDEX_MAX
from reshard.pipeline.protocols import Source
from reshard.pipeline.tensors import Checkpoint
from reshard.pipeline.verifying.headers import Files, read_files
from reshard.pipeline.verifying.opened import OpenedSide
from reshard.pipeline.verifying.structure import REMARKS, Finding, check_index, check_weight_files, named_files


def check_rules(source: Source, opened: OpenedSide | CheckpointError) -> Check:
    """Whether listing, indexes and headers of all weights agree; ``opened`` is what the pipeline makes of them."""
    indexes = _indexes(source)
    texts = {path: content for path, content in indexes.items() if isinstance(content, bytes)}
    files = read_files(source, texts, opened)
    found = _findings(source, indexes, files, opened)
    read = {path: len(header.tensors) for path, header in files.headers.items() if isinstance(header, Header)}
    distributed = _distributed(opened)
    figures = {
        "files": len(files.headers) + sum(len(checkpoint.files) for checkpoint in distributed),
        "tensors": sum(read.values()) + sum(len(checkpoint.tensors) for checkpoint in distributed),
        "indexes": len(indexes),
    }
    findings = tuple(dict.fromkeys(str(finding) for finding in found if finding.rule not in REMARKS))
    remarks = "; ".join(dict.fromkeys(str(finding) for finding in found if finding.rule in REMARKS))
    level = "headers, lengths, indexes both ways, the listing"
    return Check("index rules", "failed" if findings else "passed", level, remarks, figures, findings)


def _indexes(source: Source) -> dict[str, bytes | CheckpointError]:
    """The content of every index that loaders go by: of torch files where the same checkpoint has no safetensors."""
    listing = source.files()
    indexes = sorted(path for path in listing if is_weight_index(path))
    safe = {set_name(path) for path in listing if path.endswith(SUFFIX)}
    safe |= {index_name(path) for path in indexes if _is_safe(path)}

    def content(path: str) -> bytes | CheckpointError:
        try:
            return read_file(source, listing[path], INDEX_MAX)
        except CheckpointError as error:
            return error

    return {path: content(path) for path in indexes if _is_safe(path) or index_name(path) not in safe}


def _is_safe(index: str) -> bool:
    return f"{SUFFIX}.index" in basename(index)


def _distributed(opened: OpenedSide | CheckpointError) -> list[Checkpoint]:
    """What torch's distributed checkpoints make up: it has no index, and is judged where it is opened."""
    if isinstance(opened, CheckpointError):
        return []
    names = {part.name for part in opened.found.sets if part.format == "distributed"}
    return [checkpoint for checkpoint in opened.opened.checkpoints if checkpoint.name in names]


def _findings(
    source: Source, indexes: Mapping[str, bytes | CheckpointError], files: Files, opened: OpenedSide | CheckpointError
) -> list[Finding]:
    uncut = frozenset() if isinstance(opened, CheckpointError) else opened.found.uncut
    headers = files.headers
    findings: list[Finding] = []
    named: set[str] = set()
    for index, content in indexes.items():
        if isinstance(content, CheckpointError):
            findings.append(Finding("index_json", str(content), index))
            continue
        beside = {
            path: header
            for path, header in headers.items()
            if path.startswith(_prefix(index)) and path.endswith(SUFFIX) == _is_safe(index)
        }
        findings += check_index(index, content, beside, source.files(), files.totals)
        named |= named_files(index, content)
    stale = {finding.file for finding in findings if finding.rule == "stale_file"}
    unread = {dirname(finding.file) for finding in findings if finding.rule == "index_json" and finding.file}
    free = {path: header for path, header in headers.items() if path not in named | stale}
    in_parts = {path for path, h in free.items() if isinstance(h, Header) and dcp.is_sharded(h.metadata)}
    # Read by their names, or in parts that another reader puts together: only the files themselves can be judged.
    alone = {path for path in free if path in uncut} | in_parts
    findings += [f for path in sorted(alone) for f in check_weight_files({path: free[path]}) if f.rule != "format"]
    for paths in _sets(path for path in free if path not in alone):
        findings += check_weight_files({path: free[path] for path in paths})
        if dirname(paths[0]) not in unread:  # else it may well name them
            findings += _unindexed(paths)
    # What else the pipeline would stop at has no rule here.
    if isinstance(opened, CheckpointError) and all(finding.rule in REMARKS for finding in findings):
        findings.append(Finding("unreadable", str(opened)))
    return findings


def _prefix(index: str) -> str:
    return f"{dirname(index)}/" if dirname(index) else ""


def _sets(paths: Iterable[str]) -> Iterator[list[str]]:
    """What no index names: numbered files by stem and count, any other file alone."""
    sets: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for path in sorted(paths):
        match = NUMBERED.fullmatch(basename(path))
        sets[(dirname(path), match["stem"], match["count"], match["suffix"]) if match else (path,)].append(path)
    yield from sets.values()


def _unindexed(paths: list[str]) -> Iterator[Finding]:
    match = NUMBERED.fullmatch(basename(paths[0]))
    if match is None:
        return
    stem = join(dirname(paths[0]), match["stem"])
    index = f"{stem}{match['suffix']}.index.json"
    yield Finding("no_index", f"{stem} is in numbered files, and {index} is not there to name them", paths[0])
    numbers = {int(found["number"]) for path in paths if (found := NUMBERED.fullmatch(basename(path)))}
    for number in sorted(set(range(1, int(match["count"]) + 1)) - numbers):
        text = f"number {number} of {int(match['count'])} of {match['stem']} is not there"
        yield Finding("absent_file", text, paths[0])
