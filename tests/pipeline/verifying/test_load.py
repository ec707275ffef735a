"""Real loads of small models: by both loaders, over devices and disk, and with files that lie."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import transformers

from reshard.pipeline.errors import DeviceMapIncomplete
from reshard.pipeline.limits import MB
from reshard.pipeline.verifying.child.load import excuse
from reshard.pipeline.verifying.load import LoadOptions, compare_loads, load
from reshard.pipeline.verifying.meta_load import MetaLoader
from tests.pipeline.verifying.models import EACH_CONFIG, Saved

GetSaved = Callable[..., Saved]
INDEX = "model.safetensors.index.json"
MODULES = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")
APART = dict.fromkeys(MODULES, "cpu")


@pytest.fixture
def resaved(saved: GetSaved, tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """A model's folder, and the same model cut into several files."""

    def get(name: str) -> tuple[Path, Path]:
        source = saved(name).folder
        tensors = safetensors.torch.load_file(source / "model.safetensors")
        names = sorted(tensors)
        weight_map = {}
        for number, at in enumerate(range(0, len(names), 5)):
            part = {key: tensors[key] for key in names[at : at + 5]}
            file = f"part {number}.safetensors"
            safetensors.torch.save_file(part, tmp_path / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (tmp_path / INDEX).write_text(json.dumps(index))
        shutil.copy(source / "config.json", tmp_path)
        return source, tmp_path

    return get


@EACH_CONFIG
def test_the_same_model_in_other_files_answers_the_same(
    name: str, resaved: Callable[[str], tuple[Path, Path]], meta_loader: MetaLoader
) -> None:
    source, output = resaved(name)
    assert compare_loads(meta_loader, source, output).result == "equal"


@pytest.mark.parametrize(
    ("loader", "where"),
    [
        ("transformers", {"device_map": {"": "disk"}}),
        ("transformers", {"device_map": {**APART, "model.layers.1": "disk"}}),
        *(
            (loader, {"device_map": {"model.layers.0": one, "": rest}})
            for loader in ("transformers", "accelerate")
            for one, rest in (("disk", "cpu"), ("cpu", "disk"))
        ),
        ("transformers", {"max_memory": {"cpu": 60_000}}),
        ("transformers", {"device_map": "sequential", "max_memory": {"cpu": 60_000}}),
        ("accelerate", {"device_map": {"": "cpu"}}),
        ("accelerate", {"device_map": "balanced_low_0", "max_memory": {"cpu": 60_000}}),
        ("accelerate", {"device_map": {**APART, "model.layers.1": "disk"}}),
        ("accelerate", {"max_memory": {"cpu": 60_000}}),
    ],
)
def test_a_model_answers_the_same_from_memory_and_from_disk(
    loader: Any, where: dict[str, Any], resaved: Callable[[str], tuple[Path, Path]], meta_loader: MetaLoader
) -> None:
    source, output = resaved("llama")
    everywhere = load(meta_loader, source)
    found = load(meta_loader, output, LoadOptions(loader=loader, **where))
    assert (found.result, found.output) == ("loaded", everywhere.output), found
    assert found.class_name == "LlamaForCausalLM"
    assert everywhere.placement == {"cpu": 1}
    if "disk" in str(where) or "max_memory" in where:
        assert found.placement["disk"] >= 1


_PLAIN = """
import sys, torch, transformers
from reshard.pipeline.verifying.child.load import digest

model = transformers.LlamaForCausalLM.from_pretrained(sys.argv[1], attn_implementation="eager")
with torch.no_grad():
    print(digest(model((torch.arange(8) * 7 + 3).remainder(96).unsqueeze(0)).logits))
"""


def test_the_answer_is_what_transformers_gives(saved: GetSaved, meta_loader: MetaLoader) -> None:
    folder = saved("llama").folder
    # In a process of its own, because MKL takes its mode once.
    environment = {**os.environ, "MKL_CBWR": "COMPATIBLE", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", "-c", _PLAIN, str(folder)]
    plain = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert load(meta_loader, folder).output == plain.stdout.strip()


def test_where_a_weight_lies_in_memory_does_not_change_the_answer(tmp_path: Path, meta_loader: MetaLoader) -> None:
    """A classifier multiplies a vector by a matrix, where MKL's last bit otherwise depends on the matrix's address."""
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.BertConfig(**small, vocab_size=96, num_labels=16)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    answers = set()
    for length in range(8):  # the data begins at every offset from a cache line that the format allows
        padding = {"format": "pt", "padding": "x" * 8 * length}
        safetensors.torch.save_file(tensors, path, metadata=padding)
        answers.add(load(meta_loader, tmp_path).output)
    assert len(answers) == 1


# -------------------------------------------------------------------------------------------------------------- faults


def change_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


NORM = "model.norm.weight"


def wrong_file(folder: Path) -> None:
    change_index(folder, lambda weights: weights.update({NORM: weights["lm_head.weight"]}))


def key_left_out(folder: Path) -> None:
    change_index(folder, lambda weights: weights.pop(NORM) and None)


def file_gone(folder: Path) -> None:
    (folder / "part 0.safetensors").unlink()


def file_cut_off(folder: Path) -> None:
    path = folder / "part 0.safetensors"
    os.truncate(path, path.stat().st_size - 4)


def tensor_gone(folder: Path) -> None:
    for path in folder.glob("part*"):
        tensors = safetensors.torch.load_file(path)
        if tensors.pop(NORM, None) is not None:
            safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    key_left_out(folder)


def bit_flipped(folder: Path) -> None:
    path = folder / "part 1.safetensors"
    data = bytearray(path.read_bytes())
    data[-2] ^= 0x40
    path.write_bytes(data)


@pytest.mark.parametrize("fault", [wrong_file, key_left_out, file_gone, file_cut_off, tensor_gone, bit_flipped])
def test_files_that_lie_fail_a_load_from_disk(
    fault: Callable[[Path], None], resaved: Callable[[str], tuple[Path, Path]], meta_loader: MetaLoader
) -> None:
    source, output = resaved("llama")
    fault(output)
    found = compare_loads(meta_loader, source, output, LoadOptions(device_map={"": "disk"}))
    assert found.result == "failed", found


def test_a_parameter_that_no_file_has_is_named(
    resaved: Callable[[str], tuple[Path, Path]], meta_loader: MetaLoader
) -> None:
    source, output = resaved("llama")
    tensor_gone(output)
    found = compare_loads(meta_loader, source, output)
    assert found.result == "failed"
    assert NORM in found.reason


def test_fused_experts_load_by_transformers_and_not_by_accelerate(
    resaved: Callable[[str], tuple[Path, Path]], meta_loader: MetaLoader
) -> None:
    source, output = resaved("mixtral")
    assert compare_loads(meta_loader, source, output, LoadOptions(device_map={"": "disk"})).result == "equal"
    found = compare_loads(meta_loader, source, output, LoadOptions(loader="accelerate"))
    assert (found.result, "the source cannot be loaded" in found.reason) == ("inconclusive", True)


# -------------------------------------------------------------------------------------------------------------- limits


@pytest.mark.skipif(sys.platform != "linux", reason="memory is watched where /proc tells it")
@pytest.mark.parametrize(
    ("memory", "result"), [(400 * MB, "inconclusive"), pytest.param(2000 * MB, "loaded", marks=pytest.mark.slow)]
)
def test_a_load_that_holds_more_memory_than_it_may_is_ended(
    memory: int, result: str, tmp_path: Path, meta_loader: MetaLoader
) -> None:
    """Weights in one dtype that the config wants in another cannot stay in mapped files."""
    config = transformers.BertConfig(
        hidden_size=128, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128, vocab_size=1_500_000
    )
    with torch.device("meta"):
        model = transformers.BertModel(config)
    model = model.to_empty(device="cpu").to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.zero_()
    model.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "dtype": "float32"}))
    found = load(meta_loader, tmp_path, LoadOptions(memory=memory))
    assert found.result == result, found
    if result == "inconclusive":
        assert found.reason == "the reload was stopped because it used more than 400 MB of memory"


def test_code_and_adapters_beside_the_weights_are_ignored(
    saved: GetSaved, tmp_path: Path, meta_loader: MetaLoader
) -> None:
    folder = tmp_path / "repo"
    shutil.copytree(saved("llama").folder, folder)
    canary = tmp_path / "canary"
    planted = f"open({str(canary)!r}, 'w')\n"
    (folder / "modeling_planted.py").write_text(planted)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(planted)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "someone/else"}))
    (folder / "generation_config.json").write_text("{broken")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_planted.Planted"}
    (folder / "config.json").write_text(json.dumps(config))
    assert load(meta_loader, folder).result == "loaded"
    assert not canary.exists()
    assert (folder / "generation_config.json").read_text() == "{broken"


@pytest.mark.parametrize("loader", ["transformers", "accelerate"])
@pytest.mark.parametrize("missing", ["lm_head", "model.norm", "model.layers.1"])
def test_a_map_that_misses_a_parameter_is_an_error_that_names_it(
    loader: Any, missing: str, saved: GetSaved, meta_loader: MetaLoader
) -> None:
    placed = {name: device for name, device in APART.items() if name != missing}
    with pytest.raises(DeviceMapIncomplete, match=rf"no device for {missing}\."):
        load(meta_loader, saved("llama").folder, LoadOptions(loader=loader, device_map=placed))


# --------------------------------------------------------------------------------------------------------- the machine


@pytest.mark.parametrize(
    "where", [{"max_memory": {"77": MB}}, {"device_map": {"": 77}}, {"device_map": {"": "cuda:77", "lm_head": "cpu"}}]
)
def test_a_device_that_this_machine_lacks_is_named_and_no_fault_of_the_model(
    where: dict[str, Any], saved: GetSaved, meta_loader: MetaLoader
) -> None:
    found = load(meta_loader, saved("llama").folder, LoadOptions(**where))
    assert found.result == "skipped", found
    assert re.fullmatch(r"this machine has no device (cuda:)?77", found.reason)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="fp8 runs where there is an accelerator")
def test_fp8_is_not_run_without_a_gpu(saved: GetSaved, tmp_path: Path, meta_loader: MetaLoader) -> None:
    model = saved("llama")
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_bytes(model.with_config(quantization_config=quantization))
    shutil.copy(model.folder / "model.safetensors", tmp_path)
    found = load(meta_loader, tmp_path)
    assert (found.result, "need a GPU" in found.reason) == ("skipped", True), found


def test_what_a_machine_lacks_is_told_from_what_a_model_lacks() -> None:
    with pytest.raises(RuntimeError) as memory:
        torch.empty(1 << 60)
    with pytest.raises(RuntimeError) as dtype:
        torch.zeros(2).to(torch.float8_e4m3fn).sum()
    with pytest.raises(safetensors.SafetensorError) as header:
        safetensors.torch.load(b"no header")
    assert excuse(memory.value) == excuse(dtype.value) == "inconclusive"
    assert excuse(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) == "inconclusive"
    assert excuse(ImportError("`pip install kernels`")) == "skipped"
    assert excuse(header.value) is None
    assert excuse(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))) is None


def test_a_model_that_accelerate_cannot_leave_on_disk_is_not_broken(saved: GetSaved, meta_loader: MetaLoader) -> None:
    found = load(meta_loader, saved("llama").folder, LoadOptions(loader="accelerate", device_map={"": "disk"}))
    assert (found.result, "device disk is invalid" in found.reason) == ("inconclusive", True), found


def test_accelerate_names_what_it_does_not_find(
    resaved: Callable[[str], tuple[Path, Path]], meta_loader: MetaLoader
) -> None:
    source, output = resaved("llama")
    tensor_gone(output)
    alone = load(meta_loader, output, LoadOptions(loader="accelerate"))
    assert (alone.result, alone.in_no_file) == ("inconclusive", (NORM,))
    against = compare_loads(meta_loader, source, output, LoadOptions(loader="accelerate"))
    assert (against.result, NORM in against.reason) == ("failed", True)


def test_a_folder_without_a_class_is_skipped(tmp_path: Path, meta_loader: MetaLoader) -> None:
    assert load(meta_loader, tmp_path).result == "skipped"
