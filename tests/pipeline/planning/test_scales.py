"""Which weights become plain, by which scales; what is missing, left over or of another shape is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reshard.pipeline.errors import BadScale, NotDequantized, RenameCollision
from reshard.pipeline.planning.scales import plain_config
from reshard.pipeline.planning.select import Selection, edited_config, select
from reshard.pipeline.request import Options
from reshard.pipeline.tensors import Checkpoint, Name, Piece, Tensor

Specs = dict[str, tuple[str, tuple[int, ...]]]
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


CHANNELS = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}


def compressed(*strategies: str, format: str = "float-quantized", **more: object) -> dict[str, Any]:
    weights = [{"type": "float", "num_bits": 8, "strategy": strategy, **more} for strategy in strategies]
    groups = {f"group_{i}": {"targets": ["Linear"], "weights": one} for i, one in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}


def chosen(
    specs: Specs, settings: object = FP8, dtype: str = "bfloat16", key: str = "quantization_config", **more: str
) -> Selection:
    tensors = [Tensor(n, dtype, shape, (Piece(0, 0, (0,) * len(shape), shape),)) for n, (dtype, shape) in specs.items()]
    texts = {"config.json": json.dumps({key: settings} if settings is not None else {}), **more}
    options = Options.model_validate({"dtype": dtype, "dequantize": True})
    return select(Checkpoint(Name("", "model"), (0,), tuple(tensors)), options, {}, texts)


A: Specs = {"a.weight": ("F8_E4M3", (300, 260)), "a.weight_scale_inv": ("F32", (3, 3))}


def test_weights_take_the_dtype_their_scales_go_and_all_else_stays() -> None:
    others: Specs = {"a.bias": ("F32", (300,)), "gate.bias": ("F32", (4,)), "h.weight": ("F64", (2,))}
    others |= {"a.q_scale": ("F32", (64,)), "a.input_scale": ("F32", (2,))}  # parameters, as by their sizes
    activations: Specs = {f"b.{name}_scale": ("F32", (1,)) for name in ("input", "k", "kv", "v", "output")}
    activations["c.k_scale"] = ("F32", ())
    selection = chosen({**A, **others, **activations})
    made = {entry.name: (entry.as_dtype, entry.scale and entry.scale.block) for entry in selection.entries}
    assert made == {"a.weight": ("BF16", (128, 128)), **{name: (kind, None) for name, (kind, _) in others.items()}}
    assert selection.scales == {"a.weight_scale_inv", *activations}
    assert selection.notes == (
        "1 F8_E4M3 weight is converted to BF16; scales are dropped",
        "scales of activations and caches are dropped: b.input_scale and 5 more",
    )


def test_experts_that_share_a_tensor_have_their_scales_so() -> None:
    selection = chosen({"e.up": ("F8_E5M2", (4, 130, 128)), "e.up_scale_inv": ("BF16", (4, 2, 1))}, dtype="float16")
    assert [(e.name, e.as_dtype) for e in selection.entries] == [("e.up", "F16")]


SQUARE = ("F8_E4M3", (6, 4))
STACKED = ("F8_E4M3", (3, 6, 4))


@pytest.mark.parametrize(
    ("weight", "shape", "settings", "grid", "block"),
    [
        (SQUARE, (), {"quant_method": "fp8"}, (1, 1), (6, 4)),
        (SQUARE, (1,), compressed("tensor"), (1, 1), (6, 4)),
        (SQUARE, (1, 1), None, (1, 1), (6, 4)),
        (SQUARE, (6,), CHANNELS, (6, 1), (1, 4)),
        (SQUARE, (6, 1), compressed("channel"), (6, 1), (1, 4)),
        (SQUARE, (6, 1), compressed("channel", "tensor", format="naive-quantized"), (6, 1), (1, 4)),
        (SQUARE, (), compressed("channel", "tensor"), (1, 1), (6, 4)),
        (SQUARE, (3, 2), compressed("block", block_structure=[2, 3]), (3, 2), (2, 3)),
        (SQUARE, (1, 4), {"quant_method": "fp8", "weight_block_size": [10**30, 1]}, (1, 4), (6, 1)),
        (STACKED, (), None, (1, 1), (18, 4)),
        (STACKED, (3,), None, (3, 1, 1), (6, 4)),
        (STACKED, (3, 1, 1), {"quant_method": "fp8", "weight_block_size": None}, (3, 1, 1), (6, 4)),
        (STACKED, (3, 6), CHANNELS, (3, 6, 1), (1, 4)),
        (STACKED, (3, 6, 1), CHANNELS, (3, 6, 1), (1, 4)),
        (STACKED, (3, 1, 4), CHANNELS, (3, 1, 4), (6, 1)),
        (("F8_E5M2", (5,)), (), None, (1, 1), (1, 5)),
        (("F8_E5M2", ()), (1,), None, (1, 1), (1, 1)),
        (("F8_E5M2", (0, 4)), (1,), None, (1, 1), (1, 4)),
    ],
)
def test_a_scale_is_for_a_tensor_a_channel_or_a_block_as_the_config_says(
    weight: tuple[str, tuple[int, ...]], shape: tuple[int, ...], settings: object, grid: object, block: object
) -> None:
    (entry,) = chosen({"up_proj": weight, "up_proj_scale": ("F32", shape)}, settings).entries
    assert entry.scale is not None
    assert (entry.scale.tensor.shape, entry.scale.block) == (grid, block)
    assert {len(piece.shape) for piece in entry.scale.tensor.pieces} == {len(entry.scale.tensor.shape)}


def test_one_value_beside_blocks_is_for_the_whole_weight_as_of_an_embedding() -> None:
    specs: Specs = {**A, "e.weight": ("F8_E4M3", (300, 64)), "e.weight_scale": ("F32", (1,))}
    made = {entry.name: entry.scale.block for entry in chosen(specs).entries if entry.scale}
    assert made == {"a.weight": (128, 128), "e.weight": (300, 64)}
    for name, shape in {"e.weight_scale": (1, 1), "e.weight_scale_inv": (1,)}.items():
        cut_off = {n: spec for n, spec in specs.items() if n != "e.weight_scale"} | {name: ("F32", shape)}
        with pytest.raises(BadScale, match="its shape is"):
            chosen(cut_off)


def test_scales_of_the_activations_of_stacked_experts_go_too() -> None:
    specs: Specs = {
        "e.up": ("F8_E4M3", (2, 32, 16)), "e.up_scale_inv": ("F32", (2, 1, 1)), "e.up_activation_scale": ("F32", (2,)),
        "e.learned_activation_scale": ("F32", (2,)),
    }  # fmt: skip
    selection = chosen(specs, {"quant_method": "fp8"})
    assert [entry.name for entry in selection.entries] == ["e.up", "e.learned_activation_scale"]
    assert selection.scales == {"e.up_scale_inv", "e.up_activation_scale"}


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ((6, 1), {"quant_method": "fp8"}),
        ((), CHANNELS),
        ((4,), CHANNELS),
        ((1, 4), CHANNELS),
        ((6, 1), FP8),
        ((3,), None),
    ],
)
def test_a_shape_that_the_config_does_not_say_is_refused(shape: tuple[int, ...], settings: object) -> None:
    with pytest.raises(BadScale, match="^up_proj_scale: its shape is"):
        chosen({"up_proj": SQUARE, "up_proj_scale": ("F32", shape)}, settings)


def test_a_model_that_is_not_quantised_stays_as_it_is_and_the_plan_says_so() -> None:
    selection = chosen({"a.weight": ("F32", (2, 2)), "logit_scale": ("F32", ())}, None)
    assert [(e.name, e.as_dtype) for e in selection.entries] == [("a.weight", "F32"), ("logit_scale", "F32")]
    assert selection.notes == ("--dequantize: no quantized weights found",)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"a.weight_scale_inv": None}, "a.weight: it is F8_E4M3, but a.weight_scale_inv and .* are missing"),
        (
            {"a.weight_scale": ("F32", ())},
            "a.weight: it is F8_E4M3, but a.weight_scale_inv and a.weight_scale both exist",
        ),
        ({"a.weight_zero_point": ("F32", ())}, "a.weight_zero_point: fp8 weights with zero points"),
        ({"b.up": ("BF16", (2, 2)), "b.up_scale": ("F32", ())}, "b.up_scale: this scale has no fp8 weight"),
        ({"a.weight": None}, "a.weight_scale_inv: this scale has no fp8 weight"),
        ({"a.weight": ("BF16", (300, 260))}, "a.weight_scale_inv: this scale has no fp8 weight"),
        ({"b.weight_scale": ("F32", ())}, "b.weight_scale: this scale has no fp8 weight"),
        (
            {"a.weight_scale_inv": ("F32", (2, 3))},
            r"its shape is \[2, 3\], but a.weight with shape \[300",
        ),
        ({"a.weight_scale_inv": ("F32", (3, 2))}, r"needs one value per block of \[128, 128\]"),
        ({"a.weight_scale_inv": ("F32", (9,))}, r"its shape is \[9\]"),
        ({"a.weight_scale_inv": ("F32", (1, 3, 3))}, r"its shape is \[1, 3, 3\]"),
        ({"a.weight_scale_inv": ("I32", (3, 3))}, "a.weight_scale_inv: it is I32, but scales must be F32"),
        ({"a.weight_scale_inv": ("F8_E4M3", (3, 3))}, "a.weight_scale_inv"),
        (
            {"a.weight": ("F8_E4M3", (300,))},
            r"a.weight_scale_inv: its shape is \[3, 3\], but a.weight with shape \[300\]",
        ),
        ({"a.weight": ("F8_E4M3", ())}, r"a.weight_scale_inv: its shape is \[3, 3\]"),
        (
            {"a.weight": ("F8_E4M3", (0, 260))},
            r"a.weight_scale_inv: its shape is \[3, 3\], but a.weight with shape \[0, 260\]",
        ),
    ],
)
def test_scales_and_weights_that_do_not_fit_are_named(changes: dict[str, Any], says: str) -> None:
    specs = {name: spec for name, spec in (A | changes).items() if spec is not None}
    with pytest.raises(BadScale, match=says):
        chosen(specs)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"quant_method": "gptq", "bits": 4}, "weights quantized by 'gptq' are not supported"),
        ({"weight_block_size": [128, 128]}, "weights quantized by None are not supported"),
        (
            compressed("channel", format="pack-quantized"),
            r"by 'compressed-tensors \(pack-quantized\)' are not",
        ),
        (compressed("group"), "config_groups in config.json are .*'group'"),
        (compressed("channel", type="int"), "but only fp8 is supported"),
        (compressed("channel", num_bits=4), "but only fp8 is supported"),
        (compressed("channel", type=["float"]), "but only fp8 is supported"),
        (compressed("block"), "but only fp8 is supported"),
        (compressed("block", block_structure="128x128"), "block_structure in config.json is '128x128'"),
        (compressed("block", "channel", block_structure=[8, 8]) | {"config_groups": [1]}, r"config_groups .* \[1\]"),
        (compressed() | {"config_groups": {"group_0": {"weights": None}}}, "but only fp8 is supported"),
        ({**FP8, "weight_block_size": [0, 128]}, r"weight_block_size in config.json is \[0, 128\]"),
        ({**FP8, "weight_block_size": [-128, 128]}, "weight_block_size"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size"),
        ({**FP8, "weight_block_size": 128}, "weight_block_size in config.json is 128"),
        ({**FP8, "weight_block_size": [1e9, "128"]}, "weight_block_size"),
        ("fp8", "is not a JSON object"),
    ],
)
def test_other_ways_to_quantise_are_refused(settings: object, says: str) -> None:
    with pytest.raises(NotDequantized, match=says):
        chosen(A, settings)


def test_what_compressed_tensors_wrote_at_first_is_read_as_what_it_writes_now() -> None:
    rows: Specs = {"a.weight": SQUARE, "a.weight_scale": ("F32", (6, 1))}
    (entry,) = chosen(rows, compressed("channel"), key="compression_config").entries
    assert entry.scale and entry.scale.block == (1, 4)
    with pytest.raises(BadScale, match="a.weight_scale: its shape is"):
        chosen(rows, compressed("tensor"), key="compression_config")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"quantization": {"quant_algo": "NVFP4"}}', "hf_quant_config.json has 'NVFP4', but only 'FP8'"),
        ('{"quantization": {"quant_algo": null}}', "hf_quant_config.json has None"),
        ('{"quantization": []}', "hf_quant_config.json has None"),
        ("[]", "hf_quant_config.json has None"),
        ("", "hf_quant_config.json is not JSON"),
    ],
)
def test_of_modelopts_ways_only_fp8_is_known(text: str, says: str) -> None:
    specs: Specs = {"a.weight": SQUARE, "a.weight_scale": ("F32", ()), "a.input_scale": ("F32", ())}
    said = {"hf_quant_config.json": '{"quantization": {"quant_algo": "FP8"}}'}
    for settings in (None, {"quant_method": "modelopt", "quant_algo": "FP8"}):
        assert [entry.name for entry in chosen(specs, settings, **said).entries] == ["a.weight"]
    with pytest.raises(NotDequantized, match="'modelopt' are not supported"):
        chosen(specs, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    with pytest.raises(NotDequantized, match=says):
        chosen(specs, None, **{"hf_quant_config.json": text})


MXFP4: Specs = {"e.up_blocks": ("U8", (2, 6, 3, 16)), "e.up_scales": ("U8", (2, 6, 3)), "e.up_bias": ("BF16", (2, 6))}


def test_blocks_of_mxfp4_are_one_weight_and_the_rest_stays() -> None:
    selection = chosen(MXFP4, {"quant_method": "mxfp4"})
    made = {entry.name: (entry.as_dtype, entry.tensor.shape, entry.size) for entry in selection.entries}
    assert made == {"e.up": ("BF16", (2, 96, 6), 2 * 96 * 6 * 2), "e.up_bias": ("BF16", (2, 6), 24)}
    assert selection.scales == {"e.up_scales"}
    assert selection.notes == ("1 F4 weight is converted to BF16; scales are dropped",)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"e.up_scales": None}, "e.up_blocks: e.up_scales is missing"),
        ({"e.up_blocks": None}, "e.up_scales: e.up_blocks is missing"),
        ({"e.up": ("BF16", (2, 96, 6))}, "e.up_blocks: e.up also exists"),
        ({"e.up_scales": ("U8", (2, 6, 2))}, r"e.up_blocks: .* U8 \[2, 6, 3, 16\] and U8 \[2, 6, 2\], not U8"),
        ({"e.up_scales": ("F32", (2, 6, 3))}, r"e.up_blocks: .* F32 \[2, 6, 3\]"),
        ({"e.up_blocks": ("U8", (2, 6, 3, 8))}, "e.up_blocks: blocks and scales are"),
        ({"e.up_blocks": ("U8", (6, 3, 16)), "e.up_scales": ("U8", (6, 3))}, "e.up_blocks: blocks and scales are"),
        ({"e.up_blocks": ("U8", ()), "e.up_scales": ("U8", ())}, "e.up_blocks: blocks and scales are"),
        ({"a.weight": ("F8_E4M3", (2, 2))}, "a.weight: it is F8_E4M3"),
    ],
)
def test_blocks_and_scales_of_mxfp4_that_do_not_fit_are_named(changes: dict[str, Any], says: str) -> None:
    specs = {name: spec for name, spec in (MXFP4 | changes).items() if spec is not None}
    with pytest.raises(BadScale, match=says):
        chosen(specs, {"quant_method": "mxfp4"})


@pytest.mark.parametrize("settings", [None, FP8])
def test_blocks_that_no_config_calls_mxfp4_are_refused_and_others_stay(settings: object) -> None:
    with pytest.raises(NotDequantized, match="e.up_blocks and its scales look like mxfp4") as refused:
        chosen(MXFP4, settings)
    assert "--config-from" in refused.value.next_step
    for others in ({"e.up_blocks": MXFP4["e.up_blocks"]}, MXFP4 | {"e.up_scales": ("F32", (2, 6, 3))}):
        assert [entry.name for entry in chosen(others, settings).entries] == [*others]


def test_a_dtype_is_needed() -> None:
    with pytest.raises(NotDequantized, match="it also requires --dtype"):
        chosen(A, dtype="keep")


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"a": NaN'])
def test_a_config_that_is_no_json_is_refused_and_stays(text: str) -> None:
    with pytest.raises(NotDequantized, match="not JSON"):
        chosen({}, **{"config.json": text})
    assert plain_config(text, "bfloat16", quantised=True) == text


def test_a_config_that_repeats_its_settings_is_edited_in_one_pass() -> None:
    text = "{" + ", ".join(['"quantization_config": 1'] * 300_000) + "}"
    assert plain_config(text, "bfloat16", quantised=True) == "{}"


SETTINGS = '"quantization_config": {"quant_method": "fp8", "x": {"y": [1, "}"]}}'


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f'{{\n  "a": 1,\n  {SETTINGS},\n  "b": 2\n}}\n', '{\n  "a": 1,\n  "b": 2\n}\n'),
        (f'{{\n  {SETTINGS},\n  "b": 2\n}}', '{\n  "b": 2\n}'),
        (f'{{\n  "a": 1,\n  {SETTINGS}\n}}', '{\n  "a": 1\n}'),
        (f"{{{SETTINGS}}}", "{}"),
        (SETTINGS.replace("quantization", "compression").join("{}"), "{}"),
        (f'{{"a": 1, {SETTINGS}, {SETTINGS}}}', '{"a": 1}'),
        (f'{{"t": {{{SETTINGS}}}, "u": {{{SETTINGS}}}}}', '{"t": {}, "u": {}}'),
        (f'{{"t": {{"a": 1, {SETTINGS}}}, {SETTINGS}}}', '{"t": {"a": 1}}'),
        (r'{"a": "\"quantization_config\": 1", "b": "quantization_config"}', None),
        ('{"torch_dtype": "float8_e4m3fn", "dtype": "float32"}', '{"torch_dtype": "bfloat16", "dtype": "bfloat16"}'),
        (f'{{"dtype": "float16", {SETTINGS}}}', '{"dtype": "bfloat16"}'),
        ('{"dtype": "float32", "kv_dtype": "float16"}', None),
    ],
)
def test_the_config_loses_its_settings_and_nothing_else(text: str, wanted: str | None) -> None:
    made = edited_config("config.json", text, Options(dtype="bfloat16", dequantize=True), ())
    assert made == (text if wanted is None else wanted)
    json.loads(made)


def test_a_config_beside_modelopts_settings_has_the_dtype_that_its_weights_become() -> None:
    for path in ("config.json", "text/config.json"):
        made = [
            edited_config(path, '{"torch_dtype": "bfloat16"}', Options(dtype="float32", dequantize=True), listing)
            for listing in ({path.replace("config", "hf_quant_config")}, {path})
        ]
        assert made == ['{"torch_dtype": "float32"}', '{"torch_dtype": "bfloat16"}']


def test_no_weight_is_renamed_to_a_scale_that_is_read_under_its_own_name() -> None:
    specs: Specs = {**A, "b.weight": ("BF16", (2,))}
    tensors = [Tensor(n, dtype, shape, (Piece(0, 0, (0,) * len(shape), shape),)) for n, (dtype, shape) in specs.items()]
    rename = [{r"b\.weight": "a.weight_scale_inv"}]
    options = Options.model_validate({"dtype": "bfloat16", "dequantize": True, "rename": rename})
    texts = {"config.json": json.dumps({"quantization_config": FP8})}
    with pytest.raises(RenameCollision, match="two tensors in model to the same name, a.weight_scale_inv"):
        select(Checkpoint(Name("", "model"), (0,), tuple(tensors)), options, {}, texts)
