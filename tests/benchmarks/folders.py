"""From folder to folder: what a reshard costs beside plain copying, and beside what else people use for it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from reshard.pipeline.limits import MB, MEMORY_FLOOR
from tests.benchmarks import llama
from tests.benchmarks.figures import COMMAND, Figure, Race, aim
from tests.benchmarks.profiles import profile_of
from tests.benchmarks.race import Contender, once, python, race
from tests.benchmarks.scale import Scale
from tests.support.measured import measured

COPY, SCRIPT, TRANSFORMERS = "cp and sync", "a careful script", "transformers"
MEMORY = Path("/dev/shm")
FOLDERS = "MB from folder to folder"
OURS, CLASS, KNOWN = "reshard", "reshard, model class checked", "reshard, model class known"


def folders(folder: Path, scale: Scale) -> Iterator[Figure | Race]:
    """One bfloat16 file of a Llama into files of the target size."""
    model = folder / "model"
    size = llama.save(model, scale.model)
    bare = _bare(model)

    least = size // scale.file
    cut = partial(_cut, scale=scale, least=least)
    ours, known = cut(OURS, bare), cut(KNOWN, model, env={"XDG_STATE_HOME": str(folder / "known")})
    once(known, folder)
    contenders = [
        _copy(model),
        Contender("sha256, one pass", lambda out: python("sha256", model)),
        ours,
        cut(CLASS, model),
        known,
        _peer(SCRIPT, "careful", model, scale, least),
        _peer(TRANSFORMERS, "transformers", model, scale, least),
        _peer("accelerate", "accelerate", model, scale, least),
        _peer("huggingface_hub", "huggingface_hub", model, scale, least),
    ]
    costs = race(contenders, scale.runs, folder)
    yield Race(f"{size / MB:,.0f} {FOLDERS}", costs)
    wall = {name: cost.wall for name, cost in costs.items()}
    profile = partial(profile_of, ours, folder)
    yield aim("folder to folder, to cp and sync", wall[OURS] / wall[COPY], "x", 1.35, profile)
    yield Figure("folder to folder, to cp and sync, at most", wall[OURS] / wall[COPY], "x", 1.8, "must")
    yield Figure("with the class check, to cp and sync", wall[CLASS] / wall[COPY], "x", 1.3, "must")
    for peer in (TRANSFORMERS, "accelerate"):
        yield Figure(f"with the class check, to {peer}", wall[CLASS] / wall[peer], "x", 0, "report")
    yield Figure("with the class check, to a careful script", wall[CLASS] / wall[SCRIPT], "x", 1, "must")
    yield Figure("the class check, once known", wall[KNOWN] - wall[OURS], "s", 0.4, "must")
    yield _peak("folder to folder, peak memory", bare, folder, scale, {})


def memory(folder: Path, scale: Scale) -> Iterator[Figure | Race]:
    """From and to memory, where no disk hides the processor: a model in one file, and in two (`--jobs` by default)."""
    with tempfile.TemporaryDirectory(prefix="reshard-bench-", dir=MEMORY) as held:
        room = Path(held)
        for files, name in enumerate(("one source file", "two source files"), 1):
            source = room / name.replace(" ", "-")
            size = 0
            for number in range(files):
                part = room / f"part{number}"
                # With equal tensors, the shards of one would be copies of the other's.
                size += llama.save(part, scale.model // files, seed=number)
                source.mkdir(exist_ok=True)
                (part / "model.safetensors").rename(source / f"part{number}.safetensors")
                shutil.rmtree(part)
            one, two = (_pinned(cores, source, scale, size // scale.file) for cores in (1, 2))
            costs = race([one, two], scale.runs, room)
            yield Race(f"{size / MB:,.0f} MB from memory to memory, {name}", costs)
            ratio = costs[two.name].wall / costs[one.name].wall
            profile = profile_of(two, room)
            yield Figure(f"memory to memory, {name}, two cores to one", ratio, "x", 1 / 1.7, "must", profile)
            shutil.rmtree(source)


def casts(folder: Path, scale: Scale) -> Iterator[Figure | Race]:
    """A torch file to safetensors, and casts to float16 from both wider kinds."""
    for dtype in ("BF16", "F32"):
        model = folder / dtype
        least = llama.save(model, scale.model, dtype) * {"BF16": 2, "F32": 1}[dtype] // 2 // scale.file
        name = f"{llama.NAMES[dtype]} to float16, {scale.model / MB:,.0f} MB"
        ours = _cut(OURS, _bare(model), scale, least, "--dtype", "float16")
        checked = _cut(CLASS, model, scale, least, "--dtype", "float16")
        peer = _peer(TRANSFORMERS, "transformers", model, scale, least, "float16")
        costs = race([ours, checked, peer], scale.runs, folder)
        yield Race(name, costs)
        wall = {name: cost.wall for name, cost in costs.items()}
        to, profile = f"{llama.NAMES[dtype]} to float16, to transformers", partial(profile_of, checked, folder)
        yield Figure(to, wall[OURS] / wall[TRANSFORMERS], "x", 1 / 3, "must")
        yield aim(f"{to}, with the class check", wall[CLASS] / wall[TRANSFORMERS], "x", 0.45, profile)
        yield _peak(f"{llama.NAMES[dtype]} to float16, peak memory", model, folder, scale, {"dtype": "float16"})
    torch_file = folder / "bin"
    torch_file.mkdir()
    once(Contender("torch.save", lambda out: python("torch_file", folder / "BF16", torch_file)), folder)
    (torch_file / "config.json").unlink()  # no class to check
    ours = _cut(OURS, torch_file, scale, scale.model // scale.file - 1)
    costs = race([_copy(torch_file), ours], scale.runs, folder)
    yield Race(f"a torch file to safetensors, {scale.model / MB:,.0f} MB", costs)
    ratio, profile = costs[OURS].wall / costs[COPY].wall, partial(profile_of, ours, folder)
    yield aim("torch file to safetensors, to cp and sync", ratio, "x", 1.7, profile)
    yield _peak("torch file to safetensors, peak memory", torch_file, folder, scale, {})


def _bare(model: Path) -> Path:
    """The same weights without a config, so that there is no class to check."""
    bare = model.with_name(f"{model.name}-bare")
    bare.mkdir()
    os.link(model / "model.safetensors", bare / "model.safetensors")
    return bare


def _copy(source: Path) -> Contender:
    return Contender(COPY, lambda out: ["sh", "-c", 'cp "$0"/* "$1" && sync "$1"/*', source, out])


def _cut(
    name: str, source: Path, scale: Scale, least: int, *options: str, env: dict[str, str] | None = None
) -> Contender:
    """Ours, which is to write ``least`` files or more."""
    return Contender(
        name,
        lambda out: [COMMAND, "run", source, "--to", out / "made", "--size", scale.size, "--quiet", *options],
        env or {},
        partial(_has, least),
    )


def _peer(name: str, function: str, source: Path, scale: Scale, least: int, *more: str) -> Contender:
    return Contender(
        name,
        lambda out: python("synced", function, source, out / "made", str(scale.file), *more),
        check=partial(_has, least),
    )


def _has(least: int, out: Path) -> None:
    files = list((out / "made").glob("*.safetensors"))
    assert len(files) >= least, f"{len(files)} files, and not {least}"


def _peak(name: str, source: Path, folder: Path, scale: Scale, options: dict[str, str]) -> Figure:
    """Of the copying process alone; its reload child imports torch."""
    out = folder / f"{source.name}-out"
    cost = measured("tests.pipeline.jobs:do_run", str(source), str(out), {"size": scale.file, **options})
    return Figure(name, cost.peak / MB, "MB", MEMORY_FLOOR / MB, "must")


def _pinned(cores: int, source: Path, scale: Scale, least: int) -> Contender:
    """Ours on so many cores."""
    ours = _cut(OURS, source, scale, least)
    numbers = sorted(os.sched_getaffinity(0))[:cores]
    pin = f"import os, sys; os.sched_setaffinity(0, {numbers}); os.execv(sys.argv[1], sys.argv[1:])"
    return Contender(f"cores: {cores}", lambda out: [sys.executable, "-c", pin, *ours.command(out)], check=ours.check)
