"""A broker that was restored from an older copy forgets what happened since; the target's history does not."""

from __future__ import annotations

from typing import cast

from reshard.pipeline.errors import TargetDrifted
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.scripts import job_key
from reshard.worker.queue.states import JobState
from tests.worker.conftest import ask, claimed
from tests.worker.sites import SIZE, Site, site

__all__ = ["site"]


# In one step, as a snapshot of the server is: control may be at work, and a job is always in one of its lists.
DUMP_ALL = """
local kept = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  kept[#kept + 1] = key
  kept[#kept + 1] = redis.call('DUMP', key)
end
return kept
"""


def backup(store: JobStore) -> dict[bytes, bytes]:
    kept = cast("list[bytes]", store.redis.eval(DUMP_ALL, 0))
    return dict(zip(kept[::2], kept[1::2], strict=True))


def restore(store: JobStore, kept: dict[bytes, bytes]) -> None:
    with store.redis.pipeline(transaction=True) as pipe:
        pipe.flushall()
        for key, value in kept.items():
            pipe.restore(key, 0, value)
        pipe.execute()


def head(site: Site) -> str:
    return site.space.admin.head(site.space.repo("out"))


def test_a_job_from_before_the_backup_does_not_replace_what_was_published_after_it(site: Site) -> None:
    """A is queued, the backup is made, A is done, B is published, the backup is restored."""
    old = site.submit()
    kept = backup(site.store)
    site.machine.worker()
    site.assert_published_once(old)
    first = head(site)
    restore(site.store, kept)
    site.assert_published_once(old)
    assert head(site) == first  # it found its own
    newer = site.ended(site.submit(size=2 * SIZE))
    assert newer.state == JobState.done, newer.error
    published = head(site)
    assert newer.published is not None and newer.published["commit"] == published

    restore(site.store, kept)
    seen = site.ended(old)
    assert seen.state == JobState.failed and seen.error is not None
    assert seen.error["code"] == TargetDrifted.code
    assert published[:12] in seen.error["message"] and "after this job was submitted" in seen.error["message"]
    assert head(site) == published

    again = site.ended(site.submit())  # somebody wants A, and knows of B
    assert again.state == JobState.done and again.published is not None
    assert head(site) == again.published["commit"] != published
    same = site.ended(site.submit())
    assert same.published is not None
    assert (same.published["commit"], same.published["found"]) == (head(site), True)


def test_a_retry_is_asked_for_anew(store: JobStore, leases: Leases) -> None:
    job = store.submit(ask()).id
    created = int(store.redis.hget(job_key(job), "created") or 0)
    assert claimed(leases, job, "plan").submitted == created
    store.redis.hset(job_key(job), "created", created - 3_600_000)
    store.cancel(job)
    store.retry(job)
    assert claimed(leases, job, "plan").submitted >= created
