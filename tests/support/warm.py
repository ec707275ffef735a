"""The command in a process of its own, forked from one that has the imports behind it: they are most of what it takes.

    python -m tests.support.warm SOCKET

What differs between two starts of Python is not forked: ``Warm.takes`` says which environments can be.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from select import select
from typing import IO

ROOT = Path(__file__).parents[2]
COMMAND = Path(sys.executable).parent / "reshard"
# Read when Python starts, or when what is imported here is.
AT_START = ("PYTHON", "LANG", "LC_", "OTEL_", "PYDANTIC_", "TYPER_", "SSL_")
MESSAGE_MAX = 1 << 20  # bytes of arguments and environment


class Warm:
    """The process that is forked from, started when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "warm"
        self._process: subprocess.Popen[bytes] | None = None

    def takes(self, env: Mapping[str, str]) -> bool:
        """Whether a command with ``env`` is the same when it is forked."""
        return _at_start(env) == _at_start(os.environ)

    def run(
        self, arguments: Sequence[str], env: Mapping[str, str], cwd: Path, out: IO[str], err: IO[str], timeout: float
    ) -> int:
        """The exit code of ``reshard`` with ``arguments``, negative for a signal; raises TimeoutExpired."""
        if self._process is None:
            self._start()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as wire:
            wire.settimeout(timeout)
            wire.connect(str(self._socket))
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_MAX)
            asked = json.dumps([list(arguments), dict(env), str(cwd)]).encode()
            with open(os.devnull, "rb") as nothing:  # noqa: PTH123 -- no path
                socket.send_fds(wire, [asked], [nothing.fileno(), out.fileno(), err.fileno()])
            pid = int(wire.recv(100))
            try:
                return int(wire.recv(100))
            except TimeoutError:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(["reshard", *arguments], timeout) from None

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()  # it ends with its input

    def _start(self) -> None:
        command = [sys.executable, "-m", "tests.support.warm", str(self._socket)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"


def _at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(AT_START)}


def _serve(path: str) -> list[str]:
    """Fork for each connection; returns, in the process that is to be the command, its arguments."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while sys.stdin not in select([listener, sys.stdin], [], [])[0]:
            with suppress(ChildProcessError):  # none has ended since
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            wire, _ = listener.accept()
            with wire:
                if os.fork() == 0:
                    listener.close()
                    return _command(wire)
    os._exit(0)


def _command(wire: socket.socket) -> list[str]:
    asked, fds, _, _ = socket.recv_fds(wire, MESSAGE_MAX, 3)
    pid = os.fork()
    if pid:
        wire.send(str(pid).encode())
        for fd in fds:
            os.close(fd)
        _, status = os.waitpid(pid, 0)
        with suppress(BrokenPipeError):
            wire.send(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    wire.close()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    arguments, env, cwd = json.loads(asked)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    os.chdir(cwd)
    sys.path[0] = str(COMMAND.parent)  # as a script has it
    return [str(COMMAND), *arguments]


def _imports() -> None:
    """What the console script does before it imports, and what its commands import."""
    sys.modules["opentelemetry"] = None  # type: ignore[assignment]
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from reshard.cli.main import COMMANDS

    for listed in COMMANDS.values():
        resolve_name(f"reshard.cli.{listed.home}")
    import reshard.client.queue
    import reshard.pipeline.reshard  # noqa: F401


if __name__ == "__main__":
    _imports()
    sys.argv = _serve(sys.argv[1])
    from reshard.cli.start import main

    main()
