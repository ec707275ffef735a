"""What workers at fault cost a fleet: jobs by a good worker alone, and by the same beside two that are at fault."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from reshard.pipeline.places import Hub
from reshard.pipeline.request import Options, Request
from reshard.worker.local import worker_command
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.states import JobState
from tests.benchmarks.figures import Figure
from tests.benchmarks.scale import Scale
from tests.hub import HubProcess
from tests.support.at_fault import WAYS, spoil, spoil_started
from tests.support.models import arrays, numbered, save_sharded
from tests.support.procs import Broker, Machine, wait_for

SIZE = 420_000  # bytes; the model has 2.4 MB in four files
SOURCE = "you/model"


def faulty(folder: Path, scale: Scale) -> Iterator[Figure]:
    """How many times as long the jobs take beside two workers at fault, in each way."""
    model = folder / "model"
    save_sharded(model, numbered(arrays(24, 100_000), 4))
    with HubProcess(folder / "hub", users=["you:hf_you"]) as hub:
        hub.admin.create_repo(SOURCE)
        hub.admin.import_files(SOURCE, {path.name: path for path in model.iterdir()})
        env = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_you"}
        alone = _seconds(folder / "alone", env, "", scale.faulty)
        for way in WAYS:
            here = folder / way.replace(" ", "-")
            here.mkdir()
            together = _seconds(here, env, way, scale.faulty)
            yield Figure(f"{scale.faulty} jobs, two of three at fault: {way}", together / alone, "x", 3, "must")


def _seconds(folder: Path, env: dict[str, str], way: str, count: int) -> float:
    """Until the last job is done, by one good worker and two that are at fault in this way, if there is one."""
    with (
        Broker(folder) as broker,
        Machine(folder, broker.url, cold=True, **env) as machine,
        JobStore.at(broker.url) as store,
    ):
        machine.control()
        commands = [*([spoil(way, folder)] * 2 if way else []), (worker_command(2), dict[str, str]())]
        workers = [machine.launch("worker", command, **environment) for command, environment in commands]
        for worker in workers:
            machine.await_sign_of(worker)
        spoil_started(way, folder)
        start = time.perf_counter()
        for number in range(count):
            target = Hub(repo=f"you/{folder.name}-{number}")
            store.submit(Request(source=Hub(repo=SOURCE), target=target, options=Options(size=SIZE)))
        wait_for(lambda: sum(store.counts()[state] for state in JobState if state.ended) == count, "their end", 600)
        took = time.perf_counter() - start
        assert store.counts()[JobState.done] == count
        assert all("this worker paused itself after" in worker.said() for worker in workers[:-1])
        return took
