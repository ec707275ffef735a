"""Changes to repositories as a whole: create, delete, move, settings, branches, tags, squash, duplicate."""

from typing import Any

from .call import Call
from .errors import HubError, bad_request, forbidden, repo_not_found, revision_not_found, sign_in
from .repo import MAIN, Repo
from .wire import Response, json_response

VISIBILITIES = ("public", "private")


def kind_of(request: dict[str, Any]) -> str:
    return f"{request.get('type') or 'model'}s"


def require_namespace(call: Call, repo_id: str) -> None:
    if call.token is None:
        raise sign_in()
    if not call.hub.accounts.may_write(call.token, repo_id):
        namespace = repo_id.split("/")[0]
        raise forbidden(f'You don\'t have the rights to create a model under the namespace "{namespace}"')


def create(call: Call) -> Response:
    request = call.json()
    repo_id = f"{request.get('organization') or call.user}/{request['name']}"
    require_namespace(call, repo_id)
    visibility = request.get("visibility") or ("private" if request.get("private") else "public")
    if visibility not in VISIBILITIES:
        raise bad_request(f"a visibility is one of {', '.join(VISIBILITIES)}")
    kind = kind_of(request)
    url = call.request.origin + call.hub.url_path(kind, repo_id)
    with call.hub.lock:
        if (kind, repo_id) in call.hub.repos:
            raise HubError(409, f"You already created this {kind[:-1]} repo", url=url)
        repo = call.hub.create_repo(kind, repo_id, visibility)
    return json_response({"url": url, "name": repo.id, "id": repo.uid, "private": repo.private})


def delete(call: Call) -> Response:
    request = call.json()
    repo_id = f"{request.get('organization') or call.user}/{request['name']}"
    repo = call.hub.repo(kind_of(request), repo_id, call.token)
    call.hub.require_write(repo, call.token)
    call.hub.record("repo_deleted", kind=repo.kind, id=repo.id)
    return json_response({"success": True})


def move(call: Call) -> Response:
    """Rename or transfer; from then on the old name redirects to the new one."""
    request = call.json()
    kind, source, target = kind_of(request), request["fromRepo"], request["toRepo"]
    repo = call.hub.repo(kind, source, call.token)
    call.hub.require_write(repo, call.token)
    require_namespace(call, target)
    with call.hub.lock:
        if (kind, target) in call.hub.repos:
            raise HubError(409, f"{target} already exists")
        if (kind, source) not in call.hub.repos:
            raise repo_not_found(signed_in=True)
        call.hub.record("repo_moved", kind=kind, id=source, to=target)
    return json_response({"success": True})


def change_settings(call: Call) -> Response:
    repo = call.writable_repo()
    request = call.json()
    if "private" in request:
        request["visibility"] = "private" if request["private"] else "public"
    change = {name: request[name] for name in ("visibility", "gated") if name in request}
    if change.get("visibility", "public") not in VISIBILITIES or change.get("gated", False) not in (
        "auto",
        "manual",
        False,
    ):
        raise bad_request("unknown visibility or gating")
    with repo.lock:
        repo.record("settings", settings=change)
    return json_response({"private": repo.private, "gated": repo.settings.gated})


def create_branch(call: Call) -> Response:
    repo, ref = call.writable_repo(), f"refs/heads/{call.params['rev']}"
    request = call.json() if call.request.body.length else {}
    with repo.lock:
        if ref in repo.refs:
            raise HubError(409, "Reference already exists")
        if request.get("emptyBranch"):
            repo.commit(ref, {}, "initial commit", author=call.user, orphan=True)
        else:
            repo.record("ref", ref=ref, oid=repo.resolve(request.get("startingPoint") or "main"))
    return json_response({"success": True})


def delete_branch(call: Call) -> Response:
    ref = f"refs/heads/{call.params['rev']}"
    if ref == MAIN:
        raise forbidden("Cannot delete the default branch")
    return _delete_ref(call, ref)


def create_tag(call: Call) -> Response:
    repo, request = call.writable_repo(), call.json()
    ref = f"refs/tags/{request['tag']}"
    with repo.lock:
        if ref in repo.refs:
            raise HubError(409, "Tag reference exists already")
        repo.record("ref", ref=ref, oid=repo.resolve(call.params["rev"]))
    return json_response({"success": True})


def delete_tag(call: Call) -> Response:
    return _delete_ref(call, f"refs/tags/{call.params['rev']}")


def _delete_ref(call: Call, ref: str) -> Response:
    repo = call.writable_repo()
    with repo.lock:
        if ref not in repo.refs:
            raise revision_not_found(call.params["rev"])
        repo.record("ref_deleted", ref=ref)
    return json_response({"success": True})


def super_squash(call: Call) -> Response:
    """Replace a branch's history by one commit with the same files: the old commits are no longer its ancestors."""
    repo, message = call.writable_repo(), call.json().get("message", "Super-squash")
    with repo.lock:
        ref = repo.branch(call.params["rev"])
        repo.commit(ref, repo.tree(repo.refs[ref]), message, author=call.user, orphan=True)
    return json_response({"success": True})


def duplicate(call: Call) -> Response:
    """A new repo with all of this one's branches, tags and history."""
    source, request = call.readable_repo(), call.json()
    target_id = request["repository"]
    require_namespace(call, target_id)
    visibility = request.get("visibility") or ("private" if request.get("private") else source.settings.visibility)
    with call.hub.lock, source.lock:
        target = call.hub.create_repo(source.kind, target_id, visibility)
        copy_history(source, target)
    url = call.request.origin + call.hub.url_path(target.kind, target.id)
    return json_response({"url": url, "filesCopyPending": False})


def copy_history(source: Repo, target: Repo) -> None:
    with target.lock:
        for sha256, size in source.objects.items():
            target.learn_object(sha256, size, source.xet.get(sha256))
        for commit in source.commits.values():
            target.record("commit", ref=MAIN, commit=commit.as_event())
        for ref, oid in source.refs.items():
            if not ref.startswith("refs/pr/"):
                target.record("ref", ref=ref, oid=oid)
