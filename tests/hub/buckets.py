"""Buckets: files of the content store by path. A bucket is kept as a repo whose history nobody sees."""

import hashlib
import json
from typing import Any

from . import resolve as files
from .call import Call
from .errors import HubError, bad_request, entry_not_found
from .git import Entry
from .repo import MAIN, Repo, now
from .repos_api import require_namespace
from .wire import Response, json_response

NO_BYTES = "0" * 64  # the content store's hash of an empty file, which no shard has to bring


def create(call: Call) -> Response:
    require_namespace(call, call.params["repo"])
    visibility = call.json().get("visibility") or "public"
    call.hub.create_repo("buckets", call.params["repo"], visibility)
    return json_response({"url": f"{call.request.origin}/buckets/{call.params['repo']}"})


def info(call: Call) -> Response:
    repo = call.repo()
    sizes = [entry.size for entry in tree_of(repo).values()]
    value = {"id": repo.id, "private": repo.private, "createdAt": repo.created_at, "size": sum(sizes)}
    return json_response(value | {"totalFiles": len(sizes)})


def tree_of(repo: Repo) -> dict[str, Entry]:
    return dict(repo.tree(repo.refs[MAIN]))


def tree(call: Call) -> Response:
    """The prefix is the beginning of a name, folder or not."""
    repo = call.readable_repo()
    prefix = (call.params.get("path") or "").strip("/")
    found = [item(repo, path, entry) for path, entry in sorted(tree_of(repo).items()) if path.startswith(prefix)]
    return call.page(found, call.hub.settings.tree_page)


def item(repo: Repo, path: str, entry: Entry) -> dict[str, Any]:
    xet = repo.xet[entry.sha256] if entry.size else NO_BYTES
    return {"type": "file", "path": path, "size": entry.size, "xetHash": xet, "mtime": now(), "uploadedAt": now()}


def paths_info(call: Call) -> Response:
    repo = call.readable_repo()
    there = tree_of(repo)
    return json_response([item(repo, path, there[path]) for path in call.json()["paths"] if path in there])


def batch(call: Call) -> Response:
    """Each operation by itself: what fails is listed, and the rest is done."""
    repo = call.writable_repo()
    try:
        operations = [json.loads(line) for line in call.request.body.read().splitlines()]
    except ValueError as error:
        raise bad_request(f"the body is not lines of JSON: {error}") from None
    failed = []
    with repo.lock:
        for one in operations:
            try:
                repo.commit(MAIN, {one["path"]: changed(call, repo, one)}, one["type"], author=call.user)
            except HubError as error:
                failed.append({"path": one["path"], "error": str(error)})
    status = 422 if failed and len(failed) == len(operations) else 200
    return json_response({"success": not failed, "failed": failed}, status)


def changed(call: Call, repo: Repo, one: dict[str, Any]) -> Entry | None:
    """What the operation makes of its path."""
    if one["type"] == "deleteFile":
        if one["path"] not in tree_of(repo):
            raise HubError(404, "no such file")
        return None
    if one["xetHash"] == NO_BYTES:
        return Entry.large(hashlib.sha256(b"").hexdigest(), 0)
    if one["type"] == "copyFile":
        source = call.hub.repo(f"{one['sourceRepoType']}s", one["sourceRepoId"], call.token)
        for sha256, name in source.xet.items():
            if name == one["xetHash"]:
                repo.learn_object(sha256, source.objects[sha256], xet=name)
    found = [sha256 for sha256, name in repo.xet.items() if name == one["xetHash"] and call.hub.stored(repo, sha256)]
    if not found:
        raise HubError(404, "no such file in the content store")
    return Entry.large(found[0], repo.objects[found[0]])


def resolve(call: Call) -> Response:
    repo = call.readable_repo()
    entry = tree_of(repo).get(call.params["path"])
    if entry is None:
        raise entry_not_found(commit="main")
    if not entry.size:
        return Response(200, {"X-Xet-Hash": NO_BYTES})
    call.params["rev"] = "main"
    return files.resolve(call)


def cdn(call: Call) -> Response:
    call.params["kind"] = "buckets"
    return files.cdn(call)
