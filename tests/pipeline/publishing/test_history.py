"""What descriptions of commits are read as: our publications, or nothing."""

from __future__ import annotations

import pytest

from reshard.pipeline.protocols import Commit
from reshard.pipeline.publishing.history import read, standing, undo_message


@pytest.mark.parametrize("trailer", ["", "{", "[]", "{}", "[" * 100_000, '{"kept": 1}', '{"kept": [], "x": "\ud800"}'])
def test_a_trailer_that_is_not_as_we_write_it_is_no_publication(trailer: str) -> None:
    assert read(Commit("0" * 40, "Weights", f"Reshard-Publication: {trailer}\n", "someone")) is None


def test_what_was_undone_and_what_undoes_it_do_not_stand() -> None:
    def undo(id: str, of: str) -> Commit:
        return Commit(id, "Roll back", undo_message(of), "me")

    one, two, other = (Commit(id, "Weights", "", "me") for id in "12o")
    assert standing([two, one]) == two
    assert standing([undo("3", "2"), two, one]) == one
    assert standing([undo("4", "1"), undo("3", "2"), two, one, other]) == other
    assert standing([undo("3", "2"), other, two, one]) == other, "which was not undone with it"
    assert standing([undo("3", "2"), two]) is None
