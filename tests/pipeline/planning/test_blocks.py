"""Blocks and their order are told by names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline.planning.blocks import block_of, blocks_of, natural


@given(st.lists(st.sampled_from(["0", "7", "007", "12", "100", "layers", "layers2", "a", ""]), min_size=1), st.data())
def test_natural_order_takes_numbers_by_value_and_before_words(parts: list[str], data: st.DataObject) -> None:
    other = data.draw(st.permutations(parts))

    def meant(parts: list[str]) -> list[tuple[int, int, str]]:
        return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]

    assert (natural(".".join(parts)) < natural(".".join(other))) == (meant(parts) < meant(other))
    assert natural(".".join(parts)) < natural(".".join([*parts, "b"])), "what a name is the beginning of comes later"


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("model.layers.12.self_attn.q_proj.weight", "model.layers.12"),
        ("encoder.block.3.layer.0.SelfAttention.q.weight", "encoder.block.3"),
        ("model.layers.3.mlp.experts.5.w1.weight", "model.layers.3"),
        ("lm_head.weight", "lm_head"),
        ("shared", "shared"),
        ("0.auto_model.x", "0"),
        ("bert.embeddings.word_embeddings.weight", "bert.embeddings"),
        ("bert.embeddings.LayerNorm.weight", "bert.embeddings"),
        ("transformer.word_embeddings.weight", "transformer.word_embeddings"),
        ("vision_model.head.attention.out_proj.weight", "vision_model.head"),
    ],
)
def test_a_block_is_named_up_to_its_first_number_or_its_embeddings(name: str, block: str) -> None:
    assert block_of(name) == block


@given(st.lists(st.lists(st.sampled_from(["0", "1", "10", "layers", "embeddings", "head", "a", ""]), max_size=5)))
def test_blocks_of_many_names_are_those_of_each(names: list[list[str]]) -> None:
    joined = [".".join(parts) for parts in names]
    assert list(blocks_of(joined)) == list(map(block_of, joined))
