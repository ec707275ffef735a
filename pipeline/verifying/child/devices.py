"""The device map of a model on meta, joined with its files; runs in a fork of `server`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from accelerate import infer_auto_device_map
from accelerate.utils import get_balanced_memory

from reshard.pipeline.tensors import size_in_bytes
from reshard.pipeline.text import counted
from reshard.pipeline.verifying.child.model import Specs, load_report, parameters_of, resolve
from reshard.pipeline.verifying.named import NotChecked

T = TypeVar("T")


def devices(
    config: str,
    source: Specs,
    files: Mapping[str, str],
    max_memory: Mapping[str, int] | None,
    device_map: str | Mapping[str, str] | None,
    scratch: Path,
) -> dict[str, Any]:
    """The answer that ``plan_devices`` wants."""
    model_class, model_config, notes = resolve(config, scratch)
    report, model = load_report(model_class, model_config, source)
    if model is None:
        raise NotChecked(f"cannot convert the tensors: {report.errors[0]}", "inconclusive")
    no_split = sorted(model._no_split_modules or ())
    if not no_split:
        notes.append(f"{model_class.__name__} does not list modules to keep on one device, so a block can be split")
    if device_map is None or isinstance(device_map, str):
        placed = _inferred(model, max_memory or {}, device_map or "sequential", no_split)
    else:
        placed = dict(device_map)
    if names := uncovered(model, placed):
        return {"result": "incomplete", "parameters": names}

    modules, buffers = model.named_modules(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    known = {*(name for name, _ in modules), *(name for name, _ in buffers), *model.state_dict()}
    for name in sorted(placed.keys() - known):
        notes.append(f"the device map has {name}, which is not in {model_class.__name__}")
        del placed[name]
    sizes = dict.fromkeys(placed, 0)
    paths: dict[str, set[str]] = {block: set() for block in placed}
    stored = parameters_of(model, source)
    for tensor, parameter in stored.items():
        if (block := _block_of(parameter, placed)) is not None:
            dtype, shape = source[tensor]
            sizes[block] += size_in_bytes(dtype, tuple(shape))
            paths[block].add(files[tensor])
    for target, origin in (model.all_tied_weights_keys or {}).items():
        if target not in stored.values() and (block := _block_of(target, placed)) is not None:
            paths[block] |= {files[tensor] for tensor, parameter in stored.items() if parameter == origin}
    if unplaced := len(source) - len(stored):
        notes.append(f"{counted(unplaced, 'tensor', 'has')} no parameter in the class, and so no device")
    blocks = [
        {"name": block, "device": str(device), "bytes": sizes[block], "files": sorted(paths[block])}
        for block, device in placed.items()
    ]
    return {
        "result": "planned",
        "reason": f"{counted(len(placed), 'block')} of {model_class.__name__}",
        "class_name": model_class.__name__,
        "blocks": blocks,
        "no_split": no_split,
        "notes": notes,
    }


def uncovered(model: Any, placed: Mapping[str, object]) -> list[str]:
    """The parameters and buffers to which a device map gives no device."""
    return [name for name in model.state_dict() if _block_of(name, placed) is None]


def spelled_out(model: Any, placed: Mapping[str, T]) -> dict[str, T]:
    """A map that says the same with modules, as few as can be, for "": no loader takes that beside the disk."""
    if "" not in placed or len(placed) == 1:
        return dict(placed)
    found = {name: device for name, device in placed.items() if name}
    taken = {above for name in found for above in _prefixes(name)}
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, _ in tensors:
        if _block_of(name, placed) == "":
            found[next(above for above in _prefixes(name) if above not in taken)] = placed[""]
    return found


def _prefixes(name: str) -> Iterator[str]:
    """Every module above what has this ``name``, and itself.

    >>> list(_prefixes("model.layers.0"))
    ['model', 'model.layers', 'model.layers.0']
    """
    return accumulate(name.split("."), "{}.{}".format)


def _inferred(model: Any, max_memory: Mapping[str, int], name: str, no_split: list[str]) -> dict[str, Any]:
    """What `from_pretrained` makes of the map's name."""
    limits = {int(device) if device.isdigit() else device: size for device, size in max_memory.items()}
    if name != "sequential":
        low_zero = name == "balanced_low_0"
        limits = get_balanced_memory(model, limits, no_split_module_classes=no_split, low_zero=low_zero)
    return dict(infer_auto_device_map(model, max_memory=limits, no_split_module_classes=no_split))


def _block_of(parameter: str, placed: Mapping[str, object]) -> str | None:
    """The closest entry of the map above ``parameter``."""
    name = parameter
    while name not in placed:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name
