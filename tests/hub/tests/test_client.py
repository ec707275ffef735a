"""What the real client does over plain HTTP and LFS, end to end."""

import json
import subprocess
import threading
from pathlib import Path

import numpy
import pytest
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    HfApi,
    hf_hub_download,
    snapshot_download,
)
from huggingface_hub.errors import (
    BadRequestError,
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from safetensors.numpy import save

from tests.hub import HubAdmin
from tests.hub.fixtures import Namespace

CARD = b"---\nlicense: mit\n---\n# hello\n"
WEIGHTS = numpy.random.default_rng(0).bytes(3_000_001)


def add(path: str, data: bytes) -> CommitOperationAdd:
    return CommitOperationAdd(path, data)


@pytest.fixture
def repo(namespace: Namespace, api: HfApi) -> str:
    """A repo with one commit: a large file in a folder and two regular ones."""
    repo_id = api.create_repo(namespace.repo("model")).repo_id
    operations = [add("sub/weights.safetensors", WEIGHTS), add("config.json", b"{}"), add("README.md", CARD)]
    api.create_commit(repo_id, operations, commit_message="first", commit_description="why")
    return repo_id


def test_a_commit_is_read_back_byte_for_byte(repo: str, api: HfApi, tmp_path: Path) -> None:
    folder = Path(snapshot_download(repo, endpoint=api.endpoint, token=api.token, cache_dir=tmp_path))
    assert (folder / "sub/weights.safetensors").read_bytes() == WEIGHTS
    assert (folder / "config.json").read_bytes() == b"{}"
    assert {p.name for p in folder.rglob("*") if p.is_file()} == {
        ".gitattributes", "README.md", "config.json", "weights.safetensors",
    }  # fmt: skip


def test_large_objects_go_up_in_parts(repo: str, api: HfApi, hub: HubAdmin) -> None:
    hub.settings(lfs_multipart_threshold=1_000_000, lfs_part_size=400_000)
    data = WEIGHTS[::-1]
    api.create_commit(repo, [add("big.bin", data)], commit_message="parts")
    parts = [entry for entry in hub.log() if "/parts/" in entry["path"]]
    assert [entry["up"] for entry in parts] == [400_000] * 7 + [200_001]
    assert hub.read(repo, "big.bin") == data


def test_an_object_that_the_repo_has_is_not_sent_again(repo: str, api: HfApi, hub: HubAdmin) -> None:
    hub.log(reset=True)
    api.create_commit(repo, [add("again.bin", WEIGHTS)], commit_message="same bytes")
    assert not [entry for entry in hub.log() if entry["method"] == "PUT"]
    assert hub.files(repo)["again.bin"]["sha256"] == hub.files(repo)["sub/weights.safetensors"]["sha256"]


def test_a_folder_goes_up_in_one_commit(repo: str, api: HfApi, hub: HubAdmin, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "model.bin").write_bytes(WEIGHTS)
    (tmp_path / "sub/notes.txt").write_text("text")
    before = hub.state(repo)["commits"]
    api.upload_folder(repo_id=repo, folder_path=tmp_path)
    assert hub.state(repo)["commits"] == before + 1
    assert hub.read(repo, "sub/notes.txt") == b"text"


def test_preupload_names_what_is_there_so_that_nothing_is_committed_twice(repo: str, api: HfApi, hub: HubAdmin) -> None:
    head = hub.head(repo)
    operations = [add("sub/weights.safetensors", WEIGHTS), add("config.json", b"{}")]
    assert api.create_commit(repo, operations, commit_message="again").oid == head


def test_gitignore_keeps_files_out(repo: str, api: HfApi, hub: HubAdmin, tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*.tmp\nlogs/\n!keep.tmp\n")
    (tmp_path / "logs").mkdir()
    for name in ("a.tmp", "keep.tmp", "b.txt", "logs/c.txt"):
        (tmp_path / name).write_text("x")
    api.upload_folder(repo_id=repo, folder_path=tmp_path)
    assert set(hub.files(repo)) >= {"keep.tmp", "b.txt"}
    assert not set(hub.files(repo)) & {"a.tmp", "logs/c.txt"}


def test_a_large_file_that_gitattributes_does_not_know_is_added_to_it(repo: str, api: HfApi, hub: HubAdmin) -> None:
    api.create_commit(repo, [add("blob.xyz", b"\0" * 1000)], commit_message="binary")
    assert hub.files(repo)["blob.xyz"]["lfs"]
    assert b"blob.xyz filter=lfs" in hub.read(repo, ".gitattributes")


def test_files_and_folders_are_deleted(repo: str, api: HfApi, hub: HubAdmin) -> None:
    operations = [CommitOperationDelete("sub/"), CommitOperationDelete("config.json")]
    api.create_commit(repo, operations, commit_message="delete")
    assert set(hub.files(repo)) == {".gitattributes", "README.md"}
    with pytest.raises(EntryNotFoundError, match="doesn't exist"):
        api.create_commit(repo, [CommitOperationDelete("config.json")], commit_message="again")


def test_a_large_file_is_copied_without_its_bytes(repo: str, api: HfApi, hub: HubAdmin) -> None:
    hub.log(reset=True)
    operations = [
        CommitOperationCopy("sub/weights.safetensors", "copy.safetensors"),
        CommitOperationCopy("config.json", "b/config.json"),
    ]
    api.create_commit(repo, operations, commit_message="copy")
    assert hub.read(repo, "copy.safetensors") == WEIGHTS
    assert hub.read(repo, "b/config.json") == b"{}"
    assert hub.totals()["lfs"]["up"] == 0


def test_a_stale_parent_is_refused(repo: str, api: HfApi, hub: HubAdmin) -> None:
    parent = hub.head(repo)
    head = api.create_commit(repo, [add("a.txt", b"a")], commit_message="one", parent_commit=parent).oid
    with pytest.raises(HfHubHTTPError) as refused:
        api.create_commit(repo, [add("b.txt", b"b")], commit_message="two", parent_commit=parent)
    assert refused.value.response.status_code == 412
    assert "A commit has happened since" in str(refused.value)
    assert hub.head(repo) == head


def test_of_concurrent_commits_on_one_parent_exactly_one_wins(repo: str, api: HfApi, hub: HubAdmin) -> None:
    parent, outcomes = hub.head(repo), []

    def commit(n: int) -> None:
        try:
            api.create_commit(repo, [add(f"{n}.txt", b"x")], commit_message=f"{n}", parent_commit=parent)
            outcomes.append(200)
        except HfHubHTTPError as error:
            outcomes.append(error.response.status_code)

    threads = [threading.Thread(target=commit, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [200] + [412] * 7


def test_an_object_that_was_never_sent_cannot_be_committed(repo: str, api: HfApi, hub: HubAdmin) -> None:
    operation = add("ghost.bin", b"\0ghost")
    operation._upload_mode, operation._is_uploaded, operation._should_ignore = "lfs", True, False
    with pytest.raises(BadRequestError, match="LFS pointer pointed to a file that does not exist"):
        api.create_commit(repo, [operation], commit_message="ghost")


def test_history_is_listed_newest_first_and_paged(repo: str, api: HfApi, hub: HubAdmin) -> None:
    hub.settings(commits_page=2)
    for n in range(4):
        api.create_commit(repo, [add("n.txt", b"%d" % n)], commit_message=f"commit {n}", commit_description=f"text {n}")
    commits = api.list_repo_commits(repo)
    expected = ["commit 3", "commit 2", "commit 1", "commit 0", "first", "initial commit"]
    assert [commit.title for commit in commits] == expected
    assert commits[0].message == "text 3"
    assert commits[0].commit_id == hub.head(repo)


def test_trees_are_paged_and_have_directories(repo: str, api: HfApi, hub: HubAdmin) -> None:
    hub.put_files(repo, {f"many/{n:04}/f.txt": b"x" for n in range(600)})
    hub.log(reset=True)
    tree = list(api.list_repo_tree(repo, "many", recursive=True))
    assert len(tree) == 1200
    assert len([entry for entry in hub.log() if "/tree/" in entry["path"]]) == 2
    assert [item.path for item in api.list_repo_tree(repo)] == [
        ".gitattributes", "README.md", "config.json", "many", "sub",
    ]  # fmt: skip
    with pytest.raises(EntryNotFoundError):
        list(api.list_repo_tree(repo, "nowhere"))


def test_object_ids_are_those_of_git(repo: str, api: HfApi, hub: HubAdmin, tmp_path: Path) -> None:
    files = {"a/b/c.txt": b"c", "a/b.txt": b"b", "a.txt": b"a", "a-b/x.txt": b"x"}
    hub.put_files(repo, files)

    def git(*arguments: str) -> list[str]:
        command = ["git", "-C", str(tmp_path), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()

    git("init", "--quiet")
    for path, data in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    git("add", ".")
    tree = git("write-tree")[0]
    expected = {path: git("rev-parse", f"{tree}:{path}")[0] for path in [*files, "a", "a/b", "a-b"]}
    found = {item.path: item for item in api.get_paths_info(repo, list(expected))}
    assert {
        path: item.blob_id if isinstance(item, RepoFile) else item.tree_id for path, item in found.items()
    } == expected
    info = {sibling.rfilename: sibling for sibling in api.model_info(repo, files_metadata=True).siblings or []}
    assert info["a.txt"].blob_id == expected["a.txt"]
    lfs = info["sub/weights.safetensors"].lfs
    assert lfs and lfs.size == len(WEIGHTS) and lfs.pointer_size == 132


def test_paths_info_leaves_out_what_is_missing(repo: str, api: HfApi) -> None:
    found = api.get_paths_info(repo, ["config.json", "sub", "nope"], expand=True)
    assert [item.path for item in found] == ["config.json", "sub"]
    assert found[0].last_commit and found[0].last_commit.title == "first"


def test_branches_and_tags(repo: str, api: HfApi, hub: HubAdmin) -> None:
    api.create_branch(repo, branch="next/one")
    api.create_commit(repo, [add("a.txt", b"a")], commit_message="on a branch", revision="next/one")
    api.create_tag(repo, tag="v1", revision="next/one")
    refs = api.list_repo_refs(repo)
    assert [branch.name for branch in refs.branches] == ["main", "next/one"]
    assert refs.tags[0].target_commit == refs.branches[1].target_commit
    assert "a.txt" in hub.files(repo, "v1") and "a.txt" not in hub.files(repo)
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_branch(repo, branch="next/one")
    with pytest.raises(RevisionNotFoundError):
        api.create_commit(repo, [add("b.txt", b"b")], commit_message="a tag does not move", revision="v1")
    api.delete_branch(repo, branch="next/one")
    api.delete_tag(repo, tag="v1")
    assert [branch.name for branch in api.list_repo_refs(repo).branches] == ["main"]


def test_a_pull_request_made_by_a_commit_is_merged(repo: str, api: HfApi, hub: HubAdmin) -> None:
    made = api.create_commit(repo, [add("new.txt", b"new")], commit_message="A proposal", create_pr=True)
    assert made.pr_num == 1 and made.pr_revision == "refs/pr/1"
    assert "new.txt" not in hub.files(repo)
    api.create_commit(repo, [add("more.txt", b"more")], commit_message="more", revision="refs/pr/1")
    details = api.get_discussion_details(repo, 1)
    assert details.status == "open" and details.conflicting_files == [] and "+new" in (details.diff or "")
    assert [event.type for event in details.events] == ["comment", "commit", "commit"]
    api.merge_pull_request(repo, 1)
    assert {"new.txt", "more.txt"} <= set(hub.files(repo))
    merged = api.get_discussion_details(repo, 1)
    assert merged.status == "merged" and merged.merge_commit_oid == hub.head(repo)
    assert api.list_repo_commits(repo)[0].title == "A proposal (#1)"


def test_a_pull_request_is_opened_first_and_filled_with_a_parent(repo: str, api: HfApi, hub: HubAdmin) -> None:
    opened = api.create_pull_request(repo, "Later", description="key: 1")
    assert opened.status == "draft" and opened.git_reference == "refs/pr/1"
    parent = (api.list_repo_refs(repo, include_pull_requests=True).pull_requests or [])[0].target_commit
    operations = [add("x.txt", b"x")]
    api.create_commit(repo, operations, commit_message="x", revision="refs/pr/1", parent_commit=parent)
    with pytest.raises(HfHubHTTPError, match="412"):
        api.create_commit(repo, [add("y.txt", b"y")], commit_message="y", revision="refs/pr/1", parent_commit=parent)
    api.change_discussion_status(repo, 1, "closed")
    assert api.get_discussion_details(repo, 1).status == "closed"


def test_a_conflicting_pull_request_is_not_merged(repo: str, api: HfApi) -> None:
    api.create_commit(repo, [add("config.json", b'{"a": 1}')], commit_message="theirs", create_pr=True)
    api.create_commit(repo, [add("config.json", b'{"b": 1}')], commit_message="ours")
    assert api.get_discussion_details(repo, 1).conflicting_files == ["config.json"]
    with pytest.raises(HfHubHTTPError, match="409"):
        api.merge_pull_request(repo, 1)


def test_discussions_are_paged_and_filtered_by_author(repo: str, api: HfApi, hub: HubAdmin) -> None:
    hub.settings(discussions_page=2)
    other = HfApi(endpoint=api.endpoint, token=hub.create_user(f"{repo.split('/')[0]}-guest").token)
    for n in range(5):
        api.create_pull_request(repo, f"mine {n}")
    other.create_pull_request(repo, "theirs")
    other.create_discussion(repo, "a question")
    mine = api.get_repo_discussions(repo, author=repo.split("/")[0], discussion_type="pull_request")
    assert [discussion.num for discussion in mine] == [5, 4, 3, 2, 1]
    hub.settings(discussions_by_author=False)
    everybodys = api.get_repo_discussions(repo, author=repo.split("/")[0])
    assert {discussion.author for discussion in everybodys} > {repo.split("/")[0]}
    assert [d.title for d in api.get_repo_discussions(repo, discussion_type="discussion")] == ["a question"]


def test_headers_of_safetensors_are_read_by_range(namespace: Namespace, api: HfApi, hub: HubAdmin) -> None:
    repo_id = namespace.repo("tensors")
    hub.create_repo(repo_id)
    tensors = {f"layer.{n}.weight": numpy.zeros((2, 2), numpy.float32) for n in range(2000)}
    hub.put_files(repo_id, {"model.safetensors": save(tensors)}, lfs=["model.safetensors"])
    metadata = api.get_safetensors_metadata(repo_id)
    assert set(metadata.weight_map) == set(tensors)
    assert hub.totals()["cdn"]["down"] < 300_000
    shards = {"a.safetensors": save({"x": tensors["layer.0.weight"]}), "b.safetensors": save({"y": numpy.zeros(3)})}
    index = {"metadata": {"total_size": 40}, "weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    hub.put_files(
        repo_id,
        {**shards, "model.safetensors.index.json": json.dumps(index).encode()},
        lfs=list(shards),
        delete=["model.safetensors"],
    )
    assert api.get_safetensors_metadata(repo_id).weight_map == index["weight_map"]


def test_a_missing_file_repo_or_revision_is_told_apart(repo: str, api: HfApi, tmp_path: Path) -> None:
    def fetch(repo_id: str, name: str, revision: str) -> None:
        hf_hub_download(repo_id, name, revision=revision, endpoint=api.endpoint, token=api.token, cache_dir=tmp_path)

    with pytest.raises(EntryNotFoundError):
        fetch(repo, "nope.json", "main")
    with pytest.raises(RevisionNotFoundError):
        fetch(repo, "config.json", "nope")
    with pytest.raises(RepositoryNotFoundError):
        fetch(f"{repo}-not", "config.json", "main")


def test_a_renamed_repo_redirects_from_its_old_name(repo: str, api: HfApi, hub: HubAdmin, tmp_path: Path) -> None:
    new = f"{repo}-renamed"
    api.move_repo(repo, new)
    assert api.model_info(repo).id == new
    path = hf_hub_download(repo, "sub/weights.safetensors", endpoint=api.endpoint, token=api.token, cache_dir=tmp_path)
    assert Path(path).read_bytes() == WEIGHTS
    api.create_commit(repo, [add("a.txt", b"a")], commit_message="through the old name")
    assert "a.txt" in hub.files(new)


def test_squashing_leaves_one_commit_and_the_same_files(repo: str, api: HfApi, hub: HubAdmin) -> None:
    before = hub.files(repo)
    api.super_squash_history(repo)
    assert len(api.list_repo_commits(repo)) == 1
    assert hub.files(repo) == before


def test_what_was_squashed_is_readable_by_its_id_until_it_is_forgotten(repo: str, api: HfApi, hub: HubAdmin) -> None:
    pinned, kept = hub.head(repo), hub.files(repo)
    first = api.list_repo_commits(repo)[-1].commit_id
    api.create_branch(repo, branch="old", revision=first)
    api.super_squash_history(repo)
    assert api.model_info(repo, revision=pinned).sha == pinned
    assert pinned in hub.forget_commits(repo)
    with pytest.raises(RevisionNotFoundError):
        api.model_info(repo, revision=pinned)
    assert api.model_info(repo, revision="old").sha == first
    assert hub.files(repo) == kept


def test_models_are_listed_searched_and_projected(namespace: Namespace, api: HfApi, hub: HubAdmin) -> None:
    for n, name in enumerate(("alpha-7b", "beta-7b", "gamma")):
        hub.create_repo(namespace.repo(name), downloads=n, gated="auto" if n == 1 else False)
    card = b"---\nlicense: mit\ntags: [moe]\n---\n# gamma\n"
    hub.put_files(namespace.repo("gamma"), {"README.md": card})
    hub.settings(models_page=2)
    names = [info.id.split("/")[1] for info in api.list_models(author=namespace.name, sort="downloads")]
    assert names == ["gamma", "beta-7b", "alpha-7b"]
    assert [m.id for m in api.list_models(author=namespace.name, search="7B", limit=1)] == [namespace.repo("alpha-7b")]
    assert [m.id for m in api.list_models(author=namespace.name, filter=["moe", "license:mit"])] == [
        namespace.repo("gamma")
    ]
    assert not list(api.list_models(author=namespace.name, filter="no-such-tag"))
    (gated,) = api.list_models(author=namespace.name, gated=True, expand=["sha", "gated", "siblings", "lastModified"])
    assert gated.gated == "auto" and gated.sha == hub.head(namespace.repo("beta-7b"))
    assert [sibling.rfilename for sibling in gated.siblings or []] == [".gitattributes"]


def test_a_collection_is_read(namespace: Namespace, api: HfApi, hub: HubAdmin) -> None:
    slug = f"{namespace.name}/mine-0123456789abcdef01234567"
    hub.create_collection(slug, [namespace.repo("a"), namespace.repo("b")])
    items = api.get_collection(slug).items
    assert [(item.item_id, item.item_type) for item in items] == [
        (namespace.repo("a"), "model"), (namespace.repo("b"), "model"),
    ]  # fmt: skip


def test_a_card_with_broken_metadata_is_refused(repo: str, api: HfApi) -> None:
    with pytest.raises(ValueError, match="Invalid metadata in README"):
        api.create_commit(repo, [add("README.md", b"---\na: [\n---\n")], commit_message="card")


def test_a_repo_is_created_once_and_deleted(namespace: Namespace, api: HfApi) -> None:
    repo_id = namespace.repo("twice")
    api.create_repo(repo_id, private=True)
    assert api.create_repo(repo_id, exist_ok=True).repo_id == repo_id
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_repo(repo_id)
    assert api.model_info(repo_id).private
    api.update_repo_settings(repo_id, visibility="public", gated="manual")
    info = api.model_info(repo_id)
    assert not info.private and info.gated == "manual"
    api.delete_repo(repo_id)
    assert not api.repo_exists(repo_id)
    api.delete_repo(repo_id, missing_ok=True)


def test_a_repo_is_duplicated_with_its_history(repo: str, api: HfApi, hub: HubAdmin) -> None:
    api.create_tag(repo, tag="v1")
    api.duplicate_repo(repo, f"{repo}-twin")
    assert hub.state(repo)["refs"] == hub.state(f"{repo}-twin")["refs"]
    assert hub.read(f"{repo}-twin", "sub/weights.safetensors") == WEIGHTS


def test_datasets_live_beside_models(namespace: Namespace, api: HfApi, hub: HubAdmin, tmp_path: Path) -> None:
    repo_id = api.create_repo(namespace.repo("model"), repo_type="dataset").repo_id
    operations = [add("data.parquet", WEIGHTS)]
    api.create_commit(repo_id, operations, commit_message="data", repo_type="dataset")
    path = hf_hub_download(
        repo_id, "data.parquet", repo_type="dataset", endpoint=api.endpoint, token=api.token, cache_dir=tmp_path
    )
    assert Path(path).read_bytes() == WEIGHTS
    assert not api.repo_exists(repo_id)
