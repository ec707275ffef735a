"""Trees, commits and .gitattributes as git sees them; only what clients can observe."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

LFS_LINE = "filter=lfs diff=lfs merge=lfs -text"
_LFS_SUFFIXES = (
    "7z arrow bin bin.* bz2 ckpt ftz gz h5 joblib lfs.* mlmodel model msgpack npy npz onnx ot parquet pb pickle pkl"
    " pt pth rar safetensors tar.* tar tflite tgz wasm xz zip zst"
)
GITATTRIBUTES = "".join(
    f"{pattern} {LFS_LINE}\n"
    for pattern in [*(f"*.{s}" for s in _LFS_SUFFIXES.split()), "saved_model/**/*", "*tfevents*"]
).encode()
"""What a new repo's .gitattributes says."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file in a tree. ``oid`` is the git blob's sha1; for a large file the blob is its LFS pointer."""

    oid: str
    size: int
    sha256: str | None = None  # of a large file

    @classmethod
    def large(cls, sha256: str, size: int) -> "Entry":
        pointer = lfs_pointer(sha256, size)
        return cls(hashlib.sha1(b"blob %d\0" % len(pointer) + pointer).hexdigest(), size, sha256)

    @property
    def pointer_size(self) -> int:
        assert self.sha256
        return len(lfs_pointer(self.sha256, self.size))


def lfs_pointer(sha256: str, size: int) -> bytes:
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


Tree = Mapping[str, Entry]
Changes = Mapping[str, Entry | None]  # None: the path is removed


@dataclass(frozen=True)
class Commit:
    """A commit, stored as what it changes against its first parent."""

    oid: str
    parents: tuple[str, ...]
    title: str
    message: str
    author: str
    date: str
    changes: Changes

    def as_event(self) -> dict[str, Any]:
        changes = {path: e and [e.oid, e.size, e.sha256] for path, e in self.changes.items()}
        return {
            "oid": self.oid, "parents": self.parents, "title": self.title, "message": self.message,
            "author": self.author, "date": self.date, "changes": changes,
        }  # fmt: skip

    @classmethod
    def from_event(cls, event: dict[str, Any]) -> "Commit":
        changes = {path: e and Entry(*e) for path, e in event["changes"].items()}
        names = ("oid", "title", "message", "author", "date")
        return cls(parents=tuple(event["parents"]), changes=changes, **{name: event[name] for name in names})


def commit_oid(tree: Tree, parents: Iterable[str], author: str, date: str, title: str, message: str) -> str:
    """The sha1 that names a commit: like git's, of its tree, parents, author, date and message."""
    lines = [f"tree {directory_oids(tree)['']}", *(f"parent {parent}" for parent in parents)]
    body = "\n".join([*lines, f"author {author} {date}", "", title, "", message]).encode()
    return hashlib.sha1(b"commit %d\0" % len(body) + body).hexdigest()


def directory_oids(tree: Tree) -> dict[str, str]:
    """git's oid of every directory; the root is ``""``."""
    children: dict[str, list[tuple[bytes, bytes, str]]] = {"": []}  # directory -> (sort key, mode and name, oid)
    for path, entry in tree.items():
        parent, _, name = path.rpartition("/")
        children.setdefault(parent, []).append((name.encode(), b"100644 " + name.encode(), entry.oid))
        while parent and (above := parent.rpartition("/")[0]) not in children:
            children[parent := above] = []
    oids: dict[str, str] = {}
    for directory in sorted(children, key=lambda d: d.count("/") + bool(d), reverse=True):
        listing = b"".join(line + b"\0" + bytes.fromhex(oid) for _, line, oid in sorted(children[directory]))
        oids[directory] = hashlib.sha1(b"tree %d\0" % len(listing) + listing).hexdigest()
        if directory:
            parent, _, name = directory.rpartition("/")
            line = (name.encode() + b"/", b"40000 " + name.encode(), oids[directory])
            children[parent].append(line)
    return oids


def is_lfs_path(gitattributes: bytes, path: str) -> bool:
    """Whether the attributes send ``path`` to LFS; the last matching line decides, as in git."""
    answer = False
    for line in gitattributes.decode("utf-8", "replace").splitlines():
        words = line.split()
        if words and not words[0].startswith("#") and matches(words[0], path):
            answer = "filter=lfs" in words
    return answer


def is_ignored(gitignore: bytes, path: str) -> bool:
    """Whether a .gitignore at the root excludes ``path`` or a folder that it is in."""
    answer = False
    parts = path.split("/")
    above = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    for line in gitignore.decode("utf-8", "replace").splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        negated = pattern.startswith("!")
        pattern = pattern.removeprefix("!")
        candidates = above[:-1] if pattern.endswith("/") else above
        if any(matches(pattern.rstrip("/"), candidate) for candidate in candidates):
            answer = not negated
    return answer


def matches(pattern: str, path: str) -> bool:
    """A gitattributes pattern: without a slash it is matched against the base name."""
    pattern = pattern.replace("[[:space:]]", " ")
    if "/" not in pattern:
        return fnmatchcase(path.rpartition("/")[2], pattern)
    regex = re.escape(pattern.removeprefix("/"))
    regex = regex.replace(r"\*\*/", "(?:.*/)?").replace(r"\*\*", ".*").replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
    return re.fullmatch(regex, path) is not None
