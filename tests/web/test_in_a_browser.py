"""The page in a real Chromium, before two real workers and a Hub: what people do with it, live, and who can read it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from reshard.pipeline.places import Hub
from reshard.pipeline.request import Request
from reshard.web.auth import Scope, add_token
from reshard.worker.fleet.fleet import Fleet
from reshard.worker.followers.schedules import Schedules
from reshard.worker.queue.jobs import JobStore
from tests.hub import HubProcess
from tests.support.models import save_model
from tests.support.procs import Broker, Machine, free_port, wait_for
from tests.web.browser import MISSING, Browser, browsing, installed
from tests.web.conftest import Site, start

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not installed(), reason=MISSING)]

END = 120.0  # seconds; a job takes fifteen, most of them to load the model libraries
CATALOG = "name: mirror\ndefaults: {to: 'you/{name}-c', size: 10kB}\nentries:\n- repo: them/model\n- repo: them/none\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The service with two workers, a control and a Hub that has a model, and one that takes a while."""
    folder, port = tmp_path_factory.mktemp("site"), free_port()
    tokens = {scope: add_token(folder / "tokens", scope, Scope(scope)) for scope in ("read", "act")}
    with HubProcess(users=["them:hf_them", "you:hf_you"]) as hub, Broker(folder) as broker:
        for repo, *shape in (("them/model", 24, 40_000, 3), ("them/large", 64, 400_000, 4)):
            with TemporaryDirectory() as model:
                save_model(Path(model), *shape)
                hub.admin.create_repo(repo)
                files = {path.name: path.read_bytes() for path in Path(model).iterdir()}
                hub.admin.put_files(repo, files, lfs=[name for name in files if name.endswith(".safetensors")])
        with Machine(folder, broker.url, HF_ENDPOINT=hub.endpoint, HF_TOKEN="hf_you") as machine:
            process = start(machine, folder / "tokens", port)
            machine.control()
            machine.worker(1)
            machine.worker(1)
            yield Site(machine, process, f"http://127.0.0.1:{port}", tokens)


@pytest.fixture(scope="module")
def store(site: Site) -> Iterator[JobStore]:
    with JobStore.at(site.machine.env["RESHARD_BROKER_URL"]) as store:
        yield store


@pytest.fixture(scope="module")
def chromium(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(site.url, tmp_path_factory.mktemp("chromium")) as browser:
        browser.look(1280)
        browser.sign_in(site.tokens["act"])
        yield browser


@pytest.fixture
def browser(chromium: Browser, store: JobStore) -> Iterator[Browser]:
    """Signed in, at the overview of a wide window."""
    chromium.look(1280)
    chromium.open("/")
    yield chromium
    Fleet(store).resume()  # whatever became of a test that paused it


def shows(browser: Browser, text: str, css: str = "main") -> None:
    """That it comes to show this, on the page that was opened: nobody loads it again."""
    browser.script("window.same = true")
    wait_for(lambda: text in browser.text(css), f"{text!r} on the page", END)
    assert browser.script("return window.same") is True


def submit(browser: Browser, source: str, target: str, size: str = "300kB") -> str:
    """By the form; returns the job that the page shows."""
    browser.open("/plan")
    browser.fill(source=source, target=target, size=size)
    browser.press("Submit")
    return browser.chrome.current_url.rpartition("/")[2]


def test_a_job_is_planned_submitted_and_watched_to_its_end(browser: Browser, store: JobStore) -> None:
    browser.open("/plan")
    browser.fill(source="them/model", target="you/watched", size="300kB")
    browser.press("Preview")
    assert "model-00004-of-00004.safetensors" in browser.text("#result")
    assert len(browser.chrome.find_elements(By.CSS_SELECTOR, ".picture path")) >= 24
    assert browser.serious() == []
    browser.press("Submit")
    job = browser.chrome.current_url.rpartition("/")[2]
    shows(browser, "stored", "#files")
    shows(browser, "done", "h1")
    shows(browser, "passed", "#checks")
    assert store.get(job).state == "done"
    wait_for(lambda: browser.text("#files").count("stored") == 4, "every file to be stored")
    assert browser.chrome.find_element(By.CSS_SELECTOR, "#head a[href*='/commit/']")
    assert browser.serious() == []
    severe = [line for line in browser.chrome.get_log("browser") if line["level"] == "SEVERE"]
    assert [line for line in severe if "401" not in line["message"]] == [], "the sign-in asks whether it is needed"


# Of each file, how much of it is copied and what is said of that, and when the job was submitted.
MOVING = """
const bars = [...document.querySelectorAll("#files progress")];
const told = bars.map((bar) => [bar.value, bar.parentElement.innerText]);
return [told, document.querySelector("#head .figure").innerText, document.querySelector("#head dd time").innerText];
"""
INSIDE = """
const box = document.querySelector("#log .scroll"), rows = box.querySelectorAll("tbody tr");
const [outer, last] = [box, rows[rows.length - 1]].map((one) => one.getBoundingClientRect());
return [rows.length, box.scrollHeight > box.clientHeight, outer.top <= last.top && last.bottom <= outer.bottom + 1];
"""


def test_a_jobs_page_moves_while_it_is_read_and_nothing_is_fetched(browser: Browser, store: JobStore) -> None:
    Fleet(store).limit({"bandwidth": "300kB/s"})
    try:
        job = submit(browser, "them/large", "you/moving", "3MB")
        shows(browser, "/s", "#files")
        shows(browser, "left", "#files")
        shows(browser, "attempt 1", "#log")
        browser.script("window.bar = document.querySelector('#files progress')")
        browser.script("window.fetch = () => new Promise(() => {})")
        files, whole, submitted = browser.script(MOVING)

        def moved() -> bool:
            now, whole_now, submitted_now = browser.script(MOVING)
            grown = [(was, is_) for was, is_ in zip(files, now, strict=True) if is_[0] > was[0] and is_[1] != was[1]]
            return bool(grown) and whole_now != whole and submitted_now != submitted

        wait_for(moved, "bars, figures and times that go on", END)
        assert browser.script("return window.bar.isConnected"), "no part was drawn anew"
    finally:
        Fleet(store).limit({"bandwidth": "none"})
    browser.open(f"/jobs/{job}")
    shows(browser, "done", "h1")
    shows(browser, "confirm of job", "#log")
    severe = [line for line in browser.chrome.get_log("browser") if line["level"] == "SEVERE"]
    assert [line for line in severe if "401" not in line["message"]] == []


def test_a_log_is_read_from_its_end(browser: Browser, store: JobStore) -> None:
    Fleet(store).pause("a test", None)
    job = store.submit(Request(source=Hub(repo="them/model"), target=Hub(repo="you/logged"))).id
    said = {"at": 1.5, "level": "WARNING", "unit": "plan", "worker": "w", "text": "a line of some length " * 20}
    store.redis.rpush(f"reshard:job:{job}:log", *[json.dumps(said)] * 100)
    browser.open(f"/jobs/{job}")
    assert browser.script(INSIDE) == [100, True, True]
    assert browser.serious() == []
    store.cancel(job)


def test_a_paused_service_says_so_and_a_job_is_cancelled_and_retried(browser: Browser, store: JobStore) -> None:
    browser.fill(reason="a test")
    browser.press("Pause everything")
    shows(browser, "a test", "#banner")
    job = submit(browser, "them/model", "you/cancelled")
    shows(browser, "Waiting: ", "#head")
    browser.script("document.querySelector('#do-cancel summary').click()")  # the page is live, and may be drawn anew
    browser.press("Cancel")
    shows(browser, "cancelled", "h1")
    browser.press("Retry")
    shows(browser, "queued", "h1")
    assert Fleet(store).resume()
    shows(browser, "done", "h1")
    assert store.get(job).state == "done" and browser.text("#banner").strip() == ""


def test_a_job_that_fails_says_why_and_what_to_do(browser: Browser, store: JobStore) -> None:
    job = submit(browser, "them/missing", "you/missing")
    shows(browser, "failed", "h1")
    error = store.get(job).error or {}
    told = browser.text("#head .problem")
    said = error["message"][0].upper() + error["message"][1:]
    assert error["code"] in told and said in told and told.count("then run Retry.") == 1
    browser.open("/")
    shows(browser, error["code"], "#queue")


# The job is cancelled after its page was made, and before the page's stream of events begins; no clock asks again.
MEANWHILE = """
window.setInterval = () => 0;
const Real = EventSource;
window.EventSource = class extends Real {
  constructor(address) {
    const asked = new XMLHttpRequest();
    asked.open("POST", location.pathname + "/cancel", false);
    asked.send();
    super(address);
  }
};
"""


def test_what_happens_before_a_page_is_live_is_shown(browser: Browser, store: JobStore) -> None:
    Fleet(store).pause("a test", None)
    job = store.submit(Request(source=Hub(repo="them/model"), target=Hub(repo="you/meanwhile"))).id
    added = browser.chrome.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": MEANWHILE})
    try:
        browser.open(f"/jobs/{job}")
        wait_for(lambda: "cancelled" in browser.text("h1"), "the state that the job has", END)
    finally:
        browser.chrome.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
        Fleet(store).resume()
    assert store.get(job).state == "cancelled"


def test_a_catalog_is_submitted_and_watched(browser: Browser, store: JobStore) -> None:
    browser.open("/new/catalogs")
    browser.fill(text=CATALOG)
    browser.press("Preview")
    assert "Repository not found on " in browser.text("#result") and store.redis.scard("reshard:catalogs") == 0
    browser.press("Submit")
    shows(browser, "failed", "h1")
    shows(browser, "source.not_found", "#failures")
    cells = [one.get_attribute("title") or "" for one in browser.chrome.find_elements(By.CSS_SELECTOR, ".grid .cell")]
    assert sorted(cell.partition(":")[0] for cell in cells) == ["failed", "published"]


def test_a_schedule_is_tried_saved_and_edited(browser: Browser, store: JobStore) -> None:
    browser.open("/new/schedules")
    browser.fill(
        name="nightly", cron="0 2 * * *", tz="Asia/Tokyo", source="them/model", target="you/nightly", size="1MB"
    )
    browser.press("Preview")
    assert (
        "A job would be queued: them/model to you/nightly, 1 file" in browser.text("#result")
        and Schedules(store).all() == []
    )
    browser.press("Save")
    assert browser.text("#s-nightly").count(" 02:00 JST") == 5
    browser.chrome.find_element(By.CSS_SELECTOR, "#s-nightly a[href$='/edit']").click()
    browser.fill(cron="0 4 * * *")
    browser.press("Save")
    assert browser.text("#s-nightly").count(" 04:00 JST") == 5
    browser.press("Run now")
    shows(browser, "done", "#s-nightly")


def test_it_is_used_with_the_keyboard_alone(browser: Browser, store: JobStore) -> None:
    def focused() -> str:
        return str(browser.script("return document.activeElement.innerText || document.activeElement.id"))

    def press(*keys: str) -> None:
        for key in keys:
            browser.chrome.switch_to.active_element.send_keys(key)

    browser.open("/plan")
    press(Keys.TAB)
    assert focused() == "Skip to content"
    press(Keys.ENTER)
    wait_for(lambda: browser.script("return document.activeElement.id") == "main", "the focus in the main part")
    press(Keys.TAB, "them/model", Keys.TAB, "you/typed", Keys.TAB, Keys.TAB, Keys.TAB)
    assert focused() == "More options"
    outline = browser.script("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    press(Keys.TAB)
    assert focused() == "Preview"
    press(Keys.TAB, Keys.ENTER)
    wait_for(lambda: "/jobs/" in browser.chrome.current_url, "the page of the job")
    job = store.get(browser.chrome.current_url.rpartition("/")[2])
    assert str(job.request.target) == "you/typed"
    store.cancel(job.id)
    shows(browser, "cancelled", "h1")


def test_a_field_that_is_typed_in_keeps_its_text_while_the_page_is_live(browser: Browser, store: JobStore) -> None:
    browser.fill(reason="half a sent")
    job = store.submit(Request(source=Hub(repo="them/none"), target=Hub(repo="you/typing")))
    shows(browser, job.id, "#recent")
    assert browser.script("return document.getElementById('reason').value") == "half a sent"
    assert browser.script("return document.activeElement.id") == "reason"
