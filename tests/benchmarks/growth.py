"""What grows with a model and what does not: memory does not.

Processor time of a GB is told for each size and held to no line: what a page costs hangs on what the system has to take
it from. A small model is written to pages that are free; past the machine's memory each has to be taken from the cache.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from reshard.pipeline.limits import GB, MB, MEMORY_FLOOR
from tests.benchmarks.figures import Figure
from tests.benchmarks.llama import config, specs
from tests.benchmarks.scale import Scale
from tests.support.giants import save_sparse
from tests.support.measured import measured

PATIENCE = 1800.0  # seconds, for the largest on a slow disk


def growth(folder: Path, scale: Scale) -> Iterator[Figure]:
    """Folder to folder, of sparse sources: what is written is not sparse, and the disk has to hold it."""
    costs = []
    for size in scale.growth:
        source, target = folder / "source", folder / "target"
        save_sparse(source, specs(config(size)), 1)
        asked = str(source), str(target), {"size": scale.file}
        costs.append(measured("tests.pipeline.jobs:do_run", *asked, timeout=PATIENCE))
        shutil.rmtree(source)
        shutil.rmtree(target)
    for cost in costs:
        size = cost.result["bytes"] / GB
        yield Figure(f"growth, {size:.3g} GB: processor time for each GB", cost.cpu / size, "s", 0, "report")
    peaks = [cost.peak / MB for cost in costs]
    yield Figure("growth, peak memory of the largest", peaks[-1], "MB", MEMORY_FLOOR / MB, "must")
    yield Figure("growth, its memory to the smallest's", peaks[-1] / peaks[0], "x", 1.15, "must")
