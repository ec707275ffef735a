"""Makes ZeRO checkpoints with the real DeepSpeed, on a CPU: ``python -m tests.support.save_deepspeed FOLDER RANKS``.

Below FOLDER it leaves a folder for each layout, as DeepSpeed saves it after two steps, with the universal checkpoint
that its own script makes of it; beside it, in ``-fp32.bin``, is what its `zero_to_fp32` makes of it.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.save_dcp import in_ranks

# Stage, and what more its configuration says.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero1": (1, {}),
    "zero2": (2, {}),
    "zero3": (3, {"stage3_param_persistence_threshold": 0}),
    "zero3-subgroups": (3, {"sub_group_size": 50}),
}


class Model(nn.Module):
    """Sizes that no number of ranks divides, frozen parameters, a tied pair, buffers of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 7)
        self.back = nn.Linear(7, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.register_buffer("shift", torch.linspace(0, 1, 6))
        self.register_buffer("seen", torch.tensor(3))
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.norm(self.back(self.frozen(self.embed(ids)))) * self.scale + self.shift.to(self.scale.dtype)
        return self.head(found).float().square().mean()


def save_all(rank: int, ranks: int, folder: Path, port: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
    }
    import deepspeed

    deepspeed.init_distributed("gloo")
    for layout, (stage, more) in LAYOUTS.items():
        torch.manual_seed(7)
        model = Model()
        decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
        others = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage, **more},
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=config)
        for step in range(2):
            engine.backward(engine(torch.arange(4) + rank + step))
            engine.step()
        engine.save_checkpoint(str(folder / layout))
    torch.distributed.destroy_process_group()


def convert(folder: Path) -> None:
    """What DeepSpeed's own scripts make of each."""
    from deepspeed.checkpoint.ds_to_universal import main as to_universal
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    for layout in LAYOUTS:
        home = folder / layout
        torch.save(get_fp32_state_dict_from_zero_checkpoint(str(home)), folder / f"{layout}-fp32.bin")
        usual = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": False}
        to_universal(
            argparse.Namespace(
                input_folder=str(home / "global_step2"),
                output_folder=str(home / "global_step2_universal"),
                inject_missing_state=True,
                **usual,
            )
        )


def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    in_ranks(ranks, save_all, ranks, folder, port)
    convert(folder)


if __name__ == "__main__":
    main()
