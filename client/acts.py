"""Acts that take more than one step of the queue: undo what was published, forget what has ended, catalogs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from reshard.client.queue import Queue
from reshard.pipeline.errors import JobUnderWay, JobUnreadable, NoSuchFailures, NothingToRollBack, WrongState
from reshard.pipeline.limits import HISTORY_MAX
from reshard.pipeline.places import DEFAULT_BRANCH, AnyTarget
from reshard.pipeline.publishing.history import read, undoes
from reshard.pipeline.publishing.rollback import rollback
from reshard.pipeline.request import Options
from reshard.pipeline.stores.connect import Context, open_target
from reshard.worker.followers.records import Definition
from reshard.worker.followers.schedules import ScheduleStatus
from reshard.worker.queue import ended
from reshard.worker.queue.record import Job
from reshard.worker.queue.states import ENDED, JobState

AWAITED = "control has noted in its catalog how it ended"


def roll_back(queue: Queue, id: str, context: Context) -> dict[str, Any]:
    """Undo the commit of a job with another one; raises WrongState, and what ``rollback`` does."""
    job = queue.jobs.get(id)
    published = published_by(job)
    ref, request = published["ref"], job.request
    place = request.target.model_copy(update={"revision": ref, "credential": None}) if ref else request.target
    options = request.options.model_copy(update={"pr": False, "branch": None})
    commit = rollback(open_target(place, options, context), published["commit"])
    queue.jobs.rolled_back(job.id, commit)
    return {"id": job.id, "undone": published["commit"], "commit": commit}


def published_by(job: Job) -> dict[str, Any]:
    """What a job has published itself; raises WrongState."""
    published = job.published
    # A found commit is the job's own if it had work to do: then its author did not live to record it.
    if published is None or (published["found"] and not job.confirmed):
        raise WrongState(job=job.id, state=job.state, why="it published nothing that could be undone")
    return published


def roll_back_target(place: AnyTarget, context: Context) -> dict[str, Any]:
    """Undo our last commit to ``place``, whoever asked for it, unless that is done; raises NothingToRollBack."""
    target = open_target(place, Options(), context)
    head = target.state().head
    history = islice(target.history(head, None), HISTORY_MAX) if head else ()
    last = next((commit for commit in history if read(commit) or undoes(commit)), None)
    if last is None:
        refs = {"cure": "for a branch type DST@BRANCH, for a pull request DST@refs/pr/N"}
        named = refs if target.branch == DEFAULT_BRANCH else {}
        raise NothingToRollBack(commit=str(place), why="reshard has published nothing there", **named)
    gone = undoes(last) or last.id
    commit = last.id if undoes(last) else rollback(target, gone)
    return {"id": None, "undone": gone, "commit": commit}


def forget(
    queue: Queue, jobs: Sequence[str], states: Sequence[JobState], age: float = 0.0, dry_run: bool = False
) -> dict[str, Any]:
    """Delete these ``jobs``, or without any those that ended in these ``states`` at least ``age`` seconds ago.

    Raises JobUnderWay, and WrongState for one that its catalog still waits for.
    """
    kept = queue.catalogs.awaited()
    named = list[str]()
    for given in jobs:
        try:
            job = queue.jobs.get(given)
        except JobUnreadable as damaged:  # the step that deletes it sees whether it has ended
            named.append(damaged.facts["job"])
            continue
        if not job.state.ended:
            raise JobUnderWay(job=job.id, state=job.state)
        if job.id in kept:
            raise WrongState(job=job.id, state=job.state, why=f"it is kept until {AWAITED}")
        named.append(job.id)
    found = named or ended.ended(queue.jobs.redis, states or ENDED, age)
    kept &= {*found}
    found = [id for id in dict.fromkeys(found) if id not in kept]
    found = found if dry_run else ended.delete(queue.jobs.redis, found)
    return {"deleted": 0 if dry_run else len(found), "dry_run": dry_run, "ids": found, "kept": sorted(kept)}


def submit_catalog(queue: Queue, definition: Definition) -> dict[str, Any]:
    """Queue the models of a catalog that changed; ``outdated_schedules`` still submit an older text of it."""
    started = queue.catalogs.submit(definition)
    old = [seen.schedule.name for seen in _schedules_of(queue, definition.name) if seen.outdated]
    facts = {"name": definition.name, "digest": definition.digest, "existed": not started}
    return facts | {"waits": queue.waits(bulk=True), "outdated_schedules": old}


def remove_catalog(queue: Queue, name: str) -> dict[str, Any]:
    """Remove a catalog that has ended; ``schedules`` will submit it again."""
    queue.catalogs.remove(name)
    return {"name": name, "removed": True, "schedules": [seen.schedule.name for seen in _schedules_of(queue, name)]}


def _schedules_of(queue: Queue, catalog: str) -> list[ScheduleStatus]:
    every = queue.schedules.all()
    return [seen for seen in every if seen.schedule.catalog and seen.schedule.catalog.name == catalog]


def retry_catalog(queue: Queue, name: str, only: str | None) -> dict[str, Any]:
    """Retry the models of a catalog that failed, or only those with this error code; raises NoSuchFailures.

    ``left`` has the number of those, by code, whose error is in the file itself.
    """
    failed = queue.catalogs.get(name).failures()
    if only is not None and only not in failed:
        raise NoSuchFailures(name=name, only=only, there=", ".join(failed) or "nothing")
    again = queue.catalogs.retry(name, only)
    left = {code: len(group) for code, group in failed.items() if only in {None, code} and group[0][1].in_file}
    return {"name": name, "again": again, "left": left}
