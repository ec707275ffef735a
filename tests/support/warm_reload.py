"""Reload children of tests, forked from one process for the whole run that has torch and transformers behind it.

    python -m tests.support.warm_reload SOCKET

A program stands where a `MetaLoader` has Python: it hands its pipe, its environment and its folder to that process,
which forks, and it ends as the fork ends. Either's death is the other's. Where the child is the subject, it is
``cold``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from select import select
from typing import Any, NoReturn

from reshard.pipeline.verifying.child import server
from reshard.pipeline.verifying.meta_load import MetaLoader
from tests.support import warm

PROGRAM = "TESTS_RELOAD"  # in the environment: what stands in for Python
CHILD = ["-P", "-m", "reshard.pipeline.verifying.child.server"]
HOMES = ("HOME", "HF_HOME", "XDG_CACHE_HOME", "TMPDIR")  # each child has its own
OF_ONE = {*HOMES, "PATH"}  # no child starts a program
DEFAULTS: dict[str, Any] = MetaLoader.__init__.__kwdefaults__ or {}

STAND_IN = """\
#!{python} -IS
import json, os, signal, socket, sys
wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    wire.connect({socket!r})
except ConnectionRefusedError:  # that process died: the run ends with an error, and its tests pass until then
    code = "cold"
else:
    socket.send_fds(wire, [json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()], [0, 1, 2])
    code = wire.recv(100).decode()
if code == "cold":
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
if int(code) < 0:
    os.kill(os.getpid(), -int(code))
sys.exit(int(code))
"""


@contextmanager
def reload_children() -> Iterator[None]:
    """The process that is forked from, and in the environment the program that asks it."""
    with tempfile.TemporaryDirectory(prefix="reload-") as folder:
        path, program = Path(folder, "socket"), Path(folder, "python")
        program.write_text(STAND_IN.format(python=sys.executable, socket=str(path)))
        program.chmod(0o700)
        command = [sys.executable, "-m", __name__, str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=warm.ROOT) as process:
            assert process.stdin is not None and process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            os.environ[PROGRAM] = str(program)
            yield
            del os.environ[PROGRAM]
            assert process.poll() is None, "it died before its input ended"
            process.stdin.close()


def stand_in() -> None:
    """Have the children of this process's loaders forked."""
    if program := os.environ.get(PROGRAM):
        DEFAULTS["python"] = program


@contextmanager
def cold() -> Iterator[None]:
    """Children as anyone's: started, and not forked."""
    before, DEFAULTS["python"] = DEFAULTS["python"], sys.executable
    yield
    DEFAULTS["python"] = before


def _serve(path: str) -> Callable[[], object]:
    """Fork for each that asks; returns, in the process that is to be the child, what it does."""
    ours: Mapping[str, str] | None = None  # of whoever asks first: then the imports are made
    for wire in warm.connections(path):
        said, fds, _, _ = socket.recv_fds(wire, warm.MESSAGE_MAX, 3)
        if not said:  # whoever asked was killed
            continue
        arguments, env, cwd = json.loads(said)
        assert arguments == CHILD, arguments
        at_start = {name: value for name, value in env.items() if name not in OF_ONE}
        if ours is None:
            ours = at_start
            os.environ.clear()
            os.environ.update(env | dict.fromkeys(HOMES, os.path.dirname(path)))  # noqa: PTH120 -- as text
            server.operations()
        if at_start != ours:
            with suppress(BrokenPipeError):
                wire.send(b"cold")
        elif os.fork() == 0:
            pid = os.fork()
            if pid == 0:
                os.setsid()
                wire.close()
                warm.become(fds, env, cwd)
                tempfile.tempdir = None
                return server.serve
            _watch(pid, wire)
        for fd in fds:
            os.close(fd)
    raise AssertionError("it ends with its input")


def _watch(pid: int, wire: socket.socket) -> NoReturn:
    """Wait for the child to end, or for whoever asked for it."""
    ended = os.pidfd_open(pid)
    if ended not in select([ended, wire], [], [])[0]:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with suppress(BrokenPipeError):
        wire.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1])()
