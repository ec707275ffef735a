"""What ``.reshard/`` inside a target without commits keeps of our publications; it is not among the target's files."""

from __future__ import annotations

import base64
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any, Self

from pydantic import BaseModel, NonNegativeInt

from reshard.pipeline.errors import TargetConflict
from reshard.pipeline.limits import KEPT_MAX
from reshard.pipeline.protocols import Addition, Commit, HistoryRewritten, Sink, Source, Traffic
from reshard.pipeline.request import key_of
from reshard.pipeline.stores.carry import send_whole
from reshard.pipeline.stores.marks import is_mark, is_ours
from reshard.pipeline.stores.overlay import Over
from reshard.pipeline.tensors import StoredFile

RECORD = ".reshard"
PUBLICATIONS = "publications.json"  # in it
OURS = "reshard"  # the author of what this machine published
OTHERS = "changed by someone else"  # the title of what others changed between two of our publications

Listing = Mapping[str, tuple[int, int | str]]  # by path: bytes, and a time or a tag that differs where the content does


def digest_of(listing: Listing) -> str:
    """What a state is called: a digest of its files' paths, sizes, and times or tags."""
    return key_of([[path, *seen] for path, seen in sorted(listing.items())])


EMPTY = digest_of({})  # the state of a target that is not there


@dataclass(frozen=True, slots=True)
class RecordedPublication:
    id: str
    parent: str
    title: str
    message: str


@dataclass
class Record:
    """Our publications, oldest first, and what the last of them left in the target."""

    publications: list[RecordedPublication] = field(default_factory=list)
    files: dict[str, tuple[int, int | str, str]] = field(default_factory=dict)  # path: size, mtime_ns or tag, sha256
    kept: dict[str, str] = field(default_factory=dict)  # base64 of small files, to tell an owner's edit later
    marks: dict[str, str] = field(default_factory=dict)  # by publication: the mark of the machine that made it

    @staticmethod
    def parse(text: bytes, target: str, file: str) -> Record:
        """Raises TargetConflict for what none of us wrote."""
        try:
            found = _Written.model_validate_json(text, strict=True)
            for kept in found.kept.values():
                base64.b64decode(kept, validate=True)
            marks = {id: given for id, given in dict(found.marks or {}).items() if is_mark(given)}
        except (ValueError, TypeError) as error:
            raise TargetConflict(target=target, what=f"{file} was changed") from error
        return Record(found.publications, found.files, found.kept, marks)

    def text(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def after(
        self,
        ours: RecordedPublication,
        made: str | None,
        listing: Listing,
        stored: Mapping[str, str],
        content: Mapping[str, bytes],
        most: float = inf,
    ) -> Record:
        """The record once ``ours`` stands, with its mark: ``stored`` has sha256 by path, ``content`` small files.

        ``most`` is how many bytes the messages of all publications may have before the older half goes.
        """
        sha256 = {**self.sha256(listing), **stored}
        texts = {path: text for path, text in self.kept.items() if path in sha256 and path not in stored}
        for path, data in content.items():
            sha256[path] = hashlib.sha256(data).hexdigest()
            if len(data) <= KEPT_MAX:
                texts[path] = base64.b64encode(data).decode()
        files = {path: (*listing[path], digest) for path, digest in sha256.items() if path in listing}
        # Each message lists what others have there, and one day all are too much to be read again.
        large = sum(len(one.message) for one in self.publications) > most
        publications = [*self.publications[len(self.publications) // 2 if large else 0 :], ours]
        marks = self.marks | ({ours.id: made} if made else {})
        known = {one.id for one in publications}
        return Record(publications, files, texts, {id: mark for id, mark in marks.items() if id in known})

    def history(self, at: str, since: str | None, kept: str | None = None) -> Iterator[Commit]:
        """Our publications, newest first; what others changed between two of them is one commit without an author.

        ``kept`` is the state before all of ours, where it can still be read. Raises HistoryRewritten.
        """
        upto = max((n for n, ours in enumerate(self.publications, 1) if ours.id == at), default=len(self.publications))
        reached = at
        for ours in reversed(self.publications[:upto]):
            if reached == since:
                return
            if ours.id != reached:
                yield Commit(reached, OTHERS, "", "")
                if ours.id == since:
                    return
            yield Commit(ours.id, ours.title, ours.message, OURS if self.is_ours(ours) else "")
            reached = ours.parent
        if since is not None and reached != since:
            raise HistoryRewritten(since)
        if since is None and kept == reached:
            yield Commit(reached, OTHERS, "", "")

    def is_ours(self, publication: RecordedPublication) -> bool:
        """Whether this machine wrote it down; anybody else may have written the rest."""
        return is_ours(publication.message, self.marks.get(publication.id))

    def sha256(self, listing: Listing) -> dict[str, str]:
        """The sha256 of those of our files that are unchanged."""
        return {path: sha256 for path, (*seen, sha256) in self.files.items() if listing.get(path) == tuple(seen)}


class _Written(BaseModel):
    """A record as it is stored, by this release or a later one."""

    publications: list[RecordedPublication]
    files: dict[str, tuple[NonNegativeInt, int | str, str]]
    kept: dict[str, str]
    marks: Any = None  # whatever it is: what is no mark vouches for nothing


class Remembered(Over):
    """A Source of our last publication, where others have changed it since: small files are as we wrote them."""

    def __init__(self, own: Source, kept: Mapping[str, str]) -> None:
        super().__init__(own)
        self._kept = kept

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[memoryview]:
        kept = self._kept.get(file.path)
        if kept is None:
            return super().read(file, start, stop)
        return iter([memoryview(base64.b64decode(kept))[start:stop]])


class RecordedTarget(ABC):
    """What targets without commits have in common: their history is what the record says, and has no branches."""

    branch = ""
    endpoint = None
    carried = Traffic()

    @abstractmethod
    def sink(self, token: str) -> Sink: ...

    def request(self, digest: str, title: str, message: str) -> Self:
        return self

    def show(self) -> None:
        return None

    def is_shared(self, commit: str) -> bool:
        return False

    def is_ours(self, commit: str, author: str) -> bool:
        return author == OURS

    def carry(
        self, files: Sequence[StoredFile], source: Source, token: str, made: Sequence[Addition] = ()
    ) -> list[Addition]:
        """Copies, never links: a file that is later edited in place must not change in two folders."""
        batch = self.sink(token).batch(files, source)
        sent = send_whole(batch, [(file, None) for file in files], source)
        self.carried = self.carried.plus(batch.traffic)
        return [*made, *(Addition(file.path, stored=file) for file in sent)]
