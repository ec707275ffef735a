"""Checkpoints of every format, through the whole job: what torch reads from the source, the output holds."""

from __future__ import annotations

import glob
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_array_file
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from reshard.pipeline import verify
from reshard.pipeline.errors import BadArchive, DiskFull, LfsPointer, NotRead, NoWeights, SourceCorrupt, UnsafePickle
from reshard.pipeline.places import parse_place
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import Run, upload
from tests.pipeline.states import SIZE, assert_same, output, state_of, state_of_plain
from tests.support.canary import touch
from tests.support.models import add_friends, arrays, numbered, save_sharded, save_single
from tests.support.save_zero import optimizer_path, training

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 123\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text('{"model_type": "none-of-ours", "torch_dtype": "float32"}')
    return made


def test_a_torch_file_with_views_of_every_kind(folder: Path, tmp_path: Path, go: Run) -> None:
    torch.save(state_of(), folder / "pytorch_model.bin")
    report = go(folder, tmp_path / "out", size=SIZE)
    assert_same(output(tmp_path / "out"), state_of())
    assert len(report.plan.shards) > 2
    assert report.attested == {"pytorch_model.bin": "crc"}
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()


def test_what_a_strided_tensor_spans_keeps_to_the_disk_limit_or_is_refused_by_name(
    folder: Path, tmp_path: Path, go: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"plain": torch.randn(60, 60), "transposed": torch.randn(20, 50).t()}  # 14,400 and 4,000 bytes
    torch.save(state, folder / "pytorch_model.bin")
    monkeypatch.setenv("RESHARD_DISK_LIMIT", "3999B")
    with pytest.raises(DiskFull) as full:
        go(folder, tmp_path / "out", size=SIZE)
    assert (full.value.facts["needed"], full.value.facts["free"]) == (4000, 3999)
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("RESHARD_DISK_LIMIT", "4000B")
    go(folder, tmp_path / "out", size=SIZE)
    assert_same(output(tmp_path / "out"), state)


def test_a_torch_file_of_before_the_zip_format(folder: Path, tmp_path: Path, go: Run) -> None:
    torch.save(state_of(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    report = go(folder, tmp_path / "out", size=SIZE)
    assert_same(output(tmp_path / "out"), state_of())
    assert report.attested == {}, "nothing in such a file says what its bytes should be"


def test_a_sharded_torch_checkpoint_on_the_hub(folder: Path, on_hub: Namespace, tmp_path: Path, go: Run) -> None:
    state = state_of()
    names = list(state)
    parts = {"first_state_dict.bin": names[::2], "second_state_dict.bin": names[1::2]}
    for file, members in parts.items():
        torch.save({name: state[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in parts.items() for name in members}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    repo = upload(on_hub, "torch", folder)
    report = go(repo, tmp_path / "out", size=SIZE)
    assert_same(output(tmp_path / "out"), state)
    assert report.attested == dict.fromkeys(parts, "checked")


@pytest.mark.parametrize("index", ["index.json", "mine.index.json"])
def test_a_bare_map_is_an_index_and_its_weights_get_the_name_that_loaders_look_for(
    folder: Path, tmp_path: Path, go: Run, index: str
) -> None:
    torch.save(state_of(2), folder / "first_state_dict.bin")
    (folder / index).write_text(json.dumps(dict.fromkeys(state_of(2), "first_state_dict.bin")))
    go(folder, tmp_path / "out", size=10**9)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), state_of(2))
    assert not (tmp_path / "out" / index).exists()


def test_without_a_config_an_odd_name_stays(folder: Path, tmp_path: Path, go: Run) -> None:
    (folder / "config.json").unlink()
    torch.save(state_of(2), folder / "v1-5-pruned.ckpt")
    go(folder, tmp_path / "out", size=10**9)
    assert_same(load_file(tmp_path / "out" / "v1-5-pruned.safetensors"), state_of(2))


def test_torch_weights_are_read_beside_safetensors_of_another_name(folder: Path, tmp_path: Path, go: Run) -> None:
    """A stray safetensors file must not make a job take it for the model and leave the model behind."""
    torch.save(state_of(2), folder / "pytorch_model.bin")
    save_file({"extra": torch.ones(3)}, folder / "embeddings.safetensors", metadata={"format": "pt"})
    save_file({"half": torch.ones(3)}, folder / "model.fp16.safetensors", metadata={"format": "pt"})
    go(folder, tmp_path / "out", size=10**9)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), state_of(2))
    assert_same(load_file(tmp_path / "out" / "embeddings.safetensors"), {"extra": torch.ones(3)})
    assert_same(load_file(tmp_path / "out" / "model.fp16.safetensors"), {"half": torch.ones(3)})


def test_of_two_torch_files_with_one_name_the_bin_is_taken(folder: Path, tmp_path: Path, go: Run) -> None:
    torch.save(state_of(2), folder / "pytorch_model.bin")
    torch.save(torch.nn.Linear(2, 2), folder / "model.pt")  # a whole module, which would be refused
    report = go(folder, tmp_path / "out", size=10**9)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), state_of(2))
    assert "model.pt" in {item.path for item in report.plan.left_out}


def test_adapters_and_modules_in_torch_files_are_carried_whole(folder: Path, tmp_path: Path, go: Run) -> None:
    save_file({"a": torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    torch.save({"lora": torch.ones(9000)}, folder / "adapter_model.bin")
    (folder / "1_Dense").mkdir()
    torch.save({"linear.weight": torch.ones(9000)}, folder / "1_Dense" / "pytorch_model.bin")
    modules = [{"path": "", "type": "x.Transformer"}, {"path": "1_Dense", "type": "x.Dense"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    report = go(folder, tmp_path / "out", size=SIZE)
    for path in ("adapter_model.bin", "1_Dense/pytorch_model.bin"):
        assert (tmp_path / "out" / path).read_bytes() == (folder / path).read_bytes()
        assert any(path in note and "is copied unchanged" in note for note in report.plan.notes)


def test_what_another_library_reads_by_its_name_is_carried_beside_the_model(
    folder: Path, tmp_path: Path, go: Run
) -> None:
    for name in ("model.safetensors", "consolidated.safetensors", "open_clip_model.safetensors"):
        save_file(state_of_plain(), folder / name, metadata={"format": "pt"})
    go(folder, tmp_path / "out", size=SIZE)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    assert (tmp_path / "out" / "consolidated.safetensors").exists()
    assert (tmp_path / "out" / "open_clip_model.safetensors").exists()
    (folder / "model.safetensors").unlink()
    go(folder, tmp_path / "alone", size=SIZE)
    assert not (tmp_path / "alone" / "consolidated.safetensors").exists(), "alone, it is the model"


def test_what_mistral_reads_by_its_own_index_is_carried_with_it(folder: Path, tmp_path: Path, go: Run) -> None:
    save_file(state_of_plain(), folder / "model.safetensors", metadata={"format": "pt"})
    files = numbered(arrays(4, 400), 2, "consolidated")
    save_sharded(folder, files, "consolidated.safetensors.index.json")
    for name, tensors in files.items():
        save_array_file(tensors, folder / name)  # without a format, as theirs are
    go(folder, tmp_path / "out", size=SIZE)
    for path in folder.glob("consolidated*"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    assert len([*folder.glob("consolidated*")]) == 3 and len([*(tmp_path / "out").glob("model-*")]) > 1
    checks = verify(str(tmp_path / "out"), str(folder), deep=True).checks
    assert {check.result for check in checks} <= {"passed", "skipped"}


def test_a_pickle_is_skipped_with_a_note_and_a_language_model_of_a_decoder_is_no_weights(
    folder: Path, tmp_path: Path, go: Run
) -> None:
    save_single(folder, {"a": np.ones(3, dtype=np.float32)})
    (folder / "language_model").mkdir()
    for name in ("language_model/5gram.bin", "model_head.pkl", "rng_state.pkl"):
        (folder / name).write_bytes(b"not torch's")
    report = go(folder, tmp_path / "out", size=SIZE)
    assert (tmp_path / "out" / "language_model" / "5gram.bin").read_bytes() == b"not torch's"
    assert [note for note in report.plan.notes if "skipped" in note] == [
        "skipped 1 pickle that may be needed to load the model: model_head.pkl; copy it with --include"
    ]


def test_weights_that_may_be_no_copy_of_what_is_read_are_skipped_with_a_note(
    folder: Path, tmp_path: Path, go: Run
) -> None:
    save_file({"a": torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    names = ("pytorch_model.bin", "optimizer.pt", "hift.pt", "flow.pt", "openvino_model.bin", "voice[1].pt")
    for name in names:
        torch.save({"a": torch.zeros(3)}, folder / name)
    report = go(folder, tmp_path / "out", size=SIZE, exclude=("hift.pt",))
    assert [note for note in report.plan.notes if "skipped" in note] == [
        "skipped 2 PyTorch files that may hold other weights, such as flow.pt; copy them with --include"
    ]
    why = {item.path: item.why for item in report.plan.left_out}
    assert why.keys() >= {*names} and "OpenVINO" in why["openvino_model.bin"]
    one = go(folder, tmp_path / "one", size=SIZE, exclude=("hift.pt", "voice*"))
    assert "skipped 1 PyTorch file that may hold other weights: flow.pt; copy it with --include" in one.plan.notes
    again = go(folder, tmp_path / "all", size=SIZE, include=("flow.pt", glob.escape("voice[1].pt")))
    assert glob.escape("voice[1].pt") in why["voice[1].pt"], "as it is to be typed"
    assert not [note for note in again.plan.notes if "voice" in note or "flow" in note]
    assert (tmp_path / "all" / "voice[1].pt").exists() and (tmp_path / "all" / "flow.pt").exists()


def test_a_second_index_of_the_same_files_goes_with_them_in_place(folder: Path, go: Run) -> None:
    save_sharded(folder, numbered(arrays(6, 4000), 3))
    for name in ("diffusion.safetensors.index.json", "model.safetensors.index.fp16.json"):
        (folder / name).write_bytes((folder / "model.safetensors.index.json").read_bytes())
    report = go(folder, folder, size=5000)
    assert {"diffusion.safetensors.index.json", "model.safetensors.index.fp16.json"} <= {*report.plan.deletes}
    assert {check.result for check in verify(str(folder)).checks} <= {"passed", "skipped"}


def test_a_shard_of_another_cut_is_kept_and_noted(folder: Path, tmp_path: Path, go: Run) -> None:
    save_sharded(folder, numbered(arrays(4, 400), 2))
    save_single(folder, arrays(1, 100, prefix="old"), "model-00003-of-00009.safetensors")
    report = go(folder, tmp_path / "out", size=SIZE)
    says = "model-00003-of-00009.safetensors is left over: no index lists it; skip it with --exclude"
    assert says in report.plan.notes and (tmp_path / "out" / "model-00003-of-00009.safetensors").exists()


def test_a_json_file_that_is_called_an_index_and_is_none_is_carried(folder: Path, tmp_path: Path, go: Run) -> None:
    save_file({"a": torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    for name, text in {"index.json": "[1, 2]", "vocab.index.json": '{"a": 1}', "faiss.index.json": "not JSON"}.items():
        (folder / name).write_text(text)
        go(folder, tmp_path / name, size=SIZE)
        assert (tmp_path / name / name).read_text() == text


def test_of_two_formats_the_safetensors_are_taken(folder: Path, tmp_path: Path, go: Run) -> None:
    save_file({"a": torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    torch.save({"a": torch.zeros(3)}, folder / "pytorch_model.bin")
    report = go(folder, tmp_path / "out", size=SIZE)
    assert_same(output(tmp_path / "out"), {"a": torch.ones(3)})
    assert "pytorch_model.bin" in {item.path for item in report.plan.left_out}


def test_the_copy_of_gpt_oss_for_other_gpus_is_left_out(folder: Path, tmp_path: Path, go: Run) -> None:
    save_file({"a": torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "metal").mkdir()
    (folder / "metal" / "model.bin").write_bytes(b"GPT-OSS v1.0\0" + bytes(500))
    report = go(folder, tmp_path / "out", size=SIZE)
    assert "Metal" in dict(report.plan.left_out)["metal/model.bin"]
    (folder / "metal").rename(folder / "other")
    with pytest.raises(BadArchive, match=r"other/model\.bin: not written by") as odd:
        go(folder, tmp_path / "again", size=SIZE)
    assert "skip it with --exclude other/model.bin" in odd.value.next_step


def test_what_a_trainer_leaves_behind_is_no_weights(folder: Path, tmp_path: Path, go: Run) -> None:
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth"):
        torch.save({"x": torch.ones(1)}, folder / name)
    with pytest.raises(NoWeights):
        go(folder, tmp_path / "out", size=SIZE)


def test_a_distributed_checkpoint(folder: Path, tmp_path: Path, go: Run) -> None:
    import torch.distributed.checkpoint as dcp

    state = {name: tensor.clone() for name, tensor in state_of().items() if name != "expanded"}
    dcp.save({"model": state, "step": 7}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    report = go(folder, tmp_path / "out", size=SIZE)
    assert_same(output(tmp_path / "out"), state)
    assert report.attested and set(report.attested.values()) == {"crc"}
    assert any("step" in note for note in report.plan.notes)


def test_rank_files_of_a_trainer(folder: Path, tmp_path: Path, go: Run) -> None:
    from tests.support.save_ranks import save_ranks

    state = {name: tensor.contiguous() for name, tensor in state_of().items()}
    save_ranks(folder, state, (3,))
    torch.save({"state": [torch.ones(3)]}, folder / "optim_world_size_3_rank_0.pt")
    report = go(folder, tmp_path / "out", size=SIZE)
    assert_same(output(tmp_path / "out"), state)
    assert report.attested and set(report.attested.values()) == {"crc"}
    assert {item.path for item in report.plan.left_out} == {"optim_world_size_3_rank_0.pt"}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_of_deepspeed(folder: Path, tmp_path: Path, go: Run, stage: int) -> None:
    made = training(stage)
    made.save(folder)
    replace(made, step=8).save(folder, latest=False)
    (folder / "zero_to_fp32.py").write_text("raise SystemExit")
    report = go(folder, tmp_path / "out", size=SIZE)
    assert_same(output(tmp_path / "out"), made.expected())
    assert set(report.attested.values()) == {"crc"}
    carried = {file.path for file in report.plan.carried}
    assert carried == {"config.json"}
    assert {"global_step8", "zero_to_fp32.py"} == {item.path.split("/")[0] for item in report.plan.left_out}
    why = {item.why for item in report.plan.left_out if item.path.startswith("global_step8/")}
    assert why == {f"another step; latest selects global_step{made.step}"}


def test_a_checkpoint_of_deepspeed_without_zero_is_the_model_of_the_folder_above(
    folder: Path, tmp_path: Path, go: Run
) -> None:
    state = {name: tensor.contiguous() for name, tensor in state_of().items()}
    for step in (5, 9):
        (folder / f"global_step{step}").mkdir()
        made = {"module": state, "optimizer": None, "param_shapes": None, "dp_world_size": 1, "global_steps": step}
        torch.save(made, folder / f"global_step{step}" / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text("global_step9")
    report = go(folder, tmp_path / "out", size=SIZE)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert_same(output(tmp_path / "out"), state)
    assert {item.path for item in report.plan.left_out} == {"global_step5/mp_rank_00_model_states.pt"}


@pytest.mark.parametrize("name", ["mp_rank_{}_model_states.pt", "mp_rank_{}/model_optim_rng.pt", "consolidated.{}.pth"])
def test_slices_of_a_model_are_refused_unless_the_whole_is_there(
    folder: Path, tmp_path: Path, go: Run, name: str
) -> None:
    state = {"a": torch.ones(3, 4), "b": torch.zeros(5)}
    for rank in ("00", "01"):
        (path := folder / "original" / name.format(rank)).parent.mkdir(parents=True, exist_ok=True)
        torch.save({"module": state}, path)
    with pytest.raises(NotRead, match="a model split by tensor, pipeline or expert parallelism"):
        go(folder, tmp_path / "out", size=SIZE)
    save_file(state, folder / "model.safetensors")
    go(folder, tmp_path / "out", size=SIZE)
    assert_same(output(tmp_path / "out"), state)


def test_of_a_partition_only_what_is_used_is_read_and_a_flipped_byte_of_it_is_found(
    folder: Path, tmp_path: Path, go: Run
) -> None:
    made = training(3)
    step = made.save(folder)
    path = optimizer_path(step, 1)
    moments = path.read_bytes().index(np.full(8, 5, np.float32).tobytes())
    weights = path.read_bytes().index(made.partition(1)[0].numpy().tobytes())
    flip(path, moments)
    go(folder, tmp_path / "out", size=SIZE)
    assert_same(output(tmp_path / "out"), made.expected())
    flip(path, weights)
    with pytest.raises(SourceCorrupt, match="rank_1_mp_rank_00_optim_states.pt, record .* does not match"):
        go(folder, tmp_path / "other", size=SIZE)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_prefixes_of_wrappers_are_named_and_stripped_when_asked(folder: Path, tmp_path: Path, go: Run) -> None:
    state = {f"module._orig_mod.{name}": tensor for name, tensor in state_of(2).items()}
    torch.save(state, folder / "pytorch_model.bin")
    kept = go(folder, tmp_path / "kept", size=SIZE)
    assert_same(output(tmp_path / "kept"), state)
    assert any("module., _orig_mod." in note for note in kept.plan.notes)
    go(folder, tmp_path / "out", size=SIZE, strip_prefix="auto")
    assert_same(output(tmp_path / "out"), state_of(2))


@pytest.mark.parametrize("wanted", ["float16", "bfloat16"])
def test_a_cast_is_torchs_own_and_the_config_follows(folder: Path, tmp_path: Path, go: Run, wanted: str) -> None:
    state = state_of() | {"wide": torch.tensor([1e30, -1e-30, 65519.0, float("inf")], dtype=torch.float64)}
    torch.save(state, folder / "pytorch_model.bin")
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}[wanted]
    report = go(folder, tmp_path / "out", size=SIZE, dtype=wanted)
    (read_back,) = [check for check in report.checks if check.name == "read back"]
    infinite = "the cast made 1 value infinite in 1 tensor, such as wide" if wanted == "float16" else ""
    assert read_back.reason == infinite
    wide = {torch.float32, torch.float64, torch.bfloat16, torch.float16}
    expected = {name: tensor.to(dtype) if tensor.dtype in wide else tensor for name, tensor in state.items()}
    assert_same(output(tmp_path / "out"), expected)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"model_type": "none-of-ours", "torch_dtype": wanted}


def test_ties_stay_unless_the_class_says_which_is_the_source(tmp_path: Path, go: Run) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100, n_positions=16))
    folder = tmp_path / "gpt2"
    model.config.architectures = ["GPT2LMHeadModel"]
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    go(folder, tmp_path / "keep", size=10**6)
    assert {"lm_head.weight", "transformer.wte.weight"} <= output(tmp_path / "keep").keys()
    go(folder, tmp_path / "out", size=10**6, ties="source")
    names = output(tmp_path / "out").keys()
    assert "transformer.wte.weight" in names and "lm_head.weight" not in names
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)


def test_a_flipped_byte_in_a_record_is_told_by_its_crc(folder: Path, tmp_path: Path, go: Run) -> None:
    torch.save(state_of(), folder / "pytorch_model.bin")
    path = folder / "pytorch_model.bin"
    content = bytearray(path.read_bytes())
    at = content.index(np.asarray(state_of()["layer.5.weight"]).tobytes()) + 100
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(SourceCorrupt, match=r"pytorch_model.bin, record .*data/"):
        go(folder, tmp_path / "out", size=SIZE)
    assert not (tmp_path / "out").exists()


def test_a_pickle_that_wants_to_run_something_is_refused_and_runs_nothing(
    folder: Path, tmp_path: Path, go: Run
) -> None:
    torch.save({"weight": torch.ones(3), "canary": touch(tmp_path / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(UnsafePickle, match="nothing was run"):
        go(folder, tmp_path / "out", size=SIZE)
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", ".metadata"]
)
def test_a_pointer_of_git_lfs_says_how_to_fetch_the_file(folder: Path, tmp_path: Path, go: Run, name: str) -> None:
    (folder / name).write_text(POINTER)
    (folder / "__0_0.distcp").write_bytes(b"not looked into")
    with pytest.raises(LfsPointer, match=f"{name} is a Git LFS pointer") as caught:
        go(folder, tmp_path / "out", size=SIZE)
    assert "git lfs pull" in caught.value.next_step


def test_one_pointer_among_the_chunks_is_named(folder: Path, tmp_path: Path, go: Run) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(state_of_plain(), checkpoint_id=folder, no_dist=True)
    (folder / "__0_0.distcp").write_text(POINTER)
    with pytest.raises(LfsPointer, match="__0_0.distcp"):
        go(folder, tmp_path / "out", size=SIZE)


def test_files_without_a_tensor_are_left_out_and_said(folder: Path, tmp_path: Path, go: Run) -> None:
    save_file({}, folder / "extra.safetensors")
    names = list(state_of_plain())
    torch.save(state_of_plain(), folder / "pytorch_model-00001-of-00002.bin")
    torch.save({}, folder / "pytorch_model-00002-of-00002.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "pytorch_model-00001-of-00002.bin")}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    report = go(folder, tmp_path / "out", size=SIZE)
    assert_same(output(tmp_path / "out"), state_of_plain())
    assert ("extra.safetensors", "it has no tensors") in report.plan.left_out


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_model_without_a_tensor_is_no_model(folder: Path, tmp_path: Path, go: Run, name: str) -> None:
    if name.endswith(".bin"):
        torch.save({}, folder / name)
    else:
        save_file({}, folder / name)
    with pytest.raises(NoWeights, match=f"{name} has no tensors"):
        go(folder, tmp_path / "out", size=SIZE)


def test_what_belongs_to_an_optimizer_is_left_out_whole(folder: Path, tmp_path: Path, go: Run) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": state_of_plain()}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optim": {"a": torch.ones(3)}}, checkpoint_id=folder / "optimizer_0", no_dist=True)
    report = go(folder, tmp_path / "out", size=SIZE)
    assert_same(output(tmp_path / "out"), state_of_plain())
    left = {item.path for item in report.plan.left_out}
    assert left == {"optimizer_0/.metadata", "optimizer_0/__0_0.distcp"}
    assert not (tmp_path / "out" / "optimizer_0").exists()


@pytest.mark.parametrize("beside", ["zero_pp_rank_0_mp_rank_00_optim_states.pt", "recipe_state.pt", "optimizer.pt"])
def test_optimizers_in_torch_files_are_no_weights(folder: Path, tmp_path: Path, go: Run, beside: str) -> None:
    torch.save(state_of_plain(), folder / "mine.pt")
    torch.save({"state": [torch.ones(3)]}, folder / beside)
    report = go(folder, tmp_path / "out", size=SIZE)
    assert_same(output(tmp_path / "out"), state_of_plain())
    assert beside in {item.path for item in report.plan.left_out}


def test_code_of_the_repository_is_carried_and_never_run(folder: Path, tmp_path: Path, go: Run) -> None:
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    (folder / "modeling_mine.py").write_text(code)
    auto_map = {"AutoConfig": "modeling_mine.Config", "AutoModel": "modeling_mine.Model"}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "mine", "architectures": ["Model"], "auto_map": auto_map})
    )
    torch.save(state_of(2), folder / "pytorch_model.bin")
    report = go(folder, tmp_path / "out", size=SIZE)
    assert (tmp_path / "out" / "modeling_mine.py").read_text() == code
    assert not (tmp_path / "ran").exists()
    (check,) = [c for c in report.checks if c.name.startswith("reload")]
    assert check.level == "structural" and check.reason


def test_a_bare_checkpoint_borrows_config_and_tokenizer(on_hub: Namespace, tmp_path: Path, go: Run) -> None:
    bare, lender = tmp_path / "bare", tmp_path / "lender"
    bare.mkdir()
    torch.save(state_of(2), bare / "pytorch_model.bin")
    (bare / "notes.txt").write_text("own")
    save_single(lender, {"other": np.ones(3, dtype=np.float32)})
    add_friends(lender)
    (lender / "notes.txt").write_text("theirs")
    repos = [upload(on_hub, folder.name, folder) for folder in (bare, lender)]
    target = on_hub.repo("out")
    go(repos[0], target, size=SIZE, config_from=parse_place(repos[1]))
    for name in ("config.json", "tokenizer.json"):
        assert on_hub.admin.read(target, name) == (lender / name).read_bytes()
    assert on_hub.admin.read(target, "notes.txt") == b"own"
    assert "pytorch_model.bin" not in on_hub.admin.files(target)
    again = go(repos[0], target, size=SIZE, config_from=parse_place(repos[1]))
    assert again.plan.published is not None


def test_a_config_that_a_lender_does_not_replace_is_noted(tmp_path: Path, go: Run) -> None:
    own, lender = tmp_path / "own", tmp_path / "lender"
    for folder in (own, lender):
        save_single(folder, {"weight": np.ones(3, dtype=np.float32)})
        add_friends(folder)
    (lender / "config.json").write_text("{}")
    borrowing = {"config_from": parse_place(str(lender))}
    report = go(own, tmp_path / "out", size=SIZE, **borrowing)
    assert (tmp_path / "out" / "config.json").read_bytes() != b"{}"
    said = f"config.json is the source's own: only missing files are copied from {lender}"
    assert said in report.plan.notes
    (own / "config.json").unlink()
    assert said not in go(own, tmp_path / "other", size=SIZE, **borrowing).plan.notes


def test_weights_in_a_folder_of_their_own_are_loaded_as_the_plan_says(tmp_path: Path, go: Run) -> None:
    lender = tmp_path / "lender"
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=96)
    )
    model.save_pretrained(lender)
    (tmp_path / "bare" / "weights").mkdir(parents=True)
    torch.save(model.state_dict(), tmp_path / "bare" / "weights" / "pytorch_model.bin")
    out = tmp_path / "out"
    report = go(tmp_path / "bare", out, size=30_000, config_from=parse_place(str(lender)))
    (said,) = [note for note in report.plan.notes if "config.json" in note]
    call = said.partition("load it with ")[2]
    assert call == "from_pretrained(MODEL, subfolder='weights', config=AutoConfig.from_pretrained(MODEL))"
    names = {"from_pretrained": LlamaForCausalLM.from_pretrained, "AutoConfig": AutoConfig, "MODEL": out}
    loaded = eval(call, names).state_dict()  # noqa: S307 - our own words, tried as they stand
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
