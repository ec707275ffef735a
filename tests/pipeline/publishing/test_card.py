"""The card: the owner's text stays the owner's, our block is ours, and nothing is said twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline.checkpoint.discover import Found
from reshard.pipeline.checkpoint.open import Opened
from reshard.pipeline.planning.build import Known, make_plan
from reshard.pipeline.planning.codec import decode_head, encode
from reshard.pipeline.planning.existing import NOTHING
from reshard.pipeline.planning.model import Keys
from reshard.pipeline.publishing.card import CannotEdit, block, with_block, with_lineage, without_block
from reshard.pipeline.publishing.history import message, title
from reshard.pipeline.sizes import SINGLE
from tests.pipeline.planning.builders import PIN, opened_named, plan_of, request

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


def test_what_is_between_blocks_is_the_owners_however_many_begin_and_do_not_end() -> None:
    assert without_block(b"a\n" + BLOCK + b"b\n" + BLOCK.replace(b"\n", b"\r\n") + b"c\n") == b"a\nb\nc"
    begun = b"<!-- reshard:begin -->" * 400_000
    assert without_block(BLOCK + begun) == begun


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
        b"<!-- reshard:begin -->" * 400_000,  # which takes no time
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
        b"---\n- a\n- b\n---\n",
        b"---\n  license: mit\n---\n",
        b"---\n# of no mapping\n\n- a\n---\n",
        b"---\n" + b"- : a\n" * 100 + b"!\n---\n",  # which takes no time
    ],
)
def test_front_matter_that_cannot_be_added_to_is_left_alone(card: bytes) -> None:
    with pytest.raises(CannotEdit):
        with_lineage(card, "a/b")


ONLY = "> Only the split into files changed: every tensor is identical to the source, bit for bit."
BF16, F32, FP8 = ("BF16", (2, 2)), ("F32", (2, 2)), ("F8_E4M3", (2, 2))
CAST, CONVERTED = "wider floating-point tensors were cast to bfloat16", "quantized weights were converted to bfloat16"
STRIPPED, TIED = "wrapper prefixes were removed from names", "only one of each set of tied tensors was kept"
TO_BF16: dict[str, Any] = {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("options", "tensors", "says"),
    [
        ({}, {"a": F32}, ONLY),
        (TO_BF16, {"a": F32, "b": BF16}, f"> Besides the split into files: {CAST}. Nothing else changed."),
        ({"dtype": "float32"}, {"a": BF16}, ONLY),
        ({"strip_prefix": "auto"}, {"module.a": F32}, f"> Besides the split into files: {STRIPPED}. Nothing else"),
        ({"strip_prefix": "auto"}, {"a": F32}, ONLY),
        ({"strip_prefix": "auto", **TO_BF16}, {"a": F32}, f"> Besides the split into files: {CAST}. Nothing else"),
        (
            {"dequantize": True, **TO_BF16},
            {"a": FP8, "a_scale": ("F32", ())},
            f"> Besides the split into files: {CONVERTED}",
        ),
        ({"dequantize": True, **TO_BF16}, {"a": F32}, ONLY),
        ({"ties": "source"}, {"a": F32, "b": F32}, ONLY),
        (
            {"ties": "source", **TO_BF16},
            {"a": BF16, "tied": BF16},
            f"> Besides the split into files: {TIED}. Nothing else",
        ),
    ],
)
def test_what_was_changed_is_told_as_it_is_and_what_was_only_asked_for_is_not(
    options: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...]]], says: str
) -> None:
    opened = opened_named(tensors, 10**6)
    (plain,) = opened.checkpoints
    checkpoint = replace(plain, ties=(tuple(tensors),) if "ties" in options else ())
    known = Known(
        request(**options), PIN, Keys("request", "weights"), Found((), frozenset()),
        replace(opened, checkpoints=(checkpoint,)), {}, NOTHING, ties={plain.name: {"tied": "a"}},
    )  # fmt: skip
    plan = make_plan(known)
    assert says in block(plan).decode() and says.removeprefix("> ") in message(plan)
    stored = encode(plan)
    assert block(replace(decode_head(stored.head), shards=plan.shards)) == block(plan)


def test_of_weights_that_stay_as_they_are_is_told_what_may_have_changed() -> None:
    stays = plan_of(Opened((), (), {}), strip_prefix="auto", **TO_BF16)
    assert f"> Besides the split into files, at most: {CAST}, {STRIPPED}. Nothing else" in block(stays).decode()
    assert ONLY in block(plan_of(Opened((), (), {}))).decode()


def test_files_without_a_bound_of_their_size_have_none_in_the_card_and_the_title() -> None:
    """As with --single, of a model with several components."""
    plan = plan_of(opened_named({"a": F32, "b": F32}, 10**6), size=100)
    assert b"in 2 files of at most 100 bytes each\n> (a larger" in block(plan) and "at most 100 bytes" in title(plan)
    single = replace(plan, options=plan.options.model_copy(update={"size": SINGLE}))
    assert b"in 2 files.\n" in block(single) and title(single).endswith("in 2 files")
