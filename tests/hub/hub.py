"""The Hub's state: accounts, repositories, stored bytes. Everything is on disk before it is answered."""

import base64
import hashlib
import hmac
import secrets
import shutil
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .accounts import Accounts, Token
from .budget import Budget
from .cas.store import XetStore
from .errors import HubError, forbidden, gated, repo_not_found, sign_in, storage_full
from .faults import Faults
from .git import GITATTRIBUTES, Entry
from .journal import Event, Journal
from .log import Log
from .objects import BlobStore, ObjectStore
from .repo import MAIN, Repo, now
from .settings import Settings

KINDS = ("models", "datasets", "spaces")


class Hub:
    """Layout: ``hub.jsonl``, ``repos/<uid>/journal.jsonl``, ``objects/``, ``blobs/``, ``uploads/``, ``tmp/``."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        self.directory = directory
        self.initial_settings = settings
        self.settings = settings
        self.log = Log()
        self.faults = Faults()
        self.budget = Budget()
        self.temporary = directory / "tmp"
        self.uploads = directory / "uploads"
        for folder in (self.temporary, self.uploads):
            folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.temporary.iterdir():  # of a killed server; nothing in here was ever answered
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        self.objects = ObjectStore(directory / "objects", self.temporary)
        self.blobs = BlobStore(directory / "blobs", self.temporary)
        self.lock = threading.RLock()
        self.accounts = Accounts()
        self.repos: dict[tuple[str, str], Repo] = {}
        self.repos_by_uid: dict[str, Repo] = {}
        self.moved: dict[tuple[str, str], str] = {}
        self.collections: dict[str, dict[str, Any]] = {}
        self._repos_made = 0
        self._journal = Journal(directory / "hub.jsonl")
        self.secret = b""
        for event in self._journal.replay():
            self._apply(event)
        if not self.secret:
            self.record("secret", secret=secrets.token_hex())
        self.name = hashlib.sha256(self.secret).hexdigest()[:8]
        dedup_key = hashlib.sha256(b"dedup " + self.secret).digest()
        self.xet = XetStore(directory / "xet", self.temporary, dedup_key)

    def record(self, event: str, **values: Any) -> None:
        line = {"event": event, **values}
        with self.lock:
            self._journal.append(line)
            self._apply(line)

    def _apply(self, event: Event) -> None:
        self.accounts.apply(event)
        match event["event"]:
            case "secret":
                self.secret = event["secret"].encode()
            case "repo":
                self._repos_made += 1
                journal = Journal(self.directory / "repos" / event["uid"] / "journal.jsonl")
                repo = Repo(event["kind"], event["id"], event["uid"], event["created_at"], journal)
                self.repos[repo.kind, repo.id] = self.repos_by_uid[repo.uid] = repo
                self.moved.pop((repo.kind, repo.id), None)
            case "repo_moved":
                repo = self.repos.pop((event["kind"], event["id"]))
                repo.id = event["to"]
                self.repos[repo.kind, repo.id] = repo
                self.moved[event["kind"], event["id"]] = repo.id
                self.moved.pop((repo.kind, repo.id), None)
            case "repo_deleted":
                del self.repos_by_uid[self.repos.pop((event["kind"], event["id"])).uid]
            case "collection":
                self.collections[event["collection"]["slug"]] = event["collection"]

    # Repositories

    def create_repo(self, kind: str, repo_id: str, visibility: str = "public") -> Repo:
        """A new repo with its first commit, which holds .gitattributes."""
        with self.lock:
            if (kind, repo_id) in self.repos:
                raise HubError(409, "You already created this model repo", url=self.url_path(kind, repo_id))
            uid = f"{self._repos_made + 1:06d}"
            shutil.rmtree(self.directory / "repos" / uid, ignore_errors=True)
            journal = Journal(self.directory / "repos" / uid / "journal.jsonl")
            repo = Repo(kind, repo_id, uid, now(), journal)
            if visibility != "public":
                repo.record("settings", settings={"visibility": visibility})
            first = {".gitattributes": Entry(self.blobs.put(GITATTRIBUTES), len(GITATTRIBUTES))}
            repo.commit(
                MAIN,
                {} if kind == "buckets" else first,
                "initial commit",
                author=repo_id.split("/")[0],
            )
            self.record("repo", kind=kind, id=repo_id, uid=uid, created_at=repo.created_at)
            return self.repos[kind, repo_id]

    def repo(self, kind: str, repo_id: str, token: Token | None) -> Repo:
        """The repo if the caller may know of it."""
        repo = self.repos.get((kind, repo_id))
        if repo is None or (repo.private and not self.accounts.may_read(token, repo_id)):
            raise repo_not_found(token is not None)
        return repo

    def require_write(self, repo: Repo, token: Token | None) -> None:
        if token is None:
            raise sign_in()
        if not self.accounts.may_write(token, repo.id):
            raise forbidden(f"Forbidden: your token does not allow you to write to {repo.id}")

    def require_pull_request_right(self, repo: Repo, token: Token | None) -> None:
        """Anyone who sees a repo may propose changes to it, with a token that writes at all."""
        if token is None:
            raise sign_in()
        if token.role == "read":
            raise forbidden("Forbidden: a write token is needed to open a pull request")

    def require_files(self, repo: Repo, token: Token | None) -> None:
        """Files of a gated repo are for its members and for users who were let in."""
        if not repo.settings.gated or self.accounts.may_read(token, repo.id):
            return
        if token is None or token.user not in repo.settings.granted:
            raise gated(repo.id, token is not None)

    def require_storage(self, repo: Repo) -> None:
        if {repo.id, repo.id.split("/")[0]} & set(self.settings.storage_full):
            raise storage_full(repo.private)

    def read(self, entry: Entry) -> bytes:
        """The content of a regular file."""
        return self.blobs.get(entry.oid)

    def stored(self, repo: Repo, sha256: str) -> bool:
        """Whether the bytes of a large file of the repo are there, in the form in which the repo got them."""
        name = repo.xet.get(sha256)
        return self.xet.has_file(name) if name else self.objects.has(sha256)

    def new_upload(self) -> str:
        """The name of a new folder for an upload in parts; abandoned ones stay until the Hub's directory goes."""
        folder = self.uploads / secrets.token_hex(8)
        folder.mkdir()
        (folder / "data").touch()
        return folder.name

    @staticmethod
    def url_path(kind: str, repo_id: str) -> str:
        return f"/{repo_id}" if kind == "models" else f"/{kind}/{repo_id}"

    # Signed URLs: whoever has one needs no token, until it expires

    def sign(self, path: str, **values: str | int) -> str:
        """``path`` with ``values``, an expiry and a signature as its query."""
        values["expires"] = int(time.time() + self.settings.cdn_lifetime)
        query = "&".join(f"{name}={quote(str(value), safe='/')}" for name, value in values.items())
        return f"{path}?{query}&signature={self._signature(f'{path}?{query}')}"

    def check_signature(self, target: str) -> None:
        """HubError 403 unless ``target`` is what ``sign`` made, and still valid."""
        signed, _, signature = target.partition("&signature=")
        if not hmac.compare_digest(signature, self._signature(signed)):
            raise forbidden("SignatureDoesNotMatch")
        if time.time() > int(signed.rpartition("expires=")[2]):
            raise forbidden("Request has expired")

    def _signature(self, signed: str) -> str:
        return base64.urlsafe_b64encode(hmac.digest(self.secret, signed.encode(), hashlib.sha256)[:18]).decode()
