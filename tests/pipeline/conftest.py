"""Runs of the whole pipeline in this process, against folders and the Hub on loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from reshard.pipeline.places import parse_place
from reshard.pipeline.request import Options, Request
from reshard.pipeline.reshard import Report, run
from reshard.pipeline.stores.open import Context
from reshard.pipeline.verify.reload import Reload
from tests.support.hub.fixtures import Namespace, hub, hub_process, namespace

__all__ = ["Run", "hub", "hub_process", "namespace"]

Run = Callable[..., Report]


@pytest.fixture(scope="session")
def reload() -> Iterator[Reload]:
    with closing(Reload()) as warm:
        yield warm


@pytest.fixture
def go(reload: Reload) -> Run:
    """``go(source, target, **options)`` reshards between folders, or what ``HF_ENDPOINT`` names."""

    def go(source: str | Path, target: str | Path, **options: Any) -> Report:
        request = Request(source=parse_place(str(source)), target=parse_place(str(target)), options=Options(**options))
        return run(request, Context.from_env(), reload=reload)

    return go


@pytest.fixture
def on_hub(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """The Hub on loopback is the Hub, and this user's token the one token."""
    monkeypatch.setenv("HF_ENDPOINT", namespace.endpoint)
    monkeypatch.setenv("HF_TOKEN", namespace.token)
    return namespace
