"""Pushes to sources: whatever reads a source that somebody pushed to is carried out again.

    reshard:pushes       hash: <job> <what> -> what is submitted once this job has ended
    reshard:push:<what>  the commit that it was last submitted for, kept for REPEATS

A job that has its plan reads the commit that it was planned from, so a push that comes later waits for its end; people
push weights in several commits, one soon after the other.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from threading import Lock
from typing import Literal, NamedTuple, cast

from reshard.pipeline.catalogs.definition import Catalog, CatalogEntry, named, parse, request_for
from reshard.pipeline.errors import BadPlace, ReshardError, TargetBusy, TooManyQueued
from reshard.pipeline.request import Request
from reshard.pipeline.validation import Strict
from reshard.worker.followers.catalogs import Catalogs, key
from reshard.worker.followers.contained import Contained
from reshard.worker.followers.records import Definition, Entry
from reshard.worker.followers.schedules import Schedules
from reshard.worker.queue.events import Event, Reader
from reshard.worker.queue.jobs import ACTIVE, JobStore, submission
from reshard.worker.queue.record import state_of
from reshard.worker.queue.scripts import PREFIX, Pipeline, job_key, transact
from reshard.worker.queue.states import JobState

log = logging.getLogger(__name__)

ASKED_BY = "webhook"
TRIES = 10  # of what is in the way of a push, as each may end just then
REPEATS = 30 * 86400  # seconds; a Hub sends an event again within minutes, a person within days
SCAN = 1000  # entries of a catalog that are read at once
FILES_KEPT = 8  # files of catalogs that are kept parsed; few wait to be expanded
REFUSED = frozenset({"paused", "stopped", "cancelled"})  # states of a catalog that nothing new is begun for
NO_ENTRIES = frozenset({b"expanding", b"failed"})  # those in which it has none yet, or none could be found

WAITING = f"{PREFIX}pushes"

# submitted: a new job; existed: one that is still to be planned, and will read the push; waits: one is at work, and
# another one follows it; repeat: this commit was submitted before
Outcome = Literal["submitted", "existed", "waits", "repeat"]


class Watch(Strict):
    """What reads a source: a schedule's request, or a model of a catalog."""

    schedule: str | None = None
    catalog: str | None = None
    request: Request

    @property
    def what(self) -> str:
        return f"schedule {self.schedule}" if self.schedule else self.request.key()


class Carried(NamedTuple):
    """What became of a push; the job that carries it out, or that it waits for."""

    outcome: Outcome
    job: str | None


class Pushes:
    """Every method may raise redis-py's ConnectionError and TimeoutError."""

    group = "pushes"

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._redis = store.redis
        self._schedules = Schedules(store)
        self._catalogs = Catalogs(store)
        self._files = Files()
        self._contained, self._legible = Contained("push"), Contained("push")

    # -------------------------------------------------------------------------------------------------- for clients

    def watches(self, repo: str, revisions: Collection[str]) -> list[Watch]:
        """What reads ``repo`` at one of these ``revisions``, each request of catalogs once.

        Whose Hub it is does not count: one may call itself otherwise than it is reached, and a job too many finds
        nothing to do. What is paused, or was stopped or cancelled, is left out.
        """
        return list(_reading(self._candidates({repo.lower()}), repo, revisions).values())

    def push(self, watch: Watch, commit: str) -> Carried:
        """Carry it out for ``commit``, once; raises ScheduleNotFound, ScheduleUnreadable, TargetBusy, TooManyQueued."""
        seen = f"{PREFIX}push:{watch.what}"
        last = cast("bytes | None", self._redis.get(seen))
        if last is not None and last.decode() == commit:
            return Carried("repeat", None)
        carried = self._submit(watch)
        self._redis.set(seen, commit, ex=REPEATS)
        return carried

    # -------------------------------------------------------------------------------------------------- for control

    def handle(self, events: Sequence[Event], reader: Reader) -> None:
        """Submit what waited for jobs that ended, where its source is still read."""
        if any(event.kind == "ended" for event in events):
            self.reconcile()
        reader.acknowledge(*events)

    def reconcile(self) -> None:
        """The same, for ends that the stream no longer has, and for jobs that were deleted."""
        ended = dict[str, Watch]()
        for data, text in cast("dict[bytes, bytes]", self._redis.hgetall(WAITING)).items():
            field = data.decode(errors="replace")  # clients may write anything there
            with self._legible(field):
                state = state_of(self._redis, field.partition(" ")[0])
                if state is None or state.ended:
                    ended[field] = Watch.model_validate_json(text)
        # Once for all of them: catalogs may have 100,000 entries, and all else that control does waits.
        candidates = [*self._candidates({_source(watch).lower() for watch in ended.values()})] if ended else []
        for field, watch in ended.items():
            with self._contained(field):
                self._go_on(field, watch, candidates)

    def _go_on(self, field: str, watch: Watch, candidates: Sequence[Watch]) -> None:
        waited, _, what = field.partition(" ")
        # By what it asks for now: a schedule may have been edited since.
        found = _reading(candidates, _source(watch), {watch.request.source.branch})
        if watch.what not in found:
            log.info("dropped a push waiting for job %s: %s no longer reads its source", waited, what)
            self._redis.hdel(WAITING, field)
            return
        carried = self._submit(found[watch.what])
        log.info("a push waiting for job %s: %s, job %s", waited, *carried)
        if not (carried.outcome == "waits" and field.startswith(f"{carried.job} ")):  # retried meanwhile
            self._redis.hdel(WAITING, field)

    # ------------------------------------------------------------------------------------------------------- inside

    def _submit(self, watch: Watch) -> Carried:
        _, wanted, slot, *_ = submission(watch.request)
        for _ in range(TRIES):
            there = cast("bytes | None", self._redis.hget(ACTIVE, slot))
            in_the_way: ReshardError
            try:
                job, carries = self._ask(watch)
            except TooManyQueued as full:  # it follows one of those that are in its way
                job, in_the_way = full.facts["job"], full
            else:
                # Without a job: its schedule submits a catalog by now.
                if job is None or (carries and (there is None or there.decode() != job)):
                    return Carried("submitted", job)
                in_the_way = TargetBusy(job=job, target=str(watch.request.target))
            if (outcome := self._behind(job, wanted, watch)) is not None:
                return Carried(outcome, job)
        raise in_the_way

    def _ask(self, watch: Watch) -> tuple[str | None, bool]:
        """The job that carries it out, or stands in its way, and whether it is the first."""
        if watch.schedule is not None:
            run = self._schedules.run(watch.schedule, pushed=True)
            if run.outcome == "full":
                raise TooManyQueued(name=watch.what, most=self._store.most, job=run.job)
            return run.job, run.outcome == "fired"
        try:
            return self._store.submit(watch.request.submitted_for(ASKED_BY)).id, True
        except TargetBusy as busy:
            return busy.facts["job"], False

    def _behind(self, job: str, wanted: str, watch: Watch) -> Outcome | None:
        """Whether that job will read the push, or it is to follow it; None when it has ended meanwhile.

        ``wanted`` is the key of its request: what a schedule fired before it was edited may read another source.
        """

        def step(pipe: Pipeline) -> Outcome | None:
            state, its = pipe.hmget(job_key(job), "state", "key")
            pipe.multi()
            if state is None or JobState.known(state.decode()).ended:
                return None
            if its == wanted.encode() and state.decode() == JobState.queued:
                return "existed"
            pipe.hset(WAITING, f"{job} {watch.what}", watch.model_dump_json(exclude_defaults=True))
            return "waits"

        return transact(self._redis, step, job_key(job))

    def _candidates(self, repos: Set[str]) -> Iterator[Watch]:
        """Requests of schedules, and models of catalogs; of one that is not expanded, those that its file names.

        What reads one of these ``repos``, in small letters, is among them.
        """
        scheduled = [seen.schedule for seen in self._schedules.all() if seen.next is not None]
        for schedule in scheduled:
            if schedule.request is not None:
                yield Watch(schedule=schedule.name, request=schedule.request)
        submitted = set(self._catalogs.names())
        for name in submitted:
            with self._contained(name):
                state, definition = cast("list[bytes | None]", self._redis.hmget(key(name), "state", "definition"))
                if state in NO_ENTRIES and definition is not None:
                    yield from self._named(Definition.model_validate_json(definition), repos)
                if state is not None and state.decode() not in REFUSED:
                    yield from self._entries(name, repos)
        for schedule in scheduled:
            if (catalog := schedule.catalog) is not None and catalog.name not in submitted:
                with self._contained(catalog.name):
                    yield from self._named(catalog, repos)

    def _named(self, definition: Definition, repos: Set[str]) -> Iterator[Watch]:
        for repo in repos:
            yield from self._files.watches(definition, repo)

    def _entries(self, name: str, repos: Set[str]) -> Iterator[Watch]:
        # Only what has one anywhere is parsed: a catalog may have 100,000.
        marks = [f'"{repo}"'.encode() for repo in repos]
        for _, text in self._redis.hscan_iter(key(name, "entries"), count=SCAN):
            small = text.lower()
            if any(mark in small for mark in marks):
                with self._contained(name):
                    if (request := Entry.model_validate_json(text).request) is not None:
                        yield Watch(catalog=name, request=request)


def _source(watch: Watch) -> str:
    return str(watch.request.source.at(None))


def _reading(candidates: Iterable[Watch], repo: str, revisions: Collection[str | None]) -> dict[str, Watch]:
    """Those that read ``repo`` at one of these ``revisions``, by what they are."""
    found = dict[str, Watch]()
    for watch in candidates:  # whose names are compared as the Hub does
        if _source(watch).lower() == repo.lower() and watch.request.source.branch in revisions:
            found.setdefault(watch.what, watch)
    return found


class NamedSources(NamedTuple):
    """What a catalog's file names, as little of it as a request is made of: 100,000 entries take some 30 MB."""

    catalog: Catalog  # without its entries
    entries: Mapping[str, list[bytes]]  # by their repository, in small letters

    @classmethod
    def read(cls, definition: Definition) -> NamedSources:
        """Raises BadCatalog."""
        catalog, entries = parse(definition.text, definition.name), defaultdict[str, list[bytes]](list)
        for repo, entry in named(catalog):
            entries[repo.lower()].append(entry.model_dump_json(exclude_unset=True).encode())
        return cls(catalog.model_copy(update={"entries": ()}), dict(entries))


class Files:
    """The files of catalogs that are not expanded; each is parsed once, and only for a model that it may name."""

    def __init__(self) -> None:
        self._parsing = Lock()  # or all that come while one is parsed would parse it again
        self._parsed: dict[str, NamedSources] = {}  # by digest, the latest used last

    def watches(self, definition: Definition, repo: str) -> Iterator[Watch]:
        """What the file itself asks for ``repo``; raises BadCatalog."""
        if not _may_name(definition.text, repo):
            return
        digest = definition.digest
        with self._parsing:
            found = self._parsed.pop(digest) if digest in self._parsed else NamedSources.read(definition)
            self._parsed[digest] = found
            for oldest in [*self._parsed][:-FILES_KEPT]:
                del self._parsed[oldest]
        for stored in found.entries.get(repo.lower(), ()):
            entry = CatalogEntry.model_validate_json(stored)
            with suppress(BadPlace):  # its template gives it no target, which its catalog says
                yield Watch(catalog=definition.name, request=request_for(found.catalog, entry, entry.repo or ""))


def _may_name(text: str, repo: str) -> bool:
    """Only escapes, tags and slashes in a row spell a name otherwise than it is."""
    return repo.lower() in re.sub("//+", "/", text.lower()) or any(mark in text for mark in "\\!%")
