"""`reshard run` ended in the middle, as a person or the kernel ends it, and typed again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from reshard.pipeline.limits import SETTLE
from tests.cli.conftest import Run
from tests.hub.admin import HubAdmin
from tests.hub.fixtures import Namespace
from tests.support.giants import Spec, save_sparse
from tests.support.models import arrays, numbered, save_sharded
from tests.support.procs import wait_for
from tests.support.stuck import STUCK
from tests.support.warm import COMMAND

MB = 1000**2
SHARD = 50 * MB  # bytes; of --size 51MB, which holds five tensors and a header
SEAL = max(SHARD, 256 * MB)  # bytes; as docs/failures.md promises
UNDER_WAY = 2  # shards: one is filled while another is brought to the disk


def layers(total: int) -> Iterator[Spec]:
    """Tensors of 10 MB; every one of them starts with its own number."""
    return ((f"layers.{i}.weight", "U8", (10 * MB,)) for i in range(total // (10 * MB)))


def copied(target: Path) -> int:
    """Bytes that a run has written for a folder, stored or not."""
    found = 0
    for path in target.with_name(f".{target.name}.reshard").rglob("*"):
        with suppress(FileNotFoundError):  # it was stored meanwhile, and has another name
            found += path.stat().st_size if path.is_file() else 0
    return found


@pytest.fixture
def state(tmp_path: Path, clean: dict[str, str]) -> Path:
    clean["XDG_STATE_HOME"] = str(tmp_path / "state")
    return tmp_path / "state"


def kill(arguments: list[str], clean: dict[str, str], target: Path, reached: float) -> None:
    """Run the command, and kill it once it has written so many bytes."""
    running = subprocess.Popen(
        [COMMAND, *arguments], env=clean, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    wait_for(lambda: copied(target) >= reached or running.poll() is not None, f"{reached} bytes")
    running.kill()
    _, said = running.communicate(timeout=STUCK)
    assert running.returncode == -signal.SIGKILL, said


@dataclass
class Held:
    """A run of a model in two files that the Hub makes wait where the test says."""

    source: str
    target: Path
    space: HubAdmin
    env: dict[str, str]

    def interrupt(self, where: str, skip: int = 0, command: str = "run", jobs: int = 1, noted: int = 0) -> str:
        """What it says when someone presses Ctrl-C there, with so many files noted as copied."""
        rule = self.space.fault(where, "hold", skip=skip, when="request")
        options = ["--to", str(self.target), "--size", "4100B", "--jobs", str(jobs)] if command == "run" else []
        # A shell's background job ignores the signal, and so would this command if the tests are one.
        heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        running = subprocess.Popen(
            [COMMAND, command, self.source, *options],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heeds,
        )
        self.space.wait_for_fault(rule, waiting=1)
        wait_for(lambda: self.noted() >= noted, f"{noted} files")
        # Python looks for signals before it waits for an answer, and sees none that comes between the two.
        wait_for(lambda: _sleeps(running.pid), "its waiting for the answer")
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=STUCK)
        assert running.returncode == 130 and "Traceback" not in said, said
        assert not self.target.exists()
        self.space.clear_faults()
        return said

    def noted(self) -> int:
        """Files that the run's journal holds."""
        notes = [path.read_text() for path in Path(self.env["XDG_STATE_HOME"]).rglob("*.jsonl")]
        return sum(text.count('\\"shard\\":') for text in notes)


def _sleeps(pid: int) -> bool:
    """Whether the process's first thread waits in a call of the kernel's."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


@pytest.fixture
def held(clean: dict[str, str], state: Path, namespace: Namespace, tmp_path: Path) -> Held:
    save_sharded(tmp_path / "model", numbered(arrays(4, 4000), 2))
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    source, space = namespace.repo("source"), namespace.admin
    space.create_repo(source)
    space.put_files(source, files, lfs=[name for name in files if name.endswith(".safetensors")])
    clean |= {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token, "HF_HUB_DISABLE_XET": "1"}
    return Held(source, tmp_path / "out", space, clean)


@pytest.mark.parametrize(
    "number, kept, jobs", [*(pytest.param(*row, marks=pytest.mark.slow) for row in ((1, 0, 1), (2, 4, 1))), (1, 4, 2)]
)
def test_ctrl_c_says_what_is_kept_and_what_to_type(number: int, kept: int, jobs: int, reshard: Run, held: Held) -> None:
    """The Hub holds the bytes of the first or of the second file back, once it is planned."""
    weights = f"^GET /_cdn/.*model-0000{number}-of"
    held.space.log(reset=True)
    assert reshard("plan", held.source, "--to", held.target, "--size", "4100B", env=held.env).code == 0
    planned = [r for r in held.space.log() if re.search(weights, f"{r['method']} {r['path']}")]
    said = held.interrupt(weights, skip=len(planned), jobs=jobs, noted=kept)
    ends = f"nothing was published ({kept} of 8 files copied); run the same command again to continue"
    assert f"Interrupted: {ends}" in " ".join(said.split())
    done = reshard("run", held.source, "--to", held.target, "--size", "4100B", env=held.env)
    assert done.code == 0
    assert (f"Resuming: {kept} of 8 files copied by an earlier run" in done.err) is bool(kept)


def test_ctrl_c_while_it_is_planned_says_that_nothing_was_copied(held: Held) -> None:
    assert "Interrupted: nothing was copied" in held.interrupt(f"^GET /api/models/{held.source}/")


@pytest.mark.parametrize("command", ["plan", *(pytest.param(c, marks=pytest.mark.slow) for c in ("doctor", "verify"))])
def test_ctrl_c_while_something_is_only_looked_at_says_so(command: str, held: Held) -> None:
    said = held.interrupt(f"^GET /api/models/{held.source}/", command=command)
    assert said.splitlines()[-1] == "Interrupted; nothing changed"


def test_what_is_sealed_at_once_is_what_the_docs_say() -> None:
    assert max(SHARD, SETTLE) == SEAL
    assert f"about {SETTLE // MB} MB" in (Path(__file__).parents[2] / "docs" / "failures.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("part, jobs", [(0.25, 1), (0.5, 1), (0.75, 1), (0.5, 2)])
def test_a_run_that_is_killed_reads_at_most_one_seal_again(
    part: float, jobs: int, reshard: Run, clean: dict[str, str], state: Path, tmp_path: Path
) -> None:
    """Of each file that is copied at a time; and the shards that were being written and brought to the disk.

    The source is read as fast as it is written.
    """
    size, source, target = 3_000 * MB, tmp_path / "model", tmp_path / "out"
    save_sparse(source, layers(size), 3)
    for path in source.glob("*.safetensors"):  # holes, but for a number in every tensor
        with path.open("r+b") as file:
            for at in range(path.stat().st_size % (10 * MB), path.stat().st_size, 10 * MB):
                os.pwrite(file.fileno(), np.int64(at).tobytes(), at)
    typed = ["run", str(source), "--to", str(target), "--size", "51MB", "--jobs", str(jobs)]
    kill(typed, clean, target, part * size)
    before = copied(target)
    done = reshard(*typed, "--json", env=clean)
    assert done.code == 0, done.err
    read = done.documents[-1]["moved"]["read"]
    print(f"killed at {before / MB:.0f} MB of {size / MB:.0f}: {(before + read - size) / MB:.0f} MB were read again")
    assert before + read - size <= jobs * (SEAL + UNDER_WAY * SHARD)
    for path in sorted(target.glob("*.safetensors")):
        assert path.stat().st_size <= SHARD + MB
    assert reshard("verify", str(target), "--against", str(source), "--deep", env=clean).code == 0
