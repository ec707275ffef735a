"""Honest bytes for each target to begin from, as torch and safetensors write them."""

from __future__ import annotations

import io
import json
import tempfile
import warnings
import zipfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save

from tests.fuzz.targets import ZERO_BETWEEN, ZERO_FILES
from tests.support import ggufs
from tests.support.save_ranks import save_ranks
from tests.support.save_zero import Zero, training

STATE = {
    "weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "turned": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
    "count": torch.tensor(3),
}

RULES = rb"""
- '^model\.layers\.(\d+)\.(?P<rest>mlp.*)$': 'h.\1.\g<rest>'
- "\u00c4|(lm_head)": "head\\1"
"""


def _saved(value: object, zipped: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def _pickled(data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        return archive.read(name)


def _metadata() -> bytes:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {k: v.clone() for k, v in STATE.items()}, "step": 3}, checkpoint_id=folder, no_dist=True)
        return (Path(folder) / ".metadata").read_bytes()


def _ranks() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        (path,) = save_ranks(Path(folder), {k: v.contiguous() for k, v in STATE.items()}, (1,))
        return path.read_bytes()


def _zero(kind: bytes) -> bytes:
    made = Zero({"a": torch.arange(15.0)}, 2, 1, [["a"]]) if kind == b"universal" else training(int(kind))
    with tempfile.TemporaryDirectory() as scratch:
        folder = (made.save_universal if kind == b"universal" else made.save)(Path(scratch))
        paths = {path.relative_to(folder).as_posix().removeprefix("bf16_"): path for path in folder.rglob("*.pt")}
        return ZERO_BETWEEN.join([kind, *(paths[name].read_bytes() for name in ZERO_FILES[kind])])


def _gguf(alignment: int | None) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        ggufs.save(path, {"a": ("Q4_0", (2, 32)), "b": ("F32", (3,))}, alignment=alignment)
        return path.read_bytes()


def seeds() -> dict[str, list[bytes]]:
    """For each target, bytes that it should read; those for ``distributed`` name a file that the target has empty."""
    wrapped = {"state_dict": STATE, "epoch": 3, "args": [1, "two", {"three": None}]}
    files = [_saved(STATE), _saved(wrapped)]
    index = {"metadata": {"total_size": 12}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    return {
        "pickle": [_pickled(data) for data in files],
        "zip": [*files, _saved(STATE, zipped=False)],
        "safetensors": [save({k: v.contiguous() for k, v in STATE.items()}, {"format": "pt"})],
        "gguf": [_gguf(None), _gguf(64)],
        "distributed": [_metadata()],
        "ranks": [_ranks()],
        "zero": [_zero(kind) for kind in ZERO_FILES],
        "rules": [RULES, json.dumps([{"^lm_": "x."}, ["mlp", ""]]).encode()],
        "index": [json.dumps(index).encode(), json.dumps(index["weight_map"]).encode()],
    }
