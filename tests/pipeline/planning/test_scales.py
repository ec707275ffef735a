"""Which weights become plain, by which scales; what is missing, left over or of another shape is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reshard.pipeline.errors import BadScale, NotDequantised
from reshard.pipeline.planning.scales import plain_config
from reshard.pipeline.planning.select import Selection, edited_config, select
from reshard.pipeline.request import Options
from reshard.pipeline.tensors import Checkpoint, Name, Piece, Tensor

Specs = dict[str, tuple[str, tuple[int, ...]]]
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def chosen(specs: Specs, settings: object = FP8, dtype: str = "bfloat16") -> Selection:
    tensors = [Tensor(n, dtype, shape, (Piece(0, 0, (0,) * len(shape), shape),)) for n, (dtype, shape) in specs.items()]
    config = json.dumps({"quantization_config": settings} if settings is not None else {})
    options = Options.model_validate({"dtype": dtype, "dequantize": True})
    return select(Checkpoint(Name("", "model"), (0,), tuple(tensors)), options, {}, config)


A: Specs = {"a.weight": ("F8_E4M3", (300, 260)), "a.weight_scale_inv": ("F32", (3, 3))}


def test_weights_take_the_dtype_their_scales_go_and_all_else_stays() -> None:
    others: Specs = {"a.bias": ("F32", (300,)), "gate.bias": ("F32", (4,)), "h.weight": ("F64", (2,))}
    selection = chosen({**A, **others, "a.input_scale": ("F32", (1,))})
    made = {entry.name: (entry.as_dtype, entry.scale and entry.scale.block) for entry in selection.entries}
    assert made == {"a.weight": ("BF16", (128, 128)), **{name: (kind, None) for name, (kind, _) in others.items()}}
    assert selection.scales == {"a.weight_scale_inv", "a.input_scale"}
    assert selection.notes == (
        "1 weights become BF16, of F8_E4M3 and as many scales",
        "1 scales of activations are not written",
    )


def test_experts_that_share_a_tensor_have_their_scales_so() -> None:
    selection = chosen({"e.up": ("F8_E5M2", (4, 130, 128)), "e.up_scale_inv": ("BF16", (4, 2, 1))}, dtype="float16")
    assert [(e.name, e.as_dtype) for e in selection.entries] == [("e.up", "F16")]


def test_a_model_that_is_not_quantised_stays_as_it_is_and_the_plan_says_so() -> None:
    selection = chosen({"a.weight": ("F32", (2, 2)), "logit_scale": ("F32", ())}, None)
    assert [(e.name, e.as_dtype) for e in selection.entries] == [("a.weight", "F32"), ("logit_scale", "F32")]
    assert selection.notes == ("--dequantize finds no quantised weight",)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"a.weight_scale_inv": None}, "a.weight: it is F8_E4M3, and a.weight_scale_inv is not there"),
        ({"a.weight": None}, "a.weight_scale_inv: there is no fp8 weight that this is the scale of"),
        ({"a.weight": ("BF16", (300, 260))}, "a.weight_scale_inv: there is no fp8 weight"),
        ({"b.weight_scale": ("F32", ())}, "b.weight_scale: there is no fp8 weight"),
        ({"a.weight_scale_inv": ("F32", (2, 3))}, r"a.weight_scale_inv: its shape is \[2, 3\], and a.weight of \[300"),
        ({"a.weight_scale_inv": ("F32", (3, 2))}, r"has blocks of \[128, 128\]: \[3, 3\]"),
        ({"a.weight_scale_inv": ("F32", (9,))}, r"its shape is \[9\]"),
        ({"a.weight_scale_inv": ("F32", (1, 3, 3))}, r"its shape is \[1, 3, 3\]"),
        ({"a.weight_scale_inv": ("I32", (3, 3))}, "a.weight_scale_inv: it is I32, and scales are F32"),
        ({"a.weight_scale_inv": ("F8_E4M3", (3, 3))}, "a.weight_scale_inv"),
        ({"a.weight": ("F8_E4M3", (300,))}, r"a.weight_scale_inv: its shape is \[3, 3\], and a.weight of \[300\]"),
        ({"a.weight": ("F8_E4M3", ())}, r"a.weight_scale_inv: its shape is \[3, 3\]"),
        ({"a.weight": ("F8_E4M3", (0, 260))}, r"a.weight_scale_inv: its shape is \[3, 3\], .*: \[0, 3\]"),
    ],
)
def test_scales_and_weights_that_do_not_fit_are_named(changes: dict[str, Any], says: str) -> None:
    specs = {name: spec for name, spec in (A | changes).items() if spec is not None}
    with pytest.raises(BadScale, match=says):
        chosen(specs)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"quant_method": "gptq", "bits": 4}, "weights quantised by 'gptq' are not known here"),
        ({"weight_block_size": [128, 128]}, "weights quantised by None are not known here"),
        ({**FP8, "weight_block_size": [0, 128]}, r"weight_block_size in config.json is \[0, 128\]"),
        ({**FP8, "weight_block_size": [-128, 128]}, "weight_block_size"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size"),
        ({**FP8, "weight_block_size": 128}, "weight_block_size in config.json is 128"),
        ({**FP8, "weight_block_size": [1e9, "128"]}, "weight_block_size"),
        ("fp8", "is no JSON object"),
    ],
)
def test_other_ways_to_quantise_are_refused(settings: object, says: str) -> None:
    with pytest.raises(NotDequantised, match=says):
        chosen(A, settings)


def test_a_dtype_is_needed() -> None:
    with pytest.raises(NotDequantised, match="it needs --dtype"):
        chosen(A, dtype="keep")


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"a": NaN'])
def test_a_config_that_is_no_json_is_refused_and_stays(text: str) -> None:
    with pytest.raises(NotDequantised, match="no JSON"):
        select(Checkpoint(Name("", "model"), (0,), ()), Options(dtype="bfloat16", dequantize=True), {}, text)
    assert plain_config(text, "bfloat16") == text


SETTINGS = '"quantization_config": {"quant_method": "fp8", "x": {"y": [1, "}"]}}'


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f'{{\n  "a": 1,\n  {SETTINGS},\n  "b": 2\n}}\n', '{\n  "a": 1,\n  "b": 2\n}\n'),
        (f'{{\n  {SETTINGS},\n  "b": 2\n}}', '{\n  "b": 2\n}'),
        (f'{{\n  "a": 1,\n  {SETTINGS}\n}}', '{\n  "a": 1\n}'),
        (f"{{{SETTINGS}}}", "{}"),
        (f'{{"t": {{"a": 1, {SETTINGS}}}, {SETTINGS}}}', '{"t": {"a": 1}}'),
        (r'{"a": "\"quantization_config\": 1", "b": "quantization_config"}', None),
        ('{"torch_dtype": "float8_e4m3fn", "dtype": "float32"}', '{"torch_dtype": "bfloat16", "dtype": "float32"}'),
    ],
)
def test_the_config_loses_its_settings_and_nothing_else(text: str, wanted: str | None) -> None:
    made = edited_config(text, Options(dtype="bfloat16", dequantize=True))
    assert made == (text if wanted is None else wanted)
    json.loads(made)
