"""The files that a publication adds by itself (manifest, index, edited config) may be larger than a commit takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from reshard.pipeline import deciding, verify
from reshard.pipeline.errors import MadeTooLarge
from reshard.pipeline.limits import REGULAR_MAX
from reshard.pipeline.planning.estimate import of_our_own
from reshard.pipeline.planning.model import MANIFEST
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import Run
from tests.support.checker import from_folder, from_hub, read_checkpoint
from tests.support.models import Arrays, save_model, save_sharded

SIZE, LIMIT = 20_000, 1200  # bytes; of a file inside a commit, as these tests set it on the Hub
INDEX = "model.safetensors.index.json"


@pytest.fixture
def tight(on_hub: Namespace) -> Iterator[Namespace]:
    """The Hub takes next to nothing inside a commit."""
    before = on_hub.admin.settings()
    on_hub.admin.settings(regular_limit=LIMIT)
    yield on_hub
    on_hub.admin.settings(regular_limit=before["regular_limit"])


def test_manifest_index_and_edited_config_go_as_objects_where_a_commit_does_not_take_them(
    tight: Namespace, tmp_path: Path, go: Run
) -> None:
    model = save_model(tmp_path / "model", 24, 4000, 4)
    (model / "config.json").write_text(json.dumps({"model_type": "x", "torch_dtype": "float32", "more": "x" * LIMIT}))
    (model / "README.md").unlink()
    target = tight.repo("target")
    report = go(model, target, size=SIZE, dtype="bfloat16")
    files = tight.admin.files(target)
    assert report.plan.edits and all(files[path]["lfs"] for path in (MANIFEST, INDEX, "config.json"))
    assert report.published.commit == tight.admin.head(target)
    assert go(model, target, size=SIZE, dtype="bfloat16").published.found, "what was published is found again"
    go(target, tmp_path / "again", size=2 * SIZE)
    assert read_checkpoint(from_folder(tmp_path / "again")) == read_checkpoint(
        from_hub(tight.endpoint, target, token=tight.token)
    )


@pytest.mark.slow
def test_a_manifest_and_an_index_beyond_what_a_commit_takes_are_published(
    on_hub: Namespace, tmp_path: Path, go: Run
) -> None:
    """At the Hub's own limit, with few tensors of very long names."""
    long = REGULAR_MAX // 8
    save_sharded(tmp_path / "model", {f"{n}.safetensors": named(n, long) for n in range(9)})
    target = on_hub.repo("target")
    report = go(tmp_path / "model", target, size="2MB")
    files = on_hub.admin.files(target)
    for path, most in of_our_own(report.plan).items():
        assert REGULAR_MAX < files[path]["size"] <= most <= files[path]["size"] * 1.01 and files[path]["lfs"]
    found = verify(target)
    assert found.result == "passed", found


def named(number: int, length: int) -> Arrays:
    return {f"{number}{'x' * length}": np.zeros(4, "float32")}


@pytest.mark.parametrize(("what", "limit"), [(MANIFEST, "MANIFEST_MAX"), (INDEX, "INDEX_MAX")])
def test_a_plan_is_refused_whose_manifest_or_index_no_reader_would_take(
    what: str, limit: str, tmp_path: Path, go: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path / "model", 24, 4000, 4)
    monkeypatch.setattr(deciding, limit, 1000)
    with pytest.raises(MadeTooLarge, match=what):
        go(model, tmp_path / "out", size=SIZE)
    assert not (tmp_path / "out").exists()


def test_what_a_plan_says_of_manifest_and_index_is_at_least_their_size(tmp_path: Path, go: Run) -> None:
    model = save_model(tmp_path / "model", 24, 4000, 4)
    report = go(model, tmp_path / "out", size=SIZE, rename=(("layer", '\u00e4"'),))
    said = of_our_own(report.plan)
    assert said.keys() == {MANIFEST, INDEX}
    for path, most in said.items():
        size = (tmp_path / "out" / path).stat().st_size
        assert size <= most <= size + 10_000
