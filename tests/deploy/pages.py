"""The shell commands of pages in docs, which tests type as they stand."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUNBOOKS = "runbooks.md"


def blocks(page: str, heading: str = "", having: str = "") -> list[str]:
    """The shell commands that a page has under a heading, or above all of them, block by block."""
    text = (ROOT / "docs" / page).read_text()
    start, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    (section,) = [start] if not heading else [found for found in sections if found.startswith(f"{heading}\n")]
    found = [block for block in re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL) if having in block]
    assert found
    return found
