"""One Hub with one credential: every call but the weights' own bytes, with one retry policy and one rate limiter.

The calls are posted here and not through ``HfApi``, for four reasons: most of its methods take no timeout and wait for
ever; its pagers repeat requests on their own, which would hide a 429 from the rate limiter that all workers share;
``list_repo_commits`` collects a whole history before it returns; and ``create_commit`` cannot name objects that were
uploaded as streams. The form of each call was checked against huggingface_hub 2.4.0.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from importlib.metadata import version
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import quote, urljoin, urlsplit

import httpx2
from pydantic import TypeAdapter, ValidationError

from reshard.pipeline.errors import HubRefused, UnsafePath
from reshard.pipeline.limits import CONNECT_TIMEOUT, LFS_BATCH, PAGES_MAX, POOL, READ_TIMEOUT, XET_TOKEN_KEPT
from reshard.pipeline.protocols import Commit, Visibility
from reshard.pipeline.stores.answers import (
    Access,
    Account,
    Discussion,
    Discussions,
    Duplicated,
    HistoryItem,
    LfsActions,
    LfsBatchAnswer,
    Modes,
    Opened,
    RepoInfo,
    TreeItem,
    XetToken,
    is_url,
)
from reshard.pipeline.stores.network import Guard, GuardedClient, by_environment
from reshard.pipeline.stores.observed import Observe, ObservedClient
from reshard.pipeline.stores.pace import RateLimiter
from reshard.pipeline.stores.refusal import Refusal
from reshard.pipeline.stores.retry import Retry, is_transient, own, rate_limit_window
from reshard.pipeline.tensors import StoredFile
from reshard.pipeline.text import unsafe_path
from reshard.pipeline.validation import first_problem

if TYPE_CHECKING:
    from reshard.pipeline.stores.credentials import Credential

log = logging.getLogger(__name__)
T = TypeVar("T")

LFS_HEADERS = {"Accept": "application/vnd.git-lfs+json", "Content-Type": "application/vnd.git-lfs+json"}


class HubApi:
    """Calls to ``endpoint`` with ``credential``; safe to share between threads, and to inherit through a fork."""

    def __init__(
        self, endpoint: str, credential: Credential | None, limiter: RateLimiter, observe: Observe | None = None
    ) -> None:
        self.endpoint = endpoint.rstrip("/")
        self.credential = credential
        self.limiter = limiter
        self.guard = Guard(self.endpoint)
        self._client_of = partial(ObservedClient, self.endpoint, observe) if observe else GuardedClient
        self._lock = threading.Lock()
        self._client: httpx2.Client | None = None
        self._pid = 0
        self.notes: list[str] = []  # what this Hub turned out not to offer
        self._xet_tokens: dict[str, tuple[XetToken, float]] = {}  # by route; until when one does, by our clock

    # ------------------------------------------------------------------------------------------------- requests

    @cached_property
    def headers(self) -> dict[str, str]:
        """The Authorization and User-Agent of every call to the Hub itself, but never to where it redirects."""
        from huggingface_hub.utils import build_hf_headers

        token = self.credential.token.get_secret_value() if self.credential else False
        return build_hf_headers(token=token, library_name="reshard", library_version=version("reshard"))

    @property
    def client(self) -> httpx2.Client:
        """This process's connections; a child of a fork must not speak on its parent's."""
        with self._lock:
            if self._client is None or self._pid != os.getpid():
                self._pid = os.getpid()
                with by_environment():
                    self._client = self._client_of(
                        self.guard,
                        verify=trusted(),
                        timeout=httpx2.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT),
                        limits=httpx2.Limits(max_connections=POOL, max_keepalive_connections=POOL),
                        event_hooks={"response": [self._tell_limiter]},
                    )
            return self._client

    def _tell_limiter(self, response: httpx2.Response) -> None:
        if not own(self.endpoint, str(response.request.url)):
            return
        if (left := rate_limit_window(response)) is not None:
            self.limiter.update(left)
        if response.status_code == 429:
            self.limiter.refused()

    def close(self) -> None:
        with self._lock:
            if self._client is not None and self._pid == os.getpid():
                self._client.close()
            self._client = None

    def retry(self) -> Retry:
        return Retry(self.endpoint, self.limiter)

    def call(
        self,
        method: str,
        path: str,
        headers: dict[str, str] | None = None,
        check: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> httpx2.Response:
        """The successful answer to a call that may safely be repeated; raises Refusal, and the HubError family.

        ``check`` may end it, with what it raises, just before it is sent, however long that had to wait.
        """
        url = path if "://" in path else self.endpoint + path
        headers = (self.headers if own(self.endpoint, url) else {}) | (headers or {})  # the token is the Hub's alone

        def send() -> httpx2.Response:
            self.limiter.before("api")
            check()
            return self.client.request(method, url, headers=headers, follow_redirects=True, **options)

        return self.repeated(send, self.retry())

    def repeated(self, send: Callable[[], httpx2.Response], retry: Retry) -> httpx2.Response:
        """The successful answer to what ``send`` sends again and again; raises Refusal, and the HubError family."""
        while True:
            try:
                response = send()
            except httpx2.TransportError as error:
                retry.after(error)
                continue
            if response.is_success:
                return response
            if not is_transient(response):
                raise Refusal(response, self)
            retry.after(response)

    def data(self, kind: type[T], method: str, path: str, headers: dict[str, str] | None = None, **options: Any) -> T:
        return self.decoded(kind, self.call(method, path, headers, **options))

    def decoded(self, kind: type[T], response: httpx2.Response) -> T:
        """The JSON of an answer as ``kind`` (answers.py); raises HubRefused for anything else."""
        try:
            answer: T = _adapter(cast(Any, kind)).validate_python(response.json())
            return answer
        except ValidationError as error:
            first = first_problem(error)
            why = f"invalid response{f' at {first.where}' if first.where else ''}: {first.why}; is this a Hub?"
            cause: Exception = error
        except (ValueError, RecursionError) as error:
            why, cause = "the response is not JSON; is this a Hub?", error
        what = f"{response.request.method} {urlsplit(str(response.request.url)).path}"
        raise HubRefused(endpoint=self.endpoint, what=what, why=why) from cause

    def pages(self, kind: type[list[T]], path: str, params: dict[str, str] | None = None) -> Iterator[T]:
        """The items of a listing, page by page, as its ``Link`` headers lead; raises HubRefused where those circle."""
        response = self.call("GET", path, params=params)
        seen = {str(response.request.url)}
        yield from self.decoded(kind, response)
        while following := response.links.get("next", {}).get("url"):
            url = urljoin(str(response.request.url), following) if is_url(following) else self.endpoint + following
            if not is_url(url) or url in seen or len(seen) >= PAGES_MAX:
                why = "the link to the next page is invalid, repeated, or one too many"
                raise HubRefused(endpoint=self.endpoint, what=f"GET {path}", why=why)
            seen.add(url)
            response = self.call("GET", url)
            yield from self.decoded(kind, response)

    # -------------------------------------------------------------------------------------------------- reading

    def info(self, repo: str, revision: str, extensions: Mapping[str, Any] | None = None) -> RepoInfo:
        """The commit that ``revision`` is now; raises Refusal. With ``extensions`` of its request.

        The revision is always named: without it, some Hubs answer with a shortened commit id.
        """
        path = f"/api/models/{repo}/revision/{quote(revision, safe='')}"
        return self.data(RepoInfo, "GET", path, params={"expand": ["sha", "private", "gated"]}, extensions=extensions)

    def visibility(self, repo: str) -> Visibility:
        """The visibility of a repository, also of one without commits; raises Refusal."""
        return self.data(Access, "GET", f"/api/models/{repo}", params={"expand": ["private", "gated"]}).visibility

    def check_access(self, repo: str, write: bool = False) -> bool:
        """Raises Refusal when we may not read it, or ``write``; False where the Hub does not say. Changes nothing."""
        use = "/write" if write else ""
        try:
            self.call("GET", f"/api/models/{repo}/auth-check{use}")
            return True
        except Refusal as refusal:
            if not refusal.of_the_call:
                raise
            self.note(f"{self.endpoint} has no auth-check{use}: missing permissions show when the token is used")
            return False

    def note(self, what: str) -> None:
        """Have plans say, once, what this Hub does not do."""
        if what not in self.notes:
            log.warning("%s", what)
            self.notes.append(what)

    def tree(self, repo: str, commit: str) -> Iterator[StoredFile]:
        """Every file at ``commit``; raises UnsafePath for a path that cannot be read and written everywhere."""
        path = f"/api/models/{repo}/tree/{quote(commit, safe='')}"
        for item in self.pages(list[TreeItem], path, {"recursive": "true", "expand": "false"}):
            if item.type == "file":
                if why := unsafe_path(item.path, published=False):
                    raise UnsafePath(file=f"{repo} at {commit[:12]}", path=repr(item.path)[:300], why=why)
                sha256 = item.lfs.oid if item.lfs else None
                oid = None if sha256 else item.oid
                yield StoredFile(path=str(item.path), size=item.size, oid=oid, sha256=sha256, xet=item.xetHash)

    def kept_xet_token(self, route: str) -> XetToken | None:
        """``xet_token``, or one of XET_TOKEN_KEPT ago at most: the steps of a small job need one each."""
        with self._lock:
            token, until = self._xet_tokens.get(route, (None, 0.0))
        return token if token is not None and time.time() < until else self.xet_token(route)

    def xet_token(self, route: str) -> XetToken | None:
        """The token for the Hub's content store; None where it has no such route. Raises Refusal, UnsafeRedirect."""
        with self._lock:
            self._xet_tokens.pop(route, None)
        try:
            token = self.data(XetToken, "GET", route)
        except Refusal as refusal:
            if refusal.status == 404 and not refusal.code:
                return None
            raise
        self.guard.check(token.casUrl)  # hf_xet connects by itself
        now = time.time()
        with self._lock:
            self._xet_tokens = {kept: one for kept, one in self._xet_tokens.items() if one[1] > now}
            self._xet_tokens[route] = token, min(now + XET_TOKEN_KEPT, token.exp - XET_TOKEN_KEPT)
        return token

    def commits(self, repo: str, revision: str) -> Iterator[Commit]:
        """The history of ``revision``, newest first, fetched as far as it is read."""
        for item in self.pages(list[HistoryItem], f"/api/models/{repo}/commits/{quote(revision, safe='')}"):
            author = next((author.user for author in item.authors or () if author.user), "")
            yield Commit(item.id, item.title, item.message, author)

    def whoami(self) -> Account:
        """The credential's own account; raises Refusal."""
        return self.data(Account, "GET", "/api/whoami-v2")

    def pull_requests(self, repo: str, author: str) -> Iterator[tuple[int, Discussion]]:
        """The pull requests of ``author`` that can still be committed to, newest first, by number; raises Refusal."""
        seen: set[int] = set()
        for page in count():
            params = {"type": "pull_request", "status": "open", "author": author, "p": str(page)}
            listing = self.data(Discussions, "GET", f"/api/models/{repo}/discussions", params=params)
            new = [item for item in listing.discussions if item.num not in seen]
            for item in new:
                if item.status in ("draft", "open"):
                    yield item.num, self.pull_request(repo, item.num)
            seen |= {item.num for item in new}
            if not new or len(seen) >= listing.count:
                return

    def pull_request(self, repo: str, number: int) -> Discussion:
        return self.data(Discussion, "GET", f"/api/models/{repo}/discussions/{number}")

    # -------------------------------------------------------------------------------------------------- writing

    def create_repo(self, repo: str, private: bool) -> None:
        """Create the repository unless it is there; raises Refusal."""
        organization, _, name = repo.partition("/")
        visibility = "private" if private else "public"
        body = {"name": name, "organization": organization, "visibility": visibility}
        self.create("/api/repos/create", body)

    def create_branch(self, repo: str, branch: str, start: str | None) -> None:
        """Create ``branch`` at the commit ``start``, or the default branch, unless it is there; raises Refusal."""
        body = {} if start is None else {"startingPoint": start}
        self.create(f"/api/models/{repo}/branch/{quote(branch, safe='')}", body)

    def create(self, path: str, body: dict[str, str]) -> None:
        """Create what ``path`` makes unless it is there; raises Refusal."""
        try:
            self.call("POST", path, json=body)
        except Refusal as refusal:
            if refusal.status != 409:  # the answer also to a repetition whose first answer was lost
                raise

    def open_pull_request(self, repo: str, title: str, description: str) -> int:
        """The new pull request's number. Posted once: raises TransportError when it may or may not be there."""
        self.limiter.before("api")
        body = {"title": title, "description": description, "pullRequest": True}
        response = self.client.post(
            f"{self.endpoint}/api/models/{repo}/discussions", headers=self.headers, json=body, follow_redirects=True
        )
        if is_transient(response):
            raise httpx2.RemoteProtocolError(f"HTTP {response.status_code}")
        if not response.is_success:
            raise Refusal(response, self)
        return self.decoded(Opened, response).num

    def show_pull_request(self, repo: str, number: int) -> None:
        """Take a pull request out of its draft state; opening it twice changes nothing."""
        self.call("POST", f"/api/models/{repo}/discussions/{number}/status", json={"status": "open"})

    def preupload(
        self, repo: str, ref: str, files: Sequence[dict[str, Any]], pull_request: bool = False
    ) -> dict[str, str]:
        """``regular`` or ``lfs`` by path; each of ``files`` has path, size and the head of the content as sample.

        Who may only propose changes to ``ref`` says that a ``pull_request`` to it is yet to be opened.
        """
        path = f"/api/models/{repo}/preupload/{quote(ref, safe='')}"
        params = {"create_pr": "1"} if pull_request else None
        answer = self.data(Modes, "POST", path, params=params, json={"files": list(files)})
        return {file.path: file.uploadMode for file in answer.files}

    def duplicate(self, source: str, target: str, files: Iterable[StoredFile]) -> set[str]:
        """Let ``target`` name objects of ``source`` without moving a byte; returns the sha256 of those that failed."""
        body = {
            "target": {"type": "model", "name": target},
            "files": [{"xetHash": f.xet, "sha256": f.sha256, "filename": f.path} for f in files],
        }
        answer = self.data(Duplicated, "POST", f"/api/models/{source}/lfs-files/duplicate", json=body)
        return {failure.sha256 for failure in answer.failed}

    def lfs_batch(self, repo: str, objects: Sequence[StoredFile]) -> dict[str, LfsActions | None]:
        """The LFS batch API's upload actions by sha256, None for what the store has already; raises Refusal.

        https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md; ``multipart`` is the Hub's own transfer.
        """
        found: dict[str, LfsActions | None] = {}
        path = f"/{repo}.git/info/lfs/objects/batch"
        for first in range(0, len(objects), LFS_BATCH):
            body = {
                "operation": "upload",
                "transfers": ["basic", "multipart"],
                "objects": [{"oid": o.sha256, "size": o.size} for o in objects[first : first + LFS_BATCH]],
                "hash_algo": "sha256",
            }
            for item in self.data(LfsBatchAnswer, "POST", path, headers=LFS_HEADERS, json=body).objects:
                if item.error:
                    raise HubRefused(endpoint=self.endpoint, what=f"the object {item.oid}", why=item.error.message)
                found[item.oid] = item.actions if item.actions and item.actions.upload else None
        if unanswered := [o.sha256 for o in objects if o.sha256 not in found]:
            why = f"no response for object {unanswered[0]}"
            raise HubRefused(endpoint=self.endpoint, what=f"POST {path}", why=why)
        return found


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@cache
def trusted() -> ssl.SSLContext:
    """Whose certificates count. Reading them takes 30 ms, and each step of a job makes a client of its own."""
    return httpx2.create_ssl_context()
