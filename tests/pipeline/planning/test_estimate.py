"""What a plan says that it will move, held against what moves."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from reshard.pipeline.planning.estimate import forecast
from reshard.pipeline.planning.model import Transports
from tests.pipeline.conftest import Run, upload
from tests.support.hub.fixtures import Namespace
from tests.support.models import arrays, numbered, save_sharded


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_sharded(tmp_path / "model", numbered(arrays(24, 4000), 4))
    return tmp_path / "model"


def test_what_is_read_is_what_was_forecast(model: Path, tmp_path: Path, go: Run) -> None:
    report = go(model, tmp_path / "out", size=20_000)
    expected = forecast(report.plan)
    assert report.moved.read == expected.read
    assert report.moved.uploaded == expected.uploaded == expected.written == sum(s.size for s in report.plan.shards)
    assert 0.9 < expected.amplification < 1.1


def test_on_the_hub_what_the_store_received_is_what_is_counted(model: Path, on_hub: Namespace, go: Run) -> None:
    repo = upload(on_hub, "source", model)
    on_hub.admin.log(reset=True)
    report = go(repo, on_hub.repo("out"), size=20_000)
    bodies = [r["up"] for r in on_hub.admin.log() if re.search(r"/v1/xorbs/|^/_lfs/", r["path"])]
    assert report.moved.read == forecast(report.plan).read
    # hf_xet counts its lists of chunks too, which are all that is sent where the store has every chunk already
    assert report.moved.uploaded == pytest.approx(sum(bodies), rel=0.05, abs=10_000)


def test_each_seam_is_counted_once(model: Path, tmp_path: Path, go: Run) -> None:
    whole = forecast(replace(go(model, tmp_path / "a", size=10**9).plan, transports=Transports("xet", "xet")))
    assert whole.seams == 4, "four files are put together into one"
    cut = forecast(replace(go(model, tmp_path / "b", size=20_000).plan, transports=Transports("xet", "xet")))
    assert cut.seams > whole.seams and cut.uploaded <= cut.written
