"""How a step's trouble becomes the job's: tried again, given up, or left open because a commit may stand.

Real folders and a real store; only the errors that a machine cannot be made to have on demand are raised by hand.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from huggingface_hub import HfApi

from reshard.pipeline import driving, errors
from reshard.pipeline.copying.loop import Stopped
from reshard.pipeline.errors import ReshardError
from reshard.pipeline.places import Hub, parse_place
from reshard.pipeline.request import Options, Request
from reshard.pipeline.stores.connect import Context, open_target
from reshard.pipeline.stores.hub_target import HubTarget
from reshard.worker.fleet.heartbeat import announce
from reshard.worker.followers.schedules import Schedule, Schedules
from reshard.worker.keeper import LeaseKeeper
from reshard.worker.queue.jobs import Process
from reshard.worker.queue.record import Job
from reshard.worker.queue.scripts import job_key
from reshard.worker.queue.states import JobState
from reshard.worker.settings import ATTEMPTS_AT_A_BUG, Settings
from tests.hub.fixtures import Namespace
from tests.support.checker import from_folder, from_hub, read_checkpoint
from tests.support.giants import save_sparse
from tests.support.models import arrays, numbered, save_sharded, save_single
from tests.worker.bench import DISK, EXPIRED, Bench, bench, one_reload, raising, steps
from tests.worker.conftest import SIZE, age, another

__all__ = ["bench", "one_reload", "steps"]


HUB = errors.HubUnreachable(endpoint="https://hub", what="no route")
GONE = errors.SourceNotFound(repo="them/model", endpoint="https://hub")
REFUSED = errors.HubRefused(endpoint="https://hub", what="the commit", why="no")


def test_a_job_between_folders_is_carried_out_step_by_step(bench: Bench) -> None:
    bench.until(lambda job: job.state.ended)
    assert bench.job.state == JobState.done
    assert read_checkpoint(from_folder(bench.target)) == read_checkpoint(from_folder(bench.source))
    bench.process.end()
    assert list((bench.folder / "tmp").iterdir()) == []
    assert sorted(path.name for path in bench.folder.iterdir()) == ["model", "out", "tmp"]


def test_who_watches_hears_what_the_hub_makes_a_worker_wait_for(
    bench: Bench, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(LeaseKeeper, "waits", lambda keeper, why: told.append(why))
    monkeypatch.setenv("HF_ENDPOINT", namespace.endpoint)
    namespace.admin.fault("GET /api/models/", "status", status=429, headers={"Retry-After": "1"}, times=1)
    namespace.admin.fault("GET /api/models/", "status", status=503, times=1, skip=1)
    bench.settings = Settings(allowed_folders=(bench.folder,), allowed_sources=("them",))
    bench.id = bench.store.submit(Request(source=Hub(repo="them/none"), target=parse_place(f"{bench.folder}/x"))).id
    bench.step()
    # A wait that ends a moment early, by another clock, is told again for the rest.
    limited, unreachable = "rate limited for 1 s", f"{namespace.endpoint} returned HTTP 503, attempt 3 of 6"
    assert list(dict.fromkeys(told)) == [limited, "", unreachable]
    assert set(told[1::2]) == {""}


def test_what_a_worker_may_not_use_ends_the_job(bench: Bench) -> None:
    bench.settings = Settings()
    bench.step()
    assert bench.job.error is not None and bench.job.error["code"] == "access.folder_not_allowed"
    assert not bench.target.exists()


def test_a_hub_that_the_operator_did_not_name_is_not_called(bench: Bench) -> None:
    source = Hub(repo="alice/bait", endpoint="http://127.0.0.2:1")
    bench.settings = Settings(allowed_folders=(bench.folder,), allowed_sources=("alice",))
    bench.id = bench.store.submit(Request(source=source, target=parse_place(str(bench.folder / "other")))).id
    bench.step()
    assert bench.job.error is not None and bench.job.error["code"] == "access.endpoint_not_allowed"


@pytest.mark.parametrize("seen_by", [{"visibility": "private"}, {"gated": "auto"}])
def test_what_not_everyone_sees_is_made_public_only_where_the_operator_allows_it(
    bench: Bench, namespace: Namespace, monkeypatch: pytest.MonkeyPatch, seen_by: dict[str, str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", namespace.endpoint)
    monkeypatch.setenv("HF_TOKEN", namespace.token)
    source, target = Hub(repo=namespace.repo("secret")), Hub(repo=namespace.repo("shown"))
    namespace.admin.create_repo(source.repo, **seen_by)
    namespace.admin.put_files(source.repo, {path.name: path.read_bytes() for path in bench.source.iterdir()})
    for allowed in (False, True):
        bench.settings = Settings(allow_public=True) if allowed else Settings()
        options = Options(size=SIZE + allowed, visibility="public")
        bench.id = bench.store.submit(Request(source=source, target=target, options=options)).id
        bench.step()
        created = any(line["path"] == "/api/repos/create" for line in namespace.admin.log())
        assert created is allowed
        if not allowed:
            assert bench.job.error is not None and bench.job.error["code"] == "access.public_not_allowed"
            assert "RESHARD_ALLOW_PUBLIC" in bench.job.error["hint"]
    assert namespace.admin.state(target.repo)["visibility"] == "public"


def test_planning_that_waits_for_ever_is_interrupted_by_a_cancel(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[type[BaseException]] = []

    def waits(*_: object) -> None:
        bench.store.cancel(bench.id)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.settimeout(60)
            try:
                ours.recv(1)
            except BaseException as error:
                ended.append(type(error))
                raise

    monkeypatch.setattr(bench.steps.pipeline, "plan", waits)
    bench.step()
    assert ended == [Stopped]


def test_a_permanent_error_ends_the_job_at_once(bench: Bench) -> None:
    shutil.rmtree(bench.source)
    bench.step()
    assert bench.job.state == JobState.failed
    assert bench.job.error is not None and bench.job.error["code"] == "source.no_folder"


@pytest.mark.parametrize(
    ("error", "attempts", "code"),
    [
        (HUB, 3, "job.attempts"),
        (DISK, ATTEMPTS_AT_A_BUG, "resource.disk"),
        (RuntimeError("a bug"), ATTEMPTS_AT_A_BUG, "internal"),
        (GONE, 1, "source.not_found"),
    ],
)
def test_an_error_is_tried_again_as_long_as_it_makes_sense(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception, attempts: int, code: str
) -> None:
    monkeypatch.setattr(bench.steps.pipeline, "plan", raising(error))
    tries = 0
    while not bench.job.state.ended:
        bench.step()
        tries += 1
        if not bench.job.state.ended:
            assert bench.job.last_error is not None and bench.job.last_error["message"]
    assert tries == attempts
    assert bench.job.error is not None and bench.job.error["code"] == code
    assert str(error) in bench.job.error["message"]


def test_a_source_that_changed_while_we_copied_is_a_named_end(bench: Bench) -> None:
    assert bench.step() == "plan"
    file = bench.source / "model-00001-of-00004.safetensors"
    os.utime(file, ns=(0, 0))
    bench.until(lambda job: job.state.ended)
    assert bench.job.error is not None and bench.job.error["code"] == "source.changed"
    assert not bench.target.exists()


def test_source_bytes_that_stay_wrong_end_the_job_though_every_copy_seals_something(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Receipts forgive attempts, and what is corrupt voids receipts: together they must not make a loop."""
    bad = errors.SourceCorrupt(file="model.safetensors", place="them/model", expected="a", actual="b")
    copy = driving.copy

    def copy_and_find_it_bad(*arguments: Any) -> None:
        copy(*arguments)
        raise bad

    monkeypatch.setattr(driving, "copy", copy_and_find_it_bad)
    tries = 0
    while not bench.job.state.ended:
        tries += bench.step().startswith("group")
        assert tries < 20
    assert bench.job.error is not None and bench.job.error["code"] == "proof.source_corrupt"
    assert bench.job.shards_done == 0


def test_what_was_sealed_before_digests_differed_stays(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = driving.copy

    def copy_and_differ(*arguments: Any) -> None:
        copy(*arguments)
        raise errors.DigestsDiffer(tensor="w", read="a", written="b")

    bench.step()
    with monkeypatch.context() as patch:
        patch.setattr(driving, "copy", copy_and_differ)
        while not bench.step().startswith("group"):
            pass
    assert bench.job.shards_done > 0
    bench.until(lambda job: job.state.ended)
    assert bench.job.state == JobState.done


def test_a_target_folder_without_room_ends_a_job_before_a_byte_is_copied(bench: Bench) -> None:
    """The source is holes: it has more bytes than any disk of this machine."""
    count = shutil.disk_usage(bench.folder).free // 10**11 + 1
    save_sparse(bench.folder / "giant", ((f"layers.{i}.weight", "U8", (10**11,)) for i in range(count)), count)
    there = parse_place(str(bench.folder / "giant")), parse_place(str(bench.folder / "cut"))
    bench.id = bench.store.submit(Request(source=there[0], target=there[1], options=Options(size=2 * 10**11))).id
    bench.step()
    assert bench.job.error is not None and bench.job.error["code"] == "target.disk"
    assert not (bench.folder / "cut").exists()


def test_a_worker_without_disk_for_a_group_hands_it_over_before_it_reads(
    bench: Bench, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first shard would fit and the second does not."""
    monkeypatch.setenv("HF_ENDPOINT", namespace.endpoint)
    monkeypatch.setenv("HF_TOKEN", namespace.token)
    model = bench.folder / "uneven"
    save_single(model, {name: np.zeros(size, np.uint8) for name, size in (("a", 6000), ("b", 6000), ("c", 50_000))})
    target = Hub(repo=namespace.repo("cut"))
    options = Options(size=10_000, transport="http")
    bench.id = bench.store.submit(Request(source=parse_place(str(model)), target=target, options=options)).id
    bench.until(lambda job: job.state == JobState.copying and "check" not in todo(bench))
    for name in ("worker-a", "worker-b"):
        announce(bench.store.redis, Process(f"{name}:1", "worker", "1", name, 1, 2, 0.0, False))

    monkeypatch.setenv("RESHARD_DISK_LIMIT", "10kB")
    namespace.admin.log(reset=True)
    bench.leases = another(bench.store, "worker-a:1.10")
    assert bench.step() == "group:00000"
    assert bench.job.last_error is not None and bench.job.last_error["code"] == "resource.disk"
    assert not [entry for entry in namespace.admin.log() if "lfs" in entry["path"]]
    age(bench.store, bench.id, 1000)
    assert bench.leases.claim(bench.id) is None

    monkeypatch.delenv("RESHARD_DISK_LIMIT")
    bench.leases = another(bench.store, "worker-b:1.10")
    bench.until(lambda job: job.state.ended)
    assert bench.job.state == JobState.done, bench.job.error


def todo(bench: Bench) -> list[str]:
    """The units of the job that wait."""
    return [unit.decode() for unit in bench.store.redis.zrange(job_key(bench.id, "todo"), 0, -1)]


def nights(bench: Bench, source: Path, target: Path) -> Callable[[], Job]:
    """A schedule that may overwrite; each call is the end of a night."""
    bench.store.cancel(bench.id)  # which would have the target
    schedules = Schedules(bench.store)
    options = Options(size=SIZE, overwrite=True)
    request = Request(source=parse_place(str(source)), target=parse_place(str(target)), options=options)
    schedules.add(Schedule(name="nightly", cron="@daily", request=request))

    def night() -> Job:
        bench.id = str(schedules.run("nightly").job)
        bench.until(lambda job: job.state.ended)
        return bench.job

    return night


def test_a_schedule_that_may_overwrite_takes_a_target_once_and_then_leaves_what_others_change(bench: Bench) -> None:
    save_sharded(bench.target, numbered(arrays(4, 1000), 1))
    night = nights(bench, bench.source, bench.target)
    assert night().state == JobState.done
    assert read_checkpoint(from_folder(bench.target)) == read_checkpoint(from_folder(bench.source))
    changed = min(bench.target.glob("*.safetensors"))
    changed.write_bytes(b"what others made of it")
    for _ in range(2):
        assert night().state == JobState.failed
        assert bench.job.error is not None and bench.job.error["code"] == "target.drift"
        assert changed.read_bytes() == b"what others made of it"
    bench.store.retry(bench.id, overwrite=True)  # a person has looked
    bench.until(lambda job: job.state.ended)
    assert bench.job.state == JobState.done, bench.job.error
    assert read_checkpoint(from_folder(bench.target)) == read_checkpoint(from_folder(bench.source))
    assert night().state == JobState.done


def test_a_schedule_that_may_overwrite_goes_on_with_what_its_source_becomes_in_place(bench: Bench) -> None:
    night = nights(bench, bench.source, bench.source)
    assert night().state == JobState.done
    for path in bench.source.glob("*.safetensors"):
        path.unlink()
    save_sharded(bench.source, numbered(arrays(24, 4000, seed=1), 4))
    wanted = read_checkpoint(from_folder(bench.source))
    assert night().state == JobState.done, bench.job.error
    assert read_checkpoint(from_folder(bench.source)) == wanted


def test_an_object_that_the_store_lost_is_copied_again(bench: Bench) -> None:
    bench.to_publish()
    staged = sorted((bench.folder / ".out.reshard" / "objects").iterdir())
    staged[0].unlink()
    bench.until(lambda job: job.state.ended)
    assert bench.job.state == JobState.done
    assert [e["kind"] for _, e in bench.store.events(bench.id)].count("voided") == 1
    assert read_checkpoint(from_folder(bench.target)) == read_checkpoint(from_folder(bench.source))


def test_what_a_dead_worker_staged_goes_when_its_unit_is_done_again(bench: Bench) -> None:
    bench.until(lambda job: job.shards_done > 0)
    age(bench.store, bench.id, 1000)
    dead = bench.leases.claim(bench.id)
    assert dead is not None and dead.unit.startswith("group:")
    target = open_target(parse_place(str(bench.target)), Options(), Context.from_env())
    target.sink(dead.token).batch([]).open("half.safetensors", 100).write(memoryview(b"half"))
    [half] = bench.folder.glob(".out.reshard/t-*/*")
    while bench.step() != dead.unit:
        assert half.exists()
    assert not half.parent.exists()


class Dies(BaseException):
    """The process ends here: nothing that follows is carried out."""


def test_a_commit_whose_maker_died_is_found_although_source_and_staging_are_gone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.to_publish()
    publish = driving.publish

    def publish_and_die(*arguments: Any) -> None:
        publish(*arguments)
        raise Dies

    monkeypatch.setattr(driving, "publish", publish_and_die)
    with pytest.raises(Dies):
        bench.step()
    assert bench.job.state == JobState.committing
    assert read_checkpoint(from_folder(bench.target)) == read_checkpoint(from_folder(bench.source))
    monkeypatch.setattr(driving, "publish", publish)
    shutil.rmtree(bench.source)
    assert bench.step() == "publish"
    seen = bench.job
    assert seen.state == JobState.confirming
    assert seen.published is not None and seen.published["found"] is True


def copied_for_a_hub(bench: Bench, namespace: Namespace, patch: pytest.MonkeyPatch, pr: bool = False) -> str:
    """The repository that the bench's job is about to be published in, which is there."""
    patch.setenv("HF_ENDPOINT", namespace.endpoint)
    patch.setenv("HF_TOKEN", namespace.token)
    target = namespace.repo("target")
    namespace.admin.create_repo(target)
    request = Request(source=parse_place(str(bench.source)), target=Hub(repo=target), options=Options(size=SIZE, pr=pr))
    bench.id = bench.store.submit(request).id
    bench.to_publish()
    return target


def test_a_pull_request_whose_maker_died_before_it_was_shown_is_no_draft(
    bench: Bench, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = copied_for_a_hub(bench, namespace, monkeypatch, pr=True)

    def status() -> str:
        return HfApi(namespace.endpoint, namespace.token).get_discussion_details(target, 1).status

    def dies(_: HubTarget) -> None:
        raise Dies

    with monkeypatch.context() as patch:
        patch.setattr(HubTarget, "show", dies)
        with pytest.raises(Dies):
            bench.step()
    assert (bench.job.state, status()) == (JobState.committing, "draft")
    assert bench.step() == "publish"
    assert (bench.job.state, status()) == (JobState.confirming, "open")


def test_a_retry_plans_anew_for_a_target_that_was_deleted(
    bench: Bench, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = copied_for_a_hub(bench, namespace, monkeypatch)
    HfApi(namespace.endpoint, namespace.token).delete_repo(target)
    bench.step()
    assert bench.job.state == JobState.failed and bench.job.error is not None
    assert bench.job.error["code"] == "target.gone"
    assert f"to plan from its current state, run `reshard retry {bench.id}`" in bench.job.error["hint"]
    bench.store.retry(bench.id)
    bench.until(lambda job: job.state.ended)
    assert bench.job.state == JobState.done, bench.job.error
    assert read_checkpoint(from_hub(namespace.endpoint, target, token=namespace.token)) == read_checkpoint(
        from_folder(bench.source)
    )


@pytest.mark.parametrize(
    ("error", "ends"),
    [(REFUSED, JobState.failed), (EXPIRED, JobState.published_unverified), (GONE, JobState.published_unverified)],
)
def test_after_the_point_of_no_return_only_a_refusal_is_a_failure(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: ReshardError, ends: JobState
) -> None:
    bench.to_publish()

    def begin_and_fail(*arguments: Any) -> None:
        *_, begin, _ = arguments
        begin()
        raise error

    monkeypatch.setattr(driving, "publish", begin_and_fail)
    bench.step()
    assert bench.job.state == ends
    assert bench.job.error is not None and bench.job.error["code"] == error.code


def test_who_follows_a_dead_committer_and_cannot_look_leaves_it_open(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.to_publish()

    def begin_and_die(*arguments: Any) -> None:
        *_, begin, _ = arguments
        begin()
        raise Dies

    monkeypatch.setattr(driving, "publish", begin_and_die)
    with pytest.raises(Dies):
        bench.step()
    monkeypatch.setattr(bench.steps, "find", raising(EXPIRED))
    bench.step()
    assert bench.job.state == JobState.published_unverified


def test_who_follows_a_dead_committer_looks_and_then_may_fail(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.to_publish()

    def begin_and_die(*arguments: Any) -> None:
        *_, begin, _ = arguments
        begin()
        raise Dies

    monkeypatch.setattr(driving, "publish", begin_and_die)
    with pytest.raises(Dies):
        bench.step()
    monkeypatch.setattr(driving, "publish", raising(GONE))  # before it begins again
    bench.step()
    assert bench.job.state == JobState.failed


def test_a_commit_that_the_store_could_not_be_told_of_is_never_called_failed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bench.source / "config.json").unlink()  # nothing names a class, so no reload child is started
    bench.to_publish()
    bench.store.redis.hset(job_key(bench.id, "units"), "publish.attempts", ATTEMPTS_AT_A_BUG - 1)
    refused, fail = redis.ResponseError("ERR what nobody expects"), bench.leases.fail

    def refuse_once(*arguments: Any) -> None:
        monkeypatch.setattr(bench.leases, "fail", fail)
        raise refused

    monkeypatch.setattr(bench.leases, "done", raising(refused))
    monkeypatch.setattr(bench.leases, "fail", refuse_once)
    assert bench.step() == "publish"
    assert (bench.target / "model.safetensors.index.json").exists()
    assert bench.job.state == JobState.published_unverified


def test_a_job_whose_equal_was_published_meanwhile_takes_that_for_its_own(bench: Bench) -> None:
    bench.to_publish()
    slower = bench.id
    bench.store.cancel(slower)
    bench.id = bench.store.submit(bench.job.request).id
    bench.until(lambda job: job.state.ended)
    faster, bench.id = bench.job, slower
    bench.store.retry(slower)
    bench.until(lambda job: job.state.ended)
    assert (bench.job.state, faster.state) == (JobState.done, JobState.done), bench.job.error
    assert bench.job.published is not None and faster.published is not None
    assert bench.job.published["commit"] == faster.published["commit"] and bench.job.published["found"]
