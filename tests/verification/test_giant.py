"""A 671B model over the Hub: planned and verified from headers, with little processor time and memory."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from reshard.pipeline.limits import MB
from tests.hub.fixtures import Namespace
from tests.pipeline.verifying.models import deepseek_fp8
from tests.support.giants import save_sparse
from tests.support.measured import measured, within

pytestmark = pytest.mark.slow

CPU = 20  # seconds of processor time for planning, and for verifying from headers; the reload child has its own
MEMORY = 800 * MB


@pytest.fixture
def giants(tmp_path: Path, namespace: Namespace) -> dict[str, str]:
    """The model in 163 and in 270 files, on the Hub; its bytes are holes, and their sha256s are believed."""
    config, specs = deepseek_fp8()
    for name, count in (("source", 163), ("output", 270)):
        folder = tmp_path / name
        save_sparse(folder, ((n, dtype, shape) for n, (dtype, shape) in specs.items()), count)
        (folder / "config.json").write_bytes(config)
        namespace.admin.create_repo(namespace.repo(name))
        files = {path.name: path for path in folder.iterdir()}
        sums = {p: hashlib.sha256((name + p).encode()).hexdigest() for p in files if p.endswith(".safetensors")}
        namespace.admin.import_files(namespace.repo(name), files, sha256=sums)
    return {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token, "HF_HUB_DISABLE_XET": "1"}


def test_it_is_verified_against_its_source(giants: dict[str, str], namespace: Namespace) -> None:
    jobs = "tests.pipeline.verifying.jobs"
    cost = measured(f"{jobs}:do_verify", namespace.repo("output"), namespace.repo("source"), env=giants)
    results = {check["name"]: check for check in cost.result}
    assert {check["result"] for check in cost.result} == {"passed"}, json.dumps(cost.result)[:2000]
    assert results["same tensors"]["figures"]["tensors"] > 90_000
    assert results["class of model"]["level"] == "model"
    assert within(cost.cpu, CPU)
    assert cost.peak <= MEMORY


def test_it_is_planned(giants: dict[str, str], namespace: Namespace) -> None:
    source, target = namespace.repo("source"), namespace.repo("target")
    cost = measured("tests.pipeline.jobs:do_plan", source, target, {"size": 5_000_000_000}, env=giants)
    assert cost.result["tensors"] > 90_000
    assert within(cost.cpu, CPU)
    assert cost.peak <= MEMORY
