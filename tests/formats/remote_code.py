"""A model whose class is code in its repository, as ChatGLM's was: eight .bin files, plain or packed to four bits."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.formats.saving import State

CONFIGURATION = """\
from transformers import PretrainedConfig


class ChatGLMConfig(PretrainedConfig):
    model_type = "chatglm"

    def __init__(self, vocab_size=400, hidden_size=32, num_layers=2, quantization_bit=0, **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.quantization_bit = quantization_bit
        super().__init__(**kwargs)
"""

MODELING = '''\
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_chatglm import ChatGLMConfig


class QuantizedLinear(nn.Module):
    """Two four-bit values in each byte, and a float16 scale for each row."""

    def __init__(self, columns, rows):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns // 2, dtype=torch.int8), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.zeros(rows, dtype=torch.float16), requires_grad=False)

    def forward(self, x):
        low, high = (self.weight << 4) >> 4, self.weight >> 4
        full = torch.stack((high, low), dim=-1).reshape(self.weight.shape[0], -1).to(x.dtype)
        return nn.functional.linear(x, full * self.weight_scale[:, None].to(x.dtype))


class GLMBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        kind = QuantizedLinear if config.quantization_bit else lambda i, o: nn.Linear(i, o, bias=False)
        self.input_layernorm = nn.LayerNorm(config.hidden_size)
        self.dense_h_to_4h = kind(config.hidden_size, 4 * config.hidden_size)
        self.dense_4h_to_h = kind(4 * config.hidden_size, config.hidden_size)

    def forward(self, x):
        return x + self.dense_4h_to_h(nn.functional.gelu(self.dense_h_to_4h(self.input_layernorm(x))))


class ChatGLMForConditionalGeneration(PreTrainedModel):
    config_class = ChatGLMConfig
    _no_split_modules = ["GLMBlock"]

    def __init__(self, config):
        super().__init__(config)
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([GLMBlock(config) for _ in range(config.num_layers)])
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, input_ids, **kwargs):
        x = self.word_embeddings(input_ids)
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutput(logits=self.lm_head(x))
'''

CONFIG = {
    "architectures": ["ChatGLMForConditionalGeneration"],
    "auto_map": {
        "AutoConfig": "configuration_chatglm.ChatGLMConfig",
        "AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration",
    },
    "model_type": "chatglm",
    "torch_dtype": "float16",
}

_HIDDEN, _VOCABULARY, _LAYERS = 32, 400, 2


def write(folder: Path, bits: int) -> State:
    """The repository without its weights; returns those, which its class understands."""
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_bit": bits}))
    (folder / "configuration_chatglm.py").write_text(CONFIGURATION)
    (folder / "modeling_chatglm.py").write_text(MODELING)
    generator = torch.Generator().manual_seed(0)

    def half(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) / 4).half()

    def matrix(name: str, rows: int, columns: int) -> State:
        if not bits:
            return {f"{name}.weight": half(rows, columns)}
        packed = torch.randint(-128, 128, (rows, columns // 2), generator=generator, dtype=torch.int8)
        return {f"{name}.weight": packed, f"{name}.weight_scale": half(rows).abs() / 8}

    state = {"word_embeddings.weight": half(_VOCABULARY, _HIDDEN)}
    for i in range(_LAYERS):
        layer = f"layers.{i}"
        state |= {f"{layer}.input_layernorm.weight": half(_HIDDEN), f"{layer}.input_layernorm.bias": half(_HIDDEN)}
        state |= matrix(f"{layer}.dense_h_to_4h", 4 * _HIDDEN, _HIDDEN)
        state |= matrix(f"{layer}.dense_4h_to_h", _HIDDEN, 4 * _HIDDEN)
    return state | {"lm_head.weight": half(_VOCABULARY, _HIDDEN)}
