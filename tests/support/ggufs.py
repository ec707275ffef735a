"""GGUF files as `gguf`, the Python package of llama.cpp, writes them and reads them back: nothing of ours is in it."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

VOCABULARY = [f"token {i}" for i in range(300)] + ["ünïcode", ""]


class Read(NamedTuple):
    """What a reader finds in one file."""

    keys: dict[str, Any]
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]]  # type, shape (rows first), bytes
    alignment: int


def contents(kind: str, shape: Sequence[int], seed: int) -> bytes:
    """The bytes of a tensor: any bytes are blocks of any kind."""
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return np.random.default_rng(seed).bytes(prod(shape) // elements * size)


def save(
    path: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    *,
    alignment: int | None = None,
    keys: Mapping[str, int] | None = None,
    per_file: int = 0,
    keys_alone: bool = False,
    architecture: str = "llama",
    kind: str = "",
) -> dict[str, bytes]:
    """Write a model of these (type, shape) to ``path``, or in parts of ``per_file`` tensors; returns their bytes.

    ``keys_alone``: the first part has no tensors. ``kind``: its general.type, where it has one.
    """
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=per_file, small_first_shard=keys_alone)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    if kind:
        writer.add_type(kind)
    writer.add_name("a model")
    writer.add_block_count(2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_token_list(VOCABULARY)
    writer.add_token_scores([float(i) for i in range(len(VOCABULARY))])
    writer.add_add_bos_token(True)
    for key, value in (keys or {}).items():
        writer.add_uint32(key, value)
    made = {name: contents(*spec, seed) for seed, (name, spec) in enumerate(tensors.items())}
    for name, (kind, shape) in tensors.items():
        row = len(made[name]) // max(1, prod(shape[:-1]))
        data = np.frombuffer(made[name], np.uint8).reshape(*shape[:-1], row)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    path.parent.mkdir(parents=True, exist_ok=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made


def save_odd(path: Path, kind: int = 31) -> None:
    """One tensor of a type that ggml has taken out, or is still to come."""
    head = b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<IQIQ", 1, 32, kind, 0)
    path.write_bytes(head + bytes(-len(head) % 32 + 64))


def read(path: Path) -> Read:
    """The file as the package's own reader has it."""
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    tensors = {
        tensor.name: (tensor.tensor_type.name, tuple(map(int, tensor.shape))[::-1], tensor.data.tobytes())
        for tensor in reader.tensors
    }
    return Read(keys, tensors, int(reader.alignment))


# A model of two blocks in the kinds of a Q4_K_M file.
MODEL: dict[str, tuple[str, tuple[int, ...]]] = {
    "token_embd.weight": ("Q4_K", (302, 256)),
    **{
        f"blk.{block}.{name}": spec
        for block in range(2)
        for name, spec in {
            "attn_norm.weight": ("F32", (256,)),
            "attn_q.weight": ("Q4_K", (256, 256)),
            "attn_v.weight": ("Q6_K", (64, 256)),
            "ffn_down.weight": ("Q6_K", (256, 512)),
            "ffn_up.weight": ("Q4_K", (512, 256)),
            "bias": ("F32", (5,)),  # which is padded
        }.items()
    },
    "output_norm.weight": ("F32", (256,)),
    "output.weight": ("Q8_0", (302, 256)),
}
