"""What ``.reshard/`` inside a target keeps of our own publications; it is not among the target's files."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from reshard.pipeline.errors import TargetConflict
from reshard.pipeline.places import Folder
from reshard.pipeline.stores.folder.disk import write_file
from reshard.pipeline.stores.folder.marks import is_mark, is_ours
from reshard.pipeline.stores.folder.source import FileStat, FolderSource
from reshard.pipeline.tensors import StoredFile

RECORD = ".reshard"


@dataclass(frozen=True, slots=True)
class RecordedPublication:
    id: str
    parent: str
    title: str
    message: str


@dataclass
class Record:
    """Our publications, oldest first, and what the last of them left in the folder."""

    publications: list[RecordedPublication] = field(default_factory=list)
    files: dict[str, tuple[int, int, str]] = field(default_factory=dict)  # path: size, mtime_ns, sha256
    kept: dict[str, str] = field(default_factory=dict)  # base64 of small files, to tell an owner's edit later
    marks: dict[str, str] = field(default_factory=dict)  # by publication: the mark of the machine that made it

    @staticmethod
    def load(root: Path) -> Record:
        file = root / RECORD / "publications.json"
        try:
            data: dict[str, Any] = json.loads(file.read_text())
            return Record(
                [RecordedPublication(**item) for item in data["publications"]],
                {path: (size, mtime_ns, sha256) for path, (size, mtime_ns, sha256) in data["files"].items()},
                data["kept"],
                {id: given for id, given in dict(data.get("marks") or {}).items() if is_mark(given)},
            )
        except FileNotFoundError:
            return Record()
        except (ValueError, KeyError, TypeError) as error:
            raise TargetConflict(target=str(root), what=f"{file} was changed") from error

    def save(self, root: Path) -> None:
        folder = root / RECORD
        folder.mkdir(exist_ok=True)
        file = folder / "publications.json"
        file.unlink(missing_ok=True)  # it may be the last state's own, linked here
        write_file(file, json.dumps(asdict(self)).encode())

    def is_ours(self, publication: RecordedPublication) -> bool:
        """Whether this machine wrote it down; anybody else may have written the rest."""
        return is_ours(publication.message, self.marks.get(publication.id))

    def sha256(self, listing: Mapping[str, FileStat]) -> dict[str, str]:
        """The sha256 of those of our files that are unchanged."""
        return {
            path: sha256
            for path, (size, mtime_ns, sha256) in self.files.items()
            if listing.get(path) == FileStat(size, mtime_ns)
        }


class LastPublication(FolderSource):
    """Our last publication in a folder that changed since: lists all of its files, reads the unchanged ones."""

    def __init__(self, place: Folder, record: Record) -> None:
        listing = {path: FileStat(size, mtime_ns) for path, (size, mtime_ns, _) in record.files.items()}
        sha256 = {path: entry[2] for path, entry in record.files.items()}
        super().__init__(place, listing, record.publications[-1].id, sha256)
        self._kept = record.kept

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[memoryview]:
        kept = self._kept.get(file.path)
        if kept is None:
            return super().read(file, start, stop)
        return iter([memoryview(base64.b64decode(kept))[start:stop]])
