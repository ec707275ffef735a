"""What people load models with, and the questions that a loaded model is asked. Imports torch and transformers."""

from __future__ import annotations

import hashlib
import json
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from transformers import AutoConfig, AutoTokenizer
from transformers.dynamic_module_utils import get_class_from_dynamic_module

TOKENS = 12  # of the question
NEW_TOKENS = 6  # that a generating model adds
HEAD = 90  # characters of an error's message that are compared and shown

TEXTS = (
    "",
    "  The Licensor grants You a perpetual, worldwide licence. ",
    "don't 3.14159 <unk> </s> [MASK] <|endoftext|>",
    "naïve 日本語 🏳️‍🌈 \t\r\n e\u0301",
)


def answer(model: Any) -> dict[str, Any]:
    """What the model says to one fixed question: a digest of the output's bits, and the tokens that it generates."""
    model.eval()
    question = _question(model)
    with torch.no_grad():
        output = model(**question)
        said: dict[str, Any] = {"output": _digest(_first(output))}
        if model.main_input_name == "input_ids" and getattr(model, "can_generate", lambda: False)():
            tokens = model.generate(question["input_ids"], max_new_tokens=NEW_TOKENS, do_sample=False)
            said["tokens"] = tokens.tolist()
    return said


def _question(model: Any) -> dict[str, torch.Tensor]:
    config = model.config
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 300, (1, TOKENS), generator=random)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    if hasattr(config, "vision_config"):
        size = config.vision_config.image_size
        image = torch.randn(1, 3, size, size, generator=random).to(dtype)
        return {"input_ids": tokens, "pixel_values": image, "attention_mask": torch.ones_like(tokens)}
    if model.main_input_name == "input_features":
        sound = torch.randn(1, config.num_mel_bins, 2 * config.max_source_positions, generator=random)
        return {"input_features": sound.to(dtype), "decoder_input_ids": tokens}
    if config.is_encoder_decoder:
        return {"input_ids": tokens, "decoder_input_ids": tokens}
    return {"input_ids": tokens}


def _first(output: Any) -> torch.Tensor:
    for name in ("logits", "logits_per_image", "last_hidden_state"):
        if isinstance(found := getattr(output, name, None), torch.Tensor):
            return found
    raise TypeError(f"{type(output).__name__} holds no output that is known")


def _digest(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        raise RuntimeError("the output is on the meta device: not every weight was loaded")
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(raw).hexdigest()}"


def _class_of(folder: Path) -> tuple[Any, Any]:
    """The model's class, out of the repository where its config says so, and the config."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    remote = getattr(config, "auto_map", {}).get("AutoModel")
    if remote:
        return get_class_from_dynamic_module(remote, folder), config
    return getattr(transformers, config.architectures[0]), config


def by_transformers(folder: Path, dtype: Any, scratch: Path) -> Any:
    model_class, config = _class_of(folder)
    return model_class.from_pretrained(folder, config=config, dtype=dtype)


def by_accelerate(folder: Path, dtype: Any, scratch: Path) -> Any:
    """An empty model, tied, then filled: the way of accelerate's documentation on large models."""
    model_class, config = _class_of(folder)
    wanted = config.dtype if dtype == "auto" else dtype
    if isinstance(wanted, str):
        wanted = getattr(torch, wanted)
    with init_empty_weights():
        model = model_class._from_config(config, dtype=wanted or torch.float32)
    model.tie_weights()
    blocks = sorted(model._no_split_modules or ())
    return load_checkpoint_and_dispatch(model, str(folder), device_map={"": "cpu"}, no_split_module_classes=blocks)


def by_offload(folder: Path, dtype: Any, scratch: Path) -> Any:
    """transformers with every weight on the disk, read again for each layer of the forward pass."""
    model_class, config = _class_of(folder)
    return model_class.from_pretrained(
        folder, config=config, dtype=dtype, device_map={"": "disk"}, offload_folder=str(scratch)
    )


LOADERS: dict[str, Callable[[Path, Any, Path], Any]] = {
    "transformers": by_transformers,
    "accelerate": by_accelerate,
    "disk offload": by_offload,
}


def ask(loader: str, folder: Path, dtype: str) -> dict[str, Any]:
    """``{"answer": ...}`` of the model in ``folder``, or ``{"error": class and head of the message}``."""
    wanted = dtype if dtype == "auto" else getattr(torch, dtype)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            return {"answer": answer(LOADERS[loader](folder, wanted, Path(scratch)))}
        except Exception as error:  # noqa: BLE001 - whatever a loader raises is what its user would meet
            return {"error": _named(error, folder, Path(scratch))}


def ids(folder: Path) -> dict[str, Any]:
    """``{"answer": token ids}`` of some difficult texts by the folder's tokenizer, or ``{"error": ...}``."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        found = [tokenizer(text)["input_ids"] for text in TEXTS]
        return {"answer": hashlib.sha256(json.dumps(found).encode()).hexdigest()}
    except Exception as error:  # noqa: BLE001 - as above
        return {"error": _named(error, folder)}


def _named(error: Exception, *folders: Path) -> str:
    text = str(error)
    for folder in folders:
        text = text.replace(str(folder), "FOLDER")
    return textwrap.shorten(f"{type(error).__name__}: {text}", HEAD, placeholder=" ...")
