"""The jobs of a queue, as `reshard web` tells them over HTTP: who asks needs a token, and no password of the broker."""

from __future__ import annotations

import json
import re
import ssl
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx2

from reshard.client import PAGE_MAX, ROOT, SCHEMA
from reshard.client.jobs import Listed, Seen
from reshard.pipeline.errors import (
    ApiTokenRefused,
    ApiUnavailable,
    ApiUntrusted,
    JobNotFound,
    NotTheApi,
    ReshardError,
    WrongState,
)
from reshard.pipeline.request import Request
from reshard.worker.queue.states import JobState

if TYPE_CHECKING:
    from reshard.worker.queue.record import Job

CONNECT_TIMEOUT = 5.0  # seconds
READ_TIMEOUT = 60.0  # seconds; an answer takes milliseconds, and a rollback some calls of the Hub
# What a proxy answers whose service is being started again, and the service itself when too many ask.
AWAY = frozenset({429, 502, 503, 504})


class RemoteJobs:
    """``Jobs`` behind the API at a URL."""

    def __init__(self, client: httpx2.Client, url: str) -> None:
        self._client = client
        self._url = url

    @classmethod
    @contextmanager
    def at(cls, url: str, token: str | None) -> Iterator[RemoteJobs]:
        """The jobs of the `reshard web` at ``url``; nothing is asked yet. It never follows a redirect."""
        timeout = httpx2.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # Reading whose certificates count takes 30 ms, a tenth of a command; without TLS none do.
        tls = (
            httpx2.create_ssl_context() if url.lower().startswith("https") else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        )
        with httpx2.Client(base_url=url.rstrip("/") + ROOT, headers=headers, timeout=timeout, verify=tls) as client:
            yield cls(client, url)

    def submit(self, request: Request) -> dict[str, Any]:
        # Without defaults, as a job keeps it: a service of an older release need not know an option that is not used.
        asked = {"source", "target", "options", "priority"}
        sent = request.model_dump(mode="json", include=asked, exclude_defaults=True)
        return self._ask("POST", "/jobs", "id existed waits", json=sent)

    def get(self, id: str) -> tuple[Job, str | None]:
        return self._job(self._ask("GET", _path(id), "id state"))

    def listed(self, states: Collection[JobState], limit: int | None) -> Listed:
        page: dict[str, Any] = {}
        jobs, unreadable = list["Job"](), dict[str, str]()
        while not page or (page["next"] and (limit is None or len(jobs) + len(unreadable) < limit)):
            most = PAGE_MAX if limit is None else min(PAGE_MAX, limit - len(jobs) - len(unreadable))
            asked = {"state": [*map(str, states)], "limit": most} | ({"after": page["next"]} if page else {})
            page = self._ask("GET", "/jobs", "jobs next counts waits", params=asked)
            jobs += [self._job(one)[0] for one in page["jobs"]]
            unreadable |= page.get("unreadable", {})
        there = sum(number for state, number in page["counts"].items() if not states or state in states)
        return Listed(jobs, there, page["waits"], unreadable)

    def look(self, id: str, after: str, wait: float) -> Seen:
        """The same; the waiting is done here, so that who watches holds no thread of the service."""
        changes = self._ask("GET", _path(id, "/changes"), "events next job", params={"after": after})
        seen = Seen(changes["events"], changes["next"], *self._job(changes["job"]))
        if not seen.events and not seen.job.state.ended:
            time.sleep(wait)
        return seen

    def plan(self, id: str) -> dict[str, Any] | None:
        try:
            return self._ask("GET", _path(id, "/plan"), "reads files")
        except WrongState:
            return None

    def attested(self, id: str) -> dict[str, str]:
        return dict(self._ask("GET", _path(id, "/attested"), "attested")["attested"])

    def cancel(self, id: str) -> dict[str, Any]:
        return self._ask("POST", _path(id, "/cancel"), "id was")

    def retry(self, id: str, anew: bool, overwrite: bool) -> dict[str, Any]:
        return self._ask("POST", _path(id, "/retry"), "id was waits", json={"anew": anew, "overwrite": overwrite})

    def roll_back(self, id: str) -> dict[str, Any]:
        return self._ask("POST", _path(id, "/rollback"), "undone commit")

    def service(self) -> dict[str, Any]:
        return self._ask("GET", "/service", "broker jobs waiting waits processes")

    def _ask(self, method: str, path: str, has: str, **sent: Any) -> dict[str, Any]:
        """The document without its version, which has these fields; raises the error that is answered."""
        try:
            response = self._client.request(method, path, **sent)
        except (httpx2.RequestError, UnicodeError) as error:  # UnicodeError: no name of a host at all
            raise self._unreachable(error) from error
        document = _document(response)
        if response.status_code == 401 or (response.status_code == 403 and document is None):
            why = "refuses RESHARD_API_TOKEN" if "authorization" in self._client.headers else "wants a token"
            raise ApiTokenRefused(url=self._url, why=why)
        if document is None:
            if response.status_code in AWAY:
                raise ApiUnavailable(url=self._url, why=f"it answers {response.status_code}")
            raise NotTheApi(url=self._url, why=f"{response.status_code} without a document of the API")
        if (schema := document.pop("schema")) != SCHEMA:
            raise NotTheApi(url=self._url, why=f"its documents have schema {schema}, and {SCHEMA} is known here")
        if "error" in document and not response.is_success:
            raise ReshardError.from_dict(document["error"])
        if lacking := {*has.split()} - document.keys():
            raise NotTheApi(url=self._url, why=f"its document of {path} has no {' and no '.join(sorted(lacking))}")
        return document

    def _job(self, document: Mapping[str, Any]) -> tuple[Job, str | None]:
        """The job that a document tells of, and why nothing of it moves, if it tells that."""
        try:
            return _job(document)
        except (AttributeError, LookupError, TypeError, ValueError) as error:  # another program's, or a proxy's
            raise NotTheApi(url=self._url, why=f"it tells of a job what cannot be read ({error!r:.100})") from error

    def _unreachable(self, error: Exception) -> ReshardError:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError) or "WRONG_VERSION" in str(cause):
                return ApiUntrusted(url=self._url, why=why)
            cause = cause.__cause__ or cause.__context__
        return ApiUnavailable(url=self._url, why=why)


def _path(id: str, rest: str = "") -> str:
    """Raises JobNotFound for what no id begins with, and what would be another path."""
    if not re.fullmatch(r"\w+", id):
        raise JobNotFound(job=id)
    return f"/jobs/{quote(id)}{rest}"


def _document(response: httpx2.Response) -> dict[str, Any] | None:
    """The document that was answered; None: something else, so that not `reshard web` answered."""
    try:
        document = response.json()
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or "schema" not in document:
        return None
    error = document.get("error")
    failed = isinstance(error, dict) and {"code", "message", "facts"} <= error.keys()
    return document if response.is_success or failed else None


def _job(document: Mapping[str, Any]) -> tuple[Job, str | None]:
    """Raises AttributeError, LookupError, TypeError and ValueError for what no job is."""
    from reshard.worker.queue.record import Claim, Job  # which a client that only submits need not wait for

    def known(kind: Any, data: Mapping[str, Any]) -> dict[str, Any]:
        return {field.name: data[field.name] for field in fields(kind) if field.name in data}

    own = {
        "state": JobState.known(document["state"]),
        "request": Request.known(json.dumps(document["request"]))[0],
        "claims": tuple(Claim(**known(Claim, claim)) for claim in document["claims"]),
        "notes": tuple(document["notes"]),
    }
    return Job(**known(Job, document) | own), document.get("waits")
