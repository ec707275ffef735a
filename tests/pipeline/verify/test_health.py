"""What is amiss with a repository is named, with what a reshard would do about it; and it does just that."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from reshard.pipeline.errors import BadIndex
from reshard.pipeline.places import Folder, parse_place
from reshard.pipeline.request import Options, Request
from reshard.pipeline.reshard import run
from reshard.pipeline.stores.folder import FolderSource
from reshard.pipeline.stores.open import Context
from reshard.pipeline.verify.health import Health, examine
from reshard.pipeline.verify.reload import Reload
from tests.support.models import add_friends, arrays, numbered, save_sharded, save_single

INDEX = "model.safetensors.index.json"


def health(folder: Path) -> Health:
    return examine(FolderSource.open(Folder(path=str(folder))))


def kinds(folder: Path) -> set[str]:
    return {symptom.kind for symptom in health(folder).symptoms}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    save_sharded(folder, numbered(arrays(6, 4000), 3))
    add_friends(folder)
    return folder


def test_a_healthy_repository_has_no_symptoms(model: Path) -> None:
    found = health(model)
    assert found.symptoms == () and found.refused is None
    assert found.tensors == 12


def test_what_a_reshard_can_put_right_it_puts_right(model: Path, tmp_path: Path, reload: Reload) -> None:
    index = json.loads((model / INDEX).read_text())
    index["metadata"] = {"total_size": 3}
    index["weight_map"].popitem()
    (model / INDEX).write_text(json.dumps(index))
    shard = sorted(model.glob("*.safetensors"))[0]
    made = {name: array for name, array in arrays(6, 4000).items() if name in index["weight_map"]}
    first = {name: made[name] for name, file in index["weight_map"].items() if file == shard.name}
    save_file(first, shard)
    (model / "training_args.bin").write_bytes(b"a trainer's")
    texts = [symptom.text for symptom in health(model).symptoms]
    for said in ("total_size", "does not name it", 'no "format"', "PyTorch files"):
        assert any(said in text for text in texts), said
    request = Request(
        source=parse_place(str(model)), target=parse_place(str(tmp_path / "out")), options=Options(size=12_000)
    )
    run(request, Context.from_env(), reload=reload)
    assert health(tmp_path / "out").symptoms == ()


def test_what_a_reshard_refuses_is_told_with_its_reason(model: Path) -> None:
    sorted(model.glob("*.safetensors"))[1].unlink()
    found = health(model)
    assert isinstance(found.refused, BadIndex)
    assert "which is not there" in found.symptoms[0].text
    assert "a reshard refuses it" in found.symptoms[0].cure


def test_pickles_are_told_and_duplicates_in_other_formats(tmp_path: Path) -> None:
    (tmp_path / "pickle").mkdir()
    torch.save({"w": torch.zeros(9)}, tmp_path / "pickle" / "pytorch_model.bin")
    assert kinds(tmp_path / "pickle") == {"pickles", "config"}
    (tmp_path / "both").mkdir()
    save_single(tmp_path / "both", {"w": np.zeros(9, np.float32)})
    shutil.copy(tmp_path / "pickle" / "pytorch_model.bin", tmp_path / "both")
    assert kinds(tmp_path / "both") == {"other formats", "config"}


def test_an_odd_name_and_a_missing_tokenizer_are_told(tmp_path: Path) -> None:
    save_single(tmp_path, {"w": np.zeros(9, np.float32)}, "weights_final.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert kinds(tmp_path) == {"name", "tokenizer"}
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert kinds(tmp_path) == {"name"}, "a model of images has a processor instead"


def test_many_small_files_are_told(tmp_path: Path) -> None:
    save_sharded(tmp_path, numbered(arrays(20, 400), 20))
    add_friends(tmp_path)
    assert kinds(tmp_path) == {"size"}
