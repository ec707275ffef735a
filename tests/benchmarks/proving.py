"""What it costs to hold every byte of two checkpoints against each other: `verify --deep` beside plain reading.

Plain reading takes every byte of both sides through the same sources and drops it, one side after the other. From the
disk and over a line, what is computed hides behind what is waited for. From memory it cannot, so there the figures are
reported and not required: from the page cache, BLAKE3 takes longer than a copy does; from the Hub on loopback, the Hub
needs the processor that the digests are to hide on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from reshard.pipeline.limits import GB
from reshard.pipeline.places import Place, parse_place
from reshard.pipeline.protocols import Source
from reshard.pipeline.request import Options, Request
from reshard.pipeline.reshard import run
from reshard.pipeline.stores.connect import Context, open_source
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.verify import verify
from tests.benchmarks.figures import Figure, Profile, aim
from tests.benchmarks.profiles import Sampler
from tests.benchmarks.scale import Scale
from tests.hub import HubProcess
from tests.support.measured import measured
from tests.support.models import save_single

HERE = "tests.benchmarks.proving"
REPOS = ("you/model", "you/cut")
LIMIT = 1.3  # times
PATIENCE = 1800.0  # seconds, for both sides a dozen times from a slow disk
LINE = 1.25 * GB  # bytes per second that both sides share: 10 Gbit/s, what a large cloud machine has


def proving(folder: Path, scale: Scale) -> Iterator[Figure]:
    """`--deep` of a fresh cut against its source, between folders and over HTTP from the Hub on loopback."""
    noise = np.random.default_rng(5)
    shape = scale.file // 20
    count = scale.model // (2 * shape)
    tensors = {f"t.{i}": noise.integers(0, 2**16, shape, dtype=np.uint16) for i in range(count)}
    save_single(folder / "model", tensors)
    places = str(folder / "model"), str(folder / "cut")
    request = Request(source=parse_place(places[0]), target=parse_place(places[1]), options=Options(size=scale.file))
    run(request, Context.from_env())
    cost = measured(f"{HERE}:do_ratio", *places, False, scale.runs, timeout=PATIENCE)
    yield Figure("verify --deep from the disk, to reading both", cost.result, "x", LIMIT, "must")
    cost = measured(f"{HERE}:do_ratio", *places, True, scale.runs, timeout=PATIENCE)
    name, profile = "verify --deep from the page cache, to reading both", partial(_profile, *places)
    yield aim(name, cost.result, "x", LIMIT, profile)
    with HubProcess(folder / "hub", users=["you:hf_you"]) as hub:
        for name, place in zip(REPOS, places, strict=True):
            hub.admin.create_repo(name)
            hub.admin.import_files(name, {path.name: path for path in Path(place).iterdir() if path.is_file()})
        env = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_you", "HF_HOME": str(folder / "hf")}
        env["HF_HUB_DISABLE_XET"] = "1"
        cost = measured(f"{HERE}:do_ratio", *REPOS, True, scale.runs, env=env, timeout=PATIENCE)
        name, profile = "verify --deep over HTTP from memory, to reading both", partial(_profile, *REPOS, env=env)
        yield aim(name, cost.result, "x", LIMIT, profile)
        hub.admin.fault("GET /_cdn/", "throttle", rate=LINE)
        cost = measured(f"{HERE}:do_ratio", *REPOS, True, scale.runs, env=env, timeout=PATIENCE)
        yield Figure("verify --deep over a 10 Gbit/s line, to reading both", cost.result, "x", LIMIT, "must")


def do_ratio(source: str, output: str, kept: bool, runs: int) -> float:
    """The median time of a deep verification over that of reading both sides once.

    Unless ``kept``, the kernel is told before each to forget what it has of the files, which are folders' then.
    """
    context = Context.from_env()
    places = parse_place(source), parse_place(output)
    with closing(MetaLoader()) as meta_loader:

        def plain() -> None:
            for place in places:
                read_all(place, context)

        def fresh(work: Callable[[], None]) -> float:
            if not kept:
                forget(source, output)
            return timed(work)

        fresh(plain)
        took = [(fresh(plain), fresh(partial(deep, places, context, meta_loader))) for _ in range(runs)]
    return median(deep for _, deep in took) / median(plain for plain, _ in took)


def _profile(*places: str, env: dict[str, str] | None = None) -> Profile:
    return Profile.from_dict(measured(f"{HERE}:do_profile", *places, env=env).result)


def do_profile(source: str, output: str) -> dict[str, Any]:
    """Of a deep verification from memory."""
    places, context = (parse_place(source), parse_place(output)), Context.from_env()
    with closing(MetaLoader()) as meta_loader, Sampler() as sampler:
        deep(places, context, meta_loader)
    return asdict(sampler.profile)


def deep(places: Sequence[Place], context: Context, meta_loader: MetaLoader) -> None:
    theirs, ours = (open_source(place, context) for place in places)
    checks = verify(ours, theirs, meta_loader, deep=True)
    assert "failed" not in {check.result for check in checks}


def read_all(place: Place, context: Context) -> None:
    source: Source = open_source(place, context)
    for path, file in source.files().items():
        if path.endswith(".safetensors"):
            for _ in source.read(file, 0, file.size):
                pass


def forget(*folders: str) -> None:
    """Drop the files of ``folders`` from the page cache."""
    for folder in folders:
        for path in Path(folder).glob("*.safetensors"):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
