"""Real workers that are paused, drained and slowed down in the middle of a copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.worker.fleet.fleet import Fleet
from reshard.worker.queue.states import JobState
from tests.support.models import arrays, save_single
from tests.support.procs import Proc, wait_for
from tests.worker.sites import Site, site

__all__ = ["site"]


def events(site: Site, job: str, kind: str) -> list[dict[str, str]]:
    return [event for _, event in site.store.events(job) if event["kind"] == kind]


def name(worker: Proc, site: Site) -> str:
    return next(process.name for process in site.store.processes() if process.pid == worker.pid)


SHARD = 3_000_000  # bytes; more than one read brings


def test_a_pause_hands_a_copy_back_survives_the_broker_and_costs_nothing(site: Site, tmp_path: Path) -> None:
    save_single(tmp_path / "large", arrays(12, 1_000_000))
    content = (tmp_path / "large" / "model.safetensors").read_bytes()
    site.space.admin.put_files(site.source, {"large.safetensors": content}, lfs=["large.safetensors"])
    site.space.admin.fault(r"^GET .*large\.safetensors", "throttle", rate=SHARD // 2)
    worker = site.machine.worker(concurrency=1)
    fleet = Fleet(site.store)
    job = site.submit(size=SHARD, exclude=("model*",))
    wait_for(lambda: sum(held.bytes for held in site.store.get(job).claims) > SHARD // 2, "the middle of a shard")
    fleet.pause("me", "the line is down")
    wait_for(lambda: site.store.get(job).claims == (), "the copy's end")
    assert {event["why"] for event in events(site, job, "released")} == {"yield"}
    sealed = len(events(site, job, "sealed"))
    assert sealed == site.store.get(job).shards_done > 0

    site.broker.kill()
    site.broker.start()
    wait_for(lambda: len(site.store.processes()) == 2, "worker and control being back")
    later = site.submit("later")
    assert "the line is down" in site.machine.run("status", later).stdout
    site.space.admin.clear_faults()
    wait_for(lambda: not any(site.store.waiting().values()), "the last wake's being refused")
    assert site.store.get(later).state == JobState.queued
    assert len(events(site, job, "sealed")) == sealed

    assert fleet.resume()
    assert site.ended(job).state == site.ended(later).state == JobState.done
    assert {event["attempt"] for event in events(site, job, "claimed")} == {"1"}
    shards = [event["shard"] for event in events(site, job, "sealed")]
    assert len(shards) == len(set(shards)), "nothing was copied twice"
    assert worker.alive()


def test_a_drained_worker_hands_back_rests_and_takes_work_again(site: Site) -> None:
    site.slow()
    first = site.machine.worker()
    job = site.submit()
    site.copying(job)
    drained = name(first, site)
    fleet = Fleet(site.store)
    fleet.drain(drained)
    wait_for(lambda: site.store.get(job).claims == (), "the hand-back")
    assert {event["why"] for event in events(site, job, "released")} == {"drain"}
    wait_for(lambda: "this worker is drained" in first.said(), "its resting")

    site.space.admin.clear_faults()
    second = site.machine.worker()
    site.assert_published_once(job)
    assert {event["attempt"] for event in events(site, job, "claimed")} == {"1"}
    after = [event["worker"] for event in events(site, job, "claimed")][-3:]
    assert {worker.rpartition(".")[0] for worker in after} == {name(second, site)}
    assert first.alive()

    second.kill()
    fleet.undrain(drained)
    site.assert_published_once(site.submit("again"), "again")


@pytest.mark.slow
def test_a_step_that_outlives_the_drain_is_handed_back_and_its_worker_rests(site: Site) -> None:
    """Also when the broker goes away meanwhile, and every connection is made anew."""
    rule = site.hold()
    worker = site.machine.worker(RESHARD_DRAIN="1")
    job = site.submit()
    site.space.admin.wait_for_fault(rule, waiting=1)
    fleet = Fleet(site.store)
    fleet.drain(name(worker, site))
    wait_for(lambda: site.store.get(job).claims == (), "the hand-back")
    site.space.admin.clear_faults()
    site.broker.kill()
    site.broker.start()
    wait_for(lambda: len(site.store.processes()) == 2, "worker and control being back")
    wait_for(lambda: site.store.waiting()["interactive"] == 1, "a wake that nobody takes")
    assert site.store.get(job).claims == ()
    fleet.undrain(name(worker, site))
    site.assert_published_once(job)
    assert {event["attempt"] for event in events(site, job, "claimed")} == {"1"}


@pytest.mark.slow
def test_copies_under_a_limit_are_slow_and_neither_hung_nor_lost(site: Site) -> None:
    """Each waits for longer than a stall, and for longer than a lease."""
    fleet = Fleet(site.store)
    fleet.limit({"bandwidth": "400kB/s"})
    site.machine.worker(concurrency=2, RESHARD_STALL="0.7")
    job = site.submit()
    site.assert_published_once(job)
    assert events(site, job, "lost") == []
    at = [int(event["at"]) / 1000 for event in events(site, job, "claimed") if event["unit"].startswith("group")]
    end = max(int(event["at"]) / 1000 for event in events(site, job, "sealed"))
    read = site.store.get(job).read
    assert read > 2_000_000
    assert end - min(at) > 0.5 * read / 400_000
