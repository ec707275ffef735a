"""What a person gains who loads a model: memory and time before a cut and after it, as transformers loads both.

Before, it is one torch file in float32; after, safetensors files in float16. With a device map, accelerate places each
tensor as it is read; here all of them go to the CPU.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.benchmarks import llama
from tests.benchmarks.figures import COMMAND, Figure, Race
from tests.benchmarks.race import Contender, once, python, race
from tests.benchmarks.scale import Scale

MAPS = {"": "", "auto": ", with a device map"}


def loading(folder: Path, scale: Scale) -> Iterator[Figure | Race]:
    """Loading before and after the cut."""
    made, before, after = folder / "made", folder / "before", folder / "after"
    llama.save(made, scale.model, "F32")
    before.mkdir()
    once(Contender("torch.save", lambda out: python("torch_file", made, before)), folder)
    cut = [COMMAND, "run", before, "--to", after, "--size", scale.size, "--dtype", "float16", "--quiet"]
    subprocess.run(cut, check=True, capture_output=True)
    contenders = [
        Contender(f"{state}{told}", partial(_load, of, map_))
        for state, of in (("one float32 .bin", before), ("float16 files", after))
        for map_, told in MAPS.items()
    ]
    costs = race(contenders, scale.runs, folder)
    yield Race(f"loading {scale.model // 10**6:,} MB, before and after", costs)
    for told in MAPS.values():
        old, new = costs[f"one float32 .bin{told}"], costs[f"float16 files{told}"]
        yield Figure(f"load after the cut{told}, to before: time", new.wall / old.wall, "x", 1, "report")
        yield Figure(f"load after the cut{told}, to before: peak memory", new.peak / old.peak, "x", 1, "report")


def _load(model: Path, device_map: str, out: Path) -> Sequence[str | os.PathLike[str]]:
    return python("load", model, device_map)
