"""What `reshard up` offers at its end."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from reshard.cli.service import SCREENS, offer

LINK = "http://127.0.0.1:8474/sign-in?once=secret"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stdin", "screen", "opened"),
    [
        (Terminal("y\n"), True, True),
        (Terminal("\n"), True, False),
        (Terminal("y\n"), False, False),
        (io.StringIO("y\n"), True, False),
    ],
)
def test_the_page_is_opened_where_there_is_a_browser_and_somebody_who_wants_it(
    stdin: io.StringIO, screen: bool, opened: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser, seen = tmp_path / "browser", tmp_path / "seen"
    browser.write_text(f'#!/bin/sh\necho "$1" > {seen}\n')
    browser.chmod(0o755)
    for name in SCREENS:
        monkeypatch.delenv(name, raising=False)
    if screen:
        monkeypatch.setenv("BROWSER", str(browser))
    monkeypatch.setattr("sys.stdin", stdin)
    offer(LINK)
    assert seen.exists() is opened
    if opened:
        assert seen.read_text() == f"{LINK}\n"
