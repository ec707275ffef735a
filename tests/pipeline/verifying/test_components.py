"""A component that was published by itself, in the folder of a pipeline: its manifest is about its weights alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from reshard.pipeline.places import parse_place
from reshard.pipeline.planning.model import MANIFEST
from reshard.pipeline.publishing.rollback import rollback
from reshard.pipeline.request import Options
from reshard.pipeline.stores.connect import Context, open_source, open_target
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.verify import verify
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import Run, upload
from tests.support.checker import from_hub
from tests.support.models import arrays, numbered, save_sharded, save_single

OWN = f"text_encoder/{MANIFEST}"
Findings = Callable[..., list[str]]


@pytest.fixture
def findings(meta_loader: MetaLoader) -> Findings:
    """``findings(output, source)`` of a whole verification."""

    def findings(output: Path, source: Path | None = None) -> list[str]:
        ours = open_source(parse_place(str(output)), Context.from_env())
        theirs = open_source(parse_place(str(source)), Context.from_env()) if source else None
        return [finding for check in verify(ours, theirs, meta_loader) for finding in check.findings]

    return findings


@pytest.fixture
def pipe(tmp_path: Path, go: Run) -> Path:
    pipe = tmp_path / "pipe"
    save_sharded(tmp_path / "model", numbered(arrays(16, 4000), 3))
    go(tmp_path / "model", pipe / "text_encoder", size=20_000)
    save_single(pipe / "unet", arrays(2, 400), "diffusion_pytorch_model.safetensors")
    (pipe / "assets").mkdir()
    for name in ("assets/model.sig", "text_encoder/model.sig", "model_index.json"):
        (pipe / name).write_text("{}")
    return pipe


def test_a_pipeline_with_it_is_whole(pipe: Path, findings: Findings) -> None:
    assert findings(pipe) == []
    (pipe / OWN).unlink()
    (finding,) = findings(pipe)
    assert finding.endswith(f"but {MANIFEST} is missing")


def test_its_manifest_and_signature_are_not_copied_with_weights_that_are_written_anew(
    pipe: Path, tmp_path: Path, go: Run, findings: Findings
) -> None:
    out, stale = tmp_path / "out", {OWN, "text_encoder/model.sig"}
    skipped = dict(go(pipe, out, size=40_000).plan.left_out)
    assert {path: skipped.get(path) for path in stale} == dict.fromkeys(stale, "it is about the source's files")
    assert not any((out / path).exists() for path in stale)
    assert (out / "assets" / "model.sig").exists(), "which is about no weights"
    assert findings(out) == findings(out, pipe) == []
    shutil.copy(pipe / OWN, out / OWN)  # as earlier releases left it
    assert findings(out) == []
    (out / OWN).write_text("{}")  # as one of another cut
    assert findings(out, pipe) == []


@pytest.mark.parametrize("content", ["{}", "[]", None])
def test_another_manifest_beside_an_index_is_not_the_one_that_it_names(
    pipe: Path, tmp_path: Path, go: Run, findings: Findings, content: str | None
) -> None:
    out = tmp_path / "out"
    go(pipe, out, size=40_000)
    (out / MANIFEST).unlink()
    (out / OWN).write_text((pipe / OWN).read_text() if content is None else content)
    assert any("refers to manifest" in finding and "is missing" in finding for finding in findings(out))


@pytest.mark.parametrize("on_hub", ["http"], indirect=True)
def test_in_place_its_manifest_goes_and_a_rollback_brings_it_back(pipe: Path, on_hub: Namespace, go: Run) -> None:
    repo = upload(on_hub, "pipe", pipe)
    published = go(repo, repo, size=40_000).published.commit
    there = from_hub(on_hub.endpoint, repo)
    assert (there(OWN), there("text_encoder/model.sig")) == (None, None) and there("assets/model.sig") == b"{}"
    rollback(open_target(parse_place(repo), Options(), Context.from_env()), published)
    assert from_hub(on_hub.endpoint, repo)(OWN) == (pipe / OWN).read_bytes()
