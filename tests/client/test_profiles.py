"""Every profile has a size that a file can have, and a line in the documentation that says the same."""

from __future__ import annotations

import re
from pathlib import Path

from reshard.client.profiles import PROFILES
from reshard.pipeline.limits import HUB_HTTP_MAX

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"


def test_the_page_states_each_size() -> None:
    stated = {
        name: int(size.replace(",", ""))
        for name, size in re.findall(r"^\| `(\w+)` \| ([\d,]+) \|", PAGE.read_text(), re.M)
    }
    assert stated == PROFILES


def test_files_of_every_profile_may_lie_on_the_hub() -> None:
    assert all(0 < size <= HUB_HTTP_MAX for size in PROFILES.values())
