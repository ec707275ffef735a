"""The body of a commit, as the Hub's own clients post it: newline-delimited JSON, a header that names the parent, then
one line per operation.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping

from reshard.pipeline.protocols import Change


class Body:
    """The ndjson of a commit, encoded line by line each time that it is sent."""

    def __init__(self, change: Change, parent: str) -> None:
        self._change = change
        self._parent = parent
        self.size = sum(len(line) for line in self)

    def __iter__(self) -> Iterator[bytes]:
        header = {"summary": self._change.title, "description": self._change.message, "parentCommit": self._parent}
        yield _line("header", header)
        for addition in self._change.additions:
            if addition.stored is not None:
                stored = addition.stored
                yield _line(
                    "lfsFile", {"path": addition.path, "algo": "sha256", "oid": stored.sha256, "size": stored.size}
                )
            else:
                content = base64.b64encode(addition.content or b"").decode()
                yield _line("file", {"content": content, "path": addition.path, "encoding": "base64"})
        for path in self._change.deletes:
            yield _line("deletedFile", {"path": path})


def _line(key: str, value: Mapping[str, object]) -> bytes:
    return json.dumps({"key": key, "value": value}).encode() + b"\n"
