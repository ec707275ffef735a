"""The library as a script uses it: `reshard.pipeline` and nothing below it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from reshard import pipeline
from reshard.pipeline import Hub, Options, Request, ReshardError, UsageError, errors, plan, run, verify


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({f"layer.{i}": np.full(1000, i, np.uint8) for i in range(10)}, folder / "model.safetensors")
    return folder


def test_every_public_name_is_there() -> None:
    assert [name for name in pipeline.__all__ if not hasattr(pipeline, name)] == []
    assert set(dir(pipeline)) == set(pipeline.__all__)


def test_every_family_of_errors_is_public() -> None:
    families = {kind.__name__ for kind in ReshardError.__subclasses__() if kind.__module__.startswith(errors.__name__)}
    assert families <= set(pipeline.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        pipeline.no_such_name  # noqa: B018


def test_an_import_of_the_package_or_its_errors_loads_nothing_heavy() -> None:
    script = "import sys, json, reshard.pipeline, reshard.pipeline.errors; json.dump(list(sys.modules), sys.stdout)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert not loaded & {"numpy", "huggingface_hub", "httpx2", "pydantic", "torch", "reshard.pipeline.reshard"}


def test_a_request_is_made_of_places_and_options_as_they_are_typed(tmp_path: Path) -> None:
    request = Request.of("a/model@v1", "b/model", size="200MB", dtype="bfloat16")
    assert request.source == Hub(repo="a/model", revision="v1")
    assert request.options == Options(size=200_000_000, dtype="bfloat16")
    with pytest.raises(UsageError):
        Request.of("a/model", "b/model", size="5G")
    with pytest.raises(UsageError, match="dtype: .*, not 'int3'"):
        Request.of("a/model", "b/model", dtype="int3")
    with pytest.raises(UsageError, match="sise"):
        Request.of("a/model", "b/model", sise="200MB")


def test_what_was_planned_is_run_and_verified(model: Path, tmp_path: Path) -> None:
    request = Request.of(str(model), str(tmp_path / "out"), size="3300B")
    planned = plan(request)
    assert not (tmp_path / "out").exists()
    report = run(request)
    assert report.plan.digest == planned.digest
    assert sorted(p.name for p in (tmp_path / "out").glob("*.safetensors")) == [s.path for s in planned.shards]

    seen: list[tuple[int, int]] = []
    found = verify(
        str(tmp_path / "out"), str(model), deep=True, progress=lambda done, total: seen.append((done, total))
    )
    assert found.result == "passed"
    assert found.against == planned.pin
    done, total = seen[-1]
    assert seen[0] == (0, total) and done >= 2 * 10 * 1000

    shard = tmp_path / "out" / planned.shards[0].path
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert verify(str(tmp_path / "out"), str(model), deep=True).result == "failed"
