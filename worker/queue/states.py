"""What a job can be. jobs.py says how it comes from one to the other; this imports nothing, for a quick --help."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    queued = "queued"
    planning = "planning"
    copying = "copying"
    publishing = "publishing"
    committing = "committing"
    confirming = "confirming"
    done = "done"
    failed = "failed"
    cancelled = "cancelled"
    published_unverified = "published_unverified"

    @property
    def ended(self) -> bool:
        return self in {JobState.done, JobState.failed, JobState.cancelled, JobState.published_unverified}
