"""Casts leave quantised models alone, bit for bit, whatever their companion tensors are called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from reshard.pipeline.errors import Unsupported
from reshard.pipeline.planning.select import quantised, select
from reshard.pipeline.request import Options
from reshard.pipeline.tensors import Checkpoint, Name, Piece, Tensor
from tests.formats import quantized as layouts
from tests.formats import remote_code
from tests.formats.models import model_of
from tests.formats.saving import State

_NAMES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
    torch.int8: "I8", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip


def tensor(name: str, dtype: str) -> Tensor:
    return Tensor(name, dtype, (4,), (Piece(0, 0, (0,), (4,)),))


def checkpoint(state: State) -> Checkpoint:
    return Checkpoint(Name("", "model"), (0,), tuple(tensor(n, _NAMES[t.dtype]) for n, t in state.items()))


def of_llama(pack: Callable[[State], layouts.Quantized]) -> State:
    return pack(dict(model_of("LlamaForCausalLM").state_dict()))[0]


PACKINGS: dict[str, Callable[[Path], State]] = {
    "gptq": lambda _: of_llama(layouts.gptq),
    "awq": lambda _: of_llama(layouts.awq),
    "bnb 8 bit": lambda _: of_llama(layouts.bitsandbytes_8bit),
    "bnb 4 bit": lambda _: of_llama(layouts.bitsandbytes_4bit),
    "compressed-tensors": lambda _: of_llama(layouts.compressed_tensors),
    "fp8": lambda _: of_llama(layouts.fp8),
    "int4 of ChatGLM": lambda folder: remote_code.write(folder, 4),
}


def test_code_books_and_shifts_beside_packed_tensors_are_never_cast() -> None:
    """Of VPTQ and optimum-quanto."""
    kept = {
        "q.indices": "U16", "q.centroids.weight": "F16", "q.res_centroids.weight": "F16",
        "k.weight._data._data": "U8", "k.weight._shift": "F16",
    }  # fmt: skip
    found = Checkpoint(
        Name("", "model"), (0,), tuple(tensor(*spec) for spec in (kept | {"norm.weight": "F16"}).items())
    )
    cast = {entry.name for entry in select(found, Options(dtype="bfloat16"), {}).entries if entry.cast}
    assert cast == {"norm.weight"}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("wanted", ["float16", "bfloat16"])
def test_what_is_packed_and_what_belongs_to_it_is_never_cast(packing: str, wanted: str, tmp_path: Path) -> None:
    found = checkpoint(PACKINGS[packing](tmp_path))
    selection = select(found, Options(dtype=wanted), {})
    cast = {entry.name for entry in selection.entries if entry.cast}
    assert not any("_proj" in name or "dense_" in name for name in cast)
    plain = {t.name for t in found.tensors if "norm" in t.name or "embed" in t.name or t.name == "lm_head.weight"}
    same = {t.name for t in found.tensors if t.dtype == {"float16": "F16", "bfloat16": "BF16"}[wanted]}
    assert cast == plain - same, "the rest of the model is"


def test_a_name_that_headers_have_for_their_own_texts_is_refused() -> None:
    found = Checkpoint(Name("", "model"), (0,), tuple(tensor(name, "F32") for name in ("w", "__metadata__")))
    with pytest.raises(Unsupported, match="cannot convert model to safetensors: a tensor named __metadata__"):
        select(found, Options(), {})


def test_the_plan_says_which_floats_stay_because_of_what_they_belong_to() -> None:
    found = Checkpoint(
        Name("", "model"),
        (0,),
        (tensor("a.weight", "F8_E4M3"), tensor("a.weight_scale_inv", "F32"), tensor("norm.weight", "F32")),
    )
    assert select(found, Options(dtype="bfloat16"), {}).notes == (
        "1 tensor is cast from F32 to BF16",
        "1 F32 tensor is not cast (part of packed weights)",
        "1 F8_E4M3 tensor is not cast",
    )


def test_masks_and_counters_make_no_model_a_quantised_one() -> None:
    """GPT-2's causal mask was uint8 once, and batch norms count in int64: what lies deeper or beside is cast."""
    names = {"h.0.attn.bias": "U8", "h.0.attn.c_attn.weight": "F32", "bn.num_batches_tracked": "I64", "bn.mean": "F32"}
    assert quantised([tensor(name, dtype) for name, dtype in names.items()]) == {"h.0.attn.bias"}
    buffers = {"version": "U8", "cls_token": "F32", "emb.position_ids": "I32", "emb.cls": "F32", "a.logit_scale": "F32"}
    assert quantised([tensor(name, dtype) for name, dtype in buffers.items()]) == set()


def test_scales_of_a_cache_stay_where_the_model_is_quantised_and_only_there() -> None:
    scale, weight = tensor("attn.k_scale", "F32"), tensor("mlp.up.weight", "F8_E4M3")
    assert quantised([scale, weight]) == {"attn.k_scale", "mlp.up.weight"}
    assert quantised([scale, tensor("mlp.up.weight", "F32")]) == set()


@pytest.mark.parametrize("stack", ["_orig_mod.module.", "module."])
def test_a_stack_of_wrappers_that_not_all_names_have_stays_and_is_said(stack: str) -> None:
    names = (f"{stack}a.w", f"{stack}b.w", "step")
    selection = select(checkpoint({name: torch.zeros(4) for name in names}), Options(strip_prefix="auto"), {})
    assert [entry.name for entry in selection.entries] == [*names]
    [note] = selection.notes
    assert f"no prefix removed: {stack}a.w has a wrapper prefix, step has none" in note
