"""The short form of the chaos suite: every step killed once, on real processes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.chaos import scenarios
from tests.chaos.scenarios import LONG, MOMENTS, SHORT, Scenario
from tests.chaos.service import TRANSPORTS, Service, Transport, servers
from tests.hub.process import HubProcess
from tests.support.procs import Broker

REPEATED = {"after the last receipt", "confirming"}  # which `make test` leaves out: their neighbours show the same


def by_server() -> list[object]:
    """The servers of this machine; those that it lacks are skipped with a word why."""
    return [
        pytest.param(path, id=name, marks=() if path else pytest.mark.skip(f"{name} is not on PATH"))
        for name, path in servers().items()
    ]


@pytest.mark.parametrize(
    "moment",
    [pytest.param(name, marks=pytest.mark.slow if name in REPEATED else ()) for name in MOMENTS],
)
def test_a_worker_is_killed(whole: Service, moment: str) -> None:
    scenarios.worker_killed(whole, "http", MOMENTS[moment])


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["copying", "after the commit, before its response"])
def test_a_worker_is_killed_over_xet(whole: Service, moment: str) -> None:
    scenarios.worker_killed(whole, "xet", MOMENTS[moment])


@pytest.mark.parametrize("scenario", SHORT, ids=lambda scenario: scenario.__name__)
def test_a_schedule_is_survived(whole: Service, scenario: Scenario) -> None:
    scenario(whole, "http")


@pytest.mark.slow
def test_no_temporary_file_is_left_on_any_machine(whole: Service) -> None:
    """Neither of what was killed here nor of any test before."""
    scenarios.all_killed(whole, "http")
    whole.stop()
    assert whole.leftovers() == []


@pytest.mark.parametrize("server", by_server())
def test_a_server_is_the_program_that_it_is_called(tmp_path: Path, server: Path) -> None:
    """So that a schedule for the embedded server never runs on whatever the service would prefer."""
    with Broker(tmp_path, server) as broker, closing(broker.client()) as client:
        assert Path(client.info("server")["executable"]) == server


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("server", by_server())
def test_every_schedule_on_every_server(hub: HubProcess, tmp_path: Path, server: Path, transport: Transport) -> None:
    with Service(tmp_path, hub, server) as service:
        for moment in MOMENTS.values():
            scenarios.worker_killed(service, transport, moment)
            service.mend()
        for scenario in LONG:
            scenario(service, transport)
            service.mend()
        service.stop()
        assert service.leftovers() == []
