"""Paths that two files want, or that are a file here and a folder there."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.pipeline.errors import PathTaken
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import Run, upload
from tests.pipeline.stores.conftest import write_files
from tests.support.checker import from_folder, from_hub, read_checkpoint
from tests.support.models import arrays, numbered, save_model, save_sharded, save_single

SIZE = 20_000


def test_what_include_names_never_takes_the_path_of_what_is_written(tmp_path: Path, on_hub: Namespace, go: Run) -> None:
    """A source with the same weights in one file and in several; the several would be carried as they are."""
    made, model = arrays(8, 4000), tmp_path / "model"
    save_sharded(model, numbered(made, 2))
    save_single(model, made)
    save_single(tmp_path / "single", made)
    source, target = upload(on_hub, "source", model), on_hub.repo("target")
    for again in (False, True):  # the second time the weights stand already
        report = go(source, target, size=SIZE, include=("*",))
        taken = ("model.safetensors.index.json", "the result has its own file at this path")
        assert (taken in report.plan.left_out, bool(report.plan.reused)) == (not again, again)
        assert read_checkpoint(from_hub(on_hub.endpoint, target)) == read_checkpoint(from_folder(tmp_path / "single"))
        on_hub.admin.put_files(source, {"notes.txt": b"new"})


def test_a_file_of_somebody_where_a_folder_is_needed_is_refused_before_anything_is_read(
    tmp_path: Path, go: Run
) -> None:
    model, out = save_model(tmp_path / "model", 4, 4000, 1), tmp_path / "out"
    write_files(model, {"unet/x.json": b"{}"})
    write_files(out, {"unet": b"mine"})
    with pytest.raises(PathTaken, match="unet/x.json and unet cannot both be written"):
        go(model, out, size=SIZE)
    assert (out / "unet").read_bytes() == b"mine" and [path.name for path in out.iterdir()] == ["unet"]


def test_a_folder_with_files_of_somebody_where_a_file_is_written_is_refused(tmp_path: Path, go: Run) -> None:
    model, out = save_model(tmp_path / "model", 4, 4000, 1), tmp_path / "out"
    write_files(out, {"config.json/notes.txt": b"mine"})
    with pytest.raises(PathTaken):
        go(model, out, size=SIZE, overwrite=True)
    assert (out / "config.json" / "notes.txt").read_bytes() == b"mine"


def test_an_empty_folder_makes_way(tmp_path: Path, go: Run) -> None:
    model, out = save_model(tmp_path / "model", 4, 4000, 1), tmp_path / "out"
    (out / "config.json" / "deep").mkdir(parents=True)
    go(model, out, size=SIZE)
    assert (out / "config.json").read_bytes() == (model / "config.json").read_bytes()


def test_what_was_published_as_a_folder_may_become_a_file_and_a_folder_again(tmp_path: Path, go: Run) -> None:
    model, out = save_model(tmp_path / "model", 4, 4000, 1), tmp_path / "out"
    write_files(model, {"extra/deep/a.json": b"{}"})
    go(model, out, size=SIZE)
    for path in (model / "extra" / "deep" / "a.json", model / "extra" / "deep", model / "extra"):
        path.rmdir() if path.is_dir() else path.unlink()
    write_files(model, {"extra": b"a file"})
    go(model, out, size=SIZE)
    assert (out / "extra").read_bytes() == b"a file"
    (model / "extra").unlink()
    write_files(model, {"extra/a.json": b"{}"})
    go(model, out, size=SIZE)
    assert (out / "extra" / "a.json").read_bytes() == b"{}"
