"""The tensors that quantisers leave, made by hand: none of their packages is needed to move what they wrote.

Each function takes a Llama's state dict and gives the same with its block's matrices packed, and the config's
``quantization_config``. The layouts are those of AutoGPTQ, AutoAWQ, bitsandbytes, compressed-tensors and transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.formats.saving import State

GROUP = 16  # columns that share a scale
BLOCK = 16  # rows and columns of an fp8 block that share a scale

Quantized = tuple[State, dict[str, Any]]


def _each_matrix(state: State, pack: Any) -> State:
    made: State = {}
    generator = torch.Generator().manual_seed(1)
    for name, tensor in state.items():
        if name.endswith("_proj.weight"):
            made |= pack(name.removesuffix(".weight"), tensor, generator)
        else:
            made[name] = tensor.to(torch.float16)
    return made


def _integers(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, generator=generator, dtype=torch.int32)


def gptq(state: State) -> Quantized:
    def pack(name: str, weight: torch.Tensor, generator: torch.Generator) -> State:
        rows, columns = weight.shape
        groups = columns // GROUP
        return {
            f"{name}.qweight": _integers(generator, columns // 8, rows),
            f"{name}.qzeros": _integers(generator, groups, rows // 8),
            f"{name}.scales": torch.rand(groups, rows, generator=generator).half(),
            f"{name}.g_idx": (torch.arange(columns) // GROUP).int(),
        }

    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
    return _each_matrix(state, pack), config


def awq(state: State) -> Quantized:
    def pack(name: str, weight: torch.Tensor, generator: torch.Generator) -> State:
        rows, columns = weight.shape
        groups = columns // GROUP
        return {
            f"{name}.qweight": _integers(generator, columns, rows // 8),
            f"{name}.qzeros": _integers(generator, groups, rows // 8),
            f"{name}.scales": torch.rand(groups, rows, generator=generator).half(),
        }

    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    return _each_matrix(state, pack), config


def bitsandbytes_8bit(state: State) -> Quantized:
    def pack(name: str, weight: torch.Tensor, generator: torch.Generator) -> State:
        return {
            f"{name}.weight": torch.randint(-128, 128, weight.shape, generator=generator, dtype=torch.int8),
            f"{name}.SCB": torch.rand(weight.shape[0], generator=generator),
            f"{name}.weight_format": torch.tensor(0, dtype=torch.uint8),
        }

    return _each_matrix(state, pack), {"quant_method": "bitsandbytes", "load_in_8bit": True}


def bitsandbytes_4bit(state: State) -> Quantized:
    def pack(name: str, weight: torch.Tensor, generator: torch.Generator) -> State:
        packed = torch.randint(0, 256, (weight.numel() // 2, 1), generator=generator, dtype=torch.uint8)
        about = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": list(weight.shape)}
        return {
            f"{name}.weight": packed,
            f"{name}.weight.absmax": torch.rand(weight.numel() // 64, generator=generator),
            f"{name}.weight.quant_map": torch.linspace(-1, 1, 16),
            f"{name}.weight.quant_state.bitsandbytes__nf4": torch.tensor(
                list(json.dumps(about).encode()), dtype=torch.uint8
            ),
        }

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return _each_matrix(state, pack), config


def compressed_tensors(state: State) -> Quantized:
    def pack(name: str, weight: torch.Tensor, generator: torch.Generator) -> State:
        rows, columns = weight.shape
        return {
            f"{name}.weight_packed": _integers(generator, rows, columns // 8),
            f"{name}.weight_scale": torch.rand(rows, columns // GROUP, generator=generator).half(),
            f"{name}.weight_shape": torch.tensor([rows, columns]),
        }

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    return _each_matrix(state, pack), config


def _fp8(state: State, scale: str, shape: Callable[[int, int], tuple[int, ...]], more: Sequence[str] = ()) -> State:
    """Each matrix in fp8 beside a scale of that shape; ``more`` are scales of activations."""

    def pack(name: str, weight: torch.Tensor, generator: torch.Generator) -> State:
        return {
            f"{name}.weight": weight.to(torch.float8_e4m3fn),
            f"{name}.{scale}": torch.rand(shape(*weight.shape), generator=generator) + 0.5,
            **{f"{name}.{one}": torch.rand(1, generator=generator) for one in more},
        }

    return {
        name: t.to(torch.bfloat16) if t.dtype == torch.float16 else t for name, t in _each_matrix(state, pack).items()
    }


def fp8(state: State) -> Quantized:
    config = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
    }
    return _fp8(state, "weight_scale_inv", lambda *shape: (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))), config


def fp8_tensor(state: State) -> Quantized:
    config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    return _fp8(state, "weight_scale_inv", lambda *shape: (), ["activation_scale"]), config


def fp8_channel(state: State) -> Quantized:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    made = _fp8(state, "weight_scale", lambda rows, columns: (rows, 1))
    return {name: t.to(torch.bfloat16) if name.endswith("_scale") else t for name, t in made.items()}, config


def fbgemm(state: State) -> Quantized:
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    return _fp8(state, "weight_scale", lambda rows, columns: (rows, 1), ["input_scale_ub"]), config


def plain_fp8(state: State) -> State:
    """What the four of fp8 stand for, in bfloat16."""
    made = {name: tensor for name, tensor in state.items() if "_scale" not in name}
    for name in made:
        scale = state.get(f"{name}_scale_inv", state.get(f"{name}_scale"))
        if scale is not None:
            rows, columns = state[name].shape
            spread = scale.float().reshape((1, 1) if scale.numel() == 1 else scale.shape)
            if spread.shape not in ((1, 1), (rows, 1)):
                spread = spread.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
            made[name] = (state[name].float() * spread).to(torch.bfloat16)
    return made


def plain_mxfp4(state: State) -> State:
    """What `mxfp4` stands for, in bfloat16."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    made = {name: tensor for name, tensor in state.items() if not name.endswith(("_blocks", "_scales"))}
    for name, blocks in state.items():
        if name.endswith("_blocks"):
            weight = name.removesuffix("_blocks")
            pairs = torch.stack((values[(blocks & 15).long()], values[(blocks >> 4).long()]), -1).flatten(-2)
            plain = pairs * torch.exp2(state[f"{weight}_scales"].float() - 127)[..., None]
            made[weight] = plain.flatten(-2).transpose(1, 2).contiguous().to(torch.bfloat16)
    return made


def mxfp4(state: State) -> Quantized:
    """gpt-oss: the experts' matrices as blocks of 32 four-bit values and an exponent for each."""
    generator = torch.Generator().manual_seed(1)
    made: State = {}
    for name, tensor in state.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensor.shape
            shape = (experts, rows, columns // 32)
            made[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            made[f"{name}_scales"] = torch.randint(118, 128, shape, generator=generator, dtype=torch.uint8)
        else:
            made[name] = tensor.to(torch.bfloat16)
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return made, config
