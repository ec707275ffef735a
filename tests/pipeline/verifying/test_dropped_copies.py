"""Copies of tied tensors that a loader's save dropped are told; other lost names, or unequal copies, are findings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from reshard.pipeline.check import Check
from reshard.pipeline.places import Folder
from reshard.pipeline.stores.folder.source import FolderSource
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.verify import verify
from tests.pipeline.verifying.models import CONFIGS
from tests.verification.models import save_tokenizer


def checks(output: Path, source: Path, meta_loader: MetaLoader) -> dict[str, Check]:
    sides = [FolderSource.open(Folder(path=str(folder))) for folder in (output, source)]
    return {check.name: check for check in verify(sides[0], sides[1], meta_loader, deep=True)}


def failed(found: dict[str, Check]) -> set[str]:
    return {name for name, check in found.items() if check.result == "failed"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """T5 as `torch.save` writes it: four names of one storage."""
    class_name, settings = CONFIGS["t5"]
    model_class: Any = getattr(transformers, class_name)
    model = model_class(model_class.config_class(**settings))
    folder = tmp_path / "source"
    folder.mkdir()
    model.config.architectures = [class_name]
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


def test_what_accelerate_saves_of_a_torch_file_is_told_and_does_not_fail(
    source: Path, tmp_path: Path, meta_loader: MetaLoader
) -> None:
    model = transformers.T5ForConditionalGeneration.from_pretrained(source)
    Accelerator().save_model(model, tmp_path / "output", max_shard_size="20KB")
    for name, failing in (("config.json", {"other files"}), ("", set())):  # it saves nothing but weights
        found = checks(tmp_path / "output", source, meta_loader)
        assert failed(found) == failing
        names = found["same tensors"]
        assert (names.result, names.figures["tied_copies_dropped"]) == ("inconclusive", 3)
        assert "tied copies dropped" in names.reason and "kept: " in names.reason
        assert found["same bytes"].result == "passed"
        shutil.copy(source / name, tmp_path / "output") if name else None


def stored_twice(folder: Path, change: float) -> None:
    """A tied Llama whose head is stored beside its embedding."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIGS["llama-tied"][1]))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"] + change
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_save_by_transformers_drops_a_stored_copy_and_is_told(tmp_path: Path, meta_loader: MetaLoader) -> None:
    """Config and tokenizer are saved again with it, in other words, and that is told as well."""
    source = tmp_path / "source"
    stored_twice(source, 0)
    save_tokenizer(source)
    for name, settings in (("config.json", {"transformers_version": "4.40.0"}), ("tokenizer_config.json", {"a": 1})):
        (source / name).write_text(json.dumps(json.loads((source / name).read_text()) | settings))
    for loader in (transformers.LlamaForCausalLM, transformers.AutoTokenizer):
        loader.from_pretrained(source).save_pretrained(tmp_path / "output")
    found = checks(tmp_path / "output", source, meta_loader)
    assert failed(found) == set()
    assert 'transformers_version was "4.40.0" and is ' in found["other files"].reason
    assert (found["other files"].result, found["tokenizer"].result) == ("inconclusive", "inconclusive")
    assert "lm_head.weight (kept: model.embed_tokens.weight)" in found["same tensors"].reason


def without(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_dropped_copy_of_other_bytes_is_a_finding(tmp_path: Path, meta_loader: MetaLoader) -> None:
    stored_twice(tmp_path / "source", 1)
    shutil.copytree(tmp_path / "source", tmp_path / "output")
    without(tmp_path / "output", "lm_head.weight")
    found = checks(tmp_path / "output", tmp_path / "source", meta_loader)
    assert failed(found) == {"same bytes"}
    assert (
        found["same bytes"]
        .findings[0]
        .startswith("lm_head.weight was dropped as tied to model.embed_tokens.weight, but their bytes differ")
    )


def test_a_publication_that_lost_a_copy_without_a_word_fails(tmp_path: Path, meta_loader: MetaLoader) -> None:
    stored_twice(tmp_path / "source", 0)
    shutil.copytree(tmp_path / "source", tmp_path / "output")
    without(tmp_path / "output", "lm_head.weight")
    assert failed(checks(tmp_path / "output", tmp_path / "source", meta_loader)) == set()
    (tmp_path / "output" / "reshard.manifest.json").write_text("{}")
    assert "same tensors" in failed(checks(tmp_path / "output", tmp_path / "source", meta_loader))


def test_an_empty_tensor_is_nobody_s_copy(tmp_path: Path, meta_loader: MetaLoader) -> None:
    for name, tensors in (("source", ("a", "b")), ("output", ("a",))):
        (tmp_path / name).mkdir()
        empty = {tensor: torch.zeros(0, 3) for tensor in tensors}
        save_file(empty | {"c": torch.ones(3)}, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    found = checks(tmp_path / "output", tmp_path / "source", meta_loader)
    assert found["same tensors"].findings == ("b is in the source but not in the output",)


@pytest.mark.parametrize("word", ["model.embed_tokens.weight", "x"])
def test_a_copy_that_only_its_class_ties_is_no_proof_whatever_the_metadata_has_under_its_name(
    tmp_path: Path, meta_loader: MetaLoader, word: str
) -> None:
    """As accelerate's `save_model` writes it: the source stores both, and only their bytes could tell."""
    stored_twice(tmp_path / "source", 1)
    shutil.copytree(tmp_path / "source", tmp_path / "output")
    tensors = load_file(tmp_path / "output" / "model.safetensors")
    del tensors["lm_head.weight"]
    metadata = {"format": "pt", "lm_head.weight": word}
    save_file(tensors, tmp_path / "output" / "model.safetensors", metadata=metadata)
    sides = (FolderSource.open(Folder(path=str(tmp_path / name))) for name in ("output", "source"))
    found = {check.name: check for check in verify(*sides, meta_loader)}
    assert found["same tensors"].result == "inconclusive"
