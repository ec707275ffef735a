"""Discussions and pull requests."""

import difflib
import secrets
from typing import Any

from .call import Call
from .errors import HubError, bad_request, sign_in
from .git import Changes, Tree
from .hub import Hub
from .repo import MAIN, Discussion, Repo, now
from .wire import Response, json_response

STATUSES = ("open", "closed", "draft")


def list_all(call: Call) -> Response:
    """One page, newest first; ``author``, ``type`` (discussion or pull_request) and ``status`` filter."""
    repo = call.repo()
    author, kind, status = (call.request.arg(name) for name in ("author", "type", "status"))
    if not call.hub.settings.discussions_by_author:
        author = None
    found = [
        discussion
        for discussion in sorted(repo.discussions.values(), key=lambda d: -d.num)
        if author in (None, discussion.author)
        and kind in (None, "all", "pull_request" if discussion.is_pull_request else "discussion")
        and status in (None, "all", discussion.status, "open" if discussion.status == "draft" else "closed")
    ]
    size = call.hub.settings.discussions_page
    start = int(call.request.arg("p") or 0) * size
    closed = sum(d.status in ("closed", "merged") for d in found)
    page = [summary(repo, discussion) for discussion in found[start : start + size]]
    return json_response({"discussions": page, "count": len(found), "start": start, "numClosedDiscussions": closed})


def summary(repo: Repo, discussion: Discussion) -> dict[str, Any]:
    return {
        "num": discussion.num, "title": discussion.title, "status": discussion.status,
        "author": {"name": discussion.author, "type": "user"}, "createdAt": discussion.created_at,
        "isPullRequest": discussion.is_pull_request, "repo": {"name": repo.id, "type": repo.kind[:-1]},
        "numComments": len(discussion.events), "pinned": False,
    }  # fmt: skip


def create(call: Call) -> Response:
    repo = call.repo()
    request = call.json()
    title = request.get("title", "").strip()
    if not 3 <= len(title) <= 200:
        raise bad_request("a title has 3 to 200 characters")
    if call.token is None:
        raise sign_in()
    with repo.lock:
        if request.get("pullRequest"):
            call.hub.require_pull_request_right(repo, call.token)
            start = repo.resolve("main")
            made = open_pull_request(repo, title, request.get("description", ""), call.user, start, status="draft")
        else:
            made = record(repo, title, request.get("description", ""), call.user, None, "open")
    url = f"{call.request.origin}{call.hub.url_path(repo.kind, repo.id)}/discussions/{made.num}"
    return json_response({"num": made.num, "url": url, "pullRequest": made.is_pull_request})


def open_pull_request(repo: Repo, title: str, description: str, author: str, start: str, status: str) -> Discussion:
    """A pull request whose ref points to ``start``; the caller holds the repo's lock."""
    made = record(repo, title, description, author, start, status)
    repo.record("ref", ref=made.ref, oid=start)
    return made


def record(repo: Repo, title: str, description: str, author: str, base: str | None, status: str) -> Discussion:
    comment = {
        "edited": False,
        "hidden": False,
        "latest": {"raw": description, "updatedAt": now()},
        "history": [],
    }
    num = repo.next_num()
    repo.record(
        "discussion", num=num, title=title, author=author, created_at=now(), is_pull_request=base is not None,
        status=status, base=base, events=[event("comment", author, comment)],
    )  # fmt: skip
    return repo.discussions[num]


def event(kind: str, author: str, data: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": secrets.token_hex(12), "type": kind, "createdAt": now(), "data": data,
        "author": {"name": author, "type": "user"},
    }  # fmt: skip


def one(call: Call) -> Discussion:
    discussion = call.repo().discussions.get(int(call.params["num"]))
    if discussion is None:
        raise HubError(404, "Discussion not found")
    return discussion


def details(call: Call) -> Response:
    repo, discussion = call.repo(), one(call)
    value = {**summary(repo, discussion), "events": list(discussion.events)}
    if discussion.is_pull_request:
        commits = commits_of(repo, discussion)
        value["events"] += [
            {
                **event("commit", commit.author, {"subject": commit.title, "oid": commit.oid}),
                "createdAt": commit.date,
            }
            for commit in reversed(commits)
        ]
        value["events"].sort(key=lambda e: e["createdAt"])
        value["changes"] = {"base": MAIN}
        if discussion.merge_commit:
            value["changes"]["mergeCommitId"] = discussion.merge_commit
        value["filesWithConflicts"] = [] if discussion.merge_commit else conflicts(repo, discussion)
        if call.request.arg("diff"):
            value["diff"] = diff(call.hub, repo, discussion)
    return json_response(value)


def commits_of(repo: Repo, discussion: Discussion) -> list[Any]:
    """The pull request's own commits, newest first."""
    found = []
    for commit in repo.history(repo.refs[discussion.ref]):
        if commit.oid == discussion.base:
            break
        found.append(commit)
    return found


def changed_between(before: Tree, after: Tree) -> Changes:
    paths = {*before, *after}
    return {path: after.get(path) for path in paths if before.get(path) != after.get(path)}


def conflicts(repo: Repo, discussion: Discussion) -> list[str]:
    """Paths that the pull request and main both changed since the pull request began, to different contents."""
    assert discussion.base
    base = repo.tree(discussion.base)
    theirs = changed_between(base, repo.tree(repo.refs[discussion.ref]))
    ours = changed_between(base, repo.tree(repo.refs[MAIN]))
    return sorted(path for path in theirs if path in ours and theirs[path] != ours[path])


def diff(hub: Hub, repo: Repo, discussion: Discussion) -> str:
    """A unified diff; a large file is its LFS pointer, as in git."""
    assert discussion.base
    before, after = repo.tree(discussion.base), repo.tree(repo.refs[discussion.ref])

    def lines(tree: Tree, path: str) -> list[str]:
        entry = tree.get(path)
        if entry is None:
            return []
        if entry.sha256:
            return [f"oid sha256:{entry.sha256}\n", f"size {entry.size}\n"]
        return hub.read(entry).decode("utf-8", "replace").splitlines(keepends=True)

    parts: list[str] = []
    for path in sorted(changed_between(before, after)):
        parts.append(f"diff --git a/{path} b/{path}\n")
        parts += difflib.unified_diff(lines(before, path), lines(after, path), f"a/{path}", f"b/{path}")
    return "".join(parts)


def change_status(call: Call) -> Response:
    repo, discussion, request = call.repo(), one(call), call.json()
    status = request.get("status")
    if status not in STATUSES:
        raise bad_request(f"a status is one of {', '.join(STATUSES)}")
    if discussion.author != call.user:
        call.hub.require_write(repo, call.token)
    with repo.lock:
        if discussion.status == "merged":
            raise bad_request("the pull request is merged")
        change = event("status-change", call.user, {"status": status, "comment": request.get("comment")})
        repo.record("discussion_changed", num=discussion.num, set={"status": status}, events=[change])
    return json_response({"newStatus": change})


def change_title(call: Call) -> Response:
    repo, discussion = call.repo(), one(call)
    if discussion.author != call.user:
        call.hub.require_write(repo, call.token)
    title = call.json()["title"]
    change = event("title-change", call.user, {"from": discussion.title, "to": title})
    with repo.lock:
        repo.record("discussion_changed", num=discussion.num, set={"title": title}, events=[change])
    return json_response({"newTitle": change})


def comment(call: Call) -> Response:
    repo, discussion = call.repo(), one(call)
    if call.token is None:
        raise sign_in()
    data: dict[str, Any] = {"edited": False, "hidden": False, "history": []}
    data["latest"] = {"raw": call.json()["comment"], "updatedAt": now(), "html": ""}
    change = event("comment", call.user, data)
    with repo.lock:
        repo.record("discussion_changed", num=discussion.num, set={}, events=[change])
    return json_response({"newMessage": change})


def merge(call: Call) -> Response:
    """One commit on main with all that the pull request changed, as the Hub's squash merge does."""
    repo, discussion = call.writable_repo(), one(call)
    with repo.lock:
        if not discussion.is_pull_request or discussion.status in ("merged", "closed"):
            raise bad_request(f"discussion {discussion.num} cannot be merged: it is {discussion.status}")
        if found := conflicts(repo, discussion):
            raise HubError(409, f"Merge conflicts in {', '.join(found)}")
        assert discussion.base
        changes = changed_between(repo.tree(discussion.base), repo.tree(repo.refs[discussion.ref]))
        message = "\n".join(
            f"- {c.title} ({c.oid})\n{c.message}".rstrip() for c in reversed(commits_of(repo, discussion))
        )
        made = repo.commit(MAIN, changes, f"{discussion.title} (#{discussion.num})", message, author=call.user)
        change = event("status-change", call.user, {"status": "merged"})
        repo.record(
            "discussion_changed",
            num=discussion.num,
            set={"status": "merged", "merge_commit": made.oid},
            events=[change],
        )
    return json_response({"success": True, "mergeCommitId": made.oid})
