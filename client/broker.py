"""The jobs of a queue, as its broker has them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from reshard.client import PAGE_MAX
from reshard.client.facts import happened, service_facts
from reshard.client.jobs import Listed, Seen
from reshard.client.queue import Queue, waits
from reshard.pipeline.request import Request
from reshard.worker.queue.jobs import broker_errors
from reshard.worker.queue.record import Job
from reshard.worker.queue.states import JobState


class BrokerJobs:
    """``Jobs`` of this queue."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._store = queue.jobs

    def submit(self, request: Request) -> dict[str, Any]:
        return asdict(self._store.submit(request)) | {"waits": self._queue.waits(request.priority == "bulk")}

    def get(self, id: str) -> tuple[Job, str | None]:
        job = self._store.get(id)
        return job, None if job.state.ended else waits(self._queue, job)

    def listed(self, states: Collection[JobState], limit: int | None) -> Listed:
        there = sum(number for state, number in self._store.counts().items() if not states or state in states)
        jobs, unreadable, after = list[Job](), dict[str, str](), None
        while limit is None or len(jobs) + len(unreadable) < limit:
            most = PAGE_MAX if limit is None else min(PAGE_MAX, limit - len(jobs) - len(unreadable))
            page = self._store.listed(states, most, after)
            jobs, unreadable, after = jobs + page.jobs, unreadable | page.unreadable, page.next
            if after is None:
                break
        return Listed(jobs, there, self._queue.waits(bulk=False), unreadable)

    def look(self, id: str, after: str, wait: float) -> Seen:
        with broker_errors(self._store.url):
            events = self._store.events(id, after, wait)
            last = events[-1][0] if events else after
            return Seen([happened(fields) for _, fields in events], last, *self.get(id))

    def plan(self, id: str) -> dict[str, Any] | None:
        from reshard.client.plan import plan_facts  # which a client that only submits need not wait for

        job, plan = self._store.get(id), self._store.plan(id)
        return plan_facts(job.request, plan) if plan is not None else None

    def attested(self, id: str) -> dict[str, str]:
        return self._store.attested(id)

    def cancel(self, id: str) -> dict[str, Any]:
        id = self._store.resolve(id)
        return {"id": id, "was": self._store.cancel(id), "state": "cancelled"}

    def retry(self, id: str, anew: bool, overwrite: bool) -> dict[str, Any]:
        id = self._store.resolve(id)
        was = self._store.retry(id, anew=anew, overwrite=overwrite)
        job = self._store.get(id)
        return {"id": id, "was": was, "state": job.state, "waits": self._queue.waits(job.request.priority == "bulk")}

    def roll_back(self, id: str) -> dict[str, Any]:
        from reshard.client.acts import roll_back
        from reshard.pipeline.stores.connect import Context

        return roll_back(self._queue, id, Context.from_env())

    def service(self) -> dict[str, Any]:
        return service_facts(self._queue)
