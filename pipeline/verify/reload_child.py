"""The reload child: a warm process that has torch and transformers, and forks once per request.

    python -P -m reshard.pipeline.verify.reload_child SECONDS CPU_SECONDS MEMORY_BYTES

One JSON line in is one request, one JSON line out its answer, one at a time. Each request is served by a fork under
limits, so what a hostile config does to its process is over when that process is; the warm one only waits. It ends
when its standard input does, so it never outlives whoever started it.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import selectors
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from reshard.pipeline.limits import RELOAD_FILE

# A check reads headers and answers. Whoever asks Python for one of these was led there by the config.
REFUSED = frozenset(
    {
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "pty.spawn",
        "socket.bind",
        "socket.connect",
        "socket.getaddrinfo",
        "socket.gethostbyname",
        "socket.sendmsg",
        "socket.sendto",
        "subprocess.Popen",
    }
)


@dataclass(frozen=True, slots=True)
class Allowed:
    """What one request may use."""

    seconds: float
    cpu: int  # seconds
    memory: int  # bytes of address space beyond the imports; Linux only, which alone tells and enforces it


def serve(allowed: Allowed) -> None:
    """Answer requests until standard input ends."""
    requests, answers = _take_pipes()
    try:
        _import()
    except Exception as error:  # noqa: BLE001 - a broken installation fails in any way, and the parent must know how
        _write_line(answers, {"unavailable": f"{type(error).__name__}: {error}"[:500]})
        return
    # What the imports made is never garbage; collecting over it in a fork would only copy its pages.
    gc.collect()
    gc.freeze()
    _write_line(answers, {"ready": True})
    lines = _Lines(requests)
    while (line := lines.next()) is not None:
        # One request's noise must not use up the next one's allowance.
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)
        with tempfile.TemporaryDirectory() as scratch:
            answer = _forked(line, Path(scratch), lines, answers, allowed)
        if answer is None:
            return
        _write_line(answers, answer)


def _take_pipes() -> tuple[int, int]:
    """The two pipes for ourselves; libraries that print or prompt meet the log and an empty input instead."""
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def _import() -> None:
    import transformers

    import reshard.pipeline.verify.reload_child_model  # noqa: F401 - here, so that every fork finds it imported

    transformers.utils.logging.disable_progress_bar()


class _Lines:
    """Lines of a pipe, read so that its end is noticed while waiting for something else."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe
        self._unread = bytearray()

    def next(self) -> bytes | None:
        """The next line, or None when the pipe has ended."""
        while not self._unread.endswith(b"\n"):
            if not self.receive():
                return None
        line, self._unread = bytes(self._unread), bytearray()
        return line

    def receive(self) -> bool:
        """Take what there is; False at the end."""
        chunk = os.read(self.pipe, 1 << 16)
        self._unread += chunk
        return bool(chunk)


def _forked(line: bytes, scratch: Path, lines: _Lines, answers: int, allowed: Allowed) -> dict[str, Any] | None:
    """The answer of a fork to one request; None when nobody is left to hear it."""
    heard_here, said_there = os.pipe()
    pid = os.fork()
    if pid == 0:
        # Else our caller would not notice our own end while a fork lives.
        for pipe in (lines.pipe, answers, heard_here):
            os.close(pipe)
        _answer_and_exit(line, scratch, said_there, allowed)
    os.close(said_there)
    try:
        end, said = _listen(heard_here, lines, time.monotonic() + allowed.seconds)
    finally:
        os.close(heard_here)
        # Harmless to one that is done; the others must not run on.
        os.kill(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
    if end == "alone":
        return None
    if end == "late":
        answer = _inconclusive(f"the reload took longer than {allowed.seconds:g} s")
    elif not said.endswith(b"\n"):
        answer = _inconclusive(_cut_short(status, allowed))
    else:
        answer = json.loads(said)
    unit = 1 if sys.platform == "darwin" else 1024
    return {**answer, "peak_rss": usage.ru_maxrss * unit}


def _listen(pipe: int, lines: _Lines, deadline: float) -> tuple[Literal["done", "late", "alone"], bytes]:
    """What the fork said, and whether it ended by itself, was too late, or our own caller has gone."""
    said = bytearray()
    with selectors.DefaultSelector() as ready:
        ready.register(pipe, selectors.EVENT_READ)
        ready.register(lines.pipe, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            for key, _ in ready.select(left):
                if key.fd == pipe:
                    chunk = os.read(pipe, 1 << 16)
                    said += chunk
                    if not chunk:
                        return "done", bytes(said)
                elif not lines.receive():
                    return "alone", b""
    return "late", b""


def _cut_short(status: int, allowed: Allowed) -> str:
    """What a fork's end without an answer means."""
    if not os.WIFSIGNALED(status):
        return f"the reload ended with code {os.WEXITSTATUS(status)} and no answer"
    number = os.WTERMSIG(status)
    if number == signal.SIGXCPU:
        return f"the reload used up its {allowed.cpu} s of processor time"
    if number == signal.SIGKILL:
        return "the reload was killed, most likely because the machine ran out of memory"
    return f"the reload crashed with {signal.Signals(number).name}"


# ------------------------------------------------------------------------------------------------------- in the fork


def _answer_and_exit(line: bytes, scratch: Path, said_there: int, allowed: Allowed) -> NoReturn:
    try:
        _limit(allowed)
        answer = _answer(line, scratch)
    except MemoryError:
        answer = _inconclusive(f"the reload needs more than the {allowed.memory} bytes of memory that it may use")
    except RecursionError:
        answer = _inconclusive("the config nests deeper than the reload can follow")
    except BaseException as error:  # noqa: BLE001 - the last frame of a fork; it ends here, and says why
        answer = _inconclusive(f"the reload failed: {type(error).__name__}: {error}"[:500])
    _write_line(said_there, answer)
    os._exit(0)


def _answer(line: bytes, scratch: Path) -> dict[str, Any]:
    from reshard.pipeline.verify.reload_child_model import check

    request = json.loads(line)
    return check(request["config"], request["source"], request["output"], scratch)


def _limit(allowed: Allowed) -> None:
    def only(kind: int, most: int) -> None:
        resource.setrlimit(kind, (most, most))

    only(resource.RLIMIT_CORE, 0)
    only(resource.RLIMIT_FSIZE, RELOAD_FILE)
    # The soft limit names the reason; the hard one is for code that ignores it.
    resource.setrlimit(resource.RLIMIT_CPU, (allowed.cpu, allowed.cpu + 1))
    with suppress(FileNotFoundError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        only(resource.RLIMIT_AS, pages * resource.getpagesize() + allowed.memory)
    with suppress(OSError):
        # When memory runs out on the machine, a check is the first thing to do without.
        Path("/proc/self/oom_score_adj").write_text("1000")
    sys.addaudithook(_refuse)


def _refuse(event: str, _: object) -> None:
    if event in REFUSED:
        raise PermissionError(f"the reload may not use {event}")


def _inconclusive(reason: str) -> dict[str, Any]:
    return {"level": "structural", "result": "inconclusive", "reason": reason}


def _write_line(pipe: int, answer: dict[str, Any]) -> None:
    unsent = memoryview(json.dumps(answer).encode() + b"\n")
    while unsent:
        unsent = unsent[os.write(pipe, unsent) :]


if __name__ == "__main__":
    serve(Allowed(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
