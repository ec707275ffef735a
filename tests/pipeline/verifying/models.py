"""Small models of real classes, saved by transformers itself; and the headers of large ones, without their bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from reshard.pipeline.checkpoint.formats.safetensors import parse_header
from reshard.pipeline.verifying.structure import signature

Specs = dict[str, tuple[str, tuple[int, ...]]]

_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
_LLAMA = {**_SMALL, "intermediate_size": 48, "num_key_value_heads": 2}
_SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 96,
}

# Class and config of every honest model; each is another way in which names in files and in the model differ.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _LLAMA),
    "llama-tied": ("LlamaForCausalLM", {**_LLAMA, "tie_word_embeddings": True}),
    "t5": ("T5ForConditionalGeneration", {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 16}),
    "gptj": ("GPTJForCausalLM", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "rotary_dim": 4}),
    "bert": ("BertForMaskedLM", {**_SMALL, "intermediate_size": 48}),
    "bert-base": ("BertModel", {**_SMALL, "intermediate_size": 48}),
    "bart": ("BartForConditionalGeneration", {**_SEQ2SEQ, "max_position_embeddings": 16}),
    "mixtral": ("MixtralForCausalLM", {**_LLAMA, "num_local_experts": 4}),
    "whisper": (
        "WhisperForConditionalGeneration",
        {**_SEQ2SEQ, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    ),
}

# By `make test` those whose tensors are tied, named, transposed or stacked unlike the others'.
EACH_CONFIG = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in {"llama-tied", "t5", "gpt2", "mixtral"} else pytest.mark.slow)
        for name in CONFIGS
    ],
)


@dataclass(frozen=True)
class Saved:
    """What a folder that transformers wrote holds."""

    folder: Path
    config: bytes
    specs: Specs

    def with_config(self, **changes: Any) -> bytes:
        return json.dumps({**json.loads(self.config), **changes}).encode()


def save(name: str, folder: Path, **changes: Any) -> Saved:
    """A model of CONFIGS with random weights, as its own ``save_pretrained`` writes it."""
    class_name, settings = CONFIGS[name]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    model_class(model_class.config_class(**{**settings, **changes})).save_pretrained(folder)
    return read(folder)


def read(folder: Path) -> Saved:
    headers = {
        path.name: parse_header(path.read_bytes(), file=path.name, file_size=path.stat().st_size)
        for path in folder.glob("*.safetensors")
    }
    return Saved(folder, (folder / "config.json").read_bytes(), signature(headers))


def layout(config: Any) -> tuple[bytes, Specs]:
    """The config.json of a model in bfloat16, however large, and its tensors as the Hub has them."""
    from transformers.core_model_loading import revert_weight_conversion

    model_class = getattr(transformers, config.architectures[0])
    with torch.device("meta"):
        model = model_class(config).to(torch.bfloat16)
    state = revert_weight_conversion(model, model.state_dict())
    return config.to_json_string(use_diff=False).encode(), {name: ("BF16", tuple(t.shape)) for name, t in state.items()}


def deepseek_fp8(**changes: Any) -> tuple[bytes, Specs]:
    """DeepSeek-V3's layout in fine-grained fp8 with its MTP layer; unchanged, the 671B model's 91,985 tensors."""
    config = transformers.DeepseekV3Config(dtype="bfloat16", architectures=["DeepseekV3ForCausalLM"], **changes)
    text, specs = layout(config)
    last = config.num_hidden_layers - 1
    for name, spec in list(specs.items()):
        if name.startswith(f"model.layers.{last}."):
            specs[name.replace(f"layers.{last}.", f"layers.{last + 1}.")] = spec
    quantized: Specs = {}
    for name, (dtype, shape) in specs.items():
        if name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            quantized[name] = ("F8_E4M3", shape)
            quantized[f"{name}_scale_inv"] = ("F32", tuple(-(-size // 128) for size in shape))
        else:
            quantized[name] = (dtype, shape)
    settings = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    return json.dumps({**json.loads(text), "quantization_config": settings}).encode(), quantized


DEEPSEEK_SMALL: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
}
