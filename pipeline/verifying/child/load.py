"""One real load and one forward pass; runs in a fork of `server`, on a folder that strangers filled."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from errno import EDQUOT, ENOMEM, ENOSPC
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from safetensors import safe_open

from reshard.pipeline.text import counted
from reshard.pipeline.verifying.child.devices import spelled_out, uncovered
from reshard.pipeline.verifying.child.model import LOADING, quantization_method, resolve
from reshard.pipeline.verifying.named import NotChecked

SEED = 0  # parameters that no file has get the same random numbers on every load
TOKENS = 8  # of the one question
# What libraries say, in errors of no kind of their own, when it is not the weights that stop them.
_NOT_OF_THE_WEIGHTS = (
    "No space left on device",
    "unexpected pos",  # torch's archive, where the disk is full
    "device disk is invalid",  # accelerate 1.15, which leaves no model on disk as a whole
    "llocate memory",  # "can't allocate memory" of torch, "Cannot allocate memory" of mmap
)


def load(
    folder: str,
    loader: str,
    device_map: str | dict[str, str | int],
    max_memory: Mapping[str, int] | None,
    scratch: Path,
) -> dict[str, Any]:
    """The answer that ``LoadCheck`` wants."""
    if absent := _absent(device_map, max_memory or {}):
        raise NotChecked(f"this machine has no device {', '.join(absent)}")
    visible, offload = scratch / "model", scratch / "offload"
    visible.mkdir()
    offload.mkdir()
    # Only the weights: a loader would otherwise look at adapters, generation code and whatever else is there.
    for path in Path(folder).iterdir():
        if path.name.endswith((".safetensors", ".safetensors.index.json")):
            (visible / path.name).symlink_to(path)
    # Offline, transformers 5.23 stops with a TypeError where there is none; one forward pass does not read it.
    (visible / "generation_config.json").write_text("{}")
    config_file = Path(folder, "config.json")
    text = config_file.read_text() if config_file.is_file() else None
    model_class, config, _ = resolve(text, scratch)
    quantised = quantization_method(json.loads(text or "{}"))
    if quantised == "fp8" and not torch.accelerator.is_available():
        raise NotChecked("fp8 weights need a GPU, and this machine has none")
    if isinstance(device_map, dict):
        device_map = {module: _device(device) for module, device in device_map.items()}
        with init_empty_weights():
            empty = model_class(config)
        # transformers itself lets an incomplete map pass as long as it names one device only.
        if names := uncovered(empty, device_map):
            return {"result": "incomplete", "parameters": names}
        device_map = spelled_out(empty, device_map)
    limits = {_device(device): size for device, size in max_memory.items()} if max_memory else None
    where = {"device_map": device_map, "max_memory": limits, "offload_folder": str(offload)}
    start = _by_transformers if loader == "transformers" else _by_accelerate
    torch.manual_seed(SEED)
    try:
        model, in_no_file = start(model_class, config, visible, where)
    except (RecursionError, NotChecked):
        raise
    except Exception as error:  # noqa: BLE001 - what a loader raises is what its user would meet
        result = excuse(error) or ("inconclusive" if quantised else "failed")
        return {"result": result, "reason": f"{loader} cannot load it: {_named(error)}"}
    facts = {
        "class_name": model_class.__name__,
        "in_no_file": in_no_file,
        "placement": dict(Counter(str(device) for device in getattr(model, "hf_device_map", {"": "cpu"}).values())),
    }
    lacking = f"; {counted(len(in_no_file), 'parameter')} in no file, such as {in_no_file[0]}" if in_no_file else ""
    try:
        question = _question(model)
    except NotChecked as why:
        return {**facts, "result": "inconclusive", "reason": f"it loads with {loader}, but {why}{lacking}"}
    try:
        with torch.no_grad():
            output = _first_tensor(model(**question))
    except RecursionError:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        # Offloaded, a parameter that no file has cannot even be made up.
        unasked = quantised or in_no_file or isinstance(error, (TypeError, ValueError))
        result = excuse(error) or ("inconclusive" if unasked else "failed")
        reason = f"it loads with {loader}, but does not run: {_named(error)}{lacking}"
        return {**facts, "result": result, "reason": reason}
    reason = f"{model_class.__name__} loads with {loader} and runs{lacking}"
    return {**facts, "result": "loaded", "reason": reason, "output": digest(output)}


def _device(name: str | int) -> str | int:
    return int(name) if isinstance(name, str) and name.isdecimal() else name


def _absent(device_map: str | Mapping[str, str | int], max_memory: Mapping[str, int]) -> list[str]:
    """Those of the devices asked for that this machine lacks."""
    placed = () if isinstance(device_map, str) else device_map.values()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    there = {"cpu", "disk"}
    if accelerator is not None:
        numbers = range(torch.accelerator.device_count())
        there |= {accelerator.type, *map(str, numbers), *(f"{accelerator.type}:{number}" for number in numbers)}
    return sorted({*map(str, placed), *max_memory} - there)


def excuse(error: Exception) -> str | None:
    """The result of a load that ended for want of something here, which says nothing of the weights; else None."""
    if isinstance(error, ImportError):
        return "skipped"
    if isinstance(error, (MemoryError, NotImplementedError, torch.OutOfMemoryError)):
        return "inconclusive"
    if isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT, ENOMEM):
        return "inconclusive"
    return "inconclusive" if any(phrase in str(error) for phrase in _NOT_OF_THE_WEIGHTS) else None


def _by_transformers(model_class: Any, config: Any, folder: Path, where: Mapping[str, Any]) -> tuple[Any, list[str]]:
    model, info = model_class.from_pretrained(folder, config=config, use_safetensors=True, **where, **LOADING)
    return model, sorted(info["missing_keys"])


def _by_accelerate(model_class: Any, config: Any, folder: Path, where: Mapping[str, Any]) -> tuple[Any, list[str]]:
    config._attn_implementation = "eager"
    with init_empty_weights():
        model = model_class(config)
    model.tie_weights()
    if unnamed := _unnamed(model, folder):
        reason = f"{counted(len(unnamed), 'parameter', 'has')} no tensor of the same name, such as {unnamed[0]}"
        hint = "use `--loader transformers` to see whether they exist under another name"
        reason = f"{reason}, and accelerate does not try other names"
        raise NotChecked(f"{reason}; {hint}", "inconclusive", in_no_file=unnamed)
    model = load_checkpoint_and_dispatch(
        model,
        str(folder),
        no_split_module_classes=sorted(model._no_split_modules or ()),
        offload_state_dict=True,
        strict=False,
        **where,
    )
    return model.eval(), []


def _unnamed(model: Any, folder: Path) -> list[str]:
    """The parameters whose names, and those of what they are tied to, are in no file."""
    stored: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            stored |= set(file.keys())
    names: defaultdict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return sorted(same[0] for same in names.values() if stored.isdisjoint(same))


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
        raise NotChecked(f"it requires {kind}, and no sample input is available", "inconclusive")
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
    tensor = tensor.detach().cpu().contiguous()
    data = tensor.view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode() + data).hexdigest()


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
