"""The index rules held against any repository or folder, whoever made it: listings, indexes and headers are read.

Where the pipeline stops at the first thing that it will not reshard, this goes on and names all of them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from posixpath import basename, dirname, join

from reshard.pipeline.errors import CheckpointError
from reshard.pipeline.find import index_path, is_weight_index, read_file
from reshard.pipeline.formats import dcp
from reshard.pipeline.formats.safetensors import SUFFIX, Header
from reshard.pipeline.limits import HEADER_READERS, INDEX_MAX
from reshard.pipeline.open import read_header
from reshard.pipeline.stores.protocols import Source
from reshard.pipeline.tensors import Name
from reshard.pipeline.verify.checks import Check
from reshard.pipeline.verify.compare import Side
from reshard.pipeline.verify.structure import Finding, check_files, check_index, named_files

_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


def check_rules(source: Source, opened: Side | CheckpointError) -> Check:
    """Whether listing, indexes and headers of all weights agree; ``opened`` is what the pipeline makes of them."""
    headers = _headers(source)
    found = _findings(source, headers, opened)
    figures = {
        "files": len(headers),
        "tensors": sum(len(header.tensors) for header in headers.values() if isinstance(header, Header)),
        "indexes": len(_indexes(source)),
    }
    findings = tuple(dict.fromkeys(str(finding) for finding in found))
    level = "headers, lengths, indexes both ways, the listing"
    return Check("index rules", "failed" if findings else "passed", level, "", figures, findings)


def _headers(source: Source) -> dict[str, Header | CheckpointError]:
    """Of every safetensors file its header, or why it cannot be read."""

    def read(path: str) -> Header | CheckpointError:
        try:
            return read_header(source, source.files()[path])
        except CheckpointError as error:
            return error

    paths = sorted(path for path in source.files() if path.endswith(SUFFIX))
    with ThreadPoolExecutor(HEADER_READERS, thread_name_prefix="headers") as pool:
        return dict(zip(paths, pool.map(read, paths), strict=True))


def _indexes(source: Source) -> list[str]:
    return sorted(path for path in source.files() if is_weight_index(path) and f"{SUFFIX}.index" in basename(path))


def _findings(
    source: Source, headers: Mapping[str, Header | CheckpointError], opened: Side | CheckpointError
) -> list[Finding]:
    uncut = frozenset() if isinstance(opened, CheckpointError) else opened.found.uncut
    findings: list[Finding] = []
    named: set[str] = set()
    for index in _indexes(source):
        try:
            content = read_file(source, source.files()[index], INDEX_MAX)
        except CheckpointError as error:
            findings.append(Finding("index_json", index, None, str(error)))
            continue
        beside = {path: header for path, header in headers.items() if path.startswith(_prefix(index))}
        findings += check_index(index, content, beside, source.files())
        named |= named_files(index, content)
    stale = {finding.file for finding in findings if finding.rule == "stale_file"}
    free = {path: header for path, header in headers.items() if path not in named | stale}
    in_parts = {path for path, h in free.items() if isinstance(h, Header) and dcp.is_sharded(h.metadata)}
    # Read by their names, or in parts that another reader puts together: only the files themselves can be judged.
    alone = {path for path in free if path in uncut} | in_parts
    findings += [f for path in sorted(alone) for f in check_files({path: free[path]}) if f.rule != "format"]
    for paths in _sets(path for path in free if path not in alone):
        findings += check_files({path: free[path] for path in paths})
        findings += _unindexed(paths)
    # Torch files are judged by the pipeline itself, and whatever else it would stop at has no rule here.
    if isinstance(opened, CheckpointError) and not findings:
        findings.append(Finding("unreadable", None, None, str(opened)))
    return findings


def _prefix(index: str) -> str:
    return f"{dirname(index)}/" if dirname(index) else ""


def _sets(paths: Iterable[str]) -> Iterator[list[str]]:
    """What no index names: numbered files by stem and count, any other file alone."""
    sets: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for path in sorted(paths):
        match = _NUMBERED.fullmatch(basename(path))
        sets[(dirname(path), match["stem"], match["count"]) if match else (path,)].append(path)
    yield from sets.values()


def _unindexed(paths: list[str]) -> Iterator[Finding]:
    match = _NUMBERED.fullmatch(basename(paths[0]))
    if match is None:
        return
    index = index_path(Name(dirname(paths[0]), match["stem"]))
    text = f"{join(dirname(paths[0]), match['stem'])} is in numbered files, and {index} is not there to name them"
    yield Finding("no_index", paths[0], None, text)
    numbers = {int(found["number"]) for path in paths if (found := _NUMBERED.fullmatch(basename(path)))}
    for number in sorted(set(range(1, int(match["count"]) + 1)) - numbers):
        text = f"number {number} of {int(match['count'])} of {match['stem']} is not there"
        yield Finding("absent_file", paths[0], None, text)
