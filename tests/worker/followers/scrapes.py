"""The figures of a broker, as Prometheus reads them."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from reshard.pipeline.errors import BrokerUnavailable
from reshard.worker.followers.metrics import registry
from reshard.worker.health import serve
from reshard.worker.queue.jobs import JobStore, open_redis
from tests.support.procs import Broker
from tests.worker.conftest import followed

URLS: dict[int, str] = {}  # of the broker, by the port at which its figures are


class Scrape(dict[str, dict[tuple[str, ...], float]]):
    """Sample -> the values of its labels -> figure."""

    def one(self, name: str, *labels: str) -> float:
        return self[name][labels]


def page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def scrape(port: int) -> Scrape:
    """The figures once the followers have heard what happened."""
    if port in URLS:
        with suppress(BrokerUnavailable, redis.RedisError), JobStore.at(URLS[port]) as store:
            followed(store)
    found = Scrape()
    for family in text_string_to_metric_families(page(port)):
        found.setdefault(family.name, {})
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


@contextmanager
def serving(url: str) -> Iterator[int]:
    """The port at which the broker's figures are."""
    client = open_redis(url, timeout=1)
    server = serve(0, "127.0.0.1", healthy=lambda: "", ready=lambda: "", metrics=registry(client))
    URLS[server.server_port] = url
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        client.close()


@pytest.fixture(scope="module")
def port(broker: Broker) -> Iterator[int]:
    with serving(broker.url) as port:
        yield port
