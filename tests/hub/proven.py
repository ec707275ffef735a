"""Whether this Hub is the one that its own tests passed on: then `make test` leaves them out; `make test-all` does not.

python -m tests.hub.proven    runs them, and notes what they passed on
"""

from __future__ import annotations

import hashlib
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NOTE = HERE / "PROVEN"
CLIENTS = ("huggingface_hub", "hf_xet")  # what it was held against: other versions may ask otherwise


def digest(folder: Path = HERE) -> str:
    """Of all modules of the Hub and of its tests, and of the clients' versions."""
    found = hashlib.sha256(repr([(name, version(name)) for name in CLIENTS]).encode())
    for path in sorted(folder.rglob("*.py")):
        found.update(f"\n{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return found.hexdigest()


def proven() -> bool:
    return NOTE.exists() and NOTE.read_text().strip() == digest()


if __name__ == "__main__":
    before = digest()
    if failed := pytest.main([str(HERE / "tests")]):
        sys.exit(failed)
    NOTE.write_text(f"{before}\n")
