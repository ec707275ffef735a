"""`reshard run` ended in the middle, as a person or the kernel ends it, and typed again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import COMMAND, Run
from tests.support.giants import Spec, save_sparse
from tests.support.procs import wait_for

MB = 1000**2
SHARD = 50 * MB  # bytes; of --size 51MB, which holds five tensors and a header


def layers(total: int) -> Iterator[Spec]:
    """Tensors of 10 MB; every one of them starts with its own number."""
    return ((f"layers.{i}.weight", "U8", (10 * MB,)) for i in range(total // (10 * MB)))


def noted(state: Path) -> int:
    """How many files a run has noted as copied."""
    lines = [line for path in state.glob("reshard/*.jsonl") for line in path.read_bytes().splitlines()]
    return sum(len(json.loads(line).get("receipts", ())) for line in lines if line.endswith(b"}"))


@pytest.fixture
def state(tmp_path: Path, clean: dict[str, str]) -> Path:
    clean["XDG_STATE_HOME"] = str(tmp_path / "state")
    return tmp_path / "state"


def interrupted(arguments: list[str], clean: dict[str, str], state: Path, files: int, how: signal.Signals) -> str:
    """What the command said that was ended once so many files were noted."""
    running = subprocess.Popen(
        [COMMAND, *arguments], env=clean, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    wait_for(lambda: noted(state) >= files or running.poll() is not None, f"{files} files", 120)
    running.send_signal(how)
    _, said = running.communicate(timeout=60)
    assert running.returncode in (130, -how), said
    return said


def test_ctrl_c_says_what_is_kept_and_what_to_type(
    reshard: Run, clean: dict[str, str], state: Path, tmp_path: Path
) -> None:
    save_sparse(tmp_path / "model", layers(1_500 * MB), 1)
    typed = ["run", str(tmp_path / "model"), "--to", str(tmp_path / "out"), "--size", "51MB"]
    said = interrupted(typed, clean, state, 1, signal.SIGINT)
    assert "interrupted: nothing was published; run the same command again" in said and "Traceback" not in said
    assert not (tmp_path / "out").exists()
    done = reshard(*typed, env=clean)
    assert done.code == 0, done.err
    assert "files of 30 copied by an earlier run" in done.err
    assert not list(state.glob("reshard/*.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.25, 0.5, 0.75])
def test_a_run_that_is_killed_reads_at_most_what_was_not_sealed_again(
    part: float, reshard: Run, clean: dict[str, str], state: Path, tmp_path: Path
) -> None:
    size, source, target = 3_000 * MB, tmp_path / "model", tmp_path / "out"
    save_sparse(source, layers(size), 3)
    for path in source.glob("*.safetensors"):  # holes, but for a number in every tensor
        with path.open("r+b") as file:
            for at in range(path.stat().st_size % (10 * MB), path.stat().st_size, 10 * MB):
                os.pwrite(file.fileno(), np.int64(at).tobytes(), at)
    typed = ["run", str(source), "--to", str(target), "--size", "51MB"]
    interrupted(typed, clean, state, int(part * size / SHARD), signal.SIGKILL)
    kept = noted(state) * SHARD
    done = reshard(*typed, "--json", env=clean)
    assert done.code == 0, done.err
    read = done.documents[-1]["moved"]["read"]
    print(f"killed at {part:.0%}: {kept / MB:.0f} MB were sealed, {read / MB:.0f} MB read again of {size / MB:.0f}")
    assert read <= size - kept + SHARD
    for path in sorted(target.glob("*.safetensors")):
        assert path.stat().st_size <= SHARD + MB
    assert reshard("verify", str(target), "--against", str(source), "--deep", env=clean).code == 0
