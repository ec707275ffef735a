"""The content store over HTTP, and the tokens that open it for one repo."""

import base64
import hashlib
import hmac
import json
import time
from typing import Any

from ..call import Call
from ..errors import HubError, forbidden
from ..hub import Hub
from ..repo import Repo
from ..resolve import byte_range
from ..wire import BytesBody, FileBody, Response, json_response
from .hashes import to_hex
from .store import Slice

READ, WRITE = "read", "write"


# Tokens: on the Hub


def write_token(call: Call) -> Response:
    """For whoever may commit; ``create_pr=1`` (or the revision ``None``) for whoever may open a pull request."""
    require_xet(call.hub)
    repo = call.repo()
    revision = call.params.get("rev", "")  # a bucket has none
    if call.request.arg("create_pr") or revision == "None" or revision.startswith("refs/pr/"):
        call.hub.require_pull_request_right(repo, call.token)
    else:
        call.hub.require_write(repo, call.token)
    call.hub.require_storage(repo)
    return issue(call, repo, WRITE)


def read_token(call: Call) -> Response:
    require_xet(call.hub)
    return issue(call, call.readable_repo(), READ)


def require_xet(hub: Hub) -> None:
    if not hub.settings.xet:
        raise HubError(404, "Sorry, we can't find the page you are looking for.")


def issue(call: Call, repo: Repo, scope: str) -> Response:
    """A token in the body and, for clients that read those, in the headers."""
    expires = int(time.time()) + call.hub.settings.xet_token_lifetime
    token = sealed(call.hub, {"repo": repo.uid, "scope": scope, "exp": expires, "user": call.user})
    url = store_url(call)
    headers = {
        "X-Xet-Cas-Url": url,
        "X-Xet-Access-Token": token,
        "X-Xet-Token-Expiration": str(expires),
    }
    return json_response({"casUrl": url, "accessToken": token, "exp": expires}, headers=headers)


def store_url(call: Call) -> str:
    """Where the store is. Clients keep what they know of a store under its URL, so another store needs another one."""
    return call.hub.settings.xet_store or f"{call.request.origin}/_cas/{call.hub.name}"


def sealed(hub: Hub, claims: dict[str, Any]) -> str:
    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode()
    return f"{body}.{seal(hub, body)}"


def seal(hub: Hub, body: str) -> str:
    return hmac.digest(hub.secret, b"xet " + body.encode(), hashlib.sha256).hex()


def admitted(call: Call, scope: str) -> Repo:
    """The repo that the caller's token is for; 401 makes the client refresh it, 403 does not."""
    require_xet(call.hub)
    body, _, signature = call.request.headers.get("authorization", "").removeprefix("Bearer ").partition(".")
    if not hmac.compare_digest(signature, seal(call.hub, body)):
        raise HubError(401, "Unauthorized: not a token of this store")
    claims = json.loads(base64.urlsafe_b64decode(body))
    call.entry.user = claims["user"]
    if time.time() >= claims["exp"]:
        raise HubError(401, "Unauthorized: the token has expired")
    if scope == WRITE and claims["scope"] != WRITE:
        raise forbidden("Forbidden: a write token is needed")
    repo = call.hub.repos_by_uid.get(claims["repo"])
    if repo is None:
        raise HubError(404, "the token's repository is gone")
    return repo


# Uploads


def put_xorb(call: Call) -> Response:
    admitted(call, WRITE)
    inserted = call.hub.xet.add_xorb(call.params["hash"], call.request.body.chunks())
    return json_response({"was_inserted": inserted})


def put_shard(call: Call) -> Response:
    """From here on the token's repo has the shard's files, by sha256."""
    repo = admitted(call, WRITE)
    for name, sha256, size in call.hub.xet.add_shard(call.request.body.read()):
        if repo.kind == "buckets" and not sha256:  # which the real client leaves out for them
            sha256 = hashlib.sha256(b"".join(call.hub.xet.read(name, 0, size))).hexdigest()
        if sha256:
            repo.learn_object(sha256, size, xet=name)
    return json_response({"result": 1})


def dedup(call: Call) -> Response:
    admitted(call, READ)
    answer = call.hub.xet.dedup(call.params["hash"])
    if answer is None:
        raise HubError(404, "chunk not found")
    return Response(200, {"Content-Type": "application/octet-stream"}, BytesBody(answer))


# Downloads


def reconstruction(call: Call) -> Response:
    """Which chunks of which xorbs a file, or a range of it, consists of, and signed URLs for their bytes."""
    repo = admitted(call, READ)
    name = call.params["hash"]
    if name not in repo.xet_files:
        raise HubError(404, "no such file in this repository")
    size = call.hub.xet.file(name).size
    start, stop = byte_range(call.request.headers.get("range"), size) or (0, size)
    slices = call.hub.xet.slices(name, start, stop)
    terms = [
        {"hash": to_hex(s.xorb), "unpacked_length": s.length, "range": {"start": s.start, "end": s.end}} for s in slices
    ]
    value = {
        "offset_into_first_range": start - slices[0].offset if slices else 0,
        "terms": terms,
        "fetch_info": fetch_info(call, repo, slices),
    }
    return json_response(value)


def fetch_info(call: Call, repo: Repo, slices: list[Slice]) -> dict[str, list[dict[str, Any]]]:
    """xorb -> the chunk ranges needed of it, with their bytes; a URL is good for its range only."""
    info: dict[str, list[dict[str, Any]]] = {}
    for xorb in dict.fromkeys(s.xorb for s in slices):
        table, name = call.hub.xet.table(xorb), to_hex(xorb)
        for start, end in merged([(s.start, s.end) for s in slices if s.xorb == xorb]):
            first, last = table.stored[start], table.stored[end] - 1
            signed = call.hub.sign(f"/_cas/xorbs/{name}", repo=repo.id, first=first, last=last)
            url = call.request.other_origin + signed
            part = {"range": {"start": start, "end": end}, "url": url, "url_range": {"start": first, "end": last}}
            info.setdefault(name, []).append(part)
    return info


def merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same chunks as ranges that neither overlap nor touch."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def get_xorb(call: Call) -> Response:
    """The signed bytes of a xorb, or a part of them; no token is needed."""
    call.hub.check_signature(call.request.target)
    path = call.hub.xet.xorbs.path(call.params["hash"])
    if not path.exists():
        raise HubError(404, "NoSuchKey")
    size = path.stat().st_size
    start, stop = byte_range(call.request.headers.get("range"), size) or (0, size)
    first, last = (int(call.request.arg(name) or 0) for name in ("first", "last"))
    if not first <= start < stop <= last + 1:
        raise forbidden("the range is not the one that was signed")
    headers = {"Content-Range": f"bytes {start}-{stop - 1}/{size}", "Content-Type": "application/octet-stream"}
    return Response(206, headers, FileBody(path, start, stop - start))


def telemetry(call: Call) -> Response:
    return Response(200)
