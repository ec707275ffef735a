"""Every page in a real Chromium: who can read it, on which screen, in which colours, and what scripts add to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from reshard.pipeline.errors import TargetDrifted
from reshard.pipeline.planning.model import Plan
from reshard.worker.followers.cursor import Cursor
from reshard.worker.followers.schedules import Schedules
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.scripts import job_key
from reshard.worker.queue.states import JobState
from tests.web.browser import MISSING, Browser, browsing, installed
from tests.web.conftest import Site
from tests.worker.conftest import another, ask, claimed, followed, plan, planned
from tests.worker.followers.builders import begin, definition, fail, finish, jobs, nightly

__all__ = ["plan"]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not installed(), reason=MISSING)]

SCREENS = [(360, False), (360, True), (1600, False), (1600, True)]  # pixels, dark
ZOOMED = 640  # pixels of a page on a screen of 1,280 that is shown twice as large

LINKED = (
    *("/", "/jobs", "/jobs?code=source.no_weights", "/plan", "/catalogs", "/catalogs/mirror", "/schedules"),
    *("/new/catalogs", "/new/schedules", "/new/schedules?catalog=mirror", "/schedules/nightly/edit"),
    *("/sign-in", "/sign-in?once=used", "/nowhere", "/jobs/none"),
)
SHADE = "return getComputedStyle(document.documentElement).backgroundColor.match(/\\d+/g)[0]"

Go = Callable[[Browser], None]


@pytest.fixture(scope="module")
def chromium(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(site.url, tmp_path_factory.mktemp("chromium")) as browser:
        browser.sign_in(site.tokens["act"])
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    chromium.look(1280)
    chromium.chrome.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": "UTC"})
    return chromium


@pytest.fixture
def job_of(store: JobStore, plan: Plan) -> dict[JobState, str]:
    """A job of each state, with a catalog and a schedule, one of each that fails and one that is well."""
    worker, catalogs, schedules = another(store), Cursor(store), Schedules(store)
    made = {state: planned(store, worker, plan, ask(f"in-{state}")) for state in JobState}
    claimed(worker, made[JobState.copying], "check")
    for state, job in made.items():
        store.redis.hset(job_key(job), "state", str(state))
    drifted = store.submit(ask("drifted")).id
    lease = claimed(worker, drifted, "plan")
    assert worker.fail(lease, TargetDrifted(target="us/b", what="x", job=drifted).to_dict()) == "ok"
    made[JobState.failed] = drifted
    begin(catalogs, definition(3, max_failures=5))
    first, second, _ = jobs(catalogs)
    fail(worker, first)
    finish(worker, second)
    schedules.add(nightly(tz="Europe/Berlin"))
    schedules.add(nightly("paused", ask("paused"), tz="Asia/Tokyo"))
    schedules.pause("paused")
    fail(worker, schedules.run("nightly").job or "")
    followed(store)
    return made


def sent(path: str, button: str, **fields: str) -> Go:
    def go(browser: Browser) -> None:
        browser.open(path)
        browser.fill(**fields)
        browser.press(button)

    return go


def chosen(browser: Browser) -> None:
    """What asks before something is done to several jobs."""
    browser.open("/jobs")
    browser.script("document.querySelectorAll('[name=job]').forEach((one) => one.click())")
    browser.press("Delete…")


def refused(browser: Browser) -> None:
    chosen(browser)
    browser.script("document.querySelector('.danger').textContent = 'Delete them'")
    browser.press("Delete them")


def places(job_of: dict[JobState, str]) -> dict[str, Go]:
    """How to come to each page."""
    asked = {"name": "new", "cron": "@daily", "source": "a/b", "target": "us/b"}
    return {
        **{path: partial(Browser.open, path=path) for path in LINKED},
        **{state: partial(Browser.open, path=f"/jobs/{job}") for state, job in job_of.items()},
        "a plan that is refused": sent("/plan", "Submit", source="a/b", target="us/b", size="200Mb"),
        "a schedule that is refused": sent("/new/schedules", "Save", **asked | {"cron": "0 3 * *"}),
        "a catalog that is refused": sent("/new/catalogs", "Preview", text="name: x\nentrys: []\n"),
        "chosen": chosen,
        "refused": refused,
    }


def test_everybody_can_read_every_page(browser: Browser, job_of: dict[JobState, str]) -> None:
    for name, go in places(job_of).items():
        browser.look(1600)
        go(browser)
        browser.script("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        for width, dark in SCREENS:
            browser.look(width, dark=dark)
            assert browser.script("return document.documentElement.scrollWidth") == width, (name, width)
            assert (int(str(browser.script(SHADE))) < 60) is dark
            assert browser.serious() == [], (name, width, dark)
        browser.look(ZOOMED)
        assert browser.script("return document.documentElement.scrollWidth") == ZOOMED, name


def test_every_page_is_read_without_scripts(browser: Browser, job_of: dict[JobState, str]) -> None:
    browser.chrome.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        for name in places(job_of):
            if name.startswith("/"):
                browser.open(name)
                assert browser.chrome.find_element(By.CSS_SELECTOR, "main h1").text
                copies = browser.chrome.find_elements(By.CSS_SELECTOR, "button.copy")
                assert not any(one.is_displayed() for one in copies), "which would do nothing"
    finally:
        browser.chrome.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_a_command_is_copied_by_its_button(browser: Browser, store: JobStore) -> None:
    browser.open("/")
    assert "start both with reshard up" in browser.text("#banner")
    browser.chrome.find_element(By.CSS_SELECTOR, "#banner button.copy").click()
    assert browser.text("#banner button.copy") == "Copied"
    reason = browser.chrome.find_element(By.ID, "reason")
    reason.send_keys(Keys.CONTROL, "v")
    assert reason.get_attribute("value") == "reshard up"


def test_times_are_told_by_the_clock_of_the_schedule_and_the_readers(
    browser: Browser, job_of: dict[JobState, str]
) -> None:
    browser.chrome.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": "America/Phoenix"})
    browser.open("/schedules")
    head, first, *_ = browser.text("#s-nightly .clocks").splitlines()
    assert head.split() == ["Europe/Berlin", "America/Phoenix", "(yours)"]
    assert " 03:00 CE" in first and (" 19:00" in first or " 18:00" in first), "in winter, and in summer"


def test_a_field_that_is_refused_is_where_the_keyboard_is(browser: Browser, store: JobStore) -> None:
    sent("/new/schedules", "Save", name="new", cron="0 3 * *", source="a/b", target="us/b")(browser)
    assert browser.script("return document.activeElement.id") == "cron"
    assert "needs 5 fields" in browser.text("#wrong")
    browser.fill(cron="0 3 * * *")
    browser.press("Save")
    assert [one.schedule.name for one in Schedules(store).all()] == ["new"]
    browser.open("/schedules")
    assert "a/b → us/b" in browser.text("#s-new")
