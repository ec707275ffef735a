"""Device maps: every block on a device, every file with whom it is needed, and what a map of one's own forgets."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import transformers

from reshard.pipeline.errors import DeviceMapIncomplete
from reshard.pipeline.verifying.devices import plan_devices
from reshard.pipeline.verifying.meta_load import MetaLoader
from tests.pipeline.verifying.models import CONFIGS, EACH_CONFIG, Saved, Specs, layout

GetSaved = Callable[..., Saved]


def in_files(specs: Specs, count: int) -> dict[str, str]:
    """The tensors in order of their names over ``count`` files."""
    names = sorted(specs)
    return {name: f"model-{1 + i * count // len(names)}.safetensors" for i, name in enumerate(names)}


def total(specs: Specs) -> int:
    return sum(4 * prod(shape) for _, shape in specs.values())


@EACH_CONFIG
def test_every_stored_byte_has_one_device_and_every_file_is_needed(
    name: str, saved: GetSaved, meta_loader: MetaLoader
) -> None:
    model = saved(name)
    files = in_files(model.specs, 3)
    size = total(model.specs)
    for limit, devices in ((size * 2, {"cpu"}), (size * 3 // 4, {"cpu", "disk"}), (1, {"disk"})):
        plan = plan_devices(meta_loader, model.config, model.specs, files, max_memory={"cpu": limit})
        assert plan.result == "planned", plan
        assert plan.class_name == CONFIGS[name][0]
        assert {block.device for block in plan.blocks} <= devices
        assert plan.bytes_of("cpu") <= limit
        assert plan.bytes_of("cpu") + plan.bytes_of("disk") == size
        assert {*plan.files_of("cpu"), *plan.files_of("disk")} == set(files.values())


def test_a_map_may_be_named_as_accelerate_names_it(meta_loader: MetaLoader) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 8}
    llama = transformers.LlamaConfig(vocab_size=100, architectures=["LlamaForCausalLM"], **shape)
    config, specs = layout(llama)
    files, size = in_files(specs, 3), total(specs) // 2  # layout gives bfloat16
    room = {"0": 2 * size, "1": 2 * size, "cpu": 10 * size}

    def held(name: str | None) -> list[int]:
        plan = plan_devices(meta_loader, config, specs, files, max_memory=room, device_map=name)
        return [plan.bytes_of(device) for device in room]

    assert held(None) == held("sequential") == [size, 0, 0]
    balanced, low = held("balanced"), held("balanced_low_0")
    assert balanced == held("auto") and all(balanced[:2]) and sum(balanced) == size
    assert low[0] < balanced[0] and low[1] and sum(low) == size


def test_a_given_map_is_joined_with_the_files(saved: GetSaved, meta_loader: MetaLoader) -> None:
    model = saved("mixtral")
    files = {
        name: "experts" if ".experts." in name else "second" if ".layers.1." in name else "rest" for name in model.specs
    }
    placed = {"": "cpu", "model.layers.0": "0", "model.layers.1": "1"}
    plan = plan_devices(meta_loader, model.config, model.specs, files, device_map=placed)
    blocks = {block.name: block for block in plan.blocks}
    assert blocks["model.layers.0"].device == "0"
    assert blocks["model.layers.0"].files == ("experts", "rest")
    assert plan.files_of("1") == ("experts", "second")
    assert plan.files_of("cpu") == ("rest",)
    assert blocks[""].bytes == total({n: s for n, s in model.specs.items() if ".layers." not in n})


@pytest.mark.parametrize(
    ("placed", "parameter"),
    [
        ({"model": "cpu"}, "lm_head.weight"),
        ({"model.embed_tokens": "0", "model.layers": "0", "lm_head": "cpu"}, "model.norm.weight"),
        ({"model.layers.0": "0", "model.layers.11": "0"}, "model.embed_tokens.weight and 11 more"),
        ({}, "model.embed_tokens.weight and 20 more"),
    ],
)
def test_a_map_that_misses_a_parameter_is_an_error_that_names_it(
    placed: dict[str, str], parameter: str, saved: GetSaved, meta_loader: MetaLoader
) -> None:
    model = saved("llama")
    files = dict.fromkeys(model.specs, "model.safetensors")
    with pytest.raises(DeviceMapIncomplete) as error:
        plan_devices(meta_loader, model.config, model.specs, files, device_map=placed)
    assert str(error.value) == f"the device map has no device for {parameter}"
    assert error.value.exit_code == 2


def test_blocks_that_must_stay_whole_do_and_a_class_without_a_list_says_so(
    saved: GetSaved, meta_loader: MetaLoader
) -> None:
    model = saved("t5")
    files = dict.fromkeys(model.specs, "model.safetensors")
    plan = plan_devices(meta_loader, model.config, model.specs, files, max_memory={"cpu": total(model.specs) // 2})
    assert plan.no_split == ("T5Block",)
    assert not [block for block in plan.blocks if ".block.0." in block.name or ".block.1." in block.name]
    albert = transformers.AlbertConfig(
        architectures=["AlbertModel"], hidden_size=32, num_attention_heads=2, intermediate_size=32, embedding_size=16
    )
    config, specs = layout(albert)
    plan = plan_devices(
        meta_loader, config, specs, dict.fromkeys(specs, "model.safetensors"), max_memory={"cpu": 10**9}
    )
    assert plan.result == "planned"
    assert plan.no_split == ()
    assert "AlbertModel does not list modules to keep on one device" in plan.notes[0]


def test_a_tied_head_needs_the_file_of_what_it_is_tied_to(saved: GetSaved, meta_loader: MetaLoader) -> None:
    model = saved("llama-tied")
    files = {name: "embeddings" if "embed_tokens" in name else "rest" for name in model.specs}
    plan = plan_devices(meta_loader, model.config, model.specs, files, device_map={"model": "0", "lm_head": "1"})
    assert plan.files_of("1") == ("embeddings",)
    assert plan.bytes_of("1") == 0


def test_a_70b_layout_is_placed_as_measured_without_a_device(meta_loader: MetaLoader) -> None:
    config, specs = layout(
        transformers.LlamaConfig(
            architectures=["LlamaForCausalLM"],
            dtype="bfloat16",
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
        )
    )
    limits = {"0": 10 << 30, "1": 10 << 30, "cpu": 30 << 30}
    plan = plan_devices(meta_loader, config, specs, in_files(specs, 30), max_memory=limits)
    assert {block.device for block in plan.blocks} == {"0", "1", "cpu", "disk"}
    for device, most in limits.items():
        assert 0.6 * most < plan.bytes_of(device) <= most
    assert all(block.name.count(".") <= 2 for block in plan.blocks)


def test_a_model_without_a_class_has_no_device_map(meta_loader: MetaLoader) -> None:
    plan = plan_devices(meta_loader, b"{}", {"x": ("F32", (1,))}, {"x": "f"}, max_memory={"cpu": 1})
    assert (plan.result, plan.blocks) == ("skipped", ())
    assert "has no model class" in plan.reason
