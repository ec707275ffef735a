"""Files as packages hand them out: a name that ends in .pth.tar, one file as the place, settings beside the weights."""

from __future__ import annotations

import json
from argparse import Namespace as Arguments
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import save_file

from reshard.pipeline import verify
from reshard.pipeline.errors import (
    BadIndex,
    FolderNotFound,
    FoldersNested,
    PartOfCheckpoint,
    UnsafePath,
    Unsupported,
)
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import Run, upload
from tests.pipeline.states import SIZE, assert_same, output, state_of_plain

STATE = state_of_plain()


def saved(path: Path, value: Any = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(STATE if value is None else value, path)
    return path


def test_a_file_named_pth_tar_is_read(tmp_path: Path, go: Run) -> None:
    saved(tmp_path / "m" / "model_best.pth.tar", {"epoch": 3, "state_dict": STATE})
    go(tmp_path / "m", tmp_path / "out", size=SIZE)
    assert (tmp_path / "out" / "model_best.safetensors.index.json").exists()
    assert_same(output(tmp_path / "out"), STATE)


def test_a_program_by_its_name_gets_the_reason_that_a_renamed_one_gets_and_gives_way_to_weights(
    tmp_path: Path, go: Run
) -> None:
    (tmp_path / "m").mkdir()
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "m" / "model.jit"))
    with pytest.raises(Unsupported, match=r"cannot convert model\.jit to safetensors: a TorchScript program"):
        go(tmp_path / "m", tmp_path / "out")
    saved(tmp_path / "m" / "other.pth")
    go(tmp_path / "m", tmp_path / "out")
    assert_same(output(tmp_path / "out"), STATE)
    assert not (tmp_path / "out" / "model.jit").exists()


@pytest.mark.parametrize("name", ["model.pth", "model_best.pth.tar", "weights.bin", "model.safetensors"])
def test_a_weight_file_stands_for_a_folder_with_that_file_alone(tmp_path: Path, go: Run, name: str) -> None:
    file = tmp_path / "m" / name
    if name.endswith(".safetensors"):
        file.parent.mkdir()
        save_file(STATE, file)
    else:
        saved(file)
    saved(tmp_path / "m" / "another.pth", {"w": torch.zeros(1)})
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "m" / "latest").symlink_to("/")  # what lies beside it is not looked at
    out = tmp_path / "out"
    go(file, out, size=SIZE)
    assert_same(output(out), STATE)
    assert not (out / "config.json").exists() and not list(out.glob("another*"))
    assert verify(str(out), against=str(file), deep=True).result in {"passed", "inconclusive"}
    assert verify(file).place.path == str(file)
    with pytest.raises(FoldersNested):
        go(file, file.parent, size=SIZE)


def test_a_file_that_is_one_of_several_names_the_folder(tmp_path: Path, go: Run) -> None:
    folder = tmp_path / "m"
    go(saved(tmp_path / "model.pth"), folder, size=SIZE)
    part = min(folder.glob("model-*.safetensors"))
    with pytest.raises(PartOfCheckpoint, match="one shard of a checkpoint, according to its name") as error:
        go(part, tmp_path / "out")
    assert error.value.next_step == f"pass the folder instead: {folder}"
    odd = folder / "odd.safetensors"
    part.rename(odd)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(part.name, odd.name))
    with pytest.raises(PartOfCheckpoint, match=r"according to model\.safetensors\.index\.json"):
        go(odd, tmp_path / "out")
    index.write_text("{")
    with pytest.raises(BadIndex):
        go(odd, tmp_path / "out")


def test_a_file_that_links_elsewhere_is_refused_and_one_of_no_weights_is_no_place(tmp_path: Path, go: Run) -> None:
    saved(tmp_path / "secret" / "model.pth")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.pth").symlink_to("../secret/model.pth")
    with pytest.raises(UnsafePath, match=r"model\.pth"):
        go(tmp_path / "m" / "model.pth", tmp_path / "out")
    (tmp_path / "m" / "notes.txt").write_text("")
    with pytest.raises(FolderNotFound, match="a file, but not a weight file") as refused:
        go(tmp_path / "m" / "notes.txt", tmp_path / "out")
    assert refused.value.next_step == f"pass the folder instead: {tmp_path / 'm'}"


CONFIG = {"layers": 2, "rate": 0.5, "name": "small\u202e", "sizes": (1, 2), "nested": {"bias": None, "tied": True}}
AS_JSON = CONFIG | {"sizes": [1, 2]}


@pytest.mark.parametrize("legacy", [False, True])
def test_settings_beside_the_weights_are_carried_as_json_and_said(tmp_path: Path, go: Run, legacy: bool) -> None:
    value = {"config": CONFIG, "model_args": OrderedDict(CONFIG), "epoch": 3, "model": STATE, "optimizer": {"lr": 1.0}}
    (tmp_path / "m").mkdir()
    torch.save(value, tmp_path / "m" / "model.pt", _use_new_zipfile_serialization=not legacy)
    out = tmp_path / "out"
    notes = go(tmp_path / "m", out, size=SIZE).plan.notes
    assert json.loads((out / "model.settings.json").read_text()) == {"config": AS_JSON, "model_args": AS_JSON}
    assert "\u202e" not in (out / "model.settings.json").read_text()
    [said] = [note for note in notes if "settings" in note]
    assert "(config, model_args) are written to model.settings.json" in said
    assert not any("skipped config" in note for note in notes) and any("skipped epoch" in note for note in notes)
    assert_same(output(out), STATE)
    [files] = [check for check in verify(str(out), against=str(tmp_path / "m")).checks if check.name == "other files"]
    assert files.result == "passed", files
    (out / "model.settings.json").write_text('{"config": {}}\n')
    [files] = [check for check in verify(str(out), against=str(tmp_path / "m")).checks if check.name == "other files"]
    assert files.result == "failed" and "model.settings.json" in str(files.findings)


def test_settings_stay_where_weights_stay_and_go_where_they_are_excluded(tmp_path: Path, go: Run) -> None:
    saved(tmp_path / "m" / "model.pt", {"config": CONFIG, "model": STATE})
    go(tmp_path / "m", tmp_path / "out", size=SIZE)
    (tmp_path / "m" / "more.txt").write_text("more")
    go(tmp_path / "m", tmp_path / "out", size=SIZE)
    assert (tmp_path / "out" / "more.txt").exists() and (tmp_path / "out" / "model.settings.json").exists()
    go(tmp_path / "m", tmp_path / "out2", size=SIZE, exclude=("*.settings.json",))
    assert not (tmp_path / "out2" / "model.settings.json").exists()


def test_a_carried_file_named_like_settings_follows_the_source(tmp_path: Path, on_hub: Namespace, go: Run) -> None:
    folder, out = tmp_path / "m", tmp_path / "out"
    folder.mkdir()
    save_file(STATE, folder / "model.safetensors")
    for name in ("my", "old", "not"):
        (folder / f"{name}.settings.json").write_text('{"v": 1}')
    repo = upload(on_hub, "model", folder)
    go(repo, out, size=SIZE)
    assert len([*out.glob("*.settings.json")]) == 3
    on_hub.admin.put_files(repo, {"my.settings.json": b'{"v": 2}'})
    HfApi(on_hub.endpoint, on_hub.token).delete_file("old.settings.json", repo)
    report = go(repo, out, size=SIZE, exclude=("not.*",))
    assert not report.plan.shards, "the weights stay"
    assert {p.name: p.read_text() for p in out.glob("*.settings.json")} == {"my.settings.json": '{"v": 2}'}


def test_settings_beside_weights_follow_a_source_that_gets_or_loses_its_own_and_what_is_excluded(
    tmp_path: Path, on_hub: Namespace, go: Run
) -> None:
    saved(tmp_path / "m" / "model.bin", {"config": {"v": 1}, "model": STATE})
    repo, out = upload(on_hub, "model", tmp_path / "m"), tmp_path / "out"
    settings, api = out / "model.settings.json", HfApi(on_hub.endpoint, on_hub.token)

    def now(**options: Any) -> Any:
        go(repo, out, size=SIZE, **options)
        return json.loads(settings.read_text()) if settings.exists() else None

    assert now() == {"config": {"v": 1}}
    on_hub.admin.put_files(repo, {"more.txt": b"more"})
    assert now() == {"config": {"v": 1}}
    assert now(exclude=("*.settings.json",)) is None
    assert now() == {"config": {"v": 1}}
    on_hub.admin.put_files(repo, {"model.settings.json": b'{"own": 1}'})
    assert now() == {"own": 1}
    on_hub.admin.put_files(repo, {"model.settings.json": b'{"own": 2}'})
    assert now() == {"own": 2}
    api.delete_file("model.settings.json", repo)
    assert now() == {"config": {"v": 1}}


@pytest.mark.parametrize(
    "value",
    [
        {"rate": float("nan")},
        {1: 2},
        {"x": torch.float16},
        {"x": b"bytes"},
        {"x": "y" * 70_000},
        {"y" * 70_000: "x"},
        {"x": {1, 2}},
        [1],
        {},
        Arguments(layers=2),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_what_json_has_no_word_for_is_left_out_and_said(tmp_path: Path, go: Run, value: Any) -> None:
    saved(tmp_path / "m" / "model.pt", {"config": value, "model": STATE})
    notes = go(tmp_path / "m", tmp_path / "out", size=SIZE).plan.notes
    assert any("skipped config" in note for note in notes)
    assert not (tmp_path / "out" / "model.settings.json").exists()


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "key",
    [
        *("hf_token", "HF_TOKEN", "client_secret", "Password", "wandb_api_key", "apikey", "api-key", "credentials"),
        *("passwd", "PWD", "auth", "http_auth", "aws_access_key", "private_key", "sentry_dsn", "bearer"),
    ],
)
def test_settings_that_may_hold_a_secret_are_left_out_whole_and_said(
    tmp_path: Path, go: Run, key: str, legacy: bool
) -> None:
    (tmp_path / "m").mkdir()
    value = {"config": {"deep": [{key: "hf_abc"}]}, "model_args": {"layers": 2}, "model": STATE}
    torch.save(value, tmp_path / "m" / "model.pt", _use_new_zipfile_serialization=not legacy)
    notes = go(tmp_path / "m", tmp_path / "out", size=SIZE).plan.notes
    assert f"model.pt: skipped the settings in config, as its {key!r} could be a secret" in notes
    assert json.loads((tmp_path / "out" / "model.settings.json").read_text()) == {"model_args": {"layers": 2}}


@pytest.mark.parametrize(
    "value",
    [f"Bearer hf_{'a' * 30}", f"sk-proj-{'a' * 30}", "postgres://user:word@host/db", "see redis://:word@host for it"],
)
def test_settings_with_a_value_like_a_secret_are_left_out_whole_and_the_note_does_not_tell_it(
    tmp_path: Path, go: Run, value: str
) -> None:
    (tmp_path / "m").mkdir()
    config = {"author": "me", "url": "https://host:443/a@b", "layers": [2]}
    content = {"config": {"deep": [value]}, "model_args": config, "model": STATE}
    torch.save(content, tmp_path / "m" / "model.pt")
    notes = go(tmp_path / "m", tmp_path / "out", size=SIZE).plan.notes
    assert "model.pt: skipped the settings in config, as one of its values could be a secret" in notes
    assert not any(value in note for note in notes)
    assert json.loads((tmp_path / "out" / "model.settings.json").read_text()) == {"model_args": config}


def test_ids_and_counts_of_tokens_are_settings_and_a_scripts_arguments_are_not(tmp_path: Path, go: Run) -> None:
    config = {"bos_token_id": 1, "max_tokens": 2048, "pad_token_id": None, "tokenizer": "gpt2"}
    saved(
        tmp_path / "m" / "model.ckpt", {"config": config, "hyper_parameters": config, "hparams": config, "model": STATE}
    )
    notes = go(tmp_path / "m", tmp_path / "out", size=SIZE).plan.notes
    assert json.loads((tmp_path / "out" / "model.settings.json").read_text()) == {"config": config}
    assert any("skipped hparams" in note for note in notes) and any("skipped hyper_par" in note for note in notes)


def test_settings_that_differ_between_the_files_of_one_checkpoint_are_said(tmp_path: Path, go: Run) -> None:
    names = [*STATE]
    for n, part in enumerate((names[:2], names[2:]), 1):
        state = {name: STATE[name] for name in part}
        value = {"config": {"layers": n}, "model_args": {"same": 1}, "model": state}
        saved(tmp_path / "m" / f"pytorch_model-0000{n}-of-00002.bin", value)
    notes = go(tmp_path / "m", tmp_path / "out", size=SIZE).plan.notes
    written = json.loads((tmp_path / "out" / "model.settings.json").read_text())
    assert written == {"config": {"layers": 1}, "model_args": {"same": 1}}
    assert (
        "pytorch_model-00002-of-00002.bin: ignored its settings in 'config'; the first file has different ones" in notes
    )
    assert not any("'model_args'" in note for note in notes)


def test_settings_that_repeat_one_value_without_end_cost_no_more_than_they_may(tmp_path: Path, go: Run) -> None:
    value: Any = {"x": 1}
    for _ in range(7):
        value = {str(i): value for i in range(100)}
    saved(tmp_path / "m" / "model.pt", {"config": value, "model": STATE})
    assert any("skipped config" in note for note in go(tmp_path / "m", tmp_path / "out", size=SIZE).plan.notes)
