"""What the steps of clients answer about one job: a state, an id, or the error to raise; no Redis here."""

from __future__ import annotations

from typing import TypeVar

from reshard.pipeline.errors import Ambiguous, JobNotFound, ReshardError, TargetBusy, TooManyQueued, WrongState
from reshard.worker.queue.record import Job
from reshard.worker.queue.states import JobState

T = TypeVar("T")

IN_THE_WAY = frozenset({"busy", "full"})  # answers of a retry whose error names what its job asks for


def one(answer: T | ReshardError) -> T:
    """It, or raised where it is an error."""
    if isinstance(answer, ReshardError):
        raise answer
    return answer


def resolved(start: str, found: list[str]) -> str | ReshardError:
    """The id of the one job whose id begins so, or that is just this, among some that begin so."""
    if start in found:
        return start
    if not start or not found:
        return JobNotFound(job=start or "''")
    return found[0] if len(found) == 1 else Ambiguous(job=start, jobs=", ".join(found))


def cancelled(id: str, answer: str, state: str) -> JobState | ReshardError:
    """The state that it was in."""
    if answer == "missing":
        return JobNotFound(job=id)
    if answer == "refused":
        why = "its commit is in progress and can no longer be stopped"
        if state not in JobState.__members__:
            why = "this state is from a newer release; cancel it with a command of that release"
        elif JobState(state).ended:
            why = "it has already ended"
        return WrongState(job=id, state=state, why=why)
    return JobState(state)


def retried(id: str, answer: str, what: str, job: Job | ReshardError | None, most: int) -> JobState | ReshardError:
    """The state that it ended in; ``job`` is as it is now, where something is in its way."""
    if isinstance(job, ReshardError):
        return job
    if job is not None and answer == "busy":
        return TargetBusy(job=what, target=str(job.request.target))
    if job is not None:
        return TooManyQueued(name=job.request.asked_by or "an unnamed submitter", most=most, job=what)
    if answer == "missing":
        return JobNotFound(job=id)
    if answer == "published":
        why = "its commit exists and only has to be confirmed; retry it without --overwrite"
        return WrongState(job=id, state=what, why=why)
    if answer == "refused":
        why = "there is nothing to retry" if what == JobState.done else "it has not ended"
        return WrongState(job=id, state=what, why=why)
    return JobState(what)
