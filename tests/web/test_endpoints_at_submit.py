"""A Hub that the operator does not list is refused when it is submitted, where the service knows the list."""

from __future__ import annotations

from typing import cast

import pytest

from reshard.client.queue import Queue
from reshard.client.served import Served
from reshard.pipeline.errors import EndpointNotAllowed
from reshard.pipeline.places import Hub
from reshard.pipeline.request import Options, Request
from reshard.pipeline.sizes import parse_size
from reshard.worker.settings import Settings

NONE = cast(Queue, None)  # nothing is queued here
OURS, OTHER = "https://hub.example", "https://elsewhere.example"


def ask(source: str | None = None, target: str | None = None, config: str | None = None) -> Request:
    options = Options(config_from=Hub(repo="them/c", endpoint=config))
    return Request(source=Hub(repo="a/b", endpoint=source), target=Hub(repo="us/b", endpoint=target), options=options)


@pytest.mark.parametrize("where", ["source", "target", "config"])
def test_a_hub_outside_the_list_is_refused_at_submit(where: str) -> None:
    service = Served(NONE, Settings(allowed_endpoints=(f"{OURS}/",)), "me")
    with pytest.raises(EndpointNotAllowed, match=OTHER):
        service.allow(ask(**{where: OTHER}))
    service.allow(ask(**{where: OURS}))
    service.allow(ask(**{where: f"{OURS}/"}))
    service.allow(ask())
    Served(NONE, Settings(), "me").allow(ask(**{where: OTHER}))  # the worker knows whose credentials it has


def test_a_size_may_have_a_space_before_its_unit() -> None:
    assert parse_size("200 MB") == parse_size("200MB") == Options(size="200 MB").size
