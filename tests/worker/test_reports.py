"""What `status JOB --report` says of a job that a check ended: the check itself, with its level, figures and findings.

A real store, real folders and the worker's own steps; the fault lies where the check looks.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard.pipeline.copying.hashing import HashingWriter
from reshard.pipeline.planning.model import MANIFEST
from reshard.pipeline.publishing import commit as publish
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.verdicts import ModelCheck
from reshard.worker.queue.scripts import job_key
from reshard.worker.queue.states import JobState
from tests.pipeline.verifying.models import Saved, save
from tests.support.failing_stores import Spoiler
from tests.worker.bench import Bench, bench, one_reload, steps

__all__ = ["bench", "one_reload", "steps"]


def report(bench: Bench) -> tuple[dict[str, Any], str]:
    """What a person at another terminal asks for, as JSON and as text."""
    command = [Path(sys.executable).parent / "reshard", "status", bench.id, "--report"]
    said = [subprocess.run([*command, *more], capture_output=True, text=True).stdout for more in (["--json"], [])]
    return json.loads(said[0]), said[1]


def failed(facts: dict[str, Any]) -> dict[str, Any]:
    (check,) = [check for check in facts["checks"] if check["result"] == "failed"]
    return check


def test_a_job_that_is_done_reports_what_was_compared_in_the_copy(bench: Bench) -> None:
    bench.until(lambda job: job.state.ended)
    facts, text = report(bench)
    assert [check["name"] for check in facts["checks"]] == ["structure", "reload model", "copy", "read back"]
    copied = facts["checks"][2]
    tensors = 24 * (3968 + 64)  # bytes of data in the source
    assert copied["figures"] == {"tensors": 48, "bytes": tensors, "attested": 0}
    assert copied["result"] == "passed"
    assert f"copy: passed ({copied['level']}); tensors: 48, bytes: {tensors:,}, attested: 0" in text


def test_what_the_two_taps_disagree_on_is_named_by_tensor(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    spoiler, write = Spoiler("rrf"), HashingWriter.write

    def spoiled(self: HashingWriter, view: memoryview) -> None:
        for some in spoiler.views(view):
            write(self, some)

    while not bench.job.state.ended:
        with monkeypatch.context() as patch:
            patch.setattr(HashingWriter, "write", spoiled)
            spoiler = Spoiler("rrf")
            bench.step()
    facts, text = report(bench)
    check = failed(facts)
    assert (check["name"], facts["result"]) == ("copy", "failed")
    assert check["figures"]["file"].startswith("model-000")
    (finding,) = check["findings"]
    tensor = finding.split()[0]
    assert tensor.startswith("layer.")
    assert f"\n    {finding}\n" in text


def test_a_source_that_is_not_what_its_archive_says_is_named_by_file(bench: Bench) -> None:
    shutil.rmtree(bench.source)
    bench.source.mkdir()
    file = bench.source / "pytorch_model.bin"
    torch.save({"w": torch.arange(1000, dtype=torch.int16)}, file)
    at = file.read_bytes().index(torch.arange(500, 510, dtype=torch.int16).numpy().tobytes())
    with file.open("r+b") as handle:
        handle.seek(at)
        handle.write(b"x")
    bench.until(lambda job: job.state.ended)
    facts, text = report(bench)
    check = failed(facts)
    assert (check["name"], check["figures"]) == ("source bytes", {"bytes": file.stat().st_size})
    (finding,) = check["findings"]
    assert finding.startswith("pytorch_model.bin, record ")
    assert finding in text


class Forgetful(MetaLoader):
    """The worker's own reload, from which the output's last tensor is kept."""

    def __init__(self, meta_loader: MetaLoader) -> None:
        super().__init__()
        self._reload = meta_loader

    def check(self, config: Any, source: Any, output: Any = None, **how: Any) -> ModelCheck:
        return self._reload.check(config, source, dict(list(output.items())[:-1]))


def make_llama(bench: Bench) -> Saved:
    """Another source for the same job: one whose class transformers knows."""
    shutil.rmtree(bench.source)
    return save("llama", bench.source)


def test_a_failed_reload_names_the_tensor_until_it_is_made_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, meta_loader = make_llama(bench), bench.process.meta_loader()
    with monkeypatch.context() as patch:
        patch.setattr(bench.process, "meta_loader", lambda: Forgetful(meta_loader))
        bench.until(lambda job: job.state.ended)
    facts, text = report(bench)
    check = failed(facts)
    assert (check["name"], check["level"], check["figures"]["missing"]) == ("reload model", "model", 1)
    assert check["figures"]["class_name"] == "LlamaForCausalLM"
    assert facts["checks"][0]["name"] == "structure"
    assert any(tensor in check["findings"][0] for tensor in saved.specs)
    assert check["findings"][0] in text
    assert f"`reshard status {bench.id} --report`" in facts["error"]["hint"]

    bench.store.retry(bench.id)
    bench.until(lambda job: job.state.ended)
    facts, _ = report(bench)
    assert [(check["name"], check["result"]) for check in facts["checks"]] == [
        ("structure", "passed"), ("reload model", "passed"), ("copy", "passed"), ("read back", "passed"),
    ]  # fmt: skip
    assert facts["result"] == "passed"


def test_a_plan_that_was_spoiled_in_the_store_is_a_failed_check(bench: Bench, store: Any) -> None:
    bench.step()
    first, second = (store.redis.hget(job_key(bench.id, "plan"), number) for number in ("0", "1"))
    store.redis.hset(job_key(bench.id, "plan"), "0", second)
    assert first != second
    bench.until(lambda job: job.state.ended)
    check = failed(report(bench)[0])
    assert (check["name"], check["figures"]["tensors"]) == ("structure", 47)
    assert "model.safetensors.index.json" in check["findings"][0]


def test_every_file_that_is_not_what_was_published_is_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that keeps other small files than it was given."""
    render, index = publish.render_manifest, publish.index_bytes
    monkeypatch.setattr(publish, "render_manifest", lambda made: render(made).replace(b'"size":', b'"size":1', 1))
    monkeypatch.setattr(publish, "index_bytes", lambda *given: index(*given) + b" ")
    bench.until(lambda job: job.state.ended)
    assert bench.job.state == JobState.published_unverified
    facts, text = report(bench)
    check = failed(facts)
    assert (check["name"], check["figures"]["shards"]) == ("read back", len(list(bench.target.glob("*.safetensors"))))
    assert [finding.split()[0] for finding in check["findings"]] == [MANIFEST, "model.safetensors.index.json"]
    assert all(finding in text for finding in check["findings"])
    assert [c["name"] for c in facts["checks"]] == ["structure", "reload model", "copy", "read back"]
    assert f"`reshard rollback {bench.id}`" in facts["error"]["hint"]
