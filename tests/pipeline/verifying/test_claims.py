"""What only an output says of how it was made is a claim: `verify` lists it and does not take it for proof."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from reshard.pipeline import Options, Verification, verify
from reshard.pipeline.check import Check
from reshard.pipeline.planning.model import MANIFEST
from reshard.pipeline.stores import marks
from reshard.pipeline.stores.record import RECORD
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import Run, upload

SWAP: Any = [{"^good$": "?"}, {"^bad$": "good"}, {"^[?]$": "bad"}]
TOLD = "good has the bytes of the source's bad"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    weights = {name: np.full(300, i, np.uint8) for i, name in enumerate(("good", "bad", "h.norm"))}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """From here on this is another machine, which published nothing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state of another machine"))
    return tmp_path / "state of another machine"


def deep(output: object, source: object, **changes: Any) -> Verification:
    return verify(str(output), str(source), deep=True, changes=Options(**changes))


def named(found: Verification, name: str) -> Check:
    return next(check for check in found.checks if check.name == name)


def test_a_swap_that_a_manifest_tells_is_no_proof_and_is_said_first(
    source: Path, tmp_path: Path, go: Run, request: pytest.FixtureRequest
) -> None:
    out = tmp_path / "out"
    go(source, out, rename=SWAP)
    mine = deep(out, source)
    assert (mine.result, mine.checks[0].name) == ("passed", "exchanged names"), "this machine published it"
    request.getfixturevalue("elsewhere")
    for remove in ("", RECORD):  # the record lies in the folder, and is its author's, too
        shutil.rmtree(out / remove) if remove else None
        found = deep(out, source)
        assert (found.result, found.checks[0].name) == ("inconclusive", "exchanged names")
        assert TOLD in found.checks[0].reason and found.checks[0].figures == {"tensors": 2}
        names = named(found, "same tensors")
        assert names.result == "inconclusive"
        assert names.reason.startswith("compared with options that only the output's manifest states")
        assert "--rename '^good$' -> '?'" in names.reason
    asked = deep(out, source, rename=SWAP)
    assert (asked.result, asked.checks[0].result) == ("passed", "passed") and TOLD in asked.checks[0].reason


def test_a_name_that_goes_to_the_next_tensor_is_said_and_plain_new_names_are_not(
    source: Path, tmp_path: Path, go: Run
) -> None:
    for name, rules in (("chain", [{"^bad$": "worse"}, {"^good$": "bad"}]), ("plain", [{"^h[.]": "model."}])):
        go(source, tmp_path / name, rename=rules)
    assert deep(tmp_path / "chain", source).checks[0].reason == "bad has the bytes of the source's good"
    assert "exchanged names" not in [check.name for check in deep(tmp_path / "plain", source).checks]


@pytest.mark.usefixtures("elsewhere")
def test_a_stack_a_dtype_and_a_prefix_are_claims(tmp_path: Path, go: Run) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    shapes = {"gate_up_proj": (2, 8, 4), "down_proj": (2, 4, 4)}
    stack = {f"module.layers.0.mlp.experts.{name}": torch.rand(shape) for name, shape in shapes.items()}
    save_torch(stack, source / "model.safetensors")
    go(source, out, experts="separate")
    shutil.rmtree(out / RECORD)
    found = named(deep(out, source), "same tensors")
    assert found.result == "inconclusive" and "--experts separate" in found.reason
    assert deep(out, source, experts="separate").result == "passed"

    cast = tmp_path / "cast"
    go(source, cast, dtype="bfloat16", strip_prefix="module.")
    assert deep(cast, source).result == "passed", "this machine published it"
    shutil.rmtree(cast / RECORD)
    found = deep(cast, source)
    assert found.result == named(found, "same tensors").result == "inconclusive"
    assert (
        "only the output's manifest states: --dtype bfloat16; --strip-prefix module."
        in named(found, "same tensors").reason
    )
    assert deep(cast, source, dtype="bfloat16", strip_prefix="module.").result == "passed"
    file = next(cast.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    assert deep(cast, source).result == "failed", "a claim explains no other bytes"


def claim(output: Path, **options: Any) -> None:
    """What no run has written there."""
    manifest = json.loads((output / MANIFEST).read_text())
    manifest["made"]["options"] |= options
    (output / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16", "strip_prefix": "auto"}, {"dtype": "bfloat16", "dequantize": True}]
)
def test_a_claim_that_changes_nothing_or_does_not_fit_neither_doubts_nor_explains(
    source: Path, tmp_path: Path, go: Run, options: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    go(source, out)
    claim(out, **options)
    assert named(deep(out, source), "same tensors").result == "passed"
    save_file({"good": np.full(300, 0, np.uint8)}, out / "model.safetensors", {"format": "pt"})
    same = named(deep(out, source), "same tensors")
    assert same.result == "failed" and "the output's manifest states --dtype bfloat16" in same.reason
    assert "which does not explain it" in same.reason


def test_a_claim_that_alters_no_tensor_explains_the_dtype_in_a_config(tmp_path: Path, go: Run) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    save_torch({"good": torch.ones(300, dtype=torch.bfloat16)}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"hidden_size": 4, "torch_dtype": "float32"}))
    go(source, out, dtype="bfloat16")
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert named(deep(out, source), "other files").result == "passed", "we vouch for what we published"
    assert named(deep(out, source, dtype="bfloat16"), "other files").result == "passed"
    shutil.rmtree(out / RECORD)
    files = named(deep(out, source), "other files")
    assert files.result == "inconclusive" and "only the output's manifest states: --dtype bfloat16" in files.reason
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"hidden_size": 5}))
    assert named(deep(out, source), "other files").result == "failed"


def test_names_that_were_asked_for_are_no_claim_beside_one_of_a_cast(tmp_path: Path, go: Run) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    save_torch({"good": torch.rand(300), "bad": torch.rand(300)}, source / "model.safetensors")
    go(source, out, rename=SWAP, dtype="bfloat16")
    shutil.rmtree(out / RECORD)
    found = deep(out, source, rename=SWAP)
    assert (found.result, found.checks[0].name, found.checks[0].result) == ("inconclusive", "exchanged names", "passed")
    assert deep(out, source).checks[0].result == "inconclusive"
    assert deep(out, source, rename=SWAP, dtype="bfloat16").result == "passed"


def test_a_dropped_name_is_a_claim_where_no_class_ties_it(tmp_path: Path) -> None:
    weight = torch.randn(50, 40)
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir(), out.mkdir()
    torch.save({"a": weight, "b": weight}, source / "pytorch_model.bin")
    save_torch({"a": weight}, out / "model.safetensors", metadata={"format": "pt", "b": "a"})
    found = named(deep(out, source), "same tensors")
    assert (found.result, found.findings) == ("inconclusive", ())
    assert "tied copies dropped: b (kept: a)" in found.reason and "only the output says" in found.reason
    assert named(deep(out, source, ties="source"), "same tensors").result == "passed"


def test_a_commit_vouches_that_nobody_but_we_can_have_made(
    source: Path, on_hub: Namespace, go: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our account's, in its own namespace; an author's name can be made up, and so can a description."""
    target = on_hub.repo("target")
    go(upload(on_hub, "source", source), target, rename=SWAP)
    assert deep(target, source).result == "passed"
    assert deep(f"{target}@{on_hub.admin.head(target)}", source).result == "passed", "main has it"
    published = go(on_hub.repo("source"), target, rename=SWAP, size=1000, pr=True).published
    for revision in (published.ref, published.commit):
        assert deep(f"{target}@{revision}", source).result == "inconclusive", "anyone opens pull requests"
    monkeypatch.delenv("HF_TOKEN")
    assert deep(target, source).result == "inconclusive"

    stranger = on_hub.admin.create_user(f"{on_hub.name}-stranger")
    monkeypatch.setenv("HF_TOKEN", stranger.token)
    assert deep(target, source).result == "inconclusive", "another account's commit"
    forged = f"{stranger.name}/target"
    go(on_hub.repo("source"), forged, rename=SWAP)
    assert deep(forged, source).result == "passed"
    monkeypatch.setenv("HF_TOKEN", on_hub.token)
    assert deep(forged, source).result == "inconclusive"


def test_what_is_not_in_the_manifest_of_a_commit_of_ours_is_not_vouched_for(
    source: Path, tmp_path: Path, go: Run
) -> None:
    out = tmp_path / "out"
    go(source, out, rename=SWAP)
    (source / "vae").mkdir(), (out / "vae").mkdir()
    for folder, names in ((source, ("good", "bad")), (out, ("bad", "good"))):
        weights = {name: np.full(300, i, np.uint8) for i, name in enumerate(names)}
        save_file(weights, folder / "vae" / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    found = deep(out, source)
    assert (found.result, found.checks[0].result) == ("inconclusive", "inconclusive")
    manifest = json.loads((out / "reshard.manifest.json").read_text())
    manifest["made"]["by"] = "reshard 99"  # and so of another sha256 than the commit says
    (out / "reshard.manifest.json").write_text(json.dumps(manifest))
    shutil.rmtree(out / "vae"), shutil.rmtree(source / "vae")
    assert named(deep(out, source), "exchanged names").result == "inconclusive"


@pytest.mark.usefixtures("elsewhere")
def test_the_key_of_a_machine_is_made_once_whole_and_for_its_owner(elsewhere: Path) -> None:
    key = elsewhere / "reshard" / marks.KEY
    assert not marks.is_ours("text", marks.mark("other text")) and marks.is_ours("text", marks.mark("text"))
    assert key.stat().st_mode & 0o077 == 0 and [*key.parent.iterdir()] == [key]
    script = "import sys; from reshard.pipeline.stores.marks import mark; print(mark('text'))"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ)
    assert other.stdout.strip() == marks.mark("text")
    made = marks.mark("text")
    key.write_bytes(b"")
    assert marks.mark("text") is None and not marks.is_ours("text", made)
    assert not marks.is_ours("text", None)


@pytest.mark.parametrize("changes", [{"rename": SWAP}, {"strip_prefix": "h."}, {"rename": [{"^": "x."}]}])
def test_a_mirror_of_a_publication_equals_it_whatever_it_was_made_with(
    source: Path, tmp_path: Path, go: Run, elsewhere: Path, changes: dict[str, Any]
) -> None:
    go(source, tmp_path / "out", **changes)
    shutil.copytree(tmp_path / "out", tmp_path / "mirror")
    for place in ("mirror", "out"):
        assert deep(tmp_path / place, tmp_path / "out").result == "passed"
