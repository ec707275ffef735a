"""Retry policy for Hub requests: what is tried again, after which pause, and which error it becomes in the end.

Every request of every store goes through a ``Retry``: the metadata calls, the ranges read, the objects sent. Attempts
are counted in a row: progress (a byte read, a part sent) starts the count anew.
"""

from __future__ import annotations

import math
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.parse import urlsplit

import httpx2

from reshard.pipeline.errors import HubError, HubUnreachable, RateLimited
from reshard.pipeline.limits import ATTEMPTS, BACKOFF_FIRST, BACKOFF_MAX, WAIT_MAX

if TYPE_CHECKING:
    from huggingface_hub.utils import RateLimitInfo

TELL_EVERY = 10.0  # seconds between two words about a long wait, which ends sooner as time goes on

_REQUEST_ID = re.compile(r"[\w.:=-]{1,100}", re.ASCII)

# Answers that may differ the next time: timeouts, too many requests, and everything that is the server's own fault.
TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524})


class RateLimitWindow(NamedTuple):
    """What the Hub says is left of one fixed window, in the ``RateLimit`` headers of its answers."""

    kind: str  # api, resolve
    left: int  # calls
    seconds: int  # until the window ends
    quota: int  # calls of a whole window
    window: int  # seconds of it


class RateLimiter(Protocol):
    """Decides when the next request to one Hub with one credential may go; may raise to stop the work."""

    def before(self, kind: str) -> None:
        """Called before each request; ``kind`` is ``api`` or ``resolve``, the Hub's own rate classes."""
        ...

    def update(self, window: RateLimitWindow) -> None:
        """Called with each answer that reports its rate-limit window; never raises."""
        ...

    def refused(self) -> None:
        """Called with each 429, a call that was one too many; never raises."""
        ...

    def slow_down(self, seconds: float) -> None:
        """The Hub asked for ``seconds`` without requests."""
        ...

    def sleep(self, seconds: float, why: str) -> None:
        """Every wait between two attempts is spent here; ``why`` is for those who wait for the work."""
        ...

    def moved(self, count: int) -> None:
        """``count`` bytes of a request's body went out: a sign of life from whatever thread sends. Never raises."""
        ...


class Waits:
    """Why threads wait, told to ``tell``: each new reason, the one before where one is over, and "" after the last."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._reasons: list[str] = []

    @contextmanager
    def told(self, why: str) -> Iterator[None]:
        """Inside, somebody waits."""
        with self._lock:
            self._reasons.append(why)
            self._tell(why)
        try:
            yield
        finally:
            with self._lock:
                self._reasons.remove(why)
                self._tell(self._reasons[-1] if self._reasons else "")


class LocalRateLimiter:
    """Of one process alone: waits as long as the Hub asked, for all of its threads."""

    def __init__(self, waits: Waits | None = None) -> None:
        self._waits = waits or Waits(lambda why: None)
        self._lock = threading.Lock()
        self._not_before = 0.0

    def before(self, kind: str) -> None:
        while (wait := self._not_before - time.monotonic()) > 0:
            self.sleep(min(wait, TELL_EVERY), rate_limited(wait))

    def update(self, window: RateLimitWindow) -> None:
        """One process alone goes on until it is asked to wait."""

    def refused(self) -> None:
        """What a process alone is asked for, it hears by ``slow_down``."""

    def slow_down(self, seconds: float) -> None:
        with self._lock:
            self._not_before = max(self._not_before, time.monotonic() + seconds)

    def sleep(self, seconds: float, why: str) -> None:
        with self._waits.told(why):
            self._wait(seconds)

    def _wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def moved(self, count: int) -> None:
        """No lease depends on it."""


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
        """Wait until the next attempt; raises HubUnreachable, RateLimited or HubError when there is none left."""
        self._failed += 1
        asked = wait_asked(problem) if isinstance(problem, httpx2.Response) else None
        if self._failed >= self._attempts:
            raise self._given_up(problem, asked)
        if asked is not None:
            if asked > WAIT_MAX:
                raise RateLimited(endpoint=self._endpoint, seconds=round(asked), **request_id(problem, self._endpoint))
            self._limiter.slow_down(asked)
            return  # the limiter holds back the next request, and everybody else's
        wait = min(BACKOFF_MAX, BACKOFF_FIRST * 2 ** (self._failed - 1))
        what = "unreachable" if isinstance(problem, httpx2.TransportError) else f"answers {problem.status_code}"
        host = self._asked(problem) if isinstance(problem, httpx2.TransportError) else self._endpoint
        why = f"{host} {what}, try {self._failed + 1} of {self._attempts}"
        self._limiter.sleep(wait * random.uniform(0.5, 1.5), why)

    def _given_up(self, problem: httpx2.TransportError | httpx2.Response, asked: float | None) -> HubError:
        tried = f"{self._failed} attempts"
        if isinstance(problem, httpx2.Response):
            request = request_id(problem, self._endpoint)
            if problem.status_code == 429:
                return RateLimited(endpoint=self._endpoint, seconds=round(asked or BACKOFF_MAX), **request)
            return HubError(endpoint=self._endpoint, what=f"answers {problem.status_code}, after {tried}", **request)
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
    here, there = urlsplit(endpoint), urlsplit(url)
    return (here.scheme, here.netloc) == (there.scheme, there.netloc)


def rate_limited(seconds: float) -> str:
    """Why a call waits that the Hub's limits hold back."""
    return f"rate limited, {math.ceil(seconds)} s"


def is_transient(response: httpx2.Response) -> bool:
    return response.status_code in TRANSIENT_STATUS


def wait_asked(response: httpx2.Response) -> float | None:
    """Seconds that a 429 or 503 asks to wait, by ``Retry-After`` or the IETF draft's ``RateLimit`` header."""
    after = response.headers.get("retry-after", "")
    if after.isdecimal():
        return float(after[-9:])  # more digits are not a number of seconds
    limits = _rate_limit(response) if response.status_code == 429 else None
    if limits is not None and limits.remaining == 0:
        return limits.reset_in_seconds + 1.0  # whole seconds, rounded down by the server
    return None


def rate_limit_window(response: httpx2.Response) -> RateLimitWindow | None:
    """What an answer says is left, by the IETF draft's ``RateLimit`` and ``RateLimit-Policy`` headers, if it does."""
    limits = _rate_limit(response)
    if limits is None or not limits.limit or not limits.window_seconds:
        return None
    kind = "resolve" if limits.resource_type == "resolvers" else limits.resource_type
    return RateLimitWindow(kind, limits.remaining, limits.reset_in_seconds, limits.limit, limits.window_seconds)


def _rate_limit(response: httpx2.Response) -> RateLimitInfo | None:
    """What huggingface_hub reads in the answer's rate headers."""
    from huggingface_hub.utils import parse_ratelimit_headers

    try:
        return parse_ratelimit_headers(response.headers)
    except ValueError:  # a number of thousands of digits
        return None


def describe(problem: httpx2.TransportError) -> str:
    """One line without the URL, which may be signed."""
    text = str(problem).strip() or type(problem).__name__
    return text.splitlines()[0]
