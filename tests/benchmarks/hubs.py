"""From Hub to Hub on loopback: over Xet beside downloading alone and beside doing it by hand, and over a slow LFS."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

from reshard.pipeline.limits import GB, GIB, MB, MEMORY_FLOOR, MEMORY_FLOOR_XET
from tests.benchmarks import llama
from tests.benchmarks.figures import COMMAND, Figure, Race, aim
from tests.benchmarks.profiles import profile_of
from tests.benchmarks.race import Contender, once, python, race
from tests.benchmarks.scale import Scale
from tests.hub import HubProcess
from tests.support.giants import deepseek_v3_fp8, save_sparse
from tests.support.measured import measured

OURS, DOWNLOAD, BY_HAND = (
    "reshard, model class checked",
    "snapshot_download",
    "snapshot_download, transformers, upload_folder",
)
JOBS = "tests.pipeline.jobs"
MODEL = "you/model"
LINE = (
    125 * MB
)  # bytes a second: a gigabit; two cores that are both ends of the line reach no three. Never under a second
LISTED = 4 * MB  # bytes that a file of a copying process may have over Xet: caches and lists, and no weights
TRANSFER = {"xet": "0", "lfs": "1"}  # HF_HUB_DISABLE_XET


def xet(folder: Path, scale: Scale) -> Iterator[Figure | Race]:
    """A model in chunks to a new cut of it. Only the first, which is not timed, finds no seam stored already."""
    with HubProcess(folder / "hub", users=["you:hf_you"]) as hub:
        size = _publish(hub, folder, scale)
        env = _env(hub, "xet")
        hub.admin.log(reset=True)
        options = {"size": scale.file, "transport": "xet"}
        limits = (LISTED, MEMORY_FLOOR_XET)  # the kernel ends what goes beyond either
        cost = measured(f"{JOBS}:do_run_within", *limits, MODEL, "you/first", options, env=_homes(folder, env))
        sent = hub.admin.totals()["xet"]["up"] - cost.result["headers"]
        yield Figure("over Xet, uploaded for each seam", sent / cost.result["seams"] / MB, "MB", 0.15, "must")
        yield Figure("over Xet, peak memory", cost.peak / MB, "MB", MEMORY_FLOOR_XET / MB, "must")

        repos = _Repos(hub)
        by_hand = Contender(BY_HAND, lambda out: python("by_hand", MODEL, out, repos.next(), str(scale.file)), env)
        contenders = [_download(env), repos.contender(scale, env), by_hand]
        costs = race(_counted(hub, contenders), scale.runs, folder)
        yield Race(f"{size / MB:,.0f} MB from Hub to Hub over Xet", costs)
        ours = costs[OURS]
        profile = partial(profile_of, repos.contender(scale, env), folder)
        yield aim("over Xet, to downloading alone", ours.wall / costs[DOWNLOAD].wall, "x", 1.49, profile)
        yield Figure("over Xet, to doing it by hand", ours.wall / costs[BY_HAND].wall, "x", 0.56, "must")
        room = max(1.0, size / MB / 100)  # for lists of chunks, and no weights
        yield Figure("over Xet, written to the disk", ours.disk / MB, "MB", room, "must")
        yield aim("over Xet, processor time", ours.cpu, "s", 14 * max(1.0, size / (3 * GB)), profile)


def lfs(folder: Path, scale: Scale) -> Iterator[Figure | Race]:
    """The same without Xet, on a line that is as slow in both directions; each run sends every byte."""
    with HubProcess(folder / "hub", users=["you:hf_you"]) as hub:
        size = _publish(hub, folder, scale)
        env = _env(hub, "lfs")
        cost = measured(f"{JOBS}:do_run", MODEL, "you/first", {"size": scale.file}, env=_homes(folder, env))
        yield Figure("over LFS, peak memory", cost.peak / MB, "MB", MEMORY_FLOOR / MB, "must")
        repos = _Repos(hub)
        repos.forget("you/first")
        one_way = max(1.0, size / LINE)  # seconds: the line is to be waited for, and not the processor
        for direction in ("GET", "PUT"):
            hub.admin.fault(f"{direction} /_", "throttle", rate=size / one_way)
        contenders = [_download(env), repos.contender(scale, env)]
        name = f"{size / MB:,.0f} MB from Hub to Hub over LFS, {size / one_way / MB:,.0f} MB/s in each direction"
        costs = race(_counted(hub, contenders), scale.runs, folder)
        yield Race(name, costs)
        yield Figure("over LFS, to downloading alone", costs[OURS].wall / costs[DOWNLOAD].wall, "x", 1.25, "must")


def layout(folder: Path, scale: Scale) -> Iterator[Figure]:
    """A folder that is planned whole and begun: enough is copied for memory to settle, and the disk holds no more."""
    made = folder / "layout"
    save_sparse(made, llama.specs(llama.config(scale.layout)), 30)
    with HubProcess(folder / "hub", users=["you:hf_you"]) as hub:
        env = _homes(folder, _env(hub, "lfs"))
        cost = measured(f"{JOBS}:do_begin", str(made), "you/begun", {"size": scale.file}, scale.model, env=env)
    assert cost.result["read"] >= scale.model, cost.result
    name = f"{scale.layout / GIB:,.3g} GiB planned whole and begun, peak memory"
    yield Figure(name, cost.peak / MB, "MB", MEMORY_FLOOR / MB, "must")


def planning(folder: Path, scale: Scale) -> Iterator[Figure]:
    """A 671B layout of 270 files, from its headers on the Hub."""
    made = folder / "giant"
    tensors = save_sparse(made, deepseek_v3_fp8(scale.layers), 270)
    with HubProcess(folder / "hub", users=["you:hf_you"]) as hub:
        files = {path.name: path for path in sorted(made.iterdir())}
        hub.admin.create_repo(MODEL)
        digests = {name: f"{number:064x}" for number, name in enumerate(files)}
        hub.admin.import_files(MODEL, files, sha256=digests)
        env = _env(hub, "lfs") | {"HF_HOME": str(folder / "hf")}
        cost = measured(f"{JOBS}:do_plan", MODEL, "you/cut", {"size": 5 * GB}, env=env)
    assert cost.result["tensors"] == tensors
    yield Figure("plan 671B from the Hub, processor time", cost.cpu, "s", 5, "must")
    yield Figure("plan 671B from the Hub, peak memory", cost.peak / MB, "MB", 600, "must")


def _publish(hub: HubProcess, folder: Path, scale: Scale) -> int:
    """The model as its owner uploads it; returns its bytes."""
    size = llama.save(folder / "model", scale.model)
    once(Contender("upload", lambda out: python("upload", folder / "model", MODEL), _env(hub, "xet")), folder)
    return size


def _env(hub: HubProcess, transfer: str) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_you", "HF_HUB_DISABLE_XET": TRANSFER[transfer]}


def _homes(folder: Path, env: dict[str, str]) -> dict[str, str]:
    (home := folder / "home").mkdir()
    return env | {"HF_HOME": str(home), "RESHARD_TMPDIR": str(home)}


def _download(env: dict[str, str]) -> Contender:
    return Contender(DOWNLOAD, lambda out: python("download", MODEL, out / "source"), env)


def _counted(hub: HubProcess, contenders: Sequence[Contender]) -> list[Contender]:
    """The same, with the bytes that they move to the Hub and from it."""

    def traffic() -> tuple[int, int]:
        totals = hub.admin.totals().values()
        return sum(kind["up"] for kind in totals), sum(kind["down"] for kind in totals)

    return [replace(contender, traffic=traffic) for contender in contenders]


class _Repos:
    """Targets, each of which is new to the Hub, down to its objects over LFS."""

    def __init__(self, hub: HubProcess) -> None:
        self._hub = hub
        self._numbers = count()
        self._last = ""

    def next(self) -> str:
        self._last = f"you/cut{next(self._numbers)}"
        return self._last

    def contender(self, scale: Scale, env: dict[str, str]) -> Contender:
        """Ours."""
        return Contender(
            OURS,
            lambda out: [COMMAND, "run", MODEL, "--to", self.next(), "--size", scale.size, "--quiet"],
            env,
            check=lambda out: self.forget(self._last) if env["HF_HUB_DISABLE_XET"] == "1" else None,
        )

    def forget(self, repo: str) -> None:
        """Have the Hub lose the objects of ``repo``, so that the next run sends them again."""
        files = self._hub.admin.files(repo)
        made = [file["sha256"] for path, file in files.items() if path.endswith(".safetensors")]
        assert len(made) > 1, f"{repo} was not cut: {sorted(files)}"
        for sha256 in made:
            self._hub.admin.drop_object(sha256)
