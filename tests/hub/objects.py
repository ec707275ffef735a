"""Content-addressed files on disk: large objects by sha256, git blobs by their git sha1."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from .errors import HubError, bad_request

_READ = 8 << 20
_ZEROS = bytes(_READ)


class FileStore:
    """``<root>/ab/abcdef...``; a file appears whole, by rename, or not at all."""

    def __init__(self, root: Path, temporary: Path) -> None:
        self.root = root
        self.temporary = temporary

    def path(self, digest: str) -> Path:
        return self.root / digest[:2] / digest

    def has(self, digest: str) -> bool:
        return self.path(digest).exists()

    def size(self, digest: str) -> int:
        return self.path(digest).stat().st_size

    def new_file(self) -> Path:
        """An empty file that ``adopt`` can take in."""
        descriptor, name = tempfile.mkstemp(dir=self.temporary)
        os.close(descriptor)
        return Path(name)

    def adopt(self, file: Path, digest: str) -> None:
        """Move ``file`` in under its digest, which the caller has checked."""
        target = self.path(digest)
        target.parent.mkdir(parents=True, exist_ok=True)
        file.replace(target)

    def drop(self, digest: str) -> bool:
        """Forget an object that others may still name; True if it was there."""
        there = self.has(digest)
        self.path(digest).unlink(missing_ok=True)
        return there


class ObjectStore(FileStore):
    """Large objects by sha256, checked as they arrive."""

    def receive(self, chunks: Iterable[memoryview], digest: str, size: int) -> None:
        """Store a stream that must have exactly this sha256 and size."""
        running = hashlib.sha256()
        received = 0
        file = self.new_file()
        try:
            with file.open("wb", buffering=0) as out:
                for chunk in chunks:
                    running.update(chunk)
                    received += len(chunk)
                    while chunk:
                        chunk = chunk[out.write(chunk) :]
            if received != size or running.hexdigest() != digest:
                raise HubError(
                    400,
                    f"the object is {received} bytes with sha256 {running.hexdigest()},"
                    f" not {size} bytes with sha256 {digest}",
                )
            self.adopt(file, digest)
        finally:
            file.unlink(missing_ok=True)

    def take_copy(self, source: Path, digest: str) -> None:
        """Store a local file by hard link (it must not change afterwards), or by copy across file systems."""
        if self.has(digest):
            return
        staged = Path(tempfile.mkdtemp(dir=self.temporary)) / "file"
        try:
            try:
                os.link(source, staged)
            except OSError:
                shutil.copyfile(source, staged)
            self.adopt(staged, digest)
        finally:
            shutil.rmtree(staged.parent)

    def corrupt(self, digest: str, offset: int) -> None:
        """Invert one byte; on a copy, as the object may be a hard link to someone's file."""
        copy = self.new_file()
        shutil.copyfile(self.path(digest), copy)
        with copy.open("r+b") as file:
            file.seek(offset)
            (byte,) = file.read(1)
            file.seek(offset)
            file.write(bytes([byte ^ 0xFF]))
        self.adopt(copy, digest)


class BlobStore(FileStore):
    """Regular files by git blob sha1."""

    def put(self, data: bytes) -> str:
        oid = git_blob_oid(data)
        if not self.has(oid):
            file = self.new_file()
            file.write_bytes(data)
            self.adopt(file, oid)
        return oid

    def get(self, oid: str) -> bytes:
        return self.path(oid).read_bytes()


def git_blob_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def sha256_of(path: Path) -> str:
    """The file's sha256; holes of a sparse file are hashed without being read."""
    running = hashlib.sha256()
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        at = 0
        while at < size:
            data_at = _next_data(file.fileno(), at, size)
            while at < data_at:
                step = min(_READ, data_at - at)
                running.update(memoryview(_ZEROS)[:step])
                at += step
            data_end = os.lseek(file.fileno(), at, os.SEEK_HOLE) if at < size else size
            while at < data_end:
                chunk = os.pread(file.fileno(), min(_READ, data_end - at), at)
                if not chunk:
                    raise bad_request(f"{path} changed while it was read")
                running.update(chunk)
                at += len(chunk)
    return running.hexdigest()


def _next_data(descriptor: int, at: int, size: int) -> int:
    try:
        return os.lseek(descriptor, at, os.SEEK_DATA)
    except OSError:  # ENXIO: nothing but a hole up to the end
        return size
