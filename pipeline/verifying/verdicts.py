"""What models' classes answer, kept so that the same question is asked once on a machine and not in every run."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from reshard.pipeline.installed import version_of
from reshard.pipeline.limits import RELOAD_CACHE

log = logging.getLogger(__name__)

VERDICTS = "verdicts"  # their folder in what a user's programs keep as state
# Other versions of these may answer otherwise: what loads a model, and the packages that quantised ones need.
PACKAGES = ("reshard", "torch", "transformers", "accelerate", "compressed_tensors", "bitsandbytes")


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """What the load on the meta device found.

    ``model``: the class was built; ``clean``: it takes both sides without complaint, ``report``: with the same
    complaints, ``failed``: with others. ``structural``: the class does not confirm the output, and ``reason`` says
    why: ``skipped`` where it cannot be asked, ``inconclusive`` where the attempt was cut short, where changed names
    made complaints that the source does not get, or where the class finds hardly any of its tensors on both sides.
    The lists are the output's, and hold REPORT_NAMES_MAX names each; ``counts`` has how many there are.
    """

    result: Literal["clean", "report", "failed", "inconclusive", "skipped"]
    reason: str
    level: Literal["model", "structural"] = "structural"
    class_name: str | None = None
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)  # by list; empty where the class was not asked
    notes: tuple[str, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)  # parameter -> the one that it shares its bytes with
    stored_twice: Mapping[str, str] = field(default_factory=dict)  # name -> the other name of the same, tied tensor
    seconds: float = 0.0
    peak_rss: int = 0  # bytes, the imports included
    known: bool = False  # from an earlier check of the same, which took that time and memory

    def figures(self) -> dict[str, Any]:
        """What was counted, for a record: nothing where nothing was asked."""
        if self.result == "skipped":
            return {}
        named = {"class_name": self.class_name} if self.class_name else {}
        cost = {"known": True} if self.known else {"seconds": round(self.seconds, 3), "peak_rss": self.peak_rss}
        return {**named, **self.counts, **cost}


class Verdicts:
    """The last RELOAD_CACHE answers by question, in memory and, those that last, in files of their own in ``folder``.

    A folder that cannot be read or written is done without, and so is a file that holds something else.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._kind = TypeAdapter(ModelCheck)
        self._folder = folder
        self._held: dict[str, ModelCheck] = {}  # the last one used last
        self._answering = [sys.version, code_digest(), *map(version_of, PACKAGES)]
        self._warned = False

    def key(self, question: str) -> str:
        """What an answer is kept by: the question, and what answers."""
        return hashlib.sha256(json.dumps([self._answering, question]).encode()).hexdigest()

    def get(self, key: str) -> ModelCheck | None:
        if answer := self._held.pop(key, None) or self._read(key):
            self._hold(key, answer)
        return answer

    def keep(self, key: str, answer: ModelCheck, lasting: bool) -> None:
        """``lasting``: it depends on nothing but the question and what answers, so that others may have it later."""
        self._hold(key, answer)
        if self._folder is None or not lasting:
            return
        try:
            self._write(self._folder, key, answer)
        except (OSError, ValueError) as error:  # UTF-8 has no half characters, which names in files of torch may have
            if not self._warned:
                log.warning("cannot cache model checks in %s: %s", self._folder, error)
            self._warned = True

    def _hold(self, key: str, answer: ModelCheck) -> None:
        self._held[key] = answer
        if len(self._held) > RELOAD_CACHE:
            del self._held[next(iter(self._held))]

    def _read(self, key: str) -> ModelCheck | None:
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

    def _write(self, folder: Path, key: str, answer: ModelCheck) -> None:
        content = self._kind.dump_json(answer)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("wb", dir=folder, suffix=".new", delete=False) as file:
            file.write(content)
        Path(file.name).replace(folder / f"{key}.json")
        ages: list[tuple[float, Path]] = []
        for path in folder.iterdir():
            with suppress(FileNotFoundError):  # another run removed it
                ages.append((path.stat().st_mtime, path))
        for _, path in sorted(ages)[:-RELOAD_CACHE]:
            path.unlink(missing_ok=True)


@cache
def code_digest() -> str:
    """The digest of the code that answers, which a checkout changes without another version."""
    here = Path(__file__)
    files = [*sorted(here.with_name("child").glob("*.py")), here.with_name("named.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
