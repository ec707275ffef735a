"""The model that the suite breaks: small, of a real class, with everything that was ever lost from one."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

LINES = ["the quick brown fox", "jumps over the lazy dog", "héllo wörld 123 日本語", "def f(x): return x"]
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
SIZE = 12_000  # bytes a file: a dozen files


def save_source(folder: Path) -> None:
    """A mixture of experts in two dtypes, with a tied head stored twice, a draft head, and a file outside the index.

    One matrix is quantised; beside the weights are a tokenizer, whose pieces only other loaders read, and a processor.
    """
    folder.mkdir(parents=True)
    config = transformers.MixtralConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
        num_local_experts=4,
        vocab_size=320,
        tie_word_embeddings=True,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(config).save_pretrained(folder)
    tensors = {name: t.to(torch.bfloat16) for name, t in load_file(folder / "model.safetensors").items()}
    for name, tensor in tensors.items():
        if "norm" in name:
            tensors[name] = torch.rand_like(tensor, dtype=torch.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["zeros.weight"] = torch.zeros(16)
    tensors["nans.weight"] = torch.full((16,), torch.nan)
    tensors["mtp.layers.0.proj.weight"] = torch.randn(32, 32, dtype=torch.bfloat16)
    tensors["mtp.layers.0.packed.weight"] = torch.randn(32, 32).to(torch.float8_e4m3fn)
    tensors["mtp.layers.0.packed.weight_scale_inv"] = torch.rand(1, 1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file({"draft.weight": torch.randn(8, 8)}, folder / "mtp.safetensors", metadata={"format": "pt"})
    save_tokenizer(folder)
    (folder / "tokenizer.model").write_bytes(bytes(range(256)))
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5, 0.5, 0.5], "size": 32}))
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": 16}))
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.5}))
    (folder / "configuration_own.py").write_text("# code of the model's owner, which nobody runs\nWIDTH = 32\n")
    (folder / "LICENSE").write_text("Do as you please.\n")


def save_tokenizer(folder: Path, lines: list[str] = LINES) -> None:
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(lines * 3, vocab_size=310, special_tokens=["<s>", "</s>", "<pad>"], show_progress=False)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made._tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=64
    )
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
