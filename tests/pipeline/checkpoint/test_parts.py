"""Which files of parts belong together, by their names alone."""

from __future__ import annotations

from posixpath import basename

import pytest

from reshard.pipeline.checkpoint.parts import FileSet, find_parts, lost_part, plain_steps, slices_of
from reshard.pipeline.errors import AbsentFile, AmbiguousWeights, BadIndex, CheckpointError, NotRead
from reshard.pipeline.tensors import Name, StoredFile


def found(*paths: str, taken: tuple[Name, ...] = (), **texts: str) -> list[FileSet]:
    """``texts``: what the files of these names hold, wherever they are."""
    listing = {path: StoredFile(path, 100, sha256="0" * 64) for path in paths}
    return list(find_parts(listing, lambda name: name not in taken, lambda file: texts[basename(file.path)].encode()))


def step(folder: str, stage: int = 3, ranks: int = 2) -> list[str]:
    """The files of a ZeRO step."""
    model = [f"zero_pp_rank_{rank}_" for rank in range(ranks)] if stage == 3 else [""]
    return [
        *(f"{folder}bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(ranks)),
        *(f"{folder}{prefix}mp_rank_00_model_states.pt" for prefix in model),
    ]


UNIVERSAL = [
    "u/zero/a.weight/fp32.pt",
    "u/zero/a.weight/exp_avg.pt",
    "u/zero/b/fp32.pt",
    "u/mp_rank_00_model_states.pt",
]


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
        ([rank(0, 2)], "rank_0.pt: one of 2 ranks, but the file of rank 1 is missing"),
        ([rank(1, 2)], "rank_1.pt: one of 2 ranks, but the file of rank 0 is missing"),
        ([rank(0, 2), rank(1, 2), rank(1, 3)], "one of 3 ranks, but other files here are from 2 ranks"),
        ([rank(0, 2), rank(2, 2)], "its rank is a duplicate, or not one of the 2 ranks"),
        ([rank(0, 1), "model_world_size_1_rank_00.pt"], "its rank is a duplicate"),
        ([rank(0, 999_999)], "the file of rank 1 is missing"),
    ],
)
def test_ranks_that_are_missing_or_too_many_are_named(paths: list[str], why: str) -> None:
    with pytest.raises(BadIndex, match=why):
        found(*paths)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_latest_of_several_steps_is_the_model_of_the_folder_that_they_are_in(stage: int) -> None:
    old, new = step("run/global_step5/", stage), step("run/global_step10/", stage, 12)
    (part,) = found(*old, *new, "run/latest", "run/zero_to_fp32.py", latest="global_step10\n")
    assert (part.name, part.format) == (Name("run", "model"), "zero")
    assert [file.path for file in part.files] == new, "in the order of ranks"
    assert part.metadata is not None and part.metadata.path == "run/latest"
    assert part.other_steps == ("run/global_step5",)
    assert all(file.sha256 is None for file in part.files), "no moments are read for a sum"


def test_steps_that_cannot_be_told_apart_are_no_broken_source() -> None:
    with pytest.raises(AmbiguousWeights) as error:
        found(*step("a/"), *step("b/"))
    assert "--exclude 'a/*' and so on" in error.value.next_step and "get a good copy" not in error.value.next_step


def test_one_step_needs_no_word_and_may_be_the_source_itself() -> None:
    for folder, home in (("", ""), ("global_step5/", ""), ("a/b/global_step5/", "a/b")):
        (part,) = found(*step(folder))
        assert (part.name, part.metadata) == (Name(home, "model"), None)


def test_a_universal_checkpoint_is_found_by_its_own_word() -> None:
    (part,) = found(*UNIVERSAL, "latest_universal", latest_universal="u")
    assert [file.path for file in part.files] == [UNIVERSAL[0], UNIVERSAL[2], UNIVERSAL[3]]
    (part,) = found(*UNIVERSAL, *step("x/"), "latest", "latest_universal", latest="x", latest_universal="u")
    assert [file.path for file in part.files] == step("x/")
    (part,) = found(*UNIVERSAL, *step("x/"), "latest", "latest_universal", latest="gone", latest_universal="u")
    assert part.files[0].path == UNIVERSAL[0]


def plain(*paths: str, latest: str = "") -> list[FileSet]:
    listing = {path: StoredFile(path, 100, sha256="0" * 64) for path in paths}
    return list(plain_steps(listing, listing, lambda file: latest.encode()))


def test_a_step_without_zero_is_a_torch_file_under_the_name_of_the_folder_above() -> None:
    old, new = "run/global_step5/mp_rank_00_model_states.pt", "run/global_step9/mp_rank_00_model_states.pt"
    (part,) = plain(old, new, "run/latest", latest="global_step9\n")
    assert (part.name, part.format, [file.path for file in part.files]) == (Name("run", "model"), "torch", [new])
    assert part.files[0].sha256 is not None, "it is read whole"
    assert part.other_steps == ("run/global_step5",)
    (part,) = plain(old, "run/latest", latest="gone")
    assert [file.path for file in part.files] == [old]


def test_steps_without_zero_that_cannot_be_told_apart_and_what_is_no_step_are_files_as_any_other() -> None:
    old, new = "run/global_step5/mp_rank_00_model_states.pt", "run/global_step9/mp_rank_00_model_states.pt"
    assert plain(old, new) == plain(old, new, "run/latest", latest="") == []
    assert plain("mp_rank_00_model_states.pt", "critic/mp_rank_00_model_states.pt") == []


def test_each_model_that_accelerate_saved_in_parts_has_its_own_name() -> None:
    folders = ("s/pytorch_model_fsdp_0", "s/pytorch_model_fsdp_1", "s/optimizer_0")
    parts = found(*(f"{folder}/{name}" for folder in folders for name in (".metadata", "__0_0.distcp")))
    assert [part.name for part in parts] == [Name("s", "model"), Name("s", "model_1")]


@pytest.mark.parametrize(
    "paths",
    [
        ["a/mp_rank_00_model_states.pt", "a/mp_rank_01_model_states.pt"],
        ["iter_10/mp_rank_00/model_optim_rng.pt", "iter_10/mp_rank_01/model_optim_rng.pt"],
        ["iter_10/mp_rank_00/model_rng.pt", "iter_10/mp_rank_01/model_rng.pt"],
        ["iter_10/mp_rank_00_000/model_optim_rng.pt", "iter_10/mp_rank_00_001/model_optim_rng.pt"],
        ["consolidated.00.pth", "consolidated.01.pth"],
    ],
)
def test_slices_of_a_model_are_known_by_their_neighbours(paths: list[str]) -> None:
    others = ["b/consolidated.00.pth", "iter_20/mp_rank_00/model_optim_rng.pt", "c/mp_rank_00_model_states.pt"]
    assert slices_of([paths[0], *others]) == set()
    assert slices_of([*paths, *others]) == {*paths}


@pytest.mark.parametrize(
    ("paths", "told"),
    [
        (["a/__0_0.distcp"], "it has a/__0_0.distcp, but no .metadata next to it"),
        (["a/.metadata"], "it has a/.metadata, but no *.distcp next to it"),
        (step("a/")[:2], "rank_0_mp_rank_00_optim_states.pt, but no *_model_states.pt next to it"),
        (step("a/")[2:], "rank_0_mp_rank_00_model_states.pt, but no *_optim_states.pt next to it"),
        ([*step("a/"), "b/__0_0.distcp"], "it has b/__0_0.distcp"),
    ],
)
def test_what_lacks_its_counterpart_is_told(paths: list[str], told: str) -> None:
    assert told in lost_part(paths)["found"]
    assert lost_part([*step("a/"), "b/__0_0.distcp", "b/.metadata", "c/voice.metadata"]) == {}


def test_optimizers_without_a_model_are_no_checkpoint() -> None:
    assert found(*step("a/")[:2], *UNIVERSAL[:3]) == []


@pytest.mark.parametrize(
    ("paths", "latest", "error", "why"),
    [
        (
            step("a/") + step("b/"),
            None,
            AmbiguousWeights,
            "a: b in the same folder is a different step, and no `latest` file says",
        ),
        (
            step("a/") + step("b/") + step("c/"),
            None,
            AmbiguousWeights,
            "a: b, c in the same folder are different steps, and no",
        ),
        (step("a/"), "b", AbsentFile, "latest refers to a missing file: b"),
        (step("a/"), " \n", AbsentFile, "latest refers to a missing file: it is empty"),
        (step("a/"), "../a", AbsentFile, r"latest refers to a missing file: \.\./a"),
        (step("a/"), "\x1b[2J", AbsentFile, r"refers to a missing file: \\x1b\[2J"),
        (step("a/")[1:], None, BadIndex, "rank_1.*: one of 2 ranks, but the file of rank 0 is missing"),
        (step("a/")[:3], None, BadIndex, "rank_0_mp_rank_00_model.* the file of rank 1 is missing"),
        (step("a/", 3) + step("a/", 2)[2:], None, BadIndex, "has the same rank"),
        ([*step("a/"), "a/zero_pp_rank_0_mp_rank_01_optim_states.pt"], None, NotRead, "tensor, pipeline or expert"),
        ([*step("a/"), "a/layer_0_expert_1_mp_rank_00_model_states.pt"], None, NotRead, "tensor, pipeline or expert"),
        ([*step("a/"), "a/layer_00-model_states.pt"], None, NotRead, "tensor, pipeline or expert"),
        ([*step("a/"), "a/expp_rank_0_mp_rank_00_optim_states.pt"], None, NotRead, "tensor, pipeline or expert"),
    ],
)
def test_steps_that_cannot_be_told_apart_or_are_not_whole(
    paths: list[str], latest: str | None, error: type[CheckpointError], why: str
) -> None:
    with pytest.raises(error, match=why):
        found(*paths, *(["latest"] if latest else []), latest=latest or "")
