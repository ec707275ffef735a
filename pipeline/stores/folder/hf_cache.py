"""What the cache of huggingface_hub owns, to which the snapshots in it link.

    hub/models--user--repo/snapshots/COMMIT/model.safetensors -> ../../blobs/ETAG
    hub/models--user--repo/blobs/ETAG                         a file, or -> ../../blobs/HA/HASH
    hub/blobs/HA/HASH                                         a file, of a repository stored in Xet
    hub/blobs/.huggingface-shared-blobs                       the library's mark of that folder

Only these places count, and only by their real paths: a folder of such a name that is itself a link leads elsewhere.
So an imitation reads what lies in the imitation, and beside a real cache what that one shares and it knows the hash of.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from reshard.pipeline.checkpoint.discover import is_weights

Owns = Callable[[Path], bool]  # whether a file, by its real path, is the cache's

_REPO = re.compile(r"(?:models|datasets|spaces|kernels)--.+")
_HASH = re.compile(r"[0-9a-f]{64}")
_REF_MAX = 1000  # bytes of a file with the name of a snapshot
_MARK, _MARKED = ".huggingface-shared-blobs", b"1\n"  # of the one layout there is


def _is_snapshot(folder: Path) -> bool:
    return folder.parent.name == "snapshots" and _REPO.fullmatch(folder.parent.parent.name) is not None


def snapshot_in(real: Path) -> Path | None:
    """A snapshot of the repository whose folder in a cache ``real`` is, or whose ``snapshots``; None where it is none.

    The one of the branch main, or the newest.
    """
    root = real.parent if real.name == "snapshots" else real
    if _REPO.fullmatch(root.name) is None:
        return None
    snapshots, main = root / "snapshots", root / "refs" / "main"
    try:
        found = sorted((path for path in snapshots.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
        named = main.read_bytes().decode().strip() if main.is_file() and main.stat().st_size < _REF_MAX else ""
    except (OSError, ValueError):
        return None
    return next((path for path in found if path.name == named), found[-1] if found else None)


def snapshot_below(real: Path) -> Path | None:
    """A snapshot of a model in the whole cache that ``real`` is, or that HF_HOME has in ``hub``; else None.

    None, too, where it has files of a model itself.
    """
    try:
        names = sorted(path.name for path in real.iterdir())
    except OSError:  # which its listing tells
        return None
    if any(is_weights(name) or name.endswith(".json") for name in names):
        return None
    folders = [*(real / n for n in names if n.startswith("models--")), *sorted((real / "hub").glob("models--*"))]
    return next((found for folder in folders if (found := snapshot_in(folder))), None)


def is_moved_snapshot(typed: Path, real: Path) -> bool:
    """Whether ``typed`` looks like a snapshot and leads elsewhere, which the library never makes."""
    return _is_snapshot(typed) and typed.parent.parent.resolve() / "snapshots" / typed.name != real


def owned_by_cache(real: Path) -> Owns:
    """What the cache that ``real`` is a snapshot of owns; nothing where it is none."""
    if not _is_snapshot(real):
        return lambda file: False
    own = real.parent.parent / "blobs"
    shared = real.parent.parent.parent / "blobs"
    marked = _is_marked(shared)

    def owns(file: Path) -> bool:
        if file.parent == own:
            return True
        named = _HASH.fullmatch(file.name) is not None and file.parent == shared / file.name[:2]
        return marked and named

    return owns


def _is_marked(shared: Path) -> bool:
    mark = shared / _MARK
    try:
        return mark.resolve() == mark and mark.is_file() and mark.read_bytes() == _MARKED
    except OSError:
        return False
