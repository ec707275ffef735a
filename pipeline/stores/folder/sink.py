"""Files on their way into a folder: beside the target, under a token's own name until they are sealed."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from xxhash import xxh3_128

from reshard.pipeline.errors import DiskFull, ReshardError
from reshard.pipeline.protocols import Source, Traffic
from reshard.pipeline.stores.folder.disk import disk_errors, make_folder, sync_folder
from reshard.pipeline.stores.lane import Lane
from reshard.pipeline.tensors import StoredFile


class FolderSink:
    """A Sink beside the target: files named by its token until they are sealed, then by their sha256."""

    transport = "file"

    def __init__(self, staging: Path, token: str) -> None:
        self._staging = staging
        self._token = token

    def batch(self, reads: Sequence[StoredFile], source: Source | None = None) -> FolderBatch:
        return FolderBatch(self._staging, token_folder(self._staging, self._token))


@dataclass
class _Staged:
    """A file on its way; ``sha256`` is empty until it is complete."""

    path: str
    size: int
    temporary: Path
    file: IO[bytes]
    sha256: str = ""


class FolderBatch:
    def __init__(self, staging: Path, mine: Path) -> None:
        self._objects = staging / "objects"
        self._mine = mine
        self._staged: list[_Staged] = []
        self._number = 0
        self._hashing = Lane("sha256")
        self._syncing = Lane("fsync", limit=1)
        self.traffic = Traffic()

    def open(self, path: str, size: int) -> FolderWriter:
        with disk_errors(self._mine, size):
            make_folder(self._mine)
            free = shutil.disk_usage(self._mine).free
            if free < size:
                raise DiskFull(path=str(self._mine), needed=size, free=free)
            self._number += 1
            temporary = self._mine / f"{os.getpid()}-{id(self)}-{self._number}"
            staged = _Staged(path, size, temporary, temporary.open("xb", buffering=0))
        self._staged.append(staged)
        return FolderWriter(staged, self._hashing, self._sync, self._forget)

    def seal(self) -> list[StoredFile]:
        """Each file is on the disk, and then under its sha256, before it is answered for."""
        sealed = []
        self._syncing.flush()
        self._close()
        for staged in self._staged:
            with disk_errors(staged.temporary, staged.size):
                self._objects.mkdir(exist_ok=True)
                staged.temporary.replace(self._objects / staged.sha256)
            sealed.append(StoredFile(staged.path, staged.size, sha256=staged.sha256))
        if sealed:
            sync_folder(self._objects)
        self._staged.clear()
        self.traffic = Traffic(uploaded=sum(file.size for file in sealed))
        return sealed

    def abort(self) -> None:
        self._close()
        for staged in list(self._staged):
            self._forget(staged)

    def _close(self) -> None:
        self._hashing.close()
        self._syncing.close()

    def _sync(self, staged: _Staged) -> None:
        """Have a complete file brought to the disk while the next one is written."""

        def sync(_: memoryview) -> None:
            with disk_errors(staged.temporary, staged.size):
                os.fsync(staged.file.fileno())
                staged.file.close()

        self._syncing.put(sync, memoryview(b""))

    def _forget(self, staged: _Staged) -> None:
        staged.file.close()
        staged.temporary.unlink(missing_ok=True)
        self._staged.remove(staged)


class FolderWriter:
    """Writes one file and takes the one sha256 that its bytes ever get."""

    def __init__(
        self, staged: _Staged, hashing: Lane, sync: Callable[[_Staged], None], forget: Callable[[_Staged], None]
    ) -> None:
        self._staged = staged
        self._hashing = hashing
        self._sync = sync
        self._forget = forget
        self._sha256 = hashlib.sha256()
        self._handed = xxh3_128()
        self._written = 0

    def write(self, view: memoryview) -> None:
        self._hashing.put(self._sha256.update, view)
        self._handed.update(view)
        self._written += len(view)
        with disk_errors(self._staged.temporary, self._staged.size):
            while view:
                view = view[self._staged.file.write(view) :]

    def finish(self) -> str:
        if self._written != self._staged.size:
            raise ReshardError(what=f"{self._staged.path}: {self._written} of {self._staged.size} bytes were written")
        self._hashing.flush()
        self._staged.sha256 = self._sha256.hexdigest()
        self._sync(self._staged)
        return self._handed.hexdigest()

    def abort(self) -> None:
        self._forget(self._staged)


def token_folder(staging: Path, token: str) -> Path:
    """A folder that no other token has, whatever characters it is made of."""
    return staging / f"t-{hashlib.sha256(token.encode()).hexdigest()[:32]}"
