"""What tests ask of the Hub itself, under ``/_test``: set up accounts and repos, look inside, make faults."""

import base64
import hashlib
import os
from pathlib import Path
from typing import Any

from .call import Call
from .cas.hashes import to_hex
from .commit import changes_of, checked_path
from .errors import HubError, bad_request, entry_not_found, repo_not_found
from .git import Changes, Entry
from .objects import sha256_of
from .repo import Repo, now
from .resolve import content, ranged
from .wire import Response, json_response


def create_account(call: Call) -> Response:
    """{name, type?: user|org, members?: {user: role}, token?, role?, scopes?}: an account and, for a user, a token."""
    request = call.json()
    name, kind = request["name"], request.get("type", "user")
    call.hub.record("account", name=name, type=kind, members=request.get("members", {}))
    if kind == "org":
        return json_response({"name": name})
    return json_response({"name": name, "token": add_token(call, name, request)})


def create_token(call: Call) -> Response:
    """{user, token?, role?: read|write|fineGrained, scopes?: {namespace or repo: read|write}}: a further token."""
    request = call.json()
    return json_response({"name": request["user"], "token": add_token(call, request["user"], request)})


def add_token(call: Call, user: str, request: dict[str, Any]) -> str:
    token = request.get("token") or f"hf_{hashlib.sha256(os.urandom(16)).hexdigest()[:34]}"
    role = request.get("role", "write")
    if role not in ("read", "write", "fineGrained"):
        raise bad_request("a role is read, write or fineGrained")
    call.hub.record("token", token=token, user=user, role=role, scopes=request.get("scopes", {}))
    return token


def revoke_token(call: Call) -> Response:
    call.hub.record("token_revoked", token=call.params["name"])
    return json_response({})


def create_repo(call: Call) -> Response:
    """{repo, kind?, visibility?, gated?, granted?, downloads?, likes?}: made, or its settings changed."""
    request = call.json()
    kind = request.get("kind", "models")
    with call.hub.lock:
        repo = call.hub.repos.get((kind, request["repo"])) or call.hub.create_repo(kind, request["repo"])
    changes = {name: request[name] for name in vars(repo.settings) if name in request}
    if changes:
        with repo.lock:
            repo.record("settings", settings=changes)
    return json_response(state_of(repo))


def create_collection(call: Call) -> Response:
    """{slug, title?, private?, items: [{type, id}]}."""
    request = call.json()
    owner = request["slug"].split("/")[0]
    items = [
        {"_id": f"{n:024x}", "position": n, "type": item.get("type", "model"), "id": item["id"]}
        for n, item in enumerate(request["items"])
    ]
    value = {
        "slug": request["slug"], "title": request.get("title", request["slug"]), "description": "", "gating": False,
        "lastUpdated": now(), "position": 0, "private": request.get("private", False), "theme": "green",
        "owner": {"name": owner, "type": "user"}, "upvotes": 0, "isUpvotedByUser": False, "items": items,
    }  # fmt: skip
    call.hub.record("collection", collection=value)
    return json_response(value)


def repo_of(call: Call, name: str | None, kind: str | None) -> Repo:
    repo = call.hub.repos.get((kind or "models", name or ""))
    if repo is None:
        raise repo_not_found(signed_in=True)
    return repo


def state_of(repo: Repo) -> dict[str, Any]:
    with repo.lock:
        return {
            "repo": repo.id, "kind": repo.kind, "refs": dict(repo.refs), "head": repo.refs["refs/heads/main"],
            "commits": len(repo.commits), **vars(repo.settings),
        }  # fmt: skip


def show_repo(call: Call) -> Response:
    """``repo``, ``kind``, ``revision``: refs, settings, and every file with its size and sha256."""
    argument = call.request.arg
    repo = repo_of(call, argument("repo"), argument("kind"))
    commit = repo.resolve(argument("revision") or "main")
    files = {}
    for path, entry in sorted(repo.tree(commit).items()):
        sha256 = entry.sha256 or hashlib.sha256(call.hub.read(entry)).hexdigest()
        files[path] = {
            "size": entry.size,
            "sha256": sha256,
            "oid": entry.oid,
            "lfs": entry.sha256 is not None,
            "xet": repo.xet.get(sha256) if entry.sha256 else None,
        }
    return json_response({**state_of(repo), "commit": commit, "files": files})


def show_file(call: Call) -> Response:
    """``repo``, ``path``, ``revision``, ``kind``: the file's bytes, with ranges, unlogged and without faults."""
    argument = call.request.arg
    repo = repo_of(call, argument("repo"), argument("kind"))
    entry = repo.tree(repo.resolve(argument("revision") or "main")).get(argument("path") or "")
    if entry is None:
        raise entry_not_found()
    return ranged(call, entry.size, lambda start, stop: content(call.hub, repo, entry, start, stop), {})


def put_files(call: Call) -> Response:
    """{repo, files: {path: base64}, delete?, lfs?: [path], revision?, message?, author?, kind?}: one commit."""
    request = call.json()
    repo = repo_of(call, request["repo"], request.get("kind"))
    large = set(request.get("lfs", []))
    operations: list[tuple[str, dict[str, Any]]] = [("deletedFile", {"path": p}) for p in request.get("delete", [])]
    for path, encoded in request.get("files", {}).items():
        if path in large:
            data = base64.b64decode(encoded)
            sha256 = hashlib.sha256(data).hexdigest()
            call.hub.objects.receive([memoryview(data)], sha256, len(data))
            repo.learn_object(sha256, len(data))
            operations.append(("lfsFile", {"path": path, "algo": "sha256", "oid": sha256}))
        else:
            operations.append(("file", {"path": path, "content": encoded, "encoding": "base64"}))
    with repo.lock:
        ref = repo.branch(request.get("revision", "main"))
        changes = changes_of(call.hub, repo, repo.tree(repo.refs[ref]), operations)
        return made(repo, ref, changes, request)


def import_files(call: Call) -> Response:
    """{repo, files: {path: local file}, sha256?: {path: known digest}, revision?, message?, kind?}: one commit.

    Local files become large files of the repo by hard link: they must not change afterwards. A digest that is
    given is believed, so that sparse files of any size cost nothing.
    """
    request = call.json()
    repo = repo_of(call, request["repo"], request.get("kind"))
    known = request.get("sha256", {})
    changes: dict[str, Entry | None] = {}
    for path, name in request["files"].items():
        source = Path(name)
        if not source.is_file():
            raise bad_request(f"no such file: {source}")
        sha256 = known.get(path) or sha256_of(source)
        call.hub.objects.take_copy(source, sha256)
        repo.learn_object(sha256, source.stat().st_size)
        changes[checked_path(path)] = Entry.large(sha256, source.stat().st_size)
    return made(repo, repo.branch(request.get("revision", "main")), changes, request)


def made(repo: Repo, ref: str, changes: Changes, request: dict[str, Any]) -> Response:
    author = request.get("author", repo.id.split("/")[0])
    commit = repo.commit(ref, changes, request.get("message", "set up"), author=author)
    return json_response({"commit": commit.oid, "files": sorted(changes)})


def drop_object(call: Call) -> Response:
    """The store loses an object that git still names."""
    if not call.hub.objects.drop(call.params["sha256"]):
        raise HubError(404, "no such object")
    return json_response({})


def drop_xorb(call: Call) -> Response:
    """The store loses a xorb that files still consist of."""
    if not call.hub.xet.xorbs.drop(call.params["hash"]):
        raise HubError(404, "no such xorb")
    return json_response({})


def corrupt(call: Call) -> Response:
    """{repo, path, at, revision?, kind?}: invert one byte of a large file where it is stored, whatever the form."""
    request = call.json()
    repo = repo_of(call, request["repo"], request.get("kind"))
    entry = repo.tree(repo.resolve(request.get("revision", "main"))).get(request["path"])
    if entry is None or entry.sha256 is None or not 0 <= request["at"] < entry.size:
        raise bad_request("not a byte of a large file")
    if name := repo.xet.get(entry.sha256):
        call.hub.xet.corrupt(name, request["at"])
    else:
        call.hub.objects.corrupt(entry.sha256, request["at"])
    return json_response({})


def forget_commits(call: Call) -> Response:
    """{repo, kind?}: what no ref leads to any more cannot be asked for by its id either."""
    request = call.json()
    return json_response({"forgotten": repo_of(call, request["repo"], request.get("kind")).forget_unreachable()})


def show_xet_file(call: Call) -> Response:
    """``hash``: the terms of a file in the content store, as {xorb, start, end, length}."""
    file = call.hub.xet.file(call.params["hash"])
    return json_response(
        [{"xorb": to_hex(t.xorb), "start": t.start, "end": t.end, "length": t.length} for t in file.terms]
    )


def show_log(call: Call) -> Response:
    return json_response(call.hub.log.report(reset=call.request.method == "DELETE"))


def show_totals(call: Call) -> Response:
    return json_response(call.hub.log.totals())


def wait_log(call: Call) -> Response:
    """``match``, ``count``, ``timeout``: answers once so many requests were answered; 408 if not in time."""
    argument = call.request.arg
    found = call.hub.log.wait(argument("match") or "", int(argument("count") or 1), float(argument("timeout") or 30))
    return json_response(found)


def add_fault(call: Call) -> Response:
    return json_response(call.hub.faults.add(call.json()).describe())


def list_faults(call: Call) -> Response:
    return json_response(call.hub.faults.listed())


def clear_faults(call: Call) -> Response:
    call.hub.faults.clear()
    return json_response({})


def release_faults(call: Call) -> Response:
    number = call.request.arg("id")
    call.hub.faults.release(int(number) if number else None)
    return json_response({})


def wait_fault(call: Call) -> Response:
    """``hits`` or ``waiting``, ``timeout``: answers once the rule was used, or holds, so many requests."""
    argument = call.request.arg
    hits, waiting = int(argument("hits") or 0), int(argument("waiting") or 0)
    rule = call.hub.faults.wait(
        int(call.params["num"]),
        lambda rule: rule.hits >= hits and rule.waiting >= waiting,
        float(argument("timeout") or 30),
    )
    return json_response(rule.describe())


def change_settings(call: Call) -> Response:
    if call.request.method == "POST":
        call.hub.settings = call.hub.settings.changed(call.json())
        call.hub.budget.reset()
    return json_response(call.hub.settings.as_dict())


def reset(call: Call) -> Response:
    """No faults, an empty log, the settings of the start; accounts and repos stay."""
    call.hub.faults.clear()
    call.hub.log.report(reset=True)
    call.hub.settings = call.hub.initial_settings
    call.hub.budget.reset()
    return json_response({})


ROUTES = [
    ("POST", "/_test/accounts", create_account),
    ("POST", "/_test/tokens", create_token),
    ("DELETE", "/_test/tokens/{name}", revoke_token),
    ("POST", "/_test/repos", create_repo),
    ("GET", "/_test/repos", show_repo),
    ("POST", "/_test/collections", create_collection),
    ("GET", "/_test/file", show_file),
    ("POST", "/_test/files", put_files),
    ("POST", "/_test/import", import_files),
    ("DELETE", "/_test/objects/{sha256}", drop_object),
    ("DELETE", "/_test/xorbs/{hash}", drop_xorb),
    ("GET", "/_test/xet/{hash}", show_xet_file),
    ("POST", "/_test/corrupt", corrupt),
    ("POST", "/_test/forget", forget_commits),
    ("GET", "/_test/log", show_log),
    ("DELETE", "/_test/log", show_log),
    ("GET", "/_test/log/totals", show_totals),
    ("GET", "/_test/log/wait", wait_log),
    ("POST", "/_test/faults", add_fault),
    ("GET", "/_test/faults", list_faults),
    ("DELETE", "/_test/faults", clear_faults),
    ("POST", "/_test/faults/release", release_faults),
    ("DELETE", "/_test/faults/release", release_faults),
    ("GET", "/_test/faults/{num}/wait", wait_fault),
    ("GET", "/_test/settings", change_settings),
    ("POST", "/_test/settings", change_settings),
    ("POST", "/_test/reset", reset),
]
