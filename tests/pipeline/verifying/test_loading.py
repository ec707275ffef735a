"""`verify --load` on folders and on repositories: the model itself answers for what was written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard.pipeline.api import verify
from reshard.pipeline.check import Check
from reshard.pipeline.errors import DiskFull
from reshard.pipeline.places import parse_place
from reshard.pipeline.protocols import Source
from reshard.pipeline.request import Options, Request
from reshard.pipeline.reshard import run
from reshard.pipeline.stores.connect import Context, open_source
from reshard.pipeline.stores.overlay import Borrowing
from reshard.pipeline.verifying.load import LoadOptions, check_load
from reshard.pipeline.verifying.meta_load import MetaLoader
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import Run
from tests.pipeline.verifying.models import Saved

SIZE = 20_000


@pytest.fixture
def cut(saved: Callable[..., Saved], tmp_path: Path, meta_loader: MetaLoader) -> tuple[Path, Path]:
    """(source, output) of a small model that the pipeline cut."""
    source, output = saved("llama").folder, tmp_path / "output"
    request = Request(source=parse_place(str(source)), target=parse_place(str(output)), options=Options(size=SIZE))
    run(request, Context.from_env(), meta_loader=meta_loader)
    assert len(list(output.glob("*.safetensors"))) > 2
    return source, output


def opened(place: str | Path) -> Source:
    return open_source(parse_place(str(place)), Context.from_env())


def look(
    output: Source, source: Source | None, meta_loader: MetaLoader, tmpdir: Path, memory: int | None = None
) -> Check:
    options = LoadOptions(max_memory={"cpu": memory} if memory else None)
    return check_load(output, source, meta_loader, options, lambda n: None, tmpdir)


def test_the_cut_model_gives_the_sources_output(
    cut: tuple[Path, Path], tmp_path: Path, meta_loader: MetaLoader
) -> None:
    source, output = cut
    found = look(opened(output), opened(source), meta_loader, tmp_path)
    assert (found.result, found.figures["class_name"]) == ("passed", "LlamaForCausalLM")
    assert "bit for bit" in found.reason
    offloaded = look(opened(output), opened(source), meta_loader, tmp_path, memory=60_000)
    assert offloaded.result == "passed" and offloaded.figures["blocks_on_disk"] > 0


def test_a_changed_weight_changes_the_output(cut: tuple[Path, Path], tmp_path: Path, meta_loader: MetaLoader) -> None:
    source, output = cut
    path = next(p for p in sorted(output.glob("*.safetensors")) if "model.norm.weight" in load_file(p))
    tensors = load_file(path)
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] * 2}, path, metadata={"format": "pt"})
    found = look(opened(output), opened(source), meta_loader, tmp_path)
    assert found.result == "failed"
    assert "a different output" in found.findings[0]
    assert look(opened(output), None, meta_loader, tmp_path).result == "passed", "alone it loads and runs"


def test_a_model_that_runs_on_made_up_parameters_does_not_pass_alone(
    saved: Callable[..., Saved], tmp_path: Path, meta_loader: MetaLoader
) -> None:
    model = saved("llama")
    for name in ("source", "output"):
        (tmp_path / name).mkdir()
        shutil.copy(model.folder / "config.json", tmp_path / name)
        tensors = load_file(model.folder / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    output = opened(tmp_path / "output")
    alone = look(output, None, meta_loader, tmp_path)
    assert (alone.result, alone.figures["in_no_file"]) == ("inconclusive", 1)
    assert "lm_head.weight" in alone.reason
    same = look(output, opened(tmp_path / "source"), meta_loader, tmp_path)
    assert (same.result, "1 parameter is in no file on either side" in same.reason) == ("passed", True)
    offloaded = look(output, None, meta_loader, tmp_path, memory=10_000)
    assert (offloaded.result, "1 parameter in no file" in offloaded.reason) == ("inconclusive", True), offloaded
    lost = look(output, opened(model.folder), meta_loader, tmp_path)
    assert lost.result == "failed" and "lm_head.weight" in lost.findings[0]


def test_a_repository_is_fetched_and_forgotten(
    cut: tuple[Path, Path],
    tmp_path: Path,
    meta_loader: MetaLoader,
    namespace: Namespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, output = cut
    monkeypatch.setenv("HF_ENDPOINT", namespace.endpoint)
    repo = namespace.repo("cut")
    namespace.admin.create_repo(repo)
    namespace.admin.put_files(repo, {p.name: p.read_bytes() for p in output.iterdir() if p.is_file()})
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert look(opened(repo), opened(source), meta_loader, scratch).result == "passed"
    assert not list(scratch.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10, used=0, free=10))
    with pytest.raises(DiskFull):
        look(opened(repo), None, meta_loader, scratch)


def test_what_no_loader_reads_is_skipped_and_a_source_in_torch_is_nothing_to_compare_with(
    cut: tuple[Path, Path], tmp_path: Path, meta_loader: MetaLoader
) -> None:
    source, output = cut
    (tmp_path / "bin").mkdir()
    torch.save(load_file(source / "model.safetensors"), tmp_path / "bin" / "pytorch_model.bin")
    shutil.copy(source / "config.json", tmp_path / "bin")
    untried = look(opened(tmp_path / "bin"), None, meta_loader, tmp_path)
    assert (untried.result, untried.figures) == ("skipped", {})
    found = look(opened(output), opened(tmp_path / "bin"), meta_loader, tmp_path)
    assert found.result == "inconclusive" and "nothing to compare with" in found.reason


def test_what_options_changed_is_loaded_alone_and_a_lent_config_with_its_weights(
    cut: tuple[Path, Path], tmp_path: Path, meta_loader: MetaLoader
) -> None:
    source, output = cut
    options = LoadOptions()
    for changes in (Options(dtype="bfloat16"), Options(strip_prefix="model.")):
        found = check_load(opened(output), opened(source), meta_loader, options, lambda n: None, tmp_path, changes)
        assert found.result == "inconclusive" and "can change the output" in found.reason
    (tmp_path / "bare").mkdir()
    shutil.copy(source / "model.safetensors", tmp_path / "bare")
    lent = Borrowing(opened(tmp_path / "bare"), opened(source))
    assert look(opened(output), lent, meta_loader, tmp_path).result == "passed"


def test_what_only_a_manifest_says_is_changed_is_loaded_alone_unless_it_changes_nothing(
    saved: Callable[..., Saved], tmp_path: Path, go: Run
) -> None:
    source = saved("llama").folder
    for dtype, expected in (("bfloat16", "inconclusive"), ("float32", "passed")):
        go(source, tmp_path / dtype, size=SIZE, dtype=dtype)
        found = verify(tmp_path / dtype, source, load=LoadOptions())
        (loaded,) = (check for check in found.checks if check.name == "load")
        assert (loaded.result, found.result) == (expected, expected), loaded


def test_what_only_a_config_says_is_changed_is_loaded_alone(
    saved: Callable[..., Saved], tmp_path: Path, go: Run
) -> None:
    """The tensors have the new dtype already, and the config still says the old one, by which loaders go."""
    source = tmp_path / "source"
    shutil.copytree(saved("llama").folder, source)
    weights = load_file(source / "model.safetensors")
    save_file({name: one.bfloat16() for name, one in weights.items()}, source / "model.safetensors", {"format": "pt"})
    assert '"dtype": "float32"' in (source / "config.json").read_text()
    go(source, tmp_path / "out", size=SIZE, dtype="bfloat16")
    found = verify(tmp_path / "out", source, load=LoadOptions())
    (loaded,) = (check for check in found.checks if check.name == "load")
    assert loaded.result == found.result == "inconclusive", loaded
