"""The cases: each builds a small model of a real class, saved the way the world saves it, and says how to reshard it.

Add one here and run ``python -m tests.formats --write docs/formats.md``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from tests.formats import quantized, remote_code, saving, tokenizers
from tests.formats.distributed import by_fsdp, by_zero
from tests.formats.models import cast_to, model_of
from tests.formats.saving import State

SIZE = 60_000  # bytes; every model here is cut into several files


@dataclass(frozen=True)
class Built:
    """What a case left in its folder.

    ``expected`` is what the output must hold, by checkpoint: the path that its single file would have. ``model`` gives
    the reference answer; None where no class of transformers' own knows the weights.
    """

    expected: dict[str, State]
    model: Any = None


@dataclass(frozen=True)
class Case:
    """One row of the table. ``place``: where the source is when the product reads it."""

    what: str  # shown in the table
    saved: str  # shown in the table
    build: Callable[[Path], Built]
    options: dict[str, Any] = field(default_factory=dict)
    place: Literal["hub", "folder", "cache", "bucket"] = "hub"
    expect: tuple[str, ...] = ()  # carried files that the target must have, byte for byte
    home: str = "source"  # the folder beside it that has config and tokenizer: the source's own, or a lender's
    peer: str = "source"  # the folder beside it whose weights the loaders are asked of, where the model is not enough


CASES: dict[str, Case] = {}


def case(name: str, what: str, saved: str, **more: Any) -> Callable[[Callable[[Path], Built]], None]:
    def register(build: Callable[[Path], Built]) -> None:
        more["options"] = {"size": SIZE, **more.get("options", {})}
        CASES[name] = Case(what, saved, build, **more)

    return register


def one(state: State, model: Any = None) -> Built:
    """A repository with one checkpoint, which loaders look for as ``model.safetensors``."""
    return Built({"model.safetensors": state}, model)


def wide(state: State, dtype: torch.dtype) -> State:
    """What a cast makes of it, by torch: floats that are wider than ``dtype``, and nothing else."""
    floats = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
    return {name: tensor.to(dtype) if tensor.dtype in floats else tensor for name, tensor in state.items()}


# ------------------------------------------------------------------------------------------- torch files of all kinds


@case("t5", "T5, sentencepiece, tied", "`pytorch_model-*.bin`, every tied name", expect=("spiece.model",))
def _(folder: Path) -> Built:
    model = model_of("T5ForConditionalGeneration")
    tokenizers.t5(folder)
    return one(saving.as_bins(saving.configured(model, folder), folder, 3), model)


@case("t5-accelerate", "T5, sentencepiece, tied", "`Accelerator.save_model`", expect=("spiece.model",))
def _(folder: Path) -> Built:
    model = model_of("T5ForConditionalGeneration")
    tokenizers.t5(folder)
    return one(saving.by_accelerate(model, folder), model)


@case("t5-ties", "T5, sentencepiece, tied", "`pytorch_model.bin`; `--ties source`", options={"ties": "source"})
def _(folder: Path) -> Built:
    model = model_of("T5ForConditionalGeneration")
    tokenizers.t5(folder)
    state = saving.as_bin(saving.configured(model, folder), folder)
    tied = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}
    return one({name: tensor for name, tensor in state.items() if name not in tied}, model)


# The storages of such a file are in the order of their addresses: only by name is the plan the same each time.
@case(
    "gpt2",
    "GPT-2 in its Hub layout",
    "`pytorch_model.bin` from before the zip format; `--pack layers`",
    options={"pack": "layers"},
)
def _(folder: Path) -> Built:
    model = model_of("GPT2LMHeadModel")
    tokenizers.gpt2(folder)
    state = saving.configured(model, folder)
    # The first repository has the names of GPT2Model, without the head, and each block's causal mask.
    bare = {name.removeprefix("transformer."): t for name, t in state.items() if name != "lm_head.weight"}
    bare |= {f"h.{i}.attn.bias": torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64) for i in range(2)}
    return one(saving.as_bin(bare, folder, zipped=False), model)


@case("gptj", "GPT-J", "files under odd names, `index.json` a bare map", place="folder")
def _(folder: Path) -> Built:
    model = model_of("GPTJForCausalLM")
    tokenizers.gpt2(folder)
    return one(saving.as_bare_map(saving.configured(model, folder), folder), model)


@case("gptj-tied", "GPT-J, `tie_word_embeddings`", "`pytorch_model-*.bin`")
def _(folder: Path) -> Built:
    model = model_of("GPTJForCausalLM", tie_word_embeddings=True)
    tokenizers.gpt2(folder)
    state = saving.configured(model, folder)
    # Untied copies would have biases of their own; here the head's weight is the embedding's.
    return one(saving.as_bins(state, folder, 2), model)


@case("bert", "BERT with tensor names from 2018", "`pytorch_model.bin`", expect=("vocab.txt",))
def _(folder: Path) -> Built:
    model = model_of("BertForMaskedLM")
    tokenizers.bert(folder)
    state = saving.configured(model, folder)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in state.items()
    }
    return one(saving.as_bin(old, folder), model)


@case("chatglm", "ChatGLM: its class is code in the repository", "8 `.bin` files", expect=("modeling_chatglm.py",))
def _(folder: Path) -> Built:
    tokenizers.fast(folder)
    return one(saving.as_bins(remote_code.write(folder, 0), folder, 8))


@case("chatglm-int4", "ChatGLM, int4: int8 weights, fp16 scales", "8 `.bin` files", expect=("modeling_chatglm.py",))
def _(folder: Path) -> Built:
    tokenizers.fast(folder)
    return one(saving.as_bins(remote_code.write(folder, 4), folder, 8))


# --------------------------------------------------------------------------------------------------------- safetensors


@case(
    "mistral",
    "Mistral, cast to float16",
    "safetensors and `.bin` in one repository; `--dtype float16`",
    options={"dtype": "float16", "size": 20_000},
    expect=("tokenizer.model",),
)
def _(folder: Path) -> Built:
    model = model_of("MistralForCausalLM", torch.bfloat16)
    tokenizers.llama(folder)
    state = saving.by_save_pretrained(model, folder)
    saving.as_bins(state, folder, 2)
    return one(wide(state, torch.float16), cast_to(model, torch.float16))


@case("llama", "Llama with `original/` beside it", "safetensors and `original/consolidated.00.pth`")
def _(folder: Path) -> Built:
    model = model_of("LlamaForCausalLM")
    tokenizers.llama(folder)
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    torch.save({"tok_embeddings.weight": torch.ones(400, 32)}, folder / "original" / "consolidated.00.pth")
    return one(saving.by_save_pretrained(model, folder), model)


@case("llama-tied", "Llama, tied", "`model.safetensors`; `--pack layers`", options={"pack": "layers"})
def _(folder: Path) -> Built:
    model = model_of("LlamaForCausalLM", tie_word_embeddings=True)
    tokenizers.llama(folder)
    return one(saving.by_save_pretrained(model, folder, "5GB"), model)


@case("llama-cache", "Llama", "a snapshot in the Hub's cache", place="cache", options={"pack": "balanced"})
def _(folder: Path) -> Built:
    model = model_of("LlamaForCausalLM", torch.float16)
    tokenizers.llama(folder)
    return one(saving.by_save_pretrained(model, folder, "40KB"), model)


@case("llama-merged", "Llama", "many small safetensors; `--size 50GB`", options={"size": 50_000_000_000})
def _(folder: Path) -> Built:
    model = model_of("LlamaForCausalLM")
    tokenizers.llama(folder)
    return one(saving.by_save_pretrained(model, folder, "10KB"), model)


@case("mixtral", "Mixtral", "safetensors, one tensor for each expert")
def _(folder: Path) -> Built:
    model = model_of("MixtralForCausalLM", torch.bfloat16)
    tokenizers.llama(folder)
    return one(saving.by_save_pretrained(model, folder), model)


@case("deepseek", "DeepSeek-V3 with an MTP layer", "safetensors")
def _(folder: Path) -> Built:
    model = model_of("DeepseekV3ForCausalLM", torch.bfloat16)
    tokenizers.fast(folder)
    state = saving.by_save_pretrained(model, folder)
    # Its layer for multi-token prediction stands behind the last one, and no class of transformers has it.
    mtp = {n.replace("layers.1.", "layers.2."): t.clone() for n, t in state.items() if ".layers.1." in n}
    mtp["model.layers.2.eh_proj.weight"] = torch.randn(32, 64).bfloat16()
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    return one(saving.as_safetensors(state | mtp, folder, 3), model)


@case("stray", "Mistral with a stray `mtp.safetensors`", "safetensors, one of them not in any index")
def _(folder: Path) -> Built:
    model = model_of("MistralForCausalLM", torch.bfloat16)
    tokenizers.llama(folder)
    extra = {"mtp.layers.0.weight": torch.randn(32, 32).bfloat16()}
    save_file(extra, folder / "mtp.safetensors", metadata={"format": "pt"})
    return Built({"model.safetensors": saving.by_save_pretrained(model, folder), "mtp.safetensors": extra}, model)


@case("clip", "CLIP", "`model.safetensors`")
def _(folder: Path) -> Built:
    model = model_of("CLIPModel")
    tokenizers.fast(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "CLIPImageProcessor"}))
    return one(saving.by_save_pretrained(model, folder, "5GB"), model)


@case("whisper", "Whisper", "`model.safetensors`")
def _(folder: Path) -> Built:
    model = model_of("WhisperForConditionalGeneration")
    tokenizers.gpt2(folder)
    return one(saving.by_save_pretrained(model, folder, "5GB"), model)


@case(
    "sentence-transformers",
    "sentence-transformers folder",
    "`model.safetensors`, `2_Dense/model.safetensors`",
    expect=("modules.json", "2_Dense/model.safetensors", "2_Dense/config.json"),
)
def _(folder: Path) -> Built:
    model = model_of("BertModel")
    tokenizers.bert(folder)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "config.json").write_text('{"in_features": 32, "out_features": 600}')
    save_file({"linear.weight": torch.randn(600, 32)}, folder / "2_Dense" / "model.safetensors")
    return one(saving.by_save_pretrained(model, folder, "5GB"), model)


@case(
    "adapter",
    "Llama with a LoRA adapter beside it",
    "safetensors, `adapter_model.safetensors`",
    expect=("adapter_model.safetensors", "adapter_config.json"),
)
def _(folder: Path) -> Built:
    model = model_of("LlamaForCausalLM")
    tokenizers.llama(folder)
    state = saving.by_save_pretrained(model, folder)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "none/none"}')
    save_file({"base_model.model.lora_A.weight": torch.randn(600, 32)}, folder / "adapter_model.safetensors")
    return one(state, model)


# -------------------------------------------------------------------------------------- torch's distributed checkpoints


@case("fsdp", "Llama fine-tuned with FSDP2, two ranks", "`pytorch_model_fsdp_0/*.distcp`", place="folder")
def _(folder: Path) -> Built:
    model = model_of("LlamaForCausalLM", torch.bfloat16)
    tokenizers.llama(folder)
    saving.configured(model, folder)
    (folder / "pytorch_model_fsdp_0").mkdir()
    return one(by_fsdp(model, folder / "pytorch_model_fsdp_0", "nested"), model)


def _lender(folder: Path, model: Any) -> State:
    """Config and tokenizer of ``model`` beside ``folder``, for --config-from; its state dict with every name."""
    lender = folder.parent / "lender"
    lender.mkdir()
    tokenizers.llama(lender)
    return saving.configured(model, lender)


@case(
    "fsdp-wrapped",
    "Llama, FSDP2, compiled and wrapped, weights only",
    "`*.distcp`, flat; `--strip-prefix auto --config-from`",
    options={"strip_prefix": "auto"},
    home="lender",
)
def _(folder: Path) -> Built:
    model = model_of("LlamaForCausalLM", torch.bfloat16)
    _lender(folder, model)
    return one(by_fsdp(model, folder, "wrapped"), model)


@case(
    "verl",
    "Llama trained by verl, FSDP2, two ranks",
    "`model_world_size_2_rank_*.pt`; `--config-from`",
    home="lender",
)
def _(folder: Path) -> Built:
    model = model_of("LlamaForCausalLM", torch.bfloat16)
    _lender(folder, model)
    return one(by_fsdp(model, folder, "ranks"), model)


@case("fsdp-safetensors", "Llama, FSDP2", "DCP's safetensors form")
def _(folder: Path) -> Built:
    model = model_of("LlamaForCausalLM", torch.bfloat16)
    tokenizers.llama(folder)
    saving.configured(model, folder)
    return one(by_fsdp(model, folder, "safetensors"), model)


@case("zero-2", "Llama fine-tuned with DeepSpeed, ZeRO 2, two ranks", "`global_step9/*_states.pt`")
def _(folder: Path) -> Built:
    model = model_of("LlamaForCausalLM")
    tokenizers.llama(folder)
    return one(by_zero(saving.configured(model, folder), folder, 2), model)


@case(
    "zero-3",
    "Llama, tied, fine-tuned with DeepSpeed, ZeRO 3, two ranks",
    "`global_step9/*_states.pt`; `--config-from`",
    home="lender",
)
def _(folder: Path) -> Built:
    model = model_of("LlamaForCausalLM", tie_word_embeddings=True)
    return one(by_zero(_lender(folder, model), folder, 3), model)


@case("zero-universal", "Llama fine-tuned with DeepSpeed", "a universal checkpoint")
def _(folder: Path) -> Built:
    model = model_of("LlamaForCausalLM")
    tokenizers.llama(folder)
    return one(by_zero(saving.configured(model, folder), folder, 2, universal=True), model)


# ---------------------------------------------------------------------------------------------- quantised and mixed


def _packed(folder: Path, pack: Callable[[State], quantized.Quantized], base: str) -> State:
    model = model_of(base)
    tokenizers.fast(folder)
    state, about = pack(saving.configured(model, folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": about, "dtype": "bfloat16"}))
    return saving.as_safetensors(state, folder, 2)


def _quantized(
    name: str, what: str, pack: Callable[[State], quantized.Quantized], base: str = "LlamaForCausalLM"
) -> None:
    case(name, what, "safetensors")(lambda folder: one(_packed(folder, pack, base)))


def _plain(
    name: str,
    what: str,
    pack: Callable[[State], quantized.Quantized],
    plain: Callable[[State], State],
    base: str = "LlamaForCausalLM",
) -> None:
    """One that becomes ``plain``."""

    def built(folder: Path) -> Built:
        state, model = plain(_packed(folder, pack, base)), model_of(base, torch.bfloat16)
        model.load_state_dict(state)
        return one(state, model)

    options = {"dtype": "bfloat16", "dequantize": True}
    case(name, what, "safetensors; `--dtype bfloat16 --dequantize`", options=options)(built)


_quantized("gptq", "Llama, GPTQ", quantized.gptq)
_quantized("awq", "Llama, AWQ", quantized.awq)
_quantized("bnb-8bit", "Llama, bitsandbytes int8", quantized.bitsandbytes_8bit)
_quantized("bnb-4bit", "Llama, bitsandbytes nf4", quantized.bitsandbytes_4bit)
_quantized("compressed-tensors", "Llama, compressed-tensors w4a16", quantized.compressed_tensors)
_quantized("fp8", "Llama, fp8 with block scales", quantized.fp8)
_plain("fp8-plain", "Llama, fp8 with block scales", quantized.fp8, quantized.plain_fp8)
_plain("fp8-tensor-plain", "Llama, fp8 with one scale per tensor", quantized.fp8_tensor, quantized.plain_fp8)
_plain("fp8-channel-plain", "Llama, compressed-tensors fp8", quantized.fp8_channel, quantized.plain_fp8)
_plain("fbgemm-plain", "Llama, FBGEMM fp8", quantized.fbgemm, quantized.plain_fp8)
_quantized("mxfp4", "gpt-oss, mxfp4", quantized.mxfp4, "GptOssForCausalLM")
_plain("mxfp4-plain", "gpt-oss, mxfp4", quantized.mxfp4, quantized.plain_mxfp4, "GptOssForCausalLM")


# ------------------------------------------------------------------------------- other names, other places of experts


@case(
    "renamed",
    "Mistral, saved inside a custom module",
    r"safetensors; `--rename`: `^backbone\.(model\.|lm_head)` becomes `\1`",
    options={"rename": [{r"^backbone\.(model\.|lm_head)": r"\1"}]},
)
def _(folder: Path) -> Built:
    model = model_of("MistralForCausalLM", torch.bfloat16)
    tokenizers.llama(folder)
    state = saving.configured(model, folder)
    saving.as_safetensors({f"backbone.{name}": tensor for name, tensor in state.items()}, folder, 2)
    return one(state, model)


@case(
    "experts-fused",
    "Mixtral",
    "safetensors, one tensor for each expert; `--experts fused`, `--rename`",
    options={"experts": "fused", "rename": [{"[.]block_sparse_moe[.]": ".mlp."}]},
)
def _(folder: Path) -> Built:
    model = model_of("MixtralForCausalLM", torch.bfloat16)
    tokenizers.llama(folder)
    saving.by_save_pretrained(model, folder)
    return one(dict(model.state_dict()), model)


@case(
    "experts-separate",
    "DeepSeek-V3",
    "safetensors, the experts of a layer stacked; `--experts separate`",
    options={"experts": "separate"},
    peer="saved",
)
def _(folder: Path) -> Built:
    model = model_of("DeepseekV3ForCausalLM", torch.bfloat16)
    tokenizers.fast(folder)
    saving.as_safetensors(saving.configured(model, folder), folder, 2)
    # What transformers makes of it; accelerate knows no other names than the model's in memory.
    return one(saving.by_save_pretrained(model, folder.parent / "saved"), model)


@case("bucket", "Llama", "safetensors in a bucket, `s3://`", place="bucket")
def _(folder: Path) -> Built:
    model = model_of("LlamaForCausalLM", torch.bfloat16)
    tokenizers.llama(folder)
    return one(saving.by_save_pretrained(model, folder), model)
