"""A Docker engine of its own: `python -m tests.deploy.engine` is run in namespaces of its own, and ends with them.

It is Debian's, in a folder of its own, and its network has no way out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGES = "docker.io,docker-cli,docker-buildx,docker-compose,iptables,iproute2,ca-certificates"
# Processes too, so that none of it outlives the trial.
NAMESPACES = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
START = 60.0  # seconds
DOCKER_DATA = "var/lib/docker"
# The folder is its root for good, and not by chroot: what `docker exec` starts would leave that.
DAEMON = "pivot_root . mnt && exec chroot . sh -ec 'umount -l /mnt && exec dockerd --storage-driver overlay2'"

THERE = os.environ | {"TMPDIR": "/tmp"}  # ours may name a folder that Debian does not have


class Engine:
    """In these namespaces: started by ``with``, it runs docker's commands."""

    def __init__(self, root: Path, sources: Path) -> None:
        """``root`` is the folder with Debian; ``sources`` are seen there as /src."""
        self._root, self._sources = root, sources
        self._daemon: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Engine:
        # Containers of a trial that failed would start again.
        shutil.rmtree(self._root / DOCKER_DATA, ignore_errors=True)
        run("mount", "--make-rprivate", "/")
        run("mount", "--bind", self._root, self._root)
        run("ip", "link", "set", "lo", "up")
        for place in ("dev", "sys"):
            run("mount", "--rbind", f"/{place}", self._root / place)
        run("mount", "-t", "proc", "proc", self._root / "proc")
        run("mount", "-t", "tmpfs", "tmpfs", self._root / "run")
        (self._root / "src").mkdir(exist_ok=True)
        run("mount", "--bind", self._sources, self._root / "src")
        with (self._root / "var/log/dockerd.log").open("wb") as log:
            self._daemon = subprocess.Popen(
                ["unshare", "--mount", "sh", "-ec", DAEMON], cwd=self._root, env=THERE, stdout=log, stderr=log
            )
        deadline = time.monotonic() + START
        while self.try_docker("info").returncode:
            if time.monotonic() > deadline or self._daemon.poll() is not None:
                raise AssertionError(f"no engine:\n{(self._root / 'var/log/dockerd.log').read_text()[-3000:]}")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._daemon is not None
        self._daemon.terminate()
        self._daemon.wait(120)

    def try_docker(self, *words: str | Path, **how: Any) -> subprocess.CompletedProcess[str]:
        """`docker WORDS`, however it ends."""
        options: dict[str, Any] = {"capture_output": True, "text": True, "env": THERE} | how
        return subprocess.run(["chroot", self._root, "docker", *words], check=False, **options)

    def docker(self, *words: str | Path, **how: Any) -> str:
        """What `docker WORDS` says; it has to end well."""
        done = self.try_docker(*words, **how)
        assert done.returncode == 0, f"docker {' '.join(map(str, words))}: {done.stdout}{done.stderr}"
        return str(done.stdout).strip()

    def load(self, folder: Path, image: str) -> None:
        """An image of all that is in ``folder``."""
        with subprocess.Popen(["tar", "--one-file-system", "-C", folder, "-c", "."], stdout=subprocess.PIPE) as packed:
            self.docker("import", "-", image, stdin=packed.stdout)


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True)


def within_namespaces(module: str, *arguments: str | Path) -> Sequence[str | Path]:
    """The command that runs a module of these tests there."""
    return [*NAMESPACES, sys.executable, "-m", module, *arguments]
