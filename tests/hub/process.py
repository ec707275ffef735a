"""The Hub as a process of its own, which tests can kill and start again."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from .admin import HubAdmin

ROOT = Path(__file__).resolve().parents[2]


class HubProcess:
    """``with HubProcess() as hub: hub.endpoint, hub.admin``; without a directory it uses one that goes with it."""

    def __init__(
        self,
        directory: Path | None = None,
        *,
        port: int = 0,
        address: str = "127.0.0.1",
        users: Sequence[str] = (),
        settings: dict[str, Any] | None = None,
    ) -> None:
        """``users``: NAME:TOKEN[:ROLE]; ``settings``: see settings.py."""
        self._own_directory = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="hub-"))
        self.port = port
        self._arguments = ["--address", address]
        self._arguments += [word for user in users for word in ("--user", user)]
        for name, value in (settings or {}).items():
            self._arguments += ["--set", f"{name}={json.dumps(value)}"]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> "HubProcess":
        """Start, or start again on the same directory and port; returns when requests are served."""
        assert self._process is None, "the hub is running"
        command = [sys.executable, "-m", __package__, "--dir", str(self.directory), "--port", str(self.port)]
        command += ["--die-with-parent", *self._arguments]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the hub ended with {self._process.wait()} before it was ready")
        self.port = json.loads(line)["port"]
        return self

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin(self) -> HubAdmin:
        return HubAdmin(self.endpoint)

    @property
    def pid(self) -> int:
        assert self._process, "the hub is not running"
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL; what was answered is still there after ``start``."""
        assert self._process, "the hub is not running"
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout
        self._process.stdout.close()
        self._process = None

    def rss(self) -> int:
        """Bytes of memory that the process has resident now."""
        return self._status("VmRSS")

    def peak_rss(self) -> int:
        """The most that ``rss`` has been."""
        return self._status("VmHWM")

    def _status(self, name: str) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"no {name} in /proc/{self.pid}/status")

    def __enter__(self) -> "HubProcess":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process:
            self.kill()
        if self._own_directory:
            shutil.rmtree(self.directory)
