"""What others do for the same end, each as its documentation says; run as a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

SUFFIX = ".safetensors"
READ = 1 << 20  # bytes


def careful(source: str, target: str, size: str) -> None:
    """The script that a careful person writes: one tensor after the other, a file as soon as it is full."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    files, index, held, room = [], {}, {}, int(size)
    Path(target).mkdir(exist_ok=True)

    def save() -> None:
        files.append(path := Path(target) / f"model-{len(files) + 1:05}{SUFFIX}")
        save_file(held, path, metadata={"format": "pt"})
        index.update(dict.fromkeys(held, path.name))
        held.clear()

    for path in sorted(Path(source).glob(f"*{SUFFIX}")):
        with safe_open(path, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 -- it is no dictionary
                tensor = opened.get_tensor(name)
                if held and tensor.nbytes + sum(kept.nbytes for kept in held.values()) > room:
                    save()
                held[name] = tensor
    save()
    (Path(target) / f"model{SUFFIX}.index.json").write_text(json.dumps({"weight_map": index}))
    shutil.copy(Path(source) / "config.json", target)


def transformers(source: str, target: str, size: str, dtype: str = "auto") -> None:
    """``from_pretrained`` and ``save_pretrained``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    model.save_pretrained(target, max_shard_size=int(size))


def accelerate(source: str, target: str, size: str) -> None:
    """transformers' load and ``accelerate.save_model``."""
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    Accelerator().save_model(model, target, max_shard_size=int(size))


def huggingface_hub(source: str, target: str, size: str) -> None:
    """All tensors, and ``save_torch_state_dict``."""
    from huggingface_hub import save_torch_state_dict
    from safetensors.torch import load_file

    tensors = {}
    for path in sorted(Path(source).glob(f"*{SUFFIX}")):
        tensors |= load_file(path)
    Path(target).mkdir(exist_ok=True)
    save_torch_state_dict(tensors, target, max_shard_size=int(size))


def sha256(source: str) -> None:
    """One pass over the files."""
    for path in sorted(Path(source).iterdir()):
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(READ):
                digest.update(chunk)


def download(repo: str, folder: str) -> None:
    """``snapshot_download``."""
    from huggingface_hub import snapshot_download

    snapshot_download(repo, local_dir=folder)


def by_hand(repo: str, folder: str, target: str, size: str) -> None:
    """``snapshot_download``, transformers and ``upload_folder``: what most do today."""
    from huggingface_hub import HfApi, snapshot_download

    source, made = Path(folder) / "source", Path(folder) / "made"
    snapshot_download(repo, local_dir=source)
    transformers(str(source), str(made), size)
    api = HfApi()
    api.create_repo(target)
    api.upload_folder(repo_id=target, folder_path=made)


def upload(folder: str, repo: str) -> None:
    """``upload_folder`` of what is there to a new repository."""
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repo)
    api.upload_folder(repo_id=repo, folder_path=folder)


def torch_file(source: str, target: str) -> None:
    """The same model as ``torch.save`` writes it."""
    import torch
    from safetensors.torch import load_file

    tensors = {}
    for path in sorted(Path(source).glob(f"*{SUFFIX}")):
        tensors |= load_file(path)
    torch.save(tensors, Path(target) / "pytorch_model.bin")
    shutil.copy(Path(source) / "config.json", target)


def load(folder: str, device_map: str) -> None:
    """Load it, and let it answer."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map=device_map or None).eval()
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))


def synced(function: str, source: str, target: str, *more: str) -> None:
    """One of those above that write a folder; what it wrote is on the disk in the end, as ours is."""
    globals()[function](source, target, *more)
    for path in Path(target).iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
