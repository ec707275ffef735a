"""Uploads over LFS: what is sent, what is not, how much lies on the disk, and what the weather does to it."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

import pytest

from reshard.pipeline.errors import DiskFull, HubError, HubRefused, ObjectLost
from reshard.pipeline.limits import ATTEMPTS, STAGED_SHARDS_MAX
from reshard.pipeline.places import Hub
from reshard.pipeline.stores.connect import Context
from reshard.pipeline.stores.lfs import LfsBatch, LfsSink
from reshard.pipeline.stores.scratch import ScratchSpace
from reshard.pipeline.tensors import StoredFile
from tests.hub.admin import HubAdmin
from tests.hub.fixtures import Namespace
from tests.pipeline.stores.conftest import Impatient, noise
from tests.support.full_disk import files_of_at_most

SIZE = 3_000_000


@pytest.fixture
def repo(namespace: Namespace, hub: HubAdmin) -> str:
    hub.create_repo(namespace.repo("m"))
    hub.log(reset=True)
    return namespace.repo("m")


@pytest.fixture
def sink(context: Context, repo: str) -> LfsSink:
    return LfsSink(context.api(Hub(repo=repo), "write"), repo, context.disk)


def write(batch: LfsBatch, seed: int, size: int = SIZE) -> None:
    data = memoryview(noise(size, seed))
    writer = batch.open(f"{seed}.safetensors", size)
    for at in range(0, size, 1 << 20):
        writer.write(data[at : at + (1 << 20)])
    writer.finish()


def puts(hub: HubAdmin) -> list[str]:
    return [line["path"].partition("?")[0] for line in hub.log() if line["method"] == "PUT"]


def spools(folder: Path) -> int:
    """Nameless files that are open in ``folder``."""
    links = [descriptor.readlink() for descriptor in Path("/proc/self/fd").iterdir() if descriptor.is_symlink()]
    return sum(link.is_relative_to(folder) for link in links)


def test_an_object_goes_up_once_and_is_verified(sink: LfsSink, hub: HubAdmin) -> None:
    batch = sink.batch([])
    write(batch, 1)
    [stored] = batch.seal()
    assert stored == StoredFile("1.safetensors", SIZE, sha256=hashlib.sha256(noise(SIZE, 1)).hexdigest())
    requests = [(line["method"], line["path"].rpartition("/")[2][:6]) for line in hub.log()]
    assert requests == [("POST", "batch"), ("PUT", str(stored.sha256)[:6]), ("POST", "verify"), ("POST", "batch")]


def test_an_object_that_the_store_has_is_not_sent(sink: LfsSink, hub: HubAdmin) -> None:
    for _ in range(2):
        batch = sink.batch([])
        write(batch, 1)
        batch.seal()
    assert len(puts(hub)) == 1


def test_a_large_object_goes_up_in_parts(sink: LfsSink, hub: HubAdmin) -> None:
    hub.settings(lfs_multipart_threshold=1_000_000, lfs_part_size=800_000)
    batch = sink.batch([])
    write(batch, 2)
    [stored] = batch.seal()
    assert [path.rpartition("/")[2] for path in puts(hub)] == ["1", "2", "3", "4"]
    assert hub.log()[-1]["path"].endswith("batch")
    assert stored.sha256 == hashlib.sha256(noise(SIZE, 2)).hexdigest()


@pytest.mark.parametrize("multipart", [False, True])
@pytest.mark.parametrize(
    ("match", "action", "options"),
    [
        ("PUT /_lfs", "reset_upload", {"after": 500_000}),
        ("PUT /_lfs", "status", {"status": 500}),
        ("PUT /_lfs", "lost_response", {}),
        ("PUT /_lfs", "truncate_head", {"after": 12, "fin": True}),
        ("PUT /_lfs", "truncate_head", {"after": 60, "fin": True}),
        ("PUT /_lfs", "status", {"status": 403}),  # a signed URL that expired
        ("PUT /_lfs", "status", {"status": 400}),  # or the credentials behind it, or the line was slow
        ("POST .*/objects/batch", "status", {"status": 503}),
        ("POST .*/objects/batch", "truncate_head", {"after": 60, "fin": True}),
        ("POST .*/objects/verify", "lost_response", {}),
        ("POST .*/complete", "lost_response", {}),
        ("POST .*/complete", "truncate_head", {"after": 60, "fin": True}),
    ],
)
def test_a_passing_failure_is_waited_out(
    sink: LfsSink, hub: HubAdmin, multipart: bool, match: str, action: str, options: dict[str, int]
) -> None:
    if multipart:
        hub.settings(lfs_multipart_threshold=1_000_000, lfs_part_size=800_000)
    hub.fault(match, action, times=2, **options)
    batch = sink.batch([])
    write(batch, 3)
    assert [stored.sha256 for stored in batch.seal()] == [hashlib.sha256(noise(SIZE, 3)).hexdigest()]


def test_parts_that_arrived_are_not_sent_again(sink: LfsSink, hub: HubAdmin) -> None:
    hub.settings(lfs_multipart_threshold=1_000_000, lfs_part_size=800_000)
    hub.fault("PUT .*/parts/3", "status", status=503, times=2)
    batch = sink.batch([])
    write(batch, 3)
    batch.seal()
    assert [path.rpartition("/")[2] for path in puts(hub)] == ["1", "2", "3", "3", "3", "4"]


def test_urls_that_always_expire_before_the_last_part_are_asked_for_a_few_times(sink: LfsSink, hub: HubAdmin) -> None:
    hub.settings(lfs_multipart_threshold=1_000_000, lfs_part_size=800_000)
    hub.fault("PUT .*/parts/3", "status", status=403)
    batch = sink.batch([])
    write(batch, 3)
    with pytest.raises(HubError) as failed:
        batch.seal()
    assert failed.value.retryable and len(puts(hub)) == 3 * ATTEMPTS


@pytest.mark.parametrize("status", [403, 404])
def test_a_completion_that_is_refused_is_no_matter_of_the_token(sink: LfsSink, hub: HubAdmin, status: int) -> None:
    """Its URL has expired, or a first answer to it was lost: the store is asked again what it has."""
    hub.settings(lfs_multipart_threshold=1_000_000, lfs_part_size=800_000)
    rule = hub.fault("POST /_lfs", "status", status=status, times=1)
    batch = sink.batch([])
    write(batch, 3)
    assert [stored.sha256 for stored in batch.seal()] == [hashlib.sha256(noise(SIZE, 3)).hexdigest()]
    hub.wait_for_fault(rule, hits=1)


def test_a_store_that_says_when_to_come_again_is_asked_then(sink: LfsSink, hub: HubAdmin, pace: Impatient) -> None:
    hub.settings(lfs_multipart_threshold=1_000_000, lfs_part_size=800_000)
    hub.fault("PUT .*/parts/2", "status", status=503, headers={"Retry-After": "7"}, times=1)
    batch = sink.batch([])
    write(batch, 3)
    batch.seal()
    assert pace.slept == [7.0]


def test_a_failure_that_stays_is_raised_and_frees_the_disk(sink: LfsSink, hub: HubAdmin, context: Context) -> None:
    hub.fault("PUT /_lfs", "status", status=503)
    batch = sink.batch([])
    write(batch, 4)
    with pytest.raises(HubError) as failed:
        batch.seal()
    assert failed.value.retryable and len(puts(hub)) == ATTEMPTS
    assert spools(context.tmpdir) == 0


def test_the_failure_of_one_shard_stops_the_next(sink: LfsSink, hub: HubAdmin) -> None:
    rule = hub.fault("PUT /_lfs", "status", status=422, body="no")
    batch = sink.batch([])
    write(batch, 4)
    hub.wait_for_fault(rule, hits=1)
    with pytest.raises(HubRefused):
        for seed in range(5, 5 + STAGED_SHARDS_MAX + 1):
            write(batch, seed)
    batch.abort()


def test_an_object_that_the_store_lost_is_not_answered_for(sink: LfsSink, hub: HubAdmin) -> None:
    batch = sink.batch([])
    write(batch, 5)
    write(batch, 6)
    first = hashlib.sha256(noise(SIZE, 5)).hexdigest()
    hub.wait_for_request("POST .*/objects/verify", 2)
    hub.drop_object(first)
    with pytest.raises(ObjectLost) as lost:
        batch.seal()
    assert lost.value.lost == {first}


def test_one_shard_is_sent_while_the_next_is_written(sink: LfsSink, hub: HubAdmin, context: Context) -> None:
    """Two are on the disk at most; the third waits until the first is gone."""
    rule = hub.fault("PUT /_lfs", "hold", times=1)
    batch = sink.batch([])
    write(batch, 1)
    hub.wait_for_fault(rule, waiting=1)
    write(batch, 2)
    assert spools(context.tmpdir) == STAGED_SHARDS_MAX
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(write, batch, 3)
        with pytest.raises(FutureTimeout):
            third.result(timeout=1)
        assert spools(context.tmpdir) == STAGED_SHARDS_MAX
        hub.release(rule)
        third.result()
    assert len(batch.seal()) == 3
    assert spools(context.tmpdir) == 0


def test_with_room_for_one_shard_they_take_turns(context: Context, repo: str) -> None:
    tight = LfsSink(context.api(Hub(repo=repo), "write"), repo, ScratchSpace(context.tmpdir, SIZE + 1000))
    batch = tight.batch([])
    for seed in (1, 2, 3):
        write(batch, seed)
    assert len(batch.seal()) == 3


def test_without_room_for_a_shard_it_says_so_at_once(context: Context, repo: str, hub: HubAdmin) -> None:
    tight = LfsSink(context.api(Hub(repo=repo), "write"), repo, ScratchSpace(context.tmpdir, SIZE - 1))
    with pytest.raises(DiskFull) as full:
        write(tight.batch([]), 1)
    assert full.value.facts["needed"] == SIZE and full.value.facts["free"] == SIZE - 1
    assert not hub.log()


def test_a_disk_that_fills_up_while_writing(sink: LfsSink, context: Context) -> None:
    batch = sink.batch([])
    with files_of_at_most(2_000_000), pytest.raises(DiskFull):
        write(batch, 1)
    batch.abort()
    assert spools(context.tmpdir) == 0


def test_an_abort_while_sending_ends_the_upload(sink: LfsSink, hub: HubAdmin, context: Context) -> None:
    hub.fault("PUT /_lfs", "throttle", rate=1_000_000)
    batch = sink.batch([])
    write(batch, 1, size=50_000_000)  # 50 s at this rate, and a second for each block
    hub.wait_for_request("POST .*/objects/batch", 1)
    batch.abort()
    assert spools(context.tmpdir) == 0


def test_a_wrong_number_of_parts_is_refused(sink: LfsSink, hub: HubAdmin) -> None:
    sha256 = hashlib.sha256(noise(SIZE, 1)).hexdigest()
    upload = {"href": f"{hub.endpoint}/x", "header": {"chunk_size": "1000000", "1": f"{hub.endpoint}/1"}}
    answer = {"objects": [{"oid": sha256, "size": SIZE, "actions": {"upload": upload}}]}
    hub.fault("POST .*/objects/batch", "status", status=200, body=json.dumps(answer))
    batch = sink.batch([])
    write(batch, 1)
    with pytest.raises(HubRefused, match="1 part of 1,000,000 bytes do not add up to 3,000,000"):
        batch.seal()


def test_the_pace_hears_of_what_is_sent(sink: LfsSink, hub: HubAdmin, pace: Impatient) -> None:
    batch = sink.batch([])
    write(batch, 1)
    batch.seal()
    assert pace.sent == SIZE


def test_waiting_is_done_by_the_pace(sink: LfsSink, hub: HubAdmin, pace: Impatient) -> None:
    hub.fault("POST .*/objects/batch", "status", status=429, headers={"Retry-After": "9"}, times=1)
    batch = sink.batch([])
    write(batch, 1)
    batch.seal()
    assert pace.slowed == [9.0]
