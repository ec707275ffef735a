"""A branch or a pull request of a repository, changed by one guarded commit at a time.

The commit names its parent, which is what makes it safe: the Hub refuses it with 412 when the head is another.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from itertools import islice
from typing import Any
from urllib.parse import quote

import httpx2

from reshard.pipeline.errors import (
    AccessError,
    HubError,
    HubRefused,
    NoPullRequest,
    NoWriteAccess,
    ObjectLost,
    ReshardError,
    TargetGone,
    TargetHidden,
    TargetMoved,
    TargetNotFound,
    TokenMissing,
)
from reshard.pipeline.limits import DUPLICATE_BATCH, INLINE_MAX, PREUPLOAD_BATCH, REGULAR_MAX, SAMPLE, SHARED_MAX
from reshard.pipeline.places import DEFAULT_BRANCH, Hub, is_pull_request
from reshard.pipeline.protocols import (
    Addition,
    AnswerLost,
    Change,
    Commit,
    HeadMoved,
    HistoryRewritten,
    Leave,
    Sink,
    Source,
    TargetState,
    Traffic,
    Visibility,
)
from reshard.pipeline.stores.answers import Committed, RepoInfo
from reshard.pipeline.stores.carry import read_whole, send_whole
from reshard.pipeline.stores.credentials import elsewhere
from reshard.pipeline.stores.http import HubSource
from reshard.pipeline.stores.hub_api import HubApi
from reshard.pipeline.stores.lfs import LfsSink, missing
from reshard.pipeline.stores.observed import MAY_LACK
from reshard.pipeline.stores.refusal import Refusal, meaning
from reshard.pipeline.stores.retry import is_transient
from reshard.pipeline.stores.xet import XetSink
from reshard.pipeline.tensors import StoredFile

log = logging.getLogger(__name__)

# Failures before the first byte of a request: it can be repeated without a doubt.
NOTHING_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)

UNLISTED = "this Hub does not list pull requests: one opened by an earlier attempt cannot be found"
UNTOLD = "this Hub does not report token permissions"
ObjectStore = LfsSink | XetSink


class HubTarget:
    """A Target on the Hub; ``choose`` says how weights are uploaded, asked once the repository is there."""

    def __init__(
        self, api: HubApi, place: Hub, ref: str, choose: Callable[[], ObjectStore], pull_request: bool = False
    ) -> None:
        self.api = api
        self.place = place
        self.endpoint = api.endpoint
        self.branch = f"a pull request to {ref}" if pull_request else ref
        self._ref = ref
        self._choose = cache(choose)
        self._pull_request = pull_request
        self._proposes = pull_request or is_pull_request(ref)  # what it needs is there, or nobody can do it
        self._visibility: Visibility = "private"  # until it was looked at
        self.carried = Traffic()
        self._past: dict[str, HubSource] = {}  # by commit, which never changes, so that each is listed once

    @property
    def transport(self) -> str:
        return self._choose().transport

    # ------------------------------------------------------------------------------------------------- its state

    def recover(self) -> None:
        """A commit stands as a whole or not at all."""

    def state(self) -> TargetState:
        head = start = None
        try:
            try:
                info = self._info(None if self._proposes else MAY_LACK)
                head, self._visibility = info.sha, info.visibility
            except Refusal as refusal:
                if refusal.code != "RevisionNotFound":
                    raise
                if is_pull_request(self._ref):  # of that name we would make an ordinary branch
                    raise NoPullRequest(repo=self.place.repo, number=self._ref.rpartition("/")[2]) from refusal
                self._visibility = self.api.visibility(self.place.repo)
                start = self._start()
        except Refusal as refusal:
            # Without a token, a private repository looks like none; `prepare` will ask for one.
            if refusal.code == "RepoNotFound":
                if self._proposes:
                    raise TargetNotFound(repo=self.place.repo, endpoint=self.endpoint, **refusal.request) from refusal
                return TargetState(False, "private", None)
            raise self._meant(refusal) from refusal
        return TargetState(True, self._visibility, head, start)

    def _start(self) -> str | None:
        """The head of main, where a branch that is not there begins; raises Refusal."""
        try:
            if self._ref == DEFAULT_BRANCH:
                return None
            return self.api.info(self.place.repo, DEFAULT_BRANCH, extensions=MAY_LACK).sha
        except Refusal as refusal:
            if refusal.code != "RevisionNotFound":  # another Hub's main may have another name
                raise
            return None

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self.api.notes)

    def _info(self, extensions: Mapping[str, Any] | None = None) -> RepoInfo:
        """As ``HubApi.info``. A new name is followed, as the Hub's own clients do, but not into another namespace.

        The token was chosen for the old one, and so was the operator's leave to write there; raises TargetMoved.
        """
        info = self.api.info(self.place.repo, self._ref, extensions=extensions)
        if info.id.partition("/")[0].casefold() != self.place.namespace.casefold():
            raise TargetMoved(target=self.place.repo, name=info.id)
        return info

    def _name(self) -> str:
        """What the repository is called now."""
        with self._meaning():
            return self._info().id

    def _meaning(self) -> AbstractContextManager[None]:
        """Inside, a Refusal is what it means that this cannot be written, or no pull request be opened."""
        return meaning(self._meant)

    def _meant(self, refusal: Refusal) -> ReshardError:
        return refusal.as_target(self.place.repo, self._proposes)

    def leave(self, exists: bool) -> Leave:
        repo = self.place.repo
        if self.api.credential is None:
            return Leave(None, "no token")
        if self._pull_request:
            return Leave(None, "checked when the pull request is opened")
        try:
            if exists:
                return Leave(True, "") if self.api.check_access(repo, write=True) else Leave(None, UNTOLD)
            account = self.api.whoami()
        except Refusal as refusal:
            return Leave(False if isinstance(error := self._meant(refusal), AccessError) else None, str(error))
        except HubError as error:  # a mirror may answer anything there; a run shows it
            return Leave(None, str(error))
        whose = f"the token of {account.name}"
        if account.may_write(repo):
            return Leave(True, f"{whose} can write there")
        refused = NoWriteAccess(repo=repo, endpoint=self.api.endpoint, whose=whose)
        return Leave(None, UNTOLD) if account.role is None else Leave(False, str(refused))

    def prepare(self, private: bool) -> str:
        repo = self.place.repo
        if self.api.credential is None:
            how = elsewhere(self.api.endpoint, repo)
            raise TokenMissing(endpoint=self.api.endpoint, need=f"writing to {repo}", **how)
        state = self.state()
        if self._pull_request:
            return state.head or self.head()
        try:
            if not state.exists:
                self.api.create_repo(repo, private)
            self.api.check_access(repo, write=True)
            if state.head is None and self._ref != DEFAULT_BRANCH:
                self.api.create_branch(repo, self._ref, state.start)
        except Refusal as refusal:
            if refusal.code == "RepoNotFound" and not state.exists:
                raise TargetHidden(repo=repo, endpoint=self.api.endpoint) from refusal
            raise self._meant(refusal) from refusal
        return state.head or self.head()

    def request(self, digest: str, title: str, message: str) -> HubTarget:
        if not self._pull_request:
            return self
        with self._meaning():
            author = self.api.whoami().name
            number = self._find(author, digest)
            retry = self.api.retry()
            while number is None:
                try:
                    number = self.api.open_pull_request(self.place.repo, title, message)
                except httpx2.TransportError as error:
                    if UNLISTED in self.api.notes:  # it may be open, and another one would be opened each time
                        why = f"no response ({error}), and it cannot list pull requests: look there before trying again"
                        raise HubRefused(endpoint=self.api.endpoint, what="a pull request", why=why) from error
                    retry.after(error)
                    number = self._find(author, digest)
                except HubRefused:  # it may be open all the same
                    number = self._find(author, digest)
                    if number is None:
                        raise
        return HubTarget(self.api, self.place, f"refs/pr/{number}", self._choose)

    def _find(self, author: str, digest: str) -> int | None:
        try:
            for number, found in self.api.pull_requests(self.place.repo, author):
                if found.by == author and digest in found.description:  # the filter is the server's, the check ours
                    return number
        except Refusal as refusal:
            if not refusal.of_the_call:
                raise
            self.api.note(UNLISTED)
        return None

    def head(self) -> str:
        try:
            return self._info().sha
        except Refusal as refusal:
            if refusal.code == "RevisionNotFound":
                raise TargetGone(target=str(self.place), what=f"{self._ref} no longer exists") from refusal
            raise self._meant(refusal) from refusal

    def is_shared(self, commit: str) -> bool:
        if self._ref == DEFAULT_BRANCH:
            return False
        try:
            return any(
                one.id == commit for one in islice(self.api.commits(self.place.repo, DEFAULT_BRANCH), SHARED_MAX)
            )
        except Refusal as refusal:
            if refusal.code == "RevisionNotFound":  # another Hub's main may have another name
                return False
            raise self._meant(refusal) from refusal

    def original(self) -> None:
        return None

    def is_ours(self, commit: str, author: str) -> bool:
        """By the account of our token, in its own namespace, outside pull requests: a git author is easily made up."""
        if self.api.credential is None or self._ref.startswith("refs/"):
            return False
        try:
            name, owner = self.api.whoami().name.casefold(), self._name().partition("/")[0].casefold()
        except (Refusal, ReshardError):  # among them TargetMoved: its history is another's now
            return False
        ours = name == owner == author.casefold()
        return ours and (not set(self._ref) <= set("0123456789abcdef") or self.is_shared(commit))  # else maybe a PR's

    def room(self) -> None:
        return None

    def at(self, commit: str) -> Source:
        if commit not in self._past:
            self._past[commit] = HubSource(self.api, self.place, commit, self._visibility)
        return self._past[commit]

    def history(self, at: str, since: str | None) -> Iterator[Commit]:
        with self._meaning():
            for commit in self.api.commits(self.place.repo, at):
                if commit.id == since:
                    return
                yield commit
        if since is not None:
            raise HistoryRewritten(since)

    # ------------------------------------------------------------------------------------------------- objects

    def sink(self, token: str) -> Sink:
        return self._choose()

    def discard(self, token: str) -> None:
        """Whoever opens a batch aborts it, and nothing else is held."""

    def holds(self, stored: Sequence[StoredFile]) -> list[StoredFile]:
        return self._choose().lost(stored)

    def carry(
        self, files: Sequence[StoredFile], source: Source, token: str, made: Sequence[Addition] = ()
    ) -> list[Addition]:
        """Objects stay objects: copied by the Hub where it has them, sent where it has not.

        Small files are content, the smallest first, as many as fit into INLINE_MAX.
        """
        light = [(StoredFile(one.path, len(one.content or b"")), one.content or b"") for one in made]
        additions: dict[str, Addition] = {}
        unknown = missing(self.api, self.place.repo, [file for file in files if file.sha256], self._proposes)
        uncopied = {file.path for file in self._duplicate(unknown, source)}
        heavy: list[tuple[StoredFile, bytes | None]] = []
        room = INLINE_MAX
        for file in sorted(files, key=lambda file: file.size):
            if file.sha256 and file.path not in uncopied:
                additions[file.path] = Addition(file.path, stored=file)
            elif file.sha256 or file.size > min(REGULAR_MAX, room):
                heavy.append((file, None))
            else:
                room -= file.size
                light.append((file, read_whole(file, source)))
        modes = self._modes({file.path: content for file, content in light})
        for file, content in light:
            if modes.get(file.path) == "lfs" or len(content) > REGULAR_MAX:
                heavy.append((file, content))
            else:
                additions[file.path] = Addition(file.path, content=content)
        additions |= {stored.path: Addition(stored.path, stored=stored) for stored in self._send(heavy, source, token)}
        return [additions[path] for path in (*(one.path for one in made), *(file.path for file in files))]

    def _duplicate(self, files: Sequence[StoredFile], source: Source) -> list[StoredFile]:
        """Have the Hub copy objects on its own; returns those that it would not."""
        if source.pin.endpoint != self.api.endpoint:
            return list(files)
        rest = [file for file in files if not file.xet]
        copyable = [file for file in files if file.xet]
        for first in range(0, len(copyable), DUPLICATE_BATCH):
            some = copyable[first : first + DUPLICATE_BATCH]
            try:
                failed = self.api.duplicate(source.pin.repo, self.place.repo, some)
            except Refusal:
                # The token that writes the target may not see the source, or the two are stored in different regions.
                return rest + copyable[first:]
            rest += [file for file in some if file.sha256 in failed]
        return rest

    def _modes(self, contents: dict[str, bytes]) -> dict[str, str]:
        """``regular`` or ``lfs``, as the target's own .gitattributes and the Hub's limits decide; empty is regular."""
        modes = {path: "regular" for path, content in contents.items() if not content}
        asked = [
            {"path": path, "size": len(content), "sample": base64.b64encode(content[:SAMPLE]).decode()}
            for path, content in contents.items()
            if content
        ]
        with self._meaning():
            for first in range(0, len(asked), PREUPLOAD_BATCH):
                some = asked[first : first + PREUPLOAD_BATCH]
                modes |= self.api.preupload(self.place.repo, self._ref, some, self._pull_request)
        return modes

    def _send(
        self, files: Sequence[tuple[StoredFile, bytes | None]], source: Source, token: str
    ) -> Sequence[StoredFile]:
        if not files:
            return []
        of_source = [file for file, content in files if content is None or file.oid]  # ours have none
        batch = self.sink(token).batch(of_source, source)
        sent = send_whole(batch, files, source)
        self.carried = self.carried.plus(batch.traffic)
        return sent

    # -------------------------------------------------------------------------------------------------- commit

    def commit(self, change: Change, parent: str) -> str:
        retry = self.api.retry()
        repo = self.place.repo
        headers = {"Content-Type": "application/x-ndjson", "Content-Length": str(sum(map(len, _body(change, parent))))}
        while True:
            self.api.limiter.before("api")
            try:
                url = f"{self.api.endpoint}/api/models/{repo}/commit/{quote(self._ref, safe='')}"
                response = self.api.client.post(url, headers=self.api.headers | headers, content=_body(change, parent))
            except NOTHING_SENT as error:
                retry.after(error)
            except httpx2.TransportError as error:
                raise AnswerLost(str(error)) from error
            except HubRefused as error:  # an answer that is too long to be read
                raise AnswerLost(str(error), error) from error
            else:
                if response.is_success:
                    return self._made(response)
                if response.status_code in (409, 412):  # 409: a Hub that takes one commit at a time
                    raise HeadMoved(parent)
                if response.status_code == 429:
                    retry.after(response)  # it was turned away before anything was done
                elif response.has_redirect_location:
                    retry.after(response)  # the same; it was renamed since the head was read
                    repo = self._name()
                elif is_transient(response):
                    raise AnswerLost(f"HTTP {response.status_code}")
                else:
                    raise self._commit_refused(Refusal(response, self.api), change)

    def _made(self, response: httpx2.Response) -> str:
        try:
            return self.api.decoded(Committed, response).commitOid
        except HubRefused as error:
            raise AnswerLost(str(error), error) from error

    def _commit_refused(self, refusal: Refusal, change: Change) -> Exception:
        error = self._meant(refusal)
        if isinstance(error, ObjectLost):
            lost = self.holds([addition.stored for addition in change.additions if addition.stored])
            error.lost = frozenset(object_.sha256 for object_ in lost)
        return error

    def show(self) -> None:
        """Take our pull request out of its draft state; where that fails, the commit stands all the same."""
        if not is_pull_request(self._ref):
            return
        try:
            self.api.show_pull_request(self.place.repo, int(self._ref.rpartition("/")[2]))
        except (Refusal, HubError) as error:
            log.warning("%s of %s is still a draft: %s", self._ref, self.place, error)


def _body(change: Change, parent: str) -> Iterator[bytes]:
    """A commit as the Hub's own clients post it: lines of JSON, a header that names the parent, then each operation."""
    header = {"summary": change.title, "description": change.message, "parentCommit": parent}
    yield _line("header", header)
    for addition in change.additions:
        if addition.stored is not None:
            stored = addition.stored
            yield _line("lfsFile", {"path": addition.path, "algo": "sha256", "oid": stored.sha256, "size": stored.size})
        else:
            content = base64.b64encode(addition.content or b"").decode()
            yield _line("file", {"content": content, "path": addition.path, "encoding": "base64"})
    for path in change.deletes:
        yield _line("deletedFile", {"path": path})


def _line(key: str, value: Mapping[str, object]) -> bytes:
    return json.dumps({"key": key, "value": value}).encode() + b"\n"
