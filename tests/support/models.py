"""Small checkpoints for tests, made anew each time; the bytes depend on nothing but the arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

Arrays = dict[str, np.ndarray]


def arrays(count: int, size: int, *, seed: int = 0, prefix: str = "layer") -> Arrays:
    """``count`` float32 matrices of about ``size`` bytes each, and as many small vectors."""
    random = np.random.default_rng(seed)
    columns = 16
    rows = max(1, size // 4 // columns)
    made: Arrays = {}
    for i in range(count):
        made[f"{prefix}.{i}.weight"] = random.random((rows, columns), dtype=np.float32)
        made[f"{prefix}.{i}.bias"] = random.random(columns, dtype=np.float32)
    return made


def save_single(folder: Path, tensors: Arrays, name: str = "model.safetensors") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / name, metadata={"format": "pt"})


def save_sharded(folder: Path, files: Mapping[str, Arrays], index: str = "model.safetensors.index.json") -> None:
    """Several files under any names, and the index that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    total = 0
    for name, tensors in files.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(array.nbytes for array in tensors.values())
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / index).write_text(json.dumps(content, indent=2))


def numbered(tensors: Arrays, count: int, stem: str = "model") -> dict[str, Arrays]:
    """``tensors`` divided in order over ``count`` files with the usual names."""
    names = list(tensors)
    step = -(-len(names) // count)
    return {
        f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors": {n: tensors[n] for n in names[i * step : (i + 1) * step]}
        for i in range(count)
    }


def add_friends(folder: Path) -> None:
    """What belongs to a model and is no weights: a config, a tokenizer, a card, a licence."""
    (folder / "config.json").write_text(json.dumps({"model_type": "none-of-ours", "architectures": ["Nobody"]}))
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"vocab": {"a": 0}}}))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A model\n\nText of its owner.\n")
    (folder / "LICENSE").write_text("Do as you please.\n")


def save_model(folder: Path, tensors: int, size: int, files: int) -> Path:
    """The folder, with numbered tensors of ``size`` bytes each in so many files, and what belongs to a model."""
    save_sharded(folder, numbered(arrays(tensors, size), files))
    add_friends(folder)
    return folder


def save_mixture(folder: Path, width: int, files: int = 7) -> Path:
    """The folder, with 4 layers of 4 experts in files in the order of the layers, and what belongs to a model."""
    random = np.random.default_rng(1)

    def matrix(rows: int) -> np.ndarray:
        return random.integers(0, 255, (rows, width), np.uint8)

    tensors: Arrays = {"model.embed_tokens.weight": matrix(9), "lm_head.weight": matrix(9)}
    for layer in range(4):
        at = f"model.layers.{layer}"
        tensors[f"{at}.self_attn.q_proj.weight"] = matrix(4)
        tensors |= {f"{at}.mlp.experts.{n}.{part}_proj.weight": matrix(7) for n in range(4) for part in ("up", "down")}
    save_sharded(folder, numbered(tensors, files))
    add_friends(folder)
    return folder
