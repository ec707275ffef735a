"""How long the fields of a request may be, and which names of branches and tags it takes."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reshard.pipeline.catalogs.definition import parse
from reshard.pipeline.errors import BadCatalog, BadPlace, BadSize, RequestTooLarge, UsageError
from reshard.pipeline.limits import GLOB_MAX, GLOBS_MAX, PATH_MAX, REQUEST_MAX, REVISION_MAX, URL_MAX
from reshard.pipeline.places import REVISION, parse_place
from reshard.pipeline.request import Request
from reshard.pipeline.sizes import parse_size
from reshard.worker.followers.schedules import Schedule
from tests.support.examples import examples

LETTERS = st.text(st.sampled_from("ab.-/@{}~^:?*[\\ \r\n\t\x1b\x7fé"), min_size=1, max_size=8)


@settings(max_examples=examples(300), deadline=None)
@given(LETTERS | st.sampled_from(["main", "v1.0", "refs/pr/1", "a.lock", "a.lock/b", "a/.b", "x..y", "HEAD~1"]))
@example("main\r\nx")
def test_a_revision_is_a_name_that_git_takes(name: str) -> None:
    try:
        REVISION.checked(name)
    except ValueError:
        ours = False
    else:
        ours = True
    # A whole ref, as git expands `@{-1}` where it is told that this is a branch, and takes `-a` for an option.
    git = subprocess.run(["git", "check-ref-format", f"refs/heads/{name}"], check=False).returncode == 0
    assert ours == (git and not name.startswith("-") and name != "@")


@pytest.mark.parametrize("name", ["a" * (REVISION_MAX + 1), "a\x85b", "a\u202eb", "a\u2028b", "\ud800"])
def test_a_revision_is_short_and_does_nothing_on_a_terminal(name: str) -> None:
    with pytest.raises(ValueError, match="not a valid branch, tag or commit"):
        REVISION.checked(name)
    with pytest.raises(BadPlace, match="not a valid branch, tag or commit"):
        parse_place(f"them/model@{name}")
    with pytest.raises(UsageError, match="not a valid branch, tag or commit"):
        Request.of("them/model", "us/model", branch=name)


@pytest.mark.parametrize(
    "options",
    [
        {"include": ["a" * (GLOB_MAX + 1)]},
        {"exclude": ["a"] * (GLOBS_MAX + 1)},
        {"strip_prefix": "a" * 501},
        {"branch": "a" * 251},
        {"size": 2**62 + 1},
        {"config_from": "/" + "a" * PATH_MAX},
        {"config_from": f"s3://bucket/{'a' * URL_MAX}"},
        {"config_from": f"https://{'a' * URL_MAX}/them/model"},
    ],
)
def test_a_longer_option_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError) as refused:
        Request.of("them/model", "us/model", **options)
    assert len(str(refused.value)) < 800


@pytest.mark.parametrize("size", ["9" * 19 + "TB", "9" * 5000, "1" * 400 + ".5GB", "5" + "0" * 20 + "MB"])
def test_a_size_beyond_every_file_is_refused(size: str) -> None:
    with pytest.raises(BadSize):
        parse_size(size)


def test_a_whole_request_has_64_kb() -> None:
    rules = [{f"{number:03}{'a' * 300}": "b" * 400} for number in range(100)]
    request = Request.of("them/model", "us/model", rename=rules)
    with pytest.raises(RequestTooLarge, match=f"{REQUEST_MAX:,}"):
        request.stored()
    with pytest.raises(RequestTooLarge):
        Schedule(name="n", cron="@daily", request=request).check()
    assert len(Request.of("them/model", "us/model", rename=rules[:50]).stored()) < REQUEST_MAX


@pytest.mark.parametrize(
    "entry",
    [
        "repo: them/m, revision: 'a b'",
        'repo: them/m, branch: "a\\r\\nb"',
        f"repo: them/m, endpoint: 'https://{'a' * URL_MAX}'",
        f"query: {{author: '{'a' * 300}'}}",
        f"query: {{tags: [{'a, ' * 51}]}}",
        f"query: {{author: us, name: '{'a' * 300}'}}",
        "query: {limit: 100001}",
        f"repo: them/m, include: ['{'a' * (GLOB_MAX + 1)}']",
    ],
)
def test_a_longer_field_of_a_catalog_is_refused(entry: str) -> None:
    with pytest.raises(BadCatalog) as refused:
        parse(f"name: n\ndefaults: {{to: 'us/{{name}}'}}\nentries: [{{{entry}}}]\n", "c.yaml")
    assert len(str(refused.value)) < 800
