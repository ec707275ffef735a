"""Large objects over git LFS: batch, basic and multipart uploads, verify, and server-side copies."""

import math
import os
import re
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .call import Call
from .errors import HubError, bad_request
from .objects import sha256_of
from .repo import Repo
from .wire import Response, json_response

MAX_COPIES = 500


def batch(call: Call) -> Response:
    """Where to put each object; no ``actions`` when the repo has it already."""
    repo = call.repo()
    if not call.hub.accounts.may_write(call.token, repo.id):
        call.hub.require_pull_request_right(repo, call.token)
    call.hub.require_storage(repo)
    request = call.json()
    if request.get("operation") != "upload" or request.get("hash_algo", "sha256") != "sha256":
        raise bad_request("only uploads of sha256 objects are served here")
    multipart = "multipart" in request.get("transfers", [])
    objects = [answer(call, repo, o["oid"], o["size"], multipart) for o in request["objects"]]
    parts = any("chunk_size" in o.get("actions", {}).get("upload", {}).get("header", {}) for o in objects)
    return json_response({"transfer": "multipart" if parts else "basic", "objects": objects})


def answer(call: Call, repo: Repo, oid: str, size: int, multipart: bool) -> dict[str, Any]:
    value: dict[str, Any] = {"oid": oid, "size": size}
    if not re.fullmatch("[0-9a-f]{64}", oid) or size < 0:
        return {**value, "error": {"code": 422, "message": "not a sha256 and a size"}}
    if repo.objects.get(oid) == size and call.hub.stored(repo, oid):
        return value
    settings, store = call.hub.settings, call.request.other_origin
    path = f"/_lfs/{repo.kind}/{quote(repo.id)}/{oid}"
    if multipart and size > settings.lfs_multipart_threshold:
        part_size = settings.lfs_part_size
        folder = call.hub.new_upload()
        header = {
            str(n): store + call.hub.sign(f"{path}/parts/{n}", upload=folder, size=size, part_size=part_size)
            for n in range(1, math.ceil(size / part_size) + 1)
        }
        complete = call.hub.sign(f"{path}/complete", upload=folder, size=size, part_size=part_size)
        upload = {"href": call.request.origin + complete, "header": {"chunk_size": str(part_size), **header}}
    else:
        upload = {"href": store + call.hub.sign(path, size=size)}
    page = call.request.origin + call.hub.url_path(repo.kind, repo.id)
    return {**value, "actions": {"upload": upload, "verify": {"href": f"{page}.git/info/lfs/objects/verify"}}}


def put_object(call: Call) -> Response:
    """The body is the whole object; it must be what its name says."""
    call.hub.check_signature(call.request.target)
    repo, sha256, size = call.repo_of_signed(), call.params["sha256"], int(call.request.arg("size") or 0)
    call.hub.objects.receive(call.request.body.chunks(), sha256, size)
    repo.record_upload(sha256, size)
    return Response(200)


def put_part(call: Call) -> Response:
    """One part, written to its place in the object's file; the ETag is asked for at the end."""
    call.hub.check_signature(call.request.target)
    folder, size, part_size = upload_of(call)
    number = int(call.params["num"])
    start = (number - 1) * part_size
    expected = min(part_size, size - start)
    with (folder / "data").open("r+b", buffering=0) as file:
        at = start
        for chunk in call.request.body.chunks():
            if at + len(chunk) > start + expected:
                raise bad_request("EntityTooLarge")
            while chunk:
                written = os.pwrite(file.fileno(), chunk, at)
                at += written
                chunk = chunk[written:]
    if at - start != expected:
        raise bad_request(f"part {number} has {at - start} bytes, not {expected}")
    (folder / f"part-{number}").touch()
    return Response(200, {"ETag": f'"{etag(folder, number)}"'})


def complete(call: Call) -> Response:
    """Join the parts: all must be there, with their ETags, and hash to the object's name."""
    call.hub.check_signature(call.request.target)
    if call.params["sha256"] in call.repo_of_signed().uploaded:
        return json_response({"success": True})  # a repeat, because the first answer was lost
    folder, size, part_size = upload_of(call)
    request = call.json()
    count = math.ceil(size / part_size)
    named = [(part["partNumber"], part["etag"].strip('"')) for part in request["parts"]]
    if named != [(n, etag(folder, n)) for n in range(1, count + 1)]:
        raise bad_request("InvalidPart: the parts are not those that were asked for")
    if missing := [n for n in range(1, count + 1) if not (folder / f"part-{n}").exists()]:
        raise bad_request(f"InvalidPart: never received: {missing}")
    found = sha256_of(folder / "data")
    if found != call.params["sha256"]:
        raise bad_request(f"the object's sha256 is {found}, not {call.params['sha256']}")
    call.hub.objects.adopt(folder / "data", found)
    call.repo_of_signed().record_upload(found, size)
    shutil.rmtree(folder)
    return json_response({"success": True})


def upload_of(call: Call) -> tuple[Path, int, int]:
    """The folder of an upload in parts, the object's size and the size of a part."""
    folder = call.hub.uploads / str(call.request.arg("upload"))
    if not folder.exists():
        raise HubError(404, "NoSuchUpload")
    return folder, int(call.request.arg("size") or 0), int(call.request.arg("part_size") or 0)


def etag(folder: Path, number: int) -> str:
    return f"{folder.name}-{number}"


def verify(call: Call) -> Response:
    """The last step of an upload: from here on commits to this repo may name the object."""
    repo = call.repo()
    if not call.hub.accounts.may_write(call.token, repo.id):
        call.hub.require_pull_request_right(repo, call.token)
    request = call.json()
    oid, size = request["oid"], request["size"]
    if oid not in repo.uploaded or not call.hub.objects.has(oid):
        raise HubError(404, f"Object does not exist: {oid}")
    if repo.uploaded[oid] != size:
        raise HubError(422, f"{oid} has {repo.uploaded[oid]} bytes, not {size}")
    repo.learn_object(oid, size)
    return json_response({"success": True})


def duplicate(call: Call) -> Response:
    """Let another repo name objects of this one, without moving a byte."""
    source = call.readable_repo()
    request = call.json()
    target_kind = f"{request['target']['type']}s"
    target = call.hub.repo(target_kind, request["target"]["name"], call.token)
    call.hub.require_write(target, call.token)
    call.hub.require_storage(target)
    if len(request["files"]) > MAX_COPIES:
        raise bad_request(f"at most {MAX_COPIES} files")
    failed = []
    for file in request["files"]:
        sha256 = file["sha256"]
        if sha256 not in source.objects or not call.hub.stored(source, sha256):
            failed.append({"sha256": sha256, "error": "not found in the source repository"})
            continue
        target.learn_object(sha256, source.objects[sha256], source.xet.get(sha256))
    return json_response({"failed": failed})


def listing(call: Call) -> Response:
    """Every large object of the repo, with a path that named it."""
    repo = call.writable_repo()
    named: dict[str, tuple[str, str]] = {}
    for commit in list(repo.commits.values()):
        for path, entry in commit.changes.items():
            if entry and entry.sha256:
                named[entry.sha256] = (path, commit.date)
    return call.page(
        [
            {
                "fileOid": oid, "oid": oid, "filename": path, "pushedAt": date, "size": repo.objects[oid], "ref": None,
            }
            for oid, (path, date) in named.items()
        ],
        call.hub.settings.tree_page,
    )  # fmt: skip
