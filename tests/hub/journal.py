"""An append-only file of JSON lines: all state of the Hub is what its journals replay to."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class Journal:
    """One line per event. What ``append`` returned from survives the death of the process (not of the machine)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def replay(self) -> Iterator[Event]:
        """Every whole event; a torn last line (the process died inside ``append``) is cut off the file."""
        if not self.path.exists():
            return
        whole = 0
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                yield json.loads(line)
        os.truncate(self.path, whole)

    def append(self, event: Event) -> None:
        line = json.dumps(event, separators=(",", ":")).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            view = memoryview(line)
            while view:
                view = view[file.write(view) :]
