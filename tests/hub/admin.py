"""A client of the Hub's ``/_test`` endpoints; standard library only, so that any process can use it."""

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

TIMEOUT = 600  # seconds; an import of gigabytes is hashed in one request
STUCK = 240.0  # seconds: what has not come by then never comes; no bound on anybody's pace


class HubRefused(Exception):
    """The Hub answered a ``/_test`` request with an error."""


@dataclass(frozen=True)
class User:
    name: str
    token: str


class HubAdmin:
    """Sets up, observes and disturbs a running Hub."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    # Accounts

    def create_user(self, name: str, role: str = "write", **more: Any) -> User:
        """``more``: token, scopes (of a fineGrained token: {namespace or repo: "read" | "write"})."""
        return User(**self._post("accounts", name=name, role=role, **more))

    def create_org(self, name: str, members: Mapping[str, str]) -> None:
        """``members``: user -> read, contributor, write or admin."""
        self._post("accounts", name=name, type="org", members=dict(members))

    def create_token(self, user: str, role: str = "write", **more: Any) -> str:
        """One more token of a user; as for ``create_user``."""
        return str(self._post("tokens", user=user, role=role, **more)["token"])

    def revoke_token(self, token: str) -> None:
        self._send("DELETE", f"tokens/{token}")

    # Repos

    def create_repo(self, repo: str, **settings: Any) -> dict[str, Any]:
        """Make a repo, or change one: kind ("models"), visibility, gated, granted, downloads, likes."""
        return self._post("repos", repo=repo, **settings)

    def create_collection(self, slug: str, repos: Sequence[str], **more: Any) -> None:
        self._post("collections", slug=slug, items=[{"type": "model", "id": repo} for repo in repos], **more)

    def put_files(
        self,
        repo: str,
        files: Mapping[str, bytes],
        *,
        lfs: Sequence[str] = (),
        delete: Sequence[str] = (),
        **more: Any,
    ) -> str:
        """One commit of small files; the paths in ``lfs`` are stored as large ones. Returns the commit id.

        ``more``: revision, message, author, kind.
        """
        encoded = {path: base64.b64encode(data).decode() for path, data in files.items()}
        return str(self._post("files", repo=repo, files=encoded, lfs=list(lfs), delete=list(delete), **more)["commit"])

    def import_files(self, repo: str, files: Mapping[str, Path], **more: Any) -> str:
        """One commit of local files as large files, by hard link: do not change them afterwards.

        ``more``: revision, message, author, kind, and sha256: {path: digest} to be believed without reading.
        """
        names = {path: str(Path(file).absolute()) for path, file in files.items()}
        return str(self._post("import", repo=repo, files=names, **more)["commit"])

    def state(self, repo: str, revision: str = "main", kind: str = "models") -> dict[str, Any]:
        """refs, head (of main), settings, commit, and files: {path: {size, sha256, oid, lfs}}."""
        answer: dict[str, Any] = self._get("repos", repo=repo, revision=revision, kind=kind)
        return answer

    def head(self, repo: str, kind: str = "models") -> str:
        """The commit that main points to."""
        return str(self.state(repo, kind=kind)["head"])

    def files(self, repo: str, revision: str = "main", kind: str = "models") -> dict[str, dict[str, Any]]:
        """path -> {size, sha256, oid, lfs, xet}."""
        files: dict[str, dict[str, Any]] = self.state(repo, revision, kind)["files"]
        return files

    def read(
        self,
        repo: str,
        path: str,
        revision: str = "main",
        kind: str = "models",
        start: int = 0,
        stop: int | None = None,
    ) -> bytes:
        """Bytes of a file, past every fault and unlogged."""
        query = urlencode({"repo": repo, "path": path, "revision": revision, "kind": kind})
        headers = {} if (start, stop) == (0, None) else {"Range": f"bytes={start}-{'' if stop is None else stop - 1}"}
        return self._open("GET", f"file?{query}", None, headers)

    def drop_object(self, sha256: str) -> None:
        """The store loses the object; git still names it."""
        self._send("DELETE", f"objects/{sha256}")

    def drop_xorb(self, xorb: str) -> None:
        """The content store loses the xorb; files still consist of it."""
        self._send("DELETE", f"xorbs/{xorb}")

    def forget_commits(self, repo: str, kind: str = "models") -> list[str]:
        """Commits that no ref leads to, as after a force-push, are gone; returns them."""
        forgotten: list[str] = self._post("forget", repo=repo, kind=kind)["forgotten"]
        return forgotten

    def corrupt(self, repo: str, path: str, at: int, revision: str = "main", kind: str = "models") -> None:
        """Invert the byte at this offset of a large file where it is stored, over LFS or Xet alike."""
        self._post("corrupt", repo=repo, path=path, at=at, revision=revision, kind=kind)

    def xet_terms(self, xet: str) -> list[dict[str, Any]]:
        """{xorb, start, end, length} of a file in the content store, by the ``xet`` hash in ``files``."""
        terms: list[dict[str, Any]] = self._get(f"xet/{xet}")
        return terms

    # Log

    def log(self, reset: bool = False) -> list[dict[str, Any]]:
        """{n, method, path, kind, status, up, down, user, fault, at, seconds}; status 0: no answer was sent."""
        requests: list[dict[str, Any]] = self._send("DELETE" if reset else "GET", "log")["requests"]
        return requests

    def totals(self) -> dict[str, dict[str, int]]:
        """api, resolve, cdn, lfs, xet -> {requests, up, down}; ``up`` is what clients sent, in body bytes."""
        answer: dict[str, Any] = self._get("log/totals")
        return answer

    def wait_for_request(self, match: str, count: int = 1, timeout: float = STUCK) -> list[dict[str, Any]]:
        """Until ``count`` requests whose ``METHOD path?query`` matches were answered."""
        found: list[dict[str, Any]] = self._get("log/wait", match=match, count=count, timeout=timeout)
        return found

    # Faults

    def fault(self, match: str, action: str, times: int | None = None, skip: int = 0, **options: Any) -> int:
        """Disturb requests whose ``METHOD path?query`` matches; returns the rule's id. See the README for actions."""
        return int(self._post("faults", match=match, action=action, times=times, skip=skip, **options)["id"])

    def wait_for_fault(self, rule: int, hits: int = 1, waiting: int = 0, timeout: float = STUCK) -> dict[str, Any]:
        """Until the rule was used ``hits`` times and holds ``waiting`` requests."""
        answer: dict[str, Any] = self._get(f"faults/{rule}/wait", hits=hits, waiting=waiting, timeout=timeout)
        return answer

    def release(self, rule: int | None = None) -> None:
        """Let held requests go on: those of one rule, or all."""
        self._send("POST", f"faults/release{'' if rule is None else f'?id={rule}'}")

    def faults(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = self._get("faults")
        return listed

    def clear_faults(self) -> None:
        """Remove every rule; what they held goes on."""
        self._send("DELETE", "faults")

    # Settings

    def settings(self, **changes: Any) -> dict[str, Any]:
        """Change settings of the running Hub (see settings.py); returns all of them."""
        return self._post("settings", **changes)

    def reset(self) -> None:
        """No faults, an empty log, the settings of the start; accounts and repos stay."""
        self._send("POST", "reset")

    # Transport

    def _get(self, endpoint: str, /, **query: Any) -> Any:
        return self._send("GET", f"{endpoint}?{urlencode(query)}" if query else endpoint)

    def _post(self, endpoint: str, /, **body: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._send("POST", endpoint, json.dumps(body).encode())
        return answer

    def _send(self, method: str, path: str, body: bytes | None = None) -> Any:
        return json.loads(self._open(method, path, body, {"Content-Type": "application/json"}))

    def _open(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> bytes:
        url = f"{self.endpoint}/_test/{path}"
        request = urllib.request.Request(url, body, headers, method=method)
        try:
            with _DIRECT.open(request, timeout=TIMEOUT) as response:
                data: bytes = response.read()
                return data
        except urllib.error.HTTPError as error:
            raise HubRefused(f"{method} /_test/{path}: {error.code} {error.read().decode()}") from None


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
