"""Two layouts of one checkpoint: any in which loaders find it will do, and no other."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from reshard.pipeline.places import Folder
from reshard.pipeline.renaming import Rule
from reshard.pipeline.request import Options
from reshard.pipeline.stores.folder.source import FolderSource
from reshard.pipeline.verifying.compare import check_headers, check_stored, dropped_copies, read
from reshard.pipeline.verifying.opened import OpenedSide, paired
from tests.support.measured import within
from tests.support.models import Arrays, arrays, numbered, save_sharded, save_single

TENSORS = arrays(4, 400)
INDEX = "model.safetensors.index.json"


def found(output: Path, source: Path) -> tuple[str, ...]:
    theirs, ours = (OpenedSide.open(FolderSource.open(Folder(path=str(folder)))) for folder in (source, output))
    return check_headers(paired(theirs, ours), {}).findings


TORCHAO = {"tensor_names": '["w"]', "w": '{"_type": "Float8Tensor"}'}
PLAIN = {"modelspec.title": "x", "b": "layer.0.weight"}


@pytest.mark.parametrize(
    ("theirs", "ours", "result", "told"),
    [
        ([PLAIN], [PLAIN, PLAIN], "passed", ""),
        (
            [PLAIN],
            [PLAIN, {}],
            "inconclusive",
            "only some files' metadata has 'modelspec.title', and in the source every",
        ),
        ([PLAIN, {}], [PLAIN, {}], "passed", ""),
        ([PLAIN, {}], [{}, PLAIN, PLAIN], "passed", ""),
        ([PLAIN, {}], [{}], "inconclusive", "the files' metadata lacks 'modelspec.title', which the source's has"),
        ([{"b": "layer.0.weight"}], [{}], "passed", ""),
        ([PLAIN, {"more": "y"}], [PLAIN | {"more": "y"}], "passed", ""),
        ([PLAIN], [PLAIN | {"more": "y"}], "passed", ""),
        ([PLAIN], [{}], "inconclusive", "the files' metadata lacks 'modelspec.title', which the source's has"),
        ([PLAIN], [PLAIN | {"modelspec.title": "y"}], "inconclusive", "has another value of 'modelspec.title' than"),
        ([PLAIN], [PLAIN, {"modelspec.title": "y"}], "inconclusive", "has another value of 'modelspec.title' than"),
        ([{"a": "1"}, {"a": "2"}], [{"a": "1"}, {"a": "1"}], "passed", ""),
        ([{"a": "1"}, {"a": "2"}], [{"a": "2"}, {"a": "2"}], "passed", ""),
        ([{"a": "1"}, {"a": "2"}], [{"a": "1"}, {"a": "2"}], "passed", ""),
        ([{"a": "1"}, {"a": "2"}], [{"a": "3"}], "inconclusive", "has another value of 'a' than the source's"),
        (
            [{"a": "1"}, {"a": "2"}],
            [{"a": "1"}, {"a": "3"}],
            "inconclusive",
            "has another value of 'a' than the source",
        ),
        ([TORCHAO], [TORCHAO, TORCHAO], "passed", ""),
        ([TORCHAO], [TORCHAO, {}], "passed", ""),
        ([TORCHAO], [{"tensor_names": '["w"]'}], "failed", "the files' metadata lacks 'w', which the source's has"),
        ([TORCHAO], [TORCHAO, TORCHAO | {"w": "{}"}], "failed", "has another value of 'w' than the source's"),
    ],
)
@pytest.mark.parametrize("kind", [{"format": "pt"}, {}])
def test_what_the_files_say_of_themselves_is_carried(
    kind: dict[str, str],
    theirs: list[dict[str, str]],
    ours: list[dict[str, str]],
    result: str,
    told: str,
    tmp_path: Path,
) -> None:
    sides = []
    for side, files in (("theirs", theirs), ("ours", ours)):
        save_sharded(tmp_path / side, numbered(TENSORS, len(files)))
        for file, metadata in zip(sorted((tmp_path / side).glob("*.safetensors")), files, strict=True):
            save_file(load_file(file), file, metadata=metadata | kind)
        sides.append(OpenedSide.open(FolderSource.open(Folder(path=str(tmp_path / side)))))
    check = check_headers(paired(*sides), {})
    assert check.result == result
    said = "; ".join([*check.findings, check.reason])
    assert told in said and "'b'" not in said, "which is tied to another, as the output says where it drops it"


def test_torch_files_cannot_hold_what_safetensors_files_say_of_themselves(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    torch_file("pytorch_model.bin")(tmp_path / "ours")
    for metadata, result in ((PLAIN, "passed"), (TORCHAO, "failed")):
        save_file(TENSORS, tmp_path / "theirs" / "model.safetensors", metadata=metadata | {"format": "pt"})
        sides = [OpenedSide.open(FolderSource.open(Folder(path=str(tmp_path / name)))) for name in ("theirs", "ours")]
        assert check_headers(paired(*sides), {}).result == result


@pytest.mark.parametrize(
    ("metadata", "ours", "result"),
    [
        (TORCHAO, TORCHAO, "inconclusive"),
        (TORCHAO, {"tensor_names": '["v"]', "v": TORCHAO["w"]}, "inconclusive"),
        ({"b": "layer.0.weight"}, {}, "passed"),
    ],
)
def test_whether_torchaos_metadata_follows_other_names_is_left_open(
    metadata: dict[str, str], ours: dict[str, str], result: str, tmp_path: Path
) -> None:
    renamed = {f"model.{name}": array for name, array in TENSORS.items()}
    for side, tensors, texts in (("theirs", TENSORS, metadata), ("ours", renamed, ours)):
        (tmp_path / side).mkdir()
        save_file(tensors, tmp_path / side / "model.safetensors", metadata=texts | {"format": "pt"})
    source, output = (FolderSource.open(Folder(path=str(tmp_path / side))) for side in ("theirs", "ours"))
    changes = Options(rename=(Rule("^", "model."),))
    check = check_headers(paired(OpenedSide.open(source, changes), OpenedSide.open(output)), {})
    assert check.result == result and ("torchao's metadata is not compared" in check.reason) == (metadata is TORCHAO)


def single(name: str, config: str | None = "") -> Callable[[Path], None]:
    """One safetensors file, and a config in a folder."""

    def save(folder: Path) -> None:
        save_single(folder / Path(name).parent, TENSORS, Path(name).name)
        add_config(folder, config)

    return save


def sharded(index: str = INDEX, stem: str = "model", config: str | None = "") -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        save_sharded(folder / Path(index).parent, numbered(TENSORS, 3, stem), Path(index).name)
        add_config(folder, config)

    return save


def torch_file(name: str, config: str | None = "") -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(as_torch(TENSORS), folder / name)
        add_config(folder, config)

    return save


def distributed(into: str = "") -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        from torch.distributed.checkpoint import FileSystemWriter
        from torch.distributed.checkpoint import save as save_distributed

        save_distributed(as_torch(TENSORS), storage_writer=FileSystemWriter(str(folder / into)), no_dist=True)

    return save


def in_parts(folder: Path) -> None:
    """Two files with half of each tensor, as DCP writes safetensors."""
    folder.mkdir()
    for number in range(2):
        halves = {name: np.array_split(array, 2)[number] for name, array in TENSORS.items()}
        starts = {name: number * len(np.array_split(array, 2)[0]) for name, array in TENSORS.items()}
        at = {name: {"saved_offsets": [start, *[0] * (TENSORS[name].ndim - 1)]} for name, start in starts.items()}
        metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(at)}
        save_file(halves, folder / f"model-{number + 1:05}-of-00002.safetensors", metadata=metadata)


def ranks(folder: Path) -> None:
    folder.mkdir()
    torch.save(as_torch(TENSORS), folder / "model_world_size_1_rank_0.pt")


def as_torch(tensors: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in tensors.items()}


def add_config(folder: Path, where: str | None) -> None:
    if where is not None:
        (folder / where / "config.json").write_text("{}")


Layout = Callable[[Path], None]

SAME: dict[str, tuple[Layout, Layout]] = {
    "one file and several": (single("model.safetensors"), sharded()),
    "torch and safetensors": (torch_file("pytorch_model.bin"), single("model.safetensors")),
    "torch and several": (torch_file("pytorch_model.bin"), sharded()),
    "torch under a name of its own": (torch_file("weights.pt"), single("model.safetensors")),
    "torch and the same name": (torch_file("weights.pt", None), single("weights.safetensors", None)),
    "a folder of diffusers": (
        torch_file("unet/diffusion_pytorch_model.bin", "unet"),
        sharded("unet/diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model", "unet"),
    ),
    "a variant": (
        single("model.fp16.safetensors"),
        sharded("model.safetensors.index.fp16.json", "model.fp16"),
    ),
    "mistral's own": (single("consolidated.safetensors"), sharded("consolidated.safetensors.index.json", "con")),
    "mistral's in torch": (torch_file("consolidated.00.pth"), single("consolidated.safetensors")),
    "a name of the owner's": (single("own.safetensors"), sharded("own.safetensors.index.json", "own")),
    "a name of the owner's that became usual": (single("own.safetensors"), single("model.safetensors")),
    "torch's name in safetensors that became usual": (single("pytorch_model.safetensors"), single("model.safetensors")),
    "accelerate's index": (sharded("index.json"), sharded()),
    "accelerate's index of a name": (sharded("own.index.json"), sharded("own.safetensors.index.json")),
    "distributed": (distributed(), single("model.safetensors", None)),
    "distributed in a folder": (distributed("step_100"), single("model.safetensors")),
    "distributed and in parts": (distributed(), in_parts),
    "in parts": (in_parts, single("model.safetensors", None)),
    "distributed, one up": (distributed("pytorch_model_fsdp_0"), single("model.safetensors")),
}


@pytest.mark.parametrize("name", SAME)
def test_a_layout_that_loaders_find_is_as_good_as_another(name: str, tmp_path: Path) -> None:
    for folder, layout in zip((tmp_path / "source", tmp_path / "output"), SAME[name], strict=True):
        layout(folder)
    assert found(tmp_path / "output", tmp_path / "source") == ()


@pytest.mark.parametrize("name", [name for name in SAME if "became" not in name and "own name" not in name])
def test_a_layout_is_as_good_as_its_own_copy_and_the_other_way_round(name: str, tmp_path: Path) -> None:
    for layout in SAME[name]:
        shutil.rmtree(tmp_path / "one", ignore_errors=True)
        layout(tmp_path / "one")
        assert found(tmp_path / "one", tmp_path / "one") == ()


MOVED: dict[str, tuple[Layout, Layout, str]] = {
    "a file": (single("model.safetensors"), single("weights.safetensors"), "weights.safetensors"),
    "a file to torch's name": (single("model.safetensors"), single("pytorch_model.safetensors"), "pytorch_model.safet"),
    "a folder": (single("model.safetensors"), single("sub/model.safetensors"), "sub/model.safetensors"),
    "a folder and the config": (single("model.safetensors"), single("s/model.safetensors", "s"), "s/model.safetensors"),
    "an index": (sharded(), sharded("weights.safetensors.index.json"), "weights.safetensors.index.json"),
    "a bare index": (sharded(), sharded("weights.index.json"), "weights.index.json"),
    "accelerate's index": (sharded(), sharded("index.json"), "index.json"),
    "a variant": (single("model.safetensors"), single("model.fp16.safetensors"), "model.fp16.safetensors"),
    "another library's": (single("model.safetensors"), single("diffusion_pytorch_model.safetensors"), "diffusion_"),
    "out of a folder": (
        single("unet/diffusion_pytorch_model.safetensors", "unet"),
        single("diffusion_pytorch_model.safetensors", None),
        "diffusion_pytorch_model.safetensors",
    ),
    "a torch file": (torch_file("pytorch_model.bin"), torch_file("weights.bin"), "weights.bin"),
    "from torch": (torch_file("pytorch_model.bin"), single("weights.safetensors"), "weights.safetensors"),
    "to distributed": (single("model.safetensors", None), distributed(), "__0_0.distcp"),
    "to parts": (single("model.safetensors", None), in_parts, "model-00001-of-00002.safetensors"),
    "several to parts": (sharded(config=None), in_parts, "model-00001-of-00002.safetensors"),
    "torch to parts of ranks": (torch_file("pytorch_model.bin", None), ranks, "model_world_size_1_rank_0.pt"),
    "from distributed": (distributed(), single("weights.safetensors", None), "weights.safetensors"),
    "from distributed to a folder": (distributed(), single("sub/model.safetensors", None), "sub/model.safetensors"),
}


@pytest.mark.parametrize("name", MOVED)
def test_a_layout_that_loaders_do_not_find_is_a_finding(name: str, tmp_path: Path) -> None:
    source, output, entry = MOVED[name]
    source(tmp_path / "source")
    output(tmp_path / "output")
    (finding,) = found(tmp_path / "output", tmp_path / "source")
    assert finding.startswith(entry)
    assert "it is " in finding


def test_many_lost_tensors_are_told_in_time_that_grows_with_their_number(tmp_path: Path) -> None:
    made = {f"layer.{number}.w": np.zeros(2, np.float32) for number in range(12_000)}
    save_single(tmp_path / "source", made)
    save_single(tmp_path / "output", {name: made[name] for name in list(made)[::2]})
    theirs, ours = (OpenedSide.open(FolderSource.open(Folder(path=str(tmp_path / n)))) for n in ("source", "output"))
    (pair,) = paired(theirs, ours).pairs
    start = time.process_time()
    assert dropped_copies(pair, ours, {}) == {}
    assert within(time.process_time() - start, 1.0)


def test_stored_bytes_pass_only_if_every_file_has_a_hash(tmp_path: Path) -> None:
    save_sharded(tmp_path, numbered(TENSORS, 2))
    side = OpenedSide.open(FolderSource.open(Folder(path=str(tmp_path))))
    for hashed, result in ((0, "inconclusive"), (1, "inconclusive"), (2, "passed")):
        files = tuple(
            replace(file, sha256=sha256((tmp_path / file.path).read_bytes()).hexdigest()) if number < hashed else file
            for number, file in enumerate(side.opened.files)
        )
        known = replace(side, opened=replace(side.opened, files=files))
        assert check_stored(known, read(known, lambda count: None, tmp_path)).result == result
