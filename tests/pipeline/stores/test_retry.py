"""The one policy of retries: how often, how long, and what comes of it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline.errors import HubError, HubUnreachable, RateLimited
from reshard.pipeline.limits import ATTEMPTS, BACKOFF_FIRST, BACKOFF_MAX, WAIT_MAX
from reshard.pipeline.stores import pace
from reshard.pipeline.stores.pace import RateLimiter, RateLimitWindow, Waits
from reshard.pipeline.stores.retry import Retry, is_transient, own, rate_limit_window, retry_after
from tests.pipeline.stores.conftest import Impatient

UNTIL = "Wed, 21 Oct 2026 07:28:00 GMT"
BROKEN = httpx2.ReadError("reset")


def answer(status: int, **headers: str) -> httpx2.Response:
    return httpx2.Response(status, headers=headers)


def test_the_waits_grow_up_to_a_bound(pace: Impatient) -> None:
    retry = Retry("https://hub", pace, attempts=20)
    for _ in range(19):
        retry.after(BROKEN)
    assert 0.5 * BACKOFF_FIRST <= pace.slept[0] <= 1.5 * BACKOFF_FIRST
    assert max(pace.slept) <= 1.5 * BACKOFF_MAX
    for n, wait in enumerate(pace.slept):
        expected = min(BACKOFF_MAX, BACKOFF_FIRST * 2**n)
        assert 0.5 * expected <= wait <= 1.5 * expected


def test_the_waits_of_many_are_spread(pace: Impatient) -> None:
    for _ in range(50):
        Retry("https://hub", pace).after(BROKEN)
    assert len(set(pace.slept)) == 50


@pytest.mark.parametrize(
    ("problem", "error"),
    [
        (BROKEN, HubUnreachable),
        (httpx2.ConnectTimeout("slow"), HubUnreachable),
        (answer(503), HubError),
        (answer(429), RateLimited),
    ],
)
def test_it_gives_up_after_so_many_attempts_in_a_row(
    pace: Impatient, problem: httpx2.TransportError | httpx2.Response, error: type[HubError]
) -> None:
    retry = Retry("https://hub", pace)
    for _ in range(ATTEMPTS - 1):
        retry.after(problem)
    with pytest.raises(error) as given_up:
        retry.after(problem)
    assert type(given_up.value) is error and given_up.value.retryable


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("https://hub/api/models/a", "cannot reach https://hub: no"),
        ("https://cdn.hub:8443/x?key=secret", "cannot reach https://cdn.hub:8443: no"),
    ],
)
def test_the_host_that_does_not_answer_is_named_and_no_more_of_its_address(
    pace: Impatient, url: str, named: str
) -> None:
    retry = Retry("https://hub", pace, attempts=1)
    with pytest.raises(HubUnreachable) as given_up:
        retry.after(httpx2.ConnectError("no route", request=httpx2.Request("GET", url)))
    assert str(given_up.value).startswith(named) and "secret" not in str(given_up.value)


@pytest.mark.parametrize(
    ("endpoint", "url", "is_own"),
    [
        ("https://Hub.Example", "https://hub.example/api", True),
        ("https://hub.example:443", "https://hub.example/api", True),
        ("http://hub.example", "http://hub.example:80/api", True),
        ("https://hub.example:8443", "https://hub.example/api", False),
        ("https://hub.example", "http://hub.example/api", False),
        ("https://hub.example", "https://hub.example.evil/api", False),
        ("https://hub.example", "https://hub.example@evil/api", False),
    ],
)
def test_a_url_is_on_the_hub_itself_however_its_host_and_port_are_written(
    endpoint: str, url: str, is_own: bool
) -> None:
    assert own(endpoint, url) is is_own


def test_a_server_that_asks_for_no_wait_gets_the_usual_one(pace: Impatient) -> None:
    Retry("https://hub", pace).after(answer(503, **{"Retry-After": "0"}))
    assert len(pace.slept) == 1 and not pace.slowed


def test_progress_begins_a_new_row(pace: Impatient) -> None:
    retry = Retry("https://hub", pace)
    for _ in range(3 * ATTEMPTS):
        retry.after(BROKEN)
        retry.progress()
    assert max(pace.slept) <= 1.5 * BACKOFF_FIRST


@pytest.mark.parametrize(
    ("response", "seconds"),
    [
        (answer(429, **{"Retry-After": "12"}), 12.0),
        (answer(503, **{"Retry-After": "3"}), 3.0),
        (answer(429, RateLimit='"api";r=0;t=55'), 56.0),
        (answer(429, RateLimit='"api";r=4;t=55'), None),  # sent with every answer: not the reason of this one
        (answer(503, RateLimit='"api";r=0;t=55'), None),
        (answer(429, **{"Retry-After": UNTIL, "Date": "Wed, 21 Oct 2026 07:27:20 GMT"}), 40.0),
        (answer(503, **{"Retry-After": UNTIL, "Date": "Wed, 21 Oct 2026 09:00:00 GMT"}), 0.0),
        (answer(503, **{"Retry-After": "Wed Oct 21 07:28:00 2026", "Date": "Wed, 21 Oct 2026 07:27:59 GMT"}), 1.0),
        (answer(503, **{"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}), 0.0),
        (answer(503, **{"Retry-After": "Wed, 99 Oct 2026 07:28:00 GMT"}), None),
        (answer(503, **{"Retry-After": "soon"}), None),
        (answer(429), None),
    ],
)
def test_a_server_says_how_long_to_wait(response: httpx2.Response, seconds: float | None) -> None:
    assert retry_after(response) == seconds


@pytest.mark.parametrize(
    ("limit", "policy", "expected"),
    [
        ('"api";r=4;t=55', '"fixed window";"api";q=500;w=300', RateLimitWindow("api", 4, 55, 500, 300)),
        ('"resolvers";r=0;t=1', '"fixed window";"resolvers";q=5000;w=300', RateLimitWindow("resolve", 0, 1, 5000, 300)),
        ('"api";r=4;t=55', "", None),  # of how many, it does not say
        ("r=4", '"fixed window";"api";q=500;w=300', None),
        ("", "", None),
    ],
)
def test_a_server_says_with_each_answer_how_many_calls_are_left(
    limit: str, policy: str, expected: RateLimitWindow | None
) -> None:
    assert rate_limit_window(answer(200, **{"RateLimit": limit, "RateLimit-Policy": policy})) == expected
    assert rate_limit_window(answer(429, **{"RateLimit": limit, "RateLimit-Policy": policy})) == expected


def test_a_wait_beyond_reason_is_refused(pace: Impatient) -> None:
    with pytest.raises(RateLimited):
        Retry("https://hub", pace).after(answer(429, **{"Retry-After": str(int(WAIT_MAX) + 1)}))


@given(st.integers(100, 599))
def test_what_the_caller_did_wrong_is_never_tried_again(status: int) -> None:
    transient = is_transient(answer(status))
    assert not transient or status >= 500 or status in (408, 425, 429)


def test_all_threads_of_a_process_wait_for_a_slow_hub() -> None:
    waited: list[float] = []
    held = threading.Event()

    class Observed(RateLimiter):
        def sleep(self, seconds: float, why: str) -> None:
            waited.append(self._not_before - time.monotonic())
            self._not_before = 0.0
            held.set()

    pace = Observed()
    pace.slow_down(50.0)
    pace.slow_down(10.0)  # an earlier end does not shorten the wait
    thread = threading.Thread(target=pace.before, args=("api",))
    thread.start()
    assert held.wait(10)
    thread.join()
    assert 45.0 < waited[0] <= 50.0


def test_what_is_told_is_the_newest_wait_until_the_last_is_over() -> None:
    told: list[str] = []
    waits = Waits(told.append)
    with waits.told("rate limited, 40 s"), waits.told("a hub unreachable, try 2 of 6"):
        pass
    assert told == ["rate limited, 40 s", "a hub unreachable, try 2 of 6", "rate limited, 40 s", ""]


def test_a_long_wait_is_told_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [0.0], list[str]()
    limiter = RateLimiter(Waits(told.append))
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(pace, "time", clock)
    limiter.slow_down(25)
    limiter.before("api")
    assert [why for why in told if why] == [f"rate limited for {left} s" for left in (25, 15, 5)]


@pytest.mark.parametrize(("status", "error"), [(503, HubError), (429, RateLimited)])
@pytest.mark.parametrize(("url", "told"), [("https://hub/api", {"request_id": "abc-1"}), ("https://elsewhere/api", {})])
def test_what_is_given_up_names_the_hubs_own_id_of_the_last_call(
    pace: Impatient, status: int, error: type[HubError], url: str, told: dict[str, str]
) -> None:
    last = httpx2.Response(status, headers={"X-Request-Id": "abc-1"}, request=httpx2.Request("GET", url))
    with pytest.raises(error) as given_up:
        Retry("https://hub", pace, attempts=1).after(last)
    assert {name: value for name, value in given_up.value.facts.items() if name == "request_id"} == told


def test_a_wait_that_is_too_long_names_the_id_of_the_call(pace: Impatient) -> None:
    headers = {"X-Request-Id": "abc-1", "Retry-After": "999999"}
    asked = httpx2.Response(429, headers=headers, request=httpx2.Request("GET", "https://hub/api"))
    with pytest.raises(RateLimited) as refused:
        Retry("https://hub", pace).after(asked)
    assert refused.value.facts["request_id"] == "abc-1"
