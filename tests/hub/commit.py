"""Preupload and commits: the ndjson that changes a branch or a pull request."""

import base64
import binascii
import json
from typing import Any

from .call import Call
from .discussions import open_pull_request
from .errors import HubError, bad_request, entry_not_found
from .git import LFS_LINE, Changes, Entry, Tree, is_ignored, is_lfs_path
from .hub import Hub
from .repo import Repo
from .wire import Response, json_response

PREUPLOAD_FILES = 256


def preupload(call: Call) -> Response:
    """How each file is to be sent (LFS or inside the commit), whether it is ignored, and what is there now."""
    repo = call.repo()
    if call.request.arg("create_pr"):
        call.hub.require_pull_request_right(repo, call.token)
        files = repo.tree(repo.resolve("main"))
    else:
        require_commit_right(call, repo, call.params["rev"])
        files = repo.tree(repo.resolve(call.params["rev"]))
    request = call.json()
    if len(request["files"]) > PREUPLOAD_FILES:
        raise bad_request(f"at most {PREUPLOAD_FILES} files")
    attributes = regular(call.hub, files, ".gitattributes")
    ignore = request["gitIgnore"].encode() if "gitIgnore" in request else regular(call.hub, files, ".gitignore")
    answers = []
    for file in request["files"]:
        path, sample = file["path"], base64.b64decode(file["sample"])
        large = is_lfs_path(attributes, path) or file["size"] > call.hub.settings.regular_limit or b"\0" in sample
        answer = {
            "path": path,
            "uploadMode": "lfs" if large else "regular",
            "shouldIgnore": is_ignored(ignore, path),
        }
        if current := files.get(path):
            answer["oid"] = current.sha256 or current.oid
        answers.append(answer)
    return json_response({"files": answers})


def commit(call: Call) -> Response:
    """Apply the body to a branch or a pull request, or (``create_pr=1``) to a new pull request."""
    repo = call.repo()
    new_pull_request = call.request.arg("create_pr") in ("1", "true")
    if new_pull_request:
        call.hub.require_pull_request_right(repo, call.token)
    else:
        require_commit_right(call, repo, call.params["rev"])
    header, operations = parse(call.request.body.read())
    title, message, parent = (
        header.get("summary", ""),
        header.get("description") or "",
        header.get("parentCommit"),
    )
    if not title:
        raise bad_request("a commit needs a summary")
    url: dict[str, str] = {}
    with repo.lock:
        if new_pull_request:
            start = repo.resolve(parent or "main")
            changes = changes_of(call.hub, repo, repo.tree(start), operations)
            discussion = open_pull_request(repo, title, message, call.user, start, status="open")
            ref, parent = discussion.ref, start
            url["pullRequestUrl"] = f"{page_url(call, repo)}/discussions/{discussion.num}"
        else:
            ref = repo.branch(call.params["rev"])
            head = repo.refs[ref]
            if not call.hub.settings.guards_parents:
                parent = None
            if parent is not None and parent != head:
                raise HubError(412, "A commit has happened since. Please refresh and try again.")
            changes = changes_of(call.hub, repo, repo.tree(head), operations)
        made = repo.commit(ref, changes, title, message, author=call.user, expected=parent)
    answer = {
        "success": True, "commitOid": made.oid, "commitUrl": f"{page_url(call, repo)}/commit/{made.oid}",
        "hookOutput": "", **url,
    }  # fmt: skip
    return json_response(answer)


def require_commit_right(call: Call, repo: Repo, revision: str) -> None:
    """Writers commit anywhere; whoever opened a pull request may also commit to it."""
    if revision.startswith("refs/pr/") and call.token is not None:
        mine = [d for d in list(repo.discussions.values()) if d.ref == revision and d.author == call.user]
        if mine and call.token.role != "read":
            return
    call.hub.require_write(repo, call.token)


def page_url(call: Call, repo: Repo) -> str:
    return call.request.origin + call.hub.url_path(repo.kind, repo.id)


def regular(hub: Hub, files: Tree, path: str) -> bytes:
    """A small file's content, empty if there is none."""
    entry = files.get(path)
    return hub.read(entry) if entry and entry.sha256 is None else b""


def parse(body: bytes) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
    """The header and the operations, in order."""
    try:
        lines = [json.loads(line) for line in body.splitlines() if line.strip()]
        pairs = [(line["key"], line["value"]) for line in lines]
    except (ValueError, KeyError, TypeError):
        raise bad_request("the body is not lines of {key, value}") from None
    headers = [value for key, value in pairs if key == "header"]
    if len(headers) != 1:
        raise bad_request("the body needs one header line")
    return headers[0], [pair for pair in pairs if pair[0] != "header"]


def changes_of(hub: Hub, repo: Repo, files: Tree, operations: list[tuple[str, dict[str, Any]]]) -> Changes:
    """What the operations change in ``files``; LFS paths that .gitattributes does not know are added to it."""
    changes: dict[str, Entry | None] = {}
    large: list[str] = []
    for key, value in operations:
        path = checked_path(value["path"])
        match key:
            case "file":
                changes[path] = regular_file(hub, value)
            case "lfsFile":
                changes[path] = large_file(hub, repo, value)
                large.append(path)
            case "deletedFile":
                if path not in files:
                    raise entry_not_found(f"A file with this name doesn't exist: {path}")
                changes[path] = None
            case "deletedFolder":
                below = [name for name in files if name.startswith(f"{path}/")]
                if not below:
                    raise entry_not_found(f"A file with this name doesn't exist: {path}/")
                changes.update(dict.fromkeys(below))
            case _:
                raise bad_request(f"unknown operation: {key}")
    after = {path for path, entry in {**files, **changes}.items() if entry is not None}
    for path in after:
        if clash := next((above for above in folders_of(path) if above in after), None):
            raise bad_request(f"{clash} is both a file and a folder")
    attributes = regular(hub, {**files, **{p: e for p, e in changes.items() if e}}, ".gitattributes")
    if unknown := [path for path in large if not is_lfs_path(attributes, path)]:
        lines = "".join(f"{path.replace(' ', '[[:space:]]')} {LFS_LINE}\n" for path in unknown).encode()
        attributes += (b"" if attributes.endswith(b"\n") or not attributes else b"\n") + lines
        changes[".gitattributes"] = Entry(hub.blobs.put(attributes), len(attributes))
    return changes


def checked_path(path: str) -> str:
    parts = path.rstrip("/").split("/")
    if any(part in ("", ".", "..", ".git") for part in parts):
        raise bad_request(f"invalid path: {path}")
    return "/".join(parts)


def folders_of(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


def regular_file(hub: Hub, value: dict[str, Any]) -> Entry:
    try:
        encoded = value.get("encoding") == "base64"
        data = base64.b64decode(value["content"], validate=True) if encoded else value["content"].encode()
    except binascii.Error:
        raise bad_request(f"{value['path']}: the content is not base64") from None
    if len(data) > hub.settings.regular_limit:
        raise bad_request(f"{value['path']}: files larger than {hub.settings.regular_limit} bytes must use LFS")
    return Entry(hub.blobs.put(data), len(data))


def large_file(hub: Hub, repo: Repo, value: dict[str, Any]) -> Entry:
    """git must never name bytes that the store does not have for this repo; a copy comes without its size."""
    sha256 = value["oid"]
    size = repo.objects.get(sha256)
    if value.get("algo") != "sha256" or size is None or not hub.stored(repo, sha256):
        raise bad_request(
            "Your push was rejected because an LFS pointer pointed to a file that does not exist."
            f" Offending file: {value['path']}"
        )
    if value.get("size") not in (None, size):
        raise bad_request(f"{value['path']}: the object {sha256} has {size} bytes, not {value['size']}")
    return Entry.large(sha256, size)
