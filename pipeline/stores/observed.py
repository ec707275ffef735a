"""What an observer is told of each call to a Hub, and to where its answers lead: nothing that lets anybody in.

The transfers of hf_xet are none of these calls: it connects by itself, and says nothing of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx2

from reshard.pipeline.stores.network import GuardedClient
from reshard.pipeline.stores.retry import own, request_id


class Call(NamedTuple):
    """One request, from its sending to the last byte of its answer, or to the error in their place."""

    start: int  # ns since the epoch
    end: int
    facts: dict[str, str | int]  # those that are known, by the names of OpenTelemetry's conventions for HTTP clients

    @property
    def on_hub(self) -> bool:
        """Whether it went to the Hub itself, and not to where its answers lead."""
        return "url.path" in self.facts


# For a request's ``extensions``, where whoever makes it takes a 404 for an answer: it is no error to an observer.
MAY_LACK = MappingProxyType({"reshard.may_lack": True})

Observe = Callable[[Call], None]  # called from any thread


class ObservedClient(GuardedClient):
    """Tells ``observe`` of each call; one whose redirects it follows is one call, of the URL that was asked for."""

    def __init__(self, endpoint: str, observe: Observe, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._endpoint = endpoint
        self._observe = observe

    def send(self, request: httpx2.Request, *, stream: bool = False, **options: Any) -> httpx2.Response:
        start = time.time_ns()
        try:
            response = super().send(request, stream=stream, **options)
        except Exception as error:
            self._tell(request, start, None, error)
            raise
        if response.is_closed:
            self._tell(request, start, response, None)
        else:
            assert isinstance(response.stream, httpx2.SyncByteStream)
            response.stream = _Body(response.stream, lambda error: self._tell(request, start, response, error))
        return response

    def _tell(
        self, request: httpx2.Request, start: int, response: httpx2.Response | None, error: Exception | None
    ) -> None:
        url = request.url
        facts = {
            "http.request.method": request.method,
            "server.address": url.host,
            "server.port": url.port,
            # Of a signed URL on another host not only the query may be a secret.
            "url.path": url.path if own(self._endpoint, str(url)) else None,
            "error.type": type(error).__name__ if error else None,
        }
        if response is not None:
            facts["http.response.status_code"] = response.status_code
            facts["http.response.body.size"] = response.num_bytes_downloaded
            facts["reshard.request_id"] = request_id(response, self._endpoint).get("request_id")
            answers = response.status_code == 404 and "reshard.may_lack" in request.extensions
            if response.is_error and error is None and not answers:
                facts["error.type"] = str(response.status_code)
        known = {name: value for name, value in facts.items() if value is not None}
        self._observe(Call(start, time.time_ns(), known))


class _Body(httpx2.SyncByteStream):
    """An answer's body, which tells when it is closed, and what broke it."""

    def __init__(self, stream: httpx2.SyncByteStream, closed: Callable[[Exception | None], None]) -> None:
        self._stream = stream
        self._closed = closed
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._stream
        except Exception as error:
            self._error = error
            raise

    def close(self) -> None:
        self._stream.close()
        self._closed(self._error)
