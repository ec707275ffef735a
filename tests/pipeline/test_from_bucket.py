"""From an object store to a published model, without a copy of it on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file
from torch.distributed import checkpoint as dcp

from reshard.pipeline.errors import SourceChanged, TargetMoreVisible
from reshard.pipeline.places import parse_place
from reshard.pipeline.publishing.card import block
from reshard.pipeline.reshard import plan, source_of
from reshard.pipeline.stores.connect import Context, open_source, open_target
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.verify import verify
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import Run, asked
from tests.support.models import save_model
from tests.support.s3 import S3

SIZE = 20_000


def stored(bucket: S3, folder: Path) -> str:
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return bucket.put("runs/final", files)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", 12, 4000, 2)


def test_a_folder_of_a_bucket_becomes_a_folder_with_all_that_it_has(
    bucket: S3, model: Path, tmp_path: Path, go: Run, meta_loader: MetaLoader
) -> None:
    url, out = stored(bucket, model), tmp_path / "out"
    report = go(url, out, size=SIZE)
    assert not report.attested and report.plan.transports.source == "http"
    others = {path.name for path in model.iterdir()} - {path.name for path in model.glob("model*")} - {"README.md"}
    assert others and all((out / name).read_bytes() == (model / name).read_bytes() for name in others)
    read, made = (open_source(parse_place(str(place)), Context.from_env()) for place in (url, out))
    checks = {check.name: check.result for check in verify(made, read, meta_loader, deep=True)}
    assert (checks["same tensors"], checks["same bytes"], checks["other files"]) == ("passed", "passed", "passed")
    assert go(url, out, size=SIZE).plan.published, "nothing changed there, and nothing is done"
    bucket.put("runs/final", {"config.json": b'{"model_type": "another"}'})
    assert not go(url, out, size=SIZE).plan.published
    assert b"another" in (out / "config.json").read_bytes()


def test_what_training_left_in_a_bucket_becomes_a_repository(
    bucket: S3, model: Path, tmp_path: Path, on_hub: Namespace, go: Run
) -> None:
    state = {f"layer.{i}.weight": torch.full((3000,), float(i)) for i in range(6)}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "run" / "pytorch_model_fsdp_0", no_dist=True)
    url, repo = stored(bucket, tmp_path / "run"), on_hub.repo("published")
    lender = bucket.put("lender", {"config.json": b"{}", "tokenizer.json": b"{}"})
    report = go(url, repo, size=SIZE, config_from=lender)
    go(repo, tmp_path / "out", size=SIZE)
    made = {name: array for path in (tmp_path / "out").glob("*.safetensors") for name, array in load_file(path).items()}
    assert {name: array.tolist() for name, array in made.items()} == {n: t.tolist() for n, t in state.items()}
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b"{}"
    card = block(report.plan).decode()
    assert "a checkpoint in an object store" in card and bucket.name not in card
    on_hub.admin.create_repo(on_hub.repo("shown"))
    with pytest.raises(TargetMoreVisible, match=f"shown is public, but its source {url} is private"):
        go(url, on_hub.repo("shown"), config_from=lender)


def test_a_source_that_changes_after_it_was_planned_is_refused(
    bucket: S3, model: Path, tmp_path: Path, meta_loader: MetaLoader
) -> None:
    request, context = asked(stored(bucket, model), tmp_path / "out", size=SIZE), Context.from_env()
    source, target = source_of(request, context), open_target(request.target, request.options, context)
    made = plan(request, source, target, meta_loader)
    again = source_of(request, context, made)
    weights = made.files[0]
    bucket.put("runs/final", {weights.path: bytes(weights.size)})
    with pytest.raises(SourceChanged, match=f"{weights.path} was replaced"):
        list(again.read(weights, 0, weights.size))
    with pytest.raises(SourceChanged, match="was planned at"):
        source_of(request, context, made)
