"""`reshard up, down, worker, control`: the processes that carry out jobs."""

from __future__ import annotations

from typing import Annotated

from rich.text import Text
from typer import Option

from reshard.cli.arguments import read_output, takes
from reshard.cli.output import Output, lines


@takes(output=read_output)
def up(output: Output) -> None:
    """Start a broker, a worker and control on this machine, or find those that run."""
    from reshard.worker import local
    from reshard.worker.settings import settings

    service = local.up(settings())
    told = [("broker", service.broker)]
    told += [("started", name) for name in service.started] + [("found", name) for name in service.found]
    told.append(("logs", str(service.data_dir)))
    facts = {
        "broker": service.broker,
        "started": service.started,
        "found": service.found,
        "data_dir": str(service.data_dir),
    }
    output.result(facts, lines(told), service.broker)


@takes(output=read_output)
def down(output: Output) -> None:
    """Stop what `reshard up` started. Jobs stay on disk and go on at the next `up`."""
    from reshard.worker import local
    from reshard.worker.settings import settings

    stopped = local.down(settings())
    output.result({"stopped": stopped}, Text(f"stopped {', '.join(stopped) or 'nothing: none ran'}"))


def worker(
    concurrency: Annotated[
        int | None,
        Option(min=1, max=64, help="Copies at once; left out, RESHARD_CONCURRENCY.", show_default=False),
    ] = None,
) -> None:
    """Be a worker until stopped. SIGTERM hands back what cannot be finished soon."""
    from reshard.worker import local
    from reshard.worker.settings import settings

    local.become_worker(settings(), concurrency)


def control() -> None:
    """Be the process that sends again what was lost, until stopped."""
    from reshard.worker.control import main
    from reshard.worker.settings import settings

    main(settings())
