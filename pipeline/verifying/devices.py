"""Which device would hold which block of a model, and which files that device has to read.

Computed by accelerate's ``infer_auto_device_map`` on the meta model in the reload child, without a device or a weight.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.structure import Signature


@dataclass(frozen=True, slots=True)
class Block:
    """One entry of a device map: a module (or parameter) and all below it; the name is "" for a whole model."""

    name: str
    device: str
    bytes: int  # of its tensors as stored; tied ones count where they are stored
    files: tuple[str, ...]  # that it is read from; more than one means that the block straddles them


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """``planned``: ``blocks`` in the model's order; otherwise none, and ``reason`` says why."""

    result: Literal["planned", "inconclusive", "skipped"]
    reason: str
    class_name: str | None = None
    blocks: tuple[Block, ...] = ()
    no_split: tuple[str, ...] = ()  # module classes that are kept whole
    notes: tuple[str, ...] = ()

    def bytes_of(self, device: str) -> int:
        return sum(block.bytes for block in self.blocks if block.device == device)

    def files_of(self, device: str) -> tuple[str, ...]:
        return tuple(sorted({file for block in self.blocks if block.device == device for file in block.files}))


def plan_devices(
    meta_loader: MetaLoader,
    config: bytes,
    specs: Signature,
    files: Mapping[str, str],
    *,
    max_memory: Mapping[str, int] | None = None,
    device_map: str | Mapping[str, str] | None = None,
) -> DevicePlan:
    """Place the tensors ``specs``, each in the file that ``files`` names, on devices.

    Either ``max_memory`` is given, bytes by device ("0", "1", "cpu"; what does not fit goes to "disk"), or a finished
    ``device_map``, devices by module. With ``max_memory`` it may be one of accelerate's names: ``sequential``, the
    default, fills one device after the other; ``auto`` and ``balanced`` give each of the accelerators a like share, and
    ``balanced_low_0`` the first one less. Raises DeviceMapIncomplete when that map leaves a parameter without a device.
    """
    arguments = {
        "config": config.decode(errors="replace"),
        "source": specs,
        "files": files,
        "max_memory": max_memory,
        "device_map": device_map,
    }
    return meta_loader.ask("devices", DevicePlan, json.dumps(arguments))
