"""Reading a catalog: what an entry comes to, and errors that name the line, the key and the fix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline.catalogs.definition import Catalog, parse, request_for
from reshard.pipeline.errors import BadCatalog, BadPlace

HEAD = "name: nightly\ndefaults: {to: 'us/{name}-{size}', size: 200MB, pr: true}\nentries:\n"


def requests(text: str) -> list[object]:
    catalog = parse(text, "c.yaml")
    return [request_for(catalog, entry, entry.repo or "x/y") for entry in catalog.entries]


def test_an_entry_goes_before_the_defaults() -> None:
    plain, own = requests(
        HEAD + "  - repo: them/a\n  - {repo: them/b@v1, size: 1GB, branch: cut, dtype: bfloat16, pack: layers}\n"
    )
    assert str(plain.target) == "us/a-200MB"
    assert (plain.options.size, plain.options.pr, plain.priority) == (200_000_000, True, "bulk")
    assert str(own.target) == "us/b-1GB"
    assert str(own.source) == "them/b@v1"
    assert (own.options.size, own.options.branch, own.options.pr) == (10**9, "cut", False)
    assert (own.options.dtype, own.options.pack) == ("bfloat16", "layers")


def test_rules_for_names_stand_in_the_file() -> None:
    text = HEAD.replace("pr: true", r"rename: [{'^h\.(\d+)': 'layers.\1'}]")
    plain, own = requests(text + "  - repo: them/a\n  - {repo: them/b, rename: [{a: b}, {c: d}]}\n")
    assert (len(plain.options.rename), plain.options.rename[0].replacement) == (1, r"layers.\1")
    assert [rule.pattern for rule in own.options.rename] == ["a", "c"]
    for wrong in ("[{'(?=a)': b}]", "[" + "{a: b}, " * 101 + "]"):
        with pytest.raises(BadCatalog, match="entries.0..rename"):
            parse(HEAD + f"  - {{repo: them/a, rename: {wrong}}}\n", "c.yaml")


def test_a_template_knows_owner_name_size_and_revision() -> None:
    (found,) = requests(
        "name: n\nentries:\n- {repo: them/a, revision: v2, to: 'us/{owner}.{name}.{size}.{revision}', size: 3MiB}"
    )
    assert str(found.target) == "us/them.a.3MiB.v2"
    (found,) = requests("name: n\nentries:\n- {repo: them/a, to: 'us/{name}-{size}-{revision}'}")
    assert str(found.target) == "us/a-5GB-main"


def test_endpoints_of_source_and_target_may_differ() -> None:
    (found,) = requests("name: n\nentries:\n- {repo: them/a, to: us/a, endpoint: 'http://a', to_endpoint: 'http://b'}")
    assert (found.source.endpoint, found.target.endpoint) == ("http://a", "http://b")


DEFAULTS = """
name: n
defaults: {revision: main, endpoint: 'http://a', to_endpoint: 'http://b', to: 'us/{name}'}
entries:
"""


@pytest.mark.parametrize(
    ("entry", "source", "target"),
    [
        ("{repo: them/m}", ("main", "http://a"), "http://b"),
        ("{repo: them/m@v2}", ("v2", "http://a"), "http://b"),
        ("{repo: them/m@v2, revision: v3}", ("v3", "http://a"), "http://b"),
        ("{repo: 'http://c/them/m'}", ("main", "http://c"), "http://b"),
        ("{repo: them/m, to: 'http://d/us/{name}'}", ("main", "http://a"), "http://d"),
        ("{repo: them/m, to: 'http://d/us/{name}', to_endpoint: 'http://e'}", ("main", "http://a"), "http://e"),
    ],
)
def test_what_an_entry_names_itself_comes_before_the_defaults(entry: str, source: tuple[str, str], target: str) -> None:
    (found,) = requests(f"{DEFAULTS}- {entry}")
    assert ((found.source.revision, found.source.endpoint), found.target.endpoint) == (source, target)
    assert str(found.target) == "us/m"


def test_an_entry_names_who_reads_and_who_writes() -> None:
    plain, own = requests(
        "name: n\ndefaults: {to: 'us/{name}', credential: reader, to_credential: writer}\nentries:\n"
        "- repo: them/a\n- {repo: them/a, credential: other}\n"
    )
    assert (plain.source.credential, plain.target.credential) == ("reader", "writer")
    assert (own.source.credential, own.target.credential) == ("other", "writer")
    assert own.key() == plain.key()  # the same bytes come out, and what is published already is found


def test_a_token_in_place_of_a_name_is_refused_and_not_repeated() -> None:
    with pytest.raises(BadCatalog, match="use the name of a credential") as refused:
        parse(HEAD + "  - {repo: a/b, credential: hf_verysecret}\n", "c.yaml")
    assert "verysecret" not in f"{refused.value!r} {refused.value.to_dict()}"


@pytest.mark.parametrize(
    "text, line, key, why, fix",
    [
        ("name: n\nentries: [}\n", 2, "YAML", "", "fix the YAML"),
        ("name: !!timestamp x\n", 1, "YAML", "a value does not have the form of its type", "fix the YAML"),
        ("- a", 1, "file", "not a mapping", "start with"),
        ("", 1, "file", "not a mapping", "start with"),
        (HEAD + "  - repo: a/b\n    sise: 1GB\n", 5, "entries[0].sise", "unknown name", "did you mean `size`?"),
        (HEAD + "  - repo: a/b\n  - repo: a/c\n    size: 5G\n", 6, "entries[1].size", "5G", "change entries[1].size"),
        (
            HEAD + "  - repo: a/b\n    size: 4000\n",
            5,
            "entries[0].size",
            "reads this as a number",
            "such as 200MB or 4kB",
        ),
        ("name: 2024-01-01\nentries: [{repo: a/b}]\n", 1, "name", "reads this as a date", "put it in quotes"),
        ("name: yes\nentries: [{repo: a/b}]\n", 1, "name", "reads this as true or false", "put it in quotes"),
        ("name: [a]\nentries: [{repo: a/b}]\n", 1, "name", "must be a valid string", "change name"),
        (HEAD + "  - repo: a/b\n    pack: big\n", 5, "entries[0].pack", "greedy", "choose one of"),
        (HEAD + "  - repo: a/b\n    to: 'us/{nam}'\n", 5, "entries[0].to", "unknown field {nam}", "change"),
        (HEAD + "  - repo: a/b\n    to: 'us/{name'\n", 5, "entries[0].to", "'}'", "change"),
        (HEAD + "  - repo: nowhere\n", 4, "entries[0].repo", "the owner is missing", "change"),
        (HEAD + "  - repo: ./folder\n", 4, "entries[0].repo", "is a folder", "change"),
        (HEAD + "  - size: 1GB\n", 4, "entries[0]", "either repo or query", "change"),
        (HEAD + "  - query: {name: 'a*'}\n", 4, "entries[0].query", "every model on the Hub", "change"),
        (HEAD + "  - query: {collection: a/b, author: c}\n", 4, "entries[0].query", "not with author", "change"),
        (HEAD + "  - query: {autor: them}\n", 4, "entries[0].query.autor", "", "did you mean `author`?"),
        (
            HEAD + "  - repo: a/b\n    min_downloads: many\n",
            5,
            "entries[0].min_downloads",
            "unknown name",
            "`min_downloads` belongs in `query: {...}`, used instead of `repo` in an entry",
        ),
        (HEAD + "  - {repo: a/b, autor: c}\n", 4, "entries[0].autor", "unknown name", "`author` belongs in `query:"),
        (HEAD + "  - query: {size: 1GB}\n", 4, "entries[0].query.size", "", "`size` belongs in `defaults` or an entry"),
        ("to: a/b\n" + HEAD + "  - repo: a/b\n", 1, "to", "unknown name", "`to` belongs in `defaults` or an entry"),
        ("name: n\ndefaults: {repo: a/b}\nentries: []\n", 2, "defaults.repo", "", "`repo` belongs in an entry"),
        (
            HEAD + "  - {repo: a/b, version: 1}\n",
            4,
            "entries[0].version",
            "",
            "`version` belongs at the top level of the file",
        ),
        (HEAD + "  - {repo: a/b, pr: true, branch: x}\n", 4, "entries[0]", "cannot be used together", "change"),
        ("name: n\n", 1, "entries", "is missing", "add `entries:`"),
        ("name: n\nentries: []\n", 2, "entries", "the list is empty", "add an entry: `- repo: user/repo`"),
        ("name: n\nentries:\n", 2, "entries", "must be a list", "change entries"),
        ("name: N!\nentries:\n- {repo: a/b, to: c/d}\n", 1, "name", "use at most 63 lowercase", "`name: nightly-"),
        (HEAD + "  - {repo: a/b, ranks: ep1}\n", 4, "entries[0].ranks", "use ep or pp", "change entries[0].ranks"),
        (
            "name: n\nentries:\n- {repo: a/b, to: c/d}\n- repo: a/b\n",
            4,
            "entries[1]",
            "`to` is missing",
            "to `defaults`",
        ),
        ("name: n\nname: m\nentries: []\n", 2, "name", "first set on line 1", "keep one"),
        (HEAD + "  - repo: a/b\n    size: 1GB\n    size: 2GB\n", 6, "size", "first set on line 5", "keep one"),
    ],
)
def test_an_error_names_the_line_the_key_and_the_fix(text: str, line: int, key: str, why: str, fix: str) -> None:
    with pytest.raises(BadCatalog) as caught:
        parse(text, "c.yaml")
    facts = caught.value.facts
    assert (facts["line"], facts["key"]) == (line, key)
    assert why in facts["why"]
    assert fix in caught.value.next_step
    assert str(caught.value).startswith(f"c.yaml, line {line}: {key}")


@pytest.mark.parametrize(
    ("entries", "count"),
    [
        ("- {repo: a/b, sise: 1GB}", ""),
        ("- {repo: a/b, sise: 1GB, pakc: layers}", " (and 1 more)"),
        ("- {repo: a/b}\n- {repo: a/c, sise: 1GB}\n- nowhere", " (and 1 more)"),
    ],
)
def test_only_what_a_person_got_wrong_is_counted(entries: str, count: str) -> None:
    with pytest.raises(BadCatalog) as caught:
        parse(f"name: n\ndefaults: {{to: 'us/{{name}}'}}\nentries:\n{entries}\n", "c.yaml")
    assert caught.value.facts["why"] == f"unknown name{count}"


@given(st.text(max_size=200) | st.from_regex(r"(name|entries|defaults): ?[\[\]{}a-z:, \n-]{0,40}", fullmatch=True))
def test_any_text_is_a_catalog_or_one_clear_error(text: str) -> None:
    try:
        assert isinstance(parse(text, "c.yaml"), Catalog)
    except BadCatalog as error:
        assert error.facts["line"] >= 1
        assert error.next_step


@pytest.mark.parametrize(
    ("text", "why"),
    [
        # Some versions of libyaml end the process where nobody looks first, and newer ones of PyYAML look themselves.
        ("entries: " + "[" * 400_000, "nested deeper|maximum nesting depth"),
        ("- " * 400_000, "nested deeper"),
        ("{a: " * 100_000, "nested deeper"),
        ("entries: &a [*a]\n", "has no anchor"),
        ("entries: [*a]\n", "has no anchor"),
        (
            "x0: &x0 [a]\n"
            + "".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 10)}]\n" for n in range(1, 9))
            + "entries: *x8",
            "more than 3,000,000 values",
        ),
        (
            "x0: &x0 {a: 1}\n"
            + "".join(f"x{n}: &x{n}\n  <<: [{', '.join([f'*x{n - 1}'] * 10)}]\n" for n in range(1, 9)),
            "more than 3,000,000 values",
        ),
    ],
)
def test_a_file_that_would_take_the_stack_or_the_memory_is_refused(text: str, why: str) -> None:
    with pytest.raises(BadCatalog, match=why):
        parse(text, "c.yaml")


def test_what_entries_share_may_have_an_anchor() -> None:
    text = "name: a\ndefaults: &d {to: 'us/{name}', size: 1GB}\nentries: [{repo: a/b, <<: *d}, {<<: *d, repo: a/c}]\n"
    assert [entry.size for entry in parse(text, "c.yaml").entries] == ["1GB", "1GB"]


@pytest.mark.parametrize(
    "to, why",
    [
        ("us/{name:>60000000}", "plain fields"),
        ("us/{name:{size}}", "plain fields"),
        ("us/{name!r}", "plain fields"),
        ("us/{name.upper}", "plain fields"),
        ("us/{name[0]}", "plain fields"),
        ("us/{0}", "plain fields"),
        ("us/{}", "unknown field"),
        ("us/" + "n" * 300, "(at most|longer than) 250 characters"),
        ("us/" + "{name}{{" * 100_000, "(at most|longer than) 250 characters"),
    ],
)
def test_a_template_has_plain_fields_alone_and_no_long_result(to: str, why: str) -> None:
    with pytest.raises(BadCatalog, match=why) as refused:
        parse(f"name: n\nentries: [{{repo: them/m, to: '{to}'}}]\n", "c.yaml")
    assert len(str(refused.value)) < 600
    catalog = parse("name: n\nentries: [{repo: them/m, to: us/m}]\n", "c.yaml")
    kept = catalog.entries[0].model_copy(update={"to": to})  # as a release without this rule took it
    with pytest.raises(BadPlace, match=why):
        request_for(catalog, kept, "them/m")


def test_what_a_template_is_filled_with_counts() -> None:
    catalog = parse("name: n\nentries: [{repo: them/m, to: 'us/{name}-{name}-{name}'}]\n", "c.yaml")
    with pytest.raises(BadPlace, match="longer than 250 characters"):
        request_for(catalog, catalog.entries[0], f"them/{'m' * 96}")


LONG = "value " * 100_000


@pytest.mark.parametrize(
    "text",
    [
        f"name: n\nentries: [{{repo: '{LONG}', to: us/m}}]",
        f"name: n\nentries: [{{repo: 'us/{LONG}', to: us/m}}]",
        f"name: n\nentries: [{{repo: us/a, to: '{{{LONG}}}'}}]",
        f"name: n\nentries: [{{repo: us/a, size: '1 {LONG}'}}]",
        f"name: n\nentries: [{{repo: us/a, size: '1{'M' * 600_000}'}}]",
        f"name: n\nentries: [{{repo: us/a, config_from: {{kind: '{LONG}'}}}}]",
        f"name: n\nentries: [{{repo: us/a, '{LONG}': 1}}]",
        f"'{LONG}': n\n'{LONG}': n",
        f"name: *{'a' * 600_000}",
        f"name: !<{'a' * 600_000}> n",
    ],
)
def test_an_error_repeats_no_more_than_the_ends_of_a_value(text: str) -> None:
    with pytest.raises(BadCatalog) as refused:
        parse(text, "c.yaml")
    told = str(refused.value) + refused.value.next_step
    assert len(told) < 1000
    assert told.count("value ") <= 2 * 200 / len("value ")  # where it stands, and what stands there
    assert len(str(refused.value.to_dict())) < 10_000
