"""Runbooks that no unit is needed for, on processes of this machine: the broker moves, and the broker is lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from reshard.worker.fleet.fleet import Fleet
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.states import JobState
from tests.support.procs import Broker, Machine, wait_for
from tests.worker.sites import Site, site

__all__ = ["site"]

pytestmark = pytest.mark.slow  # `make deploy-test` runs them with the other trials


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
