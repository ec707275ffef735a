"""What a catalog comes to on the Hub on loopback, and how few calls that takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from reshard.pipeline.catalogs.definition import parse
from reshard.pipeline.catalogs.expand import Wanted, expand, interleaved, stands
from reshard.pipeline.errors import BadCatalog, HubError, HubRefused, SourceNotFound
from reshard.pipeline.publishing.rollback import rollback
from reshard.pipeline.reshard import run
from reshard.pipeline.stores.connect import Context, open_target
from reshard.pipeline.verifying.meta_load import MetaLoader
from tests.hub.fixtures import Namespace
from tests.pipeline.stores.conftest import Impatient
from tests.support.models import add_friends, arrays, numbered, save_sharded


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
    return expand(parse(text, "c.yaml"), Context.from_env()).models


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


def test_a_target_on_a_branch_is_not_taken_for_missing(space: Namespace) -> None:
    sources, target = [model(space, name) for name in ("a", "b")], model(space, "a-cut")
    HfApi(space.endpoint, space.token).create_branch(target, branch="v1")
    wanted = found(space, "".join(f"- {{repo: {repo}, to: {repo}-cut@v1}}\n" for repo in sources))
    assert [one.target and one.target.sha for one in wanted] == [space.admin.head(target), None]


def test_an_entry_may_name_a_revision_and_a_hub(space: Namespace) -> None:
    repo = model(space, "a")
    HfApi(space.endpoint, space.token).create_tag(repo, tag="v2")
    then = space.admin.head(repo)
    space.admin.put_files(repo, {"later.txt": b"later"})
    for entry in (f"{repo}@v2", f"{space.endpoint}/{repo}/tree/v2"):
        (wanted,) = found(space, f"- repo: {entry}\n")
        assert wanted.error is None and wanted.request is not None
        assert wanted.source is not None and wanted.source.sha == then
        assert str(wanted.request.target) == f"{space.name}/a-cut"


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


@pytest.mark.parametrize(
    ("odd", "code"),
    [
        ({"id": "gpt2"}, "usage.place"),
        ({"id": "a--b/c"}, "usage.place"),
        ({"id": "\x1b/x"}, "usage.place"),
        ({"id": "../../x"}, "usage.place"),
    ],
)
def test_an_odd_model_of_a_list_is_an_error_of_its_own(space: Namespace, odd: dict[str, object], code: str) -> None:
    good = model(space, "good")
    body = json.dumps([odd, {"id": good, "sha": space.admin.head(good), "private": False}])
    space.admin.fault(r"^GET /api/models\?.*downloads", "status", status=200, body=body)
    wanted = found(space, f"- query: {{author: {space.name}}}\n")
    assert {one.repo: one.error and one.error.code for one in wanted} == {odd["id"]: code, good: None}


@pytest.mark.parametrize("odd", [{"id": "gpt2"}, {"sha": None}])
def test_an_odd_model_of_an_owners_list_hides_no_other(space: Namespace, odd: dict[str, object]) -> None:
    first, second = model(space, "first"), model(space, "second")
    listed = [{"id": repo, "sha": space.admin.head(repo), "private": False, "gated": False} for repo in (first, second)]
    space.admin.fault(
        rf"^GET /api/models\?.*author={space.name}",
        "status",
        status=200,
        body=json.dumps([listed[0] | odd, *listed[1:]]),
    )
    wanted = found(space, f"- repo: {first}\n- repo: {second}\n")
    assert [one.source and one.source.sha for one in wanted] == [space.admin.head(first), space.admin.head(second)]


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


def test_one_branch_is_one_target_however_its_hub_is_named(space: Namespace) -> None:
    first, second, target = model(space, "first"), model(space, "second"), space.repo("one")
    wanted = found(
        space,
        f"- {{repo: {first}, to: {target}}}\n- {{repo: {second}, to: {target}, to_endpoint: '{space.endpoint}/'}}\n",
    )
    assert [one.error and one.error.code for one in wanted] == ["usage.collision", "usage.collision"]


def test_two_entries_that_say_the_same_are_one(space: Namespace) -> None:
    good = model(space, "good")
    (one,) = found(space, f"- repo: {good}\n- repo: {good}\n")
    assert one.error is None


def test_requests_that_the_broker_could_not_hold_are_refused_and_those_of_other_entries_count_once(
    space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = "".join(f"- repo: {space.repo(f'm{number}')}\n" for number in range(4))
    request = found(space, entries)[0].request
    assert request is not None
    one = len(request.stored())
    monkeypatch.setattr("reshard.pipeline.catalogs.expand.CATALOG_REQUESTS_MAX", 4 * one)
    assert len(found(space, entries * 2)) == 4
    monkeypatch.setattr("reshard.pipeline.catalogs.expand.CATALOG_REQUESTS_MAX", 4 * one - 1)
    with pytest.raises(BadCatalog, match=f"entries: the requests for its models exceed {4 * one - 1} bytes"):
        found(space, entries)


def test_a_renamed_source_is_found_under_its_old_name(space: Namespace) -> None:
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


# ----------------------------------------------------------------------- what a target says of itself, broker or none


@pytest.fixture
def weights(space: Namespace, tmp_path: Path) -> str:
    """A source with a model in it."""
    save_sharded(tmp_path / "model", numbered(arrays(6, 2000), 2))
    add_friends(tmp_path / "model")
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    space.admin.create_repo(space.repo("m"))
    space.admin.put_files(space.repo("m"), files, lfs=[name for name in files if name.endswith(".safetensors")])
    return space.repo("m")


def one_of(space: Namespace, repo: str, more: str = "") -> Wanted:
    (one,) = found(space, f"- {{repo: {repo}, size: 5kB{more}}}\n")
    return one


def published(space: Namespace, repo: str, meta_loader: MetaLoader, more: str = "") -> Wanted:
    """The model as a catalog wants it, once that is carried out."""
    request = one_of(space, repo, more).request
    assert request is not None
    run(request, Context.from_env(), meta_loader=meta_loader)
    return one_of(space, repo, more)


def target_of(wanted: Wanted) -> str:
    assert wanted.request is not None
    return str(wanted.request.target)


def test_a_target_whose_head_is_our_commit_of_this_request_stands_by_one_call(
    space: Namespace, weights: str, meta_loader: MetaLoader
) -> None:
    assert not stands(one_of(space, weights), Context.from_env()), "it is not there yet"
    one = published(space, weights, meta_loader)
    space.admin.log(reset=True)
    assert stands(one, Context.from_env())
    assert [request["kind"] for request in space.admin.log()] == ["api"]


def test_a_target_stands_for_this_source_commit_and_these_options_alone(
    space: Namespace, weights: str, meta_loader: MetaLoader
) -> None:
    published(space, weights, meta_loader)
    assert not stands(one_of(space, weights, ", dtype: float16"), Context.from_env())
    assert not stands(one_of(space, weights, ", exclude: [LICENSE]"), Context.from_env())
    assert stands(one_of(space, weights, ", visibility: private"), Context.from_env()), "the bytes are the same"
    space.admin.put_files(weights, {"notes.txt": b"new"})
    assert not stands(one_of(space, weights), Context.from_env())


def test_a_target_with_a_commit_of_somebody_else_does_not_stand(
    space: Namespace, weights: str, meta_loader: MetaLoader
) -> None:
    target = target_of(published(space, weights, meta_loader))
    space.admin.put_files(target, {"mine.txt": b"mine"})
    assert not stands(one_of(space, weights), Context.from_env())


def test_a_target_that_was_rolled_back_does_not_stand(space: Namespace, weights: str, meta_loader: MetaLoader) -> None:
    one = published(space, weights, meta_loader)
    assert one.request is not None and one.target is not None
    context = Context.from_env()
    rollback(open_target(one.request.target, one.request.options, context), one.target.sha)
    assert not stands(one_of(space, weights), context)


def test_a_description_that_only_looks_like_ours_does_not_stand(
    space: Namespace, weights: str, meta_loader: MetaLoader
) -> None:
    target = target_of(published(space, weights, meta_loader))
    api = HfApi(space.endpoint, space.token)
    for told in ("Reshard-Publication: {", 'Reshard-Publication: {"request": "x"}', "Published by reshard."):
        api.upload_file(path_or_fileobj=told.encode(), path_in_repo="mine.txt", repo_id=target, commit_description=told)
        assert not stands(one_of(space, weights), Context.from_env())


@pytest.mark.parametrize("more", [", branch: cut", ", pr: true"])
def test_where_a_list_does_not_show_the_head_nothing_is_asked(space: Namespace, weights: str, more: str) -> None:
    model(space, "m-cut")
    one = one_of(space, weights, more)
    space.admin.log(reset=True)
    assert not stands(one, Context.from_env())
    assert space.admin.log() == []


def test_a_target_that_went_since_it_was_listed_is_left_to_a_job(space: Namespace, weights: str) -> None:
    target = model(space, "m-cut")
    one = one_of(space, weights)
    HfApi(space.endpoint, space.token).delete_repo(target)
    assert not stands(one, Context.from_env())


def test_what_cannot_be_done_in_this_process_is_left_to_a_job(
    space: Namespace, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model(space, "m-cut")
    one = one_of(space, weights, ", transport: xet")
    monkeypatch.setenv("RESHARD_MEMORY_LIMIT", "200MB")  # too little for Xet, and workers may have more
    assert not stands(one, Context.from_env())


def test_a_hub_that_is_away_says_nothing_of_a_target(space: Namespace, weights: str) -> None:
    model(space, "m-cut")
    one = one_of(space, weights)
    space.admin.fault("/commits/", "status", status=503)
    with pytest.raises(HubError):
        stands(one, Context.from_env(lambda budget: Impatient()))


def test_a_public_copy_of_what_is_hidden_is_refused_without_a_job(space: Namespace) -> None:
    hidden, gated = model(space, "hidden", visibility="private"), model(space, "gated", gated="auto")
    for name in ("hidden-cut", "gated-cut"):
        model(space, name)
    refused = found(space, f"- repo: {hidden}\n- repo: {gated}\n")
    assert [one.error and one.error.code for one in refused] == ["target.more_visible", "target.more_visible"]
    model(space, "half-hidden", gated="auto")
    (half,) = found(space, f"- {{repo: {hidden}, to: {space.repo('half-hidden')}}}\n")
    assert half.error is not None and half.error.code == "target.more_visible"
    (same,) = found(space, f"- {{repo: {gated}, to: {space.repo('half-hidden')}}}\n")
    assert same.error is None
    space.admin.create_repo(space.repo("hidden-cut"), visibility="private")
    allowed = found(space, f"- repo: {hidden}\n- {{repo: {gated}, visibility: public}}\n")
    assert [one.error for one in allowed] == [None, None]
