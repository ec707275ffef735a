"""As the first process of a container, which gets only the signals that it handles: SIGTERM ends each command anyway.

In a process namespace of its own each command is one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.procs import Proc, wait_for
from tests.support.warm import COMMAND

NAMESPACE = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--pid", "--fork", "--kill-child"]
ENDED = 128 + signal.SIGTERM  # as shells count it

pytestmark = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode != 0,
    reason="this system gives no process namespaces to this user",
)


@contextmanager
def first_process(env: dict[str, str], folder: Path, *words: str) -> Iterator[tuple[Proc, int]]:
    """`reshard WORDS`, and the pid that it has outside."""
    started = Proc("first", [*NAMESPACE, str(COMMAND), *words], env, folder)
    try:
        yield started, wait_for(started.children, "the first process")[0]
    finally:
        started.kill()


@pytest.mark.parametrize("command", ["worker", "control", "watch", "web"])
def test_sigterm_ends_a_command_that_is_still_loaded(command: str, clean: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("print('loading', flush=True)\nimport time\ntime.sleep(600)\n")
    with first_process(clean | {"PYTHONPATH": str(tmp_path)}, tmp_path, command) as (loading, pid):
        wait_for(lambda: loading.said() == "loading\n", "its loading")
        os.kill(pid, signal.SIGTERM)
        assert (loading.wait(30), loading.said()) == (ENDED, "loading\n")


def test_sigterm_ends_a_worker_while_celery_is_loaded(url: str, clean: dict[str, str], tmp_path: Path) -> None:
    env = clean | {"RESHARD_BROKER_URL": url, "TMPDIR": str(tmp_path)}
    with first_process(env, tmp_path, "worker") as (started, pid):
        wait_for(
            lambda: b"\0reshard.worker.program\0" in Path(f"/proc/{pid}/cmdline").read_bytes(), "its becoming Celery"
        )
        os.kill(pid, signal.SIGTERM)
        assert (started.wait(30), started.said()) == (ENDED, "")
