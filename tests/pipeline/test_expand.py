"""What a catalog comes to on the Hub on loopback, and how few calls that takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from reshard.pipeline.catalog import parse
from reshard.pipeline.errors import HubRefused, SourceNotFound
from reshard.pipeline.expand import Wanted, expand, interleaved
from reshard.pipeline.stores.open import Context
from tests.support.hub.fixtures import Namespace, hub, hub_process, namespace

__all__ = ["hub", "hub_process", "namespace"]


@pytest.fixture
def space(namespace: Namespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Namespace:
    monkeypatch.setenv("HF_ENDPOINT", namespace.endpoint)
    monkeypatch.setenv("HF_TOKEN", namespace.token)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return namespace


def model(space: Namespace, name: str, size: int = 10, tags: str = "[]", **settings: object) -> str:
    repo = space.repo(name)
    space.admin.create_repo(repo, **settings)
    files = {"README.md": f"---\ntags: {tags}\n---\n".encode(), "model.safetensors": b"x" * size}
    space.admin.put_files(repo, files, lfs=["model.safetensors"])
    return repo


def found(space: Namespace, entries: str) -> list[Wanted]:
    text = f"name: n\ndefaults: {{to: '{space.name}/{{name}}-cut'}}\nentries:\n{entries}"
    return expand(parse(text, "c.yaml"), Context.from_env())


def names(wanted: list[Wanted]) -> list[str]:
    return [one.repo.partition("/")[2] for one in wanted]


def test_forty_named_models_and_their_targets_cost_two_calls(space: Namespace) -> None:
    repos = [model(space, f"m{number:03}") for number in range(40)]
    space.admin.log(reset=True)
    wanted = found(space, "".join(f"- repo: {repo}\n" for repo in repos))
    assert [one.repo for one in wanted] == repos
    assert all(one.source and one.source.sha == space.admin.head(one.repo) for one in wanted[:3])
    assert all(one.target is None for one in wanted)
    assert len(space.admin.log()) == 2


def test_targets_that_are_there_are_listed_too(space: Namespace) -> None:
    repos = [model(space, f"m{number}") for number in range(5)]
    targets = [model(space, f"m{number}-cut") for number in range(5)]
    space.admin.log(reset=True)
    wanted = found(space, "".join(f"- repo: {repo}\n" for repo in repos))
    assert [one.target and one.target.sha for one in wanted] == [space.admin.head(target) for target in targets]
    assert len(space.admin.log()) == 2


def test_a_query_is_all_that_it_says(space: Namespace) -> None:
    model(space, "llama-small", size=1000, tags="[chat]", downloads=50)
    model(space, "llama-large", size=9000, tags="[chat]", downloads=90)
    model(space, "llama-base", size=1000, downloads=70)
    model(space, "other", size=1000, tags="[chat]", downloads=5)

    def query(more: str) -> list[str]:
        return names(found(space, f"- query: {{author: {space.name}, {more}}}\n"))

    assert query("tags: [chat]") == ["llama-large", "llama-small", "other"]
    assert query("name: 'llama-*'") == ["llama-large", "llama-base", "llama-small"]
    assert query("tags: [chat], min_downloads: 50") == ["llama-large", "llama-small"]
    assert query("max_size: 2kB, limit: 2") == ["llama-base", "llama-small"]
    assert query("min_size: 2kB") == ["llama-large"]
    assert query("search: base") == ["llama-base"]


def test_a_collection_is_a_query_too(space: Namespace) -> None:
    repos = [model(space, name) for name in ("b", "a", "not")]
    space.admin.create_collection(f"{space.name}/best-0123", repos)
    assert names(found(space, f"- query: {{collection: {space.name}/best-0123, name: '?'}}\n")) == ["b", "a"]
    assert names(found(space, f"- query: {{collection: {space.name}/best-0123, limit: 1}}\n")) == ["b"]
    with pytest.raises(SourceNotFound, match="none"):
        found(space, "- query: {collection: them/none}\n")


def test_where_lists_are_refused_each_model_is_asked_for(space: Namespace) -> None:
    repos = [model(space, name) for name in ("a", "b")]
    space.admin.fault(r"^GET /api/models(\?|$)", "status", status=400)
    wanted = found(space, "".join(f"- repo: {repo}\n" for repo in repos))
    assert [one.source and one.source.sha for one in wanted] == [space.admin.head(repo) for repo in repos]
    with pytest.raises(HubRefused):
        found(space, f"- query: {{author: {space.name}}}\n")


def test_a_model_that_is_named_is_not_found_again(space: Namespace) -> None:
    named, other = model(space, "named"), model(space, "other")
    wanted = found(space, f"- query: {{author: {space.name}}}\n- {{repo: {named}, size: 1MB}}\n")
    assert sorted((one.repo, one.request and one.request.options.size) for one in wanted) == [
        (named, 1_000_000),
        (other, 5_000_000_000),
    ]


def test_what_is_wrong_with_one_is_its_own(space: Namespace) -> None:
    good, gated = model(space, "good"), model(space, "gated", gated="auto")
    first, second = model(space, "first"), model(space, "second")
    wanted = found(
        space,
        f"- repo: {good}\n- repo: {gated}\n- repo: {space.repo('none')}\n- {{repo: {good}, revision: v9, to: x/y}}\n"
        f"- {{repo: {first}, to: {space.repo('one')}}}\n- {{repo: {second}, to: {space.repo('One')}}}\n"
        f"- {{repo: {good}, to: '{space.name}/{{name}}--'}}\n",
    )
    assert [one.error.code if one.error else None for one in wanted] == [
        None, None, "source.not_found", "source.no_revision", "usage.collision", "usage.collision", "usage.place",
    ]  # fmt: skip
    assert wanted[1].source is not None and wanted[1].source.gated
    assert second in str(wanted[4].error)


def test_two_entries_that_say_the_same_are_one(space: Namespace) -> None:
    good = model(space, "good")
    (one,) = found(space, f"- repo: {good}\n- repo: {good}\n")
    assert one.error is None


def test_a_renamed_source_is_found_under_its_old_name(space: Namespace) -> None:
    from huggingface_hub import HfApi

    old = model(space, "old")
    HfApi(space.endpoint, space.token).move_repo(old, space.repo("new"))
    (one,) = found(space, f"- repo: {old}\n")
    assert one.error is None
    assert one.source is not None and one.source.sha == space.admin.head(space.repo("new"))


def test_owners_take_turns(space: Namespace) -> None:
    (one,) = found(space, f"- repo: {model(space, 'a')}\n")

    def of(owner: str, number: int) -> Wanted:
        assert one.request is not None
        target = one.request.target.model_copy(update={"repo": f"{owner}/m{number}"})
        return replace(one, request=one.request.model_copy(update={"target": target}))

    many = [of("large", number) for number in range(5)] + [of("small", number) for number in range(2)]
    turns = [str(each.request.target) for each in interleaved(many) if each.request]
    assert turns[:4] == ["large/m0", "small/m0", "large/m1", "small/m1"]
    assert len(turns) == len(many)
