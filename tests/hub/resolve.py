"""Files by name (resolve) and by content (the CDN), with ranges."""

import re
from collections.abc import Callable
from urllib.parse import quote

from .call import Call
from .errors import HubError, entry_not_found, forbidden
from .git import Entry
from .hub import Hub
from .repo import Repo
from .wire import Body, BytesBody, FileBody, Response, StreamBody


def resolve(call: Call) -> Response:
    """A regular file itself, or for a large one the redirect to the CDN that also says what it is."""
    repo = call.repo()
    path = call.params["path"]
    if path not in ("README.md", ".gitattributes"):  # a gated repo still shows its card
        call.hub.require_files(repo, call.token)
    commit = repo.resolve(call.params["rev"])
    entry = repo.tree(commit).get(path)
    if entry is None:
        raise entry_not_found(commit=commit)
    name = path.rpartition("/")[2]
    headers = {
        "X-Repo-Commit": commit,
        "Accept-Ranges": "bytes",
        "Content-Disposition": f"inline; filename*=UTF-8''{quote(name)}; filename=\"{quote(name)}\";",
    }
    if entry.sha256 is None:
        headers |= {"ETag": f'"{entry.oid}"', "Content-Type": "text/plain; charset=utf-8"}
        data = call.hub.read(entry)
        return ranged(call, len(data), lambda start, stop: BytesBody(data[start:stop], start), headers)
    target = f"/_cdn/{repo.kind}/{quote(repo.id)}/{entry.sha256}/{quote(name, safe='')}"
    headers |= {
        "X-Linked-Size": str(entry.size),
        "X-Linked-Etag": f'"{entry.sha256}"',
        "Location": call.request.other_origin + call.hub.sign(target, commit=commit),
    }
    if (xet := repo.xet.get(entry.sha256)) and call.hub.settings.xet:
        token = f"{call.request.origin}/api/{repo.kind}/{repo.id}/xet-read-token"
        token += "" if repo.kind == "buckets" else f"/{commit}"
        description = f"{call.request.origin}/_cas/{call.hub.name}/v1/reconstructions/{xet}"
        headers["X-Xet-Hash"] = xet
        headers["Link"] = f'<{token}>; rel="xet-auth", <{description}>; rel="xet-reconstruction-info"'
    return Response(302, headers, BytesBody(f"Found. Redirecting to {headers['Location']}".encode()))


def cdn(call: Call) -> Response:
    """Stored bytes, by sha256, for whoever has a signed URL."""
    call.hub.check_signature(call.request.target)
    sha256 = call.params["sha256"]
    repo = call.repo_of_signed()
    if sha256 not in repo.objects:
        raise forbidden("AccessDenied")
    entry = Entry.large(sha256, repo.objects[sha256])
    headers = {"ETag": f'"{sha256}"', "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
    return ranged(call, entry.size, lambda start, stop: content(call.hub, repo, entry, start, stop), headers)


def ranged(call: Call, size: int, body: Callable[[int, int], Body], headers: dict[str, str]) -> Response:
    """The whole, or the one range that was asked for."""
    asked = byte_range(call.request.headers.get("range"), size)
    if asked is None:
        return Response(200, headers, body(0, size))
    start, stop = asked
    return Response(206, {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{size}"}, body(start, stop))


def byte_range(header: str | None, size: int) -> tuple[int, int] | None:
    """(start, stop) of a Range header; None without one, or with several; HubError 416 past the end."""
    parts = re.fullmatch(r"bytes=(\d*)-(\d*)", (header or "").replace(" ", ""))
    if parts is None or parts[0] == "bytes=-":
        return None
    first, last = parts.groups()
    if not first:
        start, stop = max(0, size - int(last)), size
    else:
        start, stop = int(first), min(size, int(last) + 1 if last else size)
    if start >= size or stop <= start:
        raise HubError(416, "Range Not Satisfiable", headers={"Content-Range": f"bytes */{size}"})
    return start, stop


def content(hub: Hub, repo: Repo, entry: Entry, start: int, stop: int) -> Body:
    """Bytes of a file, wherever they are stored."""
    if entry.sha256 is None:
        return BytesBody(hub.read(entry)[start:stop], start)
    if name := repo.xet.get(entry.sha256):
        return StreamBody(hub.xet.read(name, start, stop), start, stop - start)
    try:
        return FileBody(hub.objects.path(entry.sha256), start, stop - start)
    except FileNotFoundError:
        raise HubError(404, "NoSuchKey: the stored object is gone") from None


def read_range(hub: Hub, repo: Repo, entry: Entry, start: int, stop: int) -> bytes:
    body = content(hub, repo, entry, start, stop)
    try:
        return b"".join(body.chunks())
    finally:
        body.close()
