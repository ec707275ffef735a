"""A minimal Debian with systemd as its first process, by systemd-nspawn.

It shares this machine's network, so that the Hub on loopback is its own, too; of files it sees its own alone.
"""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

from tests.support.procs import wait_for

BOOT = 120.0  # seconds
STOP = 90.0  # seconds; units are given 60
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Debian:
    """A running system; what is typed in it is typed as root."""

    def __init__(self, root: Path, log: Path) -> None:
        self.root = root
        self._log = log
        self._binds: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._init = 0

    def show(self, path: Path | str) -> None:
        """Have a file or a folder of this machine there as well, under the same name, before it starts."""
        self._binds.append(f"--bind-ro={path}")

    def start(self) -> Debian:
        command = [
            "systemd-nspawn", "--quiet", "--boot", "--register=no", "--keep-unit", "--link-journal=no",
            "--resolv-conf=copy-host", "--machine=reshard-units", f"--directory={self.root}", *self._binds,
        ]  # fmt: skip
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._init = wait_for(self._find_init, "the system's first process", BOOT)
        wait_for(self._booted, "the end of its boot", BOOT)
        return self

    def _find_init(self) -> int:
        """Its pid here: the process that is number 1 in a namespace of its own and lives in our folder."""
        assert self._process is not None and self._process.poll() is None, self._log.read_text()[-3000:]
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, StopIteration, ValueError):
                numbers = next(
                    line for line in (folder / "status").read_text().splitlines() if line.startswith("NSpid")
                )
                if len(numbers.split()) > 2 and numbers.split()[-1] == "1" and (folder / "root").samefile(self.root):
                    return int(folder.name)
        return 0

    def _booted(self) -> bool:
        return self.run("systemctl is-system-running", check=False).stdout.strip() in ("running", "degraded")

    def run(self, script: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        """``script`` as a shell with ``-e`` runs it, in /src where that is there."""
        command = [
            "nsenter", f"--target={self._init}", "--all", "--root", "--", "env", "-i", f"PATH={PATH}", "HOME=/root",
            *(f"{name}={value}" for name, value in environment.items()),
            "sh", "-ec", f"cd /src 2>/dev/null || cd /; {script}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert not check or done.returncode == 0, f"{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done

    def journal(self, unit: str = "reshard-*") -> str:
        return self.run(f"journalctl --no-pager --output=cat --unit='{unit}'").stdout

    def stop(self) -> None:
        if self._process is None:
            return
        with suppress(AssertionError):
            self.run("systemctl poweroff --no-wall", check=False)
        try:
            self._process.wait(STOP)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
