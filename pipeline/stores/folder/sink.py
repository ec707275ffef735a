"""Files on their way into a folder: beside the target, under a token's own name until they are stored."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

from reshard.pipeline.errors import TargetFull
from reshard.pipeline.protocols import Traffic
from reshard.pipeline.stores.carry import check_written
from reshard.pipeline.stores.folder.blocks import BlockFile, Disk
from reshard.pipeline.stores.folder.disk import disk_errors, sync_folder
from reshard.pipeline.stores.lane import Lane
from reshard.pipeline.tensors import StoredFile


class FolderBatch:
    """Files beside the target: named by its token until they are stored, then by their sha256.

    It has a few open at a time, however many it holds: one is filled while others are brought to the disk.
    """

    def __init__(self, staging: Path, claim: Callable[[], Path]) -> None:
        """``claim`` makes the folder of our token, which commits of other runs leave alone from then on."""
        self._objects = staging / "objects"
        self._claim = claim
        self._staged: list[FolderWriter] = []
        self._number = 0
        self._hashing = Lane("sha256")
        self._disk = Disk()
        self.traffic = Traffic()

    def open(self, path: str, size: int) -> FolderWriter:
        with disk_errors(self._objects, size):
            mine = self._claim()
            free = shutil.disk_usage(mine).free
            if free < size:
                raise TargetFull(path=str(mine), needed=size, free=free)
            self._number += 1
        temporary = mine / f"{os.getpid()}-{id(self)}-{self._number}"
        file = self._disk.create(temporary, size)
        self._staged.append(writer := FolderWriter(path, size, temporary, file, self._hashing))
        return writer

    def settle(self) -> list[StoredFile]:
        return self._stored([*takewhile(lambda staged: staged.file.on_disk, self._staged)])

    def seal(self) -> list[StoredFile]:
        self._disk.flush()
        self._close()
        return self._stored([*self._staged])

    def _stored(self, ready: Sequence[FolderWriter]) -> list[StoredFile]:
        """The first files, which are on the disk by now, get their sha256 as names before they are answered for."""
        stored = []
        for staged in ready:
            with disk_errors(staged.temporary, staged.size):
                try:
                    self._name(staged)
                except FileNotFoundError:  # another run, at its end, removed the folder, which was empty
                    self._name(staged)
            stored.append(StoredFile(staged.path, staged.size, sha256=staged.sha256))
        if stored:
            sync_folder(self._objects)
        del self._staged[: len(ready)]
        self.traffic = Traffic(uploaded=sum(file.size for file in stored))
        return stored

    def _name(self, staged: FolderWriter) -> None:
        self._objects.mkdir(exist_ok=True)
        staged.temporary.replace(self._objects / staged.sha256)

    def abort(self) -> None:
        self._close()
        for staged in self._staged:
            staged.file.close()
            staged.temporary.unlink(missing_ok=True)
        self._staged.clear()

    def _close(self) -> None:
        self._hashing.close()
        self._disk.close()


class FolderWriter:
    """Writes one file and takes the one sha256 that its bytes ever get, which is empty until it is complete."""

    def __init__(self, path: str, size: int, temporary: Path, file: BlockFile, hashing: Lane) -> None:
        self.path, self.size, self.temporary, self.file = path, size, temporary, file
        self.sha256 = ""
        self._hashing = hashing
        self._digest = hashlib.sha256()
        self._written = 0

    def write(self, view: memoryview) -> None:
        self._hashing.put(self._digest.update, view)
        self._written += len(view)
        self.file.write(view)

    def finish(self) -> str:
        check_written(self.path, self._written, self.size)
        self._hashing.flush()
        self.sha256 = self._digest.hexdigest()
        return self.file.finish()
