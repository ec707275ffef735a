"""The states of a job, and every way from one to another. It imports nothing heavy, for a quick --help.

``TRANSITIONS`` is the whole state machine. The Lua steps carry it out: a test drives each of them from each state, the
chaos suite holds what really happened against it, and the diagram in docs/operations.md is drawn from it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


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
        return self in ENDED

    @classmethod
    def known(cls, name: str) -> JobState:
        """The state of this name; one that only a newer release knows can be shown, and equals no other."""
        if name in cls.__members__:
            return cls(name)
        unknown = str.__new__(cls, name)
        unknown._name_ = unknown._value_ = name
        return unknown


class Transition(NamedTuple):
    """One arrow of the diagram."""

    source: JobState | None  # None: the job is new
    target: JobState
    step: str  # the Lua file that makes it
    why: str = ""  # what the diagram says beside the arrow


S = JobState
TRANSITIONS = (
    Transition(None, S.queued, "submit", "submit"),
    Transition(S.queued, S.planning, "claim", "a worker claims it"),
    Transition(S.planning, S.copying, "planned", "the plan is stored"),
    Transition(S.planning, S.done, "done", "already published"),
    Transition(S.copying, S.publishing, "claim", "copied and checked"),
    Transition(S.copying, S.planning, "claim", "an older release planned it"),
    Transition(S.publishing, S.planning, "claim", "an older release planned it"),
    Transition(S.publishing, S.copying, "invalidate", "the store lost an object"),
    Transition(S.publishing, S.committing, "begin", "the point of no return"),
    Transition(S.committing, S.copying, "invalidate", "the store lost an object"),
    Transition(S.committing, S.confirming, "done", "the commit exists"),
    Transition(S.confirming, S.done, "done", "it matches the plan"),
    Transition(S.planning, S.failed, "fail"),
    Transition(S.copying, S.failed, "fail"),
    Transition(S.publishing, S.failed, "fail"),
    Transition(S.committing, S.failed, "fail", "nothing was committed"),
    Transition(S.committing, S.published_unverified, "fail", "a commit may exist"),
    Transition(S.confirming, S.published_unverified, "fail", "it differs from the plan"),
    Transition(S.queued, S.cancelled, "cancel"),
    Transition(S.planning, S.cancelled, "cancel"),
    Transition(S.copying, S.cancelled, "cancel"),
    Transition(S.publishing, S.cancelled, "cancel"),
    Transition(S.failed, S.queued, "retry", "retry"),
    Transition(S.failed, S.copying, "retry", "retry"),
    Transition(S.cancelled, S.queued, "retry", "retry"),
    Transition(S.cancelled, S.copying, "retry", "retry"),
    Transition(S.published_unverified, S.queued, "retry", "retry with a new plan, or rolled back"),
    Transition(S.published_unverified, S.committing, "retry", "retry"),
    Transition(S.published_unverified, S.confirming, "retry", "retry"),
)

# States that only a retry, or nothing, leads out of.
ENDED = frozenset(S) - {t.source for t in TRANSITIONS if t.step != "retry"}
CANCELLABLE = frozenset(t.source for t in TRANSITIONS if t.source and t.step == "cancel")
