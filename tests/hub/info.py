"""Read-only answers about repos: info, trees, refs, history, listings, collections, cards."""

import json
import struct
from functools import cache
from typing import Any
from urllib.parse import parse_qs

import yaml

from .call import Call
from .errors import HubError, bad_request, entry_not_found
from .git import Commit, Entry, Tree, directory_oids
from .repo import MAIN, Repo
from .resolve import read_range
from .wire import Response, json_response

SORTS = {"lastModified", "createdAt", "downloads", "likes", "trendingScore"}
LIST_FIELDS = (
    "_id",
    "id",
    "modelId",
    "likes",
    "private",
    "downloads",
    "tags",
    "pipeline_tag",
    "library_name",
    "createdAt",
)
FULL_FIELDS = (*LIST_FIELDS, "author", "lastModified", "sha", "siblings", "gated", "disabled")


def whoami(call: Call) -> Response:
    return json_response(call.hub.accounts.whoami(call.token))


def auth_check(call: Call) -> Response:
    if status := call.hub.settings.auth_check_status:
        raise HubError(status, "Not Found")
    repo = call.writable_repo() if call.params.get("write") else call.readable_repo()
    return json_response({"id": repo.id})


def repo_info(call: Call) -> Response:
    repo = call.repo()
    commit = repo.resolve(call.params.get("rev") or "main")
    info = describe(call, repo, commit, blobs=call.request.arg("blobs") in ("1", "true", "True"))
    if expand := call.request.args("expand"):
        info = project(info, expand)
    if call.hub.settings.short_sha and "rev" not in call.params and "sha" in info:
        info["sha"] = commit[: call.hub.settings.short_sha]
    return json_response(info, headers={"X-Repo-Commit": commit})


def describe(call: Call, repo: Repo, commit: str, blobs: bool = False) -> dict[str, Any]:
    """All that is known of a repo at a commit."""
    tree = repo.tree(commit)
    card = card_data(call, tree)
    tags = [tag for tag in card.get("tags") or [] if isinstance(tag, str)]
    tags += [card[name] for name in ("library_name", "pipeline_tag") if card.get(name)]
    tags += [f"license:{card['license']}"] if card.get("license") else []
    bases = card.get("base_model") or []
    tags += [f"base_model:{base}" for base in ([bases] if isinstance(bases, str) else bases)]
    tags += ["safetensors"] if any(path.endswith(".safetensors") for path in tree) else []
    return {
        "_id": repo.uid, "id": repo.id, "modelId": repo.id, "author": repo.id.split("/")[0], "sha": commit,
        "lastModified": repo.commits[commit].date, "createdAt": repo.created_at, "private": repo.private,
        "gated": repo.settings.gated, "disabled": False, "downloads": repo.settings.downloads,
        "likes": repo.settings.likes, "trendingScore": repo.settings.likes, "tags": list(dict.fromkeys(tags)),
        "pipeline_tag": card.get("pipeline_tag"), "library_name": card.get("library_name"), "cardData": card or None,
        "siblings": [sibling(path, tree[path], blobs) for path in sorted(tree)],
        "usedStorage": sum(repo.objects.values()), "spaces": [],
    }  # fmt: skip


def project(info: dict[str, Any], names: list[str] | tuple[str, ...]) -> dict[str, Any]:
    return {name: info[name] for name in ("_id", "id", *names) if name in info}


def sibling(path: str, entry: Entry, blobs: bool) -> dict[str, Any]:
    """``lfs`` names its digest ``sha256`` here, and ``oid`` in trees."""
    if not blobs:
        return {"rfilename": path}
    value: dict[str, Any] = {"rfilename": path, "blobId": entry.oid, "size": entry.size}
    if entry.sha256:
        value["lfs"] = {"sha256": entry.sha256, "size": entry.size, "pointerSize": entry.pointer_size}
    return value


def card_data(call: Call, tree: Tree) -> dict[str, Any]:
    """The metadata at the head of README.md; nothing if there is none or it is not valid."""
    readme = tree.get("README.md")
    if readme is None or readme.sha256:
        return {}
    try:
        return front_matter(call.hub.read(readme).decode("utf-8", "replace")) or {}
    except ValueError:
        return {}


def front_matter(text: str) -> dict[str, Any] | None:
    """The YAML between the two ``---`` lines at the start; None without it; ValueError if it is not a mapping."""
    lines = text.splitlines()
    if not lines or lines[0].strip() != "---" or "---" not in [line.strip() for line in lines[1:]]:
        return None
    end = [line.strip() for line in lines[1:]].index("---") + 1
    try:
        value = yaml.safe_load("\n".join(lines[1:end]))
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    if not isinstance(value, dict):
        raise ValueError("the metadata is not a mapping")
    plain: dict[str, Any] = json.loads(json.dumps(value, default=str))  # dates become strings
    return plain


def validate_yaml(call: Call) -> Response:
    try:
        card = front_matter(call.json()["content"])
    except ValueError as error:
        return json_response({"error": "Invalid metadata", "errors": [{"message": str(error)}], "warnings": []}, 400)
    warnings = [] if card else [{"message": "empty or missing yaml metadata in repo card"}]
    return json_response({"errors": [], "warnings": warnings})


def list_repos(call: Call) -> Response:
    """Visible repos of one kind: author, search, filter (tags), gated; sort, limit, expand or full."""
    argument = call.request.arg
    accounts = call.hub.accounts
    author, search = argument("author"), (argument("search") or "").lower()

    @cache
    def described(repo: Repo) -> dict[str, Any]:
        return describe(call, repo, repo.refs[MAIN])

    with call.hub.lock:
        repos = [r for (kind, _), r in sorted(call.hub.repos.items()) if kind == call.kind]
    found = []
    wanted = {tag for value in call.request.args("filter") for tag in value.split(",")}
    for repo in repos:
        if repo.private and not accounts.may_read(call.token, repo.id):
            continue
        if (author and repo.id.split("/")[0] != author) or search not in repo.id.lower() or MAIN not in repo.refs:
            continue
        if (gated := argument("gated")) and (gated.lower() == "true") != bool(repo.settings.gated):
            continue
        if wanted and not wanted <= set(described(repo)["tags"]):
            continue
        found.append(repo)
    if sort := argument("sort"):
        if sort not in SORTS:
            raise bad_request(f"cannot sort by {sort}")
        found.sort(key=lambda repo: described(repo)[sort], reverse=argument("direction") != "1")
    expand, full = call.request.args("expand"), argument("full") or argument("cardData")
    names = expand or ((*FULL_FIELDS, "cardData") if full else LIST_FIELDS)
    limit = int(argument("limit") or call.hub.settings.models_page)
    return call.page(found, limit, lambda repo: project(described(repo), names))


def collection(call: Call) -> Response:
    value = call.hub.collections.get(call.params["slug"])
    if value is None or (value["private"] and call.user != value["owner"]["name"]):
        raise HubError(404, "Collection not found")
    return json_response(value)


def tree(call: Call) -> Response:
    repo = call.repo()
    commit = repo.resolve(call.params["rev"])
    files = repo.tree(commit)
    folder = (call.params.get("path") or "").strip("/")
    prefix = f"{folder}/" if folder else ""
    recursive = call.request.arg("recursive") in ("true", "True", "1")
    directories = directory_oids(files)
    if folder and folder not in directories:
        raise entry_not_found(f'"{folder}" does not exist on "{call.params["rev"]}"', commit)
    paths = [path for path in files if path.startswith(prefix)]
    paths += [path for path in directories if path.startswith(prefix) and path not in ("", folder)]
    if not recursive:
        paths = [path for path in paths if "/" not in path[len(prefix) :]]
    expand = call.request.arg("expand") in ("true", "True", "1")
    limit = int(call.request.arg("limit") or call.hub.settings.tree_page)
    items = [item(call, repo, commit, files, directories, path, expand) for path in sorted(paths)]
    return call.page(items, limit)


def paths_info(call: Call) -> Response:
    repo = call.repo()
    commit = repo.resolve(call.params["rev"])
    files = repo.tree(commit)
    directories = directory_oids(files)
    form = form_values(call)
    paths = [path.strip("/") for path in form["paths"]]
    expand = form["expand"] == ["true"] or form["expand"] == ["True"]
    known = [path for path in paths if path in files or path in directories]
    return json_response([item(call, repo, commit, files, directories, path, expand) for path in known])


def form_values(call: Call) -> dict[str, list[str]]:
    """The body as JSON or as a form, whichever the client sent."""
    data = call.request.body.read()
    if "json" in call.request.headers.get("content-type", ""):
        values = json.loads(data)
        return {"paths": values.get("paths", []), "expand": [str(values.get("expand", False))]}
    form = parse_qs(data.decode())
    return {"paths": form.get("paths", []), "expand": form.get("expand", [])}


def item(
    call: Call, repo: Repo, commit: str, files: Tree, directories: dict[str, str], path: str, expand: bool
) -> dict[str, Any]:
    """A tree's line about a file or a directory."""
    entry = files.get(path)
    value: dict[str, Any]
    if entry is None:
        value = {"type": "directory", "oid": directories[path], "size": 0, "path": path}
    else:
        value = {"type": "file", "oid": entry.oid, "size": entry.size, "path": path}
        if entry.sha256:
            value["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": entry.pointer_size}
            if entry.sha256 in repo.xet and call.hub.settings.xet:
                value["xetHash"] = repo.xet[entry.sha256]
    if expand:
        last = last_commit(repo, commit, path)
        value["lastCommit"] = {"id": last.oid, "title": last.title, "date": last.date}
    return value


def last_commit(repo: Repo, commit: str, path: str) -> Commit:
    """The newest commit that changed the path or something under it."""
    for candidate in repo.history(commit):
        if any(changed == path or changed.startswith(f"{path}/") for changed in candidate.changes):
            return candidate
    raise entry_not_found(f"{path} is not in the history of {commit}")


def refs(call: Call) -> Response:
    repo = call.repo()

    def under(prefix: str) -> list[dict[str, str]]:
        return [
            {"name": ref.removeprefix(prefix), "ref": ref, "targetCommit": oid}
            for ref, oid in sorted(repo.refs.items())
            if ref.startswith(prefix)
        ]

    value = {"branches": under("refs/heads/"), "converts": [], "tags": under("refs/tags/")}
    if call.request.arg("include_prs"):
        value["pullRequests"] = [{**ref, "name": ref["ref"]} for ref in under("refs/pr/")]
    return json_response(value)


def commits(call: Call) -> Response:
    repo = call.repo()
    formatted = "formatted" in call.request.args("expand")
    history = []
    for commit in repo.history(repo.resolve(call.params["rev"])):
        value: dict[str, Any] = {
            "id": commit.oid, "title": commit.title, "message": commit.message, "date": commit.date,
            "authors": [{"user": commit.author, "avatar": ""}],
        }  # fmt: skip
        if not call.hub.settings.commit_messages:
            del value["message"]
        if formatted:
            value["formatted"] = {"title": commit.title, "message": commit.message}
        history.append(value)
    return call.page(history, int(call.request.arg("limit") or call.hub.settings.commits_page))


def safetensors_metadata(call: Call) -> Response:
    """An index without its weight_map, and the header of every file that it names, on main."""
    repo = call.readable_repo()
    files = repo.tree(repo.resolve("main"))
    path = call.params["path"]
    if path not in files:
        raise entry_not_found()
    index = json.loads(read_range(call.hub, repo, files[path], 0, files[path].size))
    folder = path.rpartition("/")[0]
    headers = {}
    for shard in sorted(set(index["weight_map"].values())):
        entry = files.get(f"{folder}/{shard}" if folder else shard)
        if entry is None:
            raise entry_not_found(f"the index names {shard}, which does not exist")
        (length,) = struct.unpack("<Q", read_range(call.hub, repo, entry, 0, 8))
        headers[shard] = json.loads(read_range(call.hub, repo, entry, 8, 8 + length))
    return json_response({"index": {"metadata": index.get("metadata")}, "headers": headers})
