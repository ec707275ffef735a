"""Tensors under other names: the same bytes, which `verify` finds by the rules in the manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from reshard.pipeline import Options, verify
from reshard.pipeline.check import Check
from reshard.pipeline.errors import PrefixUnused, RenameCollision, RenameUnused
from reshard.pipeline.planning.model import MANIFEST
from tests.pipeline.conftest import Run

RULES: Any = [{r"^h\.(\d+)\.": r"model.layers.\1."}, {"attn[.]q$": "self_attn.q_proj.weight"}]
ATTENTION = {f"h.{layer}.attn.q": f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(3)}
NAMES = ATTENTION | {"h.0.mlp": "model.layers.0.mlp", "norm": "norm"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    save_file({name: np.full(300, i, np.uint8) for i, name in enumerate(NAMES)}, folder / "model.safetensors")
    return folder


def weights(folder: Path) -> dict[str, np.ndarray]:
    return {name: array for path in folder.glob("*.safetensors") for name, array in load_file(path).items()}


def same_tensors(output: Path, source: Path, **more: Any) -> Check:
    checks = verify(str(output), str(source), deep=True, **more).checks
    assert {check.result for check in checks if check.name == "same bytes"} == {"passed"}
    return next(check for check in checks if check.name == "same tensors")


def test_names_change_and_nothing_else(source: Path, tmp_path: Path, go: Run) -> None:
    report = go(source, tmp_path / "out", size=1000, rename=RULES)
    was, made = weights(source), weights(tmp_path / "out")
    assert {new: made[new].tobytes() for new in made} == {NAMES[old]: was[old].tobytes() for old in was}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == {*NAMES.values()}
    first, second = (note for note in report.plan.notes if note.startswith("--rename"))
    assert first.endswith(": 4 of 5 names, for example h.0.attn.q to model.layers.0.attn.q")
    assert "'attn[.]q$' -> 'self_attn.q_proj.weight': 3 of 5 names" in second
    assert "tensors were renamed by rules" in (tmp_path / "out" / "README.md").read_text()
    again = go(source, tmp_path / "out", size=1000, rename=RULES)
    assert again.plan.published, "the same request is done already"


def test_verify_takes_the_rules_of_the_manifest_and_says_so(source: Path, tmp_path: Path, go: Run) -> None:
    out = tmp_path / "out"
    go(source, out, rename=RULES)
    told = same_tensors(out, source)
    assert (told.result, told.reason.count("->")) == ("passed", 2) and "the manifest that you published" in told.reason
    typed = same_tensors(out, source, changes=Options(rename=RULES))
    assert (typed.result, typed.reason) == ("passed", "")
    other = verify(str(out), str(source), changes=Options(rename=[{"^h": "x"}])).checks
    assert next(check for check in other if check.name == "same tensors").result == "failed"


@pytest.mark.parametrize("rules", [[], [["(", ""]], "h", [["^h.*", "x"]], [["^norm", "h"]]])
def test_other_rules_in_a_manifest_make_other_names(rules: Any, source: Path, tmp_path: Path, go: Run) -> None:
    """None that this release can read, those that make one name of two, and those of another source."""
    out = tmp_path / "out"
    go(source, out, rename=RULES)
    manifest = json.loads((out / MANIFEST).read_text())
    manifest["made"]["options"]["rename"] = rules
    (out / MANIFEST).write_text(json.dumps(manifest))
    checks = verify(str(out), str(source)).checks
    assert next(check for check in checks if check.name == "same tensors").result == "failed"


def test_rules_that_make_one_name_of_two_or_change_none_are_errors(source: Path, tmp_path: Path, go: Run) -> None:
    with pytest.raises(RenameCollision, match=r"two tensors in model to the same name, x: h\.0\.attn\.q and h\.0\.mlp"):
        go(source, tmp_path / "out", rename=[{r"^h\.0\..*": "x"}])
    with pytest.raises(RenameUnused, match=r"'\^g' -> 'x' does not change any name"):
        go(source, tmp_path / "out", rename=[*RULES, {"^g": "x"}])
    with pytest.raises(RenameUnused, match="norm"):  # the second of two alike finds nothing that is left
        go(source, tmp_path / "out", rename=[{"^norm$": "n"}, {"^norm$": "n"}])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("prefix", "shown"), [("nothere.", r"nothere\."), ("", "''")])
def test_a_prefix_that_no_name_has_is_an_error(prefix: str, shown: str, source: Path, tmp_path: Path, go: Run) -> None:
    with pytest.raises(PrefixUnused, match=f"^--strip-prefix {shown} does not change any name"):
        go(source, tmp_path / "out", strip_prefix=prefix)
    go(source, tmp_path / "out", strip_prefix="auto")
    (source / "vae").mkdir()
    save_file({"decoder.w": np.zeros(10, np.uint8)}, source / "vae" / "diffusion_pytorch_model.safetensors")
    go(source, tmp_path / "vae", strip_prefix="decoder.")


def test_a_rule_for_one_checkpoint_of_several_is_used(source: Path, tmp_path: Path, go: Run) -> None:
    (source / "vae").mkdir()
    save_file({"decoder.w": np.zeros(10, np.uint8)}, source / "vae" / "diffusion_pytorch_model.safetensors")
    go(source, tmp_path / "out", rename=[*RULES, {"^decoder": "up"}])
    assert [*load_file(tmp_path / "out" / "vae" / "diffusion_pytorch_model.safetensors")] == ["up.w"]
    assert same_tensors(tmp_path / "out", source).result == "passed"


def test_rules_see_names_without_prefixes_and_ties_and_scales_keep_their_meaning(tmp_path: Path, go: Run) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    shared, scale = torch.ones(4, 8), torch.ones(3)
    state = {"shared": shared, "tied": shared, "a.weight": torch.zeros(8, dtype=torch.int8), "a.scales": scale}
    torch.save({f"module.{name}": tensor for name, tensor in state.items()}, source / "pytorch_model.bin")
    rules: Any = [{"^tied$": "lm_head.weight"}, {"^a[.]scales$": "b"}, {"^shared": "embed"}]
    report = go(source, out, strip_prefix="auto", rename=rules, dtype="float16")
    made = weights(out)
    assert {name: array.dtype for name, array in made.items()} == {
        "embed": np.float16, "lm_head.weight": np.float16, "a.weight": np.int8, "b": np.float32
    }  # fmt: skip
    assert report.plan.outputs[0].ties == (("embed", "lm_head.weight"),)
    assert same_tensors(out, source, changes=Options(strip_prefix="auto", dtype="float16")).result == "passed"
