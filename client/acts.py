"""Undoing what was published: of a job, or the last of a target."""

from __future__ import annotations

from itertools import islice

from reshard.client.models.jobs import Job, Published, RolledBack
from reshard.client.queue import Queue
from reshard.pipeline.errors import NothingToRollBack, TargetNotFound
from reshard.pipeline.limits import HISTORY_MAX
from reshard.pipeline.places import DEFAULT_BRANCH, AnyPlace
from reshard.pipeline.protocols import TargetState
from reshard.pipeline.publishing.history import read, undoes
from reshard.pipeline.publishing.rollback import rollback
from reshard.pipeline.request import Options
from reshard.pipeline.stores.connect import Context, open_target


def roll_back(queue: Queue, job: Job, published: Published, context: Context, served: bool) -> RolledBack:
    """Undo the commit of a job with another one; raises what ``rollback`` does.

    A service writes with the credential that the job names, which its workers have too. Elsewhere the commit is made
    with the own token of a person, whose machine need not know that name.
    """
    ref, request = published.ref, job.request
    own = {} if served else {"credential": None}
    place = request.target.model_copy(update={"revision": ref, **own}) if ref else request.target
    options = request.options.model_copy(update={"pr": False, "branch": None})
    done = rollback(open_target(place, options, context), published.commit)
    queue.jobs.rolled_back(job.id, done.commit)
    return RolledBack(id=job.id, undone=published.commit, commit=done.commit, already=done.found)


def roll_back_target(place: AnyPlace, context: Context) -> RolledBack:
    """Undo our last commit to ``place``, whoever asked for it, unless that is done; raises NothingToRollBack."""
    target = open_target(place, Options(), context)
    target.recover()
    try:
        state = target.state()
    except TargetNotFound:  # which it raises where a pull request is named
        state = TargetState(False, "private", None)
    if not state.exists or state.start:
        what = "branch" if state.exists else place.hub_noun
        hidden = "; if it is private, use a token that can read it" if what and not state.exists else ""
        why = f"{what} not found" if what else "it does not exist"
        raise NothingToRollBack(commit=str(place), why=why, cure=f"check the spelling{hidden}")
    history = islice(target.history(state.head, None), HISTORY_MAX) if state.head else ()
    last = next((commit for commit in history if read(commit) or undoes(commit)), None)
    if last is None:
        refs = {"cure": "use DST@BRANCH for a branch, DST@refs/pr/N for a pull request"}
        named = refs if target.branch == DEFAULT_BRANCH else {}
        raise NothingToRollBack(commit=str(place), why="reshard has not published to it", **named)
    if gone := undoes(last):
        return RolledBack(id=None, undone=gone, commit=last.id, already=True)
    done = rollback(target, last.id)
    return RolledBack(id=None, undone=last.id, commit=done.commit, already=done.found)
