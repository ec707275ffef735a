"""What a Hub's final answer other than success means to a user."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol
from urllib.parse import urlsplit

import httpx2

from reshard.pipeline.errors import (
    HubQuota,
    HubRefused,
    NoWriteAccess,
    ObjectLost,
    ReadOnlyMirror,
    ReshardError,
    RevisionNotFound,
    SourceChanged,
    SourceGated,
    SourceNotFound,
    TargetGone,
    TokenMissing,
    TokenRefused,
)
from reshard.pipeline.places import HUB_BUCKET
from reshard.pipeline.stores.answers import Account
from reshard.pipeline.stores.credentials import Credential, elsewhere
from reshard.pipeline.stores.retry import own, request_id


@contextmanager
def meaning(of: Callable[[Refusal], ReshardError]) -> Iterator[None]:
    """Inside, a Refusal is the error that it is ``of``."""
    try:
        yield
    except Refusal as refusal:
        raise of(refusal) from refusal


class Caller(Protocol):
    """What made the call: `hub_api.py`."""

    endpoint: str
    credential: Credential | None

    def whoami(self) -> Account: ...


class Refusal(Exception):
    """A final answer other than success; ``as_source`` and ``as_target`` say what it means to a user."""

    def __init__(self, response: httpx2.Response, caller: Caller) -> None:
        self.response, self.status = response, response.status_code
        ours = own(caller.endpoint, str(response.request.url))
        self.code = response.headers.get("x-error-code", "") if ours else ""
        # What another host says is not repeated: it may be one that only this machine can reach.
        self._words = _why(response) if ours else f"{response.status_code} from {response.request.url.host}"
        self.request = request_id(response, caller.endpoint)  # a fact of the error
        self.why = " ".join([self._words, *(f"(request {id})" for id in self.request.values())])
        self.what = f"{response.request.method} {urlsplit(str(response.request.url)).path}"
        self.endpoint = caller.endpoint
        self._caller = caller
        self.signed_in = caller.credential is not None
        super().__init__(f"{self.status} {self.code} {self.why}")

    @property
    def of_the_call(self) -> bool:
        """Whether the Hub knows no such call, rather than no such repository."""
        return (self.status, self.code) == (404, "") or self.status in (405, 501)

    def as_source(self, repo: str, revision: str | None = None) -> ReshardError:
        """What it means that a repository could not be read."""
        return self._with_id(self._of_source(repo, revision))

    def as_target(self, repo: str, pr: bool = False) -> ReshardError:
        """What it means that a repository could not be written, or with ``pr`` no pull request be opened."""
        return self._with_id(self._of_target(repo, pr))

    def _with_id(self, error: ReshardError) -> ReshardError:
        error.facts |= self.request
        return error

    def _of_source(self, repo: str, revision: str | None) -> ReshardError:
        if self.code == "GatedRepo":
            if not self.signed_in:
                how = elsewhere(self.endpoint, repo, "read")
                return TokenMissing(endpoint=self.endpoint, need=f"{repo} (gated)", **how)
            return SourceGated(repo=repo, endpoint=self.endpoint)
        if self.status == 401 and self.signed_in:
            return TokenRefused(endpoint=self.endpoint)
        if self.code == "RevisionNotFound":
            return RevisionNotFound(repo=repo, revision=revision)
        if self.code == "EntryNotFound":
            return SourceChanged(place=repo, what=f"{self.what}: {self.why}")
        if self.code == "RepoNotFound" or self.status in (401, 404):
            how = {} if self.signed_in else elsewhere(self.endpoint, repo, "read")
            kind = {"kind": "bucket"} if repo.startswith(HUB_BUCKET) else {}
            missing = SourceNotFound(repo=repo, endpoint=self.endpoint, **kind, **how)
            missing.blames_worker = not self.signed_in  # whoever has a token may see it
            return missing
        return HubRefused(endpoint=self.endpoint, what=self.what, why=self.why)

    def _of_target(self, repo: str, pr: bool) -> ReshardError:
        if self.status == 401:
            if not self.signed_in:
                how = elsewhere(self.endpoint, repo)
                return TokenMissing(endpoint=self.endpoint, need=f"writing to {repo}", **how)
            return TokenRefused(endpoint=self.endpoint)
        if self.status in (402, 413, 507) or (self.status == 403 and "storage" in self._words.lower()):
            return HubQuota(endpoint=self.endpoint, repo=repo, why=self.why)
        if self.status == 403:
            return NoWriteAccess(repo=repo, endpoint=self.endpoint, **self._token(repo, pr))
        if self.code in ("RepoNotFound", "RevisionNotFound"):
            what = "it was deleted, or the token can no longer see it"
            return TargetGone(target=repo, what=what if self.code == "RepoNotFound" else self.why)
        if self.status == 405:
            return ReadOnlyMirror(endpoint=self.endpoint, what=self.what)
        if self.status == 400 and "LFS pointer" in self._words:
            return ObjectLost(repo=repo, what=self.why)
        return HubRefused(endpoint=self.endpoint, what=self.what, why=self.why)

    def _token(self, repo: str, pr: bool) -> dict[str, str]:
        """Whose token it was, in words, and what to do about it; asked only now that it was refused."""
        named = repo.removeprefix(HUB_BUCKET)  # a bucket takes no pull requests
        no_other_way = pr or named != repo
        cure = {"cure": "use a token with write access, or choose another target"} if no_other_way else {}
        try:
            account = self._caller.whoami()
        except (Refusal, ReshardError):
            return cure
        owner = account.name.casefold() == named.partition("/")[0].casefold()
        if account.role == "read" or (owner and account.role == "fineGrained"):  # it opens no pull request either
            whose = "" if owner else ", from an account that can write there"
            make = f"create one with write access{whose} ({self.endpoint}/settings/tokens)"
            cure = {"cure": f"the token is read-only: {make}"}
        return {"whose": f"the token of {account.name}", **cure}


def _why(response: httpx2.Response) -> str:
    """The server's own words, one line: its error header, its JSON's ``error``, or the status."""
    if message := response.headers.get("x-error-message"):
        return " ".join(str(message).split())
    try:
        body = response.json()
    except (ValueError, RecursionError, httpx2.ResponseNotRead):
        body = None
    if isinstance(body, dict) and isinstance(body.get("error"), str):
        return " ".join(body["error"].split())
    return f"{response.status_code} {response.reason_phrase}"
