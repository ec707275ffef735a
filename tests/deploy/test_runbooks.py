"""Runbooks that no unit is needed for, on processes of this machine: the broker moves, it is lost, its disk is full."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

import pytest

from reshard.worker.broker import find_server
from reshard.worker.fleet.fleet import Fleet
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.states import JobState
from tests.support.procs import Broker, Machine, wait_for
from tests.worker.sites import Site, site

__all__ = ["site"]

pytestmark = pytest.mark.slow  # `make deploy-test` runs them with the other trials


@pytest.fixture
def limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that, as with a full disk, is told by the kernel that a file cannot grow, and not killed for it."""
    program = tmp_path / "server"
    program.write_text(f"#!/bin/sh\ntrap '' XFSZ\nexec '{find_server()}' \"$@\"\n")
    program.chmod(0o755)
    monkeypatch.setattr("tests.support.procs.find_server", lambda: program)


@pytest.mark.usefixtures("limited")
def test_a_job_goes_on_once_the_broker_is_started_on_a_disk_with_room_again(site: Site, tmp_path: Path) -> None:
    def fill_disk() -> None:
        largest = max(file.stat().st_size for file in (tmp_path / "broker/appendonlydir").iterdir())
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.prlimit(site.client.info()["process_id"], resource.RLIMIT_FSIZE, (largest, hard))
        wait_for(lambda: not site.broker.alive(), "its exit at a write")

    worker, job = site.copier()
    fill_disk()
    site.broker.start()
    fill_disk()
    assert (tmp_path / "broker/server.log").read_text().count("AOF write error") == 2
    site.space.admin.clear_faults()
    site.broker.start()
    site.assert_published_once(job)
    assert worker.alive() and site.machine.processes[0].alive()


def test_a_job_goes_on_with_another_broker_that_has_the_append_only_folder(site: Site, tmp_path: Path) -> None:
    worker, job = site.copier()
    with JobStore.at(site.broker.url) as store:
        Fleet(store).pause("the runbook", "moving")
    wait_for(lambda: site.store.get(job).claims == (), "the hand-back")
    for process in site.machine.processes:
        process.terminate()
        assert process.wait(60) == 0
    assert not worker.alive()
    site.broker.kill()

    new = Broker(tmp_path / "new")
    shutil.copytree(tmp_path / "broker/appendonlydir", tmp_path / "new/broker/appendonlydir")
    site.space.admin.clear_faults()
    own = {name: value for name, value in site.machine.env.items() if name.startswith(("HF_", "RESHARD_"))}
    with new, Machine(tmp_path / "b", new.url, **{**own, "RESHARD_BROKER_URL": new.url}) as machine:
        machine.control()
        machine.worker()
        with JobStore.at(new.url) as store:
            paused = Fleet(store).paused()
            assert paused is not None and paused.reason == "moving"
            assert not store.get(job).state.ended
            Fleet(store).resume()
            wait_for(lambda: store.get(job).state.ended, "the end of the job")
            assert store.get(job).state == JobState.done, store.get(job).error
    assert site.space.admin.state(site.space.repo("out"))["commits"] == 2


def test_workers_and_control_go_on_with_a_broker_that_lost_everything(site: Site, tmp_path: Path) -> None:
    worker = site.machine.worker()
    published = site.submit()
    site.assert_published_once(published)
    site.slow()
    lost = site.submit("lost")
    site.copying(lost)
    site.broker.kill()
    shutil.rmtree(tmp_path / "broker/appendonlydir")
    site.space.admin.clear_faults()
    site.broker.start()
    wait_for(lambda: len(site.store.processes()) == 2, "worker and control being back")
    assert site.store.recent() == []

    again = site.ended(site.submit())
    assert again.published is not None and again.published["found"], "it is found, and not published twice"
    site.assert_published_once(site.submit("lost"), "lost")
    assert worker.alive() and site.machine.processes[0].alive()
    worker.terminate()
    assert worker.wait(60) == 0
