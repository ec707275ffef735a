"""Rank files as verl leaves them, each made by torch's own classes; one process stands in for all ranks in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

Divide = Callable[[str, torch.Tensor], Sequence[Placement] | None]


@contextmanager
def as_rank(rank: int, mesh: Sequence[int]) -> Iterator[DeviceMesh]:
    """This process as one rank of such a mesh, whose collectives move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=prod(mesh))
    try:
        yield init_device_mesh("cpu", tuple(mesh))
    finally:
        dist.destroy_process_group()


def by_rows(name: str, tensor: torch.Tensor) -> Sequence[Placement] | None:
    """As FSDP divides: parameters by dimension 0; what has none is no DTensor."""
    return [Shard(0)] if tensor.ndim else None


def by_rows_in_replicas(name: str, tensor: torch.Tensor) -> Sequence[Placement] | None:
    """As FSDP divides over a mesh of two dimensions: the first repeats."""
    return [Replicate(), Shard(0)] if tensor.ndim else None


def part_of(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement] | None) -> torch.Tensor:
    """What the rank at hand has of it."""
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None) if placements is not None else tensor


def rank_path(folder: Path, rank: int, ranks: int) -> Path:
    return folder / f"model_world_size_{ranks}_rank_{rank}.pt"


def save_ranks(
    folder: Path, state: dict[str, torch.Tensor], mesh: Sequence[int] = (2,), divide: Divide = by_rows
) -> list[Path]:
    """A file for each rank of the mesh; returns their paths, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for rank in range(prod(mesh)):
        paths.append(rank_path(folder, rank, prod(mesh)))
        with as_rank(rank, mesh) as here:
            torch.save({name: part_of(t, here, divide(name, t)) for name, t in state.items()}, paths[-1])
    return paths


__all__ = ["DTensor", "as_rank", "by_rows", "by_rows_in_replicas", "part_of", "rank_path", "save_ranks"]
