"""What models' classes answered, kept so that the same question is asked once on a machine and not in every run."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from collections import OrderedDict
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import TypeAdapter

from reshard.pipeline.installed import version_of
from reshard.pipeline.limits import RELOAD_CACHE

log = logging.getLogger(__name__)

VERDICTS = "verdicts"  # their folder in what a user's programs keep as state
# Other versions of these may answer otherwise: what loads a model, and the packages that quantised ones need.
PACKAGES = ("reshard", "torch", "transformers", "accelerate", "compressed_tensors", "bitsandbytes")

T = TypeVar("T")


class Verdicts(Generic[T]):
    """The last RELOAD_CACHE answers by question, in memory and, those that last, in files of their own in ``folder``.

    A folder that cannot be read or written is done without, and so is a file that holds something else.
    """

    def __init__(self, kind: TypeAdapter[T], folder: Path | None = None) -> None:
        self._kind = kind
        self._folder = folder
        self._held: OrderedDict[str, T] = OrderedDict()
        self._answering = [sys.version, _code(), *map(version_of, PACKAGES)]
        self._warned = False

    def key(self, question: str) -> str:
        """What an answer is kept by: the question, and what answers."""
        return hashlib.sha256(json.dumps([self._answering, question]).encode()).hexdigest()

    def get(self, key: str) -> T | None:
        if key not in self._held and (kept := self._read(key)) is not None:
            self._hold(key, kept)
        if key in self._held:
            self._held.move_to_end(key)
        return self._held.get(key)

    def keep(self, key: str, answer: T, lasting: bool) -> None:
        """``lasting``: it depends on nothing but the question and what answers, so that others may have it later."""
        self._hold(key, answer)
        if self._folder is None or not lasting:
            return
        try:
            self._write(self._folder, key, answer)
        except OSError as error:
            if not self._warned:
                log.warning("what models' classes answer is not kept in %s: %s", self._folder, error)
            self._warned = True

    def _hold(self, key: str, answer: T) -> None:
        self._held[key] = answer
        while len(self._held) > RELOAD_CACHE:
            self._held.popitem(last=False)

    def _read(self, key: str) -> T | None:
        if self._folder is None:
            return None
        path = self._folder / f"{key}.json"
        try:
            answer = self._kind.validate_json(path.read_bytes())
        except (OSError, ValueError):  # there is none, or it was cut off with the power
            return None
        with suppress(OSError):
            os.utime(path)  # the oldest go first
        return answer

    def _write(self, folder: Path, key: str, answer: T) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("wb", dir=folder, suffix=".new", delete=False) as file:
            file.write(self._kind.dump_json(answer))
        Path(file.name).replace(folder / f"{key}.json")
        ages: list[tuple[float, Path]] = []
        for path in folder.iterdir():
            with suppress(FileNotFoundError):  # another run removed it
                ages.append((path.stat().st_mtime, path))
        for _, path in sorted(ages)[:-RELOAD_CACHE]:
            path.unlink(missing_ok=True)


@cache
def _code() -> str:
    """The digest of the code that answers, which a checkout changes without another version."""
    here = Path(__file__)
    files = [*sorted(here.with_name("child").glob("*.py")), here.with_name("named.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
