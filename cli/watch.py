"""Following a job on the queue: its plan, progress, setbacks and end."""

from __future__ import annotations

import json
import time
from typing import Any

from typer import Exit

from reshard.cli.errors import INTERRUPTED
from reshard.cli.job_text import ended, in_short, moved, outcome, sent, source_bytes, summary
from reshard.cli.output import Output
from reshard.cli.plan_text import show_plan
from reshard.cli.progress import Bar, bar
from reshard.cli.queue import Queue, waits
from reshard.pipeline.errors import BrokerUnavailable, JobCancelled, ReshardError
from reshard.worker.queue.jobs import Job
from reshard.worker.queue.states import JobState

# Of states whose name does not say what is being done; whatever is copied is checked before it is published.
PHASES = {
    JobState.copying: "checking the model",
    JobState.committing: "publishing",
    JobState.confirming: "reading back",
}
POLL = 1.0  # seconds between reads when nothing happens; workers report their progress as often
PATIENCE = 120.0  # seconds without the broker before following ends; the job itself does not
PAUSE = 2.0  # seconds between tries to reach a broker that is away


def follow(queue: Queue, id: str, output: Output, verbose: bool = False) -> None:
    """Shows a job until it ends; raises the job's own error unless it is done."""
    try:
        with bar(output) as shown:
            follower = _Follower(queue, id, output, shown)
            job = follower.to_the_end()
    except KeyboardInterrupt:
        output.say(f"\njob {id} continues; follow it again with `reshard watch {id}`")
        raise Exit(INTERRUPTED) from None
    if job.error:
        raise ReshardError.from_dict(job.error)
    if job.state == "cancelled":
        raise JobCancelled(job=job.id)
    published = job.published
    assert published is not None, "a job that is done has published"
    bytes_ = source_bytes(follower.read, queue.jobs.attested(id))
    target, checks = job.request.target, job.checks
    if verbose:
        rows = [moved(job.read, job.uploaded, job.deduplicated, job.expected, sent(target))]
        rows += outcome(checks, bytes_, published)
    else:
        rows = in_short(target, published, (job.read, job.uploaded, job.deduplicated), bytes_, checks)
    head = summary(target, published, job.shards, job.bytes, job.since - job.created, checks)
    output.result(job.to_dict() | {"source_bytes": bytes_}, ended(head, rows), published["commit"])


class _Follower:
    def __init__(self, queue: Queue, id: str, output: Output, shown: Bar) -> None:
        self._queue, self._id, self._output, self._bar = queue, id, output, shown
        self._after = "0"
        self.read: tuple[str, ...] = ()  # the source files of the plan, once it was shown
        self._waits: str | None = None

    def to_the_end(self) -> Job:
        away_since = None
        while True:
            try:
                for number, event in self._queue.jobs.events(self._id, self._after, wait=POLL):
                    self._after = number
                    self._report(dict(event))
                job = self._queue.jobs.get(self._id)
                self._show(job)
                away_since = None
                if job.state.ended:
                    return job
            except BrokerUnavailable as error:
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > PATIENCE:
                    raise
                self._bar.waits(f"the broker does not answer ({error.facts['why']})")
                time.sleep(PAUSE)

    def _show(self, job: Job) -> None:
        # The plan goes some time after the job is done.
        if job.shards and not self.read and (plan := self._queue.jobs.plan(self._id)) is not None:
            self.read = tuple(file.path for file in plan.files)
            show_plan(job.request, plan, self._output, self._bar)
        if not job.state.ended:
            self._tell(waits(self._queue, job))
        if job.state == JobState.copying and job.bytes_done < job.bytes:
            self._bar.show("copying", job.bytes_done, job.bytes, (job.shards_done, job.shards))
        else:
            self._bar.show(PHASES.get(job.state, job.state.replace("_", " ")))

    def _tell(self, why: str | None) -> None:
        if why != self._waits:
            self._waits = why
            if self._output.json:
                self._output.document({"waits": why})
        self._bar.waits(why or "")

    def _report(self, event: dict[str, Any]) -> None:
        if "error" in event:
            event["error"] = json.loads(event["error"])
        if self._output.json:
            self._output.document({"event": event})
        elif event["kind"] in {"trouble", "voided"}:
            self._bar.say(f"{event['unit']}: {event['error']['message']}; trying again")
        elif event["kind"] == "lost":
            self._bar.say(f"{event['unit']}: worker {event['worker']} is gone; another continues")
