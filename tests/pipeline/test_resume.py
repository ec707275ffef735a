"""A run that ends before its time: the next one copies only what no store has answered for."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from contextlib import nullcontext
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from reshard.pipeline import driving
from reshard.pipeline.copying import loop
from reshard.pipeline.copying.hashing import Compared
from reshard.pipeline.copying.loop import Attested, Witness
from reshard.pipeline.errors import ObjectLost
from reshard.pipeline.journal import Journal
from reshard.pipeline.limits import COPIES, STAGING_AGE
from reshard.pipeline.planning.model import Receipt
from reshard.pipeline.request import Request
from reshard.pipeline.reshard import Report, Watcher, run
from reshard.pipeline.stores.connect import Context
from reshard.pipeline.stores.folder.sink import FolderBatch
from reshard.pipeline.tensors import StoredFile
from reshard.pipeline.verifying.meta_load import MetaLoader
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import TRANSPORT, asked, upload
from tests.support.checker import from_folder, from_hub, read_checkpoint
from tests.support.models import arrays, numbered, save_model, save_sharded

SIZE = 2_100_000  # bytes; above what a store reads at once
SHARDS = 20


class Killed(BaseException):
    pass


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twenty shards of four source files, five each; the store is asked for its answer after each shard."""
    monkeypatch.setattr(loop, "SETTLE", SIZE // 2)
    return save_model(tmp_path / "model", 40, 1_000_000, 4)


class Runs:
    """Runs of one request, each ended at a byte of its copy or left alone.

    The last one found ``resumed`` shards, of ``noted`` bytes.
    """

    def __init__(self, source: str, target: str, meta_loader: MetaLoader) -> None:
        self.request = asked(source, target, size=SIZE)
        self.meta_loader = meta_loader
        self.resumed = self.noted = 0

    def run(self, until: float = 1e9) -> Report:
        """Until this part of the source was read."""
        left = until

        def moved(count: int) -> None:
            nonlocal left
            left -= count
            if left <= 0:
                raise Killed

        def resumed(shards: int, bytes_: int) -> None:
            self.resumed, self.noted = shards, bytes_

        self.resumed = self.noted = 0
        return run(self.request, Context.from_env(), Watcher(moved=moved, resumed=resumed), self.meta_loader)

    def killed(self, until: float) -> None:
        with pytest.raises(Killed):
            self.run(until)


def weights(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


# ------------------------------------------------------------------------------------------------------------ runs


@pytest.mark.parametrize("part", [0.23, 0.48, 0.73])
def test_a_folder_is_gone_on_with_and_at_most_a_few_shards_are_read_again(
    part: float, model: Path, tmp_path: Path, meta_loader: MetaLoader
) -> None:
    whole, runs = weights(model), Runs(str(model), str(tmp_path / "out"), meta_loader)
    runs.killed(whole * part)
    assert not (tmp_path / "out").exists()
    report = runs.run()
    # One was being written, one waited for its sync, and what is under way between threads is a shard more.
    assert runs.resumed >= SHARDS * part - 3
    assert report.moved.read <= whole * (1 - part) + 3 * SIZE
    assert runs.noted == pytest.approx(runs.resumed * 2_000_000, rel=0.001)  # tensors, without the headers
    assert read_checkpoint(from_folder(tmp_path / "out")) == read_checkpoint(from_folder(model))
    assert runs.run().published.found and runs.resumed == 0


def test_a_repository_is_gone_on_with_and_nothing_is_sent_twice(
    model: Path, on_hub: Namespace, meta_loader: MetaLoader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    state = tmp_path / "reshard"
    target = on_hub.repo("target")
    runs = Runs(upload(on_hub, "source", model), target, meta_loader)
    runs.killed(weights(model) * 0.6)
    kept = Journal.open(state, next(state.iterdir()).stem)
    noted = [receipt.sha256 for receipt in kept.receipts.values()]
    kept.close(done=False)
    on_hub.admin.log(reset=True)
    report = runs.run()
    over_lfs = os.environ[TRANSPORT] == "http"
    assert runs.resumed >= SHARDS * 0.6 - 4 if over_lfs else runs.resumed == SHARDS // 2  # two of four batches
    assert report.moved.uploaded <= (SHARDS - runs.resumed) * SIZE
    sent = [request["path"] for request in on_hub.admin.log() if request["method"] in ("PUT", "POST")]
    assert len(noted) == runs.resumed and not [path for path in sent if any(digest in path for digest in noted)]
    assert read_checkpoint(from_hub(on_hub.endpoint, target)) == read_checkpoint(from_folder(model))


def test_a_run_that_is_killed_again_and_again_ends(model: Path, tmp_path: Path, meta_loader: MetaLoader) -> None:
    whole, runs, found = weights(model), Runs(str(model), str(tmp_path / "out"), meta_loader), []
    for _ in range(3):
        runs.killed(whole * 0.3)
        found.append(runs.resumed)
    report = runs.run()
    assert found == sorted(found) and runs.resumed > found[-1]
    assert report.moved.read < whole * 0.5
    assert read_checkpoint(from_folder(tmp_path / "out")) == read_checkpoint(from_folder(model))


def test_a_run_that_ends_early_has_nothing_of_its_source_open(
    model: Path, tmp_path: Path, meta_loader: MetaLoader
) -> None:
    with pytest.raises(Killed) as why:  # which, as it is kept here, keeps alive what its traceback refers to
        Runs(str(model), str(tmp_path / "out"), meta_loader).run(until=3 * SIZE)
    opened = [Path(os.path.realpath(entry)) for entry in Path("/proc/self/fd").iterdir()]
    assert why.traceback and not [path for path in opened if path.is_relative_to(model)]


def test_what_the_store_lost_since_is_copied_again(model: Path, tmp_path: Path, meta_loader: MetaLoader) -> None:
    whole, runs = weights(model), Runs(str(model), str(tmp_path / "out"), meta_loader)
    runs.killed(whole * 0.6)
    first, *rest = (tmp_path / ".out.reshard" / "objects").iterdir()
    first.unlink()
    runs.run()
    assert runs.resumed == len(rest) > 5
    assert read_checkpoint(from_folder(tmp_path / "out")) == read_checkpoint(from_folder(model))


def test_another_source_is_another_plan_and_starts_anew(model: Path, tmp_path: Path, meta_loader: MetaLoader) -> None:
    runs = Runs(str(model), str(tmp_path / "out"), meta_loader)
    runs.killed(weights(model) * 0.6)
    os.utime(model / "config.json", ns=(1, 1))
    runs.run()
    assert runs.resumed == 0


def test_a_source_with_other_bytes_and_the_same_times_starts_anew(
    model: Path, tmp_path: Path, meta_loader: MetaLoader
) -> None:
    runs = Runs(str(model), str(tmp_path / "out"), meta_loader)
    runs.killed(weights(model) * 0.6)
    for path in model.glob("*.safetensors"):
        then, size = path.stat(), path.stat().st_size
        path.write_bytes(path.read_bytes()[: size - 8] + b"tampered")
        os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))
    runs.run()
    assert runs.resumed == 0
    assert read_checkpoint(from_folder(tmp_path / "out")) == read_checkpoint(from_folder(model))


def test_force_starts_anew(model: Path, tmp_path: Path, meta_loader: MetaLoader) -> None:
    runs = Runs(str(model), str(tmp_path / "out"), meta_loader)
    runs.killed(weights(model) * 0.6)
    forced = runs.request.options.model_copy(update={"force": True})
    runs.request = runs.request.model_copy(update={"options": forced})
    assert runs.run().moved.read >= weights(model) - 10_000 * SHARDS
    assert runs.resumed == 0


def test_notes_that_led_to_an_error_are_not_believed_again(
    model: Path, tmp_path: Path, meta_loader: MetaLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ObjectLost(repo="here", what="an object")

    runs = Runs(str(model), str(tmp_path / "out"), meta_loader)
    with monkeypatch.context() as patch:
        patch.setattr(driving, "publish", refuse)
        with pytest.raises(ObjectLost):
            runs.run()
    runs.run()
    assert runs.resumed == 0


def test_two_runs_of_one_plan_leave_each_others_notes_alone(state_dir: Path) -> None:
    first, second = Journal.open(state_dir, "both"), Journal.open(state_dir, "both")
    first.seal([receipt("a")])
    second.seal([receipt("b")])
    second.close(done=True)
    first.close(done=False)
    again = Journal.open(state_dir, "both")
    assert again.receipts.keys() == {"a"}
    again.close(done=True)
    assert not (state_dir / "both.jsonl").exists()


# --------------------------------------------------------------------------------------------------------- journal


def receipt(digest: str) -> Receipt:
    return Receipt(digest, 10, hashlib.sha256(digest.encode()).hexdigest(), None, {"w": "0" * 32})


def test_a_journal_gives_back_what_was_noted(tmp_path: Path) -> None:
    attested = Attested({"model.safetensors": "checked"}, (Witness(0, "w", 0, "1" * 32),), Compared(1, 2))
    noted = Journal.open(tmp_path, "key")
    noted.seal([receipt("a"), receipt("b")])
    noted.seal([receipt("c")])
    noted.finish(0, attested)
    noted.finish(1, attested)
    noted.forget({"c"}, [1])
    noted.close(done=False)
    found = Journal.open(tmp_path, "key")
    assert found.receipts == {"a": receipt("a"), "b": receipt("b")} == noted.receipts
    assert found.attested == {0: attested} == noted.attested


@pytest.mark.parametrize("missing", [1, 20])
def test_a_line_that_was_not_ended_is_dropped_and_written_over(tmp_path: Path, missing: int) -> None:
    noted = Journal.open(tmp_path, "key")
    noted.seal([receipt("a")])
    noted.seal([receipt("b")])
    noted.close(done=False)
    file = tmp_path / "key.jsonl"
    os.truncate(file, file.stat().st_size - missing)
    found = Journal.open(tmp_path, "key")
    assert found.receipts.keys() == {"a"}
    found.seal([receipt("c")])
    found.close(done=False)
    assert [*map(json.loads, file.read_text().splitlines())]
    assert Journal.open(tmp_path, "key").receipts.keys() == {"a", "c"}


def test_a_folder_that_cannot_be_written_is_told_and_costs_only_the_resuming(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    noted = Journal.open(tmp_path / "file" / "state", "key")
    noted.seal([receipt("a")])
    assert noted.receipts.keys() == {"a"}
    assert "a killed run will start over" in caplog.text


class Full(FileIO):
    """A file on a disk that may be full."""

    full = False

    def write(self, data: Any) -> int:
        if not self.full:
            return super().write(data)
        with Path("/dev/full").open("wb", buffering=0) as full:
            return full.write(data)


def test_a_note_that_cannot_be_written_ends_the_notes_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Full(tmp_path / "key.jsonl", "x+b") as file:
        noted = Journal(tmp_path / "key.jsonl", file)
        noted.seal([receipt("a")])
        file.full = True
        noted.seal([receipt("b")])
        noted.seal([receipt("c")])
    assert noted.receipts.keys() == {"a", "b", "c"}
    assert "a killed run will start over" in caplog.text
    assert not (tmp_path / "key.jsonl").exists()


def test_a_state_folder_that_broke_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    noted = Journal.open(tmp_path, "key")
    monkeypatch.setattr(Path, "unlink", read_only)
    noted.close(done=True)


def test_journals_that_nobody_went_on_with_are_removed(tmp_path: Path) -> None:
    for name, age in {"old": STAGING_AGE + 60, "young": STAGING_AGE - 60}.items():
        journal = Journal.open(tmp_path, name)
        journal.seal([receipt("a")])
        journal.close(done=False)
        then = time.time() - age
        os.utime(tmp_path / f"{name}.jsonl", (then, then))
    Journal.open(tmp_path, "new").close(done=True)
    assert [path.name for path in tmp_path.iterdir()] == ["young.jsonl"]


@pytest.mark.parametrize("times", [1, COPIES])
def test_an_object_that_its_store_does_not_know_yet_is_stored_again_in_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    save_sharded(tmp_path / "model", numbered(arrays(8, 1000), 1))
    sealed, lost = FolderBatch.seal, iter(range(times))

    def seal(self: FolderBatch) -> list[StoredFile]:
        stored = sealed(self)
        for _ in lost:
            raise ObjectLost([stored[0].sha256], repo="x", what=stored[0].path)
        return stored

    monkeypatch.setattr(FolderBatch, "seal", seal)
    with nullcontext() if times == 1 else pytest.raises(ObjectLost):
        assert run(Request.of(tmp_path / "model", tmp_path / "out", size=90_000)).published.commit
    assert next(lost, None) is None and (tmp_path / "out").exists() is (times == 1)
