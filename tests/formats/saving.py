"""The ways in which the world saves weights. Each returns what a loader should find: {name: tensor}."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

State = dict[str, torch.Tensor]


def by_save_pretrained(model: Any, folder: Path, size: str | int = "60KB") -> State:
    """As transformers writes today: safetensors, several files when larger than ``size``."""
    model.save_pretrained(folder, max_shard_size=size)
    return stored(folder)


def stored(folder: Path, pattern: str = "model*.safetensors") -> State:
    found: State = {}
    for path in sorted(folder.glob(pattern)):
        found |= load_file(path)
    return found


def configured(model: Any, folder: Path) -> State:
    """The config beside weights that something else writes; the state dict with every name."""
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    return dict(model.state_dict())


def as_bin(state: Mapping[str, torch.Tensor], folder: Path, *, zipped: bool = True) -> State:
    """``pytorch_model.bin``; not ``zipped`` is how torch wrote before 1.6."""
    torch.save(dict(state), folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    return dict(state)


def as_bins(
    state: Mapping[str, torch.Tensor], folder: Path, count: int, naming: Callable[[int], str] | None = None
) -> State:
    """``count`` .bin files and their index, as save_pretrained wrote until safetensors came."""
    name = naming or (lambda number: f"pytorch_model-{number:05d}-of-{count:05d}.bin")
    weight_map = _divided(state, [name(i + 1) for i in range(count)], lambda part, f: torch.save(part, folder / f))
    total = sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=2))
    return dict(state)


def as_bare_map(state: Mapping[str, torch.Tensor], folder: Path) -> State:
    """Files under odd names and an index that is nothing but a map, as accelerate's documentation shows."""
    files = ["first_state_dict.bin", "second_state_dict.bin"]
    weight_map = _divided(state, files, lambda part, f: torch.save(part, folder / f))
    (folder / "index.json").write_text(json.dumps(weight_map, indent=2))
    return dict(state)


def as_safetensors(state: Mapping[str, torch.Tensor], folder: Path, count: int = 1, stem: str = "model") -> State:
    """``count`` safetensors files, with an index when there are several."""
    separate = {name: tensor.clone().contiguous() for name, tensor in state.items()}
    if count == 1:
        save_file(separate, folder / f"{stem}.safetensors", metadata={"format": "pt"})
        return separate
    files = [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    weight_map = _divided(separate, files, lambda part, f: save_file(part, folder / f, metadata={"format": "pt"}))
    total = sum(tensor.nbytes for tensor in separate.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return separate


def by_accelerate(model: Any, folder: Path, size: str = "60KB") -> State:
    """As ``Accelerator.save_model`` writes: of tied names the first in the alphabet stays."""
    from accelerate import Accelerator

    configured(model, folder)
    Accelerator(cpu=True).save_model(model, str(folder), max_shard_size=size)
    return stored(folder)


def _divided(
    state: Mapping[str, torch.Tensor], files: Sequence[str], save: Callable[[State, str], object]
) -> dict[str, str]:
    names = list(state)
    weight_map = {}
    for i, file in enumerate(files):
        part = {n: state[n] for n in names[i * len(names) // len(files) : (i + 1) * len(names) // len(files)]}
        save(part, file)
        weight_map |= dict.fromkeys(part, file)
    return weight_map
