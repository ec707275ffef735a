"""A headless Chromium for tests and for the pictures in docs/guides/web.md; nothing of it is needed to run the page."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from axe_core_python.selenium import Axe
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from tests.support.procs import wait_for

LOADED = 60.0  # seconds; a page takes some hundredths of one on an idle machine
MISSING = "needs Chromium and its driver (Debian: apt install chromium chromium-driver)"


def installed() -> bool:
    return bool(shutil.which("chromium") and shutil.which("chromedriver"))


class Browser:
    """One window, signed in or not, at a page of one service."""

    def __init__(self, chrome: Chrome, url: str) -> None:
        self.chrome = chrome
        self.url = url

    def look(self, width: int, height: int = 900, dark: bool = False) -> None:
        """As a window of that size, and in the colours that its system asks for."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def open(self, path: str) -> None:
        self.chrome.get(self.url + path)

    def sign_in(self, token: str) -> None:
        self.open("/")
        self.chrome.find_element(By.ID, "token").send_keys(token)
        self.press("Sign in")

    def press(self, label: str) -> None:
        """A button that leads to another page, until that is there."""
        self.script("window.before = true")
        wait_for(lambda: self._click(f"//main//button[normalize-space()='{label}']"), f"a click on {label!r}", LOADED)
        there = "return document.readyState === 'complete' && !window.before"
        wait_for(lambda: self.script(there), f"the page after {label!r}", LOADED)

    def _click(self, xpath: str) -> bool:
        with suppress(StaleElementReferenceException):  # a live page was drawn anew since it was found
            self.chrome.find_element(By.XPATH, xpath).click()
            return True
        return False

    def fill(self, **fields: str) -> None:
        for id, text in fields.items():
            element = self.chrome.find_element(By.ID, id)
            element.clear()
            element.send_keys(text)

    def text(self, css: str = "main") -> str:
        """What is shown there; nothing where no such element is."""
        return str(self.script("return document.querySelector(arguments[0])?.innerText ?? ''", css))

    def script(self, code: str, *arguments: object) -> Any:
        return self.chrome.execute_script(code, *arguments)

    def serious(self) -> list[tuple[str, str]]:
        """What axe finds on the page that keeps somebody from reading or using it: the rule, and where."""
        found = Axe().run(self.chrome)
        looked_for = {one["id"] for kind in ("passes", "violations", "incomplete") for one in found[kind]}
        assert "color-contrast" in looked_for
        bad = [one for one in found["violations"] if one["impact"] in {"serious", "critical"}]
        return [(one["id"], one["nodes"][0]["html"]) for one in bad]

    def picture(self, path: Path, height: int) -> None:
        """So much of the page, from its top, as a PNG."""
        width, whole = self.script("return [innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": min(whole, height), "scale": 1}
        shot = self.chrome.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browsing(url: str, folder: Path) -> Iterator[Browser]:
    """A browser that keeps what it keeps in ``folder``."""
    options = Options()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars", "--disable-gpu"):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={folder}")
    options.binary_location = str(shutil.which("chromium"))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield Browser(chrome, url)
    finally:
        chrome.quit()
