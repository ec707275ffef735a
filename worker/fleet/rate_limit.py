"""How fast workers call the Hub: as it asks, interactive work first; a wait never outlasts a cancel.

All workers spend one budget for each endpoint and credential, which is kept in Redis:

    reshard:pace:<budget>         there while the Hub asked for a wait
    reshard:pace:<budget>:<kind>  hash: calls left in the Hub's window, when it ends, its calls, its length,
                                  and 1 if that is a guess
    reshard:pace:windows          sorted set: endpoint and key of each such hash -> when it is forgotten, for metrics
    reshard:pace:least:<hour>     hash: endpoint and kind -> percent of a window's calls, the least that were left then
    reshard:pace:refused          hash: endpoint -> how often it answered 429

The Hub says with each answer what is left (its RateLimit headers). Each call is taken from that before it is made, and
bulk work leaves the last of it to interactive work. While Redis is away each process waits on its own.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import redis

from reshard.pipeline.limits import WAIT_MAX
from reshard.pipeline.stores.pace import RateLimiter, RateLimitWindow, Waits, rate_limited
from reshard.worker.queue.scripts import PREFIX, Scripts, at_once, decoded, server_ms, texts

log = logging.getLogger(__name__)

WINDOWS, REFUSED = f"{PREFIX}pace:windows", f"{PREFIX}pace:refused"

SLICE = 1.0  # seconds between two checks whether the work shall go on
ASK_AGAIN = 5.0  # seconds between two tries for calls; an answer of the Hub may have corrected how many are left
RESERVE = 0.2  # of a window's calls, for interactive work; of the Hub's 1,000 that is twenty small jobs

Call = Callable[[], None]


class SharedRateLimiter(RateLimiter):
    """A wait that the Hub asked for counts as progress; what ``check`` raises ends it."""

    def __init__(
        self,
        budget: str,
        client: redis.Redis,
        check: Call,
        alive: Call,
        bulk: bool = False,
        waits: Waits | None = None,
        called: Call = lambda: None,
    ) -> None:
        super().__init__(waits)
        self._alive = alive
        self._called = called
        self._endpoint = re.sub(r"//[^/]*@", "//", budget.partition(" ")[0])  # a name or password in it is nobody's
        self._budget = hashlib.sha256(budget.encode()).hexdigest()[:16]
        self._key = f"{PREFIX}pace:{self._budget}"
        self._redis = client
        self._run = Scripts(client)
        self._check = check
        self._bulk = bulk
        self._told: set[str] = set()  # kinds of calls that the Hub is known to limit

    def before(self, kind: str) -> None:
        while (wait := self._take(kind)) > 0:
            self.sleep(min(wait, ASK_AGAIN), rate_limited(wait))
        super().before(kind)
        self._called()

    def update(self, window: RateLimitWindow) -> None:
        """Tell the others what is left."""
        ends, length = min(window.seconds, WAIT_MAX), round(window.window * 1000)
        with _tolerated(f"tell other workers that {window.left} calls are left"):
            self._run(
                "rate_limit_update", self._budget, window.kind, window.left, round(ends * 1000), window.quota, length,
                self._endpoint,
            )  # fmt: skip

    def refused(self) -> None:
        with _tolerated("count a refused call"):
            self._redis.hincrby(REFUSED, self._endpoint, 1)

    def slow_down(self, seconds: float) -> None:
        super().slow_down(seconds)
        with _tolerated(f"tell other workers to wait {seconds:.0f} s"):
            others = int(str(self._redis.pttl(self._key)))
            self._redis.set(self._key, "", px=max(math.ceil(seconds * 1000), others))

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._check()
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, SLICE))
            self._check()

    def moved(self, count: int) -> None:
        """What is sent keeps a lease as well as what is read."""
        self._alive()

    def _take(self, kind: str) -> float:
        """Seconds to wait for a call; after 0 it is ours."""
        with _tolerated("check how long other workers wait"):
            # A Hub that names no limits and asked for no wait takes a glance at two keys, at once, instead of a script.
            if kind not in self._told and not self._redis.exists(self._key, f"{self._key}:{kind}"):
                return 0.0
            self._told.add(kind)
            return int(self._run("rate_limit_take", self._budget, kind, int(self._bulk), str(RESERVE))) / 1000
        return 0.0


@contextmanager
def _tolerated(what: str) -> Iterator[None]:
    """While Redis is away each process waits on its own."""
    try:
        yield
    except redis.RedisError as error:
        log.warning("cannot %s: %s", what, error)


def rate_limiters(
    client: redis.Redis,
    check: Call,
    alive: Call,
    bulk: bool = False,
    tell: Callable[[str], None] = lambda why: None,
    called: Call = lambda: None,
) -> Callable[[str], SharedRateLimiter]:
    """One limiter for each budget; each calls ``check`` while it waits, and ``alive`` when bytes go out.

    ``bulk`` work leaves calls to interactive work. ``tell`` hears why they wait, and "" when that is over. ``called``
    hears of each call.
    """
    made: dict[str, SharedRateLimiter] = {}
    waits = Waits(tell)
    return lambda budget: made.setdefault(budget, SharedRateLimiter(budget, client, check, alive, bulk, waits, called))


def budgets(client: redis.Redis) -> dict[tuple[str, str], tuple[int, int]]:
    """The calls left, and those of a whole window, by endpoint and kind; of several credentials the one with least."""
    now = server_ms(client)
    found: dict[tuple[str, str], tuple[int, int]] = {}
    known = [member.split(" ") for member in texts(client.zrangebyscore(WINDOWS, now, "+inf"))]
    windows = map(decoded, at_once(client, lambda pipe: [pipe.hgetall(key) for _, _, key in known]))
    for (endpoint, kind, _), window in zip(known, windows, strict=True):
        if window:
            quota = int(window["quota"])
            left = quota if now >= float(window["ends"]) else int(window["left"])
            found[endpoint, kind] = min(found.get((endpoint, kind), (left, quota)), (left, quota))
    return found


def least_left(client: redis.Redis, hours: Sequence[int]) -> dict[tuple[str, str], list[int | None]]:
    """The least percent of a window's calls that were left in each of these hours since the epoch; None: not told."""
    told = at_once(client, lambda pipe: [pipe.hgetall(f"{PREFIX}pace:least:{hour}") for hour in hours])
    found = [{tuple(of.split(" ")): int(n) for of, n in decoded(one).items()} for one in told]
    kinds = sorted({(of[0], of[1]) for one in found for of in one})
    return {of: [one.get(of) for one in found] for of in kinds}


def refusals(client: redis.Redis) -> dict[str, int]:
    """How often each endpoint answered 429."""
    return {endpoint: int(number) for endpoint, number in decoded(client.hgetall(REFUSED)).items()}
