"""Takes the pictures of the page that docs/guides/web.md shows, from a real service before a Hub on this machine.

python docs/screenshots.py      needs Chromium and its driver; without them the pictures stay as they are

Jobs, workers and catalogs are real. Only the figures of the hours before are made up: nobody waits a day for a picture.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))  # the Hub on loopback and the processes are the tests' own

from reshard.pipeline.stores.pace import RateLimitWindow
from reshard.web.auth import Scope, add_token
from reshard.worker.fleet.fleet import Fleet
from reshard.worker.fleet.rate_limit import rate_limiters
from reshard.worker.followers.counters import HOUR, hour_key
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.scripts import server_ms
from tests.hub import HubProcess
from tests.support.models import save_model
from tests.support.procs import Broker, Machine, free_port, wait_for
from tests.web.browser import MISSING, Browser, browsing, installed
from tests.web.conftest import start

GUIDES = Path(__file__).parent / "guides"
WIDE, PHONE, TALL, TALLER = 1180, 360, 1150, 1550  # pixels
CATALOG = "name: nightly-mirror\ndefaults: {to: 'you/{name}-10kB', size: 10kB}\nentries:\n"
MODELS = ("bert-base", "bert-large", "gpt-small", "gpt-medium", "llama-tiny", "mistral-tiny", "qwen-tiny", "t5-small")
ENTRIES = CATALOG + "".join(f"- repo: them/{name}\n" for name in (*MODELS, "phi-gated"))
END = 180.0  # seconds; a job takes some, most of them to load the model libraries


def main() -> None:
    if not installed():
        sys.stdout.write(f"the page's pictures stay as they are: that {MISSING}\n")
        return
    with TemporaryDirectory() as folder, _service(Path(folder)) as (store, url, token):
        chromium = Path(folder, "chromium")
        with browsing(url, chromium) as browser:
            _take(browser, store, token)


@contextmanager
def _service(folder: Path) -> Iterator[tuple[JobStore, str, str]]:
    """A queue with two workers, a page, and a Hub with models; its address, and a token that may act."""
    token, port = add_token(folder / "tokens", "ada", Scope.act), free_port()
    with HubProcess(users=["them:hf_them", "you:hf_you"]) as hub, Broker(folder) as broker:
        for name in MODELS:
            _put(hub, f"them/{name}", 8, 4000, 2)
        _put(hub, "them/model-7b", 64, 400_000, 4)
        with Machine(folder, broker.url, HF_ENDPOINT=hub.endpoint, HF_TOKEN="hf_you") as machine:
            start(machine, folder / "tokens", port)
            machine.control()
            for _ in range(2):
                machine.worker(2)
            with JobStore.at(broker.url) as store:
                yield store, f"http://127.0.0.1:{port}", token


def _put(hub: HubProcess, repo: str, tensors: int, size: int, files: int) -> None:
    with TemporaryDirectory() as folder:
        save_model(Path(folder), tensors, size, files)
        hub.admin.create_repo(repo)
        content = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        hub.admin.put_files(repo, content, lfs=[name for name in content if name.endswith(".safetensors")])


def _take(browser: Browser, store: JobStore, token: str) -> None:
    browser.look(WIDE)
    browser.sign_in(token)
    for _ in range(3):
        browser.open("/new/catalogs")
        browser.fill(text=ENTRIES)
        browser.press("Submit")
        _await(lambda: browser.text("h1").endswith("failed"))
    browser.picture(GUIDES / "page-catalog.png", TALL)
    _a_day(store)
    browser.open("/plan")
    browser.fill(source="them/model-70b", target="you/model-70b", size="3MB")
    browser.press("Submit")
    _await(lambda: browser.text("h1").endswith("failed"))
    browser.open("/plan")
    browser.fill(source="them/model-7b", target="you/model-7b-3MB", size="3MB")
    browser.press("Preview")
    browser.picture(GUIDES / "page-plan.png", TALL)
    Fleet(store).limit({"bandwidth": "500kB/s"})  # slow enough to be seen
    browser.press("Submit")
    job = browser.chrome.current_url
    _await(lambda: "left" in browser.text("#files"))
    browser.picture(GUIDES / "page-job.png", TALLER)
    browser.open("/")
    _await(lambda: browser.text("#workers li b").endswith("/s"))
    browser.picture(GUIDES / "page-overview.png", TALL)
    browser.look(PHONE, 740, dark=True)
    browser.chrome.get(job)
    _await(lambda: browser.text("#live") == "live")
    browser.picture(GUIDES / "page-phone.png", TALL)


def _await(check: Callable[[], object]) -> None:
    wait_for(check, "what the next picture shows", END)


def _a_day(store: JobStore) -> None:
    """Figures of the hours before this one, as a night of work and a quiet day leave them."""
    now = server_ms(store.redis)
    for ago in range(1, 24):
        busy = max(1, 12 - abs(ago - 12) * 2)
        day = {
            "read": busy * 41 * 10**9,
            "ended:done": busy * 7,
            "ended:failed": busy // 5,
            "failed:hub.unreachable": busy // 5,
        }
        store.redis.hset(hour_key(now // HOUR - ago), mapping=day)
        store.redis.expire(hour_key(now // HOUR - ago), 86_400)
        least = f"reshard:pace:least:{now // HOUR - ago}"
        store.redis.hset(least, "https://hub.example api", 100 - busy * 7)
    pace = rate_limiters(store.redis, lambda: None, lambda: None)("https://hub.example you")
    pace.update(RateLimitWindow("api", 870, 200.0, 1000, 300.0))


if __name__ == "__main__":
    main()
