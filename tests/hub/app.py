"""Which request is answered by what: the whole surface of the Hub in one table."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import unquote

from . import buckets, commit, control, discussions, info, lfs, repos_api, resolve
from .call import Call
from .cas import api as cas
from .errors import HubError
from .hub import Hub
from .log import Entry
from .wire import Request, Response, json_response

Handler = Callable[[Call], Response]

REPO = "/api/{kind}/{repo}"
BUCKET = "/api/{bucket}"
PAGE = "/{kind?}{repo}"  # pages of models have no prefix

ROUTES: list[tuple[str, str, Handler]] = [
    ("GET", "/api/whoami-v2", info.whoami),
    ("POST", "/api/validate-yaml", info.validate_yaml),
    ("POST", "/api/repos/create", repos_api.create),
    ("DELETE", "/api/repos/delete", repos_api.delete),
    ("POST", "/api/repos/move", repos_api.move),
    ("GET", "/api/collections/{slug}", info.collection),
    ("GET", "/api/{kind}", info.list_repos),
    ("GET", REPO, info.repo_info),
    ("GET", f"{REPO}/revision/{{rev}}", info.repo_info),
    ("GET", f"{REPO}/auth-check{{write?}}", info.auth_check),
    ("GET", f"{REPO}/tree/{{rev}}{{path?}}", info.tree),
    ("POST", f"{REPO}/paths-info/{{rev}}", info.paths_info),
    ("GET", f"{REPO}/refs", info.refs),
    ("GET", f"{REPO}/commits/{{rev}}", info.commits),
    ("GET", f"{REPO}/safetensors-metadata/{{path}}", info.safetensors_metadata),
    ("PUT", f"{REPO}/settings", repos_api.change_settings),
    ("POST", f"{REPO}/duplicate", repos_api.duplicate),
    ("POST", f"{REPO}/super-squash/{{rev}}", repos_api.super_squash),
    ("POST", f"{REPO}/branch/{{rev}}", repos_api.create_branch),
    ("DELETE", f"{REPO}/branch/{{rev}}", repos_api.delete_branch),
    ("POST", f"{REPO}/tag/{{rev}}", repos_api.create_tag),
    ("DELETE", f"{REPO}/tag/{{rev}}", repos_api.delete_tag),
    ("POST", f"{REPO}/preupload/{{rev}}", commit.preupload),
    ("POST", f"{REPO}/commit/{{rev}}", commit.commit),
    ("GET", f"{REPO}/lfs-files", lfs.listing),
    ("POST", f"{REPO}/lfs-files/duplicate", lfs.duplicate),
    ("GET", f"{REPO}/discussions", discussions.list_all),
    ("POST", f"{REPO}/discussions", discussions.create),
    ("GET", f"{REPO}/discussions/{{num}}", discussions.details),
    ("POST", f"{REPO}/discussions/{{num}}/status", discussions.change_status),
    ("POST", f"{REPO}/discussions/{{num}}/title", discussions.change_title),
    ("POST", f"{REPO}/discussions/{{num}}/comment", discussions.comment),
    ("POST", f"{REPO}/discussions/{{num}}/merge", discussions.merge),
    ("POST", f"{PAGE}.git/info/lfs/objects/batch", lfs.batch),
    ("POST", f"{PAGE}.git/info/lfs/objects/verify", lfs.verify),
    ("PUT", "/_lfs/{kind}/{repo}/{sha256}", lfs.put_object),
    ("PUT", "/_lfs/{kind}/{repo}/{sha256}/parts/{num}", lfs.put_part),
    ("POST", "/_lfs/{kind}/{repo}/{sha256}/complete", lfs.complete),
    ("GET", f"{PAGE}/resolve/{{rev}}/{{path}}", resolve.resolve),
    ("GET", BUCKET, buckets.info),
    ("POST", BUCKET, buckets.create),
    ("GET", f"{BUCKET}/tree{{path?}}", buckets.tree),
    ("POST", f"{BUCKET}/paths-info", buckets.paths_info),
    ("POST", f"{BUCKET}/batch", buckets.batch),
    ("GET", f"{BUCKET}/xet-write-token", cas.write_token),
    ("GET", f"{BUCKET}/xet-read-token", cas.read_token),
    ("GET", "/{bucket}/resolve/{path}", buckets.resolve),
    ("GET", "/_cdn/buckets/{repo}/{sha256}/{name}", buckets.cdn),
    ("GET", "/_cdn/{kind}/{repo}/{sha256}/{name}", resolve.cdn),
    ("GET", f"{REPO}/xet-write-token/{{rev}}", cas.write_token),
    ("GET", f"{REPO}/xet-read-token/{{rev}}", cas.read_token),
    ("POST", "/_cas/{name}/v1/xorbs/default/{hash}", cas.put_xorb),
    ("POST", "/_cas/{name}/v1/shards", cas.put_shard),
    ("GET", "/_cas/{name}/v1/chunks/{prefix}/{hash}", cas.dedup),
    ("GET", "/_cas/{name}/v1/reconstructions/{hash}", cas.reconstruction),
    ("GET", "/_cas/xorbs/{hash}", cas.get_xorb),
    ("POST", "/v1/telemetry", cas.telemetry),  # hf_xet drops the path of the store's URL
    *control.ROUTES,
]

PARTS = {
    "{kind}": "(?P<kind>models|datasets|spaces)",
    "{kind?}": "(?P<kind>(?:datasets|spaces)/)?",
    "{bucket}": "(?P<kind>buckets)/(?P<repo>[^/]+/[^/]+?)",
    "{repo}": "(?P<repo>[^/]+/[^/]+?)",
    "{slug}": "(?P<slug>[^/]+/[^/]+)",
    "{rev}": "(?P<rev>[^/]+)",
    "{path}": "(?P<path>.+)",
    "{path?}": "(?P<path>/.*)?",
    "{write?}": "(?P<write>/write)?",
    "{num}": "(?P<num>[0-9]+)",
    "{sha256}": "(?P<sha256>[0-9a-f]{64})",
    "{hash}": "(?P<hash>[0-9a-f]{64})",
    "{prefix}": "(?:default|default-merkledb)",
    "{name}": "(?P<name>[^/]+)",
}


@dataclass
class Route:
    method: str
    pattern: re.Pattern[str]
    handler: Handler


def compiled(template: str) -> re.Pattern[str]:
    pieces = re.split(r"(\{[a-z0-9?]+\})", template)
    return re.compile("".join(PARTS[piece] if piece in PARTS else re.escape(piece) for piece in pieces))


class App:
    """Finds the handler, signs the caller in, and spends the rate budget."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.routes = [Route(method, compiled(template), handler) for method, template, handler in ROUTES]

    def __call__(self, request: Request, entry: Entry) -> Response:
        open_door = request.path.startswith(("/_cdn/", "/_lfs/", "/_cas/", "/_test/", "/v1/"))  # no Hub token
        token = None if open_door else self.hub.accounts.identify(request.headers.get("authorization"))
        entry.user = token.user if token else None
        limits = {} if open_door else self._spend(request, entry)
        try:
            response = self._dispatch(Call(self.hub, request, token, entry))
        except HubError as refusal:
            refusal.headers |= limits
            raise
        response.headers |= limits
        return response

    def _dispatch(self, call: Call) -> Response:
        method = "GET" if call.request.method == "HEAD" else call.request.method
        allowed = []
        for route in self.routes:
            if found := route.pattern.fullmatch(call.request.path):
                if route.method == method:
                    call.params = {name: unquote(value) for name, value in found.groupdict().items() if value}
                    return route.handler(call)
                allowed.append(route.method)
        if allowed:
            raise HubError(405, f"{method} is not allowed here", headers={"Allow": ", ".join(allowed)})
        if call.request.path == "/":
            return json_response({"hub": "loopback"})
        raise HubError(404, f"Sorry, we can't find the page you are looking for: {method} {call.request.path}")

    def _spend(self, request: Request, entry: Entry) -> dict[str, str]:
        kind = "resolvers" if entry.kind == "resolve" else "api"
        limit = self.hub.settings.rate_limits.get(kind)
        if not limit:
            return {}
        caller = request.headers.get("authorization") or "anonymous"
        return self.hub.budget.spend(kind, caller, limit["quota"], limit["window"])
