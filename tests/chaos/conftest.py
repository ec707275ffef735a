"""One Hub with the models for each module, and services on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.service import TOKEN, USER, put_models
from tests.support.hub.process import HubProcess


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    with HubProcess(users=[f"{USER}:{TOKEN}"]) as process:
        put_models(process, tmp_path_factory.mktemp("models"))
        yield process


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chaos")
