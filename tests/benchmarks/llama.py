"""A model of Llama's shapes with random weights, of any size, written without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from reshard.pipeline.checkpoint.formats.safetensors import build_header
from tests.support.giants import Spec

WIDTH, INNER, HEADS, KV_HEADS, VOCABULARY = 2048, 8192, 32, 8, 32_000
SMALL = 16  # times narrower where the whole model is smaller than one such layer
BLOCK = 1 << 22  # weights that are made at once
NAMES = {"BF16": "bfloat16", "F32": "float32"}
SPREAD = np.float32(0.02)  # the standard deviation that models begin with, transformers' initializer_range


def config(size: int, dtype: str = "BF16") -> dict[str, object]:
    """The config of a model of about ``size`` bytes."""
    width = {"BF16": 2, "F32": 4}[dtype]
    narrow = 1 if size > 400_000_000 * width // 2 else SMALL
    hidden, inner, vocabulary = WIDTH // narrow, INNER // narrow, VOCABULARY // narrow
    kv = hidden * KV_HEADS // HEADS
    layer = (2 * hidden * hidden + 2 * kv * hidden + 3 * inner * hidden + 2 * hidden) * width
    ends = (2 * vocabulary * hidden + hidden) * width
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": max(1, round((size - ends) / layer)),
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "torch_dtype": NAMES[dtype],
    }


def specs(made: dict[str, object], dtype: str = "BF16") -> Iterator[Spec]:
    """The tensors of the model of that config."""
    hidden, inner, vocabulary, layers = (
        int(str(made[name])) for name in ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers")
    )
    kv = hidden * KV_HEADS // HEADS
    yield "model.embed_tokens.weight", dtype, (vocabulary, hidden)
    for number in range(layers):
        layer = f"model.layers.{number}"
        for name, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            yield f"{layer}.self_attn.{name}_proj.weight", dtype, (rows, hidden)
        yield f"{layer}.mlp.gate_proj.weight", dtype, (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", dtype, (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", dtype, (hidden, inner)
        yield f"{layer}.input_layernorm.weight", dtype, (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", dtype, (hidden,)
    yield "model.norm.weight", dtype, (hidden,)
    yield "lm_head.weight", dtype, (vocabulary, hidden)


def save(folder: Path, size: int, dtype: str = "BF16", seed: int = 15) -> int:
    """Write config.json and one model.safetensors of about ``size`` bytes; returns its bytes."""
    folder.mkdir(parents=True)
    made = config(size, dtype)
    (folder / "config.json").write_text(json.dumps(made))
    path = folder / "model.safetensors"
    header = build_header([(name, kind, shape) for name, kind, shape in specs(made, dtype)], {"format": "pt"})
    left = sum(int(np.prod(shape)) for _, _, shape in specs(made, dtype))
    noise = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(header)
        while left:
            weights = noise.standard_normal(min(BLOCK, left), np.float32) * SPREAD
            file.write((weights.view("<u2")[1::2] if dtype == "BF16" else weights).tobytes())
            left -= len(weights)
    return path.stat().st_size
