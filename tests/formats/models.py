"""Small models of the real classes, with random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.formats.tokenizers import VOCABULARY

_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY}
_LLAMA = {**_SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64}
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}

CONFIGS: dict[str, dict[str, Any]] = {
    "T5ForConditionalGeneration": {
        "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY,
        "decoder_start_token_id": 0,
    },
    "MistralForCausalLM": _LLAMA,
    "LlamaForCausalLM": _LLAMA,
    "GPTJForCausalLM": {**_GPT, "rotary_dim": 4},
    "GPT2LMHeadModel": _GPT,
    "MixtralForCausalLM": {**_LLAMA, "num_local_experts": 4},
    "Qwen3MoeForCausalLM": {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "DeepseekV3ForCausalLM": {
        **_SMALL, "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
        "max_position_embeddings": 64,
    },
    "BertForMaskedLM": {**_SMALL, "intermediate_size": 48, "max_position_embeddings": 64},
    "BertModel": {**_SMALL, "intermediate_size": 48, "max_position_embeddings": 64},
    "CLIPModel": {
        "text_config": {**_TOWER, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "eos_token_id": 2},
        "vision_config": {**_TOWER, "image_size": 32, "patch_size": 16},
        "projection_dim": 16,
    },
    "WhisperForConditionalGeneration": {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": VOCABULARY,
        "num_mel_bins": 8, "max_source_positions": 32, "max_target_positions": 32, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    },
    "GptOssForCausalLM": {
        **_SMALL, "intermediate_size": 32, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "head_dim": 8, "max_position_embeddings": 64, "sliding_window": 16, "layer_types": None,
    },
}  # fmt: skip


def model_of(class_name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model of CONFIGS; the weights are the same each time."""
    torch.manual_seed(0)
    model_class = getattr(transformers, class_name)
    config = model_class.config_class(**{**CONFIGS[class_name], **changes})
    config.architectures = [class_name]
    model = model_class._from_config(config, dtype=dtype).eval()
    # Norms begin as ones and biases as zeros, among which an exchange would go unseen.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape).to(dtype) / 8)
    return model


def cast_to(model: Any, dtype: torch.dtype) -> Any:
    """The model with its weights cast; what the class computes for itself, as rotary frequencies, stays."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model
