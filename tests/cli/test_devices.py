"""`reshard plan --max-memory` and `--device-map`: which device needs which files, before a byte moves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from reshard.cli.devices import parse_max_memory, read_device_map
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
    assert "blocks kept whole: LlamaDecoderLayer" in reshard(*typed).out


@pytest.mark.parametrize("typed", [["doctor"], ["plan", "--max-memory", "cpu=1GB"]], ids=["doctor", "plan"])
def test_the_child_that_builds_the_model_is_kept_where_temporary_files_are(
    reshard: Run, llama: Path, tmp_path: Path, typed: list[str]
) -> None:
    room = tmp_path / "room"
    room.mkdir()
    before = room.stat().st_mtime_ns
    done = reshard(*typed, llama, env={"RESHARD_TMPDIR": str(room)})
    assert done.code == 0, done.err
    assert room.stat().st_mtime_ns > before, "nothing was ever in it"
    assert not list(room.iterdir())


@pytest.mark.slow
def test_a_map_may_be_named_as_accelerate_names_it(reshard: Run, llama: Path) -> None:
    limits = ("--max-memory", "0=2MB,1=2MB,2=2MB,cpu=1GB")

    def held(*typed: object) -> list[int]:
        (placed,) = reshard("plan", llama, *limits, *typed, "--json").documents[0]["device_maps"]
        return [device["bytes"] for device in placed["devices"]]

    total = sum(held())
    assert held() == held("--device-map", "sequential") == [total, 0, 0, 0]
    balanced = held("--device-map", "balanced")
    assert balanced == held("--device-map", "auto") and all(balanced[:3]) and sum(balanced) == total
    low = held("--device-map", "balanced_low_0")
    assert low[0] < balanced[0] and all(low[1:3]) and sum(low) == total


def test_a_named_map_needs_devices_to_place_on(reshard: Run, llama: Path) -> None:
    done = reshard("plan", llama, "--device-map", "balanced")
    assert done.code == 2 and "--device-map balanced requires --max-memory" in done.err


@pytest.mark.slow
def test_a_device_that_gets_nothing_is_shown_with_its_limit(reshard: Run, llama: Path) -> None:
    typed = ("plan", llama, "--max-memory", "1=2kB,0=600kB,cpu=1kB")
    (placed,) = reshard(*typed, "--json").documents[0]["device_maps"]
    held = {device["device"]: device for device in placed["devices"]}
    assert list(held) == ["1", "0", "cpu", "disk"]
    assert [device["limit"] for device in held.values()] == [2000, 600_000, 1000, None]
    assert held["cpu"]["bytes"] == 0
    assert re.search(r"device cpu +0 bytes +of 1\.0 kB +unused", reshard(*typed).out)


def test_a_module_that_the_class_does_not_have_is_named(reshard: Run, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text(json.dumps({"": 0, "model.layrs": 3, "model.rotary_emb": 0}))
    (placed,) = reshard("plan", llama, "--device-map", tmp_path / "map.json", "--json").documents[0]["device_maps"]
    assert placed["notes"] == ["the device map has model.layrs, which is not in LlamaForCausalLM"]
    assert [block["name"] for block in placed["blocks"]] == ["", "model.rotary_emb"]
    assert [(device["device"], device["bytes"] > 0) for device in placed["devices"]] == [("0", True), ("3", False)]


def test_a_map_that_forgets_a_parameter_names_it(reshard: Run, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text(json.dumps({"model.layers": 0, "model.embed_tokens": "cpu", "lm_head": "cpu"}))
    done = reshard("plan", llama, "--device-map", tmp_path / "map.json")
    assert done.code == 2
    assert done.err.splitlines()[0] == "error[usage.device_map]: the device map has no device for model.norm.weight"


def test_a_model_of_no_known_class_says_why_it_has_no_devices(reshard: Run, model: Path) -> None:
    done = reshard("plan", model, "--max-memory", "cpu=1GB")
    assert done.code == 0, done.err
    assert "Devices for model: skipped (" in done.out


@pytest.mark.parametrize(
    "value", ["", "0", "gpu=1GB", "0=fast", "0=1GB,,cpu=1GB", "-1=1GB", "cpu=0", "0=1GB,0=2kB", "0=1GB,00=2kB", "٣=1GB"]
)
def test_limits_that_are_none_are_refused(value: str) -> None:
    with pytest.raises(UsageError, match="--max-memory"):
        parse_max_memory(value)


@pytest.mark.parametrize("content", ["[]", "not json", '"0"', "[" * 200_000, "\ud800", "9" * 5000])
def test_a_file_that_is_no_map_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "map.json").write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(UsageError, match="not .*JSON"):
        read_device_map(str(tmp_path / "map.json"))


def test_a_map_that_cannot_be_read_is_refused_in_one_line(reshard: Run, model: Path, tmp_path: Path) -> None:
    done = reshard("plan", model, "--device-map", tmp_path)
    assert done.code == 2
    assert done.err.startswith(f"error[usage]: --device-map {tmp_path}: Is a directory\n")
    (tmp_path / "map.json").write_text('{"": "cpu"}')
    both = reshard("plan", model, "--device-map", tmp_path / "map.json", "--max-memory", "cpu=1GB")
    assert (both.code, "cannot be used together" in both.err) == (2, True), both.err
    mistyped = reshard("plan", model, "--device-map", "balancd", "--max-memory", "cpu=1GB")
    assert mistyped.code == 2
    assert mistyped.err.startswith(
        "error[usage]: --device-map balancd: No such file or directory;"
        " use a file, or one of auto, balanced, balanced_low_0, sequential\n"
    )
    with pytest.raises(UsageError, match="is larger than"):
        read_device_map("/dev/zero")


@pytest.mark.parametrize("device", ["banana", "٣", "", "cuda:", "-1", -1, 1.5, None, True, [], {}])
def test_a_device_that_is_none_is_named_with_its_module(tmp_path: Path, device: object) -> None:
    (tmp_path / "map.json").write_text(json.dumps({"model": 0, "lm_head": device}))
    with pytest.raises(UsageError) as refused:
        read_device_map(str(tmp_path / "map.json"))
    assert f'"lm_head" is mapped to {json.dumps(device)}; ' in str(refused.value)


def test_devices_go_by_number_or_name_and_a_module_is_given_once(tmp_path: Path) -> None:
    placed = {"a": 0, "b": "1", "c": "cpu", "d": "disk", "e": "cuda:3", "f": "mps"}
    (tmp_path / "map.json").write_text(json.dumps(placed))
    assert read_device_map(str(tmp_path / "map.json")) == {module: str(device) for module, device in placed.items()}
    (tmp_path / "map.json").write_text('{"a": 0, "b": 1, "a": 2}')
    with pytest.raises(UsageError, match='has duplicate key "a"'):
        read_device_map(str(tmp_path / "map.json"))


@pytest.mark.parametrize(
    ("typed", "code"),
    [
        (["plan", "--max-memory", ""], "usage"),
        (["plan", "--device-map", ""], "usage"),
        (["plan", "--config-from", ""], "usage.place"),
        (["verify", "--load", "--memory", ""], "usage.size"),
        (["verify", "--memory", ""], "usage"),
        (["advise", "--ranks", ""], "usage.ranks"),
    ],
)
def test_an_empty_value_is_refused_as_of_a_shell_variable_that_is_not_set(
    reshard: Run, model: Path, typed: list[str], code: str
) -> None:
    done = reshard(*typed, model)
    assert done.code == 2 and done.err.startswith(f"error[{code}]: "), done.err
