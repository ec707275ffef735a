"""Which files belong together, and what is refused before a tensor byte is read."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from posixpath import join
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from reshard.pipeline.checkpoint.discover import find_checkpoints, find_uncut
from reshard.pipeline.checkpoint.formats.safetensors import build_header
from reshard.pipeline.checkpoint.kinds import foreign_format
from reshard.pipeline.checkpoint.names import PathsOf, index_path, shard_path
from reshard.pipeline.checkpoint.open import open_checkpoints
from reshard.pipeline.errors import (
    AbsentFile,
    AmbiguousWeights,
    BadHeader,
    BadIndex,
    BadLength,
    CheckpointError,
    DuplicateTensor,
    NotRead,
    NoWeights,
    UnsafePath,
)
from reshard.pipeline.places import Folder
from reshard.pipeline.stores.connect import Context, open_source
from reshard.pipeline.tensors import Checkpoint, Name, StoredFile
from tests.support.measured import within
from tests.support.models import arrays, numbered, save_sharded, save_single


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


def checkpoints(folder: Path) -> dict[str, Checkpoint]:
    source = open_source(Folder(path=str(folder)), Context.from_env())
    return {str(c.name): c for c in open_checkpoints(source, find_checkpoints(source)).checkpoints}


def names(checkpoint: Checkpoint) -> set[str]:
    return {tensor.name for tensor in checkpoint.tensors}


def test_one_file_is_a_checkpoint(folder: Path) -> None:
    made = arrays(3, 100)
    save_single(folder, made)
    assert names(checkpoints(folder)["model"]) == made.keys()


def test_an_index_says_which_files_belong_together_whatever_they_are_called(folder: Path) -> None:
    made = arrays(4, 100)
    halves = {k: v for k, v in made.items() if k < "layer.2"}, {k: v for k, v in made.items() if k >= "layer.2"}
    save_sharded(folder, {"first_state_dict.safetensors": halves[0], "zweite.safetensors": halves[1]})
    assert names(checkpoints(folder)["model"]) == made.keys()


def test_a_bare_map_is_an_index_too(folder: Path) -> None:
    save_sharded(folder, {"odd.safetensors": arrays(1, 100)})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps(json.loads(index.read_text())["weight_map"]))
    assert names(checkpoints(folder)["model"]) == arrays(1, 100).keys()


@pytest.mark.parametrize("whole", ["merged.pth", "hf/model.safetensors", "q.gguf"])
@pytest.mark.parametrize("slice_", ["original/consolidated.0{}.pth", "global_step1/mp_rank_0{}_model_states.pt"])
def test_slices_of_a_model_are_passed_over_where_a_whole_one_is_there(folder: Path, whole: str, slice_: str) -> None:
    for path in (whole, *map(slice_.format, (0, 1))):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(b"")
    source = open_source(Folder(path=str(folder)), Context.from_env())
    assert [file.path for file in find_checkpoints(source).files] == [whole]
    with pytest.raises(NotRead, match="tensor, pipeline or expert parallelism"):
        find_checkpoints(source, lambda path: path == whole)


def test_a_step_of_deepspeed_gives_way_to_a_safer_format_anywhere(folder: Path) -> None:
    for path in ("hf/model.safetensors", "global_step1/mp_rank_00_model_states.pt", "latest"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(b"gone")
    source = open_source(Folder(path=str(folder)), Context.from_env())
    assert [file.path for file in find_checkpoints(source).files] == ["hf/model.safetensors"]


def test_components_and_variants_are_checkpoints_of_their_own(folder: Path) -> None:
    save_single(folder / "vae", arrays(1, 100), "diffusion_pytorch_model.safetensors")
    save_single(folder / "vae", arrays(1, 100), "diffusion_pytorch_model.fp16.safetensors")
    halves = numbered(arrays(2, 100), 2, "diffusion_pytorch_model.fp16")
    save_sharded(folder / "unet", halves, "diffusion_pytorch_model.safetensors.index.fp16.json")
    assert checkpoints(folder).keys() == {
        "vae/diffusion_pytorch_model",
        "vae/diffusion_pytorch_model.fp16",
        "unet/diffusion_pytorch_model.fp16",
    }


def test_a_file_that_no_index_names_is_never_dropped(folder: Path) -> None:
    save_sharded(folder, numbered(arrays(2, 100), 2))
    save_single(folder, arrays(1, 100, prefix="mtp"), "mtp.safetensors")
    found = checkpoints(folder)
    assert found.keys() == {"model", "mtp"}
    assert names(found["mtp"]) == {"mtp.0.weight", "mtp.0.bias"}


def test_numbered_files_without_an_index_are_one_set(folder: Path) -> None:
    made = arrays(2, 100)
    save_sharded(folder, numbered(made, 2))
    (folder / "model.safetensors.index.json").unlink()
    assert names(checkpoints(folder)["model"]) == made.keys()


def test_an_index_of_another_variant_is_none_of_the_numbered_files_beside_it(folder: Path) -> None:
    save_sharded(folder, numbered(arrays(4, 100), 2))
    (folder / "model.safetensors.index.json").unlink()
    half = numbered(arrays(4, 100), 3, "model.fp16")
    save_sharded(folder, half)
    (folder / "model.safetensors.index.json").rename(folder / "model.safetensors.index.fp16.json")
    found = checkpoints(folder)
    assert found.keys() == {"model", "model.fp16"}
    assert names(found["model"]) == names(found["model.fp16"]) == arrays(4, 100).keys()


def test_numbered_files_without_an_index_must_be_complete(folder: Path) -> None:
    save_sharded(folder, numbered(arrays(4, 100), 3))
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(BadIndex, match="file 2 of 3 is missing"):
        checkpoints(folder)


def test_an_index_is_passed_over_whose_files_are_all_missing_beside_safetensors_and_no_other(folder: Path) -> None:
    save_sharded(folder, numbered(arrays(4, 100), 3))
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(AbsentFile, match="refers to a missing file: model-00002-of-00003.safetensors") as one:
        checkpoints(folder)
    assert "--exclude" not in one.value.next_step and "download the model again" in one.value.next_step
    for path in folder.glob("model-*"):
        path.unlink()
    torch.save({"a": torch.ones(2)}, folder / "pytorch_model.bin")
    with pytest.raises(AbsentFile, match="refers to a missing file: model-00001-of-00003.safetensors") as stale:
        checkpoints(folder)
    assert "skip the index with --exclude" in stale.value.next_step
    save_single(folder, arrays(4, 100), "output.safetensors")
    assert checkpoints(folder)["output"].index_path is None
    found = find_checkpoints(open_source(Folder(path=str(folder)), Context.from_env()))
    assert found.idle == ("model.safetensors.index.json",)


def test_of_a_single_file_and_an_equal_set_the_single_file_is_taken_as_loaders_do(folder: Path) -> None:
    save_sharded(folder, numbered(arrays(2, 100), 2))
    save_single(folder, arrays(2, 100))
    source = open_source(Folder(path=str(folder)), Context.from_env())
    opened = open_checkpoints(source, find_checkpoints(source))
    (chosen,) = opened.checkpoints
    assert [opened.files[i].path for i in chosen.files] == ["model.safetensors"]
    assert opened.duplicates.keys() == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }


def test_a_single_file_beside_a_different_set_is_no_guess(folder: Path) -> None:
    save_sharded(folder, numbered(arrays(2, 100), 2))
    save_single(folder, arrays(1, 100))
    with pytest.raises(AmbiguousWeights, match="model.safetensors in the same folder has different tensors") as caught:
        checkpoints(folder)
    assert "--exclude" in caught.value.next_step


def test_of_two_sets_of_one_name_that_which_loaders_take_counts(folder: Path) -> None:
    save_sharded(folder, numbered(arrays(2, 100, seed=1), 1))
    old = arrays(2, 100, seed=2)
    info = {name: {"saved_offsets": [0] * array.ndim} for name, array in old.items()}
    metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(info)}
    save_file(old, folder / "shard-00001-model-00001-of-00001.safetensors", metadata=metadata)
    assert checkpoints(folder)["model"].index_path == "model.safetensors.index.json"
    save_sharded(folder, numbered(arrays(2, 100, seed=3), 2, "pytorch_model"), "pytorch_model.safetensors.index.json")
    opened = checkpoints(folder)["model"]
    assert opened.index_path == "model.safetensors.index.json" and not opened.in_parts
    save_single(folder, arrays(2, 100, seed=4), "model.safetensors")
    assert checkpoints(folder)["model"].index_path is None
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").rename(folder / "index.json")
    with pytest.raises(AmbiguousWeights, match="another set with the same name"):
        checkpoints(folder)


def test_adapters_and_single_file_modules_are_not_cut(folder: Path) -> None:
    save_single(folder, arrays(1, 100))
    save_single(folder, arrays(1, 100), "adapter_model.safetensors")
    save_single(folder / "2_Dense", arrays(1, 100))
    modules = [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"path": "2_Dense", "type": "sentence_transformers.models.Dense"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    source = open_source(Folder(path=str(folder)), Context.from_env())
    found = find_checkpoints(source)
    assert found.uncut == {"adapter_model.safetensors", "2_Dense/model.safetensors"}
    assert [str(part.name) for part in found.sets] == ["model"]


@pytest.mark.parametrize(
    "name", ["adapters.safetensors", "0000100_adapters.safetensors", "non_lora_trainables.bin", "mm_projector.bin"]
)
def test_weights_that_their_loaders_find_by_name_are_not_cut(folder: Path, name: str) -> None:
    save_single(folder, arrays(1, 100))
    shutil.copy(folder / "model.safetensors", folder / name)
    (folder / "config.json").write_text("{}")
    assert find_checkpoints(open_source(Folder(path=str(folder)), Context.from_env())).uncut == {name}


def test_a_name_that_loaders_look_for_stays_beside_a_config(folder: Path) -> None:
    folder.mkdir()
    torch.save({"a": torch.ones(2)}, folder / "open_clip_pytorch_model.bin")
    (folder / "config.json").write_text("{}")
    (part,) = find_checkpoints(open_source(Folder(path=str(folder)), Context.from_env())).sets
    assert part.name.stem == "open_clip_model"


@pytest.mark.parametrize("name", ["flow.pt", "consolidated.pt"])
def test_beside_an_adapter_the_only_other_weights_are_the_model_of_a_config(folder: Path, name: str) -> None:
    save_single(folder, arrays(1, 100), "adapter_model.safetensors")
    torch.save({"a": torch.ones(2)}, folder / name)
    (folder / "config.json").write_text("{}")
    (part,) = find_checkpoints(open_source(Folder(path=str(folder)), Context.from_env())).sets
    assert part.name.stem == "model"


def test_a_name_that_is_like_an_adapters_is_cut_and_what_is_no_adapter_has_no_hint_of_one(folder: Path) -> None:
    save_single(folder, arrays(1, 100), "control_adapters.safetensors")
    source = open_source(Folder(path=str(folder)), Context.from_env())
    assert not find_checkpoints(source).uncut
    (folder / "control_adapters.safetensors").rename(folder / "mm_projector.safetensors")
    with pytest.raises(NoWeights) as refused:
        find_checkpoints(open_source(Folder(path=str(folder)), Context.from_env()))
    assert refused.value.next_step.endswith("; use this file unchanged") and "merge" not in refused.value.next_step


def test_two_indexes_that_share_a_file_and_are_not_alike_are_no_guess(folder: Path) -> None:
    """Or each would have the file written once more."""
    for number in range(2):
        files = {"big.safetensors": arrays(2, 100), f"own{number}.safetensors": {f"own{number}": np.ones(2)}}
        save_sharded(folder, files, f"m{number}.safetensors.index.json")
    with pytest.raises(AmbiguousWeights, match="m1.safetensors.index.json: m0.safetensors.index.json also lists big"):
        checkpoints(folder)


@pytest.mark.parametrize("other", ["model.safetensors.index.bak.json", "old.model.safetensors.index.json"])
def test_of_two_indexes_of_the_same_files_the_usual_one_is_read(folder: Path, other: str) -> None:
    save_sharded(folder, numbered(arrays(2, 100), 2))
    shutil.copy(folder / "model.safetensors.index.json", folder / other)
    (part,) = find_checkpoints(open_source(Folder(path=str(folder)), Context.from_env())).sets
    assert part.index_path == "model.safetensors.index.json"


def test_a_model_below_a_list_of_modules_is_cut_and_another_tools_list_is_none(folder: Path) -> None:
    save_single(folder / "0_CLIPModel", arrays(1, 100))
    modules = [{"path": "0_CLIPModel", "type": "sentence_transformers.models.CLIPModel"}]
    for content in (modules, {"modules": modules}, [["0_CLIPModel"]], None):
        (folder / "modules.json").write_text(json.dumps(content))
        found = find_checkpoints(open_source(Folder(path=str(folder)), Context.from_env()))
        assert (found.uncut, [str(part.name) for part in found.sets]) == (frozenset(), ["0_CLIPModel/model"])


@pytest.mark.parametrize("module", ["2_Dense/pytorch_model.bin", "2_Dense/pytorch_model-00001-of-00001.bin"])
@pytest.mark.parametrize("home", ["", "st"])
def test_the_torch_twin_of_a_file_that_is_carried_is_no_checkpoint(folder: Path, home: str, module: str) -> None:
    model = folder / home
    save_single(model / "2_Dense", arrays(1, 100))
    save_single(model, arrays(1, 100))
    for twin in (module, "adapter_model.bin", "open_clip_pytorch_model.bin"):
        torch.save({"a": torch.ones(2)}, model / twin)
    for carried in ("adapter_model.safetensors", "open_clip_model.safetensors"):
        save_single(model, arrays(1, 100), carried)
    modules = [{"path": "", "type": "x.Transformer"}, {"path": "./2_Dense", "type": "x.Dense"}]
    (model / "modules.json").write_text(json.dumps(modules))
    found = find_checkpoints(open_source(Folder(path=str(folder)), Context.from_env()))
    assert [str(part.name) for part in found.sets] == [join(home, "model")]
    carried = ("2_Dense/model.safetensors", "adapter_model.safetensors", "open_clip_model.safetensors")
    assert found.uncut == {join(home, path) for path in carried}


def test_an_adapter_with_a_torch_twin_is_no_model_either(folder: Path) -> None:
    save_single(folder, arrays(1, 100), "adapter_model.safetensors")
    torch.save({"a": torch.ones(2)}, folder / "adapter_model.bin")
    (folder / "config.json").write_text("{}")
    with pytest.raises(NoWeights, match="adapter_model.safetensors is never resharded"):
        find_checkpoints(open_source(Folder(path=str(folder)), Context.from_env()))


@pytest.mark.parametrize(("path", "kind"), [(".", "StaticEmbedding"), ("", "StaticEmbedding"), ("", "Transformer")])
def test_a_static_embedding_that_is_the_model_stays_in_one_file(folder: Path, path: str, kind: str) -> None:
    save_single(folder, arrays(4, 100))
    (folder / "modules.json").write_text(json.dumps([{"path": path, "type": f"sentence_transformers.models.{kind}"}]))
    found = find_checkpoints(open_source(Folder(path=str(folder)), Context.from_env()))
    assert (found.uncut, found.single) == (frozenset(), {""} if kind == "StaticEmbedding" else frozenset())


def test_the_modules_of_a_router_are_carried_unless_they_are_transformers(folder: Path) -> None:
    types = {"query_0_SparseStaticEmbedding": "SparseStaticEmbedding", "document_0_MLMTransformer": "MLMTransformer"}
    for name in types:
        save_single(folder / name, arrays(1, 100))
    (folder / "router_config.json").write_text(json.dumps({"types": types, "structure": {}}))
    (folder / "modules.json").write_text(json.dumps([{"path": "", "type": "sentence_transformers.models.Router"}]))
    found = find_checkpoints(open_source(Folder(path=str(folder)), Context.from_env()))
    assert found.uncut == {"query_0_SparseStaticEmbedding/model.safetensors"} and found.single == frozenset()
    assert [str(part.name) for part in found.sets] == ["document_0_MLMTransformer/model"]


def test_a_list_of_another_tools_modules_is_none(folder: Path) -> None:
    save_single(folder, arrays(1, 100))
    save_single(folder / "2_Dense", arrays(1, 100))
    (folder / "modules.json").write_text('[{"path": "2_Dense"}]')
    assert not find_checkpoints(open_source(Folder(path=str(folder)), Context.from_env())).uncut


def test_a_list_of_modules_that_is_spoiled_is_refused(folder: Path) -> None:
    save_single(folder / "2_Dense", arrays(1, 100))
    for spoiled in ({"path": "2_Dense"}, "2_Dense", None):
        (folder / "modules.json").write_text(json.dumps([{"path": "", "type": "x.Transformer"}, spoiled]))
        with pytest.raises(BadIndex, match="modules.json: not a list of modules"):
            find_checkpoints(open_source(Folder(path=str(folder)), Context.from_env()))


def test_what_is_no_adapter_is_not_called_one(folder: Path) -> None:
    save_single(folder / "0_StaticEmbedding", arrays(1, 100))
    modules = [{"path": "0_StaticEmbedding", "type": "sentence_transformers.models.StaticEmbedding"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(NoWeights) as caught:
        find_checkpoints(open_source(Folder(path=str(folder)), Context.from_env()))
    assert "adapter" not in caught.value.next_step and "use this file unchanged" in caught.value.next_step


@pytest.mark.parametrize(
    "name", ["model.onnx", "model.onnx_data", "model.onnx_data_1", "model.onnx.data", "MODEL.ONNX.DATA"]
)
def test_the_data_of_an_onnx_model_is_of_its_format(name: str) -> None:
    assert foreign_format(f"onnx/{name}") == "ONNX" and foreign_format("model.data") is None


def test_modules_that_are_nested_without_end_are_no_list_of_modules(folder: Path) -> None:
    folder.mkdir()
    (folder / "modules.json").write_text("[" * 100_000)
    with pytest.raises(BadIndex, match=r"modules.json: not a list of modules \(nested too deeply\)"):
        find_checkpoints(open_source(Folder(path=str(folder)), Context.from_env()))


def test_weights_that_are_never_cut_are_found_where_they_are_alone(folder: Path) -> None:
    save_single(folder, arrays(1, 100), "adapter_model.safetensors")
    source = open_source(Folder(path=str(folder)), Context.from_env())
    with pytest.raises(NoWeights, match="adapter_model.safetensors is never resharded, because loaders look for that"):
        find_checkpoints(source)
    found = find_uncut(source)
    assert found.stays_whole and [str(part.name) for part in found.sets] == ["adapter_model"]
    save_single(folder, arrays(1, 100))
    assert not find_checkpoints(open_source(Folder(path=str(folder)), Context.from_env())).stays_whole


def test_no_weights_says_what_is_there_instead(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.onnx").write_bytes(b"ONNX")
    (folder / "tf_model.h5").write_bytes(b"HDF")
    with pytest.raises(NoWeights, match="ONNX, TensorFlow files such as model.onnx"):
        checkpoints(folder)


def test_header_metadata_is_kept_and_a_contradiction_is_told(folder: Path) -> None:
    save_sharded(folder, numbered(arrays(2, 100), 2))
    for number, author in ((1, "me"), (2, "you")):
        path = folder / f"model-0000{number}-of-00002.safetensors"
        save_file(load_file(path), path, metadata={"format": "pt", "by": author})
    checkpoint = checkpoints(folder)["model"]
    assert checkpoint.file_metadata == {"format": "pt", "by": "me"}
    assert "'by'" in checkpoint.notes[0]


# ------------------------------------------------------------------------------------------------- what is refused


def edit_index(folder: Path, **changes: Any) -> None:
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    content["weight_map"] |= changes
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "path",
    ["../outside.safetensors", "/etc/model.safetensors", "a/../../b.safetensors", "C:/x", "..\\x", "."],
)
def test_an_index_that_leaves_its_folder_is_unsafe(folder: Path, path: str) -> None:
    save_sharded(folder, numbered(arrays(2, 100), 2))
    edit_index(folder, **{"layer.0.weight": path})
    with pytest.raises(UnsafePath) as caught:
        checkpoints(folder)
    assert path in str(caught.value)


@pytest.mark.parametrize("spelling", ["./{}", ".//{}", "././{}"])
def test_a_file_is_the_same_however_an_index_spells_its_path(folder: Path, spelling: str) -> None:
    made = arrays(2, 100)
    save_sharded(folder, numbered(made, 2))
    edit_index(folder, **{"layer.0.weight": spelling.format("model-00001-of-00002.safetensors")})
    assert names(checkpoints(folder)["model"]) == made.keys()


def test_an_index_that_names_a_missing_file(folder: Path) -> None:
    save_sharded(folder, numbered(arrays(2, 100), 2))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(BadIndex, match=r"refers to a missing file: model-00002-of-00002.safetensors"):
        checkpoints(folder)


def test_an_index_that_names_a_missing_tensor(folder: Path) -> None:
    save_sharded(folder, numbered(arrays(2, 100), 2))
    edit_index(folder, ghost="model-00001-of-00002.safetensors")
    with pytest.raises(BadIndex, match="ghost is in model-00001.*no file has it"):
        checkpoints(folder)


def test_an_index_that_names_the_wrong_file(folder: Path) -> None:
    save_sharded(folder, numbered(arrays(2, 100), 2))
    edit_index(folder, **{"layer.0.weight": "model-00002-of-00002.safetensors"})
    with pytest.raises(BadIndex, match="layer.0.weight"):
        checkpoints(folder)


def test_a_tensor_that_no_index_names_is_kept_and_told(folder: Path) -> None:
    save_sharded(folder, numbered(arrays(2, 100), 2))
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    del content["weight_map"]["layer.0.bias"]
    path.write_text(json.dumps(content))
    checkpoint = checkpoints(folder)["model"]
    assert "layer.0.bias" in names(checkpoint)
    assert "layer.0.bias" in checkpoint.notes[0]


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    made = arrays(1, 100)
    both = {"a.safetensors": made | arrays(1, 100, prefix="a"), "b.safetensors": made | arrays(1, 100, prefix="b")}
    save_sharded(folder, both)
    with pytest.raises(DuplicateTensor, match="a.safetensors and again in b.safetensors"):
        checkpoints(folder)


def test_one_name_in_two_files_is_found_in_one_pass_however_many_others_there_are(folder: Path) -> None:
    """Looking through all that came before each name takes minutes of these."""
    folder.mkdir()
    weight_map = {}
    for file in ("a.safetensors", "b.safetensors"):
        names = [*(f"{file}.{number}" for number in range(50_000)), "both"]
        (folder / file).write_bytes(build_header(((name, "F32", (0,)) for name in names), {}))
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    before = time.process_time()
    with pytest.raises(DuplicateTensor, match="both: in a.safetensors and again in b.safetensors"):
        checkpoints(folder)
    assert within(time.process_time() - before, 5)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"{", BadIndex),
        (b"[]", BadIndex),
        (b'{"weight_map": []}', BadIndex),
        (b'{"weight_map": {}}', BadIndex),
        (b'{"weight_map": {"a": 1}}', BadIndex),
        (b'{"metadata": 1, "weight_map": {"a": "b"}}', BadIndex),
        (b"[" * 100_000, BadIndex),
        (b'\xef\xbb\xbf{"weight_map": {"a": "model-00001-of-00002.safetensors"}}', BadIndex),
        ('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'.encode("utf-16"), BadIndex),
    ],
)
def test_an_index_that_is_none(folder: Path, content: bytes, kind: type[CheckpointError]) -> None:
    save_sharded(folder, numbered(arrays(2, 100), 2))
    (folder / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(kind, match=r"model.safetensors.index.json: "):
        checkpoints(folder)


@pytest.mark.parametrize(("change", "kind"), [(-1, BadLength), (1, BadLength)])
def test_a_file_of_another_length_than_its_header_says(folder: Path, change: int, kind: type[CheckpointError]) -> None:
    save_single(folder, arrays(1, 100))
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + b"x")
    with pytest.raises(kind, match=str(len(content))):
        checkpoints(folder)


def test_a_header_that_claims_100_gb_costs_nothing(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((100 * 10**9).to_bytes(8, "little") + b"{}")
    with pytest.raises(BadHeader, match="claims 100,000,000,000 bytes"):
        checkpoints(folder)


def test_a_header_longer_than_the_first_read_is_read_whole(folder: Path) -> None:
    made = {f"a.very.long.name.of.a.tensor.{'x' * 200}.{i}": np.zeros(1, dtype=np.float32) for i in range(2000)}
    save_single(folder, made)
    assert names(checkpoints(folder)["model"]) == made.keys()


# ------------------------------------------------------------------------------------------------------- the names


def save_rank(folder: Path, shard: int, number: int, count: int = 2) -> str:
    """A file as torch's HuggingFaceStorageWriter calls it: two rows of each of the tensors of that number."""
    folder.mkdir(exist_ok=True)
    name = f"shard-{shard:05}-model-{number:05}-of-{count:05}.safetensors"
    info = {f"w{number}": {"saved_offsets": [2 * (shard - 1), 0]}}
    rows = {f"w{number}": np.full((2, 4), shard, np.float32)}
    save_file(rows, folder / name, {"format": "pt", "DCP_SHARDING_INFO": json.dumps(info)})
    return name


def test_the_parts_of_all_ranks_are_one_model_and_what_cannot_be_known_is_said(folder: Path) -> None:
    for shard in (1, 2):
        for number in (1, 2):
            save_rank(folder, shard, number)
    model = checkpoints(folder)["model"]
    assert {tensor.name: tensor.shape for tensor in model.tensors} == {"w1": (4, 4), "w2": (4, 4)}
    assert any("no file says how large a tensor is" in note for note in model.notes)


@pytest.mark.parametrize(
    ("kept", "why"),
    [
        ([(1, 1, 2), (2, 1, 2)], "no rank has a file 2 of 2"),
        ([(1, 1, 1), (3, 1, 1)], "the files of shard 2 are missing"),
        ([(2, 1, 1), (3, 1, 1)], "the files of shard 1 are missing"),
        ([(1, 1, 1), (2, 1, 2), (2, 2, 2)], "one of 1 files, but others here are of 2"),
    ],
)
def test_parts_of_ranks_whose_names_show_a_loss_are_refused(
    folder: Path, kept: list[tuple[int, int, int]], why: str
) -> None:
    for shard, number, count in kept:
        save_rank(folder, shard, number, count)
    with pytest.raises(BadIndex, match=why):
        checkpoints(folder)


def test_an_index_of_parts_counts(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    weight_map = {f"w{number}": save_rank(folder, 1, number) for number in (1, 2)}
    path.write_text(json.dumps({"metadata": {"total_size": 64, "by": "us"}, "weight_map": weight_map}))
    model = checkpoints(folder)["model"]
    assert (model.index_path, model.index_metadata["by"]) == (path.name, "us")
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map | {"lost": weight_map["w1"]}}))
    with pytest.raises(BadIndex, match="says that lost is in .*, but no file has it"):
        checkpoints(folder)


@pytest.mark.parametrize(
    ("name", "shard", "index"),
    [
        (Name("", "model"), "model-00002-of-00003.safetensors", "model.safetensors.index.json"),
        (
            Name("unet", "diffusion_pytorch_model", "fp16"),
            "unet/diffusion_pytorch_model.fp16-00002-of-00003.safetensors",
            "unet/diffusion_pytorch_model.safetensors.index.fp16.json",
        ),
        (Name("Q4_K", "model", suffix=".gguf"), "Q4_K/model-00002-of-00003.gguf", None),
    ],
)
def test_names_are_the_ones_that_loaders_look_for(name: Name, shard: str, index: str | None) -> None:
    assert shard_path(name, 2, 3) == shard
    assert index_path(name) == index
    assert "-of-" not in shard_path(name, 1, 1)


def test_a_path_is_one_of_many_names_in_time_that_does_not_grow_with_them() -> None:
    ours = PathsOf(Name(f"voices-{number % 7}", f"v{number}") for number in range(20_000))
    assert "voices-1/v1.safetensors" in ours and "voices-1/v1.safetensors.index.json" in ours
    assert "voices-1/v1-00002-of-00003.safetensors" in ours and "voices-2/v1.safetensors" not in ours
    assert "voices-1/v1-0002-of-00003.safetensors" not in ours and "voices-1/v1.bin" not in ours
    start = time.process_time()
    assert not any(f"voices-1/other-{number}-00001-of-00002.safetensors" in ours for number in range(20_000))
    assert within(time.process_time() - start, 1.0)


def test_many_folders_are_looked_at_in_time_that_grows_with_their_number(folder: Path) -> None:
    names = (".metadata", "0.distcp", "model.safetensors", "pytorch_model.bin")
    paths = [f"{number:05}/{name}" for number in range(10_000) for name in names]
    listing = {path: StoredFile(path, 100) for path in paths}
    source: Any = SimpleNamespace(files=lambda: listing)  # of which nothing is read
    start = time.process_time()
    assert len(find_checkpoints(source).sets) == 10_000
    assert within(time.process_time() - start, 3.0)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("router_config.json", '{"types": ["a", "b"]}'),
        ("router_config.json", "types: yaml"),
        ("web/modules.json", "[ // a comment\n]"),
        ("x/modules.json", '[{"path": "", "type": null}]'),
        ("x/modules.json", '[{"path": "", "type": "x.Dense"}, {"type": "x.Dense"}]'),
        ("x/modules.json", '[{"path": "..", "type": "js"}]'),
    ],
)
def test_files_of_other_tools_that_are_called_as_lists_of_modules_are_in_nobody_s_way(
    folder: Path, path: str, text: str
) -> None:
    save_single(folder, arrays(1, 100))
    (folder / path).parent.mkdir(exist_ok=True)
    (folder / path).write_text(text)
    found = find_checkpoints(open_source(Folder(path=str(folder)), Context.from_env()))
    assert [str(part.name) for part in found.sets] == ["model"] and not found.uncut and not found.single
