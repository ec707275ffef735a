"""Several source files at a time: how many, and that neither bytes nor errors depend on who is first."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from reshard.pipeline import abreast as module
from reshard.pipeline.abreast import abreast, jobs_here
from reshard.pipeline.errors import SourceNotFound
from reshard.pipeline.limits import GB, JOBS_MAX, MB, MEMORY_FLOOR, MEMORY_FLOOR_XET, MEMORY_MORE
from reshard.pipeline.planning.model import Transports
from reshard.pipeline.reshard import Report, Watcher, draft, run
from reshard.pipeline.stores.connect import Context, open_source, open_target
from reshard.pipeline.verifying.meta_load import MetaLoader
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import asked, upload
from tests.support.checker import from_folder, from_hub, read_checkpoint
from tests.support.measured import measured
from tests.support.models import save_model

SIZE = 2_100_000  # bytes; above what a store reads at once


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Twenty shards of four source files, five each."""
    return save_model(tmp_path / "model", 40, 1_000_000, 4)


def copied(source: str | Path, target: str | Path, jobs: int, meta_loader: MetaLoader, watcher: Watcher) -> Report:
    context = replace(Context.from_env(), memory_limit=jobs * MEMORY_FLOOR_XET)
    return run(asked(source, target, size=SIZE), context, watcher, meta_loader, jobs)


def files_of(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


FULL_XET, LFS = Transports("xet", "xet"), Transports("file", "lfs")


@pytest.mark.parametrize(
    "asked_for, cores, memory, disk, transports, jobs, short",
    [
        (None, 2, MEMORY_FLOOR_XET, GB, None, 1, ""),  # which one keeps busy
        (None, 6, MEMORY_FLOOR_XET, GB, None, 3, ""),
        (None, 16, MEMORY_FLOOR_XET, GB, None, 4, ""),  # no more than there are source files
        (None, 16, MEMORY_FLOOR, GB, None, 1, ""),  # the promise is for one
        (None, 16, MEMORY_FLOOR + 2 * MEMORY_MORE, GB, None, 3, ""),
        (None, 16, MEMORY_FLOOR_XET, GB, FULL_XET, 1, ""),
        (None, 16, 3 * MEMORY_FLOOR_XET, GB, FULL_XET, 3, ""),
        (3, 1, MEMORY_FLOOR_XET, GB, None, 3, ""),  # who asks for it knows their cores
        (9, 1, MEMORY_FLOOR_XET, GB, None, 4, ""),
        (3, 1, MEMORY_FLOOR, GB, None, 1, "RESHARD_MEMORY_LIMIT"),  # and has set their memory
        (4, 1, MEMORY_FLOOR + 2 * MEMORY_MORE - 1, GB, None, 2, "RESHARD_MEMORY_LIMIT"),
        (4, 1, 3 * MEMORY_FLOOR_XET - 1, GB, FULL_XET, 2, "RESHARD_MEMORY_LIMIT"),
        (4, 1, MEMORY_FLOOR_XET, 5 * MB, LFS, 2, "RESHARD_TMPDIR"),  # a file each lies there until it is sent
        (4, 1, MEMORY_FLOOR_XET, 0, LFS, 1, "RESHARD_TMPDIR"),  # which is refused elsewhere
        (4, 1, MEMORY_FLOOR, 5 * MB, LFS, 1, "RESHARD_MEMORY_LIMIT"),
    ],
)
def test_how_many_are_copied_at_a_time(
    asked_for: int | None,
    cores: int,
    memory: int,
    disk: int,
    transports: Transports | None,
    jobs: int,
    short: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "cores", lambda: cores)
    request, context = asked(model, tmp_path / "out", size=SIZE), Context.from_env()
    source, target = open_source(request.source, context), open_target(request.target, request.options, context)
    plan = draft(request, source, target)
    here, note = jobs_here(replace(plan, transports=transports or plan.transports), asked_for, memory, disk)
    assert here == jobs and bool(note) is bool(short)
    assert not note or note.endswith(f"at a time instead of {min(asked_for or 0, 4)}, limited by {short}")


def test_a_run_copies_no_more_at_a_time_than_fit_its_memory(
    model: Path, tmp_path: Path, meta_loader: MetaLoader
) -> None:
    context = replace(Context.from_env(), memory_limit=MEMORY_FLOOR + 2 * MEMORY_MORE)
    threads, notes = set[str](), list[str]()
    watcher = Watcher(moved=lambda count: threads.add(threading.current_thread().name), noted=notes.append)
    run(asked(model, tmp_path / "out", size=SIZE), context, watcher, meta_loader, 4)
    assert notes == ["copying 3 source files at a time instead of 4, limited by RESHARD_MEMORY_LIMIT"]
    assert "reshard-copy-0" in threads and "reshard-copy-3" not in threads


def test_so_many_work_at_the_same_time_and_each_item_is_worked_on_once() -> None:
    all_here, done = threading.Barrier(JOBS_MAX), list[int]()

    def work(item: int) -> None:
        all_here.wait(60)  # broken unless all of them are at work
        done.append(item)

    abreast(range(2 * JOBS_MAX), JOBS_MAX, work, threading.Event())
    assert sorted(done) == [*range(2 * JOBS_MAX)]


def test_the_first_error_is_raised_and_the_others_are_told_to_end() -> None:
    halt, begun, ended = threading.Event(), threading.Event(), threading.Event()

    def work(item: int) -> None:
        if item == 0:
            begun.wait(60)
            raise ZeroDivisionError
        begun.set()
        assert halt.wait(60)
        ended.set()

    with pytest.raises(ZeroDivisionError):
        abreast(range(9), 2, work, halt)
    assert ended.is_set()


def test_a_folder_is_the_same_bytes_however_many_are_copied_at_a_time(
    model: Path, tmp_path: Path, meta_loader: MetaLoader
) -> None:
    plans, threads, told = [], set[str](), list[int]()
    watcher = Watcher(moved=lambda count: threads.add(threading.current_thread().name), stored=told.append)
    for jobs in (1, 3):
        report = copied(model, tmp_path / f"out{jobs}", jobs, meta_loader, watcher)
        plans.append(report.plan.digest)
        assert report.moved.read == sum(path.stat().st_size for path in model.glob("*.safetensors")) - sum(
            int.from_bytes(path.read_bytes()[:8], "little") + 8 for path in model.glob("*.safetensors")
        )
    one, three = files_of(tmp_path / "out1"), files_of(tmp_path / "out3")
    assert one == three and plans[0] == plans[1]
    assert {name for name in threads if name.startswith("reshard-copy-")} == {f"reshard-copy-{n}" for n in range(3)}
    assert told[-1] == 20 and told == sorted(told[: len(told) // 2]) + sorted(told[len(told) // 2 :])


@pytest.mark.parametrize("on_hub", ["http"], indirect=True)  # a content store's chunks are named by their hashes
def test_a_damaged_transfer_is_fetched_again_beside_others(
    model: Path, on_hub: Namespace, meta_loader: MetaLoader
) -> None:
    repo, target = upload(on_hub, "source", model), on_hub.repo("target")
    on_hub.admin.fault("GET /_cdn/.*model-00002-of-00004", "wrong_bytes", at=1_500_000, times=1)
    copied(repo, target, 4, meta_loader, Watcher())
    assert read_checkpoint(from_hub(on_hub.endpoint, target)) == read_checkpoint(from_folder(model))
    assert [fault["hits"] for fault in on_hub.admin.faults()] == [1]


@pytest.mark.parametrize("on_hub", ["http", "xet"], indirect=True)
def test_repositories_are_copied_side_by_side(model: Path, on_hub: Namespace, meta_loader: MetaLoader) -> None:
    repo, target = upload(on_hub, "source", model), on_hub.repo("target")
    report = copied(repo, target, 4, meta_loader, Watcher())
    assert set(report.attested.values()) == {"checked"} and len(report.attested) == 4
    assert read_checkpoint(from_hub(on_hub.endpoint, target)) == read_checkpoint(from_folder(model))


@pytest.mark.parametrize("on_hub", ["http"], indirect=True)
def test_one_that_fails_is_told_while_another_waits_for_its_bytes(
    model: Path, on_hub: Namespace, meta_loader: MetaLoader
) -> None:
    repo = upload(on_hub, "source", model)
    held = on_hub.admin.fault("GET /_cdn/.*model-00001-of", "hold", skip=1, when="request")
    on_hub.admin.fault("GET /.*model-00002-of", "status", status=404, skip=2)
    with pytest.raises(SourceNotFound):
        copied(repo, on_hub.repo("target"), 2, meta_loader, Watcher())
    assert on_hub.admin.wait_for_fault(held)["waiting"] == 1
    on_hub.admin.clear_faults()


def test_each_more_takes_what_the_rule_says(tmp_path: Path) -> None:
    """Torch files with transposed tensors: each is put in order through a window."""
    torch = pytest.importorskip("torch")
    (source := tmp_path / "model").mkdir()
    for number in range(3):
        tensors = {f"w{number}.{n}": torch.zeros(2000, 10_000, dtype=torch.bfloat16).t() for n in range(2)}
        torch.save(tensors, source / f"pytorch_model-{number + 1:05}-of-00003.bin")
    env = {"RESHARD_TMPDIR": str(tmp_path)}
    cost = measured("tests.pipeline.jobs:do_run", str(source), str(tmp_path / "out"), {"size": 100 * MB}, 3, env=env)
    assert cost.result["shards"] >= 3 and cost.peak <= MEMORY_FLOOR + 2 * MEMORY_MORE
