"""How soon an open page shows what happened, and what that costs with thousands of jobs, in a real Chromium."""

from __future__ import annotations

import json
from collections.abc import Iterator

import psutil
import pytest

from reshard.pipeline.planning.model import Plan
from reshard.worker.queue.jobs import JobStore
from tests.support.measured import within
from tests.support.procs import wait_for
from tests.web.browser import MISSING, Browser, browsing, installed
from tests.web.conftest import Site, fill
from tests.worker.conftest import another, ask, claimed, plan, planned

__all__ = ["plan"]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not installed(), reason=MISSING)]

SECOND = 1000  # ms
FETCH = 200  # ms that the page itself may take of the second until an event is shown
LISTED, LIVE = 10_000, 100  # jobs
LOOKS = 10  # times that an open page is brought up to date
DRAWN = 0.4  # seconds of processor time for one of them in the browser: half of the time between two
MADE = 0.25  # and in the service

# For how long the page asks the browser to wait, from its first script on.
TIMERS = """
window.waits = [];
const later = window.setTimeout;
window.setTimeout = (run, wait, ...more) => { window.waits.push(wait ?? 0); return later(run, wait, ...more); };
"""


@pytest.fixture
def browser(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(site.url, tmp_path_factory.mktemp("chromium")) as browser:
        browser.look(1280)
        browser.sign_in(site.tokens["act"])
        yield browser


def shown(browser: Browser, text: str, css: str) -> None:
    there = "return document.querySelector(arguments[0]).textContent.includes(arguments[1])"  # which lays nothing out
    wait_for(lambda: browser.script(there, css, text), f"{text!r} on the page")


def test_what_is_marked_stays_marked_when_the_list_is_drawn_anew(browser: Browser, store: JobStore) -> None:
    job = store.submit(ask("marked")).id
    browser.open("/jobs")
    shown(browser, "live", "#live")
    browser.script(f"document.getElementById('mark-{job}').click()")
    shown(browser, store.submit(ask("later")).id, "#list")
    marked = "return [...document.querySelectorAll('input[name=job]:checked')].map((one) => one.value)"
    assert browser.script(marked) == [job]


@pytest.mark.parametrize(("next_", "path"), [("/jobs%3Fstate%3Ddone", "/jobs?state=done"), ("/%09/127.0.0.1:9/x", "/")])
def test_the_sign_in_leads_who_is_known_to_a_path_of_this_site_alone(
    browser: Browser, site: Site, store: JobStore, next_: str, path: str
) -> None:
    browser.open(f"/sign-in?next={next_}")
    wait_for(lambda: browser.chrome.current_url == site.url + path, f"the page at {path}")


def test_a_line_of_a_log_is_shown_although_nothing_else_happens(browser: Browser, store: JobStore) -> None:
    worker = another(store)
    lease = claimed(worker, store.submit(ask("logged")).id, "plan")
    no_clock = {"source": "window.setInterval = () => 0;"}
    added = browser.chrome.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", no_clock)
    browser.open(f"/jobs/{lease.job}")
    shown(browser, "live", "#live")
    shown(browser, "No log lines", "#log")
    for text in ("tried again", "and again"):
        line = {"at": 1.5, "level": "WARNING", "unit": "plan", "worker": "w", "text": text}
        assert worker.log(lease, [json.dumps(line)]) == "ok"
        shown(browser, text, "#log")
    browser.chrome.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


@pytest.mark.parametrize("path", ["/jobs", "/"])
def test_an_event_waits_less_than_a_second_for_an_open_page(browser: Browser, store: JobStore, path: str) -> None:
    browser.chrome.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": TIMERS})
    browser.open(path)
    shown(browser, "live", "#live")
    for number in range(5):
        job = store.submit(ask(f"model-{number}"))
        store.cancel(job.id)
        shown(browser, job.id, "#list, #recent")
    waits = browser.script("return window.waits")
    assert len(waits) >= 5 and max(waits) <= SECOND - FETCH, (
        "each is the only wait: the stream hands an event on at once"
    )


@pytest.mark.parametrize("path", ["/jobs", "/"])
def test_thousands_of_jobs_and_a_hundred_at_work_are_followed_without_lag(
    browser: Browser, site: Site, store: JobStore, plan: Plan, path: str
) -> None:
    fill(store, LISTED)
    workers = [another(store, f"worker-{number}") for number in range(LIVE)]
    leases = []
    for number, worker in enumerate(workers):
        job = planned(store, worker, plan, ask(f"live-{number}"))
        claimed(worker, job, "check")
        leases.append((worker, claimed(worker, job, "group:00000")))
    service = psutil.Process(site.process.pid)
    browser.open(path)
    shown(browser, leases[-1][1].job, "main")
    browser.chrome.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    before, drawn = service.cpu_times(), processor_time(browser)
    for look in range(LOOKS):
        for worker, lease in leases:
            assert worker.renew(lease, (look + 1) * 1000, True) == "ok"
        job = store.submit(ask(f"look-{look}"))
        store.cancel(job.id)
        shown(browser, job.id, "#list, #recent")
    after = service.cpu_times()
    browser_took = (processor_time(browser) - drawn) / LOOKS
    service_took = (after.user + after.system - before.user - before.system) / LOOKS
    print(f"BROWSER {browser_took * 1000:.0f} ms, SERVICE {service_took * 1000:.0f} ms of processor time for each look")
    assert within(browser_took, DRAWN) and within(service_took, MADE)


def processor_time(browser: Browser) -> float:
    """Seconds that the thread has worked which draws the page and runs its script."""
    metrics = browser.chrome.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return next(float(one["value"]) for one in metrics if one["name"] == "TaskDuration")
