"""Our programs in processes of their own, forked from one that has the imports behind it: they are most of their start.

    python -m tests.support.warm SOCKET

What differs between two starts of Python is not forked: ``Warm.takes`` says which commands and environments can be.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from pkgutil import resolve_name
from select import select
from typing import IO, Any

ROOT = Path(__file__).parents[2]
COMMAND = Path(sys.executable).parent / "reshard"
# Read when Python starts, or when what is imported here is.
AT_START = ("PYTHON", "LANG", "LC_", "OTEL_", "PYDANTIC_", "TYPER_", "SSL_")
UNBUFFERED = "PYTHONUNBUFFERED"  # which a fork makes good
MODULES = ("celery", "reshard.worker.control", "reshard.worker.program")  # programs beside the command
IMPORTED = (
    "celery.apps.worker", "celery.bin.celery", "celery.concurrency.prefork", "celery.worker.components",
    "kombu.transport.redis", "reshard.client.queue", "reshard.pipeline.reshard", "reshard.worker.control",
    "reshard.worker.transport",
)  # fmt: skip
MESSAGE_MAX = 1 << 20  # bytes of arguments and environment


class Forked:
    """What Popen is to a process of ours: its pid, and its exit code, negative for a signal."""

    def __init__(self, wire: socket.socket, command: Sequence[str]) -> None:
        self.pid = int(wire.recv(100))
        self._wire, self._command = wire, command
        self._code: int | None = None

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutExpired."""
        if self._code is None:
            if not select([self._wire], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self._command, timeout or 0)
            with self._wire:
                self._code = int(self._wire.recv(100))
        return self._code

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


class Warm:
    """The process that is forked from, started when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "warm"
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def takes(self, command: Sequence[str], env: Mapping[str, str]) -> bool:
        """Whether ``command`` with ``env`` is the same when it is forked."""
        program, *arguments = command
        ours = program == str(COMMAND)
        if program == sys.executable:
            ours = arguments[:1] == ["-c"] or (arguments[:1] == ["-m"] and arguments[1] in MODULES)
        return ours and _at_start(env) == _at_start(os.environ)

    def start(self, command: Sequence[str], env: Mapping[str, str], cwd: Path, *fds: int, session: bool) -> Forked:
        """Begin ``command``, whose input, output and errors are ``fds``, in a ``session`` of its own or in ours."""
        with self._lock:
            if self._process is None:
                self._start()
        wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_MAX)
        wire.connect(str(self._socket))
        socket.send_fds(wire, [json.dumps([list(command), dict(env), str(cwd), session]).encode()], fds)
        return Forked(wire, command)

    def run(
        self, command: Sequence[str], env: Mapping[str, str], cwd: Path, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """``command`` to its end, forked where it can be; raises TimeoutExpired."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            if self.takes(command, env):
                code = self._run(command, env, cwd, out, err, timeout)
            else:
                code = subprocess.run(command, env=env, cwd=cwd, stdout=out, stderr=err, timeout=timeout).returncode
            out.seek(0), err.seek(0)
            return subprocess.CompletedProcess(command, code, out.read(), err.read())

    def _run(
        self, command: Sequence[str], env: Mapping[str, str], cwd: Path, out: IO[str], err: IO[str], timeout: float
    ) -> int:
        """The exit code of ``command``, negative for a signal; raises TimeoutExpired."""
        with open(os.devnull, "rb") as nothing:  # noqa: PTH123 -- no path
            process = self.start(command, env, cwd, nothing.fileno(), out.fileno(), err.fileno(), session=False)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            raise

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()  # it ends with its input
        shutil.rmtree(self._socket.parent)

    def _start(self) -> None:
        command = [sys.executable, "-m", "tests.support.warm", str(self._socket)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"


@cache
def warm() -> Warm:
    """That of this process."""
    one = Warm(Path(tempfile.mkdtemp(prefix="warm-")))
    atexit.register(one.close)
    return one


def _at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(AT_START) and name != UNBUFFERED}


def connections(path: str) -> Iterator[socket.socket]:
    """Those to a socket there, one after the other, until standard input ends; reaps what was forked for them."""
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
                yield wire
    os._exit(0)


def _serve(path: str) -> Callable[[], Any]:
    """Fork for each connection; returns, in the process that is to be the command, what it does."""
    return next(_command(wire) for wire in connections(path) if os.fork() == 0)


def _command(wire: socket.socket) -> Callable[[], Any]:
    asked, fds, _, _ = socket.recv_fds(wire, MESSAGE_MAX, 3)
    (program, *arguments), env, cwd, session = json.loads(asked)
    leads, led = os.pipe()
    pid = os.fork()
    if pid:
        os.close(led)
        os.read(leads, 1)  # it leads its session, so that it can be killed by it
        wire.send(str(pid).encode())
        for fd in fds:
            os.close(fd)
        _, status = os.waitpid(pid, 0)
        with suppress(BrokenPipeError):
            wire.send(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    if session:
        os.setsid()
    os.close(leads), os.close(led)
    wire.close()
    become(fds, env, cwd)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, TextIOWrapper)
        stream.reconfigure(write_through=bool(env.get(UNBUFFERED)))
    return _meant(program, arguments)


def become(fds: Sequence[int], env: Mapping[str, str], cwd: str) -> None:
    """Give this process its input, output and errors, its environment and its folder."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    os.chdir(cwd)


def _meant(program: str, arguments: list[str]) -> Callable[[], Any]:
    """What Python does with such a command, its ``sys.argv`` and path as they are then."""
    if program == str(COMMAND):
        from reshard.cli.start import main

        sys.argv, sys.path[0] = [program, *arguments], str(COMMAND.parent)
        return main
    del sys.modules["opentelemetry"]  # of the command alone
    option, what, *rest = arguments
    sys.argv = [option, *rest]
    if option == "-c":
        sys.path[0] = ""
        return lambda: exec(what, {"__name__": "__main__"})  # noqa: S102 -- as Python does
    sys.path[0] = os.getcwd()  # noqa: PTH109 -- as text
    sys.modules.pop(what, None)  # else it says that it is there already
    return lambda: runpy.run_module(what, run_name="__main__", alter_sys=True)


_code = 1  # with which this process ends, unless it carried out what it is for


def _carry_out(run: Callable[[], Any]) -> None:
    global _code
    try:
        run()
        _code = 0
    except SystemExit as end:
        _code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except BaseException:
        atexit.unregister(_skip_the_rest)
        raise


def _skip_the_rest() -> None:
    """End before Python takes apart what was imported: of a fork it would copy every page."""
    try:
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):  # of which Python tells in its own way
        return
    os._exit(_code)


def _imports() -> None:
    """What the console script does before it imports, and what its commands, workers and control import."""
    sys.modules["opentelemetry"] = None  # type: ignore[assignment]
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from reshard.cli.main import COMMANDS
    from reshard.pipeline.stores import hub_api
    from tests.support import warm_reload

    for listed in COMMANDS.values():
        resolve_name(f"reshard.cli.{listed.home}")
    for name in IMPORTED:
        import_module(name)
    assert "reshard.worker.app" not in sys.modules, "it reads its settings when it is imported"
    assert "huggingface_hub.constants" not in sys.modules, "it reads its environment when it is imported"
    hub_api.trusted()  # reads them, which takes each process 20 ms
    warm_reload.stand_in()
    gc.freeze()  # collecting over them in a fork would copy their pages


if __name__ == "__main__":
    atexit.register(_skip_the_rest)  # the first, and so the last that is called
    _imports()
    _carry_out(_serve(sys.argv[1]))
