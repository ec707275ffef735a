"""The bar of ``run(progress=True)``, on terminals and in notebooks; elsewhere nothing is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import ParamSpec

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from reshard.pipeline.planning.estimate import forecast
from reshard.pipeline.planning.model import Plan
from reshard.pipeline.reshard import PHASES, Watcher

P = ParamSpec("P")


@contextmanager
def shown(watcher: Watcher) -> Iterator[Watcher]:
    """``watcher`` which also moves a bar, on stderr or below the cell."""
    console = Console(stderr=True)
    if console.is_jupyter and find_spec("ipywidgets") is None:  # rich moves nothing in a cell without it
        yield replace(watcher, step=_both(watcher.step, lambda name: console.print(PHASES.get(name, name))))
    elif console.is_jupyter or (console.is_terminal and not console.is_dumb_terminal):
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
        with Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console) as progress:
            yield _moving(watcher, progress)
            progress.refresh()  # else a cell keeps what was drawn last, up to a tenth of a second before
    else:
        yield watcher


def _moving(watcher: Watcher, progress: Progress) -> Watcher:
    task = progress.add_task(PHASES["plan"], total=None)

    def planned(plan: Plan) -> None:
        progress.update(task, total=forecast(plan).read or None)

    def step(name: str) -> None:
        everything = progress.tasks[0].total if name not in {"plan", "copy"} else None  # headers are no part of a copy
        progress.update(task, description=PHASES.get(name, name), completed=everything)

    return replace(
        watcher,
        planned=_both(watcher.planned, planned),
        resumed=_both(watcher.resumed, lambda shards, bytes_: progress.update(task, completed=bytes_)),
        moved=_both(watcher.moved, lambda count: progress.update(task, advance=count)),
        step=_both(watcher.step, step),
        noted=_both(watcher.noted, progress.console.print),
    )


def _both(first: Callable[P, None], second: Callable[P, None]) -> Callable[P, None]:
    def both(*args: P.args, **named: P.kwargs) -> None:
        first(*args, **named)
        second(*args, **named)

    return both
