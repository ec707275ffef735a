"""Two nights of a catalog of many models, by the Hub's budget for an account without a plan.

The Hub's repositories are written into its folder (tests/support/mirror.py); all else is real: the command, a broker
on disk, control, a worker. Each owner has 100 of the sources, because a list is of one owner's models.

The first night the broker is empty, as after the loss of everything: each target is asked what it was made from. So
as not to wait an hour for that, the windows of the budget are a tenth as long, and the time that is shown is that of
the real ones. The second night has the real windows, and a few of the sources are new.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from reshard.pipeline.catalogs.definition import parse, request_for
from reshard.pipeline.limits import HUB_CALLS_MAX, HUB_RESOLVES_MAX, HUB_WINDOW, MB
from reshard.worker.fleet.rate_limit import RESERVE
from reshard.worker.queue.scripts import PREFIX
from tests.benchmarks.figures import Figure
from tests.benchmarks.scale import Scale
from tests.hub import HubProcess
from tests.support import mirror
from tests.support.models import arrays, save_single
from tests.support.procs import Broker, Machine, Proc

EACH = 100  # models of one owner
CHANGED = 10  # at most; a quarter of a small catalog
FASTER = 10  # times as fast do the windows of the first night end
NIGHT = 3600.0  # seconds; a night that takes longer has failed
LOOK = 0.2  # seconds between two looks at how far it is


def nights(folder: Path, scale: Scale) -> Iterator[Figure]:
    """An unchanged model's calls, and what a night takes of time and memory."""
    models, changed = scale.catalog, min(CHANGED, scale.catalog // 4)
    file = folder / "mirror.yaml"
    entries = "".join(f"- repo: {_source(number)}\n" for number in range(models))
    file.write_text(f"name: mirror\ndefaults: {{to: 'you/{{name}}-cut', size: 5kB}}\nentries:\n{entries}")
    with HubProcess(folder / "hub", users=["you:hf_you"]) as hub:
        env = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_you", "RESHARD_TMPDIR": str(folder)}
        _fill(hub, file)
        with Broker(folder) as broker, Machine(folder, broker.url, cold=True, **env) as machine:
            control = machine.control()
            machine.worker(concurrency=1)

            _limit(hub, HUB_WINDOW / FASTER)
            lost = Night(hub, broker, machine, file, control)
            assert lost.counts == {"unchanged": models}, lost.counts
            name = f"{models:,} models, an empty broker"
            yield Figure(f"{name}: calls each", lost.calls / models, "calls", 1.1, "aim")
            windows = lost.calls / (HUB_CALLS_MAX * (1 - RESERVE))
            yield Figure(f"{name}: time", lost.seconds * FASTER / 60, "min", 1.1 * windows * HUB_WINDOW / 60, "aim")

            for number in range(changed):
                save_single(folder / str(number), arrays(4, 2000, seed=number))
                weights = (folder / str(number) / "model.safetensors").read_bytes()
                gone = [path for path in hub.admin.files(_source(number)) if "safetensors" in path]
                files = {"model.safetensors": weights}
                hub.admin.put_files(_source(number), files, lfs=[*files], delete=gone)
            _limit(hub, HUB_WINDOW)
            night = Night(hub, broker, machine, file, control, changed)
            assert night.counts == {"unchanged": models - changed, "published": changed}, night.counts
            name = f"{models:,} models, {changed} new"
            yield Figure(f"{name}: time", night.seconds / 60, "min", 10, "must")
            yield Figure(f"{name}: calls each unchanged", night.idle / (models - changed), "calls", 0.1, "must")
            yield Figure(f"{name}: calls each new", (night.calls - night.idle) / changed, "calls", 30, "aim")
            yield Figure(f"{name}: resolver calls each new", night.resolved / changed, "calls", 40, "aim")
            yield Figure(f"{name}: until submit returns", night.submitting, "s", 3, "must")
            yield Figure(f"{name}: processor time of the control process", night.control, "s", 60, "aim")
            yield Figure(f"{name}: the broker's memory", night.memory / MB, "MB", 100, "must")


class Night:
    """One run of the catalog from its submission to its end, and what it took."""

    def __init__(
        self, hub: HubProcess, broker: Broker, machine: Machine, file: Path, control: Proc, changed: int = 0
    ) -> None:
        hub.admin.log(reset=True)
        before, start = _processor(control.pid), time.perf_counter()
        done = machine.run("catalog", "submit", str(file))
        assert done.returncode == 0, done.stderr
        self.submitting = time.perf_counter() - start  # seconds
        client = broker.client()
        while client.hget(f"{PREFIX}catalog:mirror", "state") in {b"expanding", b"running"}:
            assert time.perf_counter() - start < NIGHT, control.said()[-3000:]
            time.sleep(LOOK)
        self.seconds = time.perf_counter() - start
        self.control = _processor(control.pid) - before  # seconds
        self.memory = int(client.info("memory")["used_memory"])  # bytes
        log = [call for call in hub.admin.log() if call["status"] != 429]
        calls = [call["path"] for call in log if call["kind"] == "api"]
        self.resolved = sum(call["kind"] == "resolve" for call in log)
        new = [repo for number in range(changed) for repo in (_source(number), _target(number))]
        self.calls = len(calls)
        self.idle = sum(not any(f"/{repo}{end}" in path for repo in new for end in "/?") for path in calls)
        seen = json.loads(machine.run("catalog", "status", "mirror", "--json").stdout)
        self.counts = seen["counts"]


def _source(number: int) -> str:
    return f"maker{number // EACH}/m{number}"


def _target(number: int) -> str:
    return f"you/m{number}-cut"


def _fill(hub: HubProcess, file: Path) -> None:
    """The state after a night in which every model of the catalog was published."""
    catalog = parse(file.read_text(), str(file))
    first, *rest = (request_for(catalog, entry, entry.repo or "") for entry in catalog.entries)
    template = mirror.publish(hub, first, file.parent / "model", "hf_you")
    hub.kill()
    mirror.write(hub.directory, hub.endpoint, template, rest, published=True)
    hub.start()


def _limit(hub: HubProcess, window: float) -> None:
    quotas = {"api": HUB_CALLS_MAX, "resolvers": HUB_RESOLVES_MAX}
    hub.admin.settings(rate_limits={kind: {"quota": most, "window": round(window)} for kind, most in quotas.items()})


def _processor(pid: int) -> float:
    """Seconds of processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
