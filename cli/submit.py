"""`reshard submit`: a job for the queue."""

from __future__ import annotations

from typing import Annotated

from rich.text import Text
from typer import Option

from reshard.cli.arguments import Priority, read_output, read_request, takes
from reshard.cli.jobs import missing, open_store
from reshard.cli.output import Output
from reshard.cli.waits import waits
from reshard.pipeline.request import Request


@takes(request=read_request, output=read_output)
def submit(
    *,
    request: Request,
    priority: Annotated[Priority, Option(help="bulk jobs wait for interactive ones.")] = Priority.interactive,
    watch: Annotated[bool, Option("--watch", help="Follow the job to its end and take over its exit code.")] = False,
    output: Output,
) -> None:
    """Queue a job that reshards SRC into DST; exits 0 when it is queued."""
    from reshard.cli.watch import follow

    request = request.model_copy(update={"priority": priority.value})
    with open_store() as store:
        job, existed = (submitted := store.submit(request)).id, submitted.existed
        said = "is this request already" if existed else "is queued"
        text = Text(f"job {job} {said}: {request.source} -> {request.target}")
        if not watch:
            text.append(f"\nfollow it with `reshard watch {job}`")
        for kind in missing(store.processes()):
            output.say(Text(f"no {kind} is running: start one with `reshard {kind}`, or all of it with `reshard up`"))
        if why := waits(store, request.priority == "bulk"):
            output.say(Text(why))
        output.result({"job": job, "existed": existed, "waits": why}, text, job)
        if watch:
            follow(store, job, output)
