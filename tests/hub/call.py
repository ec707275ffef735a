"""What a handler gets: the Hub, the request, who asks, and the parts of the path."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from .accounts import Token
from .errors import HubError, bad_request, repo_not_found
from .hub import Hub
from .log import Entry
from .repo import Repo
from .wire import Request, Response, json_response


@dataclass
class Call:
    hub: Hub
    request: Request
    token: Token | None
    entry: Entry  # in the log
    params: dict[str, str] = field(default_factory=dict)  # named groups of the route, percent-decoded

    @property
    def kind(self) -> str:
        """models, datasets or spaces; pages of models have no prefix."""
        return (self.params.get("kind") or "models").rstrip("/")

    @property
    def user(self) -> str:
        return self.token.user if self.token else "anonymous"

    def repo(self) -> Repo:
        """The repo in the path, if the caller may know of it; a renamed one is answered with a redirect."""
        repo_id = self.params["repo"]
        to = self.hub.moved.get((self.kind, repo_id))
        if to is not None and (self.kind, repo_id) not in self.hub.repos:
            location = self.request.target.replace(f"/{quote(repo_id)}", f"/{quote(to)}", 1)
            raise HubError(307, f"Temporary Redirect. Redirecting to {location}", headers={"Location": location})
        return self.hub.repo(self.kind, repo_id, self.token)

    def repo_of_signed(self) -> Repo:
        """The repo in the path of a signed URL, whose signature stands for the right."""
        repo = self.hub.repos.get((self.kind, self.params["repo"]))
        if repo is None:
            raise repo_not_found(signed_in=True)
        return repo

    def readable_repo(self) -> Repo:
        """The repo, if the caller may read its files."""
        repo = self.repo()
        self.hub.require_files(repo, self.token)
        return repo

    def writable_repo(self) -> Repo:
        repo = self.repo()
        self.hub.require_write(repo, self.token)
        return repo

    def json(self) -> dict[str, Any]:
        try:
            value = self.request.body.json()
        except ValueError as error:
            raise bad_request(f"the body is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise bad_request("the body must be a JSON object")
        return value

    def page(self, items: list[Any], size: int, show: Callable[[Any], Any] = lambda item: item) -> Response:
        """One page of ``items`` as ``show`` shows each; the Link header leads to the next."""
        start = int(self.request.arg("cursor") or 0)
        headers = {"X-Total-Count": str(len(items))}
        if start + size < len(items):
            query = [(n, v) for n, values in self.request.query.items() for v in values if n != "cursor"]
            pairs = [f"{quote(n, safe='[]')}={quote(v, safe='')}" for n, v in [*query, ("cursor", str(start + size))]]
            headers["Link"] = f'<{self.request.origin}{self.request.path}?{"&".join(pairs)}>; rel="next"'
        return json_response([show(item) for item in items[start : start + size]], headers=headers)
