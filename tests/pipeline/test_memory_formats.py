"""The memory of a job does not grow with the checkpoint, whatever its format: not with torch files, not with
distributed ones or those of DeepSpeed, not with casts. Each whole job runs in a process of its own, which never imports
torch."""

from __future__ import annotations

import json
import shutil
import struct
import sys
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

import pytest
import torch

from reshard.pipeline.checkpoint.formats.gguf import build_header
from reshard.pipeline.limits import GB, MB, MEMORY_FLOOR
from tests.support.giants import Spec, save_sparse
from tests.support.measured import Measured, measured
from tests.support.save_zero import Zero

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads its peak memory from /proc")

JOBS = "tests.pipeline.jobs"
ROWS = 10_000
SMALL = 600 * MB  # several times the bound


def sizes(*large: int) -> list[object]:
    """A small one, and the ones that were promised, which take minutes and disk."""
    return [SMALL, *(pytest.param(size, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]) for size in large)]


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Path]:
    """A folder that is gone at once: what is written there is as large as it says."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def reshard(source: Path, target: Path, **options: object) -> Measured:
    env = {"RESHARD_TMPDIR": str(target.parent)}
    return measured(f"{JOBS}:do_run", str(source), str(target), {"size": 2 * GB, **options}, env=env, timeout=1700)


@pytest.mark.parametrize("size", sizes(14_500 * MB, 29_000 * MB))
def test_a_torch_file_of_plain_and_transposed_tensors(room: Path, size: int) -> None:
    source = room / "model"
    source.mkdir()
    columns = size // (8 * ROWS * 4)
    shape = (ROWS, columns)
    with torch.serialization.skip_data():  # a sparse file, whose bytes are all zero
        state = {f"layer.{i}.weight": torch.empty(shape) if i % 4 else torch.empty(columns, ROWS).T for i in range(8)}
        torch.save(state, source / "pytorch_model.bin")
    cost = reshard(source, room / "out")
    assert cost.result["bytes"] == 8 * ROWS * columns * 4
    assert not cost.result["torch"]
    assert cost.peak <= MEMORY_FLOOR


def strings(texts: Iterator[str]) -> bytes:
    raw = [text.encode() for text in texts]
    return struct.pack("<IIQ", 9, 8, len(raw)) + b"".join(struct.pack("<Q", len(text)) + text for text in raw)


@pytest.mark.slow
@pytest.mark.parametrize("size", [200 * MB, *sizes(30_000 * MB)[1:]])
def test_a_gguf_file_with_a_large_vocabulary(room: Path, size: int) -> None:
    tokens = 262_144
    keys = {
        "general.architecture": struct.pack("<IQ", 8, 5) + b"llama",
        "tokenizer.ggml.tokens": strings(f"token{i}" for i in range(tokens)),
        "tokenizer.ggml.merges": strings(f"{i % 999} {i}" for i in range(2 * tokens)),
    }
    rows = size // 8 // 144
    header = build_header(((f"blk.{i}.ffn_up.weight", "Q4_K", (rows, 256)) for i in range(8)), keys)
    assert len(header) > 12 * MB
    (room / "model").mkdir()
    with (room / "model" / "model.gguf").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 8 * (rows * 144 + -rows * 144 % 32))
    del header, keys
    cost = reshard(room / "model", room / "out", size=max(size // 4, 40 * MB))
    assert cost.result["bytes"] == 8 * rows * 144 and cost.result["shards"] >= 4
    assert cost.peak <= MEMORY_FLOOR


@pytest.mark.slow
@pytest.mark.parametrize("dimension", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("size", sizes(3200 * MB, 6400 * MB))
def test_a_distributed_checkpoint(room: Path, size: int, dimension: int) -> None:
    source = room / "model"
    source.mkdir()
    total = measured("tests.support.save_dcp:save_zeros", str(source), size, dimension).result
    cost = reshard(source, room / "out")
    assert cost.result["bytes"] == total
    assert not cost.result["torch"]
    assert cost.peak <= MEMORY_FLOOR


@pytest.mark.slow
@pytest.mark.parametrize("size", sizes(6 * GB))
def test_a_zero_3_checkpoint_of_eight_ranks(room: Path, size: int) -> None:
    columns = size // (8 * ROWS * 4)
    state = {f"layer.{i}.weight": torch.empty(ROWS, columns, device="meta") for i in range(8)}
    made = Zero(state, 3, 8, [[*state][:5], [*state][5:]], blank=True)
    with torch.serialization.skip_data():
        made.save(room / "model")
    cost = reshard(room / "model", room / "out")
    assert cost.result["bytes"] == 8 * ROWS * columns * 4
    assert not cost.result["torch"]
    assert cost.peak <= MEMORY_FLOOR


@pytest.mark.parametrize("size", sizes(3 * GB, 6 * GB))
def test_a_cast(room: Path, size: int) -> None:
    shape = (ROWS, size // (6 * ROWS * 4))
    save_sparse(room / "model", iter([(f"layer.{i}.weight", "F32", shape) for i in range(6)]), 2)
    cost = reshard(room / "model", room / "out", dtype="bfloat16")
    assert cost.result["bytes"] == 6 * ROWS * shape[1] * 2
    assert not cost.result["torch"]
    assert cost.peak <= MEMORY_FLOOR


BECOMES = {"F8_E4M3": 2, "U8": 4}  # bytes of plain weights for each byte


def in_fp8(size: int) -> Iterator[Spec]:
    """Weights of 500 MB at most, each before its scale, so that it waits on disk."""
    count = 1 + size // (500 * MB)
    columns = size // count // ROWS
    for i in range(count):
        yield f"layer.{i}.weight", "F8_E4M3", (ROWS, columns)
        yield f"layer.{i}.weight_scale_inv", "F32", (-(-ROWS // 128), -(-columns // 128))


def in_mxfp4(size: int) -> Iterator[Spec]:
    """The same of matrices as gpt-oss' experts have."""
    count = 1 + size // (500 * MB)
    shape = (size // count // (5760 * 90 * 17), 5760, 90)
    for i in range(count):
        yield f"layer.{i}.gate_up_proj_blocks", "U8", (*shape, 16)
        yield f"layer.{i}.gate_up_proj_scales", "U8", shape


def quantised(folder: Path, specs: Sequence[Spec], method: str) -> int:
    """Saves the model; returns how many bytes its plain weights have."""
    save_sparse(folder, iter(specs), 2)
    settings = {"quant_method": method, "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return sum(prod(shape) * BECOMES[dtype] for name, dtype, shape in specs if "scale" not in name)


@pytest.mark.slow
def test_a_quantised_model_made_plain(room: Path) -> None:
    plain = quantised(room / "model", [*in_mxfp4(100 * MB)], "mxfp4")
    cost = reshard(room / "model", room / "out", dtype="bfloat16", dequantize=True)
    assert cost.result["bytes"] == plain
    assert not cost.result["torch"]
    assert cost.peak <= MEMORY_FLOOR


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("specs", "method"), [(in_fp8(20 * GB), "fp8"), (in_mxfp4(5 * GB), "mxfp4")])
def test_a_large_quantised_model_made_plain(room: Path, specs: Iterator[Spec], method: str) -> None:
    """The 40 and 19 GB that it becomes go as soon as the sink has them, so that they need little disk."""
    plain = quantised(room / "model", [*specs], method)
    wishes = {"size": 2 * GB, "dtype": "bfloat16", "dequantize": True}
    env = {"RESHARD_TMPDIR": str(room)}
    cost = measured(f"{JOBS}:do_copy_away", str(room / "model"), str(room / "out"), wishes, env=env, timeout=3500)
    assert cost.result == {"bytes": plain, "torch": False}
    assert cost.peak <= MEMORY_FLOOR
