"""Who may see and change what, as the exceptions of the real client."""

from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, hf_hub_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from tests.hub import HubAdmin
from tests.hub.fixtures import Namespace


@pytest.fixture
def repo(namespace: Namespace, hub: HubAdmin) -> str:
    """A public repo with a large and a regular file."""
    repo_id = namespace.repo("model")
    hub.create_repo(repo_id)
    files = {"weights.safetensors": b"w" * 1000, "config.json": b"{}", "README.md": b"hello"}
    hub.put_files(repo_id, files, lfs=["weights.safetensors"])
    return repo_id


@pytest.fixture
def stranger(namespace: Namespace, hub: HubAdmin) -> HfApi:
    """Another user, with a token that writes."""
    return HfApi(endpoint=hub.endpoint, token=hub.create_user(f"{namespace.name}-stranger").token)


@pytest.fixture
def nobody(hub: HubAdmin) -> HfApi:
    """A caller without a token."""
    return HfApi(endpoint=hub.endpoint, token=False)


def commit(api: HfApi, repo: str) -> None:
    api.create_commit(repo, [CommitOperationAdd("new.txt", b"new")], commit_message="new")


def status_of(action: Callable[[], object]) -> int:
    with pytest.raises(HfHubHTTPError) as refused:
        action()
    return refused.value.response.status_code


def test_a_private_repo_does_not_exist_for_others(
    repo: str, hub: HubAdmin, api: HfApi, stranger: HfApi, nobody: HfApi, tmp_path: Path
) -> None:
    hub.create_repo(repo, visibility="private")
    assert api.model_info(repo).private
    for other in (stranger, nobody):
        with pytest.raises(RepositoryNotFoundError):
            other.model_info(repo)
        with pytest.raises(RepositoryNotFoundError):
            hf_hub_download(repo, "config.json", endpoint=hub.endpoint, token=other.token, cache_dir=tmp_path)
        with pytest.raises(RepositoryNotFoundError):
            commit(other, repo)
        assert not list(other.list_models(author=repo.split("/")[0]))
    assert len(list(api.list_models(author=repo.split("/")[0]))) == 1


def test_a_gated_repo_shows_its_tree_and_card_but_not_its_files(
    repo: str, hub: HubAdmin, api: HfApi, stranger: HfApi, nobody: HfApi, tmp_path: Path
) -> None:
    def fetch(caller: HfApi, name: str) -> str:
        return hf_hub_download(repo, name, endpoint=hub.endpoint, token=caller.token, cache_dir=tmp_path)

    hub.create_repo(repo, gated="manual")
    for other in (stranger, nobody):
        assert {item.path for item in other.list_repo_tree(repo)} >= {"weights.safetensors"}
        assert Path(fetch(other, "README.md")).read_bytes() == b"hello"
        for name in ("weights.safetensors", "config.json"):
            with pytest.raises(GatedRepoError):
                fetch(other, name)
        with pytest.raises(GatedRepoError):
            other.auth_check(repo)
    api.auth_check(repo, write=True)
    hub.create_repo(repo, granted=[stranger.whoami()["name"]])
    assert Path(fetch(stranger, "weights.safetensors")).read_bytes() == b"w" * 1000


def test_a_token_writes_only_where_its_user_may(repo: str, hub: HubAdmin, stranger: HfApi, nobody: HfApi) -> None:
    head = hub.head(repo)
    assert status_of(lambda: commit(stranger, repo)) == 403
    assert status_of(lambda: commit(nobody, repo)) == 401
    assert status_of(lambda: stranger.create_repo(f"{repo}-2")) == 403
    assert status_of(lambda: stranger.delete_repo(repo)) == 403
    assert status_of(lambda: stranger.create_branch(repo, branch="b")) == 403
    assert status_of(lambda: stranger.auth_check(repo, write=True)) == 403
    assert hub.head(repo) == head


def test_a_reading_token_of_the_owner_does_not_write(repo: str, hub: HubAdmin, namespace: Namespace) -> None:
    reader = HfApi(endpoint=hub.endpoint, token=hub.create_token(namespace.name, "read"))
    hub.create_repo(repo, visibility="private")
    assert reader.model_info(repo).private
    assert status_of(lambda: commit(reader, repo)) == 403


def test_a_fine_grained_token_reaches_only_its_scopes(repo: str, hub: HubAdmin, namespace: Namespace) -> None:
    other = namespace.repo("other")
    for name in (repo, other):
        hub.create_repo(name, visibility="private")
    token = hub.create_token(namespace.name, "fineGrained", scopes={repo: "write"})
    api = HfApi(endpoint=hub.endpoint, token=token)
    commit(api, repo)
    with pytest.raises(RepositoryNotFoundError):
        api.model_info(other)
    scoped = api.whoami()["auth"]["accessToken"]["fineGrained"]["scoped"]
    assert [scope["entity"]["name"] for scope in scoped] == [repo]


def test_members_of_an_organisation_write_by_their_role(hub: HubAdmin, namespace: Namespace, stranger: HfApi) -> None:
    org = f"{namespace.name}-org"
    hub.create_org(org, {namespace.name: "write", stranger.whoami()["name"]: "read"})
    writer = HfApi(endpoint=hub.endpoint, token=namespace.token)
    writer.create_repo(f"{org}/model", private=True)
    assert stranger.model_info(f"{org}/model").private
    assert status_of(lambda: commit(stranger, f"{org}/model")) == 403
    assert [member["name"] for member in writer.whoami()["orgs"]] == [org]


def test_a_stranger_proposes_a_pull_request_and_cannot_merge_it(
    repo: str, hub: HubAdmin, stranger: HfApi, lfs: None
) -> None:
    operations = [CommitOperationAdd("new.safetensors", b"\0" * 5000)]
    made = stranger.create_commit(repo, operations, commit_message="proposal", create_pr=True)
    assert made.pr_revision == "refs/pr/1"
    operations = [CommitOperationAdd("more.txt", b"more")]
    stranger.create_commit(repo, operations, commit_message="more", revision="refs/pr/1")
    assert status_of(lambda: stranger.merge_pull_request(repo, 1)) == 403
    assert hub.files(repo, "refs/pr/1")["new.safetensors"]["size"] == 5000


def test_an_unknown_or_revoked_token_is_refused(hub: HubAdmin, namespace: Namespace) -> None:
    with pytest.raises(HfHubHTTPError, match="Invalid user token"):
        HfApi(endpoint=hub.endpoint, token="hf_wrong").whoami()
    hub.revoke_token(namespace.token)
    assert status_of(lambda: HfApi(endpoint=hub.endpoint, token=namespace.token).list_repo_refs("a/b")) == 401


def test_an_object_of_another_repo_is_named_only_after_a_copy(
    repo: str, hub: HubAdmin, api: HfApi, stranger: HfApi
) -> None:
    """Knowing the sha256 of a private file must not be enough to get it."""
    hub.create_repo(repo, visibility="private")
    thief = stranger.create_repo(f"{stranger.whoami()['name']}/copy").repo_id
    for caller, target, expected in ((stranger, thief, 400), (api, repo, None)):
        operation = CommitOperationAdd("stolen.bin", b"w" * 1000)
        operation._upload_mode, operation._is_uploaded, operation._should_ignore = "lfs", True, False

        def attempt(caller: HfApi = caller, target: str = target, operation: CommitOperationAdd = operation) -> None:
            caller.create_commit(target, [operation], commit_message="by hash")

        if expected:
            assert status_of(attempt) == expected
        else:
            attempt()


def test_signed_urls_expire(repo: str, hub: HubAdmin, api: HfApi, tmp_path: Path) -> None:
    hub.settings(cdn_lifetime=-2)
    with pytest.raises(HfHubHTTPError, match="403"):
        hf_hub_download(repo, "weights.safetensors", endpoint=hub.endpoint, token=api.token, cache_dir=tmp_path)


def test_full_storage_refuses_uploads_in_the_hubs_words(repo: str, hub: HubAdmin, api: HfApi) -> None:
    operations = [CommitOperationAdd("new.safetensors", b"\0" * 5000)]
    hub.settings(storage_full=[repo.split("/")[0]])
    with pytest.raises(HfHubHTTPError, match="403 Forbidden: Your storage patterns tripped"):
        api.create_commit(repo, operations, commit_message="too much")
    hub.create_repo(repo, visibility="private")
    operations = [CommitOperationAdd("new.safetensors", b"\0" * 5000)]
    with pytest.raises(HfHubHTTPError, match="Private repository storage limit reached"):
        api.create_commit(repo, operations, commit_message="too much")


def test_requests_beyond_the_budget_are_told_when_to_return(repo: str, hub: HubAdmin, namespace: Namespace) -> None:
    api = HfApi(endpoint=hub.endpoint, token=namespace.token)
    hub.settings(rate_limits={"api": {"quota": 3, "window": 300}, "resolvers": {"quota": 1, "window": 300}})
    for _ in range(3):
        api.model_info(repo)
    with pytest.raises(HfHubHTTPError, match=r"reached your 'api' rate limit.\nRetry after (300|299) seconds \(0/3"):
        api.model_info(repo)
    HfApi(endpoint=hub.endpoint, token=hub.create_token(namespace.name)).model_info(repo)
