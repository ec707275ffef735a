"""What a plan says that it will move, held against what moves."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from reshard.pipeline.api import plan
from reshard.pipeline.planning.estimate import forecast
from reshard.pipeline.planning.model import Transports
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import TRANSPORT, Run, asked, upload
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
    over_xet = partial(replace, transports=Transports("xet", "xet"), shares=True)
    whole = forecast(over_xet(go(model, tmp_path / "a", size=10**9).plan))
    assert whole.seams == 4, "four files are put together into one"
    cut = forecast(over_xet(go(model, tmp_path / "b", size=20_000).plan))
    assert cut.seams > whole.seams and cut.uploaded <= cut.written


@pytest.mark.parametrize("target", ["xet", ""])
def test_only_where_the_hub_has_the_source_s_chunks_are_the_seams_all_that_is_uploaded(
    target: str, tmp_path: Path, go: Run
) -> None:
    save_sharded(tmp_path / "large", numbered(arrays(8, 400_000), 2))
    made = replace(go(tmp_path / "large", tmp_path / "out", size=8_000_000).plan, transports=Transports("xet", target))
    seams, whole = forecast(replace(made, shares=True)), forecast(made)
    assert seams.uploaded < 0.2 * seams.written and not seams.at_most
    assert whole.uploaded == whole.written and whole.at_most
    by_lfs = forecast(replace(made, shares=True, transports=Transports("xet", "lfs")))
    assert by_lfs.uploaded == by_lfs.written and by_lfs.at_most
    assert not forecast(replace(made, transports=Transports("http", "file"))).at_most


def test_a_plan_to_a_new_repository_says_what_will_be_uploaded(model: Path, on_hub: Namespace, tmp_path: Path) -> None:
    repo, new = upload(on_hub, "source", model), on_hub.repo("new")
    of_the_hub = forecast(plan(asked(repo, new, size=20_000)))
    assert of_the_hub.at_most == (os.environ[TRANSPORT] != "xet")
    assert forecast(plan(asked(model, new, size=20_000))).at_most, "nobody knows what the Hub has of a folder"
    assert not forecast(plan(asked(repo, tmp_path / "out", size=20_000))).at_most
