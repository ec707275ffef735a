"""A model's weights as several real torch processes write them: FSDP2's sharded state dict."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.formats.saving import State
from tests.support.save_dcp import in_ranks
from tests.support.save_zero import Zero

RANKS = 2

# `nested`: below "model", as accelerate and most trainers write; `wrapped`: the same of a compiled model in
# DistributedDataParallel's naming; `safetensors`: by HuggingFaceStorageWriter;
# `ranks`: each rank's own part by `torch.save`, as verl does.
Form = Literal["nested", "wrapped", "safetensors", "ranks"]


def by_fsdp(model: Any, folder: Path, form: Form) -> State:
    """Each rank writes its rows of every tensor into ``folder``; returns the whole model's state dict."""
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with tempfile.TemporaryDirectory() as scratch:
        in_ranks(RANKS, _save, scratch, model, folder, form)
    return expected


def by_zero(state: State, folder: Path, stage: int, *, universal: bool = False) -> State:
    """As DeepSpeed's optimizer leaves it; returns the whole model's state dict, tied names included."""
    shared: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in state.items():
        if (kept := first.setdefault(tensor.data_ptr(), name)) != name:
            shared[name] = kept
    trained = [name for name in state if name not in shared]
    groups = [[name for name in trained if state[name].ndim > 1], [name for name in trained if state[name].ndim < 2]]
    made = Zero(state, stage, RANKS, groups, shared=shared)
    step = (made.save_universal if universal else made.save)(folder)
    for moments in step.rglob("exp_avg.pt"):
        moments.unlink()  # a line of the plan each
    return made.expected()


def _save(rank: int, scratch: str, model: Any, folder: Path, form: Form) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/rendezvous", rank=rank, world_size=RANKS)
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    state = model.state_dict()
    if form == "safetensors":
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    elif form == "ranks":
        torch.save(state, folder / f"model_world_size_{RANKS}_rank_{rank}.pt")
    elif form == "wrapped":
        dcp.save({f"module._orig_mod.{name}": tensor for name, tensor in state.items()}, checkpoint_id=folder)
    else:
        dcp.save({"model": state, "step": 7}, checkpoint_id=folder)
    dist.destroy_process_group()
