"""`verify` on checkpoints of any maker: honest ones pass however they are cut, and what is wrong is named."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from reshard.pipeline.check import Check
from reshard.pipeline.errors import BadLength, NoWeights
from reshard.pipeline.places import Folder
from reshard.pipeline.request import Options
from reshard.pipeline.stores.folder.source import FolderSource
from reshard.pipeline.verifying.index_rules import check_rules
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.opened import OpenedSide
from reshard.pipeline.verifying.verify import verify
from tests.pipeline.verifying import models
from tests.support.canary import touch
from tests.support.measured import within
from tests.support.models import add_friends, arrays, numbered, save_sharded, save_single

Verify = Callable[..., dict[str, Check]]


def source_of(folder: Path) -> FolderSource:
    return FolderSource.open(Folder(path=str(folder)))


@pytest.fixture
def look(meta_loader: MetaLoader) -> Verify:
    """``look(output, source, deep=True)``: the checks by name."""

    def look(output: Path, source: Path | None = None, **options: Any) -> dict[str, Check]:
        checks = verify(source_of(output), source_of(source) if source else None, meta_loader, **options)
        found = {check.name: check for check in checks}
        assert len(found) == len(checks)
        return found

    return look


def failed(checks: dict[str, Check]) -> dict[str, tuple[str, ...]]:
    assert all(bool(check.findings) == (check.result == "failed") for check in checks.values())
    return {name: check.findings for name, check in checks.items() if check.result == "failed"}


@pytest.fixture
def two_cuts(tmp_path: Path) -> tuple[Path, Path]:
    """The same model in four files and in seven, by another writer than ours."""
    made = arrays(24, 4000)
    for name, count in (("source", 4), ("output", 7)):
        save_sharded(tmp_path / name, numbered(made, count))
        add_friends(tmp_path / name)
    return tmp_path / "source", tmp_path / "output"


def test_two_cuts_of_one_model_pass_with_every_byte(two_cuts: tuple[Path, Path], look: Verify) -> None:
    source, output = two_cuts
    checks = look(output, source, deep=True)
    assert failed(checks) == {}
    assert checks["same tensors"].figures == {"tensors": 48, "in_the_source": 48, "differences": 0}
    assert checks["same bytes"].result == "passed"
    assert checks["same bytes"].figures["tensors"] == 48
    assert checks["index rules"].figures == {"files": 7, "tensors": 48, "indexes": 1}


def test_alone_only_what_can_be_known_alone_is_checked(two_cuts: tuple[Path, Path], look: Verify) -> None:
    assert set(look(two_cuts[1])) == {"index rules", "class of model", "tokenizer"}
    assert set(look(two_cuts[1], deep=True)) == {"index rules", "class of model", "tokenizer", "stored bytes"}


def test_a_torch_file_and_its_safetensors_are_equal(tmp_path: Path, look: Verify) -> None:
    weight = torch.randn(50, 40)
    state = {"w": weight, "t": torch.randn(20, 30).t(), "tied": weight, "n": torch.arange(9)}
    (tmp_path / "bin").mkdir()
    torch.save(state, tmp_path / "bin" / "pytorch_model.bin")
    packed = {name: tensor.contiguous().numpy() for name, tensor in state.items()}
    save_single(tmp_path / "st", packed)
    for output, source in (("st", "bin"), ("bin", "st")):
        checks = look(tmp_path / output, tmp_path / source, deep=True)
        assert failed(checks) == {}
        assert checks["same bytes"].figures["tensors"] == 4
    assert look(tmp_path / "bin", deep=True)["stored bytes"].figures["attested"] == 1


def test_a_name_left_out_for_its_tie_is_no_loss_where_the_output_says_so(tmp_path: Path, look: Verify) -> None:
    weight = torch.randn(50, 40)
    (tmp_path / "bin").mkdir()
    torch.save({"a": weight, "b": weight, "c": weight + 1}, tmp_path / "bin" / "pytorch_model.bin")
    kept = {"a": weight.numpy()}
    for name, metadata in (("said", {"format": "pt", "b": "a"}), ("silent", {"format": "pt"})):
        (tmp_path / name).mkdir()
        save_file(kept | {"c": (weight + 1).numpy()}, tmp_path / name / "model.safetensors", metadata=metadata)
    assert failed(look(tmp_path / "said", tmp_path / "bin", deep=True)) == {}
    assert list(failed(look(tmp_path / "silent", tmp_path / "bin"))) == ["same tensors"]
    lying = {"format": "pt", "b": "a", "c": "a"}
    (tmp_path / "lying").mkdir()
    save_file(kept, tmp_path / "lying" / "model.safetensors", metadata=lying)
    assert failed(look(tmp_path / "lying", tmp_path / "bin"))["same tensors"] == (
        "c is in the source but not in the output",
    )


def test_a_cast_is_said_in_one_line_and_not_taken_for_damage(tmp_path: Path, look: Verify) -> None:
    made = arrays(4, 4000)
    save_single(tmp_path / "source", made)
    save_single(tmp_path / "output", {name: array.astype(np.float16) for name, array in made.items()})
    checks = look(tmp_path / "output", tmp_path / "source", deep=True)
    assert checks["same tensors"].reason == "8 tensors are F32 in the source and F16 in the output"
    assert list(failed(checks)) == ["same tensors"]
    assert checks["same bytes"].result == "inconclusive"
    assert checks["same bytes"].figures["not_comparable"] == 8


def test_a_cast_that_was_asked_for_is_compared_after_it(tmp_path: Path, look: Verify) -> None:
    made = arrays(4, 4000)
    save_single(tmp_path / "source", made)
    halves = {name: array.astype(np.float16) for name, array in made.items()}
    save_single(tmp_path / "output", halves)
    asked = Options(dtype="float16")
    checks = look(tmp_path / "output", tmp_path / "source", deep=True, changes=asked)
    assert failed(checks) == {}
    assert checks["same bytes"].figures["tensors"] == 8
    halves["layer.1.weight"][3, 4] += np.float16(0.5)
    save_single(tmp_path / "output", halves)
    (finding,) = failed(look(tmp_path / "output", tmp_path / "source", deep=True, changes=asked))["same bytes"]
    was = str(made["layer.1.weight"][3, 4].astype(np.float16))
    assert finding.startswith(f"layer.1.weight has different bytes: element [3, 4] is {was} (0x")


def test_what_an_option_makes_of_the_source_is_not_said_of_the_source_itself(tmp_path: Path, look: Verify) -> None:
    for name in ("source", "output"):
        save_single(tmp_path / name, arrays(1, 10))
    found = look(tmp_path / "output", tmp_path / "source", changes=Options(dtype="bfloat16"))
    assert "is BF16 in the source after the options and F32 in the output" in found["same tensors"].findings[0]


def test_one_flipped_bit_is_named_by_tensor_element_and_values(two_cuts: tuple[Path, Path], look: Verify) -> None:
    source, output = two_cuts
    file = sorted(output.glob("*.safetensors"))[2]
    tensors = load_file(file)
    name = max(tensors, key=lambda name: tensors[name].size)
    changed = tensors[name].copy()
    changed.reshape(-1).view(np.uint8)[401] ^= 4
    save_file(tensors | {name: changed}, file, metadata={"format": "pt"})
    assert failed(look(output, source)) == {}, "nothing but the bytes differs"
    (finding,) = failed(look(output, source, deep=True))["same bytes"]
    row, column = divmod(100, changed.shape[1])
    value = str(tensors[name][row, column])
    assert finding.startswith(f"{name} has different bytes: element [{row}, {column}] is {value} (0x")


def test_a_wholly_other_model_is_not_read_again_tensor_by_tensor(tmp_path: Path, look: Verify) -> None:
    save_single(tmp_path / "source", arrays(30, 400, seed=1))
    save_single(tmp_path / "output", arrays(30, 400, seed=2))
    findings = failed(look(tmp_path / "output", tmp_path / "source", deep=True))["same bytes"]
    assert len(findings) == 60
    assert sum("element" in finding for finding in findings) == 20


def test_components_are_compared_by_name_and_a_missing_one_is_named(tmp_path: Path, look: Verify) -> None:
    for name in ("source", "output"):
        save_single(tmp_path / name / "unet", arrays(3, 400, seed=1), "diffusion_pytorch_model.safetensors")
        save_single(tmp_path / name / "vae", arrays(2, 400, seed=2), "diffusion_pytorch_model.safetensors")
    assert failed(look(tmp_path / "output", tmp_path / "source", deep=True)) == {}
    (tmp_path / "output" / "vae").rename(tmp_path / "output" / "other")
    findings = failed(look(tmp_path / "output", tmp_path / "source"))["same tensors"]
    assert findings == (
        "vae/diffusion_pytorch_model.safetensors: 4 tensors are missing from the output",
        "other/diffusion_pytorch_model.safetensors: 4 tensors are in no checkpoint of the source",
    )


def test_files_in_parts_that_torch_wrote_are_no_duplicates(tmp_path: Path, look: Verify) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, save

    (tmp_path / "parts").mkdir()
    writer = HuggingFaceStorageWriter(str(tmp_path / "parts"), save_distributed=True)
    whole = {"a": torch.randn(40, 8), "b": torch.randn(9)}
    save(whole, storage_writer=writer, no_dist=True)
    save_single(tmp_path / "whole", {name: tensor.numpy() for name, tensor in whole.items()})
    assert failed(look(tmp_path / "parts", deep=True)) == {}
    assert failed(look(tmp_path / "whole", tmp_path / "parts", deep=True)) == {}
    assert (
        failed(look(tmp_path / "parts", Path(shutil.copytree(tmp_path / "parts", tmp_path / "same")), deep=True)) == {}
    )
    (finding,) = failed(look(tmp_path / "parts", tmp_path / "whole", deep=True))["same tensors"]
    assert finding.startswith("shard-00001-model-00001-of-00001.safetensors: it is model in the source")


def test_a_format_that_loaders_refuse_is_a_finding_unless_it_is_the_sources(tmp_path: Path, look: Verify) -> None:
    made = arrays(2, 400)
    for name in ("pt", "np", "mlx"):
        (tmp_path / name).mkdir()
        save_file(made, tmp_path / name / "model.safetensors", metadata={"format": name})
    said = "model.safetensors has the format '{}' in its metadata, which loaders refuse; use 'pt'"
    for name, alone, against_pt in (("pt", False, False), ("np", True, True), ("mlx", False, True)):
        found = [failed(look(tmp_path / name)), failed(look(tmp_path / name, tmp_path / "pt"))]
        wrong = {"index rules": (said.format(name),)}
        assert found == [wrong if refused else {} for refused in (alone, against_pt)]
        assert failed(look(tmp_path / name, Path(shutil.copytree(tmp_path / name, tmp_path / f"{name} too")))) == {}
        assert failed(look(tmp_path / "pt", tmp_path / name)) == {}


def test_an_output_that_cannot_be_opened_is_a_finding_and_a_source_an_error(
    two_cuts: tuple[Path, Path], look: Verify
) -> None:
    source, output = two_cuts
    (file, *_) = sorted(output.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-5])
    assert list(failed(look(output, source))) == ["index rules"]
    assert file.name in failed(look(output, source))["index rules"][0]
    with pytest.raises(BadLength, match=file.name):
        look(source, output)


def test_a_hostile_pickle_is_a_finding_and_is_not_run(tmp_path: Path, look: Verify) -> None:
    (tmp_path / "evil").mkdir()
    torch.save({"w": torch.zeros(3), "x": touch(tmp_path / "was run")}, tmp_path / "evil" / "pytorch_model.bin")
    ((finding, *_),) = failed(look(tmp_path / "evil")).values()
    assert "when unpickled; nothing was run" in finding
    assert not (tmp_path / "was run").exists()


def test_a_folder_without_weights_is_an_error(tmp_path: Path, look: Verify) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NoWeights):
        look(tmp_path)


# ------------------------------------------------------------------------------------------------- torch's indexes

BIN_INDEX = "pytorch_model.bin.index.json"
Index = dict[str, Any]


def save_bins(folder: Path) -> Index:
    """Two files, with a tie, a mask of bools and a slice of a larger storage, as `save_pretrained` once wrote them."""
    tied, whole = torch.randn(20, 8), torch.randn(30, 8)
    parts = [
        {"a": tied, "b": tied, "mask": torch.ones(16, 16, dtype=torch.bool)},
        {"c": whole[:10], "d": torch.ones(5)},
    ]
    folder.mkdir()
    weight_map = {}
    for number, part in enumerate(parts, 1):
        file = f"pytorch_model-{number:05}-of-00002.bin"
        torch.save(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index: Index = {"metadata": {"total_size": 640 + 256 + 320 + 20}, "weight_map": weight_map}
    (folder / BIN_INDEX).write_text(json.dumps(index))
    return index


@pytest.mark.parametrize("mask", [256, 32], ids=["a byte each", "an eighth of a byte each"])
@pytest.mark.parametrize("tied", [640, 1280], ids=["once", "twice"])
@pytest.mark.parametrize("slice_", [320, 960], ids=["itself", "its storage"])
def test_a_torch_index_may_count_bytes_as_any_of_its_writers(
    mask: int, tied: int, slice_: int, tmp_path: Path, look: Verify
) -> None:
    index = save_bins(tmp_path / "bin")
    index["metadata"]["total_size"] = float(mask + tied + slice_ + 20)
    (tmp_path / "bin" / BIN_INDEX).write_text(json.dumps(index))
    checks = look(tmp_path / "bin")
    assert failed(checks) == {}
    assert checks["index rules"].figures == {"files": 2, "tensors": 5, "indexes": 1}


def left_over(folder: Path, index: Index) -> None:
    torch.save({"x": torch.ones(3)}, folder / "pytorch_model-00003-of-00003.bin")


def stale_single(folder: Path, index: Index) -> None:
    """Of the same names and shapes, and of other values: loaders take it."""
    state = {name: t for path in folder.glob("*.bin") for name, t in torch.load(path, weights_only=True).items()}
    torch.save({name: torch.zeros_like(tensor) for name, tensor in state.items()}, folder / "pytorch_model.bin")


BIN_FAULTS: dict[str, tuple[Callable[[Path, Index], Any], str]] = {
    "a sum of nothing": (lambda folder, index: index["metadata"].update(total_size=5), "total_size 5, but the tensors"),
    "a sum above all": (lambda folder, index: index["metadata"].update(total_size=2517), "1,012 to 2,516 bytes"),
    "a tensor less": (lambda folder, index: index["weight_map"].pop("d"), "d is in pytorch_model-00002-of-00002.bin"),
    "a tensor more": (lambda folder, index: index["weight_map"].update(x=index["weight_map"]["a"]), "no file has it"),
    "another file": (lambda folder, index: index["weight_map"].update(a=index["weight_map"]["d"]), "a is in pytorch"),
    "no metadata": (lambda folder, index: index.pop("metadata"), 'no "metadata" object'),
    "a file left over": (left_over, "pytorch_model-00003-of-00003.bin is left over"),
    "a single file": (stale_single, "pytorch_model.bin is left over"),
    "an absent file": (lambda folder, index: (folder / index["weight_map"]["d"]).unlink(), "refers to a missing file"),
    "a broken file": (lambda folder, index: (folder / index["weight_map"]["d"]).write_bytes(b"PK\3\4"), "00002.bin: "),
}


@pytest.mark.parametrize("name", BIN_FAULTS)
def test_a_torch_index_is_held_to_the_rules_of_indexes(name: str, tmp_path: Path, look: Verify) -> None:
    change, said = BIN_FAULTS[name]
    index = save_bins(tmp_path / "bin")
    change(tmp_path / "bin", index)
    (tmp_path / "bin" / BIN_INDEX).write_text(json.dumps(index))
    (finding, *more) = failed(look(tmp_path / "bin"))["index rules"]
    assert said in finding and not more


def test_a_torch_index_beside_safetensors_is_nobody_s_to_read(tmp_path: Path, look: Verify) -> None:
    index = save_bins(tmp_path / "both")
    save_single(tmp_path / "both", arrays(2, 400))
    index["metadata"]["total_size"] = 5
    (tmp_path / "both" / BIN_INDEX).write_text(json.dumps(index))
    assert failed(look(tmp_path / "both")) == {}


def test_an_index_that_cannot_be_read_is_one_finding(two_cuts: tuple[Path, Path], look: Verify) -> None:
    (two_cuts[1] / "model.safetensors.index.json").write_bytes(b"\xff\xfe")
    (finding,) = failed(look(two_cuts[1]))["index rules"]
    assert "can't decode byte 0xff" in finding


def test_an_index_without_its_sum_is_remarked_and_passes(two_cuts: tuple[Path, Path], look: Verify) -> None:
    path = two_cuts[1] / "model.safetensors.index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"metadata": {}}))
    rules = look(two_cuts[1])["index rules"]
    assert rules.result == "passed" and "no total_size" in rules.reason


# ------------------------------------------------------------------------------------------- weights that stay whole


def save_adapter(folder: Path, seed: int = 0) -> None:
    save_single(folder, arrays(1, 400, seed=seed), "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))


def test_an_adapter_alone_is_whole_and_is_compared(tmp_path: Path, look: Verify) -> None:
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        save_adapter(tmp_path / name, seed)
    alone = look(tmp_path / "one", deep=True)
    assert failed(alone) == {}
    assert alone["index rules"].figures == {"files": 1, "tensors": 2, "indexes": 0}
    assert alone["class of adapter_model"].result == "skipped"
    assert failed(look(tmp_path / "same", tmp_path / "one", deep=True)) == {}
    assert list(failed(look(tmp_path / "other", tmp_path / "one", deep=True))) == ["same bytes"]


def test_a_broken_adapter_is_named_once(tmp_path: Path, look: Verify) -> None:
    save_adapter(tmp_path / "one")
    file = tmp_path / "one" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    ((finding,),) = failed(look(tmp_path / "one")).values()
    assert finding.startswith("adapter_model.safetensors is ")


def test_files_without_a_tensor_are_named_with_their_place_once(tmp_path: Path, look: Verify) -> None:
    save_single(tmp_path / "none", {})
    ((finding,),) = failed(look(tmp_path / "none")).values()
    assert finding == f"{tmp_path / 'none'}: no weights that reshard can read (model.safetensors has no tensors)"


# --------------------------------------------------------------------------------------------------- other files


def test_configs_are_compared_by_what_they_say(two_cuts: tuple[Path, Path], look: Verify) -> None:
    source, output = two_cuts
    config = json.loads((output / "config.json").read_text())
    (output / "config.json").write_text(json.dumps(config | {"transformers_version": "9.9"}, indent=4))
    others = look(output, source)["other files"]
    said = 'config.json differs only in form: transformers_version was missing and is "9.9"'
    assert (others.result, others.reason) == ("inconclusive", said)
    (output / "config.json").write_text(json.dumps(config | {"hidden_size": 7}))
    assert failed(look(output, source))["other files"] == ("config.json differs: hidden_size was missing and is 7",)


def test_code_must_be_the_same_and_the_card_need_not(two_cuts: tuple[Path, Path], look: Verify) -> None:
    source, output = two_cuts
    for folder in two_cuts:
        (folder / "modeling_own.py").write_text("x = 1\n")
    (output / "README.md").write_text("another text")
    assert look(output, source)["other files"].result == "passed"
    (output / "modeling_own.py").write_text("x = 2\n")
    assert failed(look(output, source))["other files"] == ("modeling_own.py differs starting at byte 4",)
    (output / "modeling_own.py").unlink()
    assert failed(look(output, source))["other files"] == ("modeling_own.py is missing",)


# ------------------------------------------------------------------------------------------------------ the class


def test_a_model_that_lost_a_tensor_is_judged_against_its_source(
    saved: Callable[..., models.Saved], tmp_path: Path, look: Verify
) -> None:
    source = saved("llama").folder
    output = Path(shutil.copytree(source, tmp_path / "output"))
    assert look(output, source)["class of model"].level == "model"
    assert look(output)["class of model"].result == "passed"
    tensors = load_file(output / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    alone = look(output)["class of model"]
    assert alone.result == "inconclusive"
    assert "model.norm.weight" in alone.reason
    assert set(failed(look(output, source))) == {"same tensors", "class of model"}


def test_what_is_missing_is_counted_however_many_names_are_kept(
    saved: Callable[..., models.Saved], tmp_path: Path, look: Verify
) -> None:
    model = saved("llama")
    shutil.copytree(model.folder, tmp_path / "output")
    (tmp_path / "output" / "config.json").write_bytes(model.with_config(num_hidden_layers=102))
    figures = look(tmp_path / "output")["class of model"].figures
    assert figures["missing"] == 900, "9 tensors of 100 layers that are not there"
    (tmp_path / "output" / "config.json").unlink()
    unasked = look(tmp_path / "output")["class of model"]
    assert (unasked.result, unasked.figures) == ("skipped", {})


def test_alone_there_is_no_word_of_a_source(saved: Callable[..., models.Saved], tmp_path: Path, look: Verify) -> None:
    output = Path(shutil.copytree(saved("llama").folder, tmp_path / "output"))
    tensors = load_file(output / "model.safetensors")
    save_file(tensors | {"model.extra": np.zeros(3)}, output / "model.safetensors", metadata={"format": "pt"})
    found = look(output)["class of model"]
    assert (found.result, "source" in found.reason) == ("passed", False)
    assert "model.extra" in found.reason and found.figures["unexpected"] == 1


def test_copies_of_a_tied_tensor_that_differ_are_said_and_are_the_sources_own(
    saved: Callable[..., models.Saved], tmp_path: Path, look: Verify
) -> None:
    output = Path(shutil.copytree(saved("llama-tied").folder, tmp_path / "output"))
    tensors = load_file(output / "model.safetensors")
    assert "ties of model" not in look(output, deep=True), "stored once"
    for change, result in ((0, "passed"), (1, "inconclusive")):
        head = tensors["model.embed_tokens.weight"] + np.float32(change)
        save_file(tensors | {"lm_head.weight": head}, output / "model.safetensors", metadata={"format": "pt"})
        assert "lm_head.weight = model.embed_tokens.weight" in look(output)["class of model"].reason
        found = look(output, deep=True)["ties of model"]
        assert (found.result, found.figures) == (result, {"stored_twice": 1, "differ": change})
    assert "lm_head.weight and model.embed_tokens.weight" in found.reason
    assert failed(look(output, Path(shutil.copytree(output, tmp_path / "same")), deep=True)) == {}


def test_code_that_was_not_run_is_said(saved: Callable[..., models.Saved], tmp_path: Path, look: Verify) -> None:
    model = saved("llama")
    output = Path(shutil.copytree(model.folder, tmp_path / "output"))
    (output / "config.json").write_bytes(model.with_config(auto_map={"AutoModel": "own.Own"}))
    found = look(output)["class of model"]
    assert (found.result, "auto_map" in found.reason) == ("passed", True)


def test_a_source_that_itself_lacks_a_tensor_is_no_failure_of_the_output(
    saved: Callable[..., models.Saved], tmp_path: Path, look: Verify
) -> None:
    source = Path(shutil.copytree(saved("bert-base").folder, tmp_path / "source"))
    tensors = load_file(source / "model.safetensors")
    tensors = {name: array for name, array in tensors.items() if "pooler" not in name}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    save_sharded(tmp_path / "output", numbered(tensors, 3))
    shutil.copy(source / "config.json", tmp_path / "output")
    assert failed(look(tmp_path / "output", source, deep=True)) == {}


def test_what_tools_leave_beside_an_output_is_none_of_its_weights(two_cuts: tuple[Path, Path], look: Verify) -> None:
    source, output = two_cuts
    for name in ("._model-00001-of-00002.safetensors", "._model.safetensors.index.json", ".DS_Store"):
        (output / name).write_bytes(b"\0\5\x16\7" + bytes(4092))
    (output / "__pycache__").mkdir()
    (output / "__pycache__" / "m.cpython-311.pyc").write_bytes(b"x")
    found = look(output, source)
    assert failed(found) == {} and found["other files"].result == "passed", found["other files"].reason


def test_weights_that_a_config_names_are_there_or_it_is_a_finding(tmp_path: Path, look: Verify) -> None:
    save_single(tmp_path / "m", arrays(2, 10))
    for name, missing in (("model.safetensors", False), ("weights.safetensors", True)):
        (tmp_path / "m" / "config.json").write_text(json.dumps({"transformers_weights": name}))
        assert ("index rules" in failed(look(tmp_path / "m", None))) is missing


def test_many_indexes_are_looked_at_in_time_that_grows_with_their_number(tmp_path: Path, look: Verify) -> None:
    for number in range(1500):
        save_sharded(tmp_path / "m" / f"{number:04}", numbered(arrays(1, 2), 1))
    side = OpenedSide.attempt(source_of(tmp_path / "m"))
    start = time.process_time()
    assert check_rules(side).result == "passed"
    assert within(time.process_time() - start, 6.0)
