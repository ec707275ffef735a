"""`make bench`: measures what is promised, ours beside what others use; writes build/bench.json and docs/benchmarks.md.

    python -m tests.benchmarks [--quick | --record] [NAME ...]

Those that are named are printed and not written, unless --record puts them in the place of what the page has of them.
One that fails keeps none of the others from being measured and written; what is measured is in build/bench.json as soon
as its benchmark ends. Ends with 1 when one failed, or when a must is not met.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

from reshard.pipeline.limits import GB
from reshard.worker import broker
from reshard.worker.settings import Settings
from tests.benchmarks import report
from tests.benchmarks.faulty import faulty
from tests.benchmarks.figures import Figure, Race, least_processor_time
from tests.benchmarks.finished import finished
from tests.benchmarks.folders import casts, folders, memory
from tests.benchmarks.growth import growth
from tests.benchmarks.hubs import layout, lfs, planning, xet
from tests.benchmarks.layouts import layouts
from tests.benchmarks.loading import loading
from tests.benchmarks.nights import nights
from tests.benchmarks.ordering import ordering
from tests.benchmarks.proving import proving
from tests.benchmarks.scale import FULL, QUICK, Scale
from tests.benchmarks.tiny import tiny

ROOM = 1.1  # times the largest model that is written
OUT = Path(__file__).parents[2] / "build" / "bench.json"


def answering(folder: Path, scale: Scale) -> Iterator[Figure]:
    """What the command costs a person who asks for help, or submits a job."""
    # Modules that are installed are compiled then, and those of a checkout when they are first loaded.
    env = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder / "compiled")}
    yield Figure("reshard --help, processor time", least_processor_time("--help", env=env), "s", 0.2, "must")
    settings = Settings(broker_url=None, data_dir=folder / "service")
    env["RESHARD_BROKER_URL"] = broker.start(settings)
    try:
        submit = least_processor_time("submit", "a/model", "--to", "b/model", env=env)
    finally:
        broker.stop(settings)
    yield Figure("reshard submit, processor time", submit, "s", 0.3, "must")


Benchmark = Callable[[Path, Scale], Iterator[Figure | Race]]
BENCHMARKS: tuple[Benchmark, ...] = (
    answering, planning, layouts, folders, memory, casts, xet, lfs, layout, growth, loading, proving, finished, tiny,
    faulty, nights, ordering,
)  # fmt: skip
QUICKLY: tuple[Benchmark, ...] = (answering, layouts, folders, memory, casts, xet, lfs, layout, growth, tiny)


def measure(benchmark: Benchmark, scale: Scale) -> Iterator[Figure | Race]:
    """What it yields, in a folder of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="reshard-bench-") as folder,
        patch.dict(os.environ, XDG_STATE_HOME=f"{folder}/state"),  # of all that it starts without one of its own
    ):
        yield from benchmark(Path(folder), scale)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what is promised, ours beside what others use.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the bytes, in about three minutes")
    parser.add_argument("--record", action="store_true", help="put what is named in the place of what the page has")
    known = {benchmark.__name__: benchmark for benchmark in BENCHMARKS}
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    asked = parser.parse_args()
    if unknown := set(asked.names) - set(known):
        parser.error(f"no benchmark is named {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if asked.record and (asked.quick or not asked.names):
        parser.error("--record takes benchmarks by name, at full size")
    scale, usual = (QUICK, QUICKLY) if asked.quick else (FULL, BENCHMARKS)
    chosen, writes = [known[name] for name in asked.names] or usual, not asked.names and not asked.quick
    room = shutil.disk_usage(tempfile.gettempdir()).free
    if writes and room < max(scale.growth) * ROOM:
        parser.error(f"{tempfile.gettempdir()} has only {room / GB:.0f} GB of room: point TMPDIR at a larger disk")
    found = report.Found(missing={benchmark.__name__: "did not run" for benchmark in chosen})
    for benchmark in chosen:
        try:
            for one in measure(benchmark, scale):
                print(report.line(one), flush=True)
                found.add(one)
            del found.missing[benchmark.__name__]
        except Exception as error:  # noqa: BLE001 -- the next one has nothing to do with it
            traceback.print_exc()
            print(getattr(error, "stderr", None) or "", file=sys.stderr, flush=True)
            found.missing[benchmark.__name__] = f"failed with {type(error).__name__}"
        if writes:
            facts = report.keep(found, OUT)
    if writes:
        report.publish(facts)
    elif asked.record:
        report.publish(report.amended(json.loads(report.DATA.read_text()), report.keep(found, OUT), asked.names))
    return 0 if found.met else 1


if __name__ == "__main__":
    sys.exit(main())
