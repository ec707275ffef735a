"""Checkpoints of the size of real ones, as sparse files: true headers, true lengths, and no bytes on the disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from reshard.pipeline.checkpoint.formats.safetensors import build_header
from reshard.pipeline.tensors import size_in_bytes

Spec = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


def deepseek_v3_fp8(layers: int = 62) -> Iterator[Spec]:
    """The 91,991 tensors of a 671B mixture of experts in fp8 with its scales, by the shapes of DeepSeek-V3.

    61 layers and one for multi-token prediction; 256 routed experts in all but the first three; every fp8 matrix has a
    float32 scale per block of 128 x 128. (Config: hidden 7168, expert 2048, dense 18432, kv rank 512, q rank 1536.)
    """
    hidden, heads = 7168, 128

    def fp8(name: str, rows: int, columns: int) -> Iterator[Spec]:
        yield f"{name}.weight", "F8_E4M3", (rows, columns)
        yield f"{name}.weight_scale_inv", "F32", (-(-rows // 128), -(-columns // 128))

    def mlp(name: str, width: int) -> Iterator[Spec]:
        yield from fp8(f"{name}.gate_proj", width, hidden)
        yield from fp8(f"{name}.up_proj", width, hidden)
        yield from fp8(f"{name}.down_proj", hidden, width)

    yield "model.embed_tokens.weight", "BF16", (129280, hidden)
    for i in range(layers):
        layer = f"model.layers.{i}"
        if i == 61:
            yield f"{layer}.embed_tokens.weight", "BF16", (129280, hidden)
            yield f"{layer}.enorm.weight", "BF16", (hidden,)
            yield f"{layer}.hnorm.weight", "BF16", (hidden,)
            yield f"{layer}.eh_proj.weight", "BF16", (hidden, 2 * hidden)
            yield f"{layer}.shared_head.norm.weight", "BF16", (hidden,)
            yield f"{layer}.shared_head.head.weight", "BF16", (129280, hidden)
        attention = f"{layer}.self_attn"
        yield from fp8(f"{attention}.q_a_proj", 1536, hidden)
        yield f"{attention}.q_a_layernorm.weight", "BF16", (1536,)
        yield from fp8(f"{attention}.q_b_proj", heads * 192, 1536)
        yield from fp8(f"{attention}.kv_a_proj_with_mqa", 576, hidden)
        yield f"{attention}.kv_a_layernorm.weight", "BF16", (512,)
        yield from fp8(f"{attention}.kv_b_proj", heads * 256, 512)
        yield from fp8(f"{attention}.o_proj", hidden, heads * 128)
        if i < 3:
            yield from mlp(f"{layer}.mlp", 18432)
        else:
            yield f"{layer}.mlp.gate.weight", "BF16", (256, hidden)
            yield f"{layer}.mlp.gate.e_score_correction_bias", "F32", (256,)
            for expert in range(256):
                yield from mlp(f"{layer}.mlp.experts.{expert}", 2048)
            yield from mlp(f"{layer}.mlp.shared_experts", 2048)
        yield f"{layer}.input_layernorm.weight", "BF16", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", "BF16", (hidden,)
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (129280, hidden)


def save_sparse(folder: Path, specs: Iterator[Spec], files: int) -> int:
    """Divide ``specs`` in order over that many files of about one size; returns how many tensors there are."""
    folder.mkdir(parents=True, exist_ok=True)
    everything = list(specs)
    total = sum(size_in_bytes(dtype, shape) for _, dtype, shape in everything)
    bins: list[list[Spec]] = [[] for _ in range(files)]
    passed = 0
    for spec in everything:
        bins[min(files - 1, passed * files // total)].append(spec)
        passed += size_in_bytes(spec[1], spec[2])
    weight_map = {}
    for number, members in enumerate(bins, 1):
        name = f"model-{number:05d}-of-{files:06d}.safetensors"
        header = build_header(members, {"format": "pt"})
        with (folder / name).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(size_in_bytes(dtype, shape) for _, dtype, shape in members))
        weight_map |= {spec[0]: name for spec in members}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return len(everything)
