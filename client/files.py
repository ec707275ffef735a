"""The files that a job writes, and how far each is."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from reshard.client.models.jobs import JobFile
from reshard.client.queue import Queue

if TYPE_CHECKING:
    from reshard.worker.queue.record import Job

PLANS = 16  # whose files are kept: a live page asks for them again and again


class _Planned(NamedTuple):
    path: str
    size: int
    tensors: int
    unit: str = ""
    digest: str = ""


def files_of(queue: Queue, job: Job) -> list[JobFile]:
    """In the order of the plan; once that is gone, the first ones. Nothing before there was one.

    What a unit has copied since its last seal counts for its files in their order.
    """
    from reshard.worker.queue.pace import until

    digest = queue.jobs.plan_digest(job.id)
    planned = _planned(queue, job.id, digest) if digest else ()
    files = planned or [_Planned(*file) for file in queue.jobs.outline(job.id)]
    stored = queue.jobs.stored(job.id, [file.digest for file in files])
    over = job.state in {"done", "published_unverified"}
    copied = {claim.unit: claim.bytes for claim in job.claims}
    rates = {claim.unit: claim.rate for claim in job.claims}
    found = list[JobFile]()
    for (path, size, tensors, unit, _), is_stored in zip(files, stored, strict=True):
        file = JobFile(path=path, size=size, tensors=tensors, unit=unit)
        if over or is_stored:
            file.state, file.done = "sealed", size
        elif unit in copied:
            file.state, file.done = "copying", min(size, copied[unit])
            copied[unit] -= file.done
            if file.done < size:  # it is at hand, and what follows it in its unit waits
                del copied[unit]
                file.rate = rate = rates[unit]
                file.left = until(size - file.done, rate) if rate else None
        found.append(file)
    return found


@lru_cache(maxsize=PLANS)
def _planned(queue: Queue, id: str, digest: str) -> tuple[_Planned, ...]:
    """The files of the plan of that ``digest``; none once it is gone."""
    if (plan := queue.jobs.plan(id)) is None:
        return ()
    units = {number: f"group:{group.number:05d}" for group in plan.groups for number in group.shards}
    return tuple(
        _Planned(shard.path, shard.size, len(shard.entries), units.get(number, ""), shard.digest)
        for number, shard in enumerate(plan.shards)
    )
