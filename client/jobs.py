"""What the commands of jobs ask of a queue, of its broker (broker.py) or of the API (remote.py)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from reshard.pipeline.request import Request
from reshard.worker.queue.states import JobState

if TYPE_CHECKING:
    from reshard.worker.queue.record import Job


class Listed(NamedTuple):
    """Some jobs, newest first."""

    jobs: list[Job]
    there: int  # of these states, listed or not
    waits: str | None  # why nothing is begun now
    unreadable: dict[str, str]  # by id: why the record of a job cannot be read


class Seen(NamedTuple):
    """What happened to a job since an earlier look, and how it stands now."""

    events: list[dict[str, Any]]  # as documents show them
    last: str  # the event to look on after
    job: Job
    waits: str | None  # why nothing of it moves


class Jobs(Protocol):
    """Every ``id`` may be the start of one. Dictionaries are documents: client/models/jobs.py has each.

    Every method raises the QueueError family when the queue cannot be asked, and what its act is refused with.
    """

    def submit(self, request: Request) -> dict[str, Any]:
        """Submitted; who asked is the request's, or who the API knows by the token."""

    def get(self, id: str) -> tuple[Job, str | None]:
        """The job, and why nothing of it moves."""

    def listed(self, states: Collection[JobState], limit: int | None) -> Listed:
        """The newest ``limit`` jobs of these states, or of all; without a limit each."""

    def look(self, id: str, after: str, wait: float) -> Seen:
        """What happened after event ``after``, "0" for all; waits up to ``wait`` seconds for something."""

    def plan(self, id: str) -> dict[str, Any] | None:
        """Plan; None before there is one, and some time after the job's end."""

    def attested(self, id: str) -> dict[str, str]:
        """What the bytes of each source file were held against; empty some time after the job's end."""

    def cancel(self, id: str) -> dict[str, Any]:
        """Cancelled."""

    def retry(self, id: str, anew: bool, overwrite: bool) -> dict[str, Any]:
        """Retried."""

    def roll_back(self, id: str) -> dict[str, Any]:
        """RolledBack; with the token here, or with that of the service."""

    def service(self) -> dict[str, Any]:
        """Service."""
