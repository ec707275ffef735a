"""What is kept of a catalog's run, and what follows from how its jobs ended; no Redis here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import Field

from reshard.pipeline.errors import BadPlace, CatalogState, RequestTooLarge, ReshardError, TargetsCollide
from reshard.pipeline.figures import human_bytes
from reshard.pipeline.limits import ASKED_BY_MAX, CATALOG_MAX
from reshard.pipeline.request import Request, key_of
from reshard.pipeline.text import counted
from reshard.pipeline.validation import Strict
from reshard.worker.queue.record import Job
from reshard.worker.queue.states import JobState

if TYPE_CHECKING:
    from reshard.pipeline.catalogs.expand import Wanted

AT_ONCE = 8  # jobs; enough for a few workers, and few enough that interactive ones need not wait for long

# What only the file can correct: a retry finds it as it was, and of two that want one target the last would win.
IN_FILE = frozenset({BadPlace.code, RequestTooLarge.code, TargetsCollide.code})
AT_ONCE_MAX = 100_000  # jobs; the entries that a catalog may have
COUNT_MAX = 2**53  # what JSON's readers and the broker count exactly
NAME_MAX = 63  # characters of a name of a catalog or schedule

State = Literal["expanding", "running", "paused", "stopped", "done", "failed", "cancelled"]
UNDER_WAY = frozenset({"expanding", "running", "paused"})
# From which states an operator, or for `failed` its expander, may turn a run to this one.
TURNS: Mapping[State, frozenset[str]] = {
    "paused": frozenset({"expanding", "running"}),
    "running": frozenset({"paused", "stopped"}),
    "cancelled": frozenset({"expanding", "running", "paused", "stopped"}),
    "failed": frozenset({"expanding"}),
}
# States in which a pause or a resume has nothing to do.
ALREADY = {"paused": frozenset({"paused"}), "running": frozenset({"expanding", "running"})}
Outcome = Literal["published", "same", "unchanged", "failed", "cancelled"]
FULFILLED: frozenset[Outcome] = frozenset({"published", "same", "unchanged"})  # the target has what was asked for
# Against the last job: unchanged; source, target: which of the two has a new commit; unknown: there was none, or what
# it left cannot be seen in a list.
Standing = Literal["unchanged", "source", "target", "unknown"]


class Limits(Strict):
    """A catalog as submitted, without its text: what each step of its run reads, whose work must not grow with it."""

    name: str = Field(max_length=NAME_MAX)
    at_once: int = Field(default=AT_ONCE, ge=1, le=AT_ONCE_MAX)
    max_failures: int | None = Field(default=None, ge=0, le=COUNT_MAX)  # it stops when more have failed
    # It admits no more once so many bytes of weights were read.
    max_bytes: int | None = Field(default=None, ge=0, le=COUNT_MAX)
    asked_by: str = Field(default="", max_length=ASKED_BY_MAX)


class Definition(Limits):
    """A catalog as submitted: its text and limits."""

    text: str = Field(max_length=CATALOG_MAX)

    @property
    def digest(self) -> str:
        return key_of(self.text)

    def stored(self) -> dict[str, str]:
        """The fields of a catalog's hash that have it."""
        return {
            "definition": self.model_dump_json(exclude_defaults=True),
            "limits": self.model_dump_json(exclude_defaults=True, exclude={"text"}),
        }


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
        """Whether it failed by what only the catalog's file can correct."""
        return self.error is not None and self.error["code"] in IN_FILE


@dataclass(frozen=True, slots=True)
class CatalogStatus:
    """A catalog as it was at one moment; times in seconds since the epoch."""

    definition: Definition
    state: State  # as ``shown``
    run: str
    started: float
    since: float
    note: str | None
    entries: int
    todo: int
    active: dict[str, str]  # repo -> job
    running: int  # jobs at work; one repository may have several
    outcomes: Mapping[str, int]  # as ``tally`` names them
    read: int  # bytes of weights, of all that ended
    uploaded: int  # bytes
    ended: tuple[tuple[str, Ended], ...]  # repo, how: a page of them
    targets: tuple[str | None, ...]  # of each in ``ended``, as it is typed; None where its template gives none
    next: int | None  # the number of the last entry of the page, where others follow
    success: float | None  # when a run of it last ended with nothing failed
    empty: tuple[int, ...] = ()  # numbers of the file's entries that find no model


def entry_of(wanted: Wanted) -> Entry:
    source, target = (listed.sha if listed else None for listed in (wanted.source, wanted.target))
    return Entry(repo=wanted.repo, request=wanted.request, source=source, target=target)


def settled(entry: Entry, error: ReshardError | None, record: dict[str, list[str]]) -> Ended | None:
    """How an entry ended that needs no job."""
    if error is not None:
        return Ended("failed", error=error.to_dict())
    return Ended("unchanged") if standing(entry, record) == "unchanged" else None


def standing(entry: Entry, record: dict[str, list[str]]) -> Standing:
    request = entry.request
    if request is None or request.options.force or not _default_branch(request) or None in (entry.source, entry.target):
        return "unknown"
    source, target = record.get(request.key(), (None, None))
    if target is None:
        return "unknown"
    return "target" if target != entry.target else "unchanged" if source == entry.source else "source"


def target_text(request: dict[str, Any] | None) -> str | None:
    """``acme/model``, behind its endpoint where it is not the worker's own."""
    if request is None:
        return None
    target = request["target"]
    name = target.get("repo") or str(target)  # of a kind that only newer releases know
    return f"{target['endpoint'].rstrip('/')}/{name}" if target.get("endpoint") else name


def how(entry: Entry, job: Job) -> Ended:
    if job.state == JobState.cancelled:
        return Ended("cancelled", job.id, None, job.read, job.uploaded)
    ended = Ended("same", job.id, (job.published or {}).get("commit"), job.read, job.uploaded)
    if job.state == JobState.done:
        return replace(ended, outcome="published") if _made_one(entry, job) else ended
    # The same hint for all that failed in the same way.
    error = job.error and {**job.error, "hint": job.error["hint"].replace(job.id, "JOB")}
    return replace(ended, outcome="failed", error=error)


def _made_one(entry: Entry, job: Job) -> bool:
    """Whether the commit is the job's own: one that it found may be, when its maker did not live to say so.

    Only a job that had something to do went on to confirm it.
    """
    published = job.published or {}
    return not published.get("found") or (bool(job.confirmed) and published.get("commit") != entry.target)


def kept(entry: Entry, job: Job) -> tuple[str, str]:
    """The key of what was asked, and what source and target are now that it is carried out; empty where unknown.

    Without a commit of the job the target is what it was, even if others committed to it since. The source is at the
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
    return not (request.options.pr or request.options.branch)


def after(limits: Limits, state: State, todo: int, active: int, failures: int, read: int) -> tuple[State, str]:
    """The state of a run, and the note that says why, once ``todo`` entries wait and ``active`` jobs are at work."""
    if state != "running":
        return state, ""
    if todo and limits.max_failures is not None and failures > limits.max_failures:
        return "stopped", f"more than {counted(limits.max_failures, 'model')} failed"
    if todo and limits.max_bytes is not None and read >= limits.max_bytes:
        return "stopped", f"read limit of {human_bytes(limits.max_bytes)} reached"
    return ("running" if todo or active else "done"), ""


def shown(state: State, failed: int, entries: int) -> tuple[State, str | None]:
    """The state of a run as people and scripts see it, and the note that says why.

    One that came to its end with failures is stored as done, which is what releases that share the broker know.
    """
    if state == "done" and failed:
        return "failed", f"{failed:,} of {entries:,} models failed"
    return state, None


def in_order(counts: Mapping[str, int]) -> dict[str, int]:
    """Those counters of ``tally`` that count something: the outcomes in their order, then the errors."""
    order = {what: at for at, what in enumerate(get_args(Outcome))}
    found = sorted(counts, key=lambda what: order.get(what, len(order)))
    return {what: counts[what] for what in found if counts[what]}


def not_ended(name: str, state: State | None, under_way: str, at_work: str) -> CatalogState:
    """Why something waits for the end of a run: one that is under way can be cancelled, of others jobs are at work."""
    if state not in UNDER_WAY:
        return CatalogState(name=name, state=state, why=at_work)
    cure = f"cancel it with `reshard catalog cancel {name}`, or "
    return CatalogState(name=name, state=state, why=under_way, cure=cure)


def tally(ended: Ended) -> list[str]:
    """The counters of a run that an entry belongs to: its outcome, and the code of its error."""
    return [ended.outcome, *([f"failed:{ended.error['code']}"] if ended.error else [])]
