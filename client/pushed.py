"""What a push to a source leads to: whatever reads it is carried out again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, NoReturn

from reshard.client.models.catalogs import Carried
from reshard.client.served import Served
from reshard.pipeline.errors import (
    AccessError,
    HubUnreachable,
    ReshardError,
    ScheduleNotFound,
    ScheduleUnreadable,
    SourceError,
)
from reshard.pipeline.places import Hub, repository
from reshard.pipeline.publishing.history import read, undoes
from reshard.pipeline.stores.connect import Context
from reshard.pipeline.stores.pace import RateLimiter
from reshard.pipeline.stores.refusal import Refusal

if TYPE_CHECKING:
    from reshard.worker.followers.pushes import Watch

log = logging.getLogger(__name__)


class Hurried(RateLimiter):
    """Waits for nothing: the Hub itself waits for the answer."""

    def _wait(self, seconds: float) -> NoReturn:
        raise HubUnreachable(endpoint="the Hub", what=f"rate limited for {seconds:.0f} s")


def carry_out(session: Served, repo: str, heads: Mapping[str, str]) -> list[Carried]:
    """Submit what reads ``repo``, whose revisions were pushed to: ``heads`` are their commits now."""
    with session.queue.answering(), session.asking(lambda endpoint: Hurried()) as context:
        ours = cache(partial(_ours, context))  # many may read one source
        return [_carry(session, watch, heads, ours) for watch in session.queue.pushes.watches(repo, heads)]


def _carry(session: Served, watch: Watch, heads: Mapping[str, str], ours: Callable[[Hub, str], bool]) -> Carried:
    source = repository(watch.request.source)
    commit = heads[source.branch]
    outcome, job, problem = "own", None, None
    try:
        session.allow(watch.request)
        if not ours(source, commit):
            outcome, job = session.queue.pushes.push(watch, commit)
    except (SourceError, AccessError, ScheduleNotFound, ScheduleUnreadable) as error:
        outcome, problem = "refused", error
    log.info("%s at %s was pushed, for %s: %s, job %s", source, commit, watch.request.target, outcome, job)
    places = {"source": str(source), "target": str(watch.request.target)}
    return Carried.of(watch, **places, commit=commit, outcome=outcome, job=job, error=problem)


def _ours(context: Context, source: Hub, commit: str) -> bool:
    """Whether reshard made that commit, as its description says: one that answers it would be answered in turn.

    Of a Hub that does not tell, it is not: then a job finds that there is nothing to do, or what is wrong.
    """
    try:
        found = next(context.api(source, "read").commits(source.repo, commit), None)
    except (ReshardError, Refusal) as error:
        log.warning("cannot tell who made commit %s of %s: %s", commit, source, error)
        return False
    return found is not None and found.id == commit and bool(read(found) or undoes(found))
