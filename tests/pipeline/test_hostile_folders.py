"""Folders that cannot be what they seem: each ends as an error that says why, and none as a bug."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from reshard.pipeline.errors import ReshardError, UnsafeName, UnsafePath
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import Run

SIZE = 5000


def weights(folder: Path, name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({f"l{i}": np.full(500, i, np.float32) for i in range(5)}, folder / name)
    return folder


def loop(folder: Path) -> None:
    (folder / "a.txt").symlink_to("b.txt")
    (folder / "b.txt").symlink_to("a.txt")


def nested(folder: Path, name: str, levels: int) -> None:
    home = Path.cwd()
    os.chdir(folder)
    try:
        for _ in range(levels):
            Path(name).mkdir()
            os.chdir(name)
    finally:
        os.chdir(home)


def deep(folder: Path) -> None:
    nested(folder, "d" * 200, 25)


def deeper(folder: Path) -> None:
    nested(folder, "d", 3000)


def below(path: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / path).mkdir()
        (folder / path / "notes.txt").write_text("x")

    return make


def long_name(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    weights(folder, f"{'m' * 240}.safetensors")


@pytest.mark.parametrize(
    ("spoil", "code", "why"),
    [
        (loop, "source.link_loop", "symbolic links"),
        (deep, "source.path_too_long", "too long"),
        (deeper, "source.path_too_long", "more than 200 nested folders"),
        (below("model.safetensors.index.json"), "checkpoint.path_taken", "needs a folder"),
        (below("model-00001-of-00003.safetensors"), "checkpoint.path_taken", "needs a folder"),
        (below("README.md"), "checkpoint.path_taken", "needs a folder"),
        (long_name, "checkpoint.name_too_long", "267 bytes"),
    ],
)
def test_a_source_that_cannot_be_copied_says_why(
    tmp_path: Path, go: Run, spoil: Callable[[Path], None], code: str, why: str
) -> None:
    spoil(weights(tmp_path / "model"))
    try:
        with pytest.raises(ReshardError, match=why) as error:
            go(tmp_path / "model", tmp_path / "out", size=SIZE)
        assert error.value.code == code and not (tmp_path / "out").exists()
    finally:  # Python removes no folder as deep
        subprocess.run(["rm", "-rf", tmp_path / "model"], check=True)


@pytest.mark.parametrize("end", ["x" * 300, "x/" * 3000, "x" * 250, "loop", "a\0b"], ids=lambda end: ascii(end)[:10])
@pytest.mark.parametrize("side", ["source", "target"])
def test_a_path_that_no_system_call_takes_is_not_a_place(tmp_path: Path, go: Run, side: str, end: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    good, bad = weights(tmp_path / "model"), f"{tmp_path}/{end}"
    with pytest.raises(ReshardError) as error:
        go(bad, tmp_path / "out", size=SIZE) if side == "source" else go(good, bad, size=SIZE)
    # 250 bytes are a name, but not with what lies beside a target.
    read = {"x" * 250: "source.no_folder", "loop": "source.link_loop"} if side == "source" else {}
    assert error.value.code == read.get(end, "usage.place")
    if side == "target" and end == "x" * 250:
        assert error.value.facts["value"] == bad and error.value.next_step.startswith("choose a folder with a shorter")


@pytest.mark.parametrize(
    "name", ["no\x1b[2Jtes.txt", "bell\x07.txt", "new\nline.txt", "evil\u202etxt.exe", "c1\x9b.txt"]
)
def test_a_name_that_terminals_obey_is_refused_for_the_hub(
    tmp_path: Path, on_hub: Namespace, go: Run, name: str
) -> None:
    folder = weights(tmp_path / "model")
    (folder / name).write_text("x")
    go(folder, tmp_path / "out", size=SIZE)
    assert (tmp_path / "out" / name).read_text() == "x"
    with pytest.raises(UnsafePath, match="not allowed in a path"):
        go(folder, on_hub.repo("target"), size=SIZE)
    assert not any("/repos/create" in line["path"] for line in on_hub.admin.log())


@pytest.mark.parametrize("name", ["no\x1b[2Jrm", "bell\x07", "nul\0", "new\nline", "evil\u202ethgiew", "c1\x9b"])
def test_a_tensor_whose_name_terminals_obey_is_refused_for_the_hub(
    tmp_path: Path, on_hub: Namespace, go: Run, name: str
) -> None:
    folder = weights(tmp_path / "model")
    tensors = {"good": np.zeros(4, np.float32), f"layer.{name}.weight": np.ones(4, np.float32)}
    save_file(tensors, folder / "model.safetensors")
    go(folder, tmp_path / "out", size=SIZE)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()
    with pytest.raises(UnsafeName, match="tensor name 'layer") as error:
        go(folder, on_hub.repo("target"), size=SIZE)
    assert error.value.code == "checkpoint.unsafe_name" and repr(name)[1:-1] in str(error.value)
    assert not any("/repos/create" in line["path"] for line in on_hub.admin.log())


def test_a_source_file_whose_name_terminals_obey_is_refused_for_the_hub(
    tmp_path: Path, on_hub: Namespace, go: Run
) -> None:
    """Its shards have another name, and the manifest would show it."""
    folder = weights(tmp_path / "model")
    part = "a\x1b[2J.safetensors"
    (folder / "model.safetensors").rename(folder / part)
    index = {"metadata": {}, "weight_map": {f"l{i}": part for i in range(5)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    go(folder, tmp_path / "out", size=SIZE)
    with pytest.raises(UnsafePath, match="not allowed in a path"):
        go(folder, on_hub.repo("target"), size=SIZE)
