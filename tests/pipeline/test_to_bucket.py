"""Into an object store: staged, copied by the store, the index last; and what such a store cannot promise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from reshard.pipeline.api import plan
from reshard.pipeline.api import verify as checked
from reshard.pipeline.errors import (
    FoldersNested,
    HubUnreachable,
    NothingKept,
    NothingToRollBack,
    SourceUnfinished,
    TargetOccupied,
    TargetUnfinished,
)
from reshard.pipeline.places import parse_place
from reshard.pipeline.planning.estimate import forecast, needs
from reshard.pipeline.publishing.rollback import rollback
from reshard.pipeline.request import Options
from reshard.pipeline.stores import bucket_target
from reshard.pipeline.stores.bucket_target import StoreObjects
from reshard.pipeline.stores.connect import Context, open_source, open_target
from reshard.pipeline.tensors import StoredFile
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.verify import verify
from tests.pipeline.conftest import Run, asked
from tests.support.models import save_model
from tests.support.s3 import S3

SIZE = 20_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", 12, 4000, 2)


def there(bucket: S3, folder: str) -> set[str]:
    return {*bucket.files(folder)}


def test_a_folder_becomes_one_of_an_object_store_and_nothing_else_is_left_there(
    bucket: S3, model: Path, go: Run, meta_loader: MetaLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_target, "STORE_COPY_MAX", SIZE // 2)  # larger ones go through this process
    out = f"{bucket.url}/models/small"
    report = go(model, out, size=SIZE)
    assert report.plan.transports.target == "http" and report.checks[-1].result == "passed"
    assert [note for note in report.plan.notes if "has no commits" in note or "create" in note] == [
        f"{out} has no commits: its files change one after the other, the index last, and a publication cannot be"
        " rolled back"
    ]
    files = there(bucket, "models/small")
    assert len([path for path in files if path.endswith(".safetensors")]) > 2
    assert {path for path in files if path.startswith(".reshard/")} == {".reshard/publications.json"}
    read, made = (open_source(parse_place(str(place)), Context.from_env()) for place in (model, out))
    checks = {check.name: check.result for check in verify(made, read, meta_loader, deep=True)}
    assert (checks["same tensors"], checks["same bytes"], checks["other files"]) == ("passed", "passed", "passed")
    assert go(model, out, size=SIZE).plan.published, "nothing changed there, and nothing is done"


def test_another_cut_replaces_ours_and_leaves_others_alone(bucket: S3, model: Path, go: Run) -> None:
    out = f"{bucket.url}/models/small"
    go(model, out, size=SIZE)
    bucket.put("models", {"small/notes.txt": b"mine", "small-not/config.json": b"x"})
    report = go(model, out, size=10 * SIZE)
    files = there(bucket, "models/small")
    assert {path for path in files if path.endswith(".safetensors")} == {shard.path for shard in report.plan.shards}
    assert "notes.txt" in files and there(bucket, "models/small-not") == {"config.json"}
    with pytest.raises(NothingToRollBack, match="no earlier version was kept"):
        rollback(open_target(parse_place(out), Options(), Context.from_env()), report.published.commit)


def test_a_plan_into_a_new_folder_speaks_of_no_hub(bucket: S3, model: Path) -> None:
    made = plan(asked(model, f"{bucket.url}/models/new", size=SIZE))
    wanted = needs(made, {})
    assert made.transports.target == "http" and not forecast(made).at_most
    assert (wanted.disk, wanted.api_calls, wanted.resolver_calls) == (0, 0, 0)


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize("target", ["runs/final/out", "runs", ""])
def test_a_folder_of_a_store_inside_the_other_is_refused(
    bucket: S3, model: Path, go: Run, command: str, target: str
) -> None:
    files = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
    source, out = bucket.put("runs/final", files), f"{bucket.url}/{target}".rstrip("/")
    with pytest.raises(FoldersNested) as refused:
        go(source, out, size=SIZE) if command == "run" else plan(asked(source, out, size=SIZE))
    inner, outer = sorted((source, out), key=len, reverse=True)
    assert str(refused.value).startswith(f"{inner} is inside {outer}, so ")
    assert there(bucket, "runs/final") == {*files}


def test_what_cannot_be_brought_back_is_replaced_only_on_request(bucket: S3, model: Path, go: Run) -> None:
    files = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
    url = bucket.put("runs/final", files)
    with pytest.raises(NothingKept, match="the only copy of its source") as refused:
        go(url, url, size=SIZE)
    note, *_ = plan(asked(url, url, size=SIZE)).notes
    assert note == f"a run will fail (exit code 7) unless you use --overwrite: {refused.value}"
    with pytest.raises(TargetOccupied, match=r"config\.json"):
        go(model, url, size=SIZE)
    assert there(bucket, "runs/final") == {*files}
    report = go(url, url, size=SIZE, overwrite=True)
    assert {shard.path for shard in report.plan.shards} <= there(bucket, "runs/final")


@pytest.mark.parametrize("before", ["another model", "nothing"])
def test_a_publication_cut_off_in_the_middle_is_no_source_and_the_next_one_finishes_it(
    before: str, bucket: S3, model: Path, tmp_path: Path, go: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = f"{bucket.url}/models/small"
    if before != "nothing":
        go(save_model(tmp_path / "another", 12, 4000, 3), out, size=SIZE)
    with monkeypatch.context() as patch:
        _cut_off(patch, after=2)
        with pytest.raises(HubUnreachable):
            go(model, out, size=SIZE, overwrite=True)
    cut = there(bucket, "models/small")
    looks = [
        lambda: plan(asked(out, tmp_path / "read", size=SIZE)),
        lambda: go(out, tmp_path / "read", size=SIZE),
        lambda: checked(out),
        lambda: checked(model, against=bucket.url),  # the folder above it
    ]
    for look in looks:
        with pytest.raises(SourceUnfinished, match=f"^{out}: a publication to it was interrupted"):
            look()
    with pytest.raises(TargetUnfinished):
        plan(asked(model, out, size=SIZE))
    assert there(bucket, "models/small") == cut and not (tmp_path / "read").exists()
    assert go(model, out, size=SIZE).plan.published, "it was finished, and is what is asked for"
    assert checked(out, against=model, deep=True).result == "passed"


def test_a_publication_in_place_that_was_cut_off_is_finished_before_its_source_is_read(
    bucket: S3, model: Path, go: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = bucket.put("runs/final", {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()})
    with monkeypatch.context() as patch:
        _cut_off(patch, after=2)
        with pytest.raises(HubUnreachable):
            go(url, url, size=SIZE, overwrite=True)
    go(url, url, size=SIZE, overwrite=True)
    assert checked(url, against=model, deep=True).result == "passed"


def _cut_off(patch: pytest.MonkeyPatch, after: int) -> None:
    """The store is away once it has put so many files in place."""
    put = StoreObjects.put

    def failing(objects: StoreObjects, files: Sequence[StoredFile], check: Callable[[], None]) -> None:
        put(objects, files[:after], check)
        raise HubUnreachable(endpoint=str(objects.place), what="no response")

    patch.setattr(StoreObjects, "put", failing)
