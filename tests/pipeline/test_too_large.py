"""What the Hub would refuse after hours of uploading is refused, or cut, before anything is."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.pipeline.errors import BadSize, ReshardError, TooLargeForHub
from reshard.pipeline.limits import GB, HUB_FILE_MAX
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import Run
from tests.pipeline.jobs import do_plan
from tests.support.giants import save_sparse


def matrix(name: str, size: int) -> tuple[str, str, tuple[int, int]]:
    return name, "BF16", (size // 20_000, 10_000)


def refused(go: Run, folder: Path, space: Namespace, kind: type[ReshardError], match: str, size: int) -> None:
    with pytest.raises(kind, match=match):
        go(folder, space.repo("large"), size=size)
    assert not [r for r in space.admin.log() if r["method"] in ("POST", "PUT") and "_test" not in r["path"]]


def test_a_tensor_that_no_file_of_the_hub_may_hold(tmp_path: Path, on_hub: Namespace, go: Run) -> None:
    save_sparse(tmp_path / "model", iter([matrix("embed.weight", 240 * GB), matrix("head.weight", GB)]), 1)
    too_large = "embed.weight is too large for the Hub: it needs a file of 240,?000"
    refused(go, tmp_path / "model", on_hub, TooLargeForHub, too_large, 5 * GB)


def test_files_of_more_than_the_hub_takes_are_refused_and_smaller_ones_are_cut(
    tmp_path: Path, on_hub: Namespace, go: Run
) -> None:
    folder = tmp_path / "model"
    save_sparse(folder, iter([matrix(f"layer.{i}.weight", 40 * GB) for i in range(12)]), 1)
    refused(go, folder, on_hub, BadSize, f"{HUB_FILE_MAX:,}", 240 * GB)
    planned = do_plan(str(folder), on_hub.repo("large"), {"size": HUB_FILE_MAX})
    assert planned["shards"] == 3, "one file of 480 GB becomes three that the Hub takes"
    assert do_plan(str(folder), str(tmp_path / "out"), {"size": 240 * GB})["shards"] == 3, "a folder takes any file"
