"""Who asks, by this machine."""

from __future__ import annotations

import os
import socket

import pytest

from reshard.client.connect import asked_by


@pytest.mark.parametrize("unknown", [KeyError("getpwuid(): uid not found: 12345"), OSError("No username set")])
def test_who_has_no_name_on_this_machine_asks_by_a_number(unknown: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise unknown

    monkeypatch.setattr("getpass.getuser", nameless)
    assert asked_by() == f"{os.getuid()}@{socket.gethostname()}"
