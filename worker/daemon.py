"""A process that outlives the command that starts it, and is found again by the lock that it holds.

The lock belongs to an open file that the process inherits, and the system frees it when the last holder ends, however
that happens. So a pid that was given to somebody else in the meantime is never taken for ours.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from reshard.pipeline.errors import BadSetting, NotStarted
from reshard.pipeline.stores.locks import FileLock

POLL = 0.02  # seconds between two checks of a process that starts or stops
LOG_TAIL = 400  # bytes of a log that an error shows


def make_folder(folder: Path, setting: str = "RESHARD_DATA_DIR") -> None:
    """A folder of this user for what a service keeps; raises BadSetting, which names the ``setting`` that it is of."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        why = f"cannot create it: {error.strerror}"
        raise BadSetting(name=setting, value=folder, why=why) from error


def _of_another_user(folder: Path) -> BadSetting:
    return BadSetting(name="RESHARD_DATA_DIR", value=folder, why="owned by another user")


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Inside, no other process is in here for the data ``folder``, which exists then; raises BadSetting."""
    make_folder(folder)
    try:
        lock = FileLock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
    except PermissionError:
        raise _of_another_user(folder) from None
    with closing(lock):
        lock.take(fcntl.LOCK_EX)
        yield


class Daemon:
    """One process by its name: ``<name>.lock`` in a data folder has its facts, ``<name>.log`` its output."""

    def __init__(self, folder: Path, name: str, logs: Path | None = None) -> None:
        self.name = name
        self.log = (logs or folder) / f"{name}.log"
        self._lock = folder / f"{name}.lock"

    def facts(self) -> dict[str, Any] | None:
        """What was noted when it was last started, alive or not; at least its pid."""
        try:
            return dict(json.loads(self._lock.read_text()))
        except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
            return None

    def running(self) -> dict[str, Any] | None:
        """Its facts if it is alive; raises BadSetting where this user has no access."""
        try:
            file = os.open(self._lock, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError:
            raise _of_another_user(self._lock.parent) from None
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            return self.facts()
        finally:
            os.close(file)

    def start(
        self,
        command: Sequence[str],
        facts: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        ready: Callable[[], bool] = lambda: True,
        timeout: float = 30.0,
    ) -> dict[str, Any]:
        """Start it unless it runs, and wait until it is ``ready``; returns its facts. Raises NotStarted, BadSetting.

        ``facts`` are JSON-able and kept in a file that only this user can read.
        """
        make_folder(self._lock.parent)
        make_folder(self.log.parent, "XDG_STATE_HOME")
        file = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if (running := self.running()) is not None:
                    return running
                fcntl.flock(file, fcntl.LOCK_EX)  # `running` holds it for a moment only
            with self.log.open("ab") as log:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    env={**os.environ, **(env or {})}, cwd="/", start_new_session=True, pass_fds=(file,),
                )  # fmt: skip
            noted = {**(facts or {}), "pid": process.pid}
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(noted).encode(), 0)
        finally:
            os.close(file)
        if not _wait_until(lambda: self._check(ready, process), timeout):
            raise NotStarted(what=self.name, why=f"not ready after {timeout:.0f} s", log=str(self.log))
        return noted

    def stop(self, timeout: float) -> bool:
        """Ask it to end, wait until it and its children have, by force after ``timeout`` seconds; False if none ran."""
        running = self.running()
        if running is None:
            return False
        for end, number in ((os.kill, signal.SIGTERM), (os.killpg, signal.SIGKILL)):
            with suppress(ProcessLookupError):
                end(running["pid"], number)
            if _wait_until(lambda: self.running() is None, timeout):
                break
        return True

    def _check(self, ready: Callable[[], bool], process: subprocess.Popen[bytes]) -> bool:
        """Whether it is ready; raises NotStarted when it ended before."""
        if ready():
            return True
        if (status := process.poll()) is not None:
            with self.log.open("rb") as log:
                log.seek(max(0, self.log.stat().st_size - LOG_TAIL))
                last_line = log.read().decode(errors="replace").strip().rpartition("\n")[2]
            raise NotStarted(what=self.name, why=f"it exited with {status}: {last_line}", log=str(self.log))
        return False


def _wait_until(done: Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL)
    return True
