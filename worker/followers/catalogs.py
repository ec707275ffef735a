"""Catalogs on the queue: a cursor that admits a few of many jobs at a time, and what became of each entry.

    expanding -> running -> done
                 ^   | ^ |
              paused   stopped          stopped: too many failed, or too many bytes were read
    failed: could not be expanded;  cancelled

A client writes the catalog and is done. Control expands it, admits jobs while fewer than ``at_once`` are at work, and
notes how each ended. Every step is one Lua file, so two controls may do it, and one that died is followed by another.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, cast
from uuid import uuid4

import redis
from pydantic import Field, ValidationError

from reshard.pipeline.catalog import digest, parse
from reshard.pipeline.errors import (
    BadPlace,
    BrokerUnavailable,
    CatalogNotFound,
    CatalogState,
    JobNotFound,
    ReshardError,
    TargetBusy,
    TargetsCollide,
    WrongState,
)
from reshard.pipeline.places import Hub, Strict
from reshard.pipeline.request import Request
from reshard.worker.queue.jobs import Job, JobStore, submission
from reshard.worker.queue.scripts import AWAY, PREFIX, job_key, texts
from reshard.worker.queue.states import JobState

if TYPE_CHECKING:
    from reshard.pipeline.expand import Wanted

log = logging.getLogger(__name__)

AT_ONCE = 8  # jobs; enough for a few workers, and few enough that interactive ones need not wait for long
EXPAND_LEASE = 30.0  # seconds after which another control expands what a dead one began
FILL = 500  # entries written in one step, so that none keeps Redis busy for long

# What only the file can mend: another turn finds it as it was, and of two that want one target the last would win.
IN_FILE = frozenset({BadPlace.code, TargetsCollide.code})

SUCCESS, TROUBLE = f"{PREFIX}catalogs:success", f"{PREFIX}catalogs:trouble"

State = Literal["expanding", "running", "paused", "stopped", "done", "failed", "cancelled"]
Outcome = Literal["published", "same", "unchanged", "failed", "cancelled"]
# Against the last job: unchanged; source, target: which of the two has a new commit; unknown: there was none, or what
# it left cannot be seen in a list.
Standing = Literal["unchanged", "source", "target", "unknown"]


class Definition(Strict):
    """What is submitted: the file's text, and how much of it at once and at most."""

    name: str
    text: str
    at_once: int = Field(default=AT_ONCE, ge=1)
    max_failures: int | None = None  # it stops when more have failed
    max_bytes: int | None = None  # it admits no more once so many bytes of weights were read
    asked_by: str = ""

    @property
    def digest(self) -> str:
        return digest(self.text)


class Entry(Strict):
    """One model of a run, with what source and target were when it was expanded."""

    repo: str
    request: Request | None
    source: str | None
    target: str | None


@dataclass(frozen=True, slots=True)
class Ended:
    """How an entry ended. published: by a new commit; same: a job found nothing to do; unchanged: none was needed."""

    outcome: Outcome
    job: str | None = None
    commit: str | None = None
    read: int = 0  # bytes of weights
    uploaded: int = 0  # bytes
    error: dict[str, Any] | None = None  # as ReshardError.to_dict

    @property
    def in_file(self) -> bool:
        """Whether it failed by what only the catalog's file can mend."""
        return self.error is not None and self.error["code"] in IN_FILE


@dataclass(frozen=True, slots=True)
class Seen:
    """A catalog as it was at one moment; times in seconds since the epoch."""

    definition: Definition
    state: State
    run: str
    started: float
    since: float
    note: str | None
    entries: int
    todo: int
    active: dict[str, str]  # repo -> job
    ended: tuple[tuple[str, Ended], ...]  # repo, how
    targets: tuple[str | None, ...]  # of each in ``ended``, as it is typed; None where its template gives none
    success: float | None  # when a run of it last ended with nothing failed
    empty: tuple[int, ...] = ()  # numbers of the file's entries that find no model

    def counts(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for _, ended in self.ended:
            found[ended.outcome] = found.get(ended.outcome, 0) + 1
        return found

    def failures(self) -> dict[str, list[tuple[str, Ended]]]:
        """What failed, by error code; the most frequent first."""
        found: dict[str, list[tuple[str, Ended]]] = {}
        for repo, ended in self.ended:
            if ended.error is not None:
                found.setdefault(ended.error["code"], []).append((repo, ended))
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, for people's scripts."""
        return {
            "catalog": self.definition.name,
            "digest": self.definition.digest,
            "state": self.state,
            "note": self.note,
            "started": self.started,
            "since": self.since,
            "success": self.success,
            "entries": self.entries,
            "empty": list(self.empty),
            "todo": self.todo,
            "active": self.active,
            "counts": self.counts(),
            "read": sum(ended.read for _, ended in self.ended),
            "uploaded": sum(ended.uploaded for _, ended in self.ended),
            "ended": [
                {"repo": repo, "target": target, **asdict(ended)}
                for (repo, ended), target in zip(self.ended, self.targets, strict=True)
            ],
        }


class Catalogs:
    """Every method may raise redis-py's ConnectionError and TimeoutError."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._redis = store.redis
        self._broken: set[str] = set()

    # -------------------------------------------------------------------------------------------------- for clients

    def submit(self, definition: Definition) -> bool:
        """Begin a run; False when this very catalog is under way already. Raises BadCatalog, CatalogState."""
        parse(definition.text, definition.name)
        answer = self._store.run("catalog_start", definition.name, uuid4().hex, definition.model_dump_json())
        if answer == b"started":
            return True
        seen = self.get(definition.name)
        if seen.definition.digest == definition.digest and seen.state in {"expanding", "running", "paused"}:
            return False
        raise CatalogState(name=definition.name, state=seen.state, why="its jobs have not all ended")

    def names(self) -> list[str]:
        return sorted(texts(self._redis.smembers(f"{PREFIX}catalogs")))

    def get(self, name: str) -> Seen:
        """Raises CatalogNotFound."""
        with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hgetall(_key(name))
            for part in ("entries", "active", "ended"):
                pipeline.hgetall(_key(name, part))
            pipeline.zcard(_key(name, "todo"))
            pipeline.hget(SUCCESS, name)
            fields, entries, active, ended, todo, success = pipeline.execute()
        if not fields:
            raise CatalogNotFound(name=name)
        asked = {number: json.loads(entry) for number, entry in entries.items()}
        how = sorted(ended.items(), key=_numbered)
        return Seen(
            definition=Definition.model_validate_json(fields[b"definition"]),
            state=cast(State, fields[b"state"].decode()),
            run=fields[b"run"].decode(),
            started=int(fields[b"started"]) / 1000,
            since=int(fields[b"since"]) / 1000,
            note=fields[b"note"].decode() if b"note" in fields else None,
            entries=len(entries),
            todo=todo,
            active={asked[number]["repo"]: job.decode() for number, job in sorted(active.items(), key=_numbered)},
            ended=tuple((asked[number]["repo"], Ended(**json.loads(data))) for number, data in how),
            targets=tuple(_target(asked[number]["request"]) for number, _ in how),
            success=None if success is None else int(success) / 1000,
            empty=tuple(json.loads(fields.get(b"empty", b"[]"))),
        )

    def pause(self, name: str) -> None:
        """Admit nothing more; what is at work goes on. Raises CatalogNotFound, CatalogState."""
        self._turn(name, "paused", "only one that runs can be paused")

    def resume(self, name: str) -> None:
        """Go on where it was paused or stopped; done when nothing is left. Raises CatalogNotFound, CatalogState."""
        self._turn(name, "running", "only one that is paused or stopped can go on")

    def cancel(self, name: str) -> int:
        """Drop what was not begun and cancel what is at work; returns how many jobs. Raises as ``pause``.

        A second time it goes on where a client died over the first.
        """
        self._turn(name, "cancelled", "it has ended already")
        cancelled = 0
        for job in texts(self._redis.hvals(_key(name, "active"))):
            try:
                self._store.cancel(job)
                cancelled += 1
            except (WrongState, JobNotFound) as error:
                log.info("job %s goes on to its end: %s", job, error)
        return cancelled

    def retry(self, name: str, only: str | None = None) -> int:
        """Give what failed, or failed with this code, another turn; returns how many. Raises as ``resume``.

        What only the file can mend stays as it is.
        """
        fields = self._fields(name)
        rows: list[str] = []
        for number, data in sorted(_hash(self._redis, _key(name, "ended")).items(), key=_numbered):
            ended = Ended(**json.loads(data))
            if ended.error is not None and not ended.in_file and only in {None, ended.error["code"]}:
                rows += [number.decode(), ended.job or ""]
        again = int(self._store.run("catalog_retry", name, fields["run"], *rows))
        if again < 0:
            raise CatalogState(name=name, state=fields["state"], why="it is not expanded yet")
        return again

    def remove(self, name: str) -> None:
        """Forget it and what it knows of its targets, which stay. Raises CatalogNotFound, CatalogState."""
        answer, found = texts(self._store.run("catalog_remove", name))
        if answer == "missing":
            raise CatalogNotFound(name=name)
        if answer == "refused":
            raise CatalogState(name=name, state=found, why="only one whose jobs have all ended can be removed")

    def standings(self, name: str, entries: Iterable[Entry]) -> list[Standing]:
        """How each entry stands against the last job that carried it out."""
        record = self._record(name)
        return [_standing(entry, record) for entry in entries]

    def remember(self, name: str, entry: Entry) -> None:
        """Its target holds just what it asks for, at the commits that it names."""
        assert entry.request is not None, "what has no target has nothing to hold"
        self._redis.hset(_key(name, "record"), entry.request.key(), json.dumps([entry.source, entry.target]))

    def _record(self, name: str) -> dict[str, list[str]]:
        return {key.decode(): json.loads(data) for key, data in _hash(self._redis, _key(name, "record")).items()}

    def _turn(self, name: str, state: State, why: str, note: str = "", *expander: str) -> None:
        answer, found = texts(self._store.run("catalog_turn", name, state, note, *expander))
        if answer == "missing":
            raise CatalogNotFound(name=name)
        if answer == "refused":
            raise CatalogState(name=name, state=found, why=why)

    # -------------------------------------------------------------------------------------------------- for control

    def look(self) -> list[str]:
        """Note what ended and admit what there is room for; returns the catalogs that wait to be expanded."""
        expanding = []
        for name in texts(self._redis.smembers(f"{PREFIX}catalogs:looked_at")):
            try:
                if self._look_at(name) == "expanding":
                    expanding.append(name)
            except CatalogNotFound as error:
                log.info("removed, or begun anew, while it was looked at: %s", error)
            except (*AWAY, BrokerUnavailable):
                raise
            except ValidationError as error:
                if self._breaks(name):
                    log.error("catalog %s is not for this release and is left to another control: %s", name, error)
            except Exception:  # of one catalog: no reason to leave the others, nor what control does beside them
                if self._breaks(name):
                    log.exception("catalog %s met what control does not know, and waits", name)
            else:
                self._broken.discard(name)
        return expanding

    def _breaks(self, name: str) -> bool:
        """Whether that is news: what breaks does so at every look."""
        known = name in self._broken
        self._broken.add(name)
        return not known

    def _look_at(self, name: str) -> str:
        """The state that it was found in."""
        fields = self._fields(name)
        definition = Definition.model_validate_json(fields["definition"])
        if fields["state"] != "expanding":
            active = self._collect(definition, fields["run"])
            if fields["state"] == "running":
                self._admit(definition, fields["run"], definition.at_once - active)
        return fields["state"]

    def claim(self, name: str, token: str) -> str:
        """The run that this control is to expand now, or an empty string."""
        return str(self._store.run("catalog_claim", name, token, round(EXPAND_LEASE * 1000)).decode())

    def definition(self, name: str) -> Definition:
        return Definition.model_validate_json(self._fields(name)["definition"])

    def refuse(self, name: str, run: str, token: str, error: ReshardError) -> None:
        """This run cannot be expanded. Raises CatalogState when it is not this control's to expand any more."""
        self._turn(
            name, "failed", "it is not this control's to expand any more", f"{error} ({error.next_step})", run, token
        )

    def fill(
        self,
        name: str,
        run: str,
        token: str,
        rows: Sequence[tuple[Entry, ReshardError | None]],
        empty: Sequence[int] = (),
    ) -> bool:
        """Keep what a catalog was expanded to; False when another control does it by now.

        ``empty`` are the numbers of the file's entries that find no model. An entry whose source and target are what
        they were after its last job has ended before it began.
        """
        record = self._record(name)
        for first in range(0, max(1, len(rows)), FILL):
            chunk = rows[first : first + FILL]
            last = first + FILL >= len(rows)
            written = [x for entry, error in chunk for x in (entry.model_dump_json(), _at_once(entry, error, record))]
            if not self._store.run("catalog_fill", name, run, token, first, int(last), json.dumps(empty), *written):
                return False
        return True

    def _collect(self, definition: Definition, run: str) -> int:
        """Note how jobs ended; returns how many are still at work."""
        active = {
            number.decode(): job.decode() for number, job in _hash(self._redis, _key(definition.name, "active")).items()
        }
        with self._redis.pipeline(transaction=False) as pipeline:
            for job in active.values():
                pipeline.hget(job_key(job), "state")
            states = pipeline.execute()
        at_work = 0
        for (number, job), state in zip(active.items(), states, strict=True):
            if state is not None and not JobState(state.decode()).ended:
                at_work += 1
                continue
            entry = self._entry(definition.name, number)
            try:
                seen = self._store.get(job)
            except JobNotFound as error:
                self._end(definition, run, number, Ended("failed", job, error=error.to_dict()))
                continue
            self._end(definition, run, number, _how(entry, seen), _record(entry, seen))
        return at_work

    def _admit(self, definition: Definition, run: str, room: int) -> None:
        if room <= 0:
            return
        for number in texts(self._redis.zrange(_key(definition.name, "todo"), 0, room - 1)):
            entry = self._entry(definition.name, number)
            if entry.request is None:
                error = BadPlace(value=entry.repo, why="the file gives it no target")
                self._end(definition, run, number, Ended("failed", error=error.to_dict()))
                continue
            again = cast("bytes | None", self._redis.hget(_key(definition.name, "again"), number))
            job = self._go_on(again.decode()) if again else ""
            request = entry.request.model_copy(update={"asked_by": f"catalog {definition.name}"})
            answer, job = texts(
                self._store.run(
                    "catalog_admit", definition.name, run, number, definition.at_once, job, *submission(request)
                )
            )
            if answer == "busy":
                busy = TargetBusy(job=job, target=str(request.target))
                self._end(definition, run, number, Ended("failed", error=busy.to_dict()))
            elif answer in {"stop", "full"}:
                return

    def _go_on(self, job: str) -> str:
        """The job, when it goes on; empty when a new one must be made."""
        try:
            self._store.retry(job)
        except WrongState:  # it was told so already, by a control that died then
            return job
        except (JobNotFound, TargetBusy):
            return ""
        return job

    def _end(
        self, definition: Definition, run: str, number: str, ended: Ended, record: tuple[str, str] = ("", "")
    ) -> None:
        def limit(value: int | None) -> str | int:
            return "" if value is None else value

        self._store.run(
            "catalog_end", definition.name, run, number, json.dumps(asdict(ended)), int(ended.error is not None),
            ended.read, *record, limit(definition.max_failures), limit(definition.max_bytes),
        )  # fmt: skip

    def _entry(self, name: str, number: str) -> Entry:
        data = cast("bytes | None", self._redis.hget(_key(name, "entries"), number))
        if data is None:
            raise CatalogNotFound(name=name)
        return Entry.model_validate_json(data)

    def _fields(self, name: str) -> dict[str, str]:
        fields = {key.decode(): value.decode() for key, value in _hash(self._redis, _key(name)).items()}
        if not fields:
            raise CatalogNotFound(name=name)
        return fields


def entry_of(wanted: Wanted) -> Entry:
    """What is kept of a model that a catalog wants."""
    return Entry(
        repo=wanted.repo,
        request=wanted.request,
        source=wanted.source.sha if wanted.source else None,
        target=wanted.target.sha if wanted.target else None,
    )


def _at_once(entry: Entry, error: ReshardError | None, record: dict[str, list[str]]) -> str:
    """How an entry ended that needs no job; empty for one that does."""
    if error is not None:
        return json.dumps(asdict(Ended("failed", error=error.to_dict())))
    return json.dumps(asdict(Ended("unchanged"))) if _standing(entry, record) == "unchanged" else ""


def _standing(entry: Entry, record: dict[str, list[str]]) -> Standing:
    request = entry.request
    if request is None or request.options.force or not _default_branch(request) or None in (entry.source, entry.target):
        return "unknown"
    if (last := record.get(request.key())) is None:
        return "unknown"
    source, target = last
    if target != entry.target:
        return "target"
    return "unchanged" if source == entry.source else "source"


def _target(request: dict[str, Any] | None) -> str | None:
    """``acme/model``, behind its endpoint where it is not the worker's own."""
    if request is None:
        return None
    target = request["target"]
    return f"{target['endpoint'].rstrip('/')}/{target['repo']}" if target.get("endpoint") else str(target["repo"])


def _how(entry: Entry, job: Job) -> Ended:
    published = job.published or {}
    if job.state == JobState.done:
        outcome: Outcome = "published" if _made_one(entry, job) else "same"
        return Ended(outcome, job.id, published.get("commit"), job.read, job.uploaded)
    if job.state == JobState.cancelled:
        return Ended("cancelled", job.id, None, job.read, job.uploaded)
    # The same hint for all that failed in the same way.
    error = job.error and {**job.error, "hint": job.error["hint"].replace(job.id, "JOB")}
    return Ended("failed", job.id, published.get("commit"), job.read, job.uploaded, error)


def _made_one(entry: Entry, job: Job) -> bool:
    """Whether the commit is the job's own: one that it found may be, when its maker did not live to say so.

    Only a job that had something to do went on to confirm it.
    """
    published = job.published or {}
    return not published.get("found") or (bool(job.confirmed) and published.get("commit") != entry.target)


def _record(entry: Entry, job: Job) -> tuple[str, str]:
    """The key of what was asked, and what source and target are now that it is carried out; empty where unknown.

    After a job that made no commit the target is what it was, whoever else committed to it since. The source is at the
    commit that the job read: one that stood in line may have been planned before the source moved.
    """
    request, published = entry.request, job.published or {}
    if request is None or job.state != JobState.done or not _default_branch(request):
        return "", ""
    target = published.get("commit") if _made_one(entry, job) else entry.target
    source = published.get("source")
    if source is None or target is None:
        return "", ""
    return request.key(), json.dumps([source, target])


def _default_branch(request: Request) -> bool:
    """Whether the target's listed commit is the one that it would be published on."""
    return isinstance(request.target, Hub) and not (request.options.pr or request.options.branch)


def _numbered(item: tuple[bytes, bytes]) -> int:
    return int(item[0])


def _hash(client: redis.Redis, key: str) -> dict[bytes, bytes]:
    return cast("dict[bytes, bytes]", client.hgetall(key))


def _key(name: str, part: str | None = None) -> str:
    return f"{PREFIX}catalog:{name}:{part}" if part else f"{PREFIX}catalog:{name}"
