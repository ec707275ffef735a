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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from reshard.pipeline.limits import RELOAD_CACHE

log = logging.getLogger(__name__)

VERDICTS = "verdicts"  # their folder in what a user's programs keep as state
ASKED = ("reshard", "torch", "transformers", "accelerate")  # other versions of these may answer otherwise


class Verdicts:
    """The last RELOAD_CACHE answers by question, in memory and, where there is a ``folder``, in files of their own.

    A folder that cannot be read or written is done without.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._held: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._versions = [sys.version, *map(_version, ASKED)]

    def key(self, question: str) -> str:
        """What an answer is kept by: the question, and the versions of what answers."""
        return hashlib.sha256(json.dumps([self._versions, question]).encode()).hexdigest()

    def get(self, key: str) -> dict[str, Any] | None:
        if key not in self._held and (kept := self._read(key)) is not None:
            self._hold(key, kept)
        if key in self._held:
            self._held.move_to_end(key)
        return self._held.get(key)

    def keep(self, key: str, answer: dict[str, Any]) -> None:
        self._hold(key, answer)
        if self._folder is None:
            return
        try:
            self._write(self._folder, key, answer)
        except OSError as error:
            log.warning("the answer of a model's class is not kept in %s: %s", self._folder, error)

    def _hold(self, key: str, answer: dict[str, Any]) -> None:
        self._held[key] = answer
        while len(self._held) > RELOAD_CACHE:
            self._held.popitem(last=False)

    def _read(self, key: str) -> dict[str, Any] | None:
        if self._folder is None:
            return None
        path = self._folder / f"{key}.json"
        try:
            answer: dict[str, Any] = json.loads(path.read_bytes())
            os.utime(path)  # the oldest go first
        except (OSError, ValueError):  # there is none, or it was cut off with the power
            return None
        return answer

    def _write(self, folder: Path, key: str, answer: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".new", delete=False) as file:
            json.dump(answer, file)
        Path(file.name).replace(folder / f"{key}.json")
        ages: list[tuple[float, Path]] = []
        for path in folder.iterdir():
            with suppress(FileNotFoundError):  # another run removed it
                ages.append((path.stat().st_mtime, path))
        for _, path in sorted(ages)[:-RELOAD_CACHE]:
            path.unlink(missing_ok=True)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
