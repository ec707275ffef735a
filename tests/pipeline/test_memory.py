"""Promise 2: the memory of a job does not grow with the model. Each is measured in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reshard.pipeline.checkpoint.formats.safetensors import build_header
from reshard.pipeline.limits import GB, MB, MEMORY_FLOOR
from tests.hub.fixtures import Namespace
from tests.support.giants import deepseek_v3_fp8, save_sparse
from tests.support.measured import measured, pacing, within

JOBS = "tests.pipeline.jobs"


def model_of(folder: Path, size: int) -> Path:
    """A sparse model of ``size`` bytes in two files, of tensors of 40 MB and one that is larger than any window."""
    rows = 10_000
    tensors = [(f"layer.{i}.weight", "BF16", (rows, 2000)) for i in range(size // (rows * 4000) - 3)]
    save_sparse(folder, iter([("embed.weight", "BF16", (3 * rows, 2000)), *tensors]), 2)
    return folder


@pytest.mark.parametrize("size", [pytest.param(300 * MB, marks=pytest.mark.slow), 600 * MB])
def test_a_copy_between_folders_stays_under_the_floor(tmp_path: Path, size: int) -> None:
    model_of(tmp_path / "model", size)
    cost = measured(f"{JOBS}:do_run", str(tmp_path / "model"), str(tmp_path / "out"), {"size": 100 * MB})
    assert cost.result["shards"] >= size // (100 * MB)
    assert cost.peak <= MEMORY_FLOOR


@pytest.mark.parametrize("size", [pytest.param(300 * MB, marks=pytest.mark.slow), 600 * MB])
def test_a_copy_over_http_and_lfs_stays_under_the_floor(tmp_path: Path, namespace: Namespace, size: int) -> None:
    folder = model_of(tmp_path / "model", size)
    repo = namespace.repo("large")
    namespace.admin.create_repo(repo)
    namespace.admin.import_files(repo, {path.name: path for path in folder.iterdir()})
    env = {
        "HF_ENDPOINT": namespace.endpoint,
        "HF_TOKEN": namespace.token,
        "RESHARD_TMPDIR": str(tmp_path),
        "HF_HUB_DISABLE_XET": "1",
    }
    cost = measured(f"{JOBS}:do_run", repo, namespace.repo("cut"), {"size": 100 * MB}, env=env)
    assert cost.result["shards"] >= size // (100 * MB)
    assert cost.peak <= MEMORY_FLOOR


def test_planning_671b_takes_headers_only_and_fits(tmp_path: Path) -> None:
    tensors = save_sparse(tmp_path / "giant", deepseek_v3_fp8(), 270)
    cost = measured(f"{JOBS}:do_plan", str(tmp_path / "giant"), str(tmp_path / "out"), {"size": 5 * GB})
    assert cost.result["tensors"] == tensors > 90_000
    assert cost.peak <= 600 * MB
    assert within(cost.cpu, 20)
    blocks = sum(path.stat().st_blocks * 512 for path in (tmp_path / "giant").iterdir())
    assert blocks < 100 * MB, "the files are holes: nothing of them could have been read"


@pytest.mark.parametrize("tensors", [50_000, pytest.param(500_000, marks=pytest.mark.slow)])
def test_a_run_of_tensors_without_elements_takes_what_their_headers_take(tmp_path: Path, tensors: int) -> None:
    """Half a million took 820 MB: their digests, and the header's text, were held several times over."""
    folder = tmp_path / "empty"
    folder.mkdir()
    names = (f"model.layers.{i // 100}.mlp.{i % 100}.weight" for i in range(tensors))
    (folder / "model.safetensors").write_bytes(build_header(((name, "F32", (0, 4)) for name in names), {}))
    cost = measured(f"{JOBS}:do_run", str(folder), str(tmp_path / "out"), {"size": GB})
    assert cost.peak <= 80 * MB + tensors * 1040


@pytest.mark.parametrize(
    ("tensors", "count", "options"),
    [
        pytest.param(500_000, 2, {"size": MB}, marks=pytest.mark.slow),
        (50_000, 2, {"size": MB}),
        (50_000, 2, {"size": MB, "pack": "layers"}),
        (50_000, 0, {}),
        pytest.param(500_000, 2, {"size": MB, "pack": "layers"}, marks=pytest.mark.slow),
        pytest.param(500_000, 2, {"size": MB, "pack": "balanced"}, marks=pytest.mark.slow),
        pytest.param(500_000, 0, {}, marks=pytest.mark.slow),
    ],
)
def test_planning_half_a_million_tensors_of_one_file_is_linear(
    tmp_path: Path, tensors: int, count: int, options: dict[str, Any]
) -> None:
    """Tensors of ``count`` elements; the header alone has 52 MB, and an index of several shards 37 MB."""
    names = (f"model.layers.{i // 5000}.experts.{i % 5000}.weight" for i in range(tensors))
    folder = tmp_path / "many"
    folder.mkdir()
    header = build_header(((name, "F32", (count,)) for name in names), {"format": "pt"})
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + tensors * count * 4)
    del header
    with pacing() as paces:
        cost = measured(f"{JOBS}:do_plan", str(folder), str(tmp_path / "out"), options)
    assert cost.result["tensors"] == tensors
    of_a_tensor = 1330 if cost.result["shards"] > 1 else 1140  # bytes
    assert cost.peak <= 80 * MB + tensors * of_a_tensor
    # Half a million in 10 s, and the interpreter's start. It was 300 s and more.
    assert within(cost.cpu, tensors / 50_000 + 1, paces)
