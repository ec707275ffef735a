"""What is amiss with a repository is named, with what a reshard would do about it; and it does just that."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from reshard.pipeline.doctor.health import Health, examine
from reshard.pipeline.errors import BadIndex, BadLength
from reshard.pipeline.limits import GB
from reshard.pipeline.places import Folder, parse_place
from reshard.pipeline.request import Options, Request
from reshard.pipeline.reshard import run
from reshard.pipeline.stores.connect import Context
from reshard.pipeline.stores.folder.source import FolderSource
from reshard.pipeline.verifying.meta_load import MetaLoader
from tests.support.giants import save_sparse
from tests.support.models import add_friends, arrays, numbered, save_model, save_sharded, save_single

INDEX = "model.safetensors.index.json"


class Unasked(MetaLoader):
    """What an ordinary repository leaves open for no reload to say."""

    def ask(self, operation: str, kind: Any, *_: object, **__: object) -> Any:
        assert operation == "check", "of a tokenizer the files say it all"
        return kind("skipped", "the class is not what these tests are about")


def health(folder: Path, meta_loader: MetaLoader | None = None) -> Health:
    return examine(FolderSource.open(Folder(path=str(folder))), meta_loader or Unasked())


def kinds(folder: Path) -> set[str]:
    return {symptom.kind for symptom in health(folder).symptoms}


def texts(folder: Path, kind: str, meta_loader: MetaLoader | None = None) -> list[str]:
    """What is said of this kind, which is all that is said."""
    symptoms = health(folder, meta_loader).symptoms
    assert {symptom.kind for symptom in symptoms} <= {kind}
    return [symptom.text for symptom in symptoms]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", 6, 4000, 3)


def test_a_healthy_repository_has_no_symptoms(model: Path) -> None:
    found = health(model)
    assert found.symptoms == () and found.refusals.always is None
    assert found.tensors == 12


def test_what_a_reshard_can_put_right_it_puts_right(model: Path, tmp_path: Path, meta_loader: MetaLoader) -> None:
    index = json.loads((model / INDEX).read_text())
    index["metadata"] = {"total_size": 3}
    index["weight_map"].popitem()
    (model / INDEX).write_text(json.dumps(index))
    shard = sorted(model.glob("*.safetensors"))[0]
    made = {name: array for name, array in arrays(6, 4000).items() if name in index["weight_map"]}
    first = {name: made[name] for name, file in index["weight_map"].items() if file == shard.name}
    save_file(first, shard)
    (model / "training_args.bin").write_bytes(b"a trainer's")
    told = [symptom.text for symptom in health(model).symptoms]
    for said in ("total_size", "does not list it", 'no "format"', "PyTorch file"):
        assert any(said in text for text in told), said
    request = Request(
        source=parse_place(str(model)), target=parse_place(str(tmp_path / "out")), options=Options(size=12_000)
    )
    run(request, Context.from_env(), meta_loader=meta_loader)
    assert health(tmp_path / "out").symptoms == ()


def test_what_a_reshard_refuses_is_told_with_its_reason(model: Path) -> None:
    sorted(model.glob("*.safetensors"))[1].unlink()
    found = health(model)
    assert isinstance(found.refusals.always, BadIndex)
    assert "refers to a missing file" in found.symptoms[0].text
    assert "`reshard run` would fail" in found.symptoms[0].cure


def test_pickles_are_told_and_duplicates_in_other_formats(tmp_path: Path) -> None:
    (tmp_path / "pickle").mkdir()
    torch.save({"w": torch.zeros(9)}, tmp_path / "pickle" / "pytorch_model.bin")
    assert kinds(tmp_path / "pickle") == {"pickles", "config"}
    (tmp_path / "both").mkdir()
    save_single(tmp_path / "both", {"w": np.zeros(9, np.float32)})
    shutil.copy(tmp_path / "pickle" / "pytorch_model.bin", tmp_path / "both")
    assert kinds(tmp_path / "both") == {"other formats", "config"}


def test_what_may_be_other_weights_is_not_called_a_copy(model: Path) -> None:
    for name in ("flow.pt", "pytorch_model.bin", "optimizer.pt"):
        torch.save({"w": torch.zeros(9)}, model / name)
    copies, others = [one.text for one in health(model).symptoms if one.kind == "other formats"]
    assert copies.endswith("in 2 PyTorch files: a second copy, or training data")
    assert others.endswith("in 1 PyTorch file: maybe other weights, such as flow.pt")


def test_a_shard_of_another_cut_is_said_to_stay(tmp_path: Path) -> None:
    save_sharded(tmp_path, numbered(arrays(4, 400), 2))
    save_single(tmp_path, arrays(1, 100, prefix="old"), "model-00003-of-00009.safetensors")
    (found,) = [one for one in health(tmp_path).symptoms if one.kind == "index"]
    assert "is left over" in found.text and found.cure == "resharding keeps it; skip it with --exclude"


def test_small_files_that_are_models_of_their_own_are_not_counted_as_many(tmp_path: Path) -> None:
    for number in range(12):
        save_single(tmp_path / f"part{number}", {f"w{number}": np.zeros(9, np.float32)})
    assert "size" not in kinds(tmp_path)


@pytest.mark.parametrize("path", ["config.json", "tokenizer_config.json"])
def test_a_config_that_is_cut_off_is_told(model: Path, path: str) -> None:
    (model / path).write_text('{"model_type": "llama", "hidden')
    found = [symptom for symptom in health(model).symptoms if symptom.text.startswith(path)]
    assert [symptom.kind for symptom in found] == ["config"]


def test_an_odd_name_and_a_missing_tokenizer_are_told(tmp_path: Path) -> None:
    save_single(tmp_path, {"w": np.zeros(9, np.float32)}, "weights_final.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert kinds(tmp_path) == {"name", "tokenizer"}
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert kinds(tmp_path) == {"name"}, "a model of images has a processor instead"


def test_many_small_files_are_told(tmp_path: Path) -> None:
    save_sharded(tmp_path, numbered(arrays(20, 400), 20))
    add_friends(tmp_path)
    assert kinds(tmp_path) == {"size"}


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (250 * GB, "at most 200,000,000,000"),
        (60 * GB, "clients without hf_xet can download at most 50,000,000,000"),
    ],
)
def test_a_file_that_the_hub_or_some_clients_do_not_take_is_told(tmp_path: Path, size: int, told: str) -> None:
    save_sparse(tmp_path, iter([("w", "BF16", (size // 20_000, 10_000))]), 1)
    assert [told in symptom.text for symptom in health(tmp_path).symptoms if symptom.kind == "size"] == [True]


def test_a_broken_file_hides_neither_the_others_nor_what_else_is_amiss(model: Path) -> None:
    broken = sorted(model.glob("*.safetensors"))[1]
    broken.write_bytes(broken.read_bytes()[:-9])
    (model / "tokenizer.json").unlink()
    (model / "training_args.bin").write_bytes(b"a trainer's")
    found = health(model)
    assert isinstance(found.refusals.always, BadLength)
    assert [symptom.kind for symptom in found.symptoms] == ["broken", "other formats", "tokenizer"]
    assert broken.name in found.symptoms[0].text
    assert found.tensors == 8, "those of the two files that can be read"
    assert found.weights == sum(path.stat().st_size for path in model.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tokenizer_config.json": '{"tokenizer_class": "LlamaTokenizer"}'}, "has no ids for text"),
        ({"tokenizer_config.json": '{"tokenizer_class": "GPT2Tokenizer"}', "vocab.json": '{"a": 0}'}, "does not load"),
    ],
)
def test_a_tokenizer_that_is_there_in_part_is_told(
    model: Path, meta_loader: MetaLoader, files: dict[str, str], said: str
) -> None:
    (model / "tokenizer.json").unlink()
    for name, text in files.items():
        (model / name).write_text(text)
    (told,) = texts(model, "tokenizer", meta_loader)
    assert told.startswith(f"the root has only part of a tokenizer ({', '.join(sorted(files))}): ")
    assert said in told


def test_a_tokenizer_that_needs_no_vocabulary_is_whole(model: Path, meta_loader: MetaLoader) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    assert texts(model, "tokenizer", meta_loader) == []


@pytest.mark.parametrize(
    "files",
    [
        {"vocab.json": "{}", "merges.txt": ""},
        {"vocab.txt": "a"},
        {"spiece.model": "x", "tokenizer_config.json": "{}"},
        {"tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["code.Tokenizer", null]}}', "its.tiktoken": ""},
    ],
)
def test_tokenizers_that_are_whole_or_read_by_their_own_code_are_not_loaded(model: Path, files: dict[str, str]) -> None:
    (model / "tokenizer.json").unlink()
    for name, text in files.items():
        (model / name).write_text(text)
    assert texts(model, "tokenizer") == []


def test_a_class_of_text_needs_more_than_a_processor(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "preprocessor_config.json").write_text("{}")
    assert texts(model, "tokenizer") == []
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert texts(model, "tokenizer") == ["a processor but no tokenizer, and LlamaForCausalLM reads text"]


def test_a_config_counts_beside_the_weights_that_it_is_of(model: Path) -> None:
    (model / "1_Pooling").mkdir()
    (model / "config.json").rename(model / "1_Pooling" / "config.json")
    assert texts(model, "config") == ["no config.json next to model, so its class is unknown"]
    (model / "params.json").write_text("{}")
    assert texts(model, "config") == []


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """One of diffusers, with a component of each kind."""
    folder = tmp_path / "pipeline"
    for component in ("unet", "vae"):
        save_single(folder / component, arrays(1, 400), "diffusion_pytorch_model.safetensors")
        (folder / component / "config.json").write_text('{"_class_name": "AModel"}')
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "config.json").write_text("{}")
    index = {
        "_class_name": "APipeline",
        "unet": ["diffusers", "AModel"],
        "vae": ["diffusers", "AModel"],
        "scheduler": ["diffusers", "AScheduler"],
        "safety_checker": [None, None],
        "requires_safety_checker": False,
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def test_a_pipeline_with_all_its_components_is_healthy(pipeline: Path) -> None:
    assert health(pipeline).symptoms == ()


def test_a_component_that_a_pipeline_names_and_lacks_is_told(pipeline: Path) -> None:
    (pipeline / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    assert texts(pipeline, "component") == ["vae (diffusers.AModel) has a config.json but no weights"]
    shutil.rmtree(pipeline / "vae")
    said = "model_index.json lists vae (diffusers.AModel), but that folder is missing"
    assert texts(pipeline, "component") == [said]
    (pipeline / "model_index.json").write_text("[" * 100_000)
    assert texts(pipeline, "component") == ["model_index.json is not a JSON object"]


def test_an_adapter_alone_is_refused_and_nothing_else_is_wrong_with_it(tmp_path: Path) -> None:
    save_single(tmp_path, {"lora_A": np.zeros(9, np.float32)}, "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    found = health(tmp_path)
    (symptom,) = found.symptoms
    assert (symptom.kind, found.tensors) == ("refused", 1)
    assert "adapter_model.safetensors is never resharded, because loaders look for that name" in symptom.text
    assert "merge_and_unload" in symptom.cure


def test_what_a_reshard_leaves_out_of_a_file_is_not_said_to_be_kept(tmp_path: Path) -> None:
    state = {"w": torch.zeros(3)}
    torch.save({"model": state, "optimizer": {"m": torch.zeros(3)}}, tmp_path / "pytorch_model.bin")
    cures = {symptom.text: symptom.cure for symptom in health(tmp_path).symptoms if symptom.kind == "note"}
    [left_out] = [text for text in cures if "skipped optimizer" in text]
    assert cures[left_out] == "resharding skips it"
    assert not any("every tensor" in cure for cure in cures.values())
