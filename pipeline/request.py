"""What a user asks for: from where, to where, cut how. A request is data and travels in the job."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Literal

from pydantic import Field

from reshard.pipeline.errors import BadSize
from reshard.pipeline.limits import BARE_SIZE_MIN, DEFAULT_SIZE
from reshard.pipeline.places import Folder, Hub, Place, Strict

# Changes only when the same request would give other bytes; a new release alone republishes nothing.
LAYOUT = 1

DEFAULT_BRANCH = "main"

# A size that no model reaches: everything goes into one file.
SINGLE = 1 << 62  # bytes

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)")


def parse_size(value: str, option: str = "--size") -> int:
    """Bytes of ``200MB`` (decimal), ``200MiB`` (binary) or ``200000000``; raises BadSize and says why.

    Bits, rates, zero, negatives and bare letters (``5G``: which?) are refused, because tools disagree on them, and so
    are small numbers without a unit, which was forgotten.
    """
    text = value.strip()
    if text.startswith("-"):
        raise BadSize(option=option, value=value, why="a size is more than zero")
    if "/" in text or text.lower().endswith(("ps", "bit", "bits")):
        raise BadSize(option=option, value=value, why="this is a rate or bits, and a file has bytes")
    match = _SIZE.fullmatch(text)
    if match is None:
        raise BadSize(option=option, value=value, why="this is no number of bytes")
    unit = match["unit"]
    if re.fullmatch(r"[KMGTkmgt]i?b", unit) and unit.upper() != unit and not unit.islower():
        raise BadSize(option=option, value=value, why=f"{unit} means bits")
    factor = _UNITS.get(unit.upper())
    if factor is None:
        raise BadSize(option=option, value=value, why=f"unknown unit {unit!r}")
    size = int(float(match["number"]) * factor) if "." in match["number"] else int(match["number"]) * factor
    if size <= 0:
        raise BadSize(option=option, value=value, why="a size is more than zero")
    if not unit and size < BARE_SIZE_MIN:
        why = f"without a unit these are bytes; {text}MB is probably meant, or {text}B"
        raise BadSize(option=option, value=value, why=why)
    return size


class Options(Strict):
    """How to cut, what to carry, how to publish. The first block decides the bytes of the weights."""

    size: int = Field(default=DEFAULT_SIZE, gt=0)  # bytes
    oversize: Literal["own-shard", "fail"] = "own-shard"
    pack: Literal["greedy", "balanced", "layers"] = "greedy"
    dtype: Literal["keep", "float16", "bfloat16", "float32"] = "keep"
    strict_dtype: bool = False
    ties: Literal["keep", "source"] = "keep"
    strip_prefix: str | None = None
    config_from: Place | None = None

    include: tuple[str, ...] = ()  # globs over repository paths
    exclude: tuple[str, ...] = ()

    branch: str | None = None
    pr: bool = False
    visibility: Literal["as-source", "public", "private"] = "as-source"
    prune: bool = False
    overwrite: bool = False
    lineage: bool = False
    manifest: bool = True
    force: bool = False

    require: Literal["any", "model"] = "any"
    transport: Literal["auto", "xet", "http"] = "auto"

    def weights(self) -> dict[str, object]:
        """The options that decide the bytes of the weights, normalised: part of every key and digest."""
        # The manifest is among them for the index, which holds its root.
        names = ("size", "oversize", "pack", "dtype", "strict_dtype", "ties", "strip_prefix", "manifest")
        return {name: getattr(self, name) for name in names}

    def told(self) -> str:
        """What was changed, in one sentence for whoever finds the result."""
        changes = [
            f"wider floating tensors were cast to {self.dtype}" if self.dtype != "keep" else "",
            "wrappers' prefixes were taken off names" if self.strip_prefix else "",
            "of tied tensors one is left" if self.ties == "source" else "",
        ]
        made = [change for change in changes if change]
        if not made:
            return "Nothing but the cut was changed: every tensor is the source's, bit for bit."
        return f"Beside the cut: {', '.join(made)}; nothing else was changed."

    def content(self) -> dict[str, object]:
        """The options that decide what the commit holds: ``weights()`` and what is carried."""
        names = ("include", "exclude", "prune", "lineage")
        config_from = str(self.config_from) if self.config_from else None
        return self.weights() | {name: getattr(self, name) for name in names} | {"config_from": config_from}


class Request(Strict):
    """One job's order. It names no token: whoever carries it out has credentials of its own."""

    source: Place
    target: Place
    options: Options = Options()
    priority: Literal["interactive", "bulk"] = "interactive"
    asked_by: str = ""  # who submitted it, for the record

    def key(self) -> str:
        """The same for requests that come to the same commit.

        Who asks does not matter, nor by which credentials: the bytes that a pinned commit holds are the same for
        everyone who may read it, and what is published does not name who wrote it.
        """
        place = {"credential"}
        return key_of(
            self.model_dump(mode="json", exclude={"priority": True, "asked_by": True, "source": place, "target": place})
        )

    def slot(self, default_endpoint: str) -> str:
        """What one job at a time may write to: a folder, or a branch of a repository. Each pull request is its own."""
        if isinstance(self.target, Folder):
            return self.target.path
        endpoint = (self.target.endpoint or default_endpoint).rstrip("/")
        branch = f"pr:{self.key()}" if self.options.pr else branch_of(self.target, self.options)
        return f"{endpoint}/{self.target.repo.lower()}@{branch}"


def branch_of(target: Hub, options: Options) -> str:
    """The branch of ``target`` that is written to, or that a pull request goes to."""
    return options.branch or target.revision or DEFAULT_BRANCH


def key_of(value: object) -> str:
    """A sha256 over the canonical JSON of ``value``: sorted keys, no blanks. Every digest of data is made here."""
    return hashlib.sha256(canonical(value)).hexdigest()


def canonical(value: object) -> bytes:
    """JSON of ``value`` with sorted keys and without blanks."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
