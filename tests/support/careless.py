"""A checkpoint of a writer that pads nothing, as the format allows: its tensors lie at any byte."""

from __future__ import annotations

import json
from pathlib import Path


def save_carelessly(folder: Path, header: int, odd: int) -> None:
    """12 layers, each a BF16 matrix of 128 KiB and 32 + ``odd`` bytes; the data begins at ``header`` modulo 16."""
    head, data = {}, b""
    for number in range(12):
        for name, dtype, shape, size in (("w", "BF16", [64, 1024], 131_072), ("flag", "U8", [32 + odd], 32 + odd)):
            spec = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + size]}
            head[f"model.layers.{number}.{name}"] = spec
            data += bytes([number]) * size
    raw = json.dumps(head).encode()
    raw += b" " * ((header - len(raw) - 8) % 16)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)
