"""The command as a person runs it: a process of its own, with nothing of ours in its environment."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from docs.answers import ANSWERS, check_document
from reshard.worker import broker
from reshard.worker.settings import Settings
from tests.support.procs import free_port
from tests.support.warm import COMMAND, warm

WHEN = r"[A-Z][a-z]{2} \d\d \d\d:\d\d"  # a time as tables have it
TIMEOUT = 120.0  # seconds; the slowest of these commands loads torch in a child


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str
    command: str = ""  # its words, without what they are given

    @property
    def documents(self) -> list[dict[str, Any]]:
        """What it wrote with --json, each as docs/reference/json.md has it."""
        return [check_document(self.command, line) for line in self.out.splitlines()]


Run = Callable[..., Done]


@pytest.fixture
def clean(tmp_path: Path) -> dict[str, str]:
    """An environment with nothing of ours, and homes of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "RESHARD_"))}
    own = {"HF_HOME": str(tmp_path / "hf"), "RESHARD_DATA_DIR": str(tmp_path / "data")}
    return clean | own | {"RESHARD_WEB_PORT": str(free_port())}


@pytest.fixture
def reshard(tmp_path: Path, clean: dict[str, str]) -> Run:
    """``reshard("plan", ...)`` runs the installed command."""

    def run(*arguments: str | Path, env: Mapping[str, str] | None = None) -> Done:
        typed, wanted = [*map(str, arguments)], clean | dict(env or {})
        command = [str(COMMAND), *typed]
        done = warm().run(command, wanted, tmp_path, TIMEOUT)
        words = [*typed[:2], ""][:2]
        known = " ".join(words if " ".join(words) in ANSWERS else words[:1])
        return Done(done.returncode, done.stdout, done.stderr, known)

    return run


Queue = Callable[..., Done]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A broker with nobody who works."""
    settings = Settings(broker_url=None, data_dir=tmp_path_factory.mktemp("service"))
    yield broker.start(settings)
    broker.stop(settings)


@pytest.fixture
def queue(reshard: Run, url: str) -> Queue:
    """``reshard`` with that broker."""
    return lambda *arguments: reshard(*arguments, env={"RESHARD_BROKER_URL": url})


ROW = 1000  # bytes of each tensor of the model, so that sizes in tests are easy to read


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with ten tensors in one file, a config that names no class, a tokenizer and a pickle."""
    folder = tmp_path / "model"
    folder.mkdir()
    random = np.random.default_rng(0)
    tensors = {f"layer.{i}.weight": random.integers(0, 255, ROW, np.uint8) for i in range(10)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text('{"hidden_size": 1000}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "optimizer.pt").write_bytes(b"never opened")
    return folder


def read(terminal: int) -> bytes:
    """What comes next; nothing once the other side is closed (EIO on Linux)."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def answered(
    command: Sequence[object], env: Mapping[str, str], question: bytes, answer: bytes
) -> tuple[int, bytes, bytes]:
    """The exit code of what is typed at a terminal and asks, what it showed there, and its stdout, which is a pipe."""
    ours, theirs = pty.openpty()
    typed = [str(word) for word in command]
    with subprocess.Popen(typed, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, env=env) as process:
        os.close(theirs)
        seen = b""
        while chunk := read(ours):
            seen += chunk
            if question in seen and answer:
                os.write(ours, answer)
                answer = b""
        assert process.stdout is not None
        out = process.stdout.read()
    os.close(ours)
    return process.returncode, seen, out
