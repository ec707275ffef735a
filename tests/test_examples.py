"""The examples in docstrings show what happens."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = [
    path.relative_to(ROOT)
    for folder in ("pipeline", "worker", "client", "web", "cli")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("path", EXAMPLES, ids=str)
def test_the_examples_of_a_module_hold(path: Path) -> None:
    module = import_module(".".join(("reshard", *path.with_suffix("").parts)))
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
