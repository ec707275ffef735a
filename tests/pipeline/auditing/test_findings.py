"""Kinds of findings: their order, what is counted of each, and what to type next."""

from __future__ import annotations

from random import Random
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline.auditing.findings import KINDS, OF_RULE, Severity, Told, badness, gathered, next_command, sample
from reshard.pipeline.places import parse_place
from reshard.pipeline.request import Options
from reshard.pipeline.sizes import SINGLE
from reshard.pipeline.verifying.structure import REMARKS, Rule

told = st.lists(st.builds(Told, st.sampled_from(list(KINDS)), st.text(max_size=3), st.integers(1, 9)))


def test_every_rule_is_of_a_kind_and_kinds_go_from_the_worst_severity_down() -> None:
    assert OF_RULE.keys() == set(get_args(Rule)) - REMARKS
    assert set(OF_RULE.values()) <= KINDS.keys()
    order = [get_args(Severity).index(severity) for severity in KINDS.values()]
    assert order == sorted(order)


@given(told, st.randoms())
def test_findings_count_all_that_was_told_and_are_the_same_in_any_order(these: list[Told], random: Random) -> None:
    found = gathered(these, lambda kind: f"see {kind}")
    assert sum(one.count for one in found) == sum(one.times for one in these)
    assert {one.kind for one in found} == {one.kind for one in these}
    assert [list(KINDS).index(one.kind) for one in found] == sorted(list(KINDS).index(one.kind) for one in found)
    assert all(one.first == next(t.text for t in these if t.kind == one.kind) for one in found)
    random.shuffle(these)
    assert [(one.kind, one.count) for one in gathered(these, str)] == [(one.kind, one.count) for one in found]


@given(told, told)
def test_a_model_is_worse_than_another_by_its_worst_finding_and_none_is_the_best(a: list[Told], b: list[Told]) -> None:
    one, other = gathered(a, str), gathered(b, str)
    if one and other and one[0].kind != other[0].kind:
        earlier = list(KINDS).index(one[0].kind) < list(KINDS).index(other[0].kind)
        assert (badness(one) < badness(other)) == earlier
    assert badness(one) <= badness(())


@given(st.sets(st.text(max_size=5)), st.sets(st.text(max_size=5)), st.integers(0, 9))
def test_a_sample_is_the_same_in_any_order_and_others_only_push_out_of_it(
    names: set[str], more: set[str], count: int
) -> None:
    chosen = sample(names, count)
    assert chosen == sample(sorted(names, reverse=True), count)
    assert len(chosen) == min(count, len(names))
    assert set(sample(names | more, count)) <= set(chosen) | more


def test_what_is_typed_next_repairs_the_copy_or_looks_closer() -> None:
    options = Options(size=200_000_000, dtype="bfloat16", dequantize=True)
    ours, theirs = parse_place("a/b"), parse_place("c/d")
    assert next_command("tensors-lost", ours, theirs, options) == (
        "reshard run c/d --to a/b --size 200MB --dtype bfloat16 --dequantize"
    )
    ranks = Options(ranks="ep8", align=4096, strict_dtype=True, ties="source", rename=[("^a", "b")])
    assert next_command("tensors-lost", ours, theirs, ranks) == (
        "reshard run c/d --to a/b --for ep8 --align 4096 --strict-dtype --ties source --rename RULES"
    )
    for size, typed in ((SINGLE, "--single"), (3300, "--size 3300B")):
        assert next_command("dtype-changed", ours, theirs, Options(size=size)) == f"reshard run c/d --to a/b {typed}"
    assert next_command("unsigned", ours, theirs, Options()) == "reshard run c/d --to a/b --sign KEY"
    without = Options(exclude=("*.md",), config_from="e/f")
    assert next_command("unsigned", ours, theirs, without) == (
        "reshard run c/d --to a/b --config-from e/f --exclude '*.md' --sign KEY"
    )
    assert next_command("tokenizer-changed", ours, theirs, options) == "reshard verify a/b --against c/d"
    assert next_command("changes-claimed", ours, ours, options, "a/b@0f") == "reshard verify a/b --against a/b@0f"
    assert next_command("tensors-lost", ours, theirs, Options(), "0f") == "reshard run c/d --to a/b"
    assert next_command("source-unknown", ours, None, options) == "reshard verify a/b --against SRC"
    assert next_command("index-ghost", parse_place("/a b"), None, options) == "reshard doctor '/a b'"
    on_branch = next_command("tensors-lost", parse_place("a/b@fp16"), theirs, Options(size=3300))
    assert on_branch == "reshard run c/d --to a/b --branch fp16 --size 3300B"
    there = parse_place("https://hub.example/a/b/tree/v1")
    assert next_command("source-wrong", there, ours, options) == f"reshard provenance {there.spelled}"
    assert next_command("file-unproven", ours, there, options) == f"reshard verify a/b --against {there.spelled}"
