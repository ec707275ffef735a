"""`reshard doctor`, as a person types it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import Run
from tests.hub.fixtures import Namespace
from tests.support.models import save_single


def test_an_installation_without_a_queue_is_fit_for_run(reshard: Run, namespace: Namespace) -> None:
    env = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token}
    done = reshard("doctor", env=env)
    assert done.code == 0, done.err
    assert f"can write: {namespace.name}" in done.out
    assert "start one with `reshard up`" in done.out
    (facts,) = reshard("doctor", "--json", env=env).documents
    assert facts["state"] == "warning"
    assert {probe["name"]: probe["state"] for probe in facts["probes"]}["reshard"] == "ok"
    assert namespace.token not in str(facts)


@pytest.mark.parametrize("command", ["doctor", "worker", "control", "web"])
def test_a_variable_that_no_setting_reads_is_named_and_what_may_be_meant(
    reshard: Run, namespace: Namespace, command: str
) -> None:
    typed = {"RESHARD_ALLOWED_TARGET": "acme/*", "RESHARD_WEB_HOST": "x", "RESHARD_COMPLETE": "what none is like"}
    ends = {"RESHARD_NOTIFY_APPRISE": "nothing://", "RESHARD_WEB_ADDRESS": "nowhere.invalid"}
    nowhere = {"RESHARD_BROKER_URL": "redis://127.0.0.1:1/0", "HF_ENDPOINT": namespace.endpoint}
    said = reshard(command, env={**nowhere, **ends, **typed})
    names = re.findall(r"(RESHARD_\w+) is not a setting(?:; did you mean (\w+)\?)?", said.out + said.err)
    meant = {
        "RESHARD_ALLOWED_TARGET": "RESHARD_ALLOWED_TARGETS",
        "RESHARD_COMPLETE": "",
        "RESHARD_WEB_HOST": "RESHARD_WEB_HOSTS",
    }
    assert dict(names) == meant


def test_trouble_ends_with_the_code_that_a_job_would_end_with(reshard: Run, namespace: Namespace) -> None:
    done = reshard("doctor", env={"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": "hf_nobodys"})
    assert done.code == 4
    assert "trouble" in done.out and "error[access.bad_token]" in done.err


def test_a_repository_is_looked_over(reshard: Run, model: Path) -> None:
    done = reshard("doctor", model)
    assert done.code == 0, done.err
    assert "other formats: 12 bytes in 1 PyTorch file" in done.out
    assert "-> resharding skips it" in done.out
    (model / "model.safetensors").write_bytes(b"short")
    assert reshard("doctor", model, "--quiet").code == 5


def test_an_adapter_alone_is_no_healthy_repository(reshard: Run, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    save_single(folder, {"lora_A": np.zeros(9, np.float32)}, "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    ran, seen = reshard("run", folder, "--to", tmp_path / "out"), reshard("doctor", folder)
    assert seen.code == ran.code == 3
    assert seen.err.splitlines() == ran.err.splitlines()[-2:], "the same error and hint"
    assert "1 problem\nrefused: " in seen.out
    (facts, error) = reshard("doctor", folder, "--json").documents
    assert (facts["state"], facts["refused"]["always"]) == ("trouble", error["error"])


def test_what_only_require_model_refuses_is_no_problem_and_told(reshard: Run, model: Path) -> None:
    done = reshard("doctor", model)
    assert done.code == 0
    assert done.out.splitlines()[-1].startswith("--require model would fail with proof.model_required: ")


def test_hooks_are_tried_when_asked(reshard: Run, tmp_path: Path) -> None:
    none = reshard("doctor", "--notify")
    assert none.code == 0 and "no notifications are sent" in none.out
    took = reshard("doctor", "--notify", env={"RESHARD_NOTIFY_COMMAND": f"tee {tmp_path / 'notice'}"})
    assert took.code == 0 and "test notification sent" in took.out
    assert json.loads((tmp_path / "notice").read_text())["kind"] == "test"
    assert "a test notification from reshard" not in took.out, "what a hook writes goes to stderr"
    away = reshard("doctor", "--notify", "--json", env={"RESHARD_NOTIFY_URL": "http://127.0.0.1:9/s3cr3t"})
    assert away.code == 10 and "s3cr3t" not in away.out + away.err
    assert away.documents[0]["probes"][0]["error"]["code"] == "queue.notice"
    assert reshard("doctor", "--notify", "a/b").code == 2


def test_a_problem_and_its_cure_are_one_readable_line(reshard: Run, model: Path) -> None:
    (model / "config.json").write_text("{cut off")
    (line,) = [line for line in reshard("doctor", model).out.splitlines() if line.startswith("config: ")]
    assert " -> " in line and "\\x0a" not in line
