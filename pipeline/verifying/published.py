"""What a publication should hold against what is there: the one comparison of the two.

Who has just published expects what was planned and copied (`job_checks.confirm`); who comes later, what the manifest
says (`manifest_check`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from reshard.pipeline.checkpoint.formats import gguf
from reshard.pipeline.checkpoint.formats.headers import parse_header
from reshard.pipeline.checkpoint.formats.safetensors import LENGTH_BYTES, header_length
from reshard.pipeline.checkpoint.small_files import read_file
from reshard.pipeline.errors import CheckpointError
from reshard.pipeline.limits import MANIFEST_MAX
from reshard.pipeline.planning.model import MANIFEST
from reshard.pipeline.protocols import Source
from reshard.pipeline.publishing.manifest import WeightFile, parse, sha256_of
from reshard.pipeline.tensors import StoredFile, is_content_of, same_by_hash


@dataclass(frozen=True, slots=True)
class Expected:
    """What should be there; only the weights are known to everyone."""

    weights: Mapping[str, WeightFile]
    headers: Mapping[str, int] | None = None  # their lengths, for who just sent them; then the store lists sha256, too
    root: str | None = None  # the manifest's, unless the weights are what that says
    texts: Mapping[str, bytes] = field(default_factory=dict)
    carried: Sequence[StoredFile] = ()
    gone: Iterable[str] = ()


def differences(there: Source, expected: Expected) -> Iterator[str]:
    """One sentence for each file that is not as expected; reads headers, and texts whole."""
    files = there.files()
    for path, recorded in expected.weights.items():
        yield from _weights_differ(there, path, recorded, expected.headers)
    if expected.root is not None:
        yield from _manifest_differs(there, expected.root)
    for path, text in expected.texts.items():
        found = files.get(path)
        if found is None:
            yield f"{path} was published but is missing"
        elif found.size != len(text) or read_file(there, found, len(text)) != text:
            yield f"{path} differs from the published text"
    for file in expected.carried:
        found = files.get(file.path)
        if found is None or found.size != file.size:
            yield f"{file.path} was not copied completely"
        elif not _is_carried(there, found, file):
            yield f"{file.path} was copied with different bytes"
    yield from (f"{path} should have been deleted" for path in expected.gone if path in files)


def _weights_differ(there: Source, path: str, recorded: WeightFile, headers: Mapping[str, int] | None) -> Iterator[str]:
    file = there.files().get(path)
    if file is None:
        yield f"{path} was published but is missing"
    elif file.size != recorded.size:
        yield f"{path} has {file.size:,} bytes, but {recorded.size:,} were published"
    elif file.sha256 != recorded.sha256 and (file.sha256 or headers is not None):
        has = f"the sha256 {file.sha256}" if file.sha256 else "no sha256"
        yield f"{path} has {has}, but {recorded.sha256} was published"
    else:
        try:
            header = b"".join(there.read(file, 0, headers[path])) if headers is not None else header_of(there, file)
            if sha256_of(header) != recorded.header:
                names = parse_header(header, file=path, file_size=file.size).tensors.keys() ^ recorded.tensors.keys()
                which = f": {min(names)} was added or removed" if names else ""
                yield f"{path} has a different header than published{which}"
        except CheckpointError as error:
            yield str(error)


def _manifest_differs(there: Source, root: str) -> Iterator[str]:
    if (file := there.files().get(MANIFEST)) is None:
        yield f"{MANIFEST} was published but is missing"
        return
    try:
        manifest = parse(read_file(there, file, MANIFEST_MAX))
    except CheckpointError as error:
        yield str(error)
    else:
        if not root == manifest.root == manifest.actual_root:
            yield f"{MANIFEST} does not match the copied files"


def header_of(there: Source, file: StoredFile) -> bytes:
    """Everything before the data of a safetensors or GGUF file; raises the CheckpointError family."""
    if file.path.endswith(gguf.SUFFIX):
        return b"".join(there.read(file, 0, gguf.read_header(there.read, file).data_start))
    prefix = b"".join(there.read(file, 0, min(LENGTH_BYTES, file.size)))
    length = header_length(prefix, file=file.path, file_size=file.size)
    return b"".join(there.read(file, 0, LENGTH_BYTES + length))


def _is_carried(there: Source, found: StoredFile, file: StoredFile) -> bool:
    """Whether ``found`` has the hash of ``file``; where its store keeps the other kind, it is read for that.

    A folder's file has none, and its size is all there is to compare.
    """
    same = same_by_hash(found, file)
    if same is not None or not (file.sha256 or file.oid):
        return same is not False
    return is_content_of(file, there.read(found, 0, found.size))
