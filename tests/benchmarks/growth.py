"""What grows with a model and what does not: processor time on a straight line through its size, memory nowhere."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

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
    sizes = np.array([cost.result["bytes"] for cost in costs]) / GB
    seconds = np.array([cost.cpu for cost in costs])
    slope, start = np.polyfit(sizes, seconds, 1)
    off = np.abs(seconds - (start + slope * sizes)) / seconds * 100
    yield Figure("growth, processor time for each GB", float(slope), "s", 2, "must")
    yield Figure("growth, processor time of nothing, by the same line", float(start), "s", 0, "report")
    for size, taken, residual in zip(sizes, seconds, off, strict=True):
        yield Figure(f"growth, {size:.3g} GB: processor time", float(taken), "s", 0, "report")
        yield Figure(f"growth, {size:.3g} GB: off the line", float(residual), "%", 0, "report")
    yield Figure("growth, farthest from a straight line", float(off.max()), "%", 20, "must")
    peaks = [cost.peak / MB for cost in costs]
    yield Figure("growth, peak memory of the largest", peaks[-1], "MB", MEMORY_FLOOR / MB, "must")
    yield Figure("growth, its memory to the smallest's", peaks[-1] / peaks[0], "x", 1.15, "must")
