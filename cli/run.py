"""`reshard run`: the whole job in this process, without a broker."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from reshard.cli.arguments import Jobs, Verbose, read_request, takes
from reshard.cli.job_text import Rows, checks_text, ended, undo_rows
from reshard.cli.output import Output, count
from reshard.cli.progress import Bar, bar
from reshard.client.facts import source_bytes
from reshard.client.models.jobs import Finished, Moved, Waits
from reshard.client.models.records import Problem
from reshard.pipeline.errors import ProofError
from reshard.pipeline.paths import ENTER, is_there
from reshard.pipeline.request import Request

if TYPE_CHECKING:
    from reshard.pipeline.planning.model import Plan
    from reshard.pipeline.protocols import Source


@takes(request=read_request)
def run(request: Request, output: Output, jobs: Jobs = None, verbose: Verbose = False) -> None:
    """Reshard SRC into DST on this machine, without a queue.

    On a terminal, asks for confirmation before --public exposes a private or gated SRC.

    Example: reshard run openai-community/gpt2 --to ./gpt2-200MB --size 200MB
    """
    from reshard.pipeline import reshard
    from reshard.pipeline.planning.estimate import forecast
    from reshard.pipeline.planning.model import weight_files
    from reshard.pipeline.stores import heap
    from reshard.pipeline.stores.connect import Context, own_limiters

    heap.for_copies()
    there = is_there()
    with bar(output) as shown:
        view = View(request, output, shown, reshard.PHASES, verbose)
        watcher = reshard.Watcher(
            view.exposing, view.planned, view.resumed, view.stored, view.moved, view.step, shown.say
        )
        try:
            report = reshard.run(request, Context.from_env(own_limiters(view.waits)), watcher, jobs=jobs)
        except KeyboardInterrupt:
            shown.say(view.interrupted)
            raise
        except ProofError as error:
            if checks := Problem.model_validate(error).checks():
                shown.say(checks_text(checks))
            raise
    left = [("folder", f"this shell is still in the old folder: {ENTER}")] if there and not is_there() else []
    plan = report.plan
    done = Finished.of(
        report,
        state="done",
        target=str(request.target),
        source_bytes=source_bytes(() if plan.published else (file.path for file in plan.read), report.attested),
        moved=Moved.of(report.moved, expected=forecast(plan).uploaded),
        seconds=round(time.monotonic() - view.started, 3),
    )
    size = sum(shard.size for shard in plan.shards)
    text = ended(done, request, weight_files(plan), size, [*view.undo, *left], verbose)
    output.result(done, text, done.published.commit)


class View:
    """What a person sees while the pipeline works."""

    def __init__(
        self, request: Request, output: Output, shown: Bar, phases: Mapping[str, str], verbose: bool = False
    ) -> None:
        self.started = time.monotonic()
        self.undo: Rows = []  # once the plan stands
        self._verbose = verbose
        self._request, self._output, self._bar, self._phases = request, output, shown, phases
        self._step, self._done, self._total, self._files, self._shards = "", 0, 0, 0, 0

    def exposing(self, source: Source) -> None:
        """Raises Abort unless whoever sits at the terminal agrees; in a script, --public was the answer."""
        from typer import Abort

        target = self._request.target
        question = f"{source.place} is {source.visibility}. Publish it to {target}, where everyone can see it?"
        if not self._bar.agrees(question):
            self._bar.say("Nothing changed")
            raise Abort

    def planned(self, plan: Plan) -> None:
        from reshard.cli.plan_text import show_plan
        from reshard.client.plan import document_of

        document = document_of(self._request, plan)
        self._total, self._shards = document.forecast.read, len(plan.shards)
        self.undo = undo_rows(self._request, document)
        show_plan(document, self._output, self._bar, self._verbose)

    def resumed(self, shards: int, bytes_: int) -> None:
        self._files, self._done = shards, bytes_
        self._bar.say(f"Resuming: {shards:,} of {count(self._shards, 'file')} copied by an earlier run")

    @property
    def interrupted(self) -> str:
        if not self._shards:
            return "Interrupted: nothing was copied"
        if self._step in {"publish", "confirm"}:
            doing = self._phases[self._step]
            return f"Interrupted while {doing}: run the same command again to see whether it was published"
        kept = f"{self._files:,} of {count(self._shards, 'file')} copied"
        return f"Interrupted: nothing was published ({kept}); run the same command again to continue"

    def step(self, name: str) -> None:
        self._step = name
        self._show()

    def waits(self, why: str) -> None:
        """What the Hub makes it wait for; "" when that is over."""
        if self._output.json:
            self._output.document(Waits(waits=why or None))
        self._bar.waits(why)

    def stored(self, shards: int) -> None:
        self._files = shards

    def moved(self, count: int) -> None:
        self._done += count
        self._show()

    def _show(self) -> None:
        if self._step == "copy":
            self._bar.show(self._phases["copy"], self._done, self._total, (self._files, self._shards))
        else:
            self._bar.show(self._phases[self._step])
