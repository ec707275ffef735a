"""Rules for names: what they do, which are refused, and what they may take of a worker."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pydantic import ValidationError

from reshard.pipeline.errors import BadRename, RenameCollision
from reshard.pipeline.limits import RENAME_NAME_MAX, RENAME_RULES_MAX, RENAME_TEXT_MAX
from reshard.pipeline.renaming import Change, Rule, parse_rules, renamed
from reshard.pipeline.request import Options, Request


def becomes(name: str, *rules: tuple[str, str]) -> str:
    return renamed([name], [Rule(*rule) for rule in rules], "model")[0][name]


@pytest.mark.parametrize(
    ("name", "rules", "expected"),
    [
        ("encoder.a.weight", [("^encoder[.]", "model.")], "model.a.weight"),
        ("x.encoder.a", [("^encoder[.]", "model.")], "x.encoder.a"),
        ("a.a.a", [("a", "b")], "b.b.b"),
        ("h.3.attn", [(r"^h\.(\d+)\.", r"layers.\1.")], "layers.3.attn"),
        ("h.3.attn", [(r"^h\.(?P<layer>\d+)", r"layers.\g<layer>")], "layers.3.attn"),
        ("h.3.attn", [("attn", "self"), ("self$", "self_attn")], "h.3.self_attn"),  # what the first one left
        ("a.b", [("[.]", r"\\")], r"a\b"),
        ("a.b", [("(x)?[.]", r"\1-")], "a-b"),
        ("größe.é", [("ö", "oe"), ("é", "à")], "groeße.à"),
    ],
)
def test_each_rule_replaces_what_it_matches_in_what_those_before_left(
    name: str, rules: list[tuple[str, str]], expected: str
) -> None:
    assert becomes(name, *rules) == expected


def test_what_each_rule_did_is_counted_with_its_first_name() -> None:
    rules = [Rule("^a", "b"), Rule("^x", "y"), Rule("b", "b")]
    _, changes = renamed(["a.1", "a.2", "c"], rules, "model")
    assert changes == [Change(2, "a.1", "b.1"), Change(), Change()], "who changes nothing does nothing"


def test_two_names_that_become_one_are_an_error_that_names_both() -> None:
    with pytest.raises(RenameCollision, match=r"two tensors in unet/model to the same name, x\.w: a\.w and b\.w"):
        renamed(["a.w", "b.w"], [Rule("^[ab]", "x")], "unet/model")
    assert renamed(["a", "b"], [Rule("^a$", "c"), Rule("^b$", "a"), Rule("^c$", "b")], "m")[0] == {"a": "b", "b": "a"}


# Each line stands for twenty times as many pairs as the one before it.
MERGED = "- &a0 {a: b}\n" + "".join(f"- &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 20)}]}}\n" for n in range(1, 9))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("- '(?=x)': y", "rule 1: .*invalid perl operator.*RE2"),
        (r"- '(?P<a>x)\1': y", "rule 1: .*invalid escape sequence"),
        ("- a: b\n- '(b': c", "rule 2: .*missing"),
        (r"- a: 'b\1'", "is not a group"),
        (r"- (a): 'b\2'", "is not a group"),
        (r"- (a): 'b\n'", "is not a group"),
        (r"- (?P<x>a): '\g<y>'", "is not a group"),
        ("- '': b", "cannot be empty"),
        (f"- a: {'b' * (RENAME_TEXT_MAX + 1)}", f"{RENAME_TEXT_MAX} characters"),
        (f"- {'b' * (RENAME_TEXT_MAX + 1)}: a", f"{RENAME_TEXT_MAX} characters"),
        (r"- '(?:\pL{1,50}){1,20}': b", "too large"),
        (r"- '(?:[a-z]{1,50}[0-9]){1,20}': b", "the expression is too large"),
        ("- a: b\n" * (RENAME_RULES_MAX + 1), f"{RENAME_RULES_MAX + 1} rules"),
        ("[]", "0 rules"),
        ("a: b", "list"),
        ("- a: b\n  c: d", "one regular expression and its replacement"),
        ("- a", "one regular expression and its replacement"),
        ("- a:", "one regular expression and its replacement"),
        ("- 1: b", "one regular expression and its replacement"),
        (r'- "a": "\ud800"', "is not valid Unicode"),
        (r'- "\udfff": a', "is not valid Unicode"),
        ("- a: b\n- [a", "not YAML, line 2"),
        ("[" * 2000, "not YAML"),
        ("- !!python/object/apply:os.system [id]", "not YAML"),
        ("- 2001-99-99: x", "not YAML"),
        ("- !!int a: x", "not YAML"),
        ("- !!int '': x", "not YAML"),
        ("- !!timestamp x: x", "not YAML"),
        ("- !!bool x: x", "not YAML"),
        (f"- 1{':1' * 200}.0: x", "not YAML"),
        (MERGED, "not YAML, line 5"),
    ],
)
def test_rules_that_are_none_are_refused_with_the_place_and_the_reason(text: str, why: str) -> None:
    with pytest.raises(BadRename, match=rf"rules\.yaml: .*{why}"):
        parse_rules(text, "rules.yaml")


@pytest.mark.parametrize("new", ["__metadata__", "\x1b[31mx", "a\u202eb"])
def test_a_name_that_no_file_or_screen_takes_is_refused(new: str) -> None:
    with pytest.raises(BadRename, match=r"'x\.weight' would be .*, not a valid name"):
        renamed(["x.weight"], [Rule("^x.weight$", new)], "model")


@pytest.mark.parametrize("rule", [Rule("x*", "y" * 400), Rule(".+", "")])
def test_a_name_that_becomes_nothing_or_grows_beyond_all_names_is_refused(rule: Rule) -> None:
    with pytest.raises(BadRename, match=r"'xx\.weight' in model would have"):
        renamed(["xx.weight"], [rule], "model")
    with pytest.raises(BadRename, match="1,001 characters"):
        renamed(["n" * (RENAME_NAME_MAX + 1)], [Rule("a", "b")], "model")


def test_no_expression_takes_more_than_linear_time() -> None:
    """Python's own machine would need 2 to the power of 900 steps for the first of these."""
    rules = [Rule("^(a+)+$", "b"), Rule("(a|a)*c", "b"), Rule("(.*)(.*)(.*)(.*)(.*)x", "b")]
    start = time.thread_time()
    assert renamed(["a" * 900 + "!"], rules, "model")[1] == [Change()] * 3
    assert time.thread_time() - start < 1


def test_rules_end_with_their_processor_time() -> None:
    with pytest.raises(BadRename, match="CPU time"):
        renamed(["a"], [Rule("a", "b")], "model", cpu=-1)


def test_a_job_keeps_rules_as_data_and_no_other_request_gets_another_key() -> None:
    rules: Any = [{"^a": "b"}]
    plain, asked = Request.of("a/b", "c/d"), Request.of("a/b", "c/d", rename=rules)
    assert Request.model_validate_json(asked.stored()) == asked and '"rename":[["^a","b"]]' in asked.stored()
    assert asked.key() != plain.key() and "rename" not in plain.options.weights() | plain.options.content()
    assert asked.options.weights()["rename"] == (Rule("^a", "b"),)
    with pytest.raises(ValidationError, match="rename"):
        Options(rename=rules * (RENAME_RULES_MAX + 1))


def test_a_rule_is_shown_as_it_was_typed_and_moves_no_cursor() -> None:
    assert str(Rule(r"^a\.(\w+)", r"\1")) == r"'^a\.(\w+)' -> '\1'"
    assert str(Rule("\x1b[2Jä\n", "")) == r"'\x1b[2Jä\x0a' -> ''"
