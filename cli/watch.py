"""Following a job or a catalog on the queue: its progress, setbacks and end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from typer import Exit

from reshard.cli.errors import INTERRUPTED
from reshard.cli.job_text import Rows, ended, undo_rows
from reshard.cli.output import Output, first
from reshard.cli.plan_text import show_plan
from reshard.cli.progress import Bar, bar
from reshard.client.facts import seconds_of, source_bytes
from reshard.client.models.catalogs import Catalog, CatalogProgress
from reshard.client.models.jobs import Event, FailedModel, Happened, JobDone, JobNow, ModelFailed, Moved, Waits
from reshard.client.models.plans import Plan
from reshard.client.models.records import Problem
from reshard.client.operations import catalogs as of_catalogs
from reshard.client.operations import jobs as operations
from reshard.client.operations.table import Session
from reshard.client.text import expected, remaining
from reshard.pipeline.errors import ApiUnavailable, BrokerUnavailable, JobCancelled, WrongState
from reshard.worker.followers.records import FULFILLED

T = TypeVar("T")

# Of states whose name does not say what is being done; whatever is copied is checked before it is published.
PHASES = {
    "copying": "checking the model",
    "committing": "publishing",
    "confirming": "reading back",
}
POLL = 1.0  # seconds between reads when nothing happens; workers report their progress as often
PATIENCE = 120.0  # seconds without the queue before following ends; the job itself does not
PAUSE = 2.0  # seconds between tries to reach a queue that is away
READ_AT_EACH = 1000  # models of a catalog that ended: each poll may read so many more in search of failures
FAILURES_SHOWN = 20  # of a catalog, at once; more of them are counted


def follow(session: Session, id: str, output: Output, verbose: bool = False) -> None:
    """Shows a job until it ends; raises the job's own error unless it is done."""
    try:
        with bar(output) as shown:
            follower = _Follower(session, id, output, shown, verbose)
            job = _patiently(shown, follower.look)
            attested = _patiently(shown, lambda: operations.attested(session, id).attested)
    except KeyboardInterrupt:
        output.say(f"\nJob {id} is still running; to follow its progress, run `reshard watch {id}`")
        raise Exit(INTERRUPTED) from None
    if job.error:
        raise job.error.error()
    if job.state == "cancelled":
        raise JobCancelled(job=job.id)
    assert job.published is not None, "a job that is done has published"
    done = JobDone.of(
        job,
        target=str(job.request.target),
        checks=job.all_checks,
        source_bytes=source_bytes(follower.read, attested),
        moved=Moved.of(job),
        seconds=round(seconds_of(job), 3),
    )
    text = ended(done, job.request, job.shards, job.bytes, follower.undo, verbose)
    output.result(done, text, done.published.commit)


def follow_catalog(session: Session, name: str, output: Output) -> Catalog:
    """Shows a catalog until nothing more of it is begun or at work; returns how it stands then."""
    try:
        with bar(output) as shown:
            return _patiently(shown, CatalogFollower(session, name, output, shown).look)
    except KeyboardInterrupt:
        output.say(f"\nCatalog {name} is still running; to follow its progress, run `reshard catalog watch {name}`")
        raise Exit(INTERRUPTED) from None


def _patiently(shown: Bar, look: Callable[[], T | None]) -> T:
    """The first thing that ``look`` returns; a broker or an API that is away is waited for."""
    away_since = None
    while True:
        try:
            found = look()
            away_since = None
            if found is not None:
                return found
        except (BrokerUnavailable, ApiUnavailable) as error:
            away_since = away_since or time.monotonic()
            if not error.retryable or time.monotonic() - away_since > PATIENCE:
                raise
            who = "the broker" if isinstance(error, BrokerUnavailable) else "the API"
            shown.waits(f"{who} is not responding ({error.facts['why']})")
            time.sleep(PAUSE)


class _Waits:
    """Tells why nothing is begun, each time that the reason changes."""

    def __init__(self, output: Output, shown: Bar) -> None:
        self._output, self._bar = output, shown
        self._last: str | None = None

    def tell(self, why: str | None) -> None:
        if why != self._last:
            self._last = why
            if self._output.json:
                self._output.document(Waits(waits=why))
        self._bar.waits(why or "")


class _Follower:
    def __init__(self, session: Session, id: str, output: Output, shown: Bar, verbose: bool) -> None:
        self._session, self._id, self._output, self._bar, self._verbose = session, id, output, shown, verbose
        self._after = "0"
        self.read: tuple[str, ...] = ()  # the source files of the plan, once it was shown
        self.undo: Rows = []
        self._waits = _Waits(output, shown)

    def look(self) -> JobNow | None:
        """The job once it has ended."""
        seen = operations.changes(self._session, self._id, operations.Since.model_construct(after=self._after))
        self._after = seen.next
        for event in seen.events:
            self._report(event)
        self._show(seen.job)
        if seen.job.state.ended:
            return seen.job
        if not seen.events:
            self._session.linger(self._id, self._after, POLL)
        return None

    def _show(self, job: JobNow) -> None:
        # The plan goes some time after the job is done.
        if job.shards and not self.read and (plan := self._plan()) is not None:
            self.read = tuple(file.path for file in plan.reads)
            self.undo = undo_rows(job.request, plan)
            show_plan(plan, self._output, self._bar, self._verbose)
        if job.state == "copying" and job.bytes_done < job.bytes:
            self._bar.show("copying", job.bytes_done, job.bytes, (job.shards_done, job.shards))
        else:
            phase = PHASES.get(job.state, job.state.replace("_", " "))
            self._bar.show(phase, figures=expected(job) if job.place else "")
        if not job.state.ended:
            self._waits.tell(job.waits or job.note)

    def _plan(self) -> Plan | None:
        try:
            return operations.show_plan(self._session, self._id)
        except WrongState:
            return None

    def _report(self, event: Happened) -> None:
        unit = event.fields.get("unit")
        if self._output.json:
            self._output.document(Event(event=event))
        elif event.kind in {"trouble", "voided"} and event.error:
            self._bar.say(f"{unit}: {event.error.message}; retrying")
        elif event.kind == "lost":
            self._bar.say(f"{unit}: lost worker {event.fields.get('worker')}; another worker will take over")


class CatalogFollower:
    def __init__(self, session: Session, name: str, output: Output, shown: Bar) -> None:
        self._session, self._name, self._output, self._bar = session, name, output, shown
        self._told: set[tuple[str, str | None]] = set()  # models whose failure was told, each with its job
        self._failed = 0  # those that it counted then
        self._rest = 0  # polls until failures are read again, as each time all that ended is read
        self._waits = _Waits(output, shown)

    def look(self) -> Catalog | None:
        """The catalog once nothing more of it is begun or at work; what waits for ``resume`` is not begun."""
        now = of_catalogs.show_progress(self._session, self._name)
        failed, over = now.counts.get("failed", 0), now.state not in {"expanding", "running"} and not now.active
        # Fewer: they were retried, and are news if they fail again.
        if (over and failed) or failed < self._failed or (failed > self._failed and self._rest <= 0):
            self._tell_failures()
            self._rest = (now.entries - now.todo - now.active) // READ_AT_EACH
        if over:
            return of_catalogs.whole_catalog(self._session, self._name)
        self._rest -= 1
        self._show(now)
        self._waits.tell(now.waits or (now.note if now.state == "expanding" else None))
        time.sleep(POLL)
        return None

    def _show(self, now: CatalogProgress) -> None:
        done, failed = sum(now.counts.get(outcome, 0) for outcome in FULFILLED), now.counts.get("failed", 0)
        figures = f"{done:,} of {now.entries:,} models done, {now.active:,} running, {failed:,} failed"
        figures = ", ".join(filter(None, (figures, remaining(now.left))))
        self._bar.show(now.state, done, now.entries, figures="" if now.state == "expanding" else figures)

    def _tell_failures(self) -> None:
        groups = of_catalogs.all_failures(self._session, self._name).failures
        failed = [one for group in groups.values() for one in group]
        news = [one for one in failed if (one.repo, one.job) not in self._told]
        self._told, self._failed = {(one.repo, one.job) for one in failed}, len(failed)
        if self._output.json:
            for one in news:
                told = FailedModel(repo=one.repo, job=one.job, error=Problem.of(one))
                self._output.document(ModelFailed(failed=told))
        else:
            for line in first([f"{one.repo}: {one.code}: {one.message}" for one in news], FAILURES_SHOWN):
                self._bar.say(line)
