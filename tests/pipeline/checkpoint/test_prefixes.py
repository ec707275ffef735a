"""Names lose what training wrappers put in, and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline.checkpoint.prefixes import unwrapped_name, unwrapped_names, wrappers_in
from reshard.pipeline.errors import DuplicateTensor, UsageError


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(2, 2)


def test_real_wrappers_are_found_and_taken_out() -> None:
    inner = torch.nn.Sequential(torch.compile(Block()), Block())  # type: ignore[no-untyped-call]
    names = list(torch.nn.DataParallel(inner).state_dict())
    assert names[0] == "module.0._orig_mod.proj.weight"
    wrappers = wrappers_in(names)
    assert wrappers == ("module.", "_orig_mod.")
    plain = torch.nn.Sequential(Block(), Block())
    assert list(unwrapped_names(names, wrappers, "x.bin").values()) == list(plain.state_dict())


@pytest.mark.parametrize(
    ("names", "wrappers"),
    [
        (["a.weight", "b.weight"], ()),
        (["module.a", "module.b.c"], ("module.",)),
        (["module.a", "b"], ()),  # only a part of the names, so it is the model's own
        (["encoder.module.a", "encoder.module.b"], ()),
        (["module"], ()),
        (["_orig_mod.module.a", "_orig_mod.module.b"], ("module.", "_orig_mod.")),
        (["_orig_mod.module.a", "_orig_mod.module.b", "step"], ()),  # the whole stack or nothing
        (["module._orig_mod.a", "b.w"], ()),
        (["_orig_mod.module.a", "_orig_mod.head.w"], ("_orig_mod.",)),  # a compiled model with a part of that name
        (["encoder.module._orig_mod.a", "b.w"], ("_orig_mod.",)),
        (["layers.0._fsdp_wrapped_module.w", "norm.w"], ("_fsdp_wrapped_module.",)),
        (["a._checkpoint_wrapped_module.w"], ("_checkpoint_wrapped_module.",)),
        (["a._orig_mod"], ()),  # a parameter of that name is no wrapper
        (["a._orig_mods.w", "x_orig_mod.w"], ()),
        ([], ()),
    ],
)
def test_wrappers_are_told_from_names(names: list[str], wrappers: tuple[str, ...]) -> None:
    assert wrappers_in(names) == wrappers


def test_any_prefix_that_a_user_names_is_taken_from_the_front_only() -> None:
    assert unwrapped_name("student.student.w", ["student."]) == "student.w"
    assert unwrapped_name("a.student.w", ["student."]) == "a.student.w"
    assert unwrapped_name("module.module.w", ["module."]) == "module.w"


PARTS = st.sampled_from(["a", "w", "module", "_orig_mod", "_fsdp_wrapped_module", "0"])


@given(st.lists(st.lists(PARTS, min_size=1, max_size=5).map(".".join), max_size=6, unique=True))
def test_taking_out_what_was_found_loses_no_other_part(names: list[str]) -> None:
    wrappers = wrappers_in(names)
    taken = {wrapper.rstrip(".") for wrapper in wrappers}
    for name in names:
        left = unwrapped_name(name, wrappers).split(".")
        assert left[-1] == name.split(".")[-1]
        assert [part for part in left if part not in taken] == [p for p in name.split(".") if p not in taken] or (
            left[-1] in taken
        )
    if not wrappers:
        assert [unwrapped_name(name, wrappers) for name in names] == names


def test_two_names_that_would_become_one_are_refused() -> None:
    again = r"a\.w: in x\.bin \(as a\.w\) and again in the same file \(as a\._orig_mod\.w\)"
    with pytest.raises(DuplicateTensor, match=again):
        unwrapped_names(["a.w", "a._orig_mod.w"], ["_orig_mod."], "x.bin")


@pytest.mark.parametrize("left", ["", "__metadata__"])
def test_a_name_of_which_nothing_that_a_file_takes_would_be_left_is_refused(left: str) -> None:
    with pytest.raises(UsageError, match=f"'module.{left}' in x.bin would be '{left}', not a valid name"):
        unwrapped_names(["module.w", f"module.{left}"], ["module."], "x.bin")
