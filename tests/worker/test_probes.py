"""What `doctor` says of a broker is what the broker is set to."""

from __future__ import annotations

import pytest

from reshard.client.models.jobs import Probe as Document
from reshard.pipeline.errors import BrokerUnavailable
from reshard.worker.fleet.fleet import Fleet
from reshard.worker.fleet.heartbeat import announce
from reshard.worker.probes import durability, queue
from reshard.worker.queue.jobs import JobStore, Process
from reshard.worker.settings import Settings


def settings(url: str | None, **more: object) -> Settings:
    return Settings(broker_url=url, **more)


def test_a_broker_without_workers_is_told_with_what_to_start(store: JobStore) -> None:
    found = {probe.name: probe for probe in queue(settings(store.url))}
    assert set(found) == {"broker", "clock", "worker", "control"}
    assert "start one with `reshard worker`" in found["worker"].warning
    assert abs(found["clock"].facts["skew"]) < 5 and found["clock"].state == "ok"


def test_a_fleet_that_begins_nothing_is_a_warning(store: JobStore) -> None:
    def fleet_of() -> list[str]:
        return [f"{probe.says}; {probe.warning}" for probe in queue(settings(store.url)) if probe.name == "fleet"]

    for pid in (1, 2):
        announce(store.redis, Process(f"here:{pid}", "worker", "1", "here", pid, 2, 0.0, False))
    fleet = Fleet(store)
    fleet.drain("here:1")
    assert fleet_of() == []
    fleet.drain("here:2")
    assert fleet_of() == ["all workers are drained; jobs are waiting: `reshard fleet undrain here:1`"]
    assert "here:2, 1, drained" in [probe.says for probe in queue(settings(store.url))]
    fleet.pause("me", "the line is down")
    assert fleet_of() == ["paused by me: the line is down; jobs are waiting: resume with `reshard fleet resume`"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"appendonly": "yes", "appendfsync": "always"}, ""),
        ({"appendonly": "yes", "appendfsync": "everysec"}, "a crash loses up to a second"),
        ({"appendonly": "no"}, "a crash loses jobs"),
        ({"maxmemory-policy": "allkeys-lru"}, "evicts keys of running jobs"),
    ],
)
def test_what_a_crash_would_lose_is_said(store: JobStore, config: dict[str, str], said: str) -> None:
    names = ("appendonly", "appendfsync", "maxmemory-policy")
    before = {name: store.redis.config_get(name)[name] for name in names}
    good = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
    try:
        for name, value in (good | config).items():
            store.redis.config_set(name, value)
        probe = durability(store.redis, "redis://here")
    finally:
        for name, value in before.items():
            store.redis.config_set(name, value)
    assert said in probe.warning and bool(probe.warning) == bool(said)


def test_a_broker_that_is_away_is_trouble_and_none_a_warning(tmp_path_factory: pytest.TempPathFactory) -> None:
    (away,) = queue(settings("redis://:secret@127.0.0.1:9/0"))
    assert isinstance(away.error, BrokerUnavailable)
    assert "secret" not in Document.of(away).model_dump_json()
    (none,) = queue(settings(None, data_dir=tmp_path_factory.mktemp("empty")))
    assert none.state == "warning" and "reshard up" in none.warning
