"""Cuts by reader: every tensor is in one file, ranks together read all, and each reads what it needs."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline.errors import BadRanks
from reshard.pipeline.limits import GB, MB
from reshard.pipeline.planning.model import Plan
from reshard.pipeline.planning.readers import NO_RANK, Readers, Reads, patterns, reads, shares
from reshard.pipeline.tensors import Name
from tests.pipeline.planning.builders import opened_named, plan_of
from tests.pipeline.planning.shapes import Shapes, deepseek_v3


def read_of(plan: Plan, typed: str, layers: int | None = None) -> list[Reads]:
    share = shares(names_of(plan), Readers.of(typed), layers).of
    files = {shard.path: (shard.size, [(share.get(e.name), e.size) for e in shard.entries]) for shard in plan.shards}
    return reads(files, Readers.of(typed).ranks)


def names_of(plan: Plan) -> list[str]:
    return [entry.name for shard in plan.shards for entry in shard.entries]


@pytest.mark.slow
@pytest.mark.parametrize(("typed", "in_a_node"), [("ep8", 1), ("ep32", 8)])
def test_ranks_of_deepseek_v3_read_what_they_need(typed: str, in_a_node: int) -> None:
    opened = opened_named(deepseek_v3(), file_of=4_300 * MB)
    plain, cut = plan_of(opened, size=5 * GB), plan_of(opened, size=5 * GB, ranks=typed)
    assert len(cut.shards) <= 1.3 * len(plain.shards)
    before, after = read_of(plain, typed), read_of(cut, typed)
    for one, was in zip(after, before, strict=True):
        assert one.needed == was.needed < 0.3 * was.bytes
        assert one.needed < one.bytes < 1.001 * one.needed, "headers, and no tensor of another rank"

    sizes = {shard.path: shard.size for shard in cut.shards}
    share = shares(names_of(cut), Readers.of(typed)).of
    common = sum(entry.size for shard in cut.shards for entry in shard.entries if entry.name not in share)
    nodes = read_of(cut, f"ep{len(after) // in_a_node}")
    for first, whole in zip(range(0, len(after), in_a_node), nodes, strict=True):
        node = after[first : first + in_a_node]
        needed = common + sum(one.needed - common for one in node)
        files = {path for one in node for path in one.files}
        assert {*whole.files} == files, "docs/layouts.md: a node takes the patterns of a rank of fewer"
        assert whole.needed == needed and sum(sizes[path] for path in files) < 1.001 * needed


def mixture(layers: int, experts: int, size: int = 40) -> Shapes:
    """A model of some dense and some expert tensors a layer, and some of no layer."""
    found: Shapes = {
        name: ("U8", (size,)) for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    }
    for layer in range(layers):
        found[f"model.layers.{layer}.self_attn.q_proj.weight"] = "U8", (size,)
        for number in range(experts):
            for part in ("gate", "up", "down"):
                found[f"model.layers.{layer}.mlp.experts.{number}.{part}_proj.weight"] = "U8", (size + number,)
    return found


@given(
    layers=st.integers(1, 6), experts=st.integers(0, 8), typed=st.sampled_from(["ep2", "ep4", "pp2", "pp3"]),
    size=st.integers(600, 3000), pack=st.sampled_from(["greedy", "balanced", "layers"]),
)  # fmt: skip
def test_a_cut_by_reader_is_a_partition_whose_ranks_read_all_and_nothing_of_others(
    layers: int, experts: int, typed: str, size: int, pack: str
) -> None:
    opened, readers = opened_named(mixture(layers, experts), file_of=900), Readers.of(typed)
    names = [tensor.name for tensor in opened.checkpoints[0].tensors]
    try:
        share = shares(names, readers).of
    except BadRanks:
        with pytest.raises(BadRanks):
            plan_of(opened, size=size, ranks=typed)
        return
    plan = plan_of(opened, size=size, ranks=typed, pack=pack)
    assert sorted(names_of(plan)) == sorted(names), "each tensor once, under its name"
    for shard in plan.shards:
        assert len({share.get(entry.name) for entry in shard.entries}) == 1
    found = read_of(plan, typed)
    paths = [shard.path for shard in plan.shards]
    assert {path for one in found for path in one.files} == {*paths}
    for one in found:
        headers = sum(len(shard.header) for shard in plan.shards if shard.path in one.files)
        assert one.bytes == one.needed + headers
        globs = patterns(one.files, {*paths} - {*one.files})
        assert {path for path in paths if any(fnmatchcase(path, glob) for glob in globs)} == {*one.files}


@given(count=st.integers(1, 70), ranks=st.integers(2, 9), behind=st.integers(0, 2))
def test_stages_are_those_of_mlx_lm(count: int, ranks: int, behind: int) -> None:
    """Its rule: an even split in which low ranks have the rest, the last layers first; and all keep what is in none."""
    names = [f"model.layers.{layer}.w" for layer in range(count + behind)] + ["model.norm.weight"]
    if count < ranks:
        with pytest.raises(BadRanks, match="layer"):
            shares(names, Readers("pp", ranks), count)
        return
    found = shares(names, Readers("pp", ranks), count).of
    split = [count // ranks + (1 if rank < count % ranks else 0) for rank in range(ranks)]
    for rank in range(ranks):
        start = sum(split[rank + 1 :])
        own = {f"model.layers.{layer}.w" for layer in range(start, start + split[rank])}
        assert {name for name, reader in found.items() if reader == rank} == own
    assert {name for name, reader in found.items() if reader == NO_RANK} == {*names[count : count + behind]}
    assert "model.norm.weight" not in found


@pytest.mark.parametrize("layer", ["transformer.h.{}", "h.{}", "encoder.layer.{}", "encoder.block.{}.layer.0"])
@pytest.mark.parametrize("layers", [4, None])
def test_layers_have_the_names_that_transformers_gives_them(layer: str, layers: int | None) -> None:
    """Of GPT-2, BERT and T5, some of whose configs have no `num_hidden_layers`."""
    names = ["wte.weight", *(f"{layer.format(number)}.w" for number in range(4))]
    found = shares(names, Readers("pp", 2), layers).of
    assert found == dict(zip(names[1:], (1, 1, 0, 0), strict=True))


def test_other_numbers_beside_layers_are_of_a_model_inside_which_all_read() -> None:
    names = ["visual.blocks.0.w", "model.layers.0.w", "model.layers.1.w"]
    assert shares(names, Readers("pp", 2)).of == {"model.layers.0.w": 1, "model.layers.1.w": 0}


def test_experts_that_do_not_divide_are_read_by_all_and_that_is_said() -> None:
    names = [*mixture(1, 4), *(name.replace("layers.0", "layers.1") for name in mixture(1, 6))]
    found = shares(names, Readers.of("ep4"))
    assert {name.split(".")[2] for name in found.of} == {"0"}
    assert found.notes == (
        "6 experts in model.layers.1.mlp.experts cannot be divided evenly among 4 ranks: every rank reads all of them",
    )


@pytest.mark.parametrize(
    ("names", "typed", "why"),
    [
        (["model.layers.0.mlp.experts.gate_up_proj"], "ep2", "--experts separate"),
        (["model.norm.weight"], "ep2", "no experts to divide"),
        ([*mixture(1, 3)], "ep2", "3 experts in model.layers.0.mlp.experts cannot be divided evenly among 2 ranks"),
        ([*mixture(2, 3)], "ep2", "in model.layers.0.mlp.experts and 1 more layer cannot be divided evenly"),
        ([*mixture(3, 3)], "ep2", "and 2 more layers cannot"),
        (["model.layers.0.w"], "pp2", "the model has 1 layer$"),
        (["conv.weight", "head.0"], "pp2", "no name of a tensor has the number of its layer, as in layers.0 or h.0"),
    ],
)
def test_ranks_that_would_all_read_everything_are_refused(names: list[str], typed: str, why: str) -> None:
    with pytest.raises(BadRanks, match=why):
        shares(names, Readers.of(typed))


def test_to_who_has_no_experts_none_are_recommended() -> None:
    with pytest.raises(BadRanks, match="^cannot use ranks ep2: no experts to divide$") as raised:
        shares(["model.layers.0.w"], Readers.of("ep2"))
    assert raised.value.next_step.startswith("do not set ranks, or use ppN ") and "epN" not in raised.value.next_step


@pytest.mark.parametrize("typed", ["ep1", "ep0", "ep", "tp4", "ep8 ", "ep99999", "EP8"])
def test_ranks_are_typed_in_one_way(typed: str) -> None:
    with pytest.raises(BadRanks):
        Readers.of(typed)


@given(st.sets(st.integers(1, 3000), min_size=1), st.sets(st.integers(1, 3000)), st.sampled_from([5, 4]))
def test_patterns_match_exactly_what_they_are_for(wanted: set[int], others: set[int], width: int) -> None:
    def paths(numbers: set[int]) -> set[str]:
        return {f"sub/model-{number:0{width}d}-of-03000.safetensors" for number in numbers} | {
            f"odd[{min(wanted)}]*.bin"
        }

    every = paths(wanted | others)
    globs = patterns(paths(wanted), every - paths(wanted))
    assert {path for path in every if any(fnmatchcase(path, glob) for glob in globs)} == paths(wanted)


def test_a_stretch_of_files_takes_few_patterns() -> None:
    files = [f"model-{number:05d}-of-00163.safetensors" for number in range(1, 164)]
    assert patterns(files[11:145], [*files[:11], *files[145:]]) == [
        "model-0001[2-9]-of-00163.safetensors", "model-000[2-9][0-9]-of-00163.safetensors",
        "model-0014[0-5]-of-00163.safetensors", "model-001[0-3][0-9]-of-00163.safetensors",
    ]  # fmt: skip
    assert patterns(files, ()) == ["model-00[0-1][0-9][0-9]-of-00163.safetensors"]
    assert patterns(files[:9:2], files[1:9:2]) == ["model-0000[13579]-of-00163.safetensors"]


def test_a_number_of_layers_costs_no_memory_and_is_no_layer_where_it_is_too_long() -> None:
    names = [f"model.layers.{number}.w" for number in (0, 499_999, 500_000, 999_999)]
    assert [*shares(names, Readers.of("pp4")).of.values()] == [3, 2, 1, 0]
    assert [*shares(names, Readers.of("pp4"), 10**15).of.values()] == [3, 3, 3, 3]
    for digits in ("1" + "0" * 15, "9" * 5000):
        name = f"model.layers.{digits}.w"
        assert name not in shares([*names, name, f"model.layers.0.mlp.experts.{digits}.w"], Readers.of("pp4")).of


@given(st.integers(2, 40), st.integers(2, 200))
def test_stages_are_ranges_of_layers_the_last_first_and_as_even_as_can_be(ranks: int, layers: int) -> None:
    if layers < ranks:
        return
    of = shares([f"layers.{number}.w" for number in range(layers)], Readers("pp", ranks)).of
    stages = [of[f"layers.{number}.w"] for number in range(layers)]
    assert stages == sorted(stages, reverse=True) and {*stages} == {*range(ranks)}
    counts = [stages.count(rank) for rank in range(ranks)]
    assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1


def test_a_model_that_cannot_be_divided_beside_one_that_can_is_read_by_all() -> None:
    of_experts = opened_named({f"layers.0.experts.{n}.w": ("U8", (50,)) for n in range(2)}, file_of=1000)
    dense = replace(opened_named({"conv.w": ("U8", (50,))}, file_of=1000).checkpoints[0], name=Name("vision", "model"))
    both = replace(of_experts, checkpoints=(*of_experts.checkpoints, dense))
    plan = plan_of(both, ranks="ep2")
    assert [output.readers for output in plan.outputs] == [(0, 1), (None,)]
    assert [n for n in plan.notes if n.startswith("vision/model: ") and n.endswith("every rank reads all of it")]
    with pytest.raises(BadRanks, match="no experts to divide"):
        plan_of(replace(both, checkpoints=(dense,)), ranks="ep2")
