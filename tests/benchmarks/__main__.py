"""`make bench`: measures what the limits promise and writes build/bench.json.

A list of {name, value, unit, target, kind: must or aim, met}; ends with 1 when a must is not met.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from reshard.pipeline.limits import GB, MB, MEMORY_FLOOR
from reshard.worker import broker
from reshard.worker.settings import Settings
from tests.benchmarks.faulty import faulty
from tests.benchmarks.figures import Figure, fastest_command, save
from tests.benchmarks.finished import finished
from tests.benchmarks.loading import loading
from tests.benchmarks.nights import nights
from tests.benchmarks.proving import proving
from tests.benchmarks.tiny import tiny
from tests.support.giants import deepseek_v3_fp8, save_sparse
from tests.support.hub import HubProcess
from tests.support.measured import measured

OUT = Path(__file__).parents[2] / "build" / "bench.json"
JOBS = "tests.pipeline.jobs"
MODEL = 2 * GB  # bytes; enough that anything which grows with the model shows


def copying(folder: Path) -> Iterator[Figure]:
    """The memory of a whole job, and its time for each GB, between folders and over HTTP and LFS."""
    model = folder / "model"
    rows = 10_000
    save_sparse(model, ((f"layer.{i}.weight", "BF16", (rows, 2000)) for i in range(MODEL // (rows * 4000))), 2)
    cost = measured(f"{JOBS}:do_run", str(model), str(folder / "out"), {"size": 200 * MB})
    yield Figure("copy folder to folder, peak memory", cost.peak / MB, "MB", MEMORY_FLOOR / MB, "must")
    yield Figure("copy folder to folder, time", cost.seconds / (MODEL / GB), "s/GB", 5.0, "aim")
    with HubProcess(folder / "hub", users=["you:hf_you"]) as hub:
        hub.admin.create_repo("you/model")
        hub.admin.import_files("you/model", {path.name: path for path in model.iterdir()})
        env = {
            "HF_ENDPOINT": hub.endpoint,
            "HF_TOKEN": "hf_you",
            "HF_HOME": str(folder / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "RESHARD_TMPDIR": str(folder),
        }
        cost = measured(f"{JOBS}:do_run", "you/model", "you/cut", {"size": 200 * MB}, env=env)
    yield Figure("copy over HTTP and LFS, peak memory", cost.peak / MB, "MB", MEMORY_FLOOR / MB, "must")
    yield Figure("copy over HTTP and LFS, time", cost.seconds / (MODEL / GB), "s/GB", 10.0, "aim")


def planning(folder: Path) -> Iterator[Figure]:
    """Planning a 671B layout of 270 files from its headers."""
    save_sparse(folder / "giant", deepseek_v3_fp8(), 270)
    cost = measured(f"{JOBS}:do_plan", str(folder / "giant"), str(folder / "out"), {"size": 5 * GB})
    yield Figure("plan 671B, peak memory", cost.peak / MB, "MB", 600, "must")
    yield Figure("plan 671B, time", cost.seconds, "s", 20, "must")


def answering(folder: Path) -> Iterator[Figure]:
    """How long a person waits for --help and for a submission."""
    yield Figure("reshard --help, time", fastest_command("--help"), "s", 0.3, "aim")
    settings = Settings(broker_url=None, data_dir=folder / "service")
    url = broker.start(settings)
    try:
        submit = fastest_command("submit", "a/model", "--to", "b/model", env={"RESHARD_BROKER_URL": url})
    finally:
        broker.stop(settings)
    yield Figure("reshard submit, time", submit, "s", 1.0, "aim")


BENCHMARKS: tuple[Callable[[Path], Iterator[Figure]], ...] = (
    answering, planning, copying, loading, proving, finished, tiny, faulty, nights,
)  # fmt: skip


def main() -> int:
    """All of them; those that are named are printed and not written."""
    figures = []
    for benchmark in [b for b in BENCHMARKS if b.__name__ in sys.argv[1:] or len(sys.argv) == 1]:
        with tempfile.TemporaryDirectory(prefix="reshard-bench-") as folder:
            for figure in benchmark(Path(folder)):
                met = "met" if figure.met else "MISSED"
                print(
                    f"{figure.name:48} {figure.value:8.4g} {figure.unit:5} {figure.kind} {figure.target:g}: {met}",
                    flush=True,
                )
                figures.append(figure)
    if len(sys.argv) == 1:
        save(figures, OUT)
    return 0 if all(figure.met for figure in figures if figure.kind == "must") else 1


if __name__ == "__main__":
    sys.exit(main())
