"""Loading a folder's model for real, with a device map, disk offload and a memory limit, and asking it one question.

The dearest of the checks and the only one that reads weights through the loaders that people use. ScratchSpace offload
follows the index tensor by tensor, so it also notices an index that names the wrong file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from reshard.pipeline.limits import LOAD_CPU, LOAD_TIME
from reshard.pipeline.verifying.child.limits import Allowed
from reshard.pipeline.verifying.devices import incomplete
from reshard.pipeline.verifying.meta_load import Reload

Loader = Literal["transformers", "accelerate"]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load: ``device_map`` is one of accelerate's words or devices by module, "disk" among them; ``max_memory``
    bytes by device ("0", "cpu"), beyond which blocks go to disk; ``memory`` the bytes that the process may hold of its
    own, mapped files not counted, beyond which it is ended (on Linux).
    """

    loader: Loader = "transformers"
    device_map: str | Mapping[str, str | int] = "auto"
    max_memory: Mapping[str, int] | None = None
    memory: int | None = None


DEFAULTS = LoadOptions()


@dataclass(frozen=True, slots=True)
class LoadCheck:
    """``loaded``: it ran; ``equal``: with the source's output, bit for bit; ``failed``: it did not load or run, or gave
    another output; ``inconclusive``: cut short, or for want of something here that says nothing of the weights;
    ``skipped``: not tried. ``reason`` says why.
    """

    result: Literal["loaded", "equal", "failed", "inconclusive", "skipped"]
    reason: str
    class_name: str | None = None
    output: str | None = None  # sha256 over dtype, shape and bytes of what one forward pass gave
    placement: Mapping[str, int] = field(default_factory=dict)  # device -> entries of the device map
    in_no_file: tuple[str, ...] = ()  # parameters that were in no file and made up, as the same numbers on every load
    seconds: float = 0.0
    peak_rss: int = 0  # bytes


def load(reload: Reload, folder: Path, options: LoadOptions = DEFAULTS) -> LoadCheck:
    """Load ``folder`` (config.json and safetensors) and run one forward pass over fixed input.

    Raises DeviceMapIncomplete when a given map leaves a parameter without a device; never for what it checks.
    """
    arguments = {
        "folder": str(folder.resolve()),
        "loader": options.loader,
        "device_map": options.device_map,
        "max_memory": options.max_memory,
    }
    # Weights are mapped, so address space says nothing here; and offloaded blocks are files of any size.
    allowed = Allowed(seconds=LOAD_TIME, cpu=LOAD_CPU, memory=None, file=None, rss=options.memory)
    answer: dict[str, Any] = reload.ask("load", json.dumps(arguments), allowed)
    if answer["result"] == "incomplete":
        raise incomplete(answer["parameters"])
    return LoadCheck(**{**answer, "in_no_file": tuple(answer.get("in_no_file", ()))})


def compare_loads(reload: Reload, source: Path, output: Path, options: LoadOptions = DEFAULTS) -> LoadCheck:
    """``load`` both folders in the same way; ``equal`` when both answer alike, bit for bit."""
    before, after = (load(reload, folder, options) for folder in (source, output))
    if before.result != "loaded":
        reason = f"the source itself cannot be asked: {before.reason}"
        return replace(before, result="skipped" if before.result == "skipped" else "inconclusive", reason=reason)
    lost = sorted({*before.in_no_file} ^ {*after.in_no_file})
    if lost and (after.result == "loaded" or after.in_no_file):
        reason = f"other parameters than the source's are in no file: {', '.join(lost[:5])}"
        return replace(after, result="failed", reason=reason)
    if after.result != "loaded":
        return after
    if before.output != after.output:
        return replace(after, result="failed", reason="one forward pass gives another output than the source's")
    same = f"; parameters that are in no file of either: {len(after.in_no_file):,}" if after.in_no_file else ""
    return replace(after, result="equal", reason=f"one forward pass gives the source's output, bit for bit{same}")
