"""Writes ZeRO checkpoints as DeepSpeed 0.19 does, without it: the same dictionaries, under the same names of classes.

Its partitions and paddings are those of `deepspeed/runtime/zero/stage_1_and_2.py` and `partition_parameters.py`. A slow
test reads what the real DeepSpeed wrote.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

State = dict[str, torch.Tensor]
STEP = 9


class ZeroStageEnum(int, Enum):
    optimizer_states = 1
    gradients = 2
    weights = 3


class LossScaler:
    cur_scale = 1.0


@dataclass
class FragmentAddress:
    numel: int
    start: int


_CLASSES: dict[str, type] = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": ZeroStageEnum,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": LossScaler,
    "deepspeed.utils.tensor_fragment.fragment_address": FragmentAddress,
}


@contextmanager
def deepspeeds_names() -> Iterator[None]:
    """Pickles made meanwhile name the classes above as DeepSpeed's."""
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "deepspeed"}
    for name, kind in _CLASSES.items():
        module, _, kind.__name__ = name.rpartition(".")
        kind.__module__, kind.__qualname__ = module, kind.__name__
        for end in range(module.count(".") + 1):
            part = ".".join(module.split(".")[: end + 1])
            sys.modules.setdefault(part, ModuleType(part))
        setattr(sys.modules[module], kind.__name__, kind)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed" and name not in kept]:
            del sys.modules[name]


@dataclass
class Zero:
    """A training whose state a test may change before it is written.

    ``groups`` are the optimizer's, by name; ``shared`` names are tied to others. What else is in ``state`` is frozen,
    but for ``buffers``.
    """

    state: State
    stage: int
    ranks: int = 2
    groups: Sequence[Sequence[str]] = ()
    buffers: Sequence[str] = ()
    shared: Mapping[str, str] = field(default_factory=dict)
    gap: int = 0  # elements behind each parameter of stages 1 and 2
    step: int = STEP
    blank: bool = False  # the flat arrays hold nothing, and need no memory

    @property
    def trained(self) -> list[str]:
        return [name for group in self.groups for name in group]

    @property
    def frozen(self) -> list[str]:
        known = {*self.trained, *self.buffers, *self.shared}
        return [name for name in self.state if name not in known]

    def _flat(self, parts: list[torch.Tensor], size: int) -> torch.Tensor:
        """``parts`` one behind the other, with sevens up to ``size``."""
        if self.blank:
            return torch.empty(size)
        made = torch.full((size,), 7.0)
        together = torch.cat([part.reshape(-1).float() for part in parts]) if parts else torch.empty(0)
        made[: len(together)] = together[:size]
        return made

    def partition(self, rank: int) -> list[torch.Tensor]:
        """The flat arrays of one rank."""
        found = []
        for group in self.groups:
            if self.stage == 3:
                shares = [-(-self.state[name].numel() // self.ranks) for name in group]
                parts = [self.share(self.state[name], rank) for name in group] if not self.blank else []
                found.append(self._flat(parts, sum(shares)))
                continue
            needed = sum(self.state[name].numel() + self.gap for name in group)
            unit = 2 * self.ranks
            each = -(-needed // unit) * unit // self.ranks
            if self.blank:
                found.append(torch.empty(min(each, max(0, needed - rank * each))))
                continue
            gap = torch.full((self.gap,), 7.0)
            whole = self._flat([part for name in group for part in (self.state[name], gap)], each * self.ranks)
            found.append(whole[rank * each : min(needed, (rank + 1) * each)].clone())
        return found

    def share(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """One rank's part of a parameter in stage 3, the last ones filled up."""
        size = -(-tensor.numel() // self.ranks)
        filled = torch.full((size * self.ranks,), 7.0, dtype=tensor.dtype)
        filled[: tensor.numel()] = tensor.reshape(-1)
        return filled[rank * size : (rank + 1) * size].clone()

    def optimizer(self, rank: int) -> dict[str, Any]:
        """The content of one rank's `*_optim_states.pt`."""
        flat = self.partition(rank)
        kinds = ("exp_avg", "exp_avg_sq")
        moments = {
            i: {"step": torch.tensor(float(self.step))}
            | {kind: torch.empty_like(one) if self.blank else torch.full_like(one, 5.0) for kind in kinds}
            for i, one in enumerate(flat)
        }
        base = {"state": moments, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0]}]}
        state: dict[str, Any] = {"loss_scaler": LossScaler(), "dynamic_loss_scale": False, "overflow": False}
        if self.stage == 3:
            state |= {"zero_stage": ZeroStageEnum(3), "partition_count": self.ranks}
            state |= {"optimizer_state_dict": base, "fp32_flat_groups": flat}
        else:
            state |= {"clip_grad": 1.0, "base_optimizer_state": base, "single_partition_of_fp32_groups": flat}
            state |= {"zero_stage": ZeroStageEnum(self.stage), "partition_count": [self.ranks] * len(flat)}
            state["param_slice_mappings"] = [OrderedDict(x=FragmentAddress(numel=1, start=0)) for _ in flat]
            if self.gap:
                state["param_alignment_paddings"] = [[self.gap] * len(group) for group in self.groups]
        return {"optimizer_state_dict": state, "ds_config": {"zero_optimization": {}}, "ds_version": "0.19.8"}

    def model(self, rank: int) -> dict[str, Any]:
        """The content of one rank's `*_model_states.pt`."""
        module = OrderedDict(
            (name, tensor if name in self.buffers or self.stage < 3 else torch.empty(0, dtype=tensor.dtype))
            for name, tensor in self.state.items()
        )
        if self.stage < 3 and self.blank:
            module = OrderedDict()
        frozen = {name: self.state[name] for name in self.frozen} if self.stage > 1 else {}
        return {
            "module": module,
            "buffer_names": list(self.buffers),
            "optimizer": None,
            "param_shapes": [OrderedDict((name, self.state[name].shape) for name in group) for group in self.groups],
            "frozen_param_shapes": OrderedDict((name, tensor.shape) for name, tensor in frozen.items()),
            "shared_params": dict(self.shared) if rank == 0 else {},
            "frozen_param_fragments": OrderedDict(
                (name, self.share(tensor, rank) if self.stage == 3 else tensor) for name, tensor in frozen.items()
            ),
            "lr_scheduler": None,
            "global_steps": self.step,
            "dp_world_size": self.ranks,
            "mp_world_size": 1,
            "ds_config": {},
            "ds_version": "0.19.8",
        }

    def save(self, home: Path, latest: bool = True) -> Path:
        """The folder of the step, below ``home``."""
        folder = home / f"global_step{self.step}"
        folder.mkdir(parents=True)
        for rank in range(self.ranks):
            save(self.optimizer(rank), optimizer_path(folder, rank))
            if self.stage == 3 or rank == 0:
                save(self.model(rank), model_path(folder, rank, self.stage))
        if latest:
            (home / "latest").write_text(folder.name)
        return folder

    def save_universal(self, home: Path) -> Path:
        """The same as `ds_to_universal.py` leaves it."""
        folder = home / f"global_step{self.step}_universal"
        for name in self.trained:
            (folder / "zero" / name).mkdir(parents=True)
            tensor = self.state[name].float()
            whole = {"param": tensor, "cat_dim": 0}
            save(tensor.reshape(-1) if self.stage == 3 else whole, folder / "zero" / name / "fp32.pt")
            save(tensor.reshape(-1) * 0, folder / "zero" / name / "exp_avg.pt")
        for name in self.state if self.stage < 3 else ():
            if name not in self.trained:
                (folder / "zero" / name).mkdir()
                save({"param": self.state[name].float()}, folder / "zero" / name / "fp32.pt")
        save({"optimizer_state_dict": {}}, folder / "zero" / "optimizer_state.pt")
        for rank in range(self.ranks if self.stage == 3 else 1):
            save(self.model(rank), model_path(folder, rank, self.stage))
        (home / "latest_universal").write_text(folder.name)
        return folder

    def expected(self) -> State:
        """What the model is: what was trained in float32, all else as it was."""
        found = {n: t.float() if n in self.trained else t for n, t in self.state.items() if n not in self.shared}
        return found | {name: found[kept] for name, kept in self.shared.items()}


def save(value: object, path: Path) -> None:
    with deepspeeds_names():
        torch.save(value, path)


def optimizer_path(folder: Path, rank: int) -> Path:
    return folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def model_path(folder: Path, rank: int, stage: int) -> Path:
    return folder / f"{f'zero_pp_rank_{rank}_' if stage == 3 else ''}mp_rank_00_model_states.pt"


def training(stage: int, ranks: int = 2, **changes: Any) -> Zero:
    """Sizes that no number of ranks divides, a scalar, frozen parameters, buffers, a tied pair."""
    state = {
        "embed.weight": torch.arange(33.0).reshape(11, 3).bfloat16(),
        "conv.weight": torch.arange(50.0).reshape(5, 2, 5),
        "scale": torch.tensor(1.5),
        "norm.weight": torch.arange(7.0),
        "frozen.weight": torch.arange(15.0).reshape(3, 5).bfloat16(),
        "frozen.bias": torch.arange(2.0).bfloat16(),
        "seen": torch.tensor(3),
        "shift": torch.linspace(0, 1, 4),
    }
    state["head.weight"] = state["embed.weight"]
    usual = {
        "groups": [["embed.weight", "conv.weight"], ["scale", "norm.weight"]],
        "buffers": ["seen", "shift"],
        "shared": {"head.weight": "embed.weight"},
    }
    return Zero(state, stage, ranks, **(usual | changes))
