"""States of training, and what a job made of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

SIZE = 20_000
State = dict[str, torch.Tensor]


def state_of(count: int = 8) -> State:
    """Tensors of many kinds; some transposed, some views of one storage, some tied, one empty, one scalar."""
    random = torch.Generator().manual_seed(0)
    made: State = {}
    for i in range(count):
        made[f"layer.{i}.weight"] = torch.randn(30, 30, generator=random)
        made[f"layer.{i}.transposed"] = torch.randn(20, 40, generator=random).t()
    base = torch.randn(64, 16, generator=random)
    made["view.rows"] = base[8:24]
    made["view.columns"] = base[:, 3:9]
    made["tied.a"] = made["tied.b"] = torch.randn(40, 10, generator=random)
    made["half"] = torch.randn(33, generator=random).to(torch.bfloat16)
    made["expanded"] = torch.randn(1, 12, generator=random).expand(5, 12)
    made["counts"] = torch.arange(100)
    made["flags"] = torch.tensor([True, False, True])
    made["empty"] = torch.empty(0, 4)
    made["scalar"] = torch.tensor(3.5)
    return made


def state_of_plain() -> State:
    """What safetensors' own writer takes: 40 kB of tensors that share nothing."""
    return {f"layer.{i}.weight": torch.full((50, 20), float(i)) for i in range(10)}


def output(folder: Path) -> State:
    found: State = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        there = found[name]
        assert (there.dtype, there.shape) == (tensor.dtype, tensor.shape), name
        raw = (there.contiguous().reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8))
        assert torch.equal(*raw), name
