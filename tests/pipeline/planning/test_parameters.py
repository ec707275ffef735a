"""A written index counts the model's parameters as transformers' own writer does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from reshard.pipeline import Request, plan
from reshard.pipeline.planning.model import index_bytes
from tests.pipeline.verifying.models import CONFIGS

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **CONFIGS,
    "norms with running statistics": (
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"},
    ),
}


def metadata(source: Path, **options: Any) -> dict[str, Any]:
    """What the one index says that a plan of ``source`` would write."""
    made = plan(Request.of(str(source), str(source.parent / "out"), size=20_000, **options))
    (output,) = made.outputs
    assert output.index is not None
    found: dict[str, Any] = json.loads(index_bytes(output.index, made.shards))["metadata"]
    return found


def model_of(name: str) -> Any:
    class_name, settings = MODELS[name]
    model_class = getattr(transformers, class_name)
    return model_class(model_class.config_class(**settings))


@pytest.mark.parametrize("name", MODELS)
def test_one_file_cut_has_the_count_that_transformers_gives_when_it_cuts(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "cut", max_shard_size="20KB")
    theirs = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())["metadata"]
    assert theirs["total_parameters"] == model.num_parameters() > 0
    assert metadata(tmp_path / "one") == theirs
    assert metadata(tmp_path / "one", dtype="bfloat16")["total_parameters"] == theirs["total_parameters"]
    assert metadata(tmp_path / "cut") == theirs


def test_tied_names_of_torch_files_count_once_and_masks_do_not(tmp_path: Path) -> None:
    model = model_of("gpt2")
    mask = torch.ones(1, 1, 16, 16)
    state = model.state_dict() | {
        "transformer.h.0.attn.bias": mask,
        "transformer.h.0.attn.masked_bias": mask[0, 0, 0, 0],
    }
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert metadata(tmp_path)["total_parameters"] == model.num_parameters()


def test_of_quantized_weights_none_is_made_up(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(90, 90, dtype=torch.uint8), "b": torch.ones(9000)}, tmp_path / "model.pt")
    (tmp_path / "config.json").write_text("{}")
    assert "total_parameters" not in metadata(tmp_path)


def test_of_what_other_libraries_load_neither(tmp_path: Path) -> None:
    save_file({"a": torch.ones(9000), "b": torch.ones(9000)}, tmp_path / "diffusion_pytorch_model.safetensors")
    assert "total_parameters" not in metadata(tmp_path)


@pytest.mark.parametrize("stated", ["many", 0, -1, 1.5, True, None])
def test_a_source_that_states_no_count_is_counted(stated: object, tmp_path: Path) -> None:
    model = model_of("llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["total_parameters"] = stated
    path.write_text(json.dumps(index))
    assert metadata(tmp_path)["total_parameters"] == model.num_parameters()
