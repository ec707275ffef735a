"""A quantised model becomes a plain one, end to end: equal to transformers' own dequantised load on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from reshard.pipeline.checkpoint.formats.safetensors import build_header
from reshard.pipeline.errors import BadScale, NotDequantized
from reshard.pipeline.places import Folder
from reshard.pipeline.planning.codec import decode_shard, encode
from reshard.pipeline.planning.estimate import forecast, needs
from reshard.pipeline.publishing.manifest import parse
from reshard.pipeline.request import Options
from reshard.pipeline.stores.folder.source import FolderSource
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.verify import verify
from tests.formats import quantized, saving
from tests.formats.models import model_of
from tests.formats.saving import State
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import Run, upload

WISHES = {"dtype": "bfloat16", "dequantize": True}
DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3", torch.float16: "F16",
          torch.uint8: "U8"}  # fmt: skip
Order = Callable[[State], Sequence[Sequence[str]]]  # names by file, as they lie in it


def scales_first(state: State) -> Sequence[Sequence[str]]:
    """As safetensors' own writer has it: larger elements first."""
    return [sorted(state, key=lambda name: (-state[name].element_size(), name))]


def by_name(state: State) -> Sequence[Sequence[str]]:
    """Each scale right behind its weight."""
    return [sorted(state)]


def before_each(state: State) -> Sequence[Sequence[str]]:
    return [sorted(state, key=lambda name: name.replace("_scale", "!scale").replace("weight!", "weigh"))]


def apart(state: State) -> Sequence[Sequence[str]]:
    """All scales in a file of their own, the second."""
    scales = sorted(name for name in state if "scale" in name)
    return [sorted(state.keys() - {*scales}), scales]


def halves(state: State) -> Sequence[Sequence[str]]:
    """Two files, which two groups read: the second has weights whose scales the first has."""
    first = sorted(name for name in state if "scale" in name)
    weights = sorted(state.keys() - {*first})
    return [[*first, *weights[::2]], weights[1::2]]


ORDERS: list[Order] = [scales_first, by_name, before_each, apart]


def write(folder: Path, state: State, order: Order, config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    files = order(state)
    weight_map = {}
    for number, names in enumerate(files, 1):
        path = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        header = build_header([(n, DTYPES[state[n].dtype], tuple(state[n].shape)) for n in names], {"format": "pt"})
        data = b"".join(state[n].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for n in names)
        (folder / path).write_bytes(header + data)
        weight_map |= dict.fromkeys(names, path)
    if len(files) > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def model_in(
    folder: Path,
    order: Order,
    pack: Callable[[State], quantized.Quantized] = quantized.fp8,
    class_name: str = "LlamaForCausalLM",
) -> Path:
    model = model_of(class_name)
    state, about = pack(dict(model.state_dict()))
    return write(folder, state, order, {**model.config.to_dict(), "dtype": "bfloat16", "quantization_config": about})


def loaded(folder: Path) -> State:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return dict(model.state_dict())


def opened(folder: Path) -> FolderSource:
    return FolderSource.open(Folder(path=str(folder)))


def equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype and torch.equal(one[n].view(torch.int16), other[n].view(torch.int16))
        for n in one
    )


@pytest.mark.parametrize("order", ORDERS)
def test_the_result_is_transformers_own_dequantised_load(tmp_path: Path, go: Run, order: Order) -> None:
    source = model_in(tmp_path / "source", order)
    report = go(source, tmp_path / "out", size="20KB", **WISHES)
    made = saving.stored(tmp_path / "out")
    assert equal(made, loaded(source))
    assert equal(made, loaded(tmp_path / "out")), "a plain model"
    assert {check.level for check in report.checks if check.name.startswith("reload")} == {"model"}
    was, is_ = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out"))
    assert was.pop("quantization_config") and was == is_
    assert {s.path: s.size for s in report.plan.shards} == {
        path.name: path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")
    }, "the plan said the new sizes"
    manifest = parse((tmp_path / "out" / "reshard.manifest.json").read_bytes())
    assert manifest.made.options["dequantize"] is True
    stored = encode(report.plan)
    assert tuple(decode_shard(stored.shards[n]) for n in range(len(stored.shards))) == report.plan.shards


@pytest.mark.parametrize("order", ORDERS)
def test_experts_in_mxfp4_are_what_transformers_makes_of_them(
    tmp_path: Path, go: Run, meta_loader: MetaLoader, order: Order
) -> None:
    source, out = model_in(tmp_path / "source", order, quantized.mxfp4, "GptOssForCausalLM"), tmp_path / "out"
    report = go(source, out, size="20KB", **WISHES)
    made = saving.stored(out)
    assert equal(made, loaded(source))
    assert equal(made, quantized.plain_mxfp4(saving.stored(source)))
    assert {check.level for check in report.checks if check.name.startswith("reload")} == {"model"}
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    stored = encode(report.plan)
    assert tuple(decode_shard(stored.shards[n]) for n in range(len(stored.shards))) == report.plan.shards
    checks = verify(opened(out), opened(source), meta_loader, deep=True, changes=Options.model_validate(WISHES))
    assert [check.name for check in checks if check.result == "failed"] == []
    assert sum(check.figures.get("tensors", 0) for check in checks if check.name == "same bytes") == len(made)


@pytest.mark.parametrize("pack", [quantized.fp8_tensor, quantized.fp8_channel, quantized.fbgemm])
def test_other_scales_are_what_float32_makes_of_them(
    tmp_path: Path, go: Run, pack: Callable[[State], quantized.Quantized]
) -> None:
    """transformers dequantises the first itself, and the others only with a package, or with a GPU."""
    source = model_in(tmp_path / "source", scales_first, pack)
    report = go(source, tmp_path / "out", **WISHES)
    made = saving.stored(tmp_path / "out")
    assert equal(made, quantized.plain_fp8(saving.stored(source)))
    assert equal(made, loaded(tmp_path / "out"))
    assert {check.level for check in report.checks if check.name.startswith("reload")} == {"model"}
    if pack is quantized.fp8_tensor:
        assert equal(made, loaded(source))


def test_weights_that_a_torch_file_has_in_another_order_are_put_in_order_first(tmp_path: Path, go: Run) -> None:
    for class_name, pack, plain in (
        ("LlamaForCausalLM", quantized.fp8, quantized.plain_fp8),
        ("GptOssForCausalLM", quantized.mxfp4, quantized.plain_mxfp4),
    ):
        source = model_in(tmp_path / class_name, by_name, pack, class_name)
        state = saving.stored(source)
        (source / "model.safetensors").unlink()
        saving.as_bin({n: t.transpose(0, -1).contiguous().transpose(0, -1) for n, t in state.items()}, source)
        go(source, tmp_path / "out" / class_name, **WISHES)
        assert equal(saving.stored(tmp_path / "out" / class_name), plain(state))


def test_verify_knows_what_it_should_have_become(tmp_path: Path, go: Run, meta_loader: MetaLoader) -> None:
    source, out = model_in(tmp_path / "source", by_name), tmp_path / "out"
    go(source, out, manifest=False, **WISHES)

    def failed(**options: Any) -> dict[str, tuple[str, ...]]:
        checks = verify(opened(out), opened(source), meta_loader, deep=True, **options)
        return {check.name: check.findings for check in checks if check.result == "failed"}

    changes = Options.model_validate(WISHES)
    assert failed(changes=changes) == {}
    assert failed().keys() >= {"same tensors", "other files"}, "without --dequantize it is another model"
    state, name = saving.stored(out), "model.layers.0.mlp.up_proj.weight"
    was = str(state[name][3, 5].item())
    state[name][3, 5] *= 2
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    (finding,) = failed(changes=changes)["same bytes"]
    assert finding.startswith(f"{name} has different bytes: element [3, 5] is {was[:5]}")


@pytest.mark.parametrize(
    ("order", "pack", "class_name"),
    [
        (scales_first, quantized.fp8, "LlamaForCausalLM"),
        (by_name, quantized.fp8, "LlamaForCausalLM"),
        (by_name, quantized.mxfp4, "GptOssForCausalLM"),
    ],
)
def test_from_a_hub_what_is_attested_passes_once(
    tmp_path: Path,
    on_hub: Namespace,
    go: Run,
    order: Order,
    pack: Callable[[State], quantized.Quantized],
    class_name: str,
) -> None:
    source = model_in(tmp_path / "source", order, pack, class_name)
    repo = upload(on_hub, "fp8", source)
    report = go(repo, tmp_path / "out", **WISHES)
    assert equal(saving.stored(tmp_path / "out"), loaded(source))
    assert {*report.attested.values()} == {"checked"}
    weights, scales = 0, 0
    for name, tensor in saving.stored(source).items():
        weights, scales = (weights, scales + tensor.nbytes) if "scale" in name else (weights + tensor.nbytes, scales)
    assert forecast(report.plan).read <= (source / "model.safetensors").stat().st_size + scales
    assert forecast(report.plan).read == report.moved.read


@pytest.mark.parametrize("order", [apart, halves])
def test_scales_in_another_file_are_attested_with_it(tmp_path: Path, on_hub: Namespace, go: Run, order: Order) -> None:
    source = model_in(tmp_path / "source", order)
    report = go(upload(on_hub, "fp8-apart", source), tmp_path / "out", size="20KB", **WISHES)
    assert equal(saving.stored(tmp_path / "out"), loaded(source))
    assert [*report.attested.values()] == ["checked", "checked"]
    names = {cut.name for group in report.plan.groups for cut in group.witnesses}
    assert any("scale" in name for name in names) == (order is halves), "one group checks what another one read"


def test_a_scale_behind_its_weight_takes_disk_and_one_before_it_only_its_own(tmp_path: Path, go: Run) -> None:
    disks = {}
    for order in (scales_first, by_name):
        source = model_in(tmp_path / order.__name__, order)
        disks[order] = needs(go(source, tmp_path / f"out-{order.__name__}", **WISHES).plan, {}).disk
        state = saving.stored(source)
    scales = {name: tensor.nbytes for name, tensor in state.items() if "scale" in name}
    largest = max(state[name.removesuffix("_scale_inv")].nbytes + size for name, size in scales.items())
    assert disks == {scales_first: sum(scales.values()), by_name: largest}


def test_a_scale_that_was_lost_ends_it_before_a_byte_is_read(tmp_path: Path, go: Run) -> None:
    model = model_of("LlamaForCausalLM")
    state, about = quantized.fp8(dict(model.state_dict()))
    del state["model.layers.1.mlp.up_proj.weight_scale_inv"]
    source = write(tmp_path / "source", state, by_name, {"quantization_config": about})
    with pytest.raises(BadScale, match=r"^model\.layers\.1\.mlp\.up_proj\.weight: "):
        go(source, tmp_path / "out", **WISHES)
    assert not (tmp_path / "out").exists()
    assert go(source, tmp_path / "out").plan.shards, "without --dequantize it is bytes like any other"


@pytest.mark.parametrize("on_hub", ["http"], indirect=True)
def test_nothing_says_any_longer_that_it_is_quantised(tmp_path: Path, on_hub: Namespace, go: Run) -> None:
    """Not the first name of compressed-tensors' settings, nor ModelOpt's file; nor when only other files follow."""
    state = {"a.weight": torch.ones(4, 6).to(torch.float8_e4m3fn), "a.weight_scale": torch.tensor(0.5)}
    weights = {"type": "float", "num_bits": 8, "strategy": "tensor"}
    groups = {"group_0": {"weights": weights}}
    about = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    source = write(tmp_path / "source", state, by_name, {"hidden_size": 6, "compression_config": about})
    told = source / "hf_quant_config.json"
    told.write_text('{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}')
    repo, out = upload(on_hub, "told-twice", source), tmp_path / "out"
    out.mkdir()
    (out / told.name).write_bytes(told.read_bytes())
    report = go(repo, out, overwrite=True, **WISHES)
    assert (told.name, "the weights are no longer quantized") in report.plan.left_out
    on_hub.admin.put_files(repo, {"tokenizer.json": b"{}"})
    again = go(repo, out, **WISHES)
    assert (again.plan.shards, (out / "tokenizer.json").exists()) == ((), True), "the weights stay"
    assert json.loads((out / "config.json").read_text()) == {"hidden_size": 6}
    assert not (out / told.name).exists()
    told.write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(NotDequantized, match="NVFP4"):
        go(source, tmp_path / "refused", **WISHES)
