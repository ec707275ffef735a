"""Real processes of the service for tests: a broker, workers and control, each in its own session, killed for real.

    with Broker(folder) as broker, Machine(folder, broker.url, RESHARD_ALLOWED_FOLDERS="/tmp") as machine:
        machine.control()
        worker = machine.worker(concurrency=2)
        ...
        worker.kill()

Everything that a ``with`` started is killed at its end, and what it said lies in ``<folder>/<name>.log``.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import redis

from reshard.worker.broker import CONFIG, HOST, answers, find_server
from reshard.worker.local import control_command, worker_command
from reshard.worker.queue.jobs import JobStore, open_redis
from tests.support.stuck import STUCK
from tests.support.warm import Forked, warm

T = TypeVar("T")

POLL = 0.02  # seconds


def wait_for(check: Callable[[], T], what: str, timeout: float = STUCK) -> T:
    """The first true value of ``check``; fails the test with ``what`` did not happen."""
    deadline = time.monotonic() + timeout
    while not (value := check()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {timeout:.0f} s")
        time.sleep(POLL)
    return value


class Proc:
    """One subprocess and everything that it started, in a session of its own."""

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], folder: Path, *, cold: bool = True
    ) -> None:
        """One that is not ``cold`` is forked, where it can be."""
        self.name = name
        self.log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | Forked
        with self.log.open("ab") as output, open(os.devnull, "rb") as nothing:  # noqa: PTH123 -- no path
            if not cold and warm().takes(command, env):
                fds = nothing.fileno(), output.fileno(), output.fileno()
                self._process = warm().start(command, env, folder, *fds, session=True)
            else:
                self._process = subprocess.Popen(
                    command, env=env, cwd=folder, stdin=nothing, stdout=output, stderr=output, start_new_session=True
                )
        self.pid = self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL to all of it at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def signal_all(self, number: signal.Signals) -> None:
        """To each of its processes, as to a machine that hangs or comes back."""
        os.killpg(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM to its main process, as a process manager does."""
        self._process.terminate()

    def wait(self, timeout: float) -> int:
        """Its exit code."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {timeout:.0f} s:\n{self.said()[-3000:]}") from None

    def children(self) -> list[int]:
        """The pids of its direct children."""
        found = []
        for tid in Path(f"/proc/{self.pid}/task").iterdir():
            found += [int(pid) for pid in (tid / "children").read_text().split()]
        return found

    def said(self) -> str:
        return self.log.read_text(errors="replace")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class Broker:
    """A Redis on disk, with a port and a password that survive its restart."""

    def __init__(self, folder: Path, server: Path | None = None, arguments: Sequence[str] = ()) -> None:
        """``server`` is the program; without one, what the service itself would start. It gets more ``arguments``."""
        self._arguments = arguments
        self._server = server or find_server()
        self._folder = folder / "broker"
        self._folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        password = secrets.token_hex(8)
        self._config = self._folder / "server.conf"
        self._config.write_text(CONFIG.format(host=HOST, port=port, password=password, folder=self._folder))
        self.url = f"redis://:{password}@{HOST}:{port}/0"
        self._process: Proc | None = None

    def start(self) -> None:
        self._process = Proc(
            "server", [str(self._server), str(self._config), *self._arguments], os.environ, self._folder
        )
        wait_for(lambda: answers(self.url), "the broker's first answer")

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()

    def alive(self) -> bool:
        return self._process is not None and self._process.alive()

    def pause(self) -> None:
        """It hangs: connections stand and nothing is answered."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def client(self) -> redis.Redis:
        return open_redis(self.url)

    def __enter__(self) -> Broker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@contextmanager
def busy(client: redis.Redis, *, cut: bool = False) -> Iterator[None]:
    """Inside, a script that would run for minutes holds the client's server up, which answers all others with BUSY.

    With ``cut`` their connections are cut as it begins, so that each has to come back to a busy server: one that waits
    in a blocking command hears nothing as long as the script runs.
    """

    def answers_so() -> bool:
        try:
            return not client.ping()
        except redis.ResponseError as error:
            return "busy" in str(error)

    usual = client.config_get("lua-time-limit")["lua-time-limit"]  # ms
    line = client.connection_pool.get_connection()
    # In one transaction, so that nobody comes in between, and no other script ever meets the low limit: on a busy
    # machine many take a millisecond.
    steps: list[tuple[Any, ...]] = [
        ("MULTI",),
        *[("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")] * cut,
        ("CONFIG", "SET", "lua-time-limit", 1),
        ("EVAL", "for _ = 1, 1e11 do end", 0),
        ("CONFIG", "SET", "lua-time-limit", usual),
        ("EXEC",),
    ]
    line.send_packed_command(line.pack_commands(steps))
    wait_for(answers_so, "its being busy")
    try:
        yield
    finally:
        client.connection_pool.disconnect(inuse_connections=False)  # an old one would ask with a PING, and hear BUSY
        client.script_kill()
        for _ in steps:
            line.read_response()  # the last one lists what each came to: also that the script was killed
        client.connection_pool.release(line)


class Machine:
    """One machine with its own home, temporary folder and environment, on which workers and control run."""

    def __init__(self, folder: Path, broker_url: str, *, cold: bool = False, **environment: str) -> None:
        """``cold`` ones start as they do elsewhere: slower, and with their own memory alone."""
        self.folder = folder
        self.tmpdir = folder / "tmp"
        self.tmpdir.mkdir(parents=True, exist_ok=True)
        self._url, self._cold = broker_url, cold
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "RESHARD_"))}
        self.env = inherited | {
            "RESHARD_BROKER_URL": broker_url,
            "RESHARD_DATA_DIR": str(folder / "data"),
            "RESHARD_TMPDIR": str(self.tmpdir),
            "TMPDIR": str(self.tmpdir),
            "HF_HOME": str(folder / "hf"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONUNBUFFERED": "1",
            **environment,
        }
        self.processes: list[Proc] = []

    def worker(self, concurrency: int = 2, **environment: str) -> Proc:
        """A worker that has said that it is there."""
        return self.start("worker", worker_command(concurrency), **environment)

    def control(self, **environment: str) -> Proc:
        """A control process that has said that it is there."""
        return self.start("control", control_command(), **environment)

    def run(self, *arguments: str, timeout: float = 120.0, **environment: str) -> subprocess.CompletedProcess[str]:
        """`reshard ARGUMENTS`, to its end."""
        command = [sys.executable, "-c", "from reshard.cli.main import main; main()", *arguments]
        env = self.env | environment
        if self._cold:
            return subprocess.run(command, env=env, cwd=self.folder, capture_output=True, text=True, timeout=timeout)
        return warm().run(command, env, self.folder, timeout)

    def run_python(self, code: str) -> str:
        """What ``code`` prints in the environment of this machine."""
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=self.env, cwd=self.folder, check=True, capture_output=True, text=True).stdout

    def start(self, kind: str, command: Sequence[str], **environment: str) -> Proc:
        """What ``command`` becomes, once it has said that it is there."""
        process = self.launch(kind, command, **environment)
        self.await_sign_of(process)
        return process

    def launch(self, kind: str, command: Sequence[str], **environment: str) -> Proc:
        """The same, not waited for: several start in the time of one."""
        process = Proc(f"{kind}-{len(self.processes)}", command, self.env | environment, self.folder, cold=self._cold)
        self.processes.append(process)
        return process

    def await_sign_of(self, process: Proc) -> None:
        """It is announced, and has its children: a worker is announced while it still starts them."""
        with JobStore.at(self._url) as store:

            def there() -> bool:
                assert process.alive(), f"{process.name} ended:\n{process.said()[-3000:]}"
                return any(found.pid == process.pid for found in store.processes()) and " ready" in process.said()

            wait_for(there, f"{process.name}'s first sign of life")

    def reload_children(self) -> list[int]:
        """The pids of the warm processes that its workers ask about models; each leads the session of its forks."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended, or is another user's
                home, pid = (folder / "cwd").readlink(), int(folder.name)
                if self.tmpdir in home.parents and os.getsid(pid) == pid:
                    found.append(pid)
        return found

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()


def answer(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as said:
            return said.status, said.read().decode().strip()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode().strip()


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_this_process_at(command: int) -> None:
    """SIGKILL before it sends Redis its ``command``-th command from now on, counted from 0."""
    sent, send = count(), redis.Connection.send_packed_command

    def counted(self: Any, packed: Any, check_health: bool = True) -> None:
        if next(sent) >= command:
            kill_this_process()
        send(self, packed, check_health)

    patch.object(redis.Connection, "send_packed_command", counted).start()


def in_a_process(url: str, work: Callable[[JobStore], None]) -> int:
    """Carry out ``work`` in a child of this process; how that ended, as ``os.waitpid`` says."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with JobStore.at(url) as store:
                work(store)
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]
