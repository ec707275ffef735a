"""Every kind of event that the steps make has a form, or followers would drop it."""

from __future__ import annotations

import re
from pathlib import Path

from reshard.worker.queue import scripts
from reshard.worker.queue.events import KINDS, OF_CLIENTS
from reshard.worker.queue.states import TRANSITIONS

LUA = {path.stem: path.read_text() for path in Path(scripts.__file__).with_name("lua").iterdir()}
MADE = re.compile(r"(?:event\(id|publish_at\((?:t|now\(\))), ?'(\w+)'")
APPENDED = {"catalog", "fired", "missed"}  # by followers and by clients, through append.lua
CLIENTS = ("submit", "cancel", "retry")  # steps


def made(step: str) -> set[str]:
    return set(MADE.findall(LUA[step]))


def test_what_steps_and_followers_make_are_the_kinds_that_have_a_form() -> None:
    assert set().union(*map(made, LUA)) | APPENDED | {"spent"} == KINDS.keys()


def test_what_clients_make_is_what_control_takes_from_them() -> None:
    changing = {"state"} | ({"ended"} if any(t.step in CLIENTS and t.target.ended for t in TRANSITIONS) else set())
    assert set().union(*map(made, CLIENTS)) | changing | APPENDED == OF_CLIENTS
