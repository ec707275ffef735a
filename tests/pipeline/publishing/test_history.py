"""What descriptions of commits are read as: our publications, or nothing."""

from __future__ import annotations

import pytest

from reshard.pipeline.protocols import Commit
from reshard.pipeline.publishing.history import read


@pytest.mark.parametrize("trailer", ["", "{", "[]", "{}", "[" * 100_000, '{"kept": 1}', '{"kept": [], "x": "\ud800"}'])
def test_a_trailer_that_is_not_as_we_write_it_is_no_publication(trailer: str) -> None:
    assert read(Commit("0" * 40, "Weights", f"Reshard-Publication: {trailer}\n", "someone")) is None
