"""The child process, kept warm: it has torch and transformers, and forks once per request.

    python -P -m reshard.pipeline.verifying.child.server

Its standard input is a two-way pipe of messages (multiprocessing's ``Connection``). A request is two of them, what it
may use and what to do, and its answer is one, all as JSON; one request at a time. Each is served by a fork under
limits, so what a hostile config does to its process is over when that process is; the warm one only waits. It ends
when the pipe is closed, so it never outlives its parent.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from reshard.pipeline import limits
from reshard.pipeline.figures import human_bytes
from reshard.pipeline.verifying.named import NotChecked

# A check reads headers and answers. A call of one of these was caused by the config.
REFUSED = frozenset((
    "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn", "socket.bind",
    "socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendmsg", "socket.sendto",
    "subprocess.Popen",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Allowed:
    """What one request may use; limits.py has the reasons for the defaults."""

    seconds: float = limits.RELOAD_TIME
    cpu: int = limits.RELOAD_CPU  # seconds of CPU time
    memory: int | None = limits.RELOAD_MEMORY  # bytes of address space beyond the imports; kept on Linux only
    file: int | None = limits.RELOAD_FILE  # bytes of one file
    rss: int | None = None  # bytes held, mapped files not counted; kept on Linux only


def serve() -> None:
    parent = Connection(os.dup(0))
    # Libraries that prompt meet an empty input.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    gc.disable()  # else it looks through all that is imported again and again: a quarter of the time
    try:
        operations()
    except Exception as error:  # noqa: BLE001 - a broken installation fails in any way, and the parent must know how
        _send(parent, {"unavailable": f"{type(error).__name__}: {error}"[:500]})
        return
    # What the imports made is never garbage; collecting over it in a fork would only copy its pages.
    gc.freeze()
    gc.enable()
    _send(parent, {"ready": True})
    with suppress(EOFError, ConnectionResetError):
        while True:
            allowed, request = Allowed(**json.loads(parent.recv_bytes())), parent.recv_bytes()
            # One request's noise must not use up the next one's allowance.
            os.ftruncate(2, 0)
            os.lseek(2, 0, os.SEEK_SET)
            with tempfile.TemporaryDirectory() as scratch:
                answer = _forked(request, Path(scratch), parent, allowed)
            if answer is None:
                return
            _send(parent, answer)


def operations() -> dict[str, Callable[..., dict[str, Any]]]:
    """What can be asked for; the first call imports everything that the forks will need."""
    from reshard.pipeline.verifying.child import devices, load, model, tokenizer

    return {"check": model.check, "devices": devices.devices, "load": load.load, "tokenizers": tokenizer.tokenizers}


def _forked(request: bytes, scratch: Path, parent: Connection, allowed: Allowed) -> dict[str, Any] | None:
    """The answer of a fork to one request; None when the parent is gone."""
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        # A pipe that a fork holds open hides its parent's end from the process at the other side.
        parent.close()
        os.close(here)
        _answer_and_exit(request, scratch, there, allowed)
    os.close(there)
    answer, said = None, bytearray()
    try:
        why = read_answer(here, said, parent, pid, allowed)
    finally:
        os.close(here)
        # Harmless to one that is done; the others must not run on.
        os.kill(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
    if why is None:
        return None
    with suppress(ValueError):  # of one that ended in the middle
        answer = None if why else json.loads(said)
    unit = 1 if sys.platform == "darwin" else 1024
    return {**(answer or _inconclusive(why or _cut_short(status, allowed))), "peak_rss": usage.ru_maxrss * unit}


def read_answer(here: int, said: bytearray, parent: Connection, pid: int, allowed: Allowed) -> str | None:
    """Read what the fork says until it ends, or else say what it used too much of; None when our parent is gone."""
    deadline = time.monotonic() + allowed.seconds
    while (left := deadline - time.monotonic()) > 0:
        ready = wait([here, parent], left if allowed.rss is None else min(left, limits.LOAD_WATCH))
        if here in ready:
            part = os.read(here, limits.CHUNK)
            said += part
            if not part:
                return ""
            if len(said) > limits.RELOAD_ANSWER:
                return f"the reload's output exceeds {limits.RELOAD_ANSWER:,} bytes"
        elif ready:
            return None
        if allowed.rss is not None and _held(pid) > allowed.rss:
            return f"the reload was stopped because it used more than {human_bytes(allowed.rss)} of memory"
    return f"the reload took longer than {allowed.seconds:g} s"


def _held(pid: int) -> int:
    """The bytes of memory that a process holds and that no file stands behind; 0 where the system does not say."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def _cut_short(status: int, allowed: Allowed) -> str:
    """What a fork's end without an answer means."""
    if not os.WIFSIGNALED(status):
        return f"the reload exited with code {os.WEXITSTATUS(status)} and no response"
    number = os.WTERMSIG(status)
    if number == signal.SIGXCPU:
        return f"the reload used up its {allowed.cpu} s of CPU time"
    if number == signal.SIGKILL:
        return "the reload was killed, most likely because the machine ran out of memory"
    if number == signal.SIGBUS:
        return "the reload crashed with SIGBUS, most likely because the disk was full"
    return f"the reload crashed with {signal.Signals(number).name}"


def _answer_and_exit(request: bytes, scratch: Path, there: int, allowed: Allowed) -> NoReturn:
    try:
        limit(allowed)
        question = json.loads(request)
        answer = operations()[question["operation"]](scratch=scratch, **question["arguments"])
    except NotChecked as why:
        answer = {"result": why.result, "reason": str(why), **why.facts}
    except MemoryError:
        most = f"its limit of {human_bytes(allowed.memory)}" if allowed.memory else "there is"
        answer = _inconclusive(f"the reload needs more memory than {most}")
    except RecursionError:
        answer = _inconclusive("the config is nested too deeply for the reload")
    except BaseException as error:  # noqa: BLE001 - the last frame of a fork; it ends here, and says why
        answer = _inconclusive(f"the reload failed: {type(error).__name__}: {error}"[:500])
    with open(there, "wb") as pipe:
        pipe.write(json.dumps(answer).encode())
    os._exit(0)


def limit(allowed: Allowed) -> None:
    """Hold this process to what it may use; there is no way back."""

    def only(kind: int, most: int) -> None:
        resource.setrlimit(kind, (most, most))

    only(resource.RLIMIT_CORE, 0)
    if allowed.file is not None:
        only(resource.RLIMIT_FSIZE, allowed.file)
    # The soft limit names the reason; the hard one is for code that ignores it.
    resource.setrlimit(resource.RLIMIT_CPU, (allowed.cpu, allowed.cpu + 1))
    with suppress(FileNotFoundError):
        if allowed.memory is not None:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            only(resource.RLIMIT_AS, pages * resource.getpagesize() + allowed.memory)
    with suppress(OSError):
        # When memory runs out on the machine, a check is the first thing to do without.
        Path("/proc/self/oom_score_adj").write_text("1000")
    sys.addaudithook(_refuse)


def _refuse(event: str, _: object) -> None:
    if event in REFUSED:
        raise PermissionError(f"the reload is not allowed to use {event}")


def _inconclusive(reason: str) -> dict[str, Any]:
    return {"result": "inconclusive", "reason": reason}


def _send(pipe: Connection, answer: dict[str, Any]) -> None:
    pipe.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    serve()
