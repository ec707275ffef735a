"""The card: the owner's text stays the owner's, our block is ours, and nothing is said twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline.publishing.card import with_block, with_lineage, without_block
from reshard.pipeline.request import Options

BLOCK = "<!-- reshard:begin -->\n> ours\n<!-- reshard:end -->\n"
NEWER = "<!-- reshard:begin -->\n> newer, with \\1 and \\g<0> in it\n<!-- reshard:end -->\n"
texts = st.text(alphabet="# abc\n->:", max_size=80)


@given(texts)
def test_the_owners_text_survives_our_block(text: str) -> None:
    assert without_block(with_block(text, BLOCK)).rstrip() == text.rstrip()


@given(texts)
def test_a_second_block_replaces_the_first(text: str) -> None:
    assert with_block(with_block(text, BLOCK), NEWER) == with_block(text, NEWER)


def test_a_block_that_its_owner_moved_stays_where_it_was_moved_to() -> None:
    moved = f"# Title\n\n{BLOCK}\nThe rest.\n"
    assert with_block(moved, NEWER) == f"# Title\n\n{NEWER}\nThe rest.\n"


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ("---\nlicense: mit\n---\n# A\n", "---\nlicense: mit\nbase_model: a/b\n---\n# A\n"),
        ("# A\n", "---\nbase_model: a/b\n---\n# A\n"),
        ("---\nbase_model: x/y\n---\n# A\n", "---\nbase_model: x/y\n---\n# A\n"),
        ("---\n---\n# A\n", "---\nbase_model: a/b\n---\n# A\n"),
        ("", "---\nbase_model: a/b\n---\n"),
    ],
)
def test_lineage_is_added_to_the_front_matter_once(card: str, expected: str) -> None:
    assert with_lineage(card, "a/b") == expected
    assert with_lineage(with_lineage(card, "a/b"), "a/b") == expected


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "every tensor is the source's, bit for bit"),
        ({"dtype": "float16"}, "cast to float16; nothing else"),
        ({"strip_prefix": "auto", "ties": "source"}, "prefixes were taken off names, of tied tensors one is left"),
    ],
)
def test_what_was_changed_is_told_as_it_is(options: dict[str, str], says: str) -> None:
    assert says in Options.model_validate(options).told()
