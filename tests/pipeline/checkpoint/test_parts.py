"""Which files of parts belong together, by their names alone."""

from __future__ import annotations

import pytest

from reshard.pipeline.checkpoint.parts import FileSet, find_parts
from reshard.pipeline.errors import BadIndex
from reshard.pipeline.tensors import Name, StoredFile


def found(*paths: str, taken: tuple[Name, ...] = ()) -> list[FileSet]:
    listing = {path: StoredFile(path, 100) for path in paths}
    return list(find_parts(listing, lambda name: name not in taken))


def rank(number: int, ranks: int, folder: str = "") -> str:
    return f"{folder}model_world_size_{ranks}_rank_{number}.pt"


def test_rank_files_are_one_set_in_the_order_of_ranks() -> None:
    (part,) = found(*(rank(number, 12) for number in range(12)), "optim_world_size_12_rank_0.pt", "data.pt")
    assert (part.name, part.format) == (Name("", "model"), "ranks")
    assert [file.path for file in part.files] == [rank(number, 12) for number in range(12)]


def test_each_folder_of_rank_files_is_a_checkpoint_and_config_and_weights_come_together() -> None:
    actor = [rank(number, 2, "step_9/actor/") for number in range(2)]
    critic = [rank(0, 1, "step_9/critic/")]
    parts = found(*actor, *critic, "step_9/actor/huggingface/config.json")
    assert [part.name for part in parts] == [Name("step_9/actor/huggingface", "model"), Name("step_9/critic", "model")]


def test_what_is_there_in_a_safer_format_is_not_asked_to_be_complete() -> None:
    assert found(rank(0, 2), taken=(Name("", "model"),)) == []


@pytest.mark.parametrize(
    ("paths", "why"),
    [
        ([rank(0, 2)], "rank_0.pt: it is one of 2 ranks, and the file of rank 1 is missing"),
        ([rank(1, 2)], "rank_1.pt: it is one of 2 ranks, and the file of rank 0 is missing"),
        ([rank(0, 2), rank(1, 2), rank(1, 3)], "it is one of 3 ranks, and beside it lie files of 2"),
        ([rank(0, 2), rank(2, 2)], "of 2 ranks there is no such rank"),
        ([rank(0, 1), "model_world_size_1_rank_00.pt"], "or another file of it"),
        ([rank(0, 999_999)], "the file of rank 1 is missing"),
    ],
)
def test_ranks_that_are_missing_or_too_many_are_named(paths: list[str], why: str) -> None:
    with pytest.raises(BadIndex, match=why):
        found(*paths)
