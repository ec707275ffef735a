"""Retry policy for Hub requests: what is tried again, after which pause, and which error it becomes in the end.

Every request of every store goes through a ``Retry``: the metadata calls, the ranges read, the objects sent. Attempts
are counted in a row: progress (a byte read, a part sent) starts the count anew.
"""

from __future__ import annotations

import random
import re
import time
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx2

from reshard.pipeline.errors import HubError, HubUnreachable, RateLimited
from reshard.pipeline.limits import ATTEMPTS, BACKOFF_FIRST, BACKOFF_MAX, WAIT_MAX
from reshard.pipeline.stores.pace import TELL_EVERY, RateLimiter, RateLimitWindow, rate_limited

if TYPE_CHECKING:
    from huggingface_hub.utils import RateLimitInfo

_REQUEST_ID = re.compile(r"[\w.:=-]{1,100}", re.ASCII)

# Answers that may differ the next time: timeouts, too many requests, and everything that is the server's own fault.
TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524})


class Retry:
    """Counts attempts without progress, waits between them, and gives up with the right error."""

    def __init__(self, endpoint: str, limiter: RateLimiter, attempts: int = ATTEMPTS, **about: str) -> None:
        """``about`` are more facts for an error that no host answered."""
        self._endpoint = endpoint
        self._limiter = limiter
        self._attempts = attempts
        self._about = about
        self._failed = 0

    def progress(self) -> None:
        self._failed = 0

    def after(self, problem: httpx2.TransportError | httpx2.Response) -> None:
        """Wait until the next attempt; raises HubUnreachable, RateLimited or HubError when there is none left.

        For a malformed URL or request there is none.
        """
        if isinstance(problem, (httpx2.UnsupportedProtocol, httpx2.LocalProtocolError)):
            raise HubUnreachable(endpoint=self._endpoint, what=describe(problem)) from problem
        self._failed += 1
        asked = retry_after(problem) if isinstance(problem, httpx2.Response) else None
        if self._failed >= self._attempts:
            raise self._given_up(problem, asked)
        if asked:  # at once, as some servers say, would use up all attempts while they are down
            if asked > WAIT_MAX:
                raise RateLimited(endpoint=self._endpoint, seconds=round(asked), **request_id(problem, self._endpoint))
            if own(self._endpoint, str(problem.request.url)):
                self._limiter.slow_down(asked)  # everybody's requests
            self._pause(asked)  # signed ones, of whatever host, do not ask the limiter
            return
        wait = min(BACKOFF_MAX, BACKOFF_FIRST * 2 ** (self._failed - 1))
        what = "unreachable" if isinstance(problem, httpx2.TransportError) else f"returned HTTP {problem.status_code}"
        host = self._asked(problem) if isinstance(problem, httpx2.TransportError) else self._endpoint
        why = f"{host} {what}, attempt {self._failed + 1} of {self._attempts}"
        self._limiter.sleep(wait * random.uniform(0.5, 1.5), why)

    def _pause(self, seconds: float) -> None:
        while seconds > 0:
            self._limiter.sleep(min(seconds, TELL_EVERY), rate_limited(seconds))
            seconds -= TELL_EVERY

    def _given_up(self, problem: httpx2.TransportError | httpx2.Response, asked: float | None) -> HubError:
        tried = f"{self._failed} attempts"
        if isinstance(problem, httpx2.Response):
            request = request_id(problem, self._endpoint)
            if problem.status_code == 429:
                return RateLimited(endpoint=self._endpoint, seconds=round(asked or BACKOFF_MAX), **request)
            return HubError(endpoint=self._endpoint, what=f"HTTP {problem.status_code}, after {tried}", **request)
        what = f"{describe(problem)}, after {tried}"
        return HubUnreachable(endpoint=self._asked(problem), what=what, **self._about)

    def _asked(self, problem: httpx2.TransportError) -> str:
        """The Hub, or the host that it had led to: whichever did not answer. Of its URL no more is told."""
        try:
            url = problem.request.url
        except RuntimeError:  # it was sent by nobody
            return self._endpoint
        return self._endpoint if own(self._endpoint, str(url)) else f"{url.scheme}://{url.netloc.decode('ascii')}"


def request_id(problem: httpx2.TransportError | httpx2.Response, endpoint: str) -> dict[str, str]:
    """A fact of an error, by which the Hub's operator finds the call; what another host says is not repeated."""
    if not isinstance(problem, httpx2.Response):
        return {}
    id = problem.headers.get("x-request-id", "")
    return {"request_id": id} if _REQUEST_ID.fullmatch(id) and own(endpoint, str(problem.request.url)) else {}


def own(endpoint: str, url: str) -> bool:
    """Whether ``url`` is on the Hub at ``endpoint`` itself."""
    return _origin(endpoint) == _origin(url)


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """However it is written: a host in capitals is the same, and so is a port that is the scheme's own."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def is_transient(response: httpx2.Response) -> bool:
    return response.status_code in TRANSIENT_STATUS


def retry_after(response: httpx2.Response) -> float | None:
    """Seconds that a 429 or 503 asks to wait, by ``Retry-After`` or the IETF draft's ``RateLimit`` header."""
    after = response.headers.get("retry-after", "")
    if after.isdecimal():
        return float(after[-9:])  # more digits are not a number of seconds
    if until := http_date(after):
        # By the clock of whoever said it, where the answer has that: ours may be another.
        return max(0.0, until - (http_date(response.headers.get("date", "")) or time.time()))
    limits = _rate_limit(response) if response.status_code == 429 else None
    if limits is not None and limits.remaining == 0:
        return limits.reset_in_seconds + 1.0  # whole seconds, rounded down by the server
    return None


def http_date(text: str) -> float | None:
    """Seconds since 1970, of a date in one of the three forms of RFC 9110 (5.6.7), of which one names no zone."""
    try:
        return parsedate_to_datetime(text).replace(tzinfo=UTC).timestamp()
    except (ValueError, OverflowError):
        return None


def rate_limit_window(response: httpx2.Response) -> RateLimitWindow | None:
    """What an answer says is left, by the IETF draft's ``RateLimit`` and ``RateLimit-Policy`` headers, if it does."""
    limits = _rate_limit(response)
    if limits is None or not limits.limit or not limits.window_seconds:
        return None
    kind = "resolve" if limits.resource_type == "resolvers" else limits.resource_type
    return RateLimitWindow(kind, limits.remaining, limits.reset_in_seconds, limits.limit, limits.window_seconds)


def _rate_limit(response: httpx2.Response) -> RateLimitInfo | None:
    from huggingface_hub.utils import parse_ratelimit_headers

    try:
        return parse_ratelimit_headers(response.headers)
    except ValueError:  # a number of thousands of digits
        return None


def describe(problem: httpx2.TransportError) -> str:
    """One line without the URL, which may be signed."""
    text = str(problem).strip() or type(problem).__name__
    return text.splitlines()[0]
