"""The card: the owner's text stays the owner's, our block is ours, and nothing is said twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline.publishing.card import CannotEdit, with_block, with_lineage, without_block
from reshard.pipeline.request import Options

BLOCK = b"<!-- reshard:begin -->\n> ours\n<!-- reshard:end -->\n"
NEWER = b"<!-- reshard:begin -->\n> newer, with \\1 and \\g<0> in it\n<!-- reshard:end -->\n"
BOM = b"\xef\xbb\xbf"
texts = st.text(alphabet="# abc\r\n->:", max_size=80).map(str.encode)


@given(texts)
def test_the_owners_text_survives_our_block_byte_for_byte(text: bytes) -> None:
    assert with_block(text, BLOCK).startswith(text)
    assert without_block(with_block(text, BLOCK)) == text.rstrip(b"\r\n")


@given(texts)
def test_a_second_block_replaces_the_first(text: bytes) -> None:
    assert with_block(with_block(text, BLOCK), NEWER) == with_block(text, NEWER)


def test_a_block_that_its_owner_moved_stays_where_it_was_moved_to() -> None:
    moved = b"# Title\n\n" + BLOCK + b"\nThe rest.\n"
    assert with_block(moved, NEWER) == b"# Title\n\n" + NEWER + b"\nThe rest.\n"


def test_the_block_has_the_cards_own_line_ends() -> None:
    first = with_block(b"# Title\r\n", BLOCK)
    assert first == b"# Title\r\n\r\n" + BLOCK.replace(b"\n", b"\r\n")
    assert with_block(first, NEWER) == b"# Title\r\n\r\n" + NEWER.replace(b"\n", b"\r\n")


@pytest.mark.parametrize(
    "card",
    [
        b"# A\n<!-- reshard:begin -->\nThe owner's own text.\n",
        b"# A\n<!-- reshard:end -->\n",
        b"<!-- reshard:end -->\n<!-- reshard:begin -->\n",
        b"<!-- reshard:begin -->\nThe owner's.\n" + BLOCK,
        BLOCK + b"and\n" + BLOCK,
    ],
)
def test_markers_that_are_not_one_pair_are_left_alone(card: bytes) -> None:
    with pytest.raises(CannotEdit):
        with_block(card, NEWER)


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        (b"---\nlicense: mit\n---\n# A\n", b"---\nlicense: mit\nbase_model: a/b\n---\n# A\n"),
        (b"---\r\nlicense: mit\r\n---\r\n# A\r\n", b"---\r\nlicense: mit\r\nbase_model: a/b\r\n---\r\n# A\r\n"),
        (BOM + b"---\nlicense: mit\n---\n# A\n", BOM + b"---\nlicense: mit\nbase_model: a/b\n---\n# A\n"),
        (b"\n\n---\nlicense: mit\n---\n", b"\n\n---\nlicense: mit\nbase_model: a/b\n---\n"),
        (b"---\nlicense: mit\n---", b"---\nlicense: mit\nbase_model: a/b\n---"),
        (b"---\ntags:\n- a\n-  b: |\n   c\n# d\n---\n", b"---\ntags:\n- a\n-  b: |\n   c\n# d\nbase_model: a/b\n---\n"),
        (b"# A\n", b"---\nbase_model: a/b\n---\n# A\n"),
        (BOM + b"# A\r\n", BOM + b"---\r\nbase_model: a/b\r\n---\r\n# A\r\n"),
        (b"---\nbase_model: x/y\n---\n# A\n", b"---\nbase_model: x/y\n---\n# A\n"),
        (b'---\n"base_model": x/y\n---\n# A\n', b'---\n"base_model": x/y\n---\n# A\n'),
        (b"---\n---\n# A\n", b"---\nbase_model: a/b\n---\n# A\n"),
        (b"", b"---\nbase_model: a/b\n---\n"),
    ],
)
def test_lineage_is_added_to_the_front_matter_once(card: bytes, expected: bytes) -> None:
    assert with_lineage(card, "a/b") == expected
    assert with_lineage(with_lineage(card, "a/b"), "a/b") == expected


@pytest.mark.parametrize(
    "card",
    [
        b"---\nlicense: mit\n# no end\n",
        b"---\rlicense: mit\r---\r# A\r",
        b"---\n{license: mit}\n---\n# A\n",
        b"---\ntags: [\na\n]\n---\n# A\n",
        b"---\n- a\n...\n---\n",
    ],
)
def test_front_matter_that_cannot_be_added_to_is_left_alone(card: bytes) -> None:
    with pytest.raises(CannotEdit):
        with_lineage(card, "a/b")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "every tensor is identical to the source, bit for bit"),
        ({"dtype": "float16"}, "cast to float16. Nothing else"),
        (
            {"strip_prefix": "auto", "ties": "source"},
            "only one of each set of tied tensors was kept, wrapper prefixes were removed from names",
        ),
    ],
)
def test_what_was_changed_is_told_as_it_is(options: dict[str, str], says: str) -> None:
    assert says in Options.model_validate(options).told()
