"""What the queue costs a job: models of 20 kB by one worker process, and by loops that have no queue.

One loop is what a person would write in a shell, `reshard run` for one model after the other; each of these starts
Python and the reload child anew. The other calls the pipeline from one process and keeps its reload child warm, as the
worker does: what a job costs more than that is the queue's.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from reshard.pipeline.places import Hub
from reshard.pipeline.request import Options, Request
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.states import JobState
from tests.benchmarks.figures import COMMAND, Figure, Profile, aim
from tests.benchmarks.profiles import processes
from tests.benchmarks.scale import Scale
from tests.hub import HubProcess
from tests.support import mirror
from tests.support.measured import measured
from tests.support.procs import Broker, Machine, wait_for

COMMANDS = 10  # jobs of the queue for each run of the command, which takes seconds; they are alike
SIZE = 5000  # bytes


def tiny(folder: Path, scale: Scale) -> Iterator[Figure]:
    """The time of one small job, three ways."""
    with HubProcess(folder / "hub", users=["you:hf_you"]) as hub:
        env = {
            "HF_ENDPOINT": hub.endpoint,
            "HF_TOKEN": "hf_you",
            "HF_HOME": str(folder / "hf"),
            "RESHARD_TMPDIR": str(folder),
        }
        _fill(hub, folder / "model", scale.small)
        queue, profile = _queue(folder, env, scale.small)
        loop = measured("tests.benchmarks.tiny:loop", scale.small, env=env, timeout=1200).result
        command = _commands(folder, env, max(1, scale.small // COMMANDS))
    yield Figure("a job of 20 kB by a worker", queue, "s", 0.15, "must")
    yield Figure("a job of 20 kB by a worker, to the command", queue / command, "x", 1.2, "must")
    yield aim("a job of 20 kB by a worker, to a loop", queue / loop, "x", 1.2, lambda: profile)


def request(number: int, by: str) -> Request:
    options = Options(size=SIZE)
    return Request(source=Hub(repo=f"them/m{number}"), target=Hub(repo=f"you/{by}{number}"), options=options)


def loop(count: int) -> float:
    """Seconds of each job in a loop over the pipeline, once its reload child is warm."""
    from reshard.pipeline.reshard import run
    from reshard.pipeline.stores.connect import Context
    from reshard.pipeline.verifying.meta_load import MetaLoader

    context = Context.from_env()
    with closing(MetaLoader()) as meta_loader:
        run(request(0, "loop"), context, meta_loader=meta_loader)
        start = time.perf_counter()
        for number in range(1, count):
            run(request(number, "loop"), context, meta_loader=meta_loader)
        return (time.perf_counter() - start) / (count - 1)


def _queue(folder: Path, env: dict[str, str], count: int) -> tuple[float, Profile]:
    """Seconds of each job, and what the processes took for all of them."""
    with (
        Broker(folder) as broker,
        Machine(folder, broker.url, cold=True, **env) as machine,
        JobStore.at(broker.url) as store,
    ):
        machine.control()
        machine.worker(concurrency=1)
        store.submit(_bulk(0))
        wait_for(lambda: store.counts()[JobState.done] == 1, "the warm-up")
        with processes() as took:
            for number in range(1, count):
                store.submit(_bulk(number))
            wait_for(lambda: store.counts()[JobState.done] == count, "the last job's end", 1800)
    [profile] = took
    return profile.wall / (count - 1), profile


def _bulk(number: int) -> Request:
    return request(number, "queue").model_copy(update={"priority": "bulk"})


def _commands(folder: Path, env: dict[str, str], count: int) -> float:
    start = time.perf_counter()
    for number in range(count):
        asked = request(number, "command")
        command = [COMMAND, "run", str(asked.source), "--to", str(asked.target), "--size", f"{SIZE}B", "--quiet"]
        state = {"XDG_STATE_HOME": str(folder / f"state{number}")}  # which knows the class of none before
        subprocess.run(command, env=os.environ | env | state, check=True, capture_output=True)
    return (time.perf_counter() - start) / count


def _fill(hub: HubProcess, folder: Path, count: int) -> None:
    first, *rest = (request(number, "first") for number in range(count))
    template = mirror.publish(hub, first, folder, "hf_you")
    hub.kill()
    mirror.write(hub.directory, hub.endpoint, template, rest, published=False)
    hub.start()
