"""Makes distributed checkpoints with real torch processes: ``python -m tests.support.save_dcp FOLDER RANKS``.

Below FOLDER it leaves one folder per layout, and ``expected.bin``, the whole model as one process has it.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


class Model(nn.Module):
    """Sizes that no number of ranks divides, an empty last shard, two dtypes, a tied pair and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.conv = nn.Conv2d(6, 5, 3)
        self.stats = nn.BatchNorm1d(4)
        self.tiny = nn.Linear(6, 1)
        self.narrow = nn.Linear(6, 10, bias=False, dtype=torch.bfloat16)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight


def save_all(rank: int, ranks: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))

    sharded = Model()
    fully_shard(sharded.narrow, mesh=mesh)  # a group has one dtype
    fully_shard(sharded, mesh=mesh)
    optimizer = torch.optim.Adam(sharded.parameters())
    for parameter in sharded.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    dcp.save(sharded.state_dict(), checkpoint_id=folder / "fsdp2-flat")
    dcp.save({"model": sharded.state_dict()}, checkpoint_id=folder / "fsdp2-nested")
    (folder / "ranks").mkdir(exist_ok=True)
    torch.save(sharded.state_dict(), folder / "ranks" / f"model_world_size_{ranks}_rank_{rank}.pt")
    everything = {
        "model": get_model_state_dict(sharded),
        "optim": get_optimizer_state_dict(sharded, optimizer),
        "step": 3,
        "loss": torch.tensor(0.5),
    }
    dcp.save(everything, checkpoint_id=folder / "trainer")

    # Rank by rank in column blocks where there are columns, which FSDP2 calls shard_placement_fn.
    full = Model().state_dict()
    columns = {
        name: distribute_tensor(tensor, mesh, [Shard(tensor.ndim - 1)] if tensor.ndim > 1 else [Replicate()])
        for name, tensor in full.items()
    }
    dcp.save(columns, checkpoint_id=folder / "columns")

    # Sharded along two dimensions at once, as FSDP beside tensor parallelism does.
    plane = init_device_mesh("cpu", (2, ranks // 2)) if ranks % 2 == 0 else None
    grid = {
        name: distribute_tensor(tensor, plane, [Shard(0), Shard(1) if tensor.ndim > 1 else Replicate()])
        for name, tensor in full.items()
        if plane is not None and tensor.ndim
    }
    if grid:
        dcp.save({"model": grid}, checkpoint_id=folder / "grid")

    rows = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in full.items() if tensor.ndim}
    rows.pop("head.weight")  # the writer refuses tied tensors
    dcp.save(rows, storage_writer=HuggingFaceStorageWriter(str(folder / "safetensors"), save_distributed=True))

    for original in (True, False):
        old = FullyShardedDataParallel(
            nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)),
            device_id=torch.device("cpu"),
            use_orig_params=original,
            device_mesh=mesh,  # else its parts are no DTensors
        )
        with FullyShardedDataParallel.state_dict_type(
            old, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=True)
        ):
            dcp.save({"model": old.state_dict()}, checkpoint_id=folder / f"fsdp1-{original}")
            (folder / f"ranks-{original}").mkdir(exist_ok=True)
            torch.save(old.state_dict(), folder / f"ranks-{original}" / f"model_world_size_{ranks}_rank_{rank}.pt")
        with FullyShardedDataParallel.summon_full_params(old):
            if rank == 0:
                torch.save(
                    {name.replace("_fsdp_wrapped_module.", ""): p.detach() for name, p in old.named_parameters()}
                    if original
                    else dict(old.module.state_dict()),
                    folder / f"fsdp1-{original}.bin",
                )
    if rank == 0:
        torch.save(full, folder / "expected.bin")
    dist.destroy_process_group()


ZEROS = (4, 10_000)  # of `save_zeros`: how many tensors, and their rows


def save_zeros(folder: str, size: int, dimension: int, ranks: int = 2) -> int:
    """A checkpoint of about ``size`` bytes of bfloat16 zeros, sharded along ``dimension``; returns the exact bytes.

    Memory that was never written to takes none, so neither a rank nor whoever calls this grows with the size.
    """
    count, rows = ZEROS
    columns = size // (count * rows * 2 * ranks) * ranks
    in_ranks(ranks, _save_zeros, ranks, Path(folder), (count, rows, columns), dimension)
    return count * rows * columns * 2


def _save_zeros(rank: int, ranks: int, folder: Path, extent: tuple[int, int, int], dimension: int) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    count, *shape = extent
    shape[dimension] //= ranks
    local = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(count)]
    state = {
        f"layer.{i}.weight": DTensor.from_local(part, mesh, [Shard(dimension)], run_check=False)
        for i, part in enumerate(local)
    }
    dcp.save(state, checkpoint_id=folder)
    dist.destroy_process_group()


def in_ranks(ranks: int, work: Callable[..., None], *arguments: object) -> None:
    """``work(rank, *arguments)`` in that many processes; raises when one fails."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=work, args=(rank, *arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError(f"a rank failed: {[process.exitcode for process in processes]}")


def main() -> None:
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    in_ranks(ranks, save_all, ranks, folder)


if __name__ == "__main__":
    main()
