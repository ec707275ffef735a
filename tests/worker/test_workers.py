"""Real workers, a real broker and the Hub on loopback: jobs that end as they must although processes are killed.

Nothing here is timed but where a time is promised; every kill happens at a moment that was waited for.
"""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from celery import Celery

from reshard.pipeline.checkpoint.formats.safetensors import build_header
from reshard.pipeline.limits import MB, MEMORY_FLOOR
from reshard.pipeline.places import Hub
from reshard.pipeline.request import Options, Request
from reshard.worker.local import worker_command
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.record import Job
from reshard.worker.queue.states import JobState
from tests.support.models import arrays, numbered, save_sharded, save_single
from tests.support.procs import Proc, busy, wait_for
from tests.worker.sites import SIZE, Site, site

__all__ = ["site"]


def child_of(worker: Proc, job: Job, unit: str) -> int:
    """The pid of the prefork child that holds ``unit``."""
    held = next(held for held in job.claims if held.unit == unit)
    pid = int(held.worker.rpartition(".")[2])
    assert pid in worker.children()
    return pid


def test_a_job_goes_from_queue_to_target(site: Site) -> None:
    site.machine.worker()
    job = site.submit()
    site.assert_published_once(job)
    seen = site.store.get(job)
    assert seen.bytes_done == seen.bytes > 2_000_000
    assert seen.published is not None and seen.published["found"] is False


@pytest.mark.slow
def test_a_worker_that_copies_stays_small(site: Site, tmp_path: Path) -> None:
    """Over plain HTTP and LFS, a model much larger than the limit: Celery, the Hub client and the copy together."""
    repo = big_source(site, tmp_path / "big", 8)
    worker = site.machine.worker(concurrency=2, HF_HUB_DISABLE_XET="1")
    request = Request(
        source=Hub(repo=repo), target=Hub(repo=site.space.repo("cut")), options=Options(size=100 * MB, transport="http")
    )
    job = site.ended(site.store.submit(request).id)
    assert job.state == JobState.done, job.error
    assert job.bytes > 256 * MB
    peaks = [peak_rss(pid) for pid in worker.children()]
    assert len(peaks) == 2
    assert max(peaks) < MEMORY_FLOOR, f"{peaks} bytes"


@pytest.mark.slow
def test_a_worker_copies_over_xet_through_memory_that_it_uses_again(site: Site, tmp_path: Path) -> None:
    repo = big_source(site, tmp_path / "big", 4)
    worker = site.machine.worker(concurrency=1)
    options = Options(size=50 * MB, transport="xet")
    request = Request(source=Hub(repo=repo), target=Hub(repo=site.space.repo("cut")), options=options)
    assert site.ended(site.store.submit(request).id).state == JobState.done
    (child,) = worker.children()
    assert new_pages(child) < 100_000  # 65,000; without reuse 180,000


def big_source(site: Site, folder: Path, tensors: int) -> str:
    """A repository with so many tensors of 32 MB each."""
    save_sharded(folder, numbered(arrays(tensors, 32 * MB), 2))
    repo = site.space.repo("big")
    site.space.admin.create_repo(repo)
    site.space.admin.import_files(repo, {path.name: path for path in folder.iterdir()})
    return repo


def new_pages(pid: int) -> int:
    """That the system made for one process so far, of 4 KiB each."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


def peak_rss(pid: int) -> int:
    """Bytes, of one process at its largest."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def test_a_second_request_after_the_job_is_done_finds_it_published(site: Site) -> None:
    site.machine.worker()
    first = site.ended(site.submit())
    again = site.ended(site.submit())
    assert again.id != first.id
    assert again.published is not None and again.published["found"] is True
    assert first.published is not None and again.published["commit"] == first.published["commit"]


# A worker whose Celery never hears of a child's end, as it often does not: it looks when the child's pipe closes, which
# is a moment before the child can be reaped, and then not for five seconds.
DEAF = """
from celery.__main__ import main
from celery.concurrency.asynpool import AsynPool

assert AsynPool._event_process_exit and AsynPool.timers
AsynPool._event_process_exit = lambda self, hub, proc: self._untrack_child_process(proc, hub)
AsynPool.timers = {}
main()
"""


def test_a_killed_child_is_replaced_and_the_job_goes_on(site: Site) -> None:
    """By our own look, which does not wait for Celery's."""
    python, module, program, *arguments = worker_command(1)
    assert (module, program) == ("-m", "reshard.worker.program")
    site.slow()
    worker = site.machine.start("worker", [python, "-c", DEAF, *arguments])
    job = site.submit()
    unit = site.copying(job)
    os.kill(child_of(worker, site.store.get(job), unit), signal.SIGKILL)
    site.space.admin.clear_faults()
    wait_for(lambda: any(e["kind"] == "lost" for _, e in site.store.events(job)), "the loss being noticed")
    site.assert_published_once(job)


@pytest.mark.slow
def test_a_killed_worker_is_followed_by_another_machines(site: Site) -> None:
    worker, job = site.copier()
    worker.kill()
    site.space.admin.clear_faults()
    second = site.machine.worker()
    site.assert_published_once(job)
    second.terminate()
    second.wait(30)
    assert list(site.machine.tmpdir.iterdir()) == []  # neither the dead one's files nor its successor's


def test_sigterm_hands_a_copy_back_without_burning_an_attempt(site: Site) -> None:
    worker, job = site.copier()
    worker.terminate()
    assert worker.wait(30) == 0
    assert site.store.get(job).claims == ()
    kinds = [(e["kind"], e.get("why")) for _, e in site.store.events(job)]
    assert ("released", "drain") in kinds
    site.space.admin.clear_faults()
    site.machine.worker()
    site.assert_published_once(job)
    attempts = [e["attempt"] for _, e in site.store.events(job) if e["kind"] == "claimed"]
    assert set(attempts) == {"1"}
    assert not any(e["kind"] == "lost" for _, e in site.store.events(job))


@pytest.mark.slow
def test_sigterm_to_every_process_of_a_worker_hands_back_as_well(site: Site) -> None:
    """As systemd does by default, and a terminal's Ctrl-C."""
    worker, job = site.copier()
    os.killpg(worker.pid, signal.SIGTERM)
    worker.wait(30)
    assert site.store.get(job).claims == ()
    site.space.admin.clear_faults()
    site.machine.worker()
    site.assert_published_once(job)
    assert {e["attempt"] for _, e in site.store.events(job) if e["kind"] == "claimed"} == {"1"}


# A worker all of whose processes are told to end at the moment at which a child has claimed and not begun.
CLAIMED = """
import os, signal
from celery.__main__ import main
from reshard.worker.queue.leases import Leases

claim = Leases.claim

def claim_and_signal(leases, job):
    lease = claim(leases, job)
    if lease is not None:
        os.killpg(0, signal.SIGTERM)
    return lease

Leases.claim = claim_and_signal
main()
"""


def test_sigterm_between_claim_and_work_hands_back_as_well(site: Site) -> None:
    python, _, _, *arguments = worker_command(1)
    worker = site.machine.start("worker", [python, "-c", CLAIMED, *arguments])
    job = site.submit()
    worker.wait(30)
    assert site.store.get(job).claims == ()
    site.machine.worker()
    site.assert_published_once(job)
    assert {e["attempt"] for _, e in site.store.events(job) if e["kind"] == "claimed"} == {"1"}


def test_ctrl_c_ends_a_worker_as_sigterm_does(site: Site) -> None:
    worker, job = site.copier()
    os.killpg(worker.pid, signal.SIGINT)
    assert worker.wait(30) == 0
    assert ("released", "drain") in [(e["kind"], e.get("why")) for _, e in site.store.events(job)]


def test_a_step_that_outlives_the_drain_is_handed_back_unfinished(site: Site) -> None:
    rule = site.hold()
    worker = site.machine.worker(RESHARD_DRAIN="1")
    job = site.submit()
    site.space.admin.wait_for_fault(rule, waiting=1)
    worker.terminate()
    worker.wait(30)
    assert ("released", "drain") in [(e["kind"], e.get("why")) for _, e in site.store.events(job)]
    site.space.admin.clear_faults()
    site.machine.worker()
    site.assert_published_once(job)
    assert {e["attempt"] for _, e in site.store.events(job) if e["kind"] == "claimed"} == {"1"}


def test_a_second_sigterm_hands_back_at_once(site: Site) -> None:
    rule = site.hold()
    worker = site.machine.worker(RESHARD_DRAIN="600")
    job = site.submit()
    site.space.admin.wait_for_fault(rule, waiting=1)
    worker.terminate()
    wait_for(lambda: "shutting down" in worker.said(), "the first signal's effect")
    worker.terminate()
    worker.wait(30)  # and not the ten minutes of its drain
    assert site.store.get(job).claims == ()
    assert ("released", "drain") in [(e["kind"], e.get("why")) for _, e in site.store.events(job)]


def test_cancel_stops_a_copy_before_its_next_shard(site: Site) -> None:
    site.slow(rate=20_000)
    worker = site.machine.worker()
    job = site.submit()
    site.copying(job)
    site.store.cancel(job)
    wait_for(lambda: "stopped: cancel" in worker.said(), "the copier's stop")
    assert site.store.get(job).shards_done == 0
    assert site.store.get(job).state == JobState.cancelled
    site.space.admin.clear_faults()
    site.store.retry(job)
    site.assert_published_once(job)


# A worker that asks the store for its answer after each shard, as a large model's does.
SETTLES = """
from celery.__main__ import main
from reshard.pipeline.copying import loop

loop.SETTLE = 1
main()
"""


def test_what_was_sealed_before_a_cancel_is_neither_read_nor_sent_again(site: Site) -> None:
    """Of four groups with six shards each, the first is done and the second is in its middle."""
    python, _, _, *arguments = worker_command(1)
    tenth = site.space.admin.fault("^PUT /_lfs/", "hold", skip=9, when="request")
    worker = site.machine.start("worker", [python, "-c", SETTLES, *arguments])
    job = site.submit(transport="http")
    site.space.admin.wait_for_fault(tenth, waiting=1)
    wait_for(lambda: site.store.get(job).shards_done >= 9, "nine seals")
    site.store.cancel(job)
    wait_for(lambda: "stopped: cancel" in worker.said(), "the copier's stop")
    seen = site.store.get(job)
    assert (seen.state, seen.shards, seen.shards_done) == (JobState.cancelled, 24, 9)
    sent = objects(site)

    site.space.admin.log(reset=True)
    site.space.admin.clear_faults()
    site.store.retry(job)
    site.ended(job)
    read = {
        name for e in site.space.admin.log() for name in re.findall(rf"_cdn/models/{site.source}/.*/(.*)\?", e["path"])
    }
    # The file that was under way is hashed as a whole, so it is read from its start.
    assert read == {f"model-0000{number}-of-00004.safetensors" for number in (2, 3, 4)}
    assert len(sent) == 9 and len(objects(site)) == 15 and not sent & objects(site)
    site.assert_published_once(job)


def objects(site: Site) -> set[str]:
    """The hashes of what was sent to the store."""
    return {found[1] for e in site.space.admin.log() if (found := re.match(r"/_lfs/.*/(\w{64})\?size", e["path"]))}


def test_a_broker_that_dies_in_the_middle_of_a_copy_costs_nothing(site: Site) -> None:
    worker, job = site.copier()
    site.broker.kill()
    wait_for(lambda: "the broker is unavailable" in worker.said(), "the worker's noticing")
    site.broker.start()
    site.space.admin.clear_faults()
    site.assert_published_once(job)
    assert {e["attempt"] for _, e in site.store.events(job) if e["kind"] == "claimed"} == {"1"}


def test_receipts_of_a_copy_that_ends_while_the_broker_is_away_are_kept(site: Site) -> None:
    site.slow(rate=400_000)
    worker = site.machine.worker(concurrency=1)  # so that no claim is on its way when the broker dies
    job = site.submit()
    site.copying(job)
    site.broker.kill()
    wait_for(lambda: "is waiting for the broker" in worker.said(), "a copy that has ended")
    site.broker.start()
    site.space.admin.clear_faults()
    site.assert_published_once(job)
    reads = [entry for entry in site.space.admin.log() if "GET" in entry["method"] and ".safetensors" in entry["path"]]
    assert reads
    assert {e["attempt"] for _, e in site.store.events(job) if e["kind"] == "claimed"} == {"1"}


# A worker whose log has Celery's lines about each task.
TALKATIVE = """
import logging
from celery import signals
from celery.__main__ import main

signals.worker_init.connect(lambda **_: logging.getLogger("celery").setLevel(logging.INFO), weak=False)
main()
"""


def test_a_broker_that_is_away_when_a_task_ends_does_not_stop_its_worker(site: Site) -> None:
    """Kombu cannot acknowledge the message then; with a prefetch of one, a message that stays open is the last one."""
    python, module, program, *arguments = worker_command(1)
    assert (module, program) == ("-m", "reshard.worker.program")
    worker = site.machine.start("worker", [python, "-c", TALKATIVE, *arguments])
    wait_for(lambda: "worker ready" in worker.said(), "its child's being there")
    children = worker.children()
    for pid in children:
        os.kill(pid, signal.SIGSTOP)
    job = site.submit()
    wait_for(lambda: "received" in worker.said(), "the wake's arrival")
    site.broker.kill()
    for pid in children:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: "cannot claim a job" in worker.said(), "the task's end without a broker")
    wait_for(lambda: "succeeded" in worker.said(), "the main process's hearing of it")
    site.broker.start()
    site.assert_published_once(job)
    assert not list(site.client.scan_iter(match="*unacked*")), "dead workers leave nothing behind"


def test_work_that_kills_its_worker_each_time_ends_as_a_failed_job(site: Site) -> None:
    site.hold()
    worker = site.machine.worker(concurrency=1, RESHARD_ATTEMPTS="1")
    job = site.submit()
    killed: set[int] = set()

    def killed_until_it_ended() -> Job | None:
        """Kills whoever copies, but not who claims a group once more and is about to refuse it."""
        seen = site.store.get(job)
        copies = [h for h in seen.claims if h.unit.startswith("group") and h.attempt == 1]
        copiers = {int(h.worker.rpartition(".")[2]) for h in copies}
        for pid in copiers & set(worker.children()) - killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        return seen if seen.state.ended else None

    seen = wait_for(killed_until_it_ended, "the end of a job that kills its workers")
    assert seen is not None
    assert seen.state == JobState.failed
    assert seen.error is not None and seen.error["code"] == "job.attempts"
    assert len(killed) == 4  # each group had its one attempt, and a second one was refused
    assert worker.alive()


def test_no_client_of_the_broker_can_end_a_worker_by_celerys_remote_control(site: Site) -> None:
    worker = site.machine.worker()
    site.assert_published_once(site.submit("before"), "before")
    with Celery(broker=site.broker.url) as client:
        assert client.control.ping(timeout=2.0) == []
        client.control.shutdown()
    site.assert_published_once(site.submit("after"), "after")
    assert worker.alive()


def sockets(pid: int) -> int:
    """How many a process has open."""
    found = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found += str(descriptor.readlink()).startswith("socket:")
    return found


@pytest.mark.slow
def test_a_worker_keeps_its_few_connections_however_many_jobs_it_does(site: Site) -> None:
    """docs/operations.md says how many of them are the broker's."""
    others = len(site.client.client_list())
    worker = site.machine.worker(concurrency=1)
    site.assert_published_once(site.submit("first", transport="http"), "first")
    # Which requests overlap is chance, and each that does keeps a connection to the Hub. Answered late, most that may
    # overlap do, so that later jobs find nearly as many connections as they can ever use.
    site.space.admin.fault("/_cas/", "delay", seconds=0.5)
    site.assert_published_once(site.submit("second", transport="xet"), "second")
    site.space.admin.clear_faults()
    (child,) = worker.children()
    before = sockets(child)
    jobs = [site.submit(f"out{i}", transport=transport) for i, transport in enumerate(("http", "xet") * 4)]
    assert {site.ended(job).state for job in jobs} == {JobState.done}
    assert worker.children() == [child], "it was not replaced"
    assert sockets(child) < before + 4  # what jobs of but one transport leave behind would come to
    of_control = 3  # to send wakes, and to read the jobs whose end it logs, which it had not done before
    assert len(site.client.client_list()) - others <= 6 + 6 + of_control


@pytest.mark.slow
def test_what_an_operator_may_delete_after_a_clock_jumped_back_harms_no_job(site: Site) -> None:
    """docs/failures.md names the keys."""
    _, job = site.copier()
    keys = [*site.client.keys("reshard:process:*"), *site.client.keys("reshard:pace:*"), b"reshard:yielding"]
    assert site.client.delete(*keys) >= 2
    site.space.admin.clear_faults()
    site.assert_published_once(job)
    assert {event["attempt"] for _, event in site.store.events(job) if event["kind"] == "claimed"} == {"1"}


@pytest.mark.slow
def test_a_child_that_grew_beyond_the_memory_limit_is_replaced_after_its_unit(site: Site, tmp_path: Path) -> None:
    header = build_header(((f"layers.{i}.weight", "F32", (0,)) for i in range(100_000)), {"format": "pt"})
    (tmp_path / "large").write_bytes(header)
    repo = site.space.repo("many")
    site.space.admin.create_repo(repo)
    site.space.admin.import_files(repo, {"model.safetensors": tmp_path / "large"})
    worker = site.machine.worker(concurrency=1, RESHARD_MEMORY_LIMIT=str(MEMORY_FLOOR))
    wait_for(worker.children, "its child")
    (first,) = worker.children()
    request = Request(source=Hub(repo=repo), target=Hub(repo=site.space.repo("cut")), options=Options(size=SIZE))
    job = site.store.submit(request).id
    wait_for(lambda: worker.children() and first not in worker.children(), "another child")
    assert site.ended(job).state == JobState.done
    assert {event["attempt"] for _, event in site.store.events(job) if event["kind"] == "claimed"} == {"1"}


GARBAGE = (
    b"not json", b"\xff\xfe", b"7", b"null", b"[]", b"{}", b"[" * 5000, b'{"__type__": "uuid", "__value__": 7}',
    b'{"properties": {}}', b'{"properties": {"delivery_tag": "x", "body_encoding": "base64"}, "body": "?"}',
    b'{"properties": {"delivery_tag": "x"}, "headers": null}',
    b'{"properties": {"delivery_tag": "x"}, "headers": {"task": "reshard.wake"}}',
    b'{"properties": {"delivery_tag": "y"}, "headers": {"task": "reshard.wake", "id": 7}, "body": "e30="}',
    b'{"properties": {"delivery_tag": "z"}, "headers": {"task": "no.such.task", "id": "z"}, "body": "e30="}',
)  # fmt: skip


def test_neither_garbage_on_the_queue_nor_a_full_or_busy_broker_ends_a_worker(site: Site) -> None:
    (control,), worker = [*site.machine.processes], site.machine.worker(concurrency=1)
    main = {worker.pid, *worker.children()}
    for message in GARBAGE:
        site.client.lpush("reshard:interactive", message)
    site.assert_published_once(site.submit("after-garbage"), "after-garbage")
    assert worker.said().count("dropped a message that is not a wake") >= 8

    site.client.config_set("maxmemory", 1)
    site.client.client_kill_filter(skipme=True, _type="normal")  # all have to come back to a broker that takes nothing
    wait_for(lambda: "OutOfMemoryError" in worker.said(), "its being refused")
    site.client.config_set("maxmemory", 0)
    site.assert_published_once(site.submit("after-the-refusal"), "after-the-refusal")

    with busy(site.client, cut=True):
        for process in (worker, control):
            wait_for(lambda said=process.said: "BUSY" in said(), "its being held up")
    site.assert_published_once(site.submit("after-the-script"), "after-the-script")
    assert "for an unknown reason" not in control.said()
    assert worker.alive() and main <= {worker.pid, *worker.children()}, "neither it nor its child was replaced"


@pytest.mark.slow
def test_interactive_jobs_go_before_bulk_jobs_and_each_is_finished_before_the_next_is_begun(site: Site) -> None:
    bulk = [site.submit(f"bulk{i}", priority="bulk") for i in range(3)]
    wait_for(lambda: site.store.waiting()["bulk"] == 3, "the bulk wakes")
    quick = [site.submit(f"quick{i}") for i in range(2)]
    wait_for(lambda: site.store.waiting()["interactive"] == 2, "the interactive wakes")
    site.machine.worker(concurrency=1)
    ended = {job: site.ended(job).since for job in [*bulk, *quick]}
    assert max(ended[job] for job in quick) < min(ended[job] for job in bulk)
    begun = [first_claim(site.store, job) for job in [*quick, *bulk]]
    for job, next_one in zip([*quick, *bulk], begun[1:], strict=False):
        assert ended[job] <= next_one


def test_a_worker_until_idle_does_what_is_queued_and_ends_in_order(site: Site) -> None:
    jobs = [site.submit(f"left{number}") for number in range(2)]
    worker = site.machine.worker(concurrency=1, RESHARD_UNTIL_IDLE="1")
    assert worker.wait(60) == 0
    assert [site.store.get(job).state for job in jobs] == [JobState.done] * 2
    assert site.store.left() == 0 and not [one for one in site.store.processes() if one.kind == "worker"]


def first_claim(store: JobStore, job: str) -> float:
    return next(int(e["at"]) / 1000 for _, e in store.events(job) if e["kind"] == "claimed")


def test_a_bulk_copy_gives_way_at_its_next_shard_and_goes_on_later(site: Site, tmp_path: Path) -> None:
    shard = 3_000_000  # bytes; more than one read brings
    save_single(tmp_path / "large", arrays(12, 1_000_000))
    content = (tmp_path / "large" / "model.safetensors").read_bytes()
    site.space.admin.put_files(site.source, {"large.safetensors": content}, lfs=["large.safetensors"])
    site.space.admin.fault(r"^GET .*large\.safetensors", "throttle", rate=shard // 2)
    site.machine.worker(concurrency=1)
    bulk = site.submit("bulk", priority="bulk", size=shard, exclude=("model*",))
    wait_for(lambda: sum(held.bytes for held in site.store.get(bulk).claims) > shard, "more than a shard")
    quick = site.submit("quick", exclude=("large*",))
    wait_for(lambda: first_claims(site.store, quick), "the interactive job's turn")
    assert not site.store.get(bulk).state.ended
    site.space.admin.clear_faults()
    assert site.ended(quick).state == site.ended(bulk).state == JobState.done
    copied = [event for _, event in site.store.events(bulk) if event["kind"] in {"sealed", "released"}]
    way = next(i for i, event in enumerate(copied) if event["kind"] == "released")
    assert copied[way]["why"] == "yield"
    assert 0 < way < len(copied) - 1, "it gave way neither before its first shard nor behind its last"


def first_claims(store: JobStore, job: str) -> bool:
    return any(e["kind"] == "claimed" for _, e in store.events(job))
