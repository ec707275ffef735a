"""What `run` refuses of a repository, `doctor` has told by the same code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from reshard.pipeline.doctor.health import Refusals, examine
from reshard.pipeline.errors import NoWeights, ReshardError
from reshard.pipeline.places import Folder
from reshard.pipeline.stores.folder.source import FolderSource
from reshard.pipeline.verifying.meta_load import MetaLoader
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import Run
from tests.support.models import arrays, save_model, save_single

INDEX = "model.safetensors.index.json"


def told(folder: Path, meta_loader: MetaLoader) -> Refusals:
    """What `doctor` says of refusals; what it raises itself is one, too."""
    try:
        return examine(FolderSource.open(Folder(path=str(folder))), meta_loader).refusals
    except NoWeights as error:
        return Refusals(error)


def adapter(folder: Path) -> None:
    save_single(folder, {"lora_A": np.zeros(9, np.float32)}, "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")


def onnx(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(b"ONNX")


def cut_gguf(folder: Path) -> None:
    (folder / "model.gguf").write_bytes(b"GGUF")


def config_alone(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def no_tensor(folder: Path) -> None:
    save_file({}, folder / "model.safetensors")


def broken(spoil: Callable[[Path], object]) -> Callable[[Path], None]:
    """A model in three files, of which something is spoilt."""

    def make(folder: Path) -> None:
        save_model(folder, 6, 400, 3)
        spoil(folder)

    return make


def without_a_file(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def cut_short(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-9])


def pointer(folder: Path) -> None:
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1000\n"
    sorted(folder.glob("*.safetensors"))[1].write_text(text)


def leaves_the_folder(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "../model.safetensors")
    (folder / INDEX).write_text(json.dumps(index))


def two_that_differ(folder: Path) -> None:
    save_single(folder, arrays(1, 400, prefix="other"))


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("never",)


def pickled_code(folder: Path) -> None:
    torch.save({"w": Runs()}, folder / "pytorch_model.bin")


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "an adapter alone": (adapter, "source.no_weights"),
    "ONNX alone": (onnx, "source.no_weights"),
    "a GGUF file is cut short": (cut_gguf, "checkpoint.length"),
    "no weights": (config_alone, "source.no_weights"),
    "a file without a tensor": (no_tensor, "source.no_weights"),
    "a file is absent": (broken(without_a_file), "checkpoint.absent_file"),
    "a file is cut short": (broken(cut_short), "checkpoint.length"),
    "a file is a pointer": (broken(pointer), "checkpoint.pointer"),
    "an index leaves the folder": (broken(leaves_the_folder), "checkpoint.unsafe_path"),
    "two sets that differ": (broken(two_that_differ), "checkpoint.ambiguous"),
    "a pickle that runs something": (pickled_code, "checkpoint.unsafe_pickle"),
}


@pytest.mark.parametrize(("make", "code"), REFUSED.values(), ids=REFUSED)
def test_doctor_names_the_code_that_run_ends_with(
    make: Callable[[Path], None], code: str, tmp_path: Path, go: Run, meta_loader: MetaLoader
) -> None:
    (source := tmp_path / "source").mkdir()
    make(source)
    with pytest.raises(ReshardError) as refused:
        go(source, tmp_path / "out")
    found = told(source, meta_loader).always
    assert found is not None
    assert (found.code, str(found)) == (refused.value.code, str(refused.value))
    assert found.code == code


CLASSES: dict[str, Any] = {
    "code of the repository": {"architectures": ["OurModel"], "auto_map": {"AutoModel": "modeling_ours.OurModel"}},
    "a class of diffusers": {"_class_name": "UNet2DConditionModel"},
    "no config": None,
}


@pytest.mark.parametrize("config", CLASSES.values(), ids=CLASSES)
def test_doctor_tells_what_require_model_refuses_and_run_alone_takes(
    config: Any, tmp_path: Path, go: Run, meta_loader: MetaLoader
) -> None:
    save_single(source := tmp_path / "source", arrays(2, 400))
    if config is not None:
        (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ReshardError) as refused:
        go(source, tmp_path / "out", require="model")
    found = told(source, meta_loader)
    assert found.always is found.on_hub is None
    assert found.require_model is not None
    assert (found.require_model.code, str(found.require_model)) == (refused.value.code, str(refused.value))
    go(source, tmp_path / "out")


def test_doctor_tells_what_only_a_hub_does_not_take(
    tmp_path: Path, go: Run, meta_loader: MetaLoader, on_hub: Namespace
) -> None:
    save_single(source := tmp_path / "source", {"w\u202e": np.zeros(9, np.float32)})
    with pytest.raises(ReshardError) as refused:
        go(source, on_hub.repo("out"))
    found = told(source, meta_loader)
    assert found.always is None
    assert found.on_hub is not None
    assert (found.on_hub.code, str(found.on_hub)) == (refused.value.code, str(refused.value))
    go(source, tmp_path / "out")


def test_a_model_whose_class_takes_it_is_refused_nowhere(tmp_path: Path, meta_loader: MetaLoader) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "source")
    assert told(tmp_path / "source", meta_loader) == Refusals()
