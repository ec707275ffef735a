"""What a shell offers for an argument: the jobs, catalogs and schedules of the broker."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TypeVar

from reshard.client.connect import open_jobs
from reshard.client.queue import open_queue

OFFERED = 100  # jobs; more are no help in a shell

Offers = Callable[[str], list[tuple[str, str]]]
Q = TypeVar("Q")


def _offers(opened: Callable[[], AbstractContextManager[Q]], found: Callable[[Q], Iterable[tuple[str, str]]]) -> Offers:
    """Names with what is known of each, of those that begin with what is typed; nothing without a queue."""

    def complete(incomplete: str) -> list[tuple[str, str]]:
        try:
            with opened() as queue:
                return [(name, text) for name, text in found(queue) if name.startswith(incomplete)]
        except Exception:  # noqa: BLE001 -- a shell has no place for an error, and the command itself will say it
            return []

    return complete


jobs = _offers(
    open_jobs,
    lambda queue: [
        (job.id, f"{job.state}, {job.request.source} -> {job.request.target}") for job in queue.listed((), OFFERED).jobs
    ],
)
catalogs = _offers(
    open_queue, lambda queue: [(name, queue.catalogs.now(name).shown or "") for name in queue.catalogs.names()]
)
schedules = _offers(
    open_queue, lambda queue: [(seen.schedule.name, seen.schedule.cron) for seen in queue.schedules.all()]
)
workers = _offers(open_queue, lambda queue: [(p.name, p.version) for p in queue.jobs.processes() if p.kind == "worker"])
