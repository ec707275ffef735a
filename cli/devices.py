"""Which device would hold which block of the planned model, and which files it would have to read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.cli.output import count, first, human_bytes, lines
from reshard.client.models import plans
from reshard.pipeline.errors import BadSize, UsageError
from reshard.pipeline.limits import CONFIG_MAX
from reshard.pipeline.planning.model import Output, Plan
from reshard.pipeline.sizes import parse_size
from reshard.pipeline.verifying.load import DEVICE_MAPS

if TYPE_CHECKING:
    from reshard.pipeline.protocols import Source
    from reshard.pipeline.verifying.meta_load import MetaLoader

Limits = Mapping[str, int] | None  # bytes by device
DeviceMap = str | Mapping[str, str] | None  # a strategy by its name, or devices by module

STRADDLING_SHOWN = 8  # blocks; --json has them all

# What accelerate takes in a device map: an accelerator by its number or by its name in torch, the CPU, the disk.
_DEVICE = re.compile(r"[0-9]+|cpu|disk|mps|(?:cuda|xpu|npu|hpu|mlu|musa|sdaa|neuron)(?::[0-9]+)?")
_LIMITED = re.compile(r"[0-9]+|cpu")


def read_placement(device_map: str | None, max_memory: str | None) -> tuple[DeviceMap, Limits]:
    """What --device-map and --max-memory say; raises UsageError, also for devices by module that come with limits."""
    limits = parse_max_memory(max_memory) if max_memory is not None else None
    placed = read_device_map(device_map) if device_map is not None else None
    if limits and isinstance(placed, dict):
        raise UsageError(what="--max-memory and --device-map FILE cannot be used together")
    return placed, limits


def parse_max_memory(value: str) -> dict[str, int]:
    """Bytes by device from ``0=10GiB,1=10GiB,cpu=30GiB``; raises UsageError."""
    limits = {}
    for part in value.split(","):
        device, equals, size = part.strip().partition("=")
        if not equals or not _LIMITED.fullmatch(device):
            raise UsageError(what=f"--max-memory {part}: use DEVICE=SIZE, where DEVICE is a number or cpu")
        device = device if device == "cpu" else device.lstrip("0") or "0"
        if device in limits:
            raise UsageError(what=f"--max-memory {value}: duplicate device {device}")
        try:
            limits[device] = parse_size(size)
        except BadSize as error:
            raise UsageError(what=f"--max-memory {part}: {error.facts['why']}") from error
    return limits


def read_device_map(value: str) -> str | dict[str, str]:
    """One of accelerate's names, or devices by module from a JSON file; raises UsageError."""
    if value in DEVICE_MAPS:
        return value
    path = Path(value)
    try:
        with path.open("rb") as file:
            text = file.read(CONFIG_MAX + 1)
        if len(text) > CONFIG_MAX:
            raise UsageError(what=f"--device-map {path} is larger than {CONFIG_MAX:,} bytes")
        pairs = json.loads(text, object_pairs_hook=tuple)  # a list is an array
    except OSError as error:
        known = "" if "/" in value else f"; use a file, or one of {', '.join(DEVICE_MAPS)}"
        raise UsageError(what=f"--device-map {path}: {error.strerror}{known}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(what=f"--device-map {path}: not JSON: {error}") from error
    if not isinstance(pairs, tuple):
        raise UsageError(what=f"--device-map {path}: not a JSON object that maps modules to devices")
    devices: dict[str, str] = {}
    for module, device in pairs:
        if module in devices:
            raise UsageError(what=f"--device-map {path} has duplicate key {json.dumps(module)}")
        if isinstance(device, bool) or not isinstance(device, int | str) or not _DEVICE.fullmatch(str(device)):
            where = json.dumps(dict(device) if isinstance(device, tuple) else device)
            why = f"{json.dumps(module)} is mapped to {where}; use a number, cpu, disk or a name like cuda:0"
            raise UsageError(what=f"--device-map {path}: {why}")
        devices[module] = str(device)
    return devices


def device_maps(
    plan: Plan, source: Source, max_memory: Limits, device_map: DeviceMap, tmpdir: Path | None = None
) -> list[plans.DeviceMap]:
    """The devices of each checkpoint of ``plan``; raises DeviceMapIncomplete."""
    from reshard.pipeline.verifying.meta_load import MetaLoader

    with closing(MetaLoader(tmpdir=tmpdir)) as meta_loader:
        return [_made(plan, output, source, meta_loader, max_memory, device_map) for output in plan.outputs]


def _made(
    plan: Plan, output: Output, source: Source, meta_loader: MetaLoader, max_memory: Limits, device_map: DeviceMap
) -> plans.DeviceMap:
    from reshard.pipeline.checkpoint.small_files import read_file
    from reshard.pipeline.verifying.devices import plan_devices

    name = str(output.name)
    if output.config is None:
        return plans.DeviceMap(checkpoint=name, result="skipped", reason="no config.json with a model class")
    shards = [plan.shards[number] for number in output.shards]
    specs = {e.name: (e.as_dtype, e.tensor.shape) for shard in shards for e in shard.entries}
    files = {e.name: shard.path for shard in shards for e in shard.entries}
    edited = {edit.path: edit.content.encode() for edit in plan.edits}
    config = edited.get(output.config) or read_file(source, source.files()[output.config], CONFIG_MAX)
    made = plan_devices(meta_loader, config, specs, files, max_memory=max_memory, device_map=device_map)
    limits = max_memory or {}
    given = () if device_map is None or isinstance(device_map, str) else device_map.values()
    named = [*limits, *given] if made.blocks else []
    devices = [
        plans.Device(device=d, limit=limits.get(d), bytes=made.bytes_of(d), files=list(made.files_of(d)))
        for d in dict.fromkeys([*named, *(block.device for block in made.blocks)])
    ]
    return plans.DeviceMap.of(made, checkpoint=name, class_=made.class_name, kept_whole=made.no_split, devices=devices)


def device_text(seen: plans.DeviceMap) -> str:
    """The devices of a checkpoint for people: what each holds and reads, and which blocks lie in several files."""
    if seen.result != "planned":
        return f"Devices for {seen.checkpoint}: {seen.result} ({seen.reason})"
    whole = ", ".join(seen.kept_whole or []) or "none (the class lists no blocks to keep whole)"
    rows = []
    for device in seen.devices or []:
        limit = "" if device.limit is None else f"of {human_bytes(device.limit)}"
        reads = f"reads {_span(device.files)}" if device.files else "unused"
        rows.append((f"device {device.device}", human_bytes(device.bytes), limit, reads))
    head = f"Devices for {seen.checkpoint} ({seen.class_}); blocks kept whole: {whole}"
    spans = [f"{b.name or 'the rest'} spans {_span(b.files)}" for b in seen.blocks or [] if len(b.files) > 1]
    rest = [*first(spans, STRADDLING_SHOWN, "blocks that span several files"), *(seen.notes or [])]
    return "\n".join([head, lines(rows, {1}, "  "), *(f"  {line}" for line in rest)])


def _span(files: list[str]) -> str:
    return files[0] if len(files) == 1 else f"{count(len(files), 'file')}, {files[0]} to {files[-1]}"
