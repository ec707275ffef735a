"""Operations as `reshard web` carries them out over HTTP: who asks needs a token, and no password of the broker."""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any
from urllib.parse import quote

import httpx2
from pydantic import ValidationError

from reshard.client import ROOT, SCHEMA
from reshard.client.operations.fleet import show_fleet
from reshard.client.operations.table import Answered, Operation, P
from reshard.pipeline.errors import (
    ApiTokenRefused,
    ApiUnavailable,
    ApiUntrusted,
    CatalogNotFound,
    JobNotFound,
    NotTheApi,
    ReshardError,
    ScheduleNotFound,
    WorkerNotFound,
)
from reshard.pipeline.stores.network import by_environment
from reshard.pipeline.validation import first_problem

CONNECT_TIMEOUT = 5.0  # seconds
READ_TIMEOUT = 60.0  # seconds; an answer takes milliseconds, and a rollback some calls of the Hub
# What a proxy answers whose service is being started again, and the service itself when too many ask.
AWAY = frozenset({429, 502, 503, 504})


class Remote:
    """The session of the API at a URL."""

    def __init__(self, client: httpx2.Client, url: str) -> None:
        self._client = client
        self._url = url

    @classmethod
    @contextmanager
    def at(cls, url: str, token: str | None) -> Iterator[Remote]:
        """The `reshard web` at ``url``; nothing is asked yet. It never follows a redirect."""
        timeout = httpx2.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        base = url.rstrip("/").removesuffix(ROOT) + ROOT  # either may be meant
        with by_environment():
            # Reading whose certificates count takes 30 ms, a tenth of a command; without TLS none do.
            with_tls = url.lower().startswith("https")
            tls = httpx2.create_ssl_context() if with_tls else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            made = httpx2.Client(base_url=base, headers=headers, timeout=timeout, verify=tls)
        with made as client:
            yield cls(client, url)

    def perform(self, operation: Operation[P, Answered], /, *args: P.args, **kwargs: P.kwargs) -> Answered:
        given = signature(operation.run).bind(None, *args, **kwargs).arguments
        sent: dict[str, Any] = {}
        # Without defaults: a service of an older release need not know an option that is not used.
        if "body" in given:
            sent["json"] = given["body"].model_dump(mode="json", exclude_defaults=True)
        if "query" in given:
            sent["params"] = given["query"].model_dump(mode="json", exclude_defaults=True)
        document = self._ask(operation.method, self._path(operation.path, given), **sent)
        try:
            return operation.answer.model_validate(document, extra="ignore")
        except ValidationError as error:  # another program's, or a proxy's
            first = first_problem(error)
            why = f"invalid response to {operation.path}: {first.where} {first.why}"
            raise NotTheApi(url=self._url, why=why) from error

    def linger(self, job: str, after: str, seconds: float) -> None:
        """It waits here, so that who watches holds no thread of the service."""
        time.sleep(seconds)

    def _ask(self, method: str, path: str, **sent: Any) -> dict[str, Any]:
        """The document without its version; raises the error that is answered."""
        try:
            response = self._client.request(method, path, **sent)
        except (httpx2.RequestError, UnicodeError) as error:  # UnicodeError: no name of a host at all
            raise self._unreachable(error) from error
        document = _document(response)
        if response.status_code == 401 or (response.status_code == 403 and document is None):
            why = "rejected RESHARD_API_TOKEN" if "authorization" in self._client.headers else "requires a token"
            raise ApiTokenRefused(url=self._url, why=why)
        if document is None:
            if response.status_code in AWAY:
                raise ApiUnavailable(url=self._url, why=f"HTTP {response.status_code}")
            raise NotTheApi(url=self._url, why=f"HTTP {response.status_code}, but the body is not a valid API response")
        if (schema := document.pop("schema")) != SCHEMA:
            raise NotTheApi(url=self._url, why=f"it uses schema {schema}, but this release supports {SCHEMA}")
        if "error" in document and not response.is_success:
            raise ReshardError.from_dict(document["error"])
        return document

    def _path(self, path: str, given: Mapping[str, Any]) -> str:
        """The path with its names filled in; raises JobNotFound and the like."""
        names = {name: given[name] for name in re.findall(r"{(\w+)}", path)}
        for name in names.values():
            if not re.fullmatch(r"[\w@-][\w.@:-]*", name):  # it could be no part of a path, or would be another one
                raise self._not_found(path.split("/")[1], name or "''")
        return path.format_map({name: quote(value) for name, value in names.items()})

    def _not_found(self, noun: str, name: str) -> ReshardError:
        match noun:
            case "jobs":
                return JobNotFound(job=name)
            case "catalogs":
                return CatalogNotFound(name=name)
            case "schedules":
                return ScheduleNotFound(name=name)
        workers = ", ".join(worker.name for worker in show_fleet(self).workers) or "none"
        return WorkerNotFound(which="no worker", name=name, workers=workers)

    def _unreachable(self, error: Exception) -> ReshardError:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError) or "WRONG_VERSION" in str(cause):
                return ApiUntrusted(url=self._url, why=why)
            cause = cause.__cause__ or cause.__context__
        return ApiUnavailable(url=self._url, why=why)


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
