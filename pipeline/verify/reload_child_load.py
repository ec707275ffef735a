"""One real load and one forward pass; runs in a fork of the reload child, on a folder that strangers filled."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch

from reshard.pipeline.verify.reload_child_devices import uncovered
from reshard.pipeline.verify.reload_child_model import NotChecked, resolve

SEED = 0  # parameters that no file has get the same random numbers on every load
TOKENS = 8  # of the one question


def load(
    folder: str,
    loader: str,
    device_map: str | dict[str, str | int],
    max_memory: Mapping[str, int] | None,
    scratch: Path,
) -> dict[str, Any]:
    """The answer that ``LoadCheck`` wants."""
    visible, offload = scratch / "model", scratch / "offload"
    visible.mkdir()
    offload.mkdir()
    # Only the weights: a loader would otherwise look at adapters, generation code and whatever else is there.
    for path in Path(folder).iterdir():
        if path.name.endswith((".safetensors", ".safetensors.index.json")):
            (visible / path.name).symlink_to(path)
    # Offline, transformers 5.23 stops with a TypeError where there is none; one forward pass does not look at it.
    (visible / "generation_config.json").write_text("{}")
    config_file = Path(folder, "config.json")
    try:
        model_class, config, _ = resolve(config_file.read_text() if config_file.is_file() else None, scratch)
    except NotChecked as why:
        return {"result": why.result, "reason": str(why)}
    if not isinstance(device_map, str):
        with init_empty_weights():
            empty = model_class(config)
        # transformers itself lets an incomplete map pass as long as it names one device only.
        if names := uncovered(empty, device_map):
            return {"result": "incomplete", "parameters": names}
    limits = {int(k) if k.isdigit() else k: v for k, v in max_memory.items()} if max_memory else None
    start = _by_transformers if loader == "transformers" else _by_accelerate
    torch.manual_seed(SEED)
    try:
        model, initialised = start(model_class, config, visible, device_map, limits, offload)
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever a loader raises is what its user would meet
        return {"result": "failed", "reason": f"{loader} does not load it: {_named(error)}"}
    facts = {
        "class_name": model_class.__name__,
        "initialised": initialised,
        "placement": dict(Counter(str(device) for device in getattr(model, "hf_device_map", {"": "cpu"}).values())),
    }
    try:
        question = _question(model)
    except NotChecked as why:
        return {**facts, "result": "inconclusive", "reason": f"it loads by {loader}, but {why}"}
    try:
        with torch.no_grad():
            output = _first_tensor(model(**question))
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # noqa: BLE001 - as above
        result = "inconclusive" if isinstance(error, (TypeError, ValueError)) else "failed"
        return {**facts, "result": result, "reason": f"it loads by {loader} and does not run: {_named(error)}"}
    reason = f"{model_class.__name__} loads by {loader} and runs"
    if initialised:
        reason += f"; {len(initialised)} parameters are in no file"
    return {**facts, "result": "loaded", "reason": reason, "output": digest(output)}


def _by_transformers(
    model_class: Any, config: Any, folder: Path, device_map: Any, max_memory: Any, offload: Path
) -> tuple[Any, list[str]]:
    model, info = model_class.from_pretrained(
        folder,
        config=config,
        device_map=device_map,
        max_memory=max_memory,
        offload_folder=str(offload),
        output_loading_info=True,
        dtype="auto",
        attn_implementation="eager",
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
    )
    return model, sorted(info["missing_keys"])


def _by_accelerate(
    model_class: Any, config: Any, folder: Path, device_map: Any, max_memory: Any, offload: Path
) -> tuple[Any, list[str]]:
    config._attn_implementation = "eager"
    with init_empty_weights():
        model = model_class(config)
    model.tie_weights()
    model = load_checkpoint_and_dispatch(
        model,
        str(folder),
        device_map=device_map,
        max_memory=max_memory,
        no_split_module_classes=sorted(model._no_split_modules or ()),
        offload_folder=str(offload),
        offload_state_dict=True,
        strict=False,
    )
    return model.eval(), []


def _question(model: Any) -> dict[str, torch.Tensor]:
    """Fixed input of the kind that the class takes; raises NotChecked where it takes another."""
    config = model.config
    vocabulary = getattr(config.get_text_config(), "vocab_size", None) or 2
    tokens = (torch.arange(TOKENS) * 7 + 3).remainder(vocabulary).unsqueeze(0)
    generator = torch.Generator().manual_seed(SEED)
    vision = getattr(config, "vision_config", config)
    kind = model.main_input_name
    if kind == "input_ids":
        question = {kind: tokens}
    elif kind == "pixel_values" and isinstance(getattr(vision, "image_size", None), int):
        image = (1, getattr(vision, "num_channels", 3), vision.image_size, vision.image_size)
        question = {kind: torch.randn(image, generator=generator)}
    elif kind == "input_features" and hasattr(config, "num_mel_bins"):
        # Whisper's encoder halves the frames to its number of positions.
        sound = (1, config.num_mel_bins, 2 * config.max_source_positions)
        question = {kind: torch.randn(sound, generator=generator)}
    else:
        raise NotChecked(f"it takes {kind}, of which no example is known", "inconclusive")
    if config.is_encoder_decoder:
        question["decoder_input_ids"] = tokens
    dtype = model.dtype
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in question.items()}


def _first_tensor(output: Any) -> torch.Tensor:
    for name in ("logits", "last_hidden_state"):
        if isinstance(found := getattr(output, name, None), torch.Tensor):
            return found
    first: torch.Tensor = output[0]
    return first


def digest(tensor: torch.Tensor) -> str:
    """The sha256 over a tensor's dtype, shape and bytes."""
    tensor = tensor.detach().cpu().contiguous()
    data = tensor.view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode() + data).hexdigest()


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
