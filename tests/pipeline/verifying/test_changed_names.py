"""What a model's class says to an output whose names or layout an option changed, beside the source as it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard.pipeline import Options, verify
from reshard.pipeline.check import Check
from reshard.pipeline.errors import ModelCheckRequired
from reshard.pipeline.verifying.meta_load import MetaLoader, Own
from tests.pipeline.conftest import Run
from tests.pipeline.verifying.models import Saved

State = dict[str, torch.Tensor]
GetSaved = Callable[..., Saved]
HEAD = {"score.weight": torch.ones(2, 32)}
IN_MEMORY: dict[str, Any] = {"rename": [{"[.]block_sparse_moe[.]": ".mlp."}], "experts": "fused"}
IN_FILES: dict[str, Any] = {"rename": [{"[.]mlp[.]": ".block_sparse_moe."}], "experts": "separate-mixtral"}


def other(model: Saved, folder: Path, change: Callable[[State], State]) -> Path:
    """The model with other tensors."""
    shutil.copytree(model.folder, folder)
    state = change(load_file(folder / "model.safetensors"))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def of_class(checks: tuple[Check, ...], name: str) -> Check:
    return next(check for check in checks if check.name == name)


def judged(source: Path, out: Path, go: Run, options: Mapping[str, Any]) -> tuple[str, str, str]:
    """The result, the level and the reason of the class's check: those of the job, of verify, and what --require says.

    What it refuses it has not written.
    """
    made = of_class(go(source, out, **options).checks, "reload model")
    seen = of_class(verify(str(out), str(source), changes=Options(**options)).checks, "class of model")
    assert (seen.result, seen.level) == (made.result, made.level)
    required = out.with_name("required")
    if made.level == "model":
        go(source, required, **options, require="model")
    else:
        with pytest.raises(ModelCheckRequired, match="only the structure check passed") as refused:
            go(source, required, **options, require="model")
        assert "remove --require" in refused.value.facts["cure"] and not required.exists()
    return made.result, made.level, made.reason


def wrapped(state: State) -> State:
    return {f"module.{name}": tensor for name, tensor in state.items()}


def third_layer(state: State) -> State:
    """Experts of a layer that the class does not have."""
    return {name.replace("layers.1.", "layers.2."): t.clone() for name, t in state.items() if ".experts." in name}


WORSE: dict[str, tuple[str, Callable[[State], State], dict[str, Any], str]] = {
    "a class that finds hardly any name": (
        "llama",
        dict,
        {"rename": [{"^model[.]": "foo."}]},
        "LlamaForCausalLM accepts less of the output than of the source: 20 missing (model.embed_tokens.weight, ",
    ),
    "a class that misses one": (
        "llama",
        dict,
        {"rename": [{"^model[.]norm": "model.last"}]},
        "LlamaForCausalLM accepts less of the output than of the source: 1 missing (model.norm.weight), "
        "1 unexpected (model.last.weight)",
    ),
    "a class that would do without": (
        "bart",
        dict,
        {"rename": [{"^final_logits_bias": "bias"}]},
        "BartForConditionalGeneration accepts less of the output than of the source: 1 unexpected (bias)",
    ),
    "another tensor of the class than the source lacks": (
        "llama",
        lambda state: {name: t for name, t in state.items() if name != "lm_head.weight"},
        {"rename": [{"^model[.]norm[.]weight": "lm_head.weight"}]},
        "less of the output than of the source: 1 missing (model.norm.weight)",
    ),
    "a wrapper that only some names lose": (
        "llama",
        lambda state: state | HEAD,
        {"rename": [{"^model[.]layers[.]1[.]mlp": "mlp"}]},
        "3 missing (model.layers.1.mlp.down_proj.weight, model.layers.1.mlp.gate_proj.weight and 1 more), 3 unexpected",
    ),
}


@pytest.mark.parametrize("case", WORSE)
def test_names_that_the_class_rejects_are_said_and_are_no_check_of_the_model(
    case: str, saved: GetSaved, tmp_path: Path, go: Run
) -> None:
    name, change, options, said = WORSE[case]
    source = other(saved(name), tmp_path / "source", change)
    result, level, reason = judged(source, tmp_path / "out", go, options)
    assert (result, level) == ("inconclusive", "structural")
    assert said in reason


NO_WORSE: dict[str, tuple[str, Callable[[State], State], dict[str, Any], str]] = {
    "wrapped": ("llama", wrapped, {"strip_prefix": "auto"}, "accepts all tensors"),
    "wrapped, with another head": (
        "llama",
        lambda state: wrapped(state | HEAD),
        {"strip_prefix": "auto"},
        "reports no more for the output than for the source: 1 unexpected",
    ),
    "another head by another name": (
        "llama",
        lambda state: state | HEAD,
        {"rename": [{"^score": "head"}]},
        "reports no more for the output than for the source: 1 unexpected",
    ),
    "no head, and another one by another name": (
        "llama",
        lambda state: {name: t for name, t in state.items() if name != "lm_head.weight"} | HEAD,
        {"rename": [{"^score": "head"}]},
        "reports no more for the output than for the source: 1 missing, 1 unexpected",
    ),
    "wrapped experts of a layer that the class does not have": (
        "mixtral",
        lambda state: wrapped(state | third_layer(state)),
        {"strip_prefix": "auto"},
        "reports no more for the output than for the source: 2 unexpected",
    ),
    "experts": ("mixtral", dict, IN_MEMORY, "accepts all tensors"),
}


@pytest.mark.parametrize("case", NO_WORSE)
def test_what_the_source_lacks_or_has_beside_may_have_other_names(
    case: str, saved: GetSaved, tmp_path: Path, go: Run
) -> None:
    name, change, options, said = NO_WORSE[case]
    source = other(saved(name), tmp_path / "source", change)
    result, level, reason = judged(source, tmp_path / "out", go, options)
    assert (result, level) == ("passed", "model")
    assert said in reason


def test_experts_are_accepted_in_the_layout_of_their_class_alone(saved: GetSaved, tmp_path: Path, go: Run) -> None:
    fused = tmp_path / "fused"
    go(saved("mixtral").folder, fused, **IN_MEMORY)
    assert judged(fused, tmp_path / "back", go, IN_FILES)[:2] == ("passed", "model")
    shutil.rmtree(tmp_path / "required")
    result, level, reason = judged(fused, tmp_path / "out", go, {"experts": "separate"})
    assert (result, level) == ("inconclusive", "structural")
    assert "accepts less of the output than of the source: 4 missing (" in reason and ", 24 unexpected (" in reason


def test_experts_of_a_layer_that_the_class_does_not_have_may_be_cut(saved: GetSaved, tmp_path: Path, go: Run) -> None:
    go(saved("mixtral").folder, tmp_path / "fused", **IN_MEMORY)
    fused = Saved(tmp_path / "fused", b"", {})
    source = other(fused, tmp_path / "source", lambda state: state | third_layer(state))
    result, level, reason = judged(source, tmp_path / "back", go, IN_FILES)
    assert (result, level) == ("passed", "model")
    assert "reports no more for the output than for the source: 2 unexpected" in reason
    shutil.rmtree(tmp_path / "required")
    names = [*IN_FILES["rename"], {"layers[.]2[.]block_sparse_moe": "draft"}]
    result, level, reason = judged(source, tmp_path / "apart", go, {**IN_FILES, "rename": names})
    assert (result, level) == ("passed", "model")
    assert "reports no more for the output than for the source: " in reason


def test_a_lent_config_of_another_model_is_no_check_of_the_weights(saved: GetSaved, tmp_path: Path, go: Run) -> None:
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(saved("llama").folder / "model.safetensors", source)
    mine, foreign = ({"config_from": str(saved(name).folder)} for name in ("llama", "gpt2"))
    result, level, reason = judged(source, tmp_path / "out", go, foreign)
    assert (result, level) == ("inconclusive", "structural")
    assert reason.startswith("GPT2LMHeadModel finds only 1 of its 28 tensors: 27 missing (transformer.h.0")
    assert judged(source, tmp_path / "own", go, mine)[:2] == ("passed", "model")


def test_a_lent_class_that_finds_half_of_its_tensors_is_asked(saved: GetSaved, meta_loader: MetaLoader) -> None:
    """Shapes that do not match count as what is missing."""
    model = saved("bert-base")
    names = [*model.specs]
    for most, result in ((len(names) // 2, "report"), (len(names) // 2 + 1, "inconclusive")):
        spoiled = {name: ("F32", (7, 7)) for name in names[:most]}
        found = meta_loader.check(model.config, {**model.specs, **spoiled}, lent=True)
        assert (found.result, found.counts["mismatched"]) == (result, most), found.reason
        assert meta_loader.check(model.config, {**model.specs, **spoiled}).result == "report", "its own config"


def test_one_question_about_other_sources_has_other_answers(saved: GetSaved, meta_loader: MetaLoader) -> None:
    model = saved("llama")
    renamed = {name.replace("model.norm", "model.last"): spec for name, spec in model.specs.items()}
    origins = {"model.last.weight": "model.norm.weight"}
    owns = {
        "inconclusive": partial(Own, model.config, model.specs, origins),
        "report": partial(Own, model.config, renamed, {}),
    }
    for result, own in owns.items():
        assert meta_loader.check(model.config, renamed, own=own).result == result


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "weights quantized by 'gptq' cannot be checked"),
        (
            {"architectures": None, "model_type": None},
            "cannot be compared with the source: config.json has no model class",
        ),
    ],
)
def test_what_cannot_be_compared_is_inconclusive(
    config: dict[str, Any], said: str, saved: GetSaved, meta_loader: MetaLoader
) -> None:
    model = saved("llama")
    more = {**model.specs, "score.weight": ("F32", (2, 32))}
    found = meta_loader.check(model.config, more, own=lambda: Own(model.with_config(**config), more, {}))
    assert (found.result, found.level) == ("inconclusive", "structural")
    assert said in found.reason
