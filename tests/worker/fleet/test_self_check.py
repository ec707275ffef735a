"""Machines that are at fault: their units go to other workers, they rest, say so, and come back when they are fit."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reshard.pipeline import driving
from reshard.pipeline.errors import BadCredentials, DiskFull, ReshardError, TempDirUnusable, TokenMissing, TokenRefused
from reshard.worker.fleet.fleet import Fleet
from reshard.worker.fleet.heartbeat import announce, withdraw
from reshard.worker.fleet.self_check import check
from reshard.worker.local import worker_command
from reshard.worker.probes import queue
from reshard.worker.process import OwnProcess
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.states import JobState
from reshard.worker.settings import ATTEMPTS_AT_A_BUG, Settings
from tests.hub.fixtures import Namespace
from tests.support.at_fault import WAYS, spoil, spoil_started
from tests.support.procs import Proc, wait_for
from tests.worker.bench import DISK, EXPIRED, Bench, bench, one_reload, raising, steps
from tests.worker.conftest import Wakes, age, another, ask, claimed, process
from tests.worker.followers.scrapes import port, scrape
from tests.worker.sites import Site, site

__all__ = ["bench", "one_reload", "port", "site", "steps"]


# ------------------------------------------------------------------------------------------------- whose unit it is


def test_a_unit_that_a_worker_failed_by_its_own_fault_goes_to_another_and_costs_no_attempt(store: JobStore) -> None:
    for name in ("a:1", "b:2"):
        announce(store.redis, process(name))
    announce(store.redis, process("c:3", "control"))
    bad, good = Leases(store, Wakes(), "a:1.10"), another(store, "b:2.20")
    job = store.submit(ask()).id
    assert bad.hand_over(claimed(bad, job, "plan"), DISK.to_dict()) == "ok"
    seen = store.get(job)
    assert seen.last_error is not None and seen.last_error["code"] == "resource.disk"
    for sibling in ("a:1.10", "a:1.11"):  # the fault is the machine's and not the child's
        assert another(store, sibling).claim(job) is None
        age(store, job, 10)
    assert "waits for another worker than a:1" in str(store.get(job).note)
    lease = claimed(good, job, "plan")
    assert lease.attempts == 1
    assert lease.last_error is not None and lease.last_error["code"] == "resource.disk"


def test_once_every_live_worker_has_failed_a_unit_it_is_tried_and_counted_as_any_other(store: JobStore) -> None:
    for name in ("a:1", "b:2"):
        announce(store.redis, process(name))
    first, second = another(store, "a:1.10"), another(store, "b:2.20")
    job = store.submit(ask()).id
    assert first.hand_over(claimed(first, job, "plan"), DISK.to_dict()) == "ok"
    lease = claimed(second, job, "plan")
    assert second.hand_over(lease, DISK.to_dict()) == "alone"
    assert second.again(lease, DISK.to_dict(), 0) == "ok"
    lease = claimed(first, job, "plan")
    assert lease.attempts == 2
    assert first.fail(lease, DISK.to_dict()) == "ok"
    store.retry(job)
    announce(store.redis, process("d:4"))
    assert claimed(first, job, "plan").attempts == 1, "a retry forgets who failed"


def test_a_worker_that_dies_or_is_drained_is_not_waited_for(store: JobStore) -> None:
    for name in ("a:1", "b:2", "c:3"):
        announce(store.redis, process(name))
    bad = another(store, "a:1.10")
    job = store.submit(ask()).id
    assert bad.hand_over(claimed(bad, job, "plan"), DISK.to_dict()) == "ok"
    assert bad.claim(job) is None
    withdraw(store.redis, process("b:2"))
    Fleet(store).drain("c:3")
    age(store, job, 10)
    assert bad.hand_over(claimed(bad, job, "plan"), DISK.to_dict()) == "alone"


def test_a_worker_that_takes_the_other_class_of_jobs_is_not_waited_for(store: JobStore) -> None:
    announce(store.redis, process("a:1"))
    announce(store.redis, replace(process("b:2"), queues=["interactive"]))
    bad, bulk = another(store, "a:1.10"), store.submit(ask("bulk", priority="bulk")).id
    assert bad.hand_over(claimed(bad, bulk, "plan"), DISK.to_dict()) == "alone"
    assert bad.hand_over(claimed(bad, store.submit(ask("quick")).id, "plan"), DISK.to_dict()) == "ok"
    announce(store.redis, replace(process("c:3"), queues=["bulk"]))
    other = store.submit(ask("other", priority="bulk")).id
    assert bad.hand_over(claimed(bad, other, "plan"), DISK.to_dict()) == "ok"


@pytest.mark.parametrize("error", [DISK, EXPIRED, ImportError("no module named x"), MemoryError(), OSError(28, "full")])
def test_a_fault_of_the_machine_is_left_to_other_workers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    announce(bench.store.redis, process("other:1"))
    plan = bench.steps.pipeline.plan
    monkeypatch.setattr(bench.steps.pipeline, "plan", raising(error))
    assert bench.step() == "plan"
    assert not bench.job.state.ended
    age(bench.store, bench.id, 1000)
    assert bench.leases.claim(bench.id) is None
    monkeypatch.setattr(bench.steps.pipeline, "plan", plan)
    bench.leases = another(bench.store, "other:1.2")
    assert bench.step() == "plan"
    assert bench.job.state == JobState.copying


def test_a_commit_in_doubt_is_looked_for_by_another_worker_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    (bench.source / "config.json").unlink()  # nothing names a class, so no reload child is started
    bench.to_publish()
    announce(bench.store.redis, process("other:1"))

    def begin_and_fail(*arguments: Any) -> None:
        publish(*arguments)
        raise EXPIRED

    publish = driving.publish
    monkeypatch.setattr(driving, "publish", begin_and_fail)
    bench.step()
    assert bench.job.state == JobState.committing
    monkeypatch.setattr(driving, "publish", publish)
    bench.leases = another(bench.store, "other:1.2")
    bench.until(lambda job: job.state.ended)
    assert bench.job.state == JobState.done
    assert bench.job.published is not None and bench.job.published["found"] is True


# ------------------------------------------------------------------------------------------------- temporary folders


def test_a_temporary_folder_that_cannot_be_made_counts_as_an_attempt_and_ends_the_job(bench: Bench) -> None:
    """Tests may run as root, whom no permission stops: a file is where the folder should be."""
    (bench.folder / "file").write_text("")
    unusable = OwnProcess(bench.folder / "file" / "tmp")
    tries = 0
    while not bench.job.state.ended:
        age(bench.store, bench.id, 1000)
        lease = bench.leases.claim(bench.id)
        assert lease is not None
        bench.steps.work(bench.leases, lease, bench.settings, unusable)
        tries += 1
        assert tries <= ATTEMPTS_AT_A_BUG
    assert tries == ATTEMPTS_AT_A_BUG
    assert bench.job.error is not None and bench.job.error["code"] == "resource.tmpdir"


def test_what_ends_a_unit_before_its_lease_is_kept_counts_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.steps.LeaseKeeper, "__enter__", raising(RuntimeError("can't start new thread")))
    for _ in range(ATTEMPTS_AT_A_BUG):
        bench.step()
    assert bench.job.error is not None and bench.job.error["code"] == "resource"


# ------------------------------------------------------------------------------------------------------- fit or not


@pytest.fixture
def fit(namespace: Namespace, store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What a try of this machine after ``error`` finds; None when it is fit."""
    monkeypatch.setenv("HF_ENDPOINT", namespace.endpoint)
    monkeypatch.setenv("HF_TOKEN", namespace.token)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))

    def tried(error: ReshardError, tmpdir: Path = tmp_path) -> type[ReshardError] | None:
        cause = {"code": error.code, **error.facts}
        try:
            check(cause, Settings(broker_url=store.url, tmpdir=tmpdir))
        except ReshardError as found:
            return type(found)
        return None

    return tried


def test_a_machine_is_fit_when_what_it_failed_with_is_gone(
    fit: Callable[..., Any], namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = TokenRefused(endpoint=namespace.endpoint)
    missing = TokenMissing(endpoint=namespace.endpoint, need="x", who="worker")
    assert fit(DISK) is fit(refused) is fit(missing) is None
    (tmp_path / "file").write_text("")
    assert fit(DISK, tmp_path / "file" / "tmp") is TempDirUnusable
    total, free = shutil.disk_usage(tmp_path).total, shutil.disk_usage(tmp_path).free
    if free < total:
        assert fit(DiskFull(path="/", needed=total, free=0)) is DiskFull
    assert fit(DiskFull(path="/", needed=total + 1, free=0)) is None, "it fits in no case, so no rest would help"
    monkeypatch.setenv("RESHARD_CREDENTIALS", str(tmp_path / "file" / "none"))
    assert fit(refused) is BadCredentials
    monkeypatch.delenv("RESHARD_CREDENTIALS")
    monkeypatch.setenv("HF_TOKEN", "hf_revoked")
    assert fit(DISK) is TokenRefused
    monkeypatch.delenv("HF_TOKEN")
    assert fit(missing) is TokenMissing
    assert fit(DISK) is None, "who needs no token is fit without one"
    assert fit(TokenMissing(endpoint="https://elsewhere.example", need="x", who="worker")) is None


def test_one_good_token_of_several_is_enough(
    fit: Callable[..., Any], namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token that expired for one namespace stops no work for the others."""
    file = tmp_path / "credentials.toml"
    entry = '[[credential]]\nendpoint = "{}"\nnamespace = "{}"\nenv = "{}"\n'
    file.write_text(
        "".join(entry.format(namespace.endpoint, *names) for names in (("old", "OLD"), ("new", "HF_TOKEN")))
    )
    monkeypatch.setenv("RESHARD_CREDENTIALS", str(file))
    monkeypatch.setenv("OLD", "hf_revoked")
    assert fit(TokenRefused(endpoint=namespace.endpoint)) is None


# ------------------------------------------------------------------------------------------------------ real workers


def test_a_resting_worker_is_told_and_forgotten_with_it(store: JobStore, port: int) -> None:
    for name in ("here:1", "here:2"):
        announce(store.redis, process(name))
    fleet = Fleet(store)
    fleet.rest("gone:3", DISK.to_dict())
    fleet.rest("here:1", DISK.to_dict())
    assert set(fleet.resting()) == {"here:1"}
    assert scrape(port).one("reshard_workers_resting") == 1
    rests = "here:1, 1, paused itself"
    told = {probe.says: probe.warning for probe in queue(Settings(broker_url=store.url)) if probe.name == "worker"}
    assert "not enough disk space on /" in told[rests] and "RESHARD_TMPDIR" in told[rests]
    fleet.awake("here:1")
    assert scrape(port).one("reshard_workers_resting") == 0


def fault(site: Site, worker: Proc) -> Any:
    resting = Fleet(site.store).resting()
    return next((found for name, found in resting.items() if name.endswith(f":{worker.pid}")), None)


def started(site: Site, tmp_path: Path, way: str, faulty: int) -> list[Proc]:
    """So many workers that are at fault in this way, and a good one."""
    commands = [*(spoil(way, tmp_path) for _ in range(faulty)), (worker_command(2), {})]
    workers = [site.machine.launch("worker", command, **environment) for command, environment in commands]
    for worker in workers:
        site.machine.await_sign_of(worker)
    spoil_started(way, tmp_path)
    return workers


def test_workers_at_fault_rest_fail_no_job_and_come_back(site: Site, tmp_path: Path) -> None:
    faulty, _ = started(site, tmp_path, "folder", 1)
    jobs = [site.submit(f"out{i}") for i in range(6)]
    wait_for(lambda: fault(site, faulty), "its rest")
    said = site.machine.run("fleet", "status").stdout
    assert len(re.findall(r"  paused itself  ", said)) == 1 and "the temporary folder" in said
    ended = [site.ended(job) for job in jobs]
    assert {job.state for job in ended} == {JobState.done}, [job.error for job in ended if job.error]
    (tmp_path / "spoilt").unlink()
    wait_for(lambda: fault(site, faulty) is None, "its coming back")
    wait_for(lambda: "accepts work again" in faulty.said(), "its taking work")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_two_of_three_workers_at_fault_fail_none_of_sixty_jobs(site: Site, tmp_path: Path, way: str) -> None:
    *faulty, _ = started(site, tmp_path, way, 2)
    jobs = [site.submit(f"out{i}") for i in range(60)]
    ended = [site.ended(job, 600) for job in jobs]
    assert {job.state for job in ended} == {JobState.done}, [job.error for job in ended if job.error]
    assert all("this worker paused itself after" in worker.said() for worker in faulty)
