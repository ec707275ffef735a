"""The tensors of published models at their full size, by their configs: names, dtypes and shapes."""

from __future__ import annotations

from collections.abc import Iterator

Shapes = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape by name


def deepseek_v3() -> Shapes:
    """The shapes of deepseek-ai/DeepSeek-V3 as published: fp8 with its scales, and a layer for prediction."""
    hidden, experts, of_experts, heads = 7168, 256, 2048, 128

    def matrices() -> Iterator[tuple[str, int, int]]:
        for layer in range(62):
            at = f"model.layers.{layer}"
            yield from (
                (f"{at}.self_attn.{name}", rows, columns)
                for name, rows, columns in (
                    ("q_a_proj", 1536, hidden), ("q_b_proj", heads * 192, 1536), ("kv_a_proj_with_mqa", 576, hidden),
                    ("kv_b_proj", heads * 256, 512), ("o_proj", hidden, heads * 128),
                )
            )  # fmt: skip
            mlps = [("mlp", 18432)] if layer < 3 else [("mlp.shared_experts", of_experts)]
            mlps += [(f"mlp.experts.{number}", of_experts) for number in range(experts) if layer >= 3]
            for mlp, inner in mlps:
                yield from ((f"{at}.{mlp}.{one}_proj", inner, hidden) for one in ("gate", "up"))
                yield f"{at}.{mlp}.down_proj", hidden, inner

    found: Shapes = {
        "model.embed_tokens.weight": ("BF16", (129280, hidden)), "model.norm.weight": ("BF16", (hidden,)),
        "lm_head.weight": ("BF16", (129280, hidden)), "model.layers.61.eh_proj.weight": ("BF16", (hidden, 2 * hidden)),
        "model.layers.61.embed_tokens.weight": ("BF16", (129280, hidden)),
        "model.layers.61.shared_head.head.weight": ("BF16", (129280, hidden)),
    }  # fmt: skip
    for name, rows, columns in matrices():
        found[f"{name}.weight"] = "F8_E4M3", (rows, columns)
        found[f"{name}.weight_scale_inv"] = "F32", (-(-rows // 128), -(-columns // 128))
    for layer in range(62):
        at = f"model.layers.{layer}"
        found |= {f"{at}.{norm}_layernorm.weight": ("BF16", (hidden,)) for norm in ("input", "post_attention")}
        if layer >= 3:
            found[f"{at}.mlp.gate.weight"] = "BF16", (experts, hidden)
            found[f"{at}.mlp.gate.e_score_correction_bias"] = "F32", (experts,)
    return found


def dense(
    *, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, head: int, vocabulary: int, biases: bool = False
) -> Shapes:
    """A Llama in bfloat16, or with ``biases`` a Qwen 2."""
    found: Shapes = {
        "model.embed_tokens.weight": ("BF16", (vocabulary, hidden)), "lm_head.weight": ("BF16", (vocabulary, hidden)),
        "model.norm.weight": ("BF16", (hidden,)),
    }  # fmt: skip
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            found[f"{at}.self_attn.{name}_proj.weight"] = "BF16", (count * head, hidden)
            if biases:
                found[f"{at}.self_attn.{name}_proj.bias"] = "BF16", (count * head,)
        found[f"{at}.self_attn.o_proj.weight"] = "BF16", (hidden, heads * head)
        found |= {f"{at}.mlp.{name}_proj.weight": ("BF16", (inner, hidden)) for name in ("gate", "up")}
        found[f"{at}.mlp.down_proj.weight"] = "BF16", (hidden, inner)
        found |= {f"{at}.{norm}_layernorm.weight": ("BF16", (hidden,)) for norm in ("input", "post_attention")}
    return found


def llama_3_8b() -> Shapes:
    return dense(layers=32, hidden=4096, inner=14336, heads=32, kv_heads=8, head=128, vocabulary=128256)


def qwen_2_5_7b() -> Shapes:
    return dense(layers=28, hidden=3584, inner=18944, heads=28, kv_heads=4, head=128, vocabulary=152064, biases=True)
