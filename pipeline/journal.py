"""What a run on this machine has copied, so that the next one with the same plan goes on from there.

One file for each plan and target, in the user's folder for state: JSON lines of receipts, of what finished groups
attested, and of what turned out to be void. It goes when the run has published, and after STAGING_AGE.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from contextlib import closing, suppress
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from reshard.pipeline.copying.loop import Attested
from reshard.pipeline.driving import Exhausted
from reshard.pipeline.errors import ReshardError, SourceChanged
from reshard.pipeline.limits import CHUNK, COPIES
from reshard.pipeline.planning.model import Plan, Receipt, Shard
from reshard.pipeline.request import LAYOUT, key_of
from reshard.pipeline.stores.locks import FileLock
from reshard.pipeline.stores.scratch import remove_abandoned

log = logging.getLogger(__name__)


def _line(receipts: Iterable[Receipt]) -> Iterator[str]:
    """In texts of a receipt each: one alone may have 50 MB, which a document of all would hold once more."""
    yield '{"receipts":['
    for number, receipt in enumerate(receipts):
        yield "," if number else ""
        yield json.dumps(receipt.to_json())
    yield "]}\n"


def journal_key(plan: Plan, local: Path | None, target: str) -> str:
    """What two runs must have in common for one to go on with what the other copied.

    Files on this machine, at ``local``, count by inode and time of change, too: unlike the time of modification nobody
    sets that. Raises SourceChanged.
    """
    try:
        # A weight file or an archive is one file, whatever is read from it.
        paths = [local / file.path for file in plan.files] if local and local.is_dir() else filter(None, [local])
        marks = [[(stat := path.stat()).st_ino, stat.st_ctime_ns] for path in paths]
    except OSError as error:
        raise SourceChanged(place=plan.pin.repo, what=str(error)) from error
    return key_of([version("reshard"), LAYOUT, plan.digest, target, plan.transports, marks])


class Journal:
    """Receipts by shard digest and what groups attested by number, each on the disk before it is told.

    Where it has no file, it keeps them for this run alone. Groups that are copied side by side share one.
    """

    def __init__(
        self, path: Path | None = None, file: IO[bytes] | None = None, file_lock: FileLock | None = None
    ) -> None:
        self.receipts: dict[str, Receipt] = {}
        self.attested: dict[int, Attested] = {}
        self._path, self._file, self._file_lock = path, file, file_lock
        self._spoiled: Counter[int | None] = Counter()  # in this run, by unit
        self._lock = threading.RLock()
        if file is not None:
            self._read(file)

    @classmethod
    def open(cls, folder: Path, key: str) -> Journal:
        """The journal of ``key``; one without a file where another run has it, or where none can be written."""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            remove_abandoned(folder.glob("*.jsonl"))  # of runs that nobody went on with
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            path = folder / f"{key}.jsonl"
            lock = FileLock(os.open(path, flags, 0o600))
            lock.take(fcntl.LOCK_EX | fcntl.LOCK_NB)
            return cls(path, os.fdopen(lock.descriptor, "r+b", buffering=0, closefd=False), lock)
        except BlockingIOError:
            return cls()
        except OSError as error:
            _warn(error)
            return cls()

    def seal(self, receipts: Iterable[Receipt]) -> None:
        """Shards that the store has answered for."""
        news = {receipt.shard: receipt for receipt in receipts}
        with self._lock:
            self.receipts |= news
            if news:
                self._append(_line(news.values()))

    def finish(self, group: int, attested: Attested) -> None:
        """A group that was copied whole."""
        with self._lock:
            self.attested[group] = attested
            self._write({"group": group, "attested": attested})

    def held(self, shards: Iterable[Shard]) -> dict[str, Receipt]:
        return {shard.digest: self.receipts[shard.digest] for shard in shards if shard.digest in self.receipts}

    def groups(self) -> list[Attested]:
        return [self.attested[number] for number in sorted(self.attested)]

    def spoil(self, unit: int | None, error: ReshardError, shards: Collection[Shard], groups: Sequence[int]) -> None:
        with self._lock:
            self.forget({shard.digest for shard in shards}, groups)
            self._spoiled[unit] += 1
            if self._spoiled[unit] >= COPIES:
                raise Exhausted(error)

    def forget(self, digests: Set[str], groups: Sequence[int]) -> None:
        """Shards that have to be copied again, and groups that are open again."""
        with self._lock:
            lost = digests & self.receipts.keys()
            again = [number for number in groups if number in self.attested]
            self._forget(lost, again)
            if lost or again:
                self._write({"void": sorted(lost), "groups": again})

    def close(self, done: bool) -> None:
        """Give the file up, and remove it once nothing of it is needed any more."""
        with self._lock:
            if self._file is None or self._path is None:
                return
            file, self._file = self._file, None
            # A state folder that broke is no reason to end a run; what is left is too old soon.
            with suppress(OSError), closing(self._file_lock or file), closing(file):
                if done:
                    self._path.unlink(missing_ok=True)

    def _forget(self, digests: Iterable[str], groups: Iterable[int]) -> None:
        for digest in digests:
            self.receipts.pop(digest, None)
        for group in groups:
            self.attested.pop(group, None)

    def _write(self, entry: dict[str, Any]) -> None:
        self._append([json.dumps(entry, separators=(",", ":")), "\n"])

    def _append(self, texts: Iterable[str]) -> None:
        if self._file is None:
            return
        try:
            for text in texts:
                for at in range(0, len(text), CHUNK):
                    left = memoryview(text[at : at + CHUNK].encode())
                    while left:
                        left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError as error:  # a full disk must not end a run for a note; without this one, the rest may mislead
            _warn(error)
            self.close(done=True)

    def _read(self, file: IO[bytes]) -> None:
        """What an earlier run noted, up to a line that it did not live to end."""
        good = 0
        for line in file.read().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError):
                break
            good += len(line)
        file.truncate(good)

    def _take(self, entry: dict[str, Any]) -> None:
        if "receipts" in entry:
            found = [Receipt.from_json(text) for text in entry["receipts"]]
            self.receipts |= {receipt.shard: receipt for receipt in found}
        elif "group" in entry:
            self.attested[entry["group"]] = Attested.from_json(*entry["attested"])
        else:
            self._forget(entry["void"], entry["groups"])


def _warn(error: OSError) -> None:
    log.warning("cannot save progress, so a killed run will start over: %s", error)
