"""`reshard plan --max-memory` and `--device-map`: which device needs which files, before a byte moves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from reshard.cli.devices import parse_max_memory
from reshard.pipeline.errors import UsageError
from tests.cli.conftest import Run


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with four layers of about 200 kB."""
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        hidden_size=64, intermediate_size=172, num_hidden_layers=4, num_attention_heads=4, vocab_size=500
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_devices_are_given_whole_blocks_and_only_the_files_they_need(reshard: Run, llama: Path) -> None:
    typed = ("plan", llama, "--size", "300kB", "--pack", "layers", "--max-memory", "0=400kB,1=400kB,cpu=1GB")
    (facts,) = reshard(*typed, "--json").documents
    (placed,) = facts["device_maps"]
    assert placed["class"] == "LlamaForCausalLM"
    assert placed["kept_whole"] == ["LlamaDecoderLayer"]
    held = {device["device"]: device for device in placed["devices"]}
    assert held["0"]["bytes"] <= 400_000 and held["1"]["bytes"] <= 400_000
    assert sum(device["bytes"] for device in held.values()) == sum(block["bytes"] for block in placed["blocks"])
    layers = [block for block in placed["blocks"] if re.fullmatch(r"model\.layers\.\d", block["name"])]
    assert layers
    assert all(len(layer["files"]) == 1 for layer in layers), "--pack layers divides no block"
    assert len(held["0"]["files"]) < len(facts["files"])
    assert "kept whole: LlamaDecoderLayer" in reshard(*typed).out


def test_a_map_that_forgets_a_parameter_names_it(reshard: Run, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text(json.dumps({"model.layers": 0, "model.embed_tokens": "cpu", "lm_head": "cpu"}))
    done = reshard("plan", llama, "--device-map", tmp_path / "map.json")
    assert done.code == 2
    assert done.err.splitlines()[0] == "error[usage.device_map]: the device map gives no device for model.norm.weight"


def test_a_model_of_no_known_class_says_why_it_has_no_devices(reshard: Run, model: Path) -> None:
    done = reshard("plan", model, "--max-memory", "cpu=1GB")
    assert done.code == 0, done.err
    assert "devices of model: skipped, " in done.out


@pytest.mark.parametrize("value", ["", "0", "gpu=1GB", "0=fast", "0=1GB,,cpu=1GB", "-1=1GB", "cpu=0"])
def test_limits_that_are_none_are_refused(value: str) -> None:
    with pytest.raises(UsageError, match="--max-memory"):
        parse_max_memory(value)


@pytest.mark.parametrize("content", ["[]", "not json", '"0"'])
def test_a_file_that_is_no_map_is_refused(reshard: Run, model: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "map.json").write_text(content)
    done = reshard("plan", model, "--device-map", tmp_path / "map.json")
    assert done.code == 2
    assert "no JSON" in done.err
