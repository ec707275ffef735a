"""One budget of calls for all workers: who is told to wait tells the others, and bulk work leaves the last calls."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress

import httpx2
import pytest
import redis
from pydantic import SecretStr

from reshard.pipeline.copying.loop import Stopped
from reshard.pipeline.limits import WAIT_MAX
from reshard.pipeline.stores.credentials import Credential
from reshard.pipeline.stores.hub_api import HubApi
from reshard.pipeline.stores.pace import RateLimitWindow
from reshard.worker.fleet.rate_limit import RESERVE, SharedRateLimiter, rate_limiters
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.scripts import PREFIX, texts
from tests.hub.fixtures import Namespace
from tests.support.procs import Broker
from tests.support.stuck import STUCK

BUDGET = "http://hub someone"


def nothing() -> None:
    return None


def wait(pace: SharedRateLimiter) -> int:
    """Seconds that a call would have to wait now, as they are told; 0: it may go, and is taken."""
    told: list[str] = []

    def sleep(seconds: float, why: str) -> None:
        told.append(why)
        raise Stopped("cancel")

    with pytest.MonkeyPatch.context() as patch, suppress(Stopped):
        patch.setattr(pace, "sleep", sleep)
        pace.before("api")
    return int(told[0].removeprefix("rate limited for ").removesuffix(" s")) if told else 0


def kept(store: JobStore, kind: str = "") -> str:
    """The key of the only budget's wait, or of its window of this kind."""
    found = texts(store.redis.scan_iter(f"{PREFIX}pace:????????????????{kind and f':{kind}'}"))
    (key,) = found
    return key


def test_a_wait_that_one_worker_was_asked_for_holds_for_all(store: JobStore) -> None:
    told, other = (rate_limiters(store.redis, nothing, nothing)(BUDGET) for _ in range(2))
    told.slow_down(60)
    assert 0 < wait(other) <= 60
    told.slow_down(0.01)
    assert wait(other) > 0, "a shorter wait does not end a longer one"
    store.redis.pexpire(kept(store), 10)
    other.before("api")  # it waits, and then it may
    assert wait(other) == 0


def test_another_budget_goes_on(store: JobStore) -> None:
    of = rate_limiters(store.redis, nothing, nothing)
    of(BUDGET).slow_down(60)
    assert wait(of("http://hub someone-else")) == 0


def test_a_shorter_wait_does_not_cut_a_longer_one_short(store: JobStore) -> None:
    one, two = (rate_limiters(store.redis, nothing, nothing)(BUDGET) for _ in range(2))
    one.slow_down(600)
    two.slow_down(1)
    assert wait(rate_limiters(store.redis, nothing, nothing)(BUDGET)) > 1


def test_a_window_from_before_the_broker_s_clock_jumped_back_is_over(store: JobStore) -> None:
    pace = rate_limiters(store.redis, nothing, nothing)(BUDGET)
    pace.update(RateLimitWindow("api", 0, 60, 10, 300))
    assert wait(pace) > 50
    store.redis.hincrby(kept(store, "api"), "ends", 3_600_000)
    assert wait(pace) == 0
    pace.update(RateLimitWindow("api", 0, 60, 10, 300))
    assert 50 < wait(pace) <= 60, "what the Hub says counts again"


def test_a_cancel_ends_a_wait(store: JobStore) -> None:
    def cancelled() -> None:
        raise Stopped("cancel")

    rate_limiters(store.redis, nothing, nothing)(BUDGET).slow_down(60)
    with pytest.raises(Stopped):
        rate_limiters(store.redis, cancelled, nothing)(BUDGET).before("api")


@pytest.mark.slow
def test_without_a_broker_a_worker_waits_on_its_own() -> None:
    away = redis.Redis(port=1, socket_connect_timeout=0.1)
    pace = SharedRateLimiter(BUDGET, away, stopped, nothing)
    pace.before("api")
    pace.slow_down(60)
    with pytest.raises(Stopped):
        pace.before("api")


# ---------------------------------------------------------------------------------------------- one budget for all

SAID = RateLimitWindow("api", left=10, seconds=30, quota=10, window=30)  # at the beginning of a window of ten calls


def stopped() -> None:
    raise Stopped("cancel")


def calls(pace: SharedRateLimiter, kind: str = "api") -> int:
    """How many calls may go before one would have to wait."""
    for made in range(100):
        try:
            pace.before(kind)
        except Stopped:
            return made
    return 100


def hurried(store: JobStore, bulk: bool) -> SharedRateLimiter:
    """A pace that stops where it would have to wait."""
    return rate_limiters(store.redis, stopped, nothing, bulk)(BUDGET)


def test_bulk_work_leaves_the_last_calls_of_a_window_to_interactive_work(store: JobStore) -> None:
    bulk, interactive = hurried(store, bulk=True), hurried(store, bulk=False)
    bulk.update(SAID)
    assert calls(bulk) == 10 - int(10 * RESERVE)
    assert calls(interactive) == int(10 * RESERVE)
    assert calls(interactive) == calls(bulk) == 0


def test_calls_of_one_kind_leave_those_of_the_other_alone(store: JobStore) -> None:
    interactive = hurried(store, bulk=False)
    interactive.update(SAID)
    interactive.update(SAID._replace(kind="resolve", left=3))
    assert (calls(interactive), calls(interactive, "resolve")) == (10, 3)


def test_where_a_hub_says_nothing_nobody_waits(store: JobStore) -> None:
    assert calls(hurried(store, bulk=True)) == 100


def test_where_a_hub_says_nothing_no_script_runs_and_a_wait_still_holds_at_once(store: JobStore) -> None:
    def scripts() -> int:
        return int(store.redis.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0))

    one, other = hurried(store, bulk=True), hurried(store, bulk=True)
    before = scripts()
    assert calls(one) == 100 and scripts() == before
    other.slow_down(60)
    assert calls(one) == 0
    store.redis.delete(kept(store))
    other.update(SAID._replace(left=3))
    assert calls(one) == 3 - 2, "of which bulk work leaves two"


def test_an_answer_that_was_overtaken_gives_no_calls_back(store: JobStore) -> None:
    interactive = hurried(store, bulk=False)
    interactive.update(SAID._replace(left=2))
    interactive.update(SAID._replace(left=7, seconds=29))
    assert calls(interactive) == 2


def test_calls_that_somebody_else_made_with_the_token_count(store: JobStore) -> None:
    interactive = hurried(store, bulk=False)
    interactive.update(SAID)
    interactive.update(SAID._replace(left=1))
    assert calls(interactive) == 1


def test_a_new_window_brings_new_calls_and_an_old_ones_answer_takes_none(store: JobStore) -> None:
    interactive = hurried(store, bulk=False)
    interactive.update(SAID._replace(left=0, seconds=5))
    assert calls(interactive) == 0
    interactive.update(SAID._replace(left=9))
    interactive.update(SAID._replace(left=0, seconds=5))
    assert calls(interactive) == 9


def test_when_a_window_is_over_its_calls_are_there_again_and_are_counted(store: JobStore) -> None:
    bulk = hurried(store, bulk=True)
    bulk.update(SAID._replace(left=0, seconds=0))
    assert calls(bulk) == 8


def test_what_the_hub_says_of_a_new_window_wins_over_what_we_made_of_it(store: JobStore) -> None:
    """Somebody else with the token began it long before our first call in it."""
    interactive = hurried(store, bulk=False)
    interactive.update(SAID._replace(left=5, seconds=0))
    interactive.before("api")
    interactive.update(SAID._replace(left=1, seconds=5))
    assert calls(interactive) == 1
    assert wait(interactive) <= 5


def test_an_answer_that_cannot_be_is_believed_until_the_next(store: JobStore) -> None:
    interactive = hurried(store, bulk=False)
    interactive.update(SAID._replace(left=0, seconds=600))
    assert 0 < wait(interactive) <= SAID.window + 2
    interactive.update(SAID._replace(left=9, seconds=5))
    interactive.update(SAID._replace(left=0, seconds=600))
    assert calls(interactive) == 9
    assert wait(interactive) <= 5


def test_of_two_answers_that_exclude_each_other_the_later_one_counts(store: JobStore) -> None:
    interactive = hurried(store, bulk=False)
    interactive.update(SAID._replace(left=0))
    interactive.update(SAID._replace(left=9, seconds=20))
    assert calls(interactive) == 9
    assert wait(interactive) <= 20


def test_of_many_at_once_no_more_go_than_there_are_calls(store: JobStore) -> None:
    made: list[int] = []
    hurried(store, bulk=False).update(SAID)
    threads = [threading.Thread(target=lambda: made.append(calls(hurried(store, bulk=False)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(made) == 10


def test_a_window_that_never_ends_is_not_waited_for_for_ever(store: JobStore) -> None:
    interactive = hurried(store, bulk=False)
    interactive.update(SAID._replace(left=0, seconds=10**9))
    assert wait(interactive) <= WAIT_MAX


QUOTA, WINDOW = 20, 3  # calls, in so many seconds


def test_on_a_small_budget_interactive_calls_never_wait_for_bulk_ones(store: JobStore, namespace: Namespace) -> None:
    """Bulk work wants more than its part of a window; nobody is ever turned away."""
    namespace.admin.settings(rate_limits={"api": {"quota": QUOTA, "window": WINDOW}})
    namespace.admin.log(reset=True)
    waits: dict[bool, float] = {True: 0.0, False: 0.0}

    def api(bulk: bool) -> HubApi:
        class Watched(SharedRateLimiter):
            def sleep(self, seconds: float, why: str) -> None:
                waits[bulk] += seconds
                resting.set()
                super().sleep(seconds, why)

        credential = Credential("HF_TOKEN", SecretStr(namespace.token))
        return HubApi(namespace.endpoint, credential, Watched(BUDGET, store.redis, nothing, nothing, bulk))

    resting = threading.Event()
    bulk, interactive = api(bulk=True), api(bulk=False)
    work = threading.Thread(target=lambda: [bulk.whoami() for _ in range(QUOTA)])
    work.start()
    assert resting.wait(30)
    for _ in range(int(QUOTA * RESERVE)):
        interactive.whoami()
    assert waits[False] == 0
    assert work.is_alive(), "bulk work waits for the next window"
    work.join()
    answers = [entry["status"] for entry in namespace.admin.log() if entry["path"].startswith("/api/")]
    assert len(answers) == QUOTA + int(QUOTA * RESERVE)
    assert set(answers) == {200}
    assert waits[True] >= WINDOW - 1


def test_only_the_hub_itself_says_what_is_left(store: JobStore) -> None:
    interactive = hurried(store, bulk=False)
    api = HubApi("https://hub", None, interactive)
    headers = {"RateLimit": '"api";r=2;t=30', "RateLimit-Policy": '"fixed window";"api";q=10;w=30'}

    def answer(url: str) -> None:
        for hook in api.client.event_hooks["response"]:
            hook(httpx2.Response(200, headers=headers, request=httpx2.Request("GET", url)))

    answer("https://content/x")
    assert calls(interactive) == 100
    answer("https://hub/x")
    assert calls(interactive) == 2


def test_a_worker_in_another_process_spends_the_same_budget(store: JobStore, broker: Broker) -> None:
    hurried(store, bulk=False).update(SAID)
    script = (
        "import sys\n"
        "from reshard.worker.queue.jobs import open_redis\n"
        "from reshard.worker.fleet.rate_limit import SharedRateLimiter\n"
        f"pace = SharedRateLimiter({BUDGET!r}, open_redis(sys.argv[1]), lambda: None, lambda: None, bulk=True)\n"
        "for _ in range(8): pace.before('api')\n"
    )
    subprocess.run([sys.executable, "-c", script, broker.url], check=True, timeout=STUCK)
    assert calls(hurried(store, bulk=True)) == 0
    assert calls(hurried(store, bulk=False)) == 2
